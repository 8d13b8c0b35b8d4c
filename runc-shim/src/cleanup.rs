//! The `delete` of a shim's command line: removes what a container of a dead shim has left.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use containerd_shim_protos::api::DeleteResponse;
use protobuf::{Message as _, MessageField};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{AtFlags, CWD, StatxFlags};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::Deserialize;

use crate::error::{Code, Context as _, Error};
use crate::exits::{self, Exit};
use crate::helper::{self, Action, Work};
use crate::runtime::{self, Place, Runtime};
use crate::{Arguments, container, log, mounts, options, task};

/// How long commands of the runtime are waited for, and how long at once. Commands are ended, and
/// the mounts undone, within the 5 s that containerd allows for `delete`
/// (`io.containerd.timeout.shim.cleanup`); everything is done within the daemon's 10 s.
const LAST_COMMAND: Duration = Duration::from_secs(2);
const COMMAND_WAIT: Duration = Duration::from_millis(10);

/// How long file systems may take to be unmounted.
const LAST_UNMOUNT: Duration = Duration::from_secs(2);

/// How long the runtime may take to delete a container: it waits for processes that do not end. A
/// second attempt begins only within this time, and has what is left of it.
const LAST_DELETE: Duration = Duration::from_secs(3);

/// In a bundle that the daemon has made for the deletion: a link to containerd's bundle of the
/// container, in which the dead shim worked. containerd removes that at any moment.
const CONTAINERDS: &str = "containerd";

/// The options of a bundle, as [`crate::options::write`] writes them.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Known {
    binary_name: String,
    root: String,
    systemd_cgroup: bool,
}

/// Kills and deletes the container of the bundle, and says so on standard output.
pub fn delete(arguments: &Arguments) -> Result<(), Error> {
    task::check_id(&arguments.id)?;
    let bundle = bundle(arguments)?;
    let text = std::fs::read(bundle.join("options.json")).unwrap_or_default();
    let known: Known = serde_json::from_slice(&text).unwrap_or_default();
    let named = std::fs::read_to_string(bundle.join("runtime")).unwrap_or_default();
    let runtime = Runtime {
        binary: if named.is_empty() { known.binary_name } else { named },
        root: options::root_of(&known.root, &arguments.namespace),
        systemd_cgroup: known.systemd_cgroup,
    };
    let worked = std::fs::read_link(bundle.join(CONTAINERDS)).unwrap_or_else(|_| bundle.clone());
    end_commands(&runtime, &arguments.id, &worked);
    let failed = |e: Error| log::error(format_args!("container {}: {e}", arguments.id));
    // First, as the rest may be cut off. A container that runs has its own mount of it.
    let unmounted = unmount(arguments, &worked);
    let until = Instant::now() + LAST_DELETE;
    // A container that the runtime does not know is deleted.
    let delete = || match runtime.knows(&arguments.id) {
        true => run(&runtime, &arguments.id, &bundle, until),
        false => Ok(()),
    };
    let first = delete();
    // A runtime that was killed has left a cgroup that it does not know.
    let cgroup = container::cgroup_of(&bundle, &arguments.id);
    let removed = cgroup.map_or(Ok(()), |cgroup| cgroup.remove().context("remove cgroup"));
    removed.unwrap_or_else(failed);
    // It may have failed because of the cgroup.
    let again = |e: Error| if Instant::now() < until { delete() } else { Err(e) };
    first.or_else(again).unwrap_or_else(failed);
    unmounted?;
    let exit = Exit::now(137);
    let mut response = DeleteResponse::new();
    response.exit_status = exit.status;
    response.exited_at = MessageField::some(exit.at());
    let pid = runtime::read_pid(&bundle.join("init.pid")).ok();
    response.pid = pid.and_then(|pid| u32::try_from(pid).ok()).unwrap_or(0);
    std::io::stdout().write_all(&response.write_to_bytes()?).context("write answer")
}

/// Undoes the mounts of a bundle. A file system that does not answer in time, or that another
/// process uses, is detached.
fn unmount(arguments: &Arguments, bundle: &Path) -> Result<(), Error> {
    let action = Action::Unmount;
    let (namespace, id) = (arguments.namespace.as_str(), arguments.id.as_str());
    let unmounted = match helper::start(&Work { action, namespace, id, bundle, given: None }) {
        Ok(mut command) => match ended_within(command.pid, LAST_UNMOUNT) {
            Some(exit) if exit.status != 0 => {
                Err(command.failure("failed rootfs umount", exit.status, bundle))
            }
            _ => Ok(()),
        },
        // There may be no process left to have.
        Err(_) => mounts::unmount_bundle(bundle),
    };
    unmounted.unwrap_or_else(|e| log::error(format_args!("container {id}: {e}")));
    mounts::detach_bundle(bundle)
}

