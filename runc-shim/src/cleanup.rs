//! The command `delete` of the shim: removes the leftovers of a container of a dead shim.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use process_identity::{device_and_inode, works_in};
use protobuf::Message as _;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::arguments::Arguments;
use crate::container::config::Config;
use crate::error::{Code, Context as _, Error};
use crate::exits::{self, Exit};
use crate::log;
use crate::process_key;
use crate::root::helper::{self, Action};
use crate::root::mounts;
use crate::runtime::command::Command;
use crate::runtime::options::BundleOptions;
use crate::runtime::{self, Place, Runtime};
use crate::start::socket;
use crate::sys;
use crate::ttrpc::response;

/// Time limit for killing commands of the runtime, and the delay between two searches for them.
/// Commands are killed and the mounts undone within the 5 s that containerd allows for `delete`
/// (`io.containerd.timeout.shim.cleanup`); everything is done within the daemon's 10 s.
const COMMANDS_TIMEOUT: Duration = Duration::from_secs(2);
const COMMANDS_POLL: Duration = Duration::from_millis(10);

/// Time limit for the helper that unmounts.
const UNMOUNT_TIMEOUT: Duration = Duration::from_secs(2);

/// Time limit for the runtime to delete a container, because it waits for processes that do not
/// exit. A second attempt begins only within this time, and has the rest of it.
const DELETE_TIMEOUT: Duration = Duration::from_secs(3);

/// In a bundle that the daemon has made for the deletion: a link to containerd's bundle of the
/// container, which the dead shim used. containerd may remove its bundle at any moment.
const CONTAINERD_BUNDLE: &str = "containerd";

/// Kills and deletes the container of the bundle, and writes the response to standard output.
pub fn delete(arguments: &Arguments) -> Result<(), Error> {
    process_key::check_id(&arguments.id)?;
    let bundle = bundle(arguments)?;
    // First, because containerd may remove the bundle while the rest is done.
    let config = Config::read(&bundle);
    let runtime = BundleOptions::read(&bundle).runtime(&arguments.namespace);
    let shim_bundle =
        std::fs::read_link(bundle.join(CONTAINERD_BUNDLE)).unwrap_or_else(|_| bundle.clone());
    end_commands(&runtime, &arguments.id, &shim_bundle);
    let failed = |e: Error| log::error(format_args!("container {}: {e}", arguments.id));
    // Early, because containerd may kill this process before the rest is done. A running container
    // has its own mount of the root file system.
    let unmounted = unmount(arguments, &shim_bundle);
    let until = Instant::now() + DELETE_TIMEOUT;
    // A container that the runtime does not know is deleted already.
    let delete = || match runtime.knows(&arguments.id) {
        true => run(&runtime, &arguments.id, &bundle, until),
        false => Ok(()),
    };
    let first = delete();
    // A runtime that was killed may have left a cgroup of which it has no state.
    let cgroup = config.cgroup(&arguments.id);
    let removed = cgroup.map_or(Ok(()), |cgroup| cgroup.remove().context("remove cgroup"));
    removed.unwrap_or_else(failed);
    // The first attempt may have failed because of the cgroup.
    let again = |e: Error| if Instant::now() < until { delete() } else { Err(e) };
    first.or_else(again).unwrap_or_else(failed);
    // Again, because a program that mounts may have been late.
    let unmounted_again = mounts::unmount_bundle(&shim_bundle);
    // containerd runs this for each container of the group after the death of its server.
    socket::remove_dead(&bundle).unwrap_or_else(failed);
    unmounted.and(unmounted_again)?;
    let pid = runtime::read_pid(&bundle.join("init.pid")).unwrap_or(0);
    let response = response::deleted(response::unsigned(pid), Some(Exit::now(137)));
    std::io::stdout().write_all(&response.write_to_bytes()?).context("write answer")
}

