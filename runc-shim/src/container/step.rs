//! A step in which a container or one of its execs is: it waits for a command of the runtime, a
//! helper, a logging program or the readers of the output, carries what the next step needs, and
//! has its deadline.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::launch::Launch;
use super::removal::Part;
use super::state::State;
use crate::error::Error;
use crate::io::logger::{self, Logger};
use crate::io::readers::Readers;
use crate::log;
use crate::process_key::ProcessKey;
use crate::root::descendants;
use crate::runtime::command::Command;
use crate::sys;
use crate::ttrpc::server::Reply;

/// How long the runtime may take to delete a container, whatever the deadline of the call: kubelet
/// sees the exit of the container only after its deletion.
const DELETE_TIMEOUT: Duration = Duration::from_secs(60);

/// A step of an operation of a container or of one of its execs.
#[derive(Debug)]
pub enum Step {
    /// A step of a Create, of a Start that restores a container, or of the Start of an exec.
    Launch(Launch),
    /// The runtime starts the container.
    Start,
    /// A part of the container is removed. The error is that of the failed Create which waits for
    /// it, or that of the runtime's first attempt in a Delete.
    Remove(Part, Option<Error>),
    /// The runtime sends this signal to the container.
    Kill(i32),
    /// The runtime kills the processes that remain after the first process has exited.
    KillRemaining,
    /// The runtime pauses the container.
    Pause,
    /// The runtime resumes the container.
    Resume,
    /// The runtime changes the resources of the container.
    Update,
    /// The runtime writes a checkpoint into `path`; `work` is CRIU's work directory, if it is
    /// removed afterwards.
    Checkpoint { path: String, work: Option<PathBuf> },
}

impl Step {
    /// Whether the deadline of the call limits the step. A removal continues after it, because an
    /// interrupted one leaves more than it has found.
    pub fn is_limited(&self) -> bool {
        !matches!(self, Self::Remove(..) | Self::KillRemaining)
    }

    /// The time that the step has whatever the deadline of the call; `None`: no limit.
    pub fn own_limit(&self) -> Option<Duration> {
        match self {
            Self::Remove(Part::Container, _) => Some(DELETE_TIMEOUT),
            Self::Launch(Launch::StartingLogger(_)) => Some(logger::READY_TIMEOUT),
            _ => None,
        }
    }

    /// Whether a killed command may leave the container frozen: runc freezes the cgroup for a while
    /// in these commands.
    pub fn may_freeze(&self) -> bool {
        matches!(self, Self::Pause | Self::Update | Self::Kill(_) | Self::KillRemaining)
    }

    /// The beginning of the error message of a command that has failed.
    pub fn failure(&self, key: &ProcessKey, state: State) -> &'static str {
        match self {
            Self::Launch(Launch::Mounting) => "failed to mount rootfs component",
            Self::Launch(_) if !key.exec.is_empty() => "OCI runtime exec failed",
            Self::Launch(_) if state == State::New => "OCI runtime create failed",
            Self::Launch(_) => "OCI runtime restore failed",
            Self::Start => "OCI runtime start failed",
            Self::Remove(Part::Container, _) => "failed to delete task",
            Self::Remove(Part::Cgroup, _) => "remove cgroup",
            Self::Remove(Part::Mounts, _) => "failed rootfs umount",
            Self::Kill(_) => "",
            Self::KillRemaining => "OCI runtime killall failed",
            Self::Pause => "OCI runtime pause failed",
            Self::Resume => "OCI runtime resume failed",
            Self::Update => "OCI runtime update failed",
            Self::Checkpoint { .. } => "OCI runtime checkpoint failed",
        }
    }
}

/// The event that a step waits for.
#[derive(Debug)]
pub enum Wait {
    /// A command of the runtime or a helper.
    Command(Command),
    /// A logging program that is not ready yet.
    Logger(Logger),
    /// The readers of the output.
    Readers(Readers),
}

/// The process that a call is for, and the caller that waits for the result, if any.
#[derive(Debug, Clone)]
pub struct Caller {
    /// The container or the exec.
    pub key: ProcessKey,
    /// The caller.
    pub reply: Option<Reply>,
}

