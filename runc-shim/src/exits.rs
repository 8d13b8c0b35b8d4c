//! Exits of children: all that were started here, and what was orphaned below, as this process is
//! a subreaper.
//!
//! A signal says only that there are exits; each is fetched by its own pid, so that it does not
//! matter how many signals become one. A child is reaped after its exit was handled, so that no
//! number is used once it may be another's. While the runtime starts a process whose pid is not
//! known yet, the exits of unknown children are kept: one of them may be its.

use std::collections::{BTreeSet, VecDeque};
use std::time::{SystemTime, UNIX_EPOCH};

use protobuf::well_known_types::timestamp::Timestamp;
use rustix::process::{Pid, WaitOptions};

use crate::shim::Key;
use crate::sys;

/// How many exits of unknown children are kept. A container with the node's PID namespace makes
/// any number of them.
const KEPT: usize = 4096;

/// The status of a process whose end is all that is known, as in containerd.
const UNKNOWN: u32 = 255;

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exit {
    /// Its status; 128 and the signal for one that was killed.
    pub status: u32,
    /// Seconds since 1970.
    pub seconds: i64,
    /// And nanoseconds.
    pub nanos: i32,
}

impl Exit {
    /// An exit that is seen now.
    pub fn now(status: u32) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            status,
            seconds: i64::try_from(now.as_secs()).unwrap_or(i64::MAX),
            nanos: i32::try_from(now.subsec_nanos()).unwrap_or(0),
        }
    }

    /// When it was seen.
    pub fn at(&self) -> Timestamp {
        let mut at = Timestamp::new();
        (at.seconds, at.nanos) = (self.seconds, self.nanos);
        at
    }
}

/// The kept exits of unknown children.
#[derive(Debug, Default)]
pub struct Exits {
    /// Processes that are being started and whose pid is not known.
    starting: BTreeSet<Key>,
    /// In the order of their ends, at most [`KEPT`].
    unclaimed: VecDeque<(i32, Exit)>,
}

impl Exits {
    /// A process is about to be started.
    pub fn begin(&mut self, key: &Key) {
        self.starting.insert(key.clone());
    }

    /// Keeps the exit of an unknown child, if it may be that of a process that is being started.
    pub fn keep(&mut self, pid: i32, exit: Exit) {
        if self.starting.is_empty() {
            return;
        }
        if self.unclaimed.len() >= KEPT {
            self.unclaimed.pop_front();
        }
        self.unclaimed.push_back((pid, exit));
    }

    /// The process that was being started has this pid, or did not start. Its exit, if it has
    /// ended. Has no effect for a process that is not being started.
    pub fn claim(&mut self, key: &Key, pid: Option<i32>) -> Option<Exit> {
        if !self.starting.remove(key) {
            return None;
        }
        // The last one: a number may be used again. One that is a child's now is not its exit.
        let exit = pid.filter(|pid| !is_child(*pid)).and_then(|pid| {
            let kept = self.unclaimed.iter().rev().find(|(kept, _)| *kept == pid);
            let unknown = || (!exists(pid)).then(|| Exit::now(UNKNOWN));
            kept.map(|(_, exit)| *exit).or_else(unknown)
        });
        if self.starting.is_empty() {
            self.unclaimed = VecDeque::new();
        }
        exit
    }
}

/// A child that has ended. It is not reaped, so that its pid is no other's until [`reap`].
pub fn ended() -> Option<(i32, Exit)> {
    sys::ended_child(None).map(|(pid, status)| (pid, Exit::now(status)))
}

/// How this child has ended, if it has. It is not reaped.
pub fn ended_one(pid: i32) -> Option<Exit> {
    sys::ended_child(Some(pid)).map(|(_, status)| Exit::now(status))
}

/// Reaps a child that has ended.
pub fn reap(pid: i32) {
    while rustix::process::waitpid(Pid::from_raw(pid), WaitOptions::NOHANG)
        .is_err_and(|e| e == rustix::io::Errno::INTR)
    {}
}

/// Whether the pid is that of a child that was not reaped.
pub fn is_child(pid: i32) -> bool {
    use rustix::process::{WaitId, WaitIdOptions};
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    Pid::from_raw(pid).is_some_and(|pid| rustix::process::waitid(WaitId::Pid(pid), options).is_ok())
}

fn exists(pid: i32) -> bool {
    Pid::from_raw(pid).is_some_and(|pid| rustix::process::test_kill_process(pid).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exit_before_the_pid_is_known_is_found() {
        let mut exits = Exits::default();
        let (gone, exit) = (i32::MAX, Exit::now(7));
        let (a, b) = (Key::new("a", ""), Key::new("a", "b"));
        exits.keep(gone, exit);
        assert_eq!(exits.unclaimed.len(), 0, "nothing is being started");
        exits.begin(&a);
        exits.begin(&b);
        exits.keep(gone, exit);
        assert_eq!(exits.claim(&a, None), None);
        assert_eq!(exits.claim(&b, Some(gone)), Some(exit));
        exits.begin(&a);
        exits.keep(gone, exit);
        exits.claim(&a, Some(1));
        assert_eq!(exits.unclaimed.len(), 0, "kept no longer than needed");
    }

    #[test]
    fn a_failure_before_a_start_takes_no_other_s_exit() {
        let mut exits = Exits::default();
        let (gone, exit) = (i32::MAX, Exit::now(7));
        let (runs, fails) = (Key::new("a", "runs"), Key::new("b", ""));
        exits.begin(&runs);
        exits.keep(gone, exit);
        // Its logging program has failed: the runtime was not called.
        assert_eq!(exits.claim(&fails, None), None);
        assert_eq!(exits.claim(&runs, Some(gone)), Some(exit));
    }

    #[test]
    fn kept_exits_are_bounded_and_what_was_dropped_has_ended_all_the_same() {
        let mut exits = Exits::default();
        let key = Key::new("a", "");
        exits.begin(&key);
        exits.keep(i32::MAX, Exit::now(7));
        for pid in 0..10_000 {
            exits.keep(1_000_000_000 + pid, Exit::now(0));
        }
        assert_eq!(exits.unclaimed.len(), KEPT);
        assert_eq!(exits.claim(&key, Some(i32::MAX)).map(|exit| exit.status), Some(UNKNOWN));
    }

    #[test]
    fn the_exit_of_a_number_that_is_used_again_is_not_taken() {
        let mut exits = Exits::default();
        let key = Key::new("a", "");
        exits.begin(&key);
        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        exits.keep(pid, Exit::now(7));
        assert_eq!(exits.claim(&key, Some(pid)), None);
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