/// Undoes the mounts of a bundle. A helper does it first: the last unmount of a file system may
/// wait for its disk.
fn unmount(arguments: &Arguments, bundle: &Path) -> Result<(), Error> {
    let Arguments { namespace, id, .. } = arguments;
    // No process may be available for a helper.
    if let Ok(helper) = helper::start(Action::Unmount, namespace, id, bundle, None) {
        wait_or_kill(&helper, UNMOUNT_TIMEOUT);
    }
    mounts::unmount_bundle(bundle)
}

/// Waits for a command and reaps it. Kills it after `time` and returns `None`, without waiting for
/// its exit, because it may hang in the kernel.
fn wait_or_kill(command: &Command, time: Duration) -> Option<Exit> {
    let exited = command.wait(Instant::now() + time).ok().flatten();
    if exited.is_none() {
        // Not reaped yet, so the pid cannot have been reused.
        let _ = sys::kill(command.pid, libc::SIGKILL);
    }
    exited
}

/// Kills commands of the runtime that the shim has left, and their children, which the kernel does
/// not kill with the shim, and waits for their exit: a command in a system call exits after it, and
/// that call may create a cgroup.
fn end_commands(runtime: &Runtime, id: &str, bundle: &Path) {
    let until = Instant::now() + COMMANDS_TIMEOUT;
    // The canonical path, as in `/proc`.
    let bundle = &std::fs::canonicalize(bundle).unwrap_or_else(|_| bundle.to_owned());
    while Instant::now() < until {
        let is_command = |pid: &i32| is_command(*pid, runtime, id, bundle);
        let commands: Vec<i32> = exits::pids().filter(is_command).collect();
        if commands.is_empty() {
            return;
        }
        for pid in commands.into_iter().filter_map(Pid::from_raw) {
            let Ok(pidfd) = pidfd_open(pid, PidfdFlags::empty()) else { continue };
            // Checked again with the pidfd open, because the pid may have been reused.
            if is_command(&pid.as_raw_nonzero().get()) {
                let _ = pidfd_send_signal(&pidfd, Signal::KILL);
            }
        }
        std::thread::sleep(COMMANDS_POLL);
    }
}

/// Whether a process is a command of the runtime for the container, or a helper that mounts: its
/// working directory is the bundle, which no process of a container can enter, and it has the
/// arguments.
fn is_command(pid: i32, runtime: &Runtime, id: &str, bundle: &Path) -> bool {
    let is_there = |place| works_in(pid.unsigned_abs(), bundle, place);
    if !device_and_inode(bundle).is_ok_and(is_there) {
        return false;
    }
    // A process that has exited has no arguments.
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let has = |wanted: &str| line.split(|byte| *byte == 0).any(|word| word == wanted.as_bytes());
    // The action is the last word: an id or a namespace may be the same.
    let action = line.split(|byte| *byte == 0).rfind(|word| !word.is_empty());
    let helps = ["-id", id].into_iter().all(has) && action == Some(Action::Mount.word().as_bytes());
    helps || ["--root", &runtime.root, id].into_iter().all(has)
}

fn run(runtime: &Runtime, id: &str, bundle: &Path, until: Instant) -> Result<(), Error> {
    let command = runtime.start(&["delete", "--force", id], &Place::default())?;
    match wait_or_kill(&command, until.saturating_duration_since(Instant::now())) {
        Some(exit) if exit.status == 0 => Ok(()),
        Some(exit) => Err(command.failure("failed to delete task", exit.status, Some(bundle))),
        None => {
            let late =
                format!("the runtime did not delete it within {} s", DELETE_TIMEOUT.as_secs());
            Err(Error::new(Code::DEADLINE_EXCEEDED, late))
        }
    }
}

/// The bundle that the arguments name, or the one beside the working directory.
fn bundle(arguments: &Arguments) -> Result<PathBuf, Error> {
    if !arguments.bundle.is_empty() {
        return Ok(PathBuf::from(&arguments.bundle));
    }
    let here = std::env::current_dir().context("find bundle")?;
    Ok(here.parent().unwrap_or(&here).join(&arguments.id))
}
