//! Delete of containers and execs.

use std::time::{Duration, Instant};

use containerd_shim_protos::api;
use containerd_shim_protos::events::task as task_events;
use protobuf::MessageField;

use crate::container::create::pid_file;
use crate::container::state::{self, Event, State};
use crate::error::Error;
use crate::exec;
use crate::exits;
use crate::process_key::ProcessKey;
use crate::runtime::helper::Action;
use crate::runtime::job::{Attempt, Purpose};
use crate::shim::Shim;
use crate::ttrpc::events;
use crate::ttrpc::response::{self, Answer};
use crate::ttrpc::server::Reply;

/// How long a deletion waits for the last output, and for the exit of the logging program.
const DRAIN: Duration = Duration::from_secs(10);

impl Shim {
    /// Deletes a container.
    pub fn delete(&mut self, reply: Reply, id: &str) -> Answer {
        let key = ProcessKey::new(id, "");
        let container = self.container_in_any_state(&key)?;
        if container.state == State::Discarding {
            return self.discard(&key, Some(reply), None);
        }
        let (next, _) = state::step(container.state, Event::Delete).map_err(Error::state)?;
        container.state = next;
        // A container that was never started has not exited: the deletion kills its process.
        let has_exited = container.state.exit().is_some();
        if has_exited && self.is_draining(&key) {
            let container = self.container(id)?;
            container.drain = Some((reply, Instant::now() + DRAIN));
            container.busy.get_or_insert_default();
            return Ok(None);
        }
        self.run_delete(&key, Some(reply), Attempt::First)
    }

    /// Whether the last output of a process is being copied, or is read by its logging program.
    pub fn is_draining(&mut self, key: &ProcessKey) -> bool {
        let Ok(process) = self.process_in_any_state(key) else { return false };
        let (has_logger, streams) = (process.logger.is_some(), process.streams.clone());
        has_logger || streams.into_iter().any(|stream| self.copiers.is_copying(&key.id, stream))
    }

    /// Continues a deletion when the process is drained, or after [`DRAIN`].
    pub fn drained(&mut self, key: &ProcessKey) {
        let Some(container) = self.containers.get_mut(&key.id) else { return };
        let is_exec = !key.exec.is_empty();
        let drain = if is_exec {
            container.execs.get_mut(&key.exec).and_then(|exec| exec.drain.take())
        } else {
            container.drain.take()
        };
        let Some((reply, _)) = drain else { return };
        let answer = if is_exec {
            self.remove_exec(key)
        } else {
            self.run_delete(key, Some(reply), Attempt::First)
        };
        self.respond(reply, answer);
        self.release(key);
    }

    fn run_delete(&mut self, key: &ProcessKey, reply: Option<Reply>, attempt: Attempt) -> Answer {
        let run = self.run_for(key.clone(), reply, Purpose::Delete(attempt), &["delete", &key.id]);
        run.map(|()| None).or_else(|e| self.delete_failed(key, e))
    }

    /// Continues a deletion after the runtime has deleted the container, or has failed to.
    pub fn runtime_deleted(
        &mut self,
        key: &ProcessKey,
        reply: Option<Reply>,
        attempt: Attempt,
        done: Result<(), Error>,
    ) -> Answer {
        let container = self.container_in_any_state(key)?;
        let begun = match done {
            // If the runtime does not know the container, a checkpoint that stops the container has
            // deleted it.
            Err(e) if container.runtime.knows(&key.id) => match attempt {
                // runc removes no cgroup whose path is too long for a system call.
                Attempt::First => {
                    let purpose = Purpose::RemoveCgroup(e.clone());
                    self.run_remove_cgroup(key, reply, purpose).map_err(|_| e)
                }
                Attempt::Last => Err(e),
            },
            _ if container.may_have_left_cgroup => {
                let reason = Error::unknown("the runtime was killed");
                self.run_remove_cgroup(key, reply, Purpose::RemoveCgroup(reason))
            }
            _ if container.rootfs.is_some() => {
                self.run_helper(key.clone(), reply, Purpose::Unmount, Action::Unmount, None)
            }
            _ => return self.deleted(key),
        };
        begun.map(|()| None).or_else(|e| self.delete_failed(key, e))
    }

