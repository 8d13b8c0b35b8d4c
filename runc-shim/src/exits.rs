//! Exits of the shim's children: processes that it started, and orphans, because the shim is a
//! subreaper.
//!
//! A SIGCHLD only says that a child has exited. Each exit is read by waitid(2), so that coalesced
//! signals lose none. A child is reaped after its exit was handled, so that its pid cannot be
//! reused before. While the runtime starts a process whose pid is not known yet, the exits of
//! unknown children are kept, because one of them may be of that process.
//!
//! A process that a runtime has started is a child of the shim once the runtime has exited. If no
//! child has the pid that the runtime gives, the process has exited and was reaped.

use std::collections::{BTreeSet, VecDeque};
use std::time::{SystemTime, UNIX_EPOCH};

use process_identity::Stat;
use protobuf::well_known_types::timestamp::Timestamp;
use rustix::process::{Pid, WaitOptions};

use crate::process_key::ProcessKey;
use crate::sys;

/// Maximum number of exits of unknown children that are kept. A container in the node's PID
/// namespace can cause any number of them.
const MAX_UNCLAIMED: usize = 4096;

/// The exit status of a process that has exited with an unknown status, as in containerd.
pub const UNKNOWN: u32 = 255;

/// The exit status of a process that was killed by SIGKILL: 128 plus the signal.
pub const KILLED: u32 = 137;

/// The highest signal (signal(7)).
const LAST_SIGNAL: u32 = 64;

/// The exit of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exit {
    /// The exit status; 128 plus the signal for a process that was killed by a signal.
    pub status: u32,
    /// Seconds since 1970.
    pub seconds: i64,
    /// Nanoseconds in that second.
    pub nanos: i32,
}

impl Exit {
    /// An exit that is observed now.
    pub fn now(status: u32) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            status,
            seconds: i64::try_from(now.as_secs()).unwrap_or(i64::MAX),
            nanos: i32::try_from(now.subsec_nanos()).unwrap_or(0),
        }
    }

    /// Whether a signal killed the process, or its child whose exit status it has passed on, as a
    /// shell does.
    pub fn is_by_signal(&self) -> bool {
        (129..=128 + LAST_SIGNAL).contains(&self.status)
    }

    /// The time at which the exit was observed.
    pub fn at(&self) -> Timestamp {
        let mut at = Timestamp::new();
        (at.seconds, at.nanos) = (self.seconds, self.nanos);
        at
    }
}

/// The kept exits of unknown children.
#[derive(Debug, Default)]
pub struct Exits {
    /// Processes that are being started and whose pid is not known yet.
    starting: BTreeSet<ProcessKey>,
    /// Pids and exits in the order in which they were observed, at most [`MAX_UNCLAIMED`].
    unclaimed: VecDeque<(i32, Exit)>,
}

impl Exits {
    /// Announces that a process is being started whose pid is not known yet.
    pub fn begin_start(&mut self, key: &ProcessKey) {
        self.starting.insert(key.clone());
    }

    /// Keeps the exit of an unknown child while any process is being started.
    pub fn keep(&mut self, pid: i32, exit: Exit) {
        if self.starting.is_empty() {
            return;
        }
        if self.unclaimed.len() >= MAX_UNCLAIMED {
            self.unclaimed.pop_front();
        }
        self.unclaimed.push_back((pid, exit));
    }

    /// Ends the start that [`Exits::begin_start`] announced. `made` is the pid that the runtime has
    /// given; `None`: the start failed. Returns the exit, if the process has exited and was reaped.
    /// Does nothing for a process that is not being started.
    pub fn resolve_start(&mut self, key: &ProcessKey, made: Option<i32>) -> Option<Exit> {
        if !self.starting.remove(key) {
            return None;
        }
        let exit = made.filter(|pid| !is_child(*pid)).map(|pid| {
            // The last one, because the pid may have been reused meanwhile.
            let kept = self.unclaimed.iter().rev().find(|(kept, _)| *kept == pid);
            kept.map_or_else(|| Exit::now(UNKNOWN), |(_, exit)| *exit)
        });
        if self.starting.is_empty() {
            self.unclaimed = VecDeque::new();
        }
        exit
    }
}

