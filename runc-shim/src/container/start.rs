//! Start of containers and execs.

use containerd_shim_protos::api;
use containerd_shim_protos::events::task as task_events;

use crate::container::state::{self, Event, State};
use crate::container::{Container, cgroup_with};
use crate::error::Error;
use crate::exec;
use crate::exits::{Exit, UNKNOWN};
use crate::process_key::ProcessKey;
use crate::runtime::job::Purpose;
use crate::shim::Shim;
use crate::sys;
use crate::ttrpc::events;
use crate::ttrpc::response::{self, Answer};
use crate::ttrpc::server::Reply;

impl Shim {
    /// Starts a container.
    pub fn start(&mut self, reply: Reply, id: &str) -> Answer {
        let key = ProcessKey::new(id, "");
        let before = self.container(id)?.state;
        let (next, _) = state::step(before, Event::Start).map_err(Error::state)?;
        let run = match before {
            State::Restorable => self.restore(&key, reply).map(drop),
            _ => self.run_for(key.clone(), Some(reply), Purpose::Start, &["start", id]),
        };
        run?;
        self.container(id)?.state = next;
        Ok(None)
    }

    fn restore(&mut self, key: &ProcessKey, reply: Reply) -> Answer {
        self.start_copier(key)?;
        let prepared = self.prepare_streams(key)?;
        self.container_in_any_state(key)?.busy.get_or_insert_default();
        let run = self.await_logger(key.clone(), Some(reply), prepared, false);
        if run.is_err() {
            self.release(key);
        }
        run
    }

    /// Continues after the runtime has started a container, or has failed to.
    pub fn start_finished(&mut self, key: &ProcessKey, done: Result<(), Error>) -> Answer {
        let pid = self.container_in_any_state(key)?.state.pid();
        match done {
            Ok(()) => self.started(key, pid),
            Err(e) => {
                self.change(key, Event::StartFailed);
                self.announce_exit_if_done(&key.id);
                Err(e)
            }
        }
    }

    /// Completes the start or restore of a container.
    pub fn started(&mut self, key: &ProcessKey, pid: i32) -> Answer {
        let restored =
            matches!(self.container_in_any_state(key)?.state, State::Starting { pid: None, .. });
        let early = if restored { self.resolve_start(key, pid)? } else { None };
        self.change(key, Event::Started(pid));
        match early {
            Some(exit) => self.process_exited(key, exit),
            None if restored => {
                let container = self.container_in_any_state(key)?;
                container.cgroup = cgroup_with(&container.bundle, &key.id, pid);
                self.processes.insert(pid, key.clone());
                self.watch_oom_kills(&key.id);
            }
            None => {}
        }
        self.announce_exit_if_done(&key.id);
        let mut response = api::StartResponse::new();
        response.pid = response::unsigned(pid);
        response::now(&response)
    }

    /// Starts an exec.
    pub fn start_exec(&mut self, reply: Reply, key: &ProcessKey) -> Answer {
        self.check_not_exited(&key.id)?;
        self.start_copier(key)?;
        let exec = self.exec(key)?;
        let next = exec::state::step(exec.state, exec::state::Event::Start);
        let Some(next) = next.map_err(Error::state)? else { return response::empty() };
        exec.state = next;
        let run = self
            .prepare_streams(key)
            .and_then(|ready| self.await_logger(key.clone(), Some(reply), ready, false));
        if run.is_err() {
            self.exec_failed(key);
        }
        run
    }

    /// Fails if the first process of a container has exited, so that no exec can join it.
    pub fn check_not_exited(&mut self, id: &str) -> Result<(), Error> {
        if self.container(id)?.state.has_exited() {
            return Err(Error::state(format!("container {id} init process is not running")));
        }
        Ok(())
    }

    /// Handles the failed start of an exec.
    pub fn exec_failed(&mut self, key: &ProcessKey) {
        let Ok(exec) = self.exec(key) else { return };
        // A caller of Wait must not take it for a success.
        let exit = Exit::now(UNKNOWN);
        let failed = exec::state::step(exec.state, exec::state::Event::StartFailed(exit));
        if let Ok(Some(next)) = failed {
            exec.state = next;
        }
        let waiters = std::mem::take(&mut exec.process.waiters);
        self.answer_waiters(waiters, exit);
        self.announce_exit_if_done(&key.id);
    }

    /// Completes the start of an exec.
    pub fn exec_started(&mut self, key: &ProcessKey, pid: i32) -> Answer {
        let exit = self.resolve_start(key, pid)?;
        let exec = self.exec(key)?;
        let next = exec::state::step(exec.state, exec::state::Event::Started(pid));
        if let Some(next) = next.map_err(Error::state)? {
            exec.state = next;
        }
        let mut event = task_events::TaskExecStarted::new();
        (event.container_id, event.exec_id) = (key.id.clone(), key.exec.clone());
        event.pid = response::unsigned(pid);
        self.events.send_of_exec(events::EXEC_STARTED, &event, key, &self.reactor);
        match exit {
            Some(exit) => self.process_exited(key, exit),
            None => {
                self.processes.insert(pid, key.clone());
                self.end_remaining_exec(key, pid);
            }
        }
        let mut response = api::StartResponse::new();
        response.pid = response::unsigned(pid);
        response::now(&response)
    }

    /// Kills an exec that has joined its container after the remaining processes were killed, so
    /// that it does not delay the announcement of the container's exit.
    fn end_remaining_exec(&self, key: &ProcessKey, pid: i32) {
        let remains = |it: &Container| it.state.has_exited() && !it.own_pid_namespace;
        if self.containers.get(&key.id).is_some_and(remains) {
            // Not reaped yet, so the pid cannot have been reused.
            let _ = sys::kill(pid, libc::SIGKILL);
        }
    }
}