    /// Continues after a helper has removed the cgroup of a container that the runtime could not
    /// delete, or has failed to.
    pub fn cgroup_removed(
        &mut self,
        key: &ProcessKey,
        reply: Option<Reply>,
        reason: Error,
        done: Result<(), Error>,
    ) -> Answer {
        match done {
            Ok(()) => {
                self.container_in_any_state(key)?.may_have_left_cgroup = false;
                self.run_delete(key, reply, Attempt::Last)
            }
            Err(e) => {
                let message = format!("{reason}; {e}");
                self.delete_failed(key, Error { message, ..reason })
            }
        }
    }

    /// Continues after a helper has unmounted the root file system of a deleted container, or has
    /// failed to.
    pub fn unmounted(&mut self, key: &ProcessKey, done: Result<(), Error>) -> Answer {
        done.or_else(|e| self.delete_failed(key, e).map(drop))?;
        self.deleted(key)
    }

    fn delete_failed(&mut self, key: &ProcessKey, e: Error) -> Answer {
        self.change(key, Event::Failed);
        Err(e)
    }

    fn deleted(&mut self, key: &ProcessKey) -> Answer {
        // The deletion kills the process of a container that was never started.
        self.take_last_exits(&key.id);
        let state = self.container_in_any_state(key)?.state;
        let exit = state.exit();
        let mut event = task_events::TaskDelete::new();
        event.container_id.clone_from(&key.id);
        event.pid = response::unsigned(state.pid());
        let mut response = api::DeleteResponse::new();
        response.pid = event.pid;
        if let Some(exit) = exit {
            (event.exit_status, response.exit_status) = (exit.status, exit.status);
            event.exited_at = MessageField::some(exit.at());
            response.exited_at = event.exited_at.clone();
        }
        self.events.send(events::DELETE, &event, &self.reactor);
        self.forget(&key.id);
        response::now(&response)
    }

    /// Handles the exits of a container's processes that were not handled yet.
    fn take_last_exits(&mut self, id: &str) {
        let of = self.processes.iter().filter(|(_, key)| key.id == *id);
        // Execs before the container.
        let mut ended: Vec<(bool, i32)> =
            of.map(|(pid, key)| (key.exec.is_empty(), *pid)).collect();
        ended.sort_unstable();
        for (_, pid) in ended {
            if let Some(exit) = exits::exit_of_child(pid)
                && let Some(key) = self.processes.remove(&pid)
            {
                self.process_exited(&key, exit);
            }
        }
    }

    /// Forgets a container that is deleted.
    fn forget(&mut self, id: &str) {
        self.unwatch_oom_kills(id);
        let Some(container) = self.containers.remove(id) else { return };
        self.processes.retain(|_, key| key.id != *id);
        self.close_process(id, container.process);
        for (exec_id, exec) in container.execs {
            self.events.exec_deleted(&ProcessKey::new(id, &exec_id));
            self.close_process(id, exec.process);
            if let Some((reply, _)) = exec.drain {
                self.respond(reply, Err(Error::not_found("process was deleted")));
            }
            for (reply, request) in exec.queue {
                self.dispatch(reply, request);
            }
        }
        self.copiers.end(id);
        // Before the deletion itself is answered: containerd then closes the connection.
        for (reply, request) in container.busy.unwrap_or_default() {
            self.dispatch(reply, request);
        }
    }

    /// Deletes an exec.
    pub fn delete_exec(&mut self, reply: Reply, key: &ProcessKey) -> Answer {
        let exec = self.exec(key)?;
        exec::state::step(exec.state, exec::state::Event::Delete).map_err(Error::state)?;
        if exec.drain.is_some() {
            return Err(Error::state("the process is being deleted"));
        }
        if self.is_draining(key) {
            self.exec(key)?.drain = Some((reply, Instant::now() + DRAIN));
            return Ok(None);
        }
        self.remove_exec(key)
    }

    fn remove_exec(&mut self, key: &ProcessKey) -> Answer {
        let container = self.container(&key.id)?;
        let file = pid_file(&container.bundle, key);
        let missing = || Error::not_found(format!("process does not exist {}", key.exec));
        let exec = container.execs.remove(&key.exec).ok_or_else(missing)?;
        // An exec that was not started has no pid file.
        let _ = std::fs::remove_file(file);
        let state = exec.state;
        self.events.exec_deleted(key);
        self.close_process(&key.id, exec.process);
        let mut response = api::DeleteResponse::new();
        response.pid = response::unsigned(state.pid());
        if let Some(exit) = state.exit() {
            response.exit_status = exit.status;
            response.exited_at = MessageField::some(exit.at());
        }
        response::now(&response)
    }
}
