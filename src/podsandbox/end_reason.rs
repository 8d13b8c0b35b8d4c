//! Why a pause process, and with it the sandbox, ended.

use serde::{Deserialize, Serialize};

use crate::process::{Exit, UNKNOWN_EXIT};

/// Exit status of a process that SIGKILL has ended.
const KILLED: u32 = 128 + 9;

/// What is known of the end of a pause process; nothing is guessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EndReason {
    /// A Stop killed it.
    Stopped,
    /// A Shutdown without a Stop, or garbage collection, killed it.
    Removed,
    /// It was killed because the caller of Start had given up.
    StartCancelled,
    /// It was killed because the pod's shim had exited with containers in it.
    ShimDied,
    /// The kernel killed it because memory had run out.
    OutOfMemory,
    /// A signal of another process, or of the kernel, killed it.
    Signal,
    /// It exited, as it does on SIGTERM.
    Exited,
    /// It ended unseen, for example while no daemon ran.
    Unknown,
}

impl EndReason {
    /// The reason where the daemon has killed the process for `cause`, if it has; `oom_killed` asks
    /// the kernel, and blocks.
    pub fn new(exit: Exit, cause: Option<Self>, oom_killed: impl FnOnce() -> bool) -> Self {
        let may_be_killed = matches!(exit.status, KILLED | UNKNOWN_EXIT);
        match cause {
            Some(cause) if may_be_killed => cause,
            None if may_be_killed && oom_killed() => Self::OutOfMemory,
            _ if exit.status == UNKNOWN_EXIT => Self::Unknown,
            // The pause program itself exits with 0 only.
            _ if exit.status > 128 => Self::Signal,
            _ => Self::Exited,
        }
    }

    /// The reason in metrics, log fields and records.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stopped => "stopped",
            Self::Removed => "removed",
            Self::StartCancelled => "start_cancelled",
            Self::ShimDied => "shim_died",
            Self::OutOfMemory => "out_of_memory",
            Self::Signal => "signal",
            Self::Exited => "exited",
            Self::Unknown => "unknown",
        }
    }

    /// The reason in words.
    pub fn text(self, status: u32) -> String {
        match self {
            Self::Stopped => "stopped by a call of Stop".to_owned(),
            Self::Removed => "removed without a call of Stop".to_owned(),
            Self::StartCancelled => "the caller of Start had given up".to_owned(),
            Self::ShimDied => "the shim exited and left containers".to_owned(),
            Self::OutOfMemory => "killed by the kernel: out of memory".to_owned(),
            Self::Signal => format!("killed by signal {}", status.saturating_sub(128)),
            Self::Exited => format!("exited with status {status}"),
            Self::Unknown => "it ended while no daemon watched it".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    #[test]
    fn a_reason_is_what_is_known() {
        use EndReason::*;
        for (status, cause, oom_killed, reason, text) in [
            (137, Some(Stopped), true, Stopped, "stopped by a call of Stop"),
            (255, Some(ShimDied), false, ShimDied, "the shim exited and left containers"),
            // It was dead before the daemon's signal.
            (0, Some(Stopped), false, Exited, "exited with status 0"),
            (143, Some(Removed), false, Signal, "killed by signal 15"),
            (137, None, false, Signal, "killed by signal 9"),
            (137, None, true, OutOfMemory, "killed by the kernel: out of memory"),
            (255, None, true, OutOfMemory, "killed by the kernel: out of memory"),
            (255, None, false, Unknown, "it ended while no daemon watched it"),
            // The kernel has killed another process there.
            (159, None, true, Signal, "killed by signal 31"),
            (0, None, true, Exited, "exited with status 0"),
        ] {
            let exit = Exit { status, at: SystemTime::UNIX_EPOCH };
            let found = EndReason::new(exit, cause, || oom_killed);
            assert_eq!((found, found.text(status).as_str()), (reason, text), "{status} {cause:?}");
            assert_eq!(serde_json::to_value(found).unwrap(), found.name());
        }
    }
}
