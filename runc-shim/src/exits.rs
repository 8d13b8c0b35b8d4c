//! Exits of children: all that were started here, and what was orphaned below, as this process is
//! a subreaper.
//!
//! A signal says only that there are exits; each is fetched by its own pid, so that it does not
//! matter how many signals become one. A child is reaped after its exit was handled, so that no
//! number is used once it may be another's. While the runtime starts a process whose pid is not
//! known yet, the exits of unknown children are kept: one of them may be its.
//!
//! Another process may have the pid of one that has ended before its pid was known. Two facts
//! distinguish them: a process that a runtime has started is a child of this one once the runtime
//! has ended, and it was started before the runtime wrote its pid.

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use protobuf::well_known_types::timestamp::Timestamp;
use rustix::process::{Pid, WaitOptions};

use crate::shim::Key;
use crate::sys;

/// How many exits of unknown children are kept. A container with the node's PID namespace makes
/// any number of them.
const KEPT: usize = 4096;

/// The status of a process whose end is all that is known, as in containerd.
pub const UNKNOWN: u32 = 255;

/// By how many clock ticks the time of a file may be before the start of a process that was older:
/// the kernel's time of files is that of its last tick.
const LAG: u64 = 2;

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
    /// Processes that are being started and whose pid is not known, and how many exits were dropped
    /// before.
    starting: BTreeMap<Key, u64>,
    /// In the order of their ends, at most [`KEPT`].
    unclaimed: VecDeque<Kept>,
    /// How many exits were dropped.
    dropped: u64,
}

/// The exit of an unknown child.
#[derive(Debug)]
struct Kept {
    pid: i32,
    /// When it was started; clock ticks after boot.
    since: Option<u64>,
    exit: Exit,
}

impl Exits {
    /// A process is about to be started.
    pub fn begin(&mut self, key: &Key) {
        self.starting.insert(key.clone(), self.dropped);
    }

    /// Keeps the exit of an unknown child, if it may be that of a process that is being started. It
    /// is not reaped yet.
    pub fn keep(&mut self, pid: i32, exit: Exit) {
        if self.starting.is_empty() {
            return;
        }
        if self.unclaimed.len() >= KEPT {
            self.unclaimed.pop_front();
            self.dropped = self.dropped.wrapping_add(1);
        }
        self.unclaimed.push_back(Kept { pid, since: start_time(pid), exit });
    }

    /// The process that was being started has this pid, which the runtime has written to this file,
    /// or did not start. Its exit, if it has ended. Has no effect for a process that is not being
    /// started.
    pub fn claim(&mut self, key: &Key, made: Option<(i32, &Path)>) -> Option<Exit> {
        let dropped_before = self.starting.remove(key)?;
        let exit = made.and_then(|(pid, file)| self.exit_of(pid, file, dropped_before));
        if self.starting.is_empty() {
            self.unclaimed = VecDeque::new();
        }
        exit
    }

    fn exit_of(&self, pid: i32, file: &Path, dropped_before: u64) -> Option<Exit> {
        let lives = is_child(pid);
        let may_have_ended =
            || self.dropped != dropped_before || self.unclaimed.iter().any(|kept| kept.pid == pid);
        if lives && !may_have_ended() {
            return None;
        }
        let written = time_of(file);
        let is_it = |since: Option<u64>| match (since, written) {
            (Some(since), Some(written)) => since <= written.saturating_add(LAG),
            _ => true,
        };
        if lives && is_it(start_time(pid)) {
            return None;
        }
        // The last one: a number may be used again.
        let kept = self.unclaimed.iter().rev().find(|kept| kept.pid == pid && is_it(kept.since));
        Some(kept.map_or_else(|| Exit::now(UNKNOWN), |kept| kept.exit))
    }
}

/// When a process was started, in clock ticks after boot (proc_pid_stat(5)); `None`: it is gone.
fn start_time(pid: i32) -> Option<u64> {
    let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    // Behind the name, which may have any character.
    let end = stat.iter().rposition(|byte| *byte == b')')?;
    let rest = std::str::from_utf8(stat.get(end + 1..)?).ok()?;
    rest.split_whitespace().nth(19)?.parse().ok()
}

