//! Exits of children: all that were started here, and what was orphaned below, as this process is
//! a subreaper.
//!
//! A signal says only that there are exits; each is fetched by its own pid, so that it does not
//! matter how many signals become one. While the runtime starts a process whose pid is not known
//! yet, the exits of unknown children are kept: one of them may be its.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use protobuf::well_known_types::timestamp::Timestamp;
use rustix::process::{Pid, WaitOptions, WaitStatus};

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
    starting: u32,
    unclaimed: BTreeMap<i32, Exit>,
}

impl Exits {
    /// All children that have ended since, in the order of their ends as far as it is known.
    pub fn reap() -> Vec<(i32, Exit)> {
        let mut ended = Vec::new();
        loop {
            match rustix::process::wait(WaitOptions::NOHANG) {
                Ok(Some((pid, status))) => {
                    ended.push((pid.as_raw_nonzero().get(), Exit::now(code(status))));
                }
                Err(rustix::io::Errno::INTR) => {}
                // None has ended, or there is none.
                Ok(None) | Err(_) => return ended,
            }
        }
    }

    /// A process is about to be started.
    pub fn begin(&mut self) {
        self.starting += 1;
    }

    /// Keeps the exit of an unknown child, if it may be that of a process that is being started.
    pub fn keep(&mut self, pid: i32, exit: Exit) {
        if self.starting > 0 {
            self.unclaimed.insert(pid, exit);
        }
    }

    /// The process that was being started has this pid, or did not start. Its exit, if it has
    /// ended.
    pub fn claim(&mut self, pid: Option<i32>) -> Option<Exit> {
        self.starting = self.starting.saturating_sub(1);
        let exit = pid.and_then(|pid| {
            let exit = self.unclaimed.remove(&pid);
            // A pid that was used again meanwhile is that of a child that lives.
            exit.filter(|_| !is_child(pid))
        });
        if self.starting == 0 {
            self.unclaimed = BTreeMap::new();
        }
        exit
    }
}

/// Whether the pid is that of a child that was not reaped.
fn is_child(pid: i32) -> bool {
    use rustix::process::{WaitId, WaitIdOptions};
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    Pid::from_raw(pid).is_some_and(|pid| rustix::process::waitid(WaitId::Pid(pid), options).is_ok())
}

fn code(status: WaitStatus) -> u32 {
    let code = match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => code,
        (None, Some(signal)) => 128 + signal,
        (None, None) => 255,
    };
    u32::try_from(code).unwrap_or(255)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exit_before_the_pid_is_known_is_found() {
        let mut exits = Exits::default();
        let (gone, exit) = (i32::MAX, Exit::now(7));
        exits.keep(gone, exit);
        assert_eq!(exits.unclaimed.len(), 0, "nothing is being started");
        exits.begin();
        exits.begin();
        exits.keep(gone, exit);
        assert_eq!(exits.claim(None), None);
        assert_eq!(exits.claim(Some(gone)), Some(exit));
        exits.begin();
        exits.keep(gone, exit);
        exits.claim(Some(1));
        assert_eq!(exits.unclaimed.len(), 0, "kept no longer than needed");
    }
}
