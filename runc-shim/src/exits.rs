//! Exits of the shim's children: processes that it started, and orphans, because the shim is a
//! subreaper.
//!
//! A SIGCHLD only says that a child has exited. Each exit is read by waitid(2), so that coalesced
//! signals lose none. A child is reaped after its exit was handled, so that its pid cannot be
//! reused before. While the runtime starts a process whose pid is not known yet, the exits of
//! unknown children are kept, because one of them may be of that process.
//!
//! A process that exits before its pid is known may lose the pid to another process. Two facts
//! distinguish them: a process that a runtime has started is a child of the shim once the runtime
//! has exited, and it was started before the runtime wrote the pid file.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use process_identity::Stat;
use protobuf::well_known_types::timestamp::Timestamp;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, WaitOptions};

use crate::process_key::ProcessKey;
use crate::sys;

/// Maximum number of exits of unknown children that are kept. A container in the node's PID
/// namespace can cause any number of them.
const MAX_UNCLAIMED: usize = 4096;

/// The exit status of a process that has exited with an unknown status, as in containerd.
pub const UNKNOWN: u32 = 255;

/// The highest signal (signal(7)).
const LAST_SIGNAL: u32 = 64;

/// Clock ticks by which the modification time of a file may precede the start of a process that
/// started before the write: the kernel stamps files with the time of its last tick.
const MTIME_LAG: u64 = 2;

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
    /// Processes that are being started and whose pid is not known yet; for each, the value of
    /// `dropped` when its start began.
    starting: BTreeMap<ProcessKey, u64>,
    /// In the order in which they were observed, at most [`MAX_UNCLAIMED`].
    unclaimed: VecDeque<UnclaimedExit>,
    /// Count of exits that were dropped because too many were kept.
    dropped: u64,
}

/// The exit of an unknown child, which may be a process that is being started.
#[derive(Debug)]
struct UnclaimedExit {
    pid: i32,
    /// The start time of the child, clock ticks after boot.
    start_time: Option<u64>,
    exit: Exit,
}

impl Exits {
    /// Announces that a process is being started whose pid is not known yet.
    pub fn begin_start(&mut self, key: &ProcessKey) {
        self.starting.insert(key.clone(), self.dropped);
    }

    /// Keeps the exit of an unknown child while any process is being started. The child must not be
    /// reaped yet.
    pub fn keep(&mut self, pid: i32, exit: Exit) {
        if self.starting.is_empty() {
            return;
        }
        if self.unclaimed.len() >= MAX_UNCLAIMED {
            self.unclaimed.pop_front();
            self.dropped = self.dropped.wrapping_add(1);
        }
        self.unclaimed.push_back(UnclaimedExit { pid, start_time: start_time(pid), exit });
    }

    /// Ends the start that [`Exits::begin_start`] announced. `made` is the pid and the pid file
    /// that the runtime wrote; `None`: the start failed. Returns the exit, if the process has
    /// exited and was reaped. Does nothing for a process that is not being started.
    pub fn resolve_start(&mut self, key: &ProcessKey, made: Option<(i32, &Path)>) -> Option<Exit> {
        let dropped_before = self.starting.remove(key)?;
        let exit = made.and_then(|(pid, file)| self.exit_of(pid, file, dropped_before));
        if self.starting.is_empty() {
            self.unclaimed = VecDeque::new();
        }
        exit
    }