/// A step that waits.
#[derive(Debug)]
pub struct Pending {
    /// The event that it waits for.
    pub wait: Wait,
    /// The step that ends with that event.
    pub step: Step,
    /// The process, and the caller that is answered at the end.
    pub caller: Caller,
    /// When the step ends at the latest, whatever the deadline of the call.
    pub limit: Option<Instant>,
    /// The command was killed at its deadline.
    pub was_killed: bool,
}

impl Pending {
    /// The container or the exec that the step is of.
    pub fn key(&self) -> &ProcessKey {
        &self.caller.key
    }

    pub fn has_pid(&self, wanted: i32) -> bool {
        match &self.wait {
            Wait::Command(command) => command.pid == wanted,
            Wait::Logger(logger) => logger.pid == wanted,
            Wait::Readers(_) => false,
        }
    }

    pub fn is_late(&self, now: Instant) -> bool {
        self.deadline().is_some_and(|at| at <= now)
    }

    /// When the step must end, or be checked; `None`: it has no limit, or its command was killed.
    pub fn deadline(&self) -> Option<Instant> {
        if self.was_killed {
            return None;
        }
        let is_limited = self.step.is_limited() && matches!(self.wait, Wait::Command(_));
        let reply = self.caller.reply.filter(|_| is_limited);
        let call = reply.and_then(|reply| reply.deadline());
        let check = match &self.wait {
            Wait::Readers(readers) => Some(readers.check_at()),
            _ => None,
        };
        [call, self.limit, check].into_iter().flatten().min()
    }

    /// Kills the command and the processes that it has started. A `runc init` that a process of the
    /// container has stopped, or a hook, does not exit with its parent.
    pub fn kill(&mut self, pid: i32) {
        self.was_killed = true;
        let id = &self.caller.key.id;
        log::warn(format_args!(
            "container {id}: runtime command timed out; killing process {pid} and its children"
        ));
        match self.step {
            // CRIU has stopped the processes of the container, and must resume them itself. The
            // command is not reaped yet, so its pid cannot have been reused.
            Step::Checkpoint { .. } => drop(sys::kill(pid, libc::SIGKILL)),
            _ => descendants::kill(pid),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A step of a call with this deadline, which waits for a command with pid 7.
    fn pending(step: Step, call: Option<Instant>, limit: Option<Instant>) -> Pending {
        let output = std::fs::File::open("/dev/null").unwrap().into();
        let caller = Caller { key: ProcessKey::new("a", ""), reply: Some(Reply::of_a_test(call)) };
        let wait = Wait::Command(Command::helper(7, output));
        Pending { wait, step, caller, limit, was_killed: false }
    }

    #[test]
    fn the_earlier_of_two_deadlines_ends_a_step() {
        let now = Instant::now();
        let [soon, later] = [1, 2].map(|seconds| now + Duration::from_secs(seconds));
        let start = |call, limit| pending(Step::Start, call, limit);
        assert_eq!(start(Some(soon), Some(later)).deadline(), Some(soon));
        assert_eq!(start(Some(later), Some(soon)).deadline(), Some(soon));
        assert_eq!(start(Some(soon), None).deadline(), Some(soon));
        assert_eq!(start(None, None).deadline(), None);
        let mut step = start(Some(soon), None);
        assert!(!step.is_late(now));
        assert!(step.is_late(soon) && step.is_late(later));
        step.was_killed = true;
        assert!(!step.is_late(later), "it is killed once");
    }

    #[test]
    fn a_removal_outlives_the_deadline_of_its_call() {
        let now = Instant::now();
        let later = now + Duration::from_secs(60);
        for step in [Step::Remove(Part::Container, None), Step::KillRemaining] {
            assert_eq!(pending(step, Some(now), Some(later)).deadline(), Some(later));
        }
        assert_eq!(Step::Remove(Part::Container, None).own_limit(), Some(DELETE_TIMEOUT));
        assert_eq!(Step::Remove(Part::Mounts, None).own_limit(), None);
    }

    #[test]
    fn a_step_ends_with_its_own_command() {
        let step = pending(Step::Start, None, None);
        assert!(step.has_pid(7) && !step.has_pid(8));
    }
}
