//! Removal of the leftovers of a container that could not be created. It is tried again until
//! nothing is left: there may be no process or descriptor for a command of the runtime at first.

use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

use containerd_shim_protos::api::DeleteResponse;
use protobuf::MessageField;

use crate::container::commands;
use crate::container::state::Event;
use crate::container::{Container, Retry};
use crate::error::Error;
use crate::exits::{Exit, UNKNOWN};
use crate::process_key::ProcessKey;
use crate::runtime;
use crate::runtime::helper::Action;
use crate::runtime::job::Purpose;
use crate::shim::Shim;
use crate::ttrpc::response::{self, Answer};
use crate::ttrpc::server::Reply;

/// Delays between attempts: the first and the longest.
const FIRST_WAIT: Duration = Duration::from_millis(200);
const LONGEST_WAIT: Duration = Duration::from_secs(60);

impl Shim {
    /// Handles a failed creation: removes the leftovers of the container, and then fails the Create
    /// with `reason`.
    pub fn create_failed(
        &mut self,
        key: &ProcessKey,
        reply: Option<Reply>,
        reason: Error,
    ) -> Answer {
        self.change(key, Event::CreateFailed);
        self.create_events.remove(&key.id);
        self.discard(key, reply, Some(reason))
    }

    /// Removes the leftovers of a container that could not be created, one step after another. The
    /// caller is answered with the reason, or, if it has asked for the deletion, with the result.
    pub fn discard(
        &mut self,
        key: &ProcessKey,
        reply: Option<Reply>,
        reason: Option<Error>,
    ) -> Answer {
        let container = self.container_in_any_state(key)?;
        let begun = if container.runtime.knows(&key.id) {
            let purpose = Purpose::Discard(reason.clone());
            self.run_for(key.clone(), reply, purpose, &["delete", "--force", &key.id])
        } else if container.may_have_left_cgroup {
            let purpose = Purpose::DiscardCgroup(reason.clone());
            self.run_remove_cgroup(key, reply, purpose)
        } else if container.rootfs.is_some() {
            let purpose = Purpose::DiscardMounts(reason.clone());
            self.run_helper(key.clone(), reply, purpose, Action::Unmount, None)
        } else {
            self.forget_discarded(&key.id);
            return reason.map_or_else(deleted, Err);
        };
        begun.map(|()| None).or_else(|e| self.discard_failed(key, reason, e))
    }

    /// Starts a helper that removes the cgroup of a container. It needs no bundle: containerd may
    /// have removed that.
    pub fn run_remove_cgroup(
        &mut self,
        key: &ProcessKey,
        reply: Option<Reply>,
        purpose: Purpose,
    ) -> Result<(), Error> {
        let input_file =
            runtime::memory_file_of(self.container_in_any_state(key)?.cgroups_path.as_bytes())?;
        let input_file = Some(input_file.as_fd());
        self.run_helper(key.clone(), reply, purpose, Action::RemoveCgroup, input_file)
    }

    /// Continues after the runtime has deleted such a container, or has failed to.
    pub fn runtime_discarded(
        &mut self,
        key: &ProcessKey,
        reply: Option<Reply>,
        reason: Option<Error>,
        done: Result<(), Error>,
    ) -> Answer {
        if !self.container_in_any_state(key)?.runtime.knows(&key.id) {
            return self.discard(key, reply, reason);
        }
        let left = || Error::unknown("the runtime has not removed its state");
        self.discard_failed(key, reason, done.err().unwrap_or_else(left))
    }

    /// Continues after a helper has removed the cgroup of such a container, or has failed to.
    pub fn cgroup_discarded(
        &mut self,
        key: &ProcessKey,
        reply: Option<Reply>,
        reason: Option<Error>,
        done: Result<(), Error>,
    ) -> Answer {
        if let Err(e) = done {
            return self.discard_failed(key, reason, e);
        }
        self.container_in_any_state(key)?.may_have_left_cgroup = false;
        self.discard(key, reply, reason)
    }

    /// Continues after a helper has unmounted the root file system of such a container, or has
    /// failed to.
    pub fn mounts_discarded(
        &mut self,
        key: &ProcessKey,
        reply: Option<Reply>,
        reason: Option<Error>,
        done: Result<(), Error>,
    ) -> Answer {
        if let Err(e) = done {
            return self.discard_failed(key, reason, e);
        }
        self.container_in_any_state(key)?.rootfs = None;
        self.discard(key, reply, reason)
    }

    fn discard_failed(&mut self, key: &ProcessKey, reason: Option<Error>, e: Error) -> Answer {
        let container = self.container_in_any_state(key)?;
        let wait = container.retry.map_or(FIRST_WAIT, |retry| (retry.wait * 2).min(LONGEST_WAIT));
        container.retry = Some(Retry { at: Instant::now() + wait, wait });
        let e = e.context("failed to clean up after a failed creation; retrying");
        commands::log_failure(key, &e);
        Err(reason.unwrap_or(e))
    }

    /// The time of the next attempt to remove something.
    pub fn discard_deadline(&self) -> Option<Instant> {
        // A container with a pending command is not due.
        let idle = self.containers.values().filter(|container| container.busy.is_none());
        idle.filter_map(|container| container.retry).map(|retry| retry.at).min()
    }

    /// Makes the attempts that are due.
    pub fn retry_discards(&mut self, now: Instant) {
        let is_due = |container: &Container| {
            container.busy.is_none() && container.retry.is_some_and(|retry| retry.at <= now)
        };
        let due = self.containers.iter().filter(|(_, container)| is_due(container));
        let due: Vec<ProcessKey> = due.map(|(id, _)| ProcessKey::new(id, "")).collect();
        for key in due {
            // A failure is logged and schedules the next attempt.
            let _ = self.discard(&key, None, None);
        }
    }

    fn forget_discarded(&mut self, id: &str) {
        let Some(container) = self.containers.remove(id) else { return };
        let calls = container.busy.unwrap_or_default();
        self.close_process(id, container.process);
        self.copiers.end(id);
        for (reply, request) in calls {
            self.dispatch(reply, request);
        }
    }
}

/// The answer to the Delete of a container that never ran.
fn deleted() -> Answer {
    let exit = Exit::now(UNKNOWN);
    let mut response = DeleteResponse::new();
    response.exit_status = exit.status;
    response.exited_at = MessageField::some(exit.at());
    response::now(&response)
}
