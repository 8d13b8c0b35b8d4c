//! Removal of a container, after a Delete or a failed Create. If a removal after a failed Create
//! fails, because there is no process or descriptor for a command of the runtime, the next Delete
//! tries again, and the next Create of any container: containerd sends one Delete, at once.

use std::os::fd::AsFd as _;

use super::Container;
use super::state::State;
use super::step::{Caller, Step};
use crate::error::{Code, Error};
use crate::exits::{Exit, UNKNOWN};
use crate::root::helper::Action;
use crate::runtime;
use crate::services::Services;
use crate::ttrpc::response::{self, Answer};

/// A part of a container, in the order of removal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// The container of the runtime.
    Container,
    /// The cgroup, which the runtime has not removed.
    Cgroup,
    /// The mounts of the root file system.
    Mounts,
}

impl Container {
    /// Removes the next part. `first` is the error of the Create, or of the runtime's first attempt
    /// in a Delete. A failed Create is answered with it, and a Delete with the result.
    pub(super) fn remove(
        &mut self,
        services: &mut Services,
        caller: &Caller,
        first: Option<Error>,
    ) -> Answer {
        let begun = if self.runtime.knows(&caller.key.id) {
            return self.remove_container(services, caller, first);
        } else if self.may_have_left_cgroup {
            self.remove_cgroup(services, caller, first.clone())
        } else if self.has_rootfs {
            let step = Step::Remove(Part::Mounts, first.clone());
            self.run_helper(services, caller, step, Action::Unmount, None)
        } else if self.state != State::Failed {
            return self.deleted(services);
        } else {
            self.forget(services);
            // A container that never ran has no exit status.
            let deleted = response::deleted(0, Some(Exit::now(UNKNOWN)));
            return first.map_or_else(|| response::now(&deleted), Err);
        };
        begun.or_else(|e| self.removal_failed(first, e))
    }

    /// Tries again to remove what a failed creation has left, unless that is being done.
    pub fn remove_again(&mut self, services: &mut Services) {
        if !self.is_busy(&self.key) {
            // A failure is logged.
            let _ = self.remove(services, &self.caller(None), None);
        }
    }

    /// Has the runtime delete the container.
    pub(super) fn remove_container(
        &mut self,
        services: &mut Services,
        caller: &Caller,
        first: Option<Error>,
    ) -> Answer {
        let mut arguments = vec!["delete"];
        arguments.extend((self.state == State::Failed).then_some("--force"));
        arguments.push(&caller.key.id);
        let step = Step::Remove(Part::Container, first.clone());
        let begun = self.run(services, caller, step, &arguments);
        begun.or_else(|e| self.removal_failed(first, e))
    }

    /// Starts a helper that removes the cgroup. It needs no bundle: containerd may have removed
    /// that.
    fn remove_cgroup(
        &mut self,
        services: &mut Services,
        caller: &Caller,
        first: Option<Error>,
    ) -> Answer {
        let path = runtime::memory_file_of(self.config.cgroups_path.as_bytes())?;
        let step = Step::Remove(Part::Cgroup, first);
        self.run_helper(services, caller, step, Action::RemoveCgroup, Some(path.as_fd()))
    }

    /// Continues after the removal of a part has ended, with the next one.
    pub(super) fn remove_next(
        &mut self,
        services: &mut Services,
        caller: &Caller,
        part: Part,
        first: Option<Error>,
        done: Result<(), Error>,
    ) -> Answer {
        match (part, done) {
            (Part::Container, done) if self.runtime.knows(&self.key.id) => {
                let unchanged = || Error::unknown("the runtime has not removed its state");
                let e = done.err().unwrap_or_else(unchanged);
                // A deletion that was killed would hang again. The next Delete is the next attempt.
                let was_killed = e.code == Code::DEADLINE_EXCEEDED;
                if was_killed || first.is_some() || self.state == State::Failed {
                    return self.removal_failed(first, e);
                }
                // runc removes no cgroup whose path is too long for a system call.
                let begun = self.remove_cgroup(services, caller, Some(e.clone()));
                return begun.or_else(|_| self.removal_failed(None, e));
            }
            // If the runtime does not know the container, a checkpoint that stops the container has
            // deleted it.
            (Part::Container, _) => {}
            (_, Err(e)) => return self.removal_failed(first, e),
            (Part::Cgroup, Ok(())) => self.may_have_left_cgroup = false,
            (Part::Mounts, Ok(())) => self.has_rootfs = false,
        }
        self.remove(services, caller, first)
    }

    fn removal_failed(&mut self, first: Option<Error>, e: Error) -> Answer {
        if self.state != State::Failed {
            let message = first.map_or_else(|| e.message.clone(), |first| format!("{first}; {e}"));
            return Err(Error { message, ..e });
        }
        let e = e.context("failed to clean up after a failed creation");
        self.log_failure(&e);
        Err(first.unwrap_or(e))
    }
}