/// When a file was written last, in clock ticks after boot; `None`: that is not known.
fn time_of(file: &Path) -> Option<u64> {
    let age = std::fs::metadata(file).ok()?.modified().ok()?.elapsed().ok()?;
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let now = Duration::new(u64::try_from(now.tv_sec).ok()?, u32::try_from(now.tv_nsec).ok()?);
    let written = now.checked_sub(age)?;
    let ticks = u128::from(rustix::param::clock_ticks_per_second());
    u64::try_from(written.as_nanos() * ticks / 1_000_000_000).ok()
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A pid that no process has.
    const GONE: i32 = i32::MAX;

    /// A file without a time: no pid was written.
    const NO_FILE: &str = "/nonexistent/pid";

    fn claim(exits: &mut Exits, key: &Key, pid: i32, file: &Path) -> Option<u32> {
        exits.claim(key, Some((pid, file))).map(|exit| exit.status)
    }

    /// A child that runs until it is killed.
    struct Child(std::process::Child);

    impl Child {
        fn new() -> Self {
            Self(std::process::Command::new("sleep").arg("100").spawn().unwrap())
        }

        fn pid(&self) -> i32 {
            i32::try_from(self.0.id()).unwrap()
        }
    }

    impl Drop for Child {
        fn drop(&mut self) {
            self.0.kill().unwrap();
            self.0.wait().unwrap();
        }
    }

    /// A file with a pid, written so long ago.
    fn pid_file(age: Duration) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_modified(SystemTime::now() - age).unwrap();
        file
    }

    #[test]
    fn an_exit_before_the_pid_is_known_is_found() {
        let mut exits = Exits::default();
        let (exit, file) = (Exit::now(7), Path::new(NO_FILE));
        let (a, b) = (Key::new("a", ""), Key::new("a", "b"));
        exits.keep(GONE, exit);
        assert_eq!(exits.unclaimed.len(), 0, "nothing is being started");
        exits.begin(&a);
        exits.begin(&b);
        exits.keep(GONE, exit);
        assert_eq!(exits.claim(&a, None), None);
        assert_eq!(exits.claim(&b, Some((GONE, file))), Some(exit));
        exits.begin(&a);
        exits.keep(GONE, exit);
        exits.claim(&a, Some((1, file)));
        assert_eq!(exits.unclaimed.len(), 0, "kept no longer than needed");
    }

    #[test]
    fn a_start_that_fails_leaves_the_exits_of_others() {
        let mut exits = Exits::default();
        let (runs, fails) = (Key::new("a", "runs"), Key::new("b", ""));
        exits.begin(&runs);
        exits.keep(GONE, Exit::now(7));
        // Its logging program has failed: the runtime was not called.
        assert_eq!(exits.claim(&fails, None), None);
        assert_eq!(claim(&mut exits, &runs, GONE, Path::new(NO_FILE)), Some(7));
    }

    #[test]
    fn a_process_whose_exit_was_dropped_has_the_unknown_status() {
        let mut exits = Exits::default();
        let key = Key::new("a", "");
        exits.begin(&key);
        exits.keep(GONE, Exit::now(7));
        for pid in 0..10_000 {
            exits.keep(1_000_000_000 + pid, Exit::now(0));
        }
        assert_eq!(exits.unclaimed.len(), KEPT);
        assert_eq!(claim(&mut exits, &key, GONE, Path::new(NO_FILE)), Some(UNKNOWN));
    }

    #[test]
    fn a_running_process_does_not_get_the_exit_of_an_earlier_pid_holder() {
        let mut exits = Exits::default();
        let key = Key::new("a", "");
        let (child, file) = (Child::new(), pid_file(Duration::ZERO));
        exits.begin(&key);
        assert_eq!(claim(&mut exits, &key, child.pid(), file.path()), None);
        exits.begin(&key);
        exits.unclaimed.push_back(Kept { pid: child.pid(), since: Some(1), exit: Exit::now(7) });
        assert_eq!(claim(&mut exits, &key, child.pid(), file.path()), None);
        exits.begin(&key);
        exits.dropped += 1;
        assert_eq!(claim(&mut exits, &key, child.pid(), file.path()), None);
    }

    #[test]
    fn a_process_whose_pid_was_reused_has_ended() {
        let mut exits = Exits::default();
        let key = Key::new("a", "");
        let (child, file) = (Child::new(), pid_file(Duration::from_secs(1)));
        // Another child has its number, and its own exit was dropped.
        exits.begin(&key);
        exits.dropped += 1;
        assert_eq!(claim(&mut exits, &key, child.pid(), file.path()), Some(UNKNOWN));
        // Its own exit was kept, as was one of a child that had its number after it.
        exits.begin(&key);
        for (since, status) in [(Some(1), 7), (start_time(child.pid()), 8)] {
            exits.unclaimed.push_back(Kept { pid: child.pid(), since, exit: Exit::now(status) });
        }
        assert_eq!(claim(&mut exits, &key, child.pid(), file.path()), Some(7));
        // A process that is no child has it.
        exits.begin(&key);
        assert_eq!(claim(&mut exits, &key, 1, file.path()), Some(UNKNOWN));
    }
}
