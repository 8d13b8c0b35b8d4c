//! Start of containers and execs. The steps of a Start that creates a process are in
//! [`super::launch`].

use containerd_shim_protos::events::task as task_events;

use super::Container;
use super::state::{self, Event, State};
use super::step::{Caller, Step};
use crate::error::Error;
use crate::exec;
use crate::exits::{Exit, UNKNOWN};
use crate::process_key::ProcessKey;
use crate::runtime::Place;
use crate::services::Services;
use crate::sys;
use crate::ttrpc::events;
use crate::ttrpc::response::{self, Answer};
use crate::ttrpc::server::Reply;

impl Container {
    /// Starts the container, or restores it from a checkpoint.
    pub(super) fn start(&mut self, services: &mut Services, reply: Reply) -> Answer {
        let caller = self.caller(Some(reply));
        let before = self.state;
        let (next, _) = state::step(before, Event::Start).map_err(Error::state)?;
        if before == State::Restorable {
            self.state = next;
            return self.launch(services, caller);
        }
        self.run(services, &caller, Step::Start, &["start", &caller.key.id], Place::default())?;
        self.state = next;
        Ok(None)
    }

    /// Continues after the runtime has started the container, or has failed to.
    pub(super) fn start_ended(
        &mut self,
        services: &mut Services,
        done: Result<(), Error>,
    ) -> Answer {
        match done {
            Ok(()) => self.started(services, self.state.pid()),
            Err(e) => {
                self.change(services, Event::StartFailed);
                self.announce_exit_if_done(services);
                Err(e)
            }
        }
    }

    /// Completes the start or restore of the container.
    pub(super) fn started(&mut self, services: &mut Services, pid: i32) -> Answer {
        self.change(services, Event::Started(pid));
        self.announce_exit_if_done(services);
        response::started(response::unsigned(pid))
    }

    /// Starts an exec.
    pub(super) fn start_exec(
        &mut self,
        services: &mut Services,
        reply: Reply,
        key: &ProcessKey,
    ) -> Answer {
        self.check_not_exited()?;
        self.exec(key)?.change(exec::state::Event::Start)?;
        self.launch(services, Caller { key: key.clone(), reply: Some(reply) })
    }

    /// Fails if the first process has exited, so that no exec can join it.
    pub(super) fn check_not_exited(&self) -> Result<(), Error> {
        if self.state.has_exited() {
            let reason = format!("container {} init process is not running", self.key.id);
            return Err(Error::state(reason));
        }
        Ok(())
    }

    /// Handles the failed start of an exec.
    pub(super) fn exec_failed(&mut self, services: &mut Services, key: &ProcessKey) {
        let Ok(exec) = self.exec(key) else { return };
        // A caller of Wait must not take it for a success.
        let exit = Exit::now(UNKNOWN);
        // An exec that was deleted meanwhile has no state to change.
        let _ = exec.change(exec::state::Event::StartFailed(exit));
        exec.process().waiters().answer(services, exit);
        self.announce_exit_if_done(services);
    }

    /// Completes the start of an exec, which may have exited already.
    pub(super) fn exec_started(
        &mut self,
        services: &mut Services,
        key: &ProcessKey,
        pid: i32,
        exit: Option<Exit>,
    ) -> Answer {
        self.exec(key)?.change(exec::state::Event::Started(pid))?;
        let mut event = task_events::TaskExecStarted::new();
        (event.container_id, event.exec_id) = (key.id.clone(), key.exec.clone());
        event.pid = response::unsigned(pid);
        services.send_of(events::EXEC_STARTED, &event, key);
        if let Some(exit) = exit {
            self.process_exited(services, key, exit);
        } else if self.state.has_exited() && !self.config.own_pid_namespace {
            // The exec has joined the container after the remaining processes were killed, and must
            // not delay the announcement of the exit. It is not reaped yet, so its pid cannot have
            // been reused.
            let _ = sys::kill(pid, libc::SIGKILL);
        }
        response::started(response::unsigned(pid))
    }
}