/// How a child has ended, if it has in time. Else it is killed, and not waited for: the kernel may
/// not let it end.
fn ended_within(pid: i32, time: Duration) -> Option<Exit> {
    let until = Instant::now() + time;
    let held = Pid::from_raw(pid).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok())?;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let mut fds = [PollFd::new(&held, PollFlags::IN)];
        let timeout = Timespec::try_from(left).ok();
        match rustix::event::poll(&mut fds, timeout.as_ref()) {
            Err(rustix::io::Errno::INTR) => {}
            Ok(1..) => break,
            _ => {
                let _ = pidfd_send_signal(&held, Signal::KILL);
                return None;
            }
        }
    }
    let exit = exits::ended_one(pid);
    exits::reap(pid);
    exit
}

/// Ends commands of the runtime that the shim has left, and their children, which do not die with
/// it, and waits for their end: one that is in a system call ends after that, which may be what
/// makes a cgroup.
fn end_commands(runtime: &Runtime, id: &str, bundle: &Path) {
    let until = Instant::now() + LAST_COMMAND;
    // As `/proc` names it.
    let bundle = &std::fs::canonicalize(bundle).unwrap_or_else(|_| bundle.to_owned());
    while Instant::now() < until {
        let commands = commands(runtime, id, bundle);
        if commands.is_empty() {
            return;
        }
        for pid in commands.into_iter().filter_map(Pid::from_raw) {
            let Ok(held) = pidfd_open(pid, PidfdFlags::empty()) else { continue };
            // The number may be another's since it was found.
            if is_command(pid.as_raw_nonzero().get(), runtime, id, bundle) {
                let _ = pidfd_send_signal(&held, Signal::KILL);
            }
        }
        std::thread::sleep(COMMAND_WAIT);
    }
}

fn commands(runtime: &Runtime, id: &str, bundle: &Path) -> Vec<i32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|pid| is_command(*pid, runtime, id, bundle)).collect()
}

/// Whether this is a command of the runtime for the container: it works in the bundle, which no
/// process of a container can enter, and has the arguments.
fn is_command(pid: i32, runtime: &Runtime, id: &str, bundle: &Path) -> bool {
    let file = |name: &str| PathBuf::from(format!("/proc/{pid}/{name}"));
    // The name first, and what the kernel knows: no file system of another process, which may not
    // answer, is asked.
    let works = std::fs::read_link(file("cwd")).ok();
    if works.as_deref().and_then(Path::file_name) != bundle.file_name() {
        return false;
    }
    let (works, bundle) = (place(&file("cwd")), place(bundle));
    if works.is_none() || works != bundle {
        return false;
    }
    // One that has ended has no arguments.
    let line = std::fs::read(file("cmdline")).unwrap_or_default();
    let has = |wanted: &str| line.split(|byte| *byte == 0).any(|word| word == wanted.as_bytes());
    // A helper of the shim that mounts is one too.
    let helps = ["-id", id, Action::Mount.word()].into_iter().all(has);
    helps || ["--root", &runtime.root, id].into_iter().all(has)
}

/// The device and the inode of a file, as the kernel has them.
fn place(path: &Path) -> Option<(u32, u32, u64)> {
    let about = rustix::fs::statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::INO).ok()?;
    Some((about.stx_dev_major, about.stx_dev_minor, about.stx_ino))
}

fn run(runtime: &Runtime, id: &str, bundle: &Path, until: Instant) -> Result<(), Error> {
    let mut command = runtime.start(&["delete", "--force", id], &Place::default())?;
    match ended_within(command.pid, until.saturating_duration_since(Instant::now())) {
        Some(exit) if exit.status == 0 => Ok(()),
        Some(exit) => Err(command.failure("failed to delete task", exit.status, bundle)),
        None => {
            let late = format!("the runtime does not delete it within {} s", LAST_DELETE.as_secs());
            Err(Error::new(Code::DeadlineExceeded, late))
        }
    }
}

/// The bundle that is named, or the one beside the working directory.
fn bundle(arguments: &Arguments) -> Result<PathBuf, Error> {
    if !arguments.bundle.is_empty() {
        return Ok(PathBuf::from(&arguments.bundle));
    }
    let here = std::env::current_dir().context("find bundle")?;
    Ok(here.parent().unwrap_or(&here).join(&arguments.id))
}