    fn exit_of(&self, pid: i32, file: &Path, dropped_before: u64) -> Option<Exit> {
        let is_unreaped = is_child(pid);
        let may_have_exited =
            || self.dropped != dropped_before || self.unclaimed.iter().any(|kept| kept.pid == pid);
        if is_unreaped && !may_have_exited() {
            return None;
        }
        let written = time_of(file);
        let is_that_process = |start_time: Option<u64>| match (start_time, written) {
            (Some(start_time), Some(written)) => start_time <= written.saturating_add(MTIME_LAG),
            _ => true,
        };
        if is_unreaped && is_that_process(start_time(pid)) {
            return None;
        }
        // The last match, because the pid may have been reused meanwhile.
        let kept = self
            .unclaimed
            .iter()
            .rev()
            .find(|kept| kept.pid == pid && is_that_process(kept.start_time));
        Some(kept.map_or_else(|| Exit::now(UNKNOWN), |kept| kept.exit))
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

/// The modification time of a file, clock ticks after boot; `None`: it cannot be determined.
fn time_of(file: &Path) -> Option<u64> {
    let age = std::fs::metadata(file).ok()?.modified().ok()?.elapsed().ok()?;
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let now = Duration::new(u64::try_from(now.tv_sec).ok()?, u32::try_from(now.tv_nsec).ok()?);
    let written = now.checked_sub(age)?;
    let ticks = u128::from(rustix::param::clock_ticks_per_second());
    u64::try_from(written.as_nanos() * ticks / 1_000_000_000).ok()
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
    while rustix::process::waitpid(Pid::from_raw(pid), WaitOptions::NOHANG)
        .is_err_and(|e| e == rustix::io::Errno::INTR)
    {}
}

/// Whether the process of a pidfd has exited, reaped or not.
pub fn has_ended(process: &OwnedFd) -> bool {
    let mut poll = [PollFd::new(process, PollFlags::IN)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    // An error does not mean that the process has exited.
    rustix::event::poll(&mut poll, Some(&now)).is_ok_and(|ready| ready > 0)
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

    /// A pid file that does not exist, so that its modification time is unknown.
    const NO_FILE: &str = "/nonexistent/pid";

    fn resolve(exits: &mut Exits, key: &ProcessKey, pid: i32, file: &Path) -> Option<u32> {
        exits.resolve_start(key, Some((pid, file))).map(|exit| exit.status)
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

    /// A pid file that was written `age` ago.
    fn pid_file(age: Duration) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_modified(SystemTime::now() - age).unwrap();
        file
    }

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
        let (exit, file) = (Exit::now(7), Path::new(NO_FILE));
        let (a, b) = (ProcessKey::new("a", ""), ProcessKey::new("a", "b"));
        exits.keep(GONE, exit);
        assert_eq!(exits.unclaimed.len(), 0, "nothing is being started");
        exits.begin_start(&a);
        exits.begin_start(&b);
        exits.keep(GONE, exit);
        assert_eq!(exits.resolve_start(&a, None), None);
        assert_eq!(exits.resolve_start(&b, Some((GONE, file))), Some(exit));
        exits.begin_start(&a);
        exits.keep(GONE, exit);
        exits.resolve_start(&a, Some((1, file)));
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
        assert_eq!(resolve(&mut exits, &runs, GONE, Path::new(NO_FILE)), Some(7));
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
        assert_eq!(resolve(&mut exits, &key, GONE, Path::new(NO_FILE)), Some(UNKNOWN));
    }

    #[test]
    fn a_running_process_does_not_get_the_exit_of_an_earlier_pid_holder() {
        let mut exits = Exits::default();
        let key = ProcessKey::new("a", "");
        let (child, file) = (Child::new(), pid_file(Duration::ZERO));
        exits.begin_start(&key);
        assert_eq!(resolve(&mut exits, &key, child.pid(), file.path()), None);
        exits.begin_start(&key);
        exits.unclaimed.push_back(UnclaimedExit {
            pid: child.pid(),
            start_time: Some(1),
            exit: Exit::now(7),
        });
        assert_eq!(resolve(&mut exits, &key, child.pid(), file.path()), None);
        exits.begin_start(&key);
        exits.dropped += 1;
        assert_eq!(resolve(&mut exits, &key, child.pid(), file.path()), None);
    }

    #[test]
    fn a_process_whose_pid_was_reused_has_ended() {
        let mut exits = Exits::default();
        let key = ProcessKey::new("a", "");
        let (child, file) = (Child::new(), pid_file(Duration::from_secs(1)));
        // Another child has its pid, and its own exit was dropped.
        exits.begin_start(&key);
        exits.dropped += 1;
        assert_eq!(resolve(&mut exits, &key, child.pid(), file.path()), Some(UNKNOWN));
        // Its own exit was kept, and also the exit of a later child with the same pid.
        exits.begin_start(&key);
        for (start_time, status) in [(Some(1), 7), (start_time(child.pid()), 8)] {
            exits.unclaimed.push_back(UnclaimedExit {
                pid: child.pid(),
                start_time,
                exit: Exit::now(status),
            });
        }
        assert_eq!(resolve(&mut exits, &key, child.pid(), file.path()), Some(7));
        // A process that is not a child has the pid.
        exits.begin_start(&key);
        assert_eq!(resolve(&mut exits, &key, 1, file.path()), Some(UNKNOWN));
    }
}
