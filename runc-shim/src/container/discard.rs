//! Removal of the leftovers of a container that could not be created. It is tried again until
//! nothing is left: there may be no process or descriptor for a command of the runtime at first.

use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

use super::Container;
use super::step::{Caller, Step};
use crate::error::Error;
use crate::exits::{Exit, UNKNOWN};
use crate::root::helper::Action;
use crate::runtime::{self, Place};
use crate::services::Services;
use crate::ttrpc::response::{self, Answer};

/// Delays between attempts: the first and the longest.
const FIRST_WAIT: Duration = Duration::from_millis(200);
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// The next attempt to remove the leftovers of a container.
#[derive(Debug, Clone, Copy)]
pub struct Retry {
    /// When it is made.
    pub at: Instant,
    /// How long the shim waits before it.
    wait: Duration,
}

/// A part of what a failed Create has left, in the order of removal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Left {
    /// The container of the runtime.
    Container,
    /// The cgroup, which a killed command of the runtime has left.
    Cgroup,
    /// The mounts of the root file system.
    Mounts,
}

impl Container {
    /// Removes the next part of the leftovers. The caller is answered with the reason of the failed
    /// Create, or, if it has asked for the deletion, with the result.
    pub(super) fn discard(
        &mut self,
        services: &mut Services,
        caller: &Caller,
        reason: Option<Error>,
    ) -> Answer {
        let step = |left| Step::Discard(left, reason.clone());
        let begun = if self.runtime.knows(&caller.key.id) {
            let arguments = ["delete", "--force", &caller.key.id];
            self.run(services, caller, step(Left::Container), &arguments, Place::default())
        } else if self.may_have_left_cgroup {
            self.run_remove_cgroup(services, caller, step(Left::Cgroup))
        } else if self.has_rootfs {
            self.run_helper(services, caller, step(Left::Mounts), Action::Unmount, None)
        } else {
            self.forget(services);
            // A container that never ran has no exit status.
            let deleted = response::deleted(0, Some(Exit::now(UNKNOWN)));
            return reason.map_or_else(|| response::now(&deleted), Err);
        };
        begun.map(|()| None).or_else(|e| self.discard_failed(reason, e))
    }

    /// Continues after the removal of a part has ended.
    pub(super) fn discard_next(
        &mut self,
        services: &mut Services,
        caller: &Caller,
        left: Left,
        reason: Option<Error>,
        done: Result<(), Error>,
    ) -> Answer {
        let unchanged = || Error::unknown("the runtime has not removed its state");
        match (left, done) {
            (Left::Container, done) if self.runtime.knows(&self.key.id) => {
                return self.discard_failed(reason, done.err().unwrap_or_else(unchanged));
            }
            (Left::Container, _) => {}
            (_, Err(e)) => return self.discard_failed(reason, e),
            (Left::Cgroup, Ok(())) => self.may_have_left_cgroup = false,
            (Left::Mounts, Ok(())) => self.has_rootfs = false,
        }
        self.discard(services, caller, reason)
    }

    fn discard_failed(&mut self, reason: Option<Error>, e: Error) -> Answer {
        let wait = self.retry.map_or(FIRST_WAIT, |retry| (retry.wait * 2).min(LONGEST_WAIT));
        self.retry = Some(Retry { at: Instant::now() + wait, wait });
        let e = e.context("failed to clean up after a failed creation; retrying");
        self.log_failure(&e);
        Err(reason.unwrap_or(e))
    }

    /// Starts a helper that removes the cgroup. It needs no bundle: containerd may have removed
    /// that.
    pub(super) fn run_remove_cgroup(
        &mut self,
        services: &mut Services,
        caller: &Caller,
        step: Step,
    ) -> Result<(), Error> {
        let path = runtime::memory_file_of(self.config.cgroups_path.as_bytes())?;
        self.run_helper(services, caller, step, Action::RemoveCgroup, Some(path.as_fd()))
    }
}