/// The pids of all processes of the node; none if `/proc` cannot be read.
pub fn pids() -> impl Iterator<Item = i32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// The content of `/proc/PID/stat`; `None`: there is no such process.
pub fn stat(pid: i32) -> Option<Stat> {
    Stat::of_process(u32::try_from(pid).ok()?).ok()
}

/// The start time of a process, clock ticks after boot; `None`: no such process.
pub fn start_time(pid: i32) -> Option<u64> {
    Some(stat(pid)?.start_time)
}

/// A child that has exited, and its exit. The child is not reaped, so that its pid cannot be reused
/// before [`reap`].
pub fn next_exited() -> Option<(i32, Exit)> {
    sys::ended_child(None).map(|(pid, status)| (pid, Exit::now(status)))
}

/// The exit of this child, if it has exited. The child is not reaped.
pub fn exit_of_child(pid: i32) -> Option<Exit> {
    sys::ended_child(Some(pid)).map(|(_, status)| Exit::now(status))
}

/// Reaps a child that has exited.
pub fn reap(pid: i32) {
    let _ = rustix::process::waitpid(Pid::from_raw(pid), WaitOptions::NOHANG);
}

/// Whether the pid is that of a child that was not reaped yet.
pub fn is_child(pid: i32) -> bool {
    use rustix::process::{WaitId, WaitIdOptions};
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    Pid::from_raw(pid).is_some_and(|pid| rustix::process::waitid(WaitId::Pid(pid), options).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pid that no process has.
    const GONE: i32 = i32::MAX;

    #[test]
    fn a_death_by_a_signal_is_no_other_failure() {
        let by_signal = [0, 1, 127, 128, 129, 137, 192, 193, UNKNOWN]
            .into_iter()
            .filter(|status| Exit::now(*status).is_by_signal());
        assert_eq!(by_signal.collect::<Vec<_>>(), [129, 137, 192]);
    }

    #[test]
    fn an_exit_before_the_pid_is_known_is_found() {
        let mut exits = Exits::default();
        let exit = Exit::now(7);
        let (a, b) = (ProcessKey::new("a", ""), ProcessKey::new("a", "b"));
        exits.keep(GONE, exit);
        assert_eq!(exits.unclaimed.len(), 0, "nothing is being started");
        exits.begin_start(&a);
        exits.begin_start(&b);
        exits.keep(GONE, exit);
        assert_eq!(exits.resolve_start(&a, None), None);
        assert_eq!(exits.resolve_start(&b, Some(GONE)), Some(exit));
        exits.begin_start(&a);
        exits.keep(GONE, exit);
        // The pid of a process that is no child.
        let unknown = exits.resolve_start(&a, Some(1)).map(|exit| exit.status);
        assert_eq!(unknown, Some(UNKNOWN));
        assert_eq!(exits.unclaimed.len(), 0, "kept no longer than needed");
    }

    #[test]
    fn a_start_that_fails_leaves_the_exits_of_others() {
        let mut exits = Exits::default();
        let (runs, fails) = (ProcessKey::new("a", "runs"), ProcessKey::new("b", ""));
        exits.begin_start(&runs);
        exits.keep(GONE, Exit::now(7));
        // The logging program has failed, so that the runtime was not called.
        assert_eq!(exits.resolve_start(&fails, None), None);
        assert_eq!(exits.resolve_start(&runs, Some(GONE)).map(|exit| exit.status), Some(7));
    }

    #[test]
    fn a_process_whose_exit_was_dropped_has_the_unknown_status() {
        let mut exits = Exits::default();
        let key = ProcessKey::new("a", "");
        exits.begin_start(&key);
        exits.keep(GONE, Exit::now(7));
        for pid in 0..10_000 {
            exits.keep(1_000_000_000 + pid, Exit::now(0));
        }
        assert_eq!(exits.unclaimed.len(), MAX_UNCLAIMED);
        assert_eq!(exits.resolve_start(&key, Some(GONE)).map(|exit| exit.status), Some(UNKNOWN));
    }

    #[test]
    fn a_running_process_does_not_get_the_exit_of_an_earlier_pid_holder() {
        let mut exits = Exits::default();
        let key = ProcessKey::new("a", "");
        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        exits.begin_start(&key);
        exits.keep(pid, Exit::now(7));
        let exit = exits.resolve_start(&key, Some(pid));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(exit, None);
    }
}
