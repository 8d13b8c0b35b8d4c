//! Delete of containers and execs. [`Container::remove_next`] has the order of the steps.

use std::time::Instant;

use super::state::State;
use super::{Container, missing};
use crate::error::Error;
use crate::exits;
use crate::process_key::ProcessKey;
use crate::services::Services;
use crate::ttrpc::events;
use crate::ttrpc::response::{self, Answer};
use crate::ttrpc::server::Reply;

impl Container {
    /// Deletes the container, when its last output is copied.
    pub(super) fn delete(&mut self, services: &mut Services, reply: Reply) -> Answer {
        if self.state == State::Failed {
            return self.remove(services, &self.caller(Some(reply)), None);
        }
        // A container that was never started has not exited: the deletion kills its process.
        let has_exited = self.state.has_exited();
        if has_exited && self.process.drain(&services.copiers, &self.key, reply)? {
            return Ok(None);
        }
        self.remove_container(services, &self.caller(Some(reply)), None)
    }

    pub(super) fn deleted(&mut self, services: &mut Services) -> Answer {
        self.is_gone = true;
        // The deletion kills the process of a container that was never started.
        if let Some(exit) = exits::exit_of_child(self.pid).filter(|_| !self.state.has_exited()) {
            self.process_exited(services, &self.key.clone(), exit);
        }
        let response = response::deleted(self.pid(), self.state.exit());
        services.send(events::DELETE, &events::delete(&self.key.id, &response));
        self.forget(services);
        response::now(&response)
    }

    /// Closes what belongs to a container that is deleted. Answers the calls that wait for it
    /// before the deletion itself: containerd then closes the connection.
    pub(super) fn forget(&mut self, services: &mut Services) {
        self.forget_creation();
        self.unwatch_oom_kills(services, false);
        let id = self.key.id.clone();
        services.children.forget(&id);
        self.forget_steps(services);
        let process = std::mem::take(&mut self.process);
        process.close(services, &self.key);
        for (exec_id, exec) in std::mem::take(&mut self.execs) {
            let key = ProcessKey::new(&id, &exec_id);
            exec.process.close(services, &key);
        }
        for (reply, _) in std::mem::take(&mut self.queue) {
            services.respond(reply, Err(missing()));
        }
        self.is_gone = true;
    }

    /// Deletes an exec, when its last output is copied.
    pub(super) fn delete_exec(
        &mut self,
        services: &mut Services,
        reply: Reply,
        key: &ProcessKey,
    ) -> Answer {
        let exec = self.exec(key)?;
        if exec.state.is_live() {
            return Err(Error::state("cannot delete a running process"));
        }
        if exec.process.drain(&services.copiers, key, reply)? {
            return Ok(None);
        }
        self.remove_exec(services, key)
    }

    fn remove_exec(&mut self, services: &mut Services, key: &ProcessKey) -> Answer {
        let file = self.pid_file(key);
        let missing = || Error::not_found(format!("process does not exist {}", key.exec));
        let exec = self.execs.remove(&key.exec).ok_or_else(missing)?;
        // An exec that was not started has no pid file.
        let _ = std::fs::remove_file(file);
        let state = exec.state;
        exec.process.close(services, key);
        response::now(&response::deleted(response::unsigned(state.pid()), state.exit()))
    }

    /// Continues the deletion of a process that has waited for its last output.
    pub(super) fn drained(&mut self, services: &mut Services, key: &ProcessKey, reply: Reply) {
        let answer = match key.exec.as_str() {
            "" => self.remove_container(services, &self.caller(Some(reply)), None),
            _ => self.remove_exec(services, key),
        };
        services.respond(reply, answer);
        self.release(services, key);
    }

    /// Continues a deletion that waits for the last output of a process, if there is none any more.
    pub(super) fn check_drained(&mut self, services: &mut Services, key: &ProcessKey) {
        let Ok(process) = self.process(key) else { return };
        if let Some(reply) = process.take_drained(&services.copiers, key) {
            self.drained(services, key, reply);
        }
    }

    /// Continues the deletions that have waited for too long.
    pub(super) fn end_late_drains(&mut self, services: &mut Services, now: Instant) {
        let execs = self.execs.iter_mut();
        let late = execs.filter_map(|(id, exec)| {
            Some((ProcessKey::new(&self.key.id, id), exec.process.take_late_drain(now)?))
        });
        let mut late: Vec<(ProcessKey, Reply)> = late.collect();
        late.extend(self.process.take_late_drain(now).map(|reply| (self.key.clone(), reply)));
        for (key, reply) in late {
            self.drained(services, &key, reply);
        }
    }
}
