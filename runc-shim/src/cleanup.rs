//! The `delete` of a shim's command line: removes what a container of a dead shim has left.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use containerd_shim_protos::api::DeleteResponse;
use protobuf::{Message as _, MessageField};
use rustix::process::{Pid, WaitOptions};
use serde::Deserialize;

use crate::error::{Context as _, Error};
use crate::exits::Exit;
use crate::runtime::{self, Place, Runtime};
use crate::{Arguments, container, idmap, log, mounts, options, task};

/// How long commands of the runtime are waited for, and how long at once.
const LAST_COMMAND: Duration = Duration::from_secs(5);
const COMMAND_WAIT: Duration = Duration::from_millis(10);

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
    wait_for_commands(&runtime.root, &arguments.id);
    // A container that the runtime does not know is deleted.
    if runtime.knows(&arguments.id)
        && let Err(e) = run(&runtime, &arguments.id, &bundle)
    {
        log::error(format_args!("container {}: {e}", arguments.id));
    }
    // A runtime that was killed has left a cgroup that it does not know.
    if let Some(cgroup) = container::cgroup_of(&bundle, &arguments.id)
        && let Err(e) = cgroup.remove()
    {
        log::error(format_args!("container {}: remove cgroup: {e}", arguments.id));
    }
    mounts::unmount_all(&bundle.join("rootfs"))?;
    mounts::unmount_all(&bundle.join(idmap::IDMAPPED))?;
    let exit = Exit::now(137);
    let mut response = DeleteResponse::new();
    response.exit_status = exit.status;
    response.exited_at = MessageField::some(exit.at());
    let pid = runtime::read_pid(&bundle.join("init.pid")).ok();
    response.pid = pid.and_then(|pid| u32::try_from(pid).ok()).unwrap_or(0);
    std::io::stdout().write_all(&response.write_to_bytes()?).context("write answer")
}

/// Waits for commands of the runtime that have died with the shim: one that is in a system call
/// ends after it, and that may be what makes a cgroup. Any process may look like one, and is waited
/// for in vain.
fn wait_for_commands(root: &str, id: &str) {
    let until = Instant::now() + LAST_COMMAND;
    while Instant::now() < until && has_command(root, id) {
        std::thread::sleep(COMMAND_WAIT);
    }
}

fn has_command(root: &str, id: &str) -> bool {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.into_iter().any(|entry| {
        // One that has ended has none.
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let has =
            |wanted: &str| line.split(|byte| *byte == 0).any(|word| word == wanted.as_bytes());
        has("--root") && has(root) && has(id)
    })
}

fn run(runtime: &Runtime, id: &str, bundle: &Path) -> Result<(), Error> {
    let mut command = runtime.start(&["delete", "--force", id], &Place::default())?;
    let pid = Pid::from_raw(command.pid);
    loop {
        match rustix::process::waitpid(pid, WaitOptions::empty()) {
            Err(rustix::io::Errno::INTR) => {}
            Ok(Some((_, status))) if status.exit_status() == Some(0) => return Ok(()),
            Ok(_) => return Err(command.failure("failed to delete task", 1, bundle)),
            Err(e) => return Err(e.into()),
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
