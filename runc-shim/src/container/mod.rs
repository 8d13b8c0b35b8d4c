//! A container: its state, the streams of its first process, and its execs.

pub mod commands;
pub mod create;
pub mod deadlines;
mod delete;
mod discard;
mod kill;
mod oom;
pub mod pending_start;
mod process_exit;
mod start;
pub mod state;

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::Deserialize;

use self::state::State;
use crate::cgroup::Cgroup;
use crate::error::{Context as _, Error};
use crate::exec::Exec;
use crate::exits;
use crate::io::Owner;
use crate::io::process_streams::ProcessStreams;
use crate::runtime::Runtime;
use crate::ttrpc::request::Request;
use crate::ttrpc::server::Reply;

/// A container.
#[derive(Debug)]
pub struct Container {
    /// The bundle directory, which containerd makes and removes.
    pub bundle: PathBuf,
    /// The runtime and its options.
    pub runtime: Runtime,
    /// The owner of the pipes.
    pub owner: Owner,
    /// The state.
    pub state: State,
    /// The first process.
    pub process: ProcessStreams,
    /// The execs by their ids.
    pub execs: BTreeMap<String, Exec>,
    /// Where this shim has mounted the root file system.
    pub rootfs: Option<PathBuf>,
    /// The container has its own PID namespace, so that the kernel kills all of its processes when
    /// the first one exits.
    pub own_pid_namespace: bool,
    /// The runtime must not use pivot_root(2).
    pub no_pivot_root: bool,
    /// The runtime must not create a session keyring.
    pub no_new_keyring: bool,
    /// Arguments that restore the container from a checkpoint; empty: it is created.
    pub restore: Vec<String>,
    /// The `cgroupsPath` of the config; empty if it has none.
    pub cgroups_path: String,
    /// The cgroup.
    pub cgroup: Option<Cgroup>,
    /// The command that creates or restores the container was killed, so that it may have left a
    /// cgroup that the runtime does not know, with processes.
    pub may_have_left_cgroup: bool,
    /// Calls queued while a command, a helper, the start of a logging program or the drain of the
    /// last output is pending for the container; `None`: nothing is pending.
    pub busy: Option<VecDeque<(Reply, Request)>>,
    /// The first process has exited, and a command kills the remaining processes.
    pub killing_remaining: bool,
    /// The Delete that waits for the last output, and its deadline.
    pub drain: Option<(Reply, Instant)>,
    /// The next attempt to remove the leftovers of a failed creation.
    pub retry: Option<Retry>,
}

/// The next attempt to remove the leftovers of a container.
#[derive(Debug, Clone, Copy)]
pub struct Retry {
    /// When it is made.
    pub at: Instant,
    /// How long the shim waits before it.
    pub wait: Duration,
}

impl Container {
    /// Opens the bundle directory.
    pub fn open_bundle(&self) -> Result<OwnedFd, Error> {
        let opened = File::open(&self.bundle);
        opened.map(Into::into).context(format_args!("open {}", self.bundle.display()))
    }

    /// Whether an exec is being started or runs, so that the container's exit is not announced yet.
    pub fn has_live_execs(&self) -> bool {
        self.execs.values().any(|exec| exec.state.is_live())
    }
}

/// The fields of a container's `config.json` that the shim uses.
#[derive(Debug, Deserialize)]
struct Config {
    linux: Option<Linux>,
}

#[derive(Debug, Deserialize)]
struct Linux {
    #[serde(default)]
    namespaces: Vec<Namespace>,
    #[serde(default, rename = "cgroupsPath")]
    cgroups_path: String,
}

#[derive(Debug, Deserialize)]
struct Namespace {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    path: String,
}

fn config(bundle: &Path) -> Option<Linux> {
    let config = std::fs::read(bundle.join("config.json")).ok();
    linux_of(&config?)
}

fn linux_of(text: &[u8]) -> Option<Linux> {
    serde_json::from_slice::<Config>(text).ok()?.linux
}

/// Whether the container of a bundle gets its own PID namespace. False if `config.json` cannot be
/// read: the runtime then kills all processes one by one.
pub fn has_own_pid_namespace(bundle: &Path) -> bool {
    config(bundle).is_some_and(|linux| linux.has_own_pid_namespace())
}

impl Linux {
    fn has_own_pid_namespace(&self) -> bool {
        self.namespaces.iter().any(|one| one.kind == "pid" && one.path.is_empty())
    }
}

/// What the shim reads from a `config.json`, for `fuzz/`.
#[cfg(feature = "fuzzing")]
pub fn fuzzed_config(text: &[u8]) -> (bool, String) {
    linux_of(text)
        .map(|linux| (linux.has_own_pid_namespace(), linux.cgroups_path))
        .unwrap_or_default()
}

/// The `cgroupsPath` of the config in a bundle; empty if it has none.
pub fn cgroups_path(bundle: &Path) -> String {
    config(bundle).map(|linux| linux.cgroups_path).unwrap_or_default()
}

/// The cgroup that a bundle asks for, if its last path element is the container's id, so that it
/// cannot be the cgroup of another container.
pub fn cgroup_of(bundle: &Path, id: &str) -> Option<Cgroup> {
    Cgroup::named(&config(bundle)?.cgroups_path, id)
}

/// The cgroup of the container whose first process has this pid: as the kernel reports it, or else
/// as the bundle asks for it. For a process that has exited, version 1 reports the root cgroup.
pub fn cgroup_with(bundle: &Path, id: &str, pid: i32) -> Option<Cgroup> {
    let seen = Cgroup::of_process(pid).filter(|_| exits::exit_of_child(pid).is_none());
    seen.or_else(|| cgroup_of(bundle, id))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cgroup_of_an_exited_process_is_taken_from_the_bundle() {
        let dir = tempfile::tempdir().unwrap();
        let config = r#"{"linux":{"cgroupsPath":"/x/id"}}"#;
        std::fs::write(dir.path().join("config.json"), config).unwrap();
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        while exits::exit_of_child(pid).is_none() {
            std::thread::yield_now();
        }
        let wanted = Cgroup::named("/x/id", "id");
        assert!(wanted.is_some());
        assert_eq!(cgroup_with(dir.path(), "id", pid), wanted);
        child.wait().unwrap();
    }

    #[test]
    fn only_a_new_pid_namespace_counts_as_own() {
        let dir = tempfile::tempdir().unwrap();
        let has = |config: &str| {
            std::fs::write(dir.path().join("config.json"), config).unwrap();
            has_own_pid_namespace(dir.path())
        };
        assert!(has(r#"{"linux":{"namespaces":[{"type":"mount"},{"type":"pid"}]}}"#));
        assert!(!has(r#"{"linux":{"namespaces":[{"type":"pid","path":"/proc/1/ns/pid"}]}}"#));
        for without in [r#"{"linux":{"namespaces":[]}}"#, r#"{"linux":{}}"#, "{}", "rubbish"] {
            assert!(!has(without), "{without}");
        }
        assert!(!has_own_pid_namespace(&dir.path().join("none")));
    }
}
