//! A container: its state, its process's streams, and what was executed in it.

pub mod state;

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde::Deserialize;

use self::state::State;
use crate::cgroup::Cgroup;
use crate::discard::Retry;
use crate::error::{Context as _, Error};
use crate::exec::Exec;
use crate::exits;
use crate::io::stream::Stream;
use crate::io::{Owner, Stdio};
use crate::runtime::Runtime;
use crate::server::Reply;
use crate::task::Request;

/// A container.
#[derive(Debug)]
pub struct Container {
    /// What containerd keeps of it.
    pub bundle: PathBuf,
    /// How its runtime is called.
    pub runtime: Runtime,
    /// Whose its pipes are.
    pub owner: Owner,
    /// Its state.
    pub state: State,
    /// Its first process.
    pub process: Process,
    /// What was executed in it.
    pub execs: BTreeMap<String, Exec>,
    /// Where this shim has mounted its root file system.
    pub rootfs: Option<PathBuf>,
    /// It has a PID namespace of its own: all of its processes end with the first.
    pub own_pids: bool,
    /// The runtime is not to pivot its root.
    pub no_pivot_root: bool,
    /// The runtime is not to make a session keyring.
    pub no_new_keyring: bool,
    /// Arguments that restore it from a checkpoint.
    pub restore: Vec<String>,
    /// Its cgroup.
    pub cgroup: Option<Cgroup>,
    /// The runtime works on it: the calls that have arrived meanwhile, in their order.
    pub busy: Option<VecDeque<(Reply, Request)>>,
    /// Its process has ended and the runtime kills what it has left.
    pub sweeping: bool,
    /// Its deletion waits for the last output until then.
    pub drain: Option<(Reply, Instant)>,
    /// It could not be created, and what is left of it could not be removed.
    pub retry: Option<Retry>,
}

/// The streams of a process and who waits for its end.
#[derive(Debug, Default)]
pub struct Process {
    /// What containerd has named.
    pub stdio: Stdio,
    /// Its streams that are copied.
    pub streams: Vec<u32>,
    /// Streams that are copied once it is made.
    pub prepared: Vec<Stream>,
    /// Keeps its standard input open.
    pub stdin: Option<OwnedFd>,
    /// Its terminal.
    pub console: Option<OwnedFd>,
    /// The program that takes its output.
    pub logger: Option<i32>,
    /// Calls that wait for its end.
    pub waiters: Vec<Reply>,
}

impl Container {
    /// Its bundle, opened.
    pub fn open_bundle(&self) -> Result<OwnedFd, Error> {
        let opened = File::open(&self.bundle);
        opened.map(Into::into).context(format_args!("open {}", self.bundle.display()))
    }

    /// Whether something that was executed in it keeps its exit from being announced.
    pub fn has_live_execs(&self) -> bool {
        self.execs.values().any(|exec| exec.state.is_live())
    }
}

/// What is looked for in a container's `config.json`.
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

/// Whether the container of a bundle gets a PID namespace of its own. What cannot be read says no:
/// then all processes are killed one by one.
pub fn has_own_pids(bundle: &Path) -> bool {
    config(bundle).is_some_and(|linux| linux.has_own_pids())
}

impl Linux {
    fn has_own_pids(&self) -> bool {
        self.namespaces.iter().any(|one| one.kind == "pid" && one.path.is_empty())
    }
}

/// What is found in a `config.json`.
#[cfg(feature = "fuzzing")]
pub fn fuzzed_config(text: &[u8]) -> (bool, String) {
    linux_of(text).map(|linux| (linux.has_own_pids(), linux.cgroups_path)).unwrap_or_default()
}

/// The cgroup that a bundle asks for, if its name is the container's: no other container's is
/// meant then.
pub fn cgroup_of(bundle: &Path, id: &str) -> Option<Cgroup> {
    Cgroup::named(&config(bundle)?.cgroups_path, id)
}

/// The cgroup of a container whose first process this is: what the kernel says, or else what the
/// bundle asks for. Of a process that has ended version 1 says the root.
pub fn cgroup_with(bundle: &Path, id: &str, pid: i32) -> Option<Cgroup> {
    let seen = Cgroup::of(pid).filter(|_| exits::ended_one(pid).is_none());
    seen.or_else(|| cgroup_of(bundle, id))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_has_ended_does_not_tell_its_cgroup() {
        let dir = tempfile::tempdir().unwrap();
        let config = r#"{"linux":{"cgroupsPath":"/x/id"}}"#;
        std::fs::write(dir.path().join("config.json"), config).unwrap();
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        while exits::ended_one(pid).is_none() {
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
            has_own_pids(dir.path())
        };
        assert!(has(r#"{"linux":{"namespaces":[{"type":"mount"},{"type":"pid"}]}}"#));
        assert!(!has(r#"{"linux":{"namespaces":[{"type":"pid","path":"/proc/1/ns/pid"}]}}"#));
        for without in [r#"{"linux":{"namespaces":[]}}"#, r#"{"linux":{}}"#, "{}", "rubbish"] {
            assert!(!has(without), "{without}");
        }
        assert!(!has_own_pids(&dir.path().join("none")));
    }
}
