//! Signals for processes of containers.

use containerd_shim_protos::api;

use crate::cgroup::Cgroup;
use crate::container::commands;
use crate::container::state::State;
use crate::error::{Code, Error};
use crate::exec;
use crate::process_key::ProcessKey;
use crate::runtime;
use crate::runtime::job::Purpose;
use crate::shim::Shim;
use crate::sys;
use crate::ttrpc::response::{self, Answer};
use crate::ttrpc::server::Reply;

impl Shim {
    /// Sends a signal to a process.
    pub fn kill(&mut self, reply: Reply, request: &api::KillRequest) -> Answer {
        let key = ProcessKey::new(&request.id, &request.exec_id);
        let signal = i32::try_from(request.signal)
            .map_err(|_| Error::new(Code::INVALID_ARGUMENT, "no such signal"))?;
        let finished = || Error::not_found("process already finished");
        if !key.exec.is_empty() {
            let state = self.exec(&key)?.state;
            return match state {
                exec::state::State::Running { pid } => signal_process(pid, signal),
                exec::state::State::Stopped { .. } => Err(finished()),
                _ => Err(Error::state("process not created")),
            };
        }
        let container = self.container(&key.id)?;
        let plain = matches!(container.state, State::Created { .. } | State::Running { .. });
        if plain && container.own_pid_namespace && !request.all {
            let answer = signal_process(container.state.pid(), signal);
            if answer.is_ok() && signal == libc::SIGKILL {
                self.thaw(&key);
            }
            return answer;
        }
        if container.own_pid_namespace && container.state.has_exited() {
            return Err(finished());
        }
        // The runtime can signal all processes of a container, and the processes of a paused one.
        let purpose = Purpose::Kill(signal);
        let signal = signal.to_string();
        let mut arguments = vec!["kill"];
        arguments.extend(request.all.then_some("--all"));
        arguments.extend([key.id.as_str(), &signal]);
        self.run_for(key.clone(), Some(reply), purpose, &arguments)?;
        Ok(None)
    }

    /// Whether the cgroup of a container is frozen.
    pub fn is_frozen(&self, key: &ProcessKey) -> bool {
        let container = self.containers.get(&key.id);
        container.and_then(|container| container.cgroup.as_ref()).is_some_and(Cgroup::is_frozen)
    }

    /// Thaws the cgroup of a container whose processes were or will be sent SIGKILL: with version 1
    /// a frozen process does not exit. The freezer is read in every state, because also another
    /// program can freeze a container, or the container itself. runc thaws the cgroup after
    /// SIGKILL, too; crun does not.
    pub fn thaw(&self, key: &ProcessKey) {
        let container = self.containers.get(&key.id);
        let cgroup = container.and_then(|container| container.cgroup.as_ref());
        let Some(cgroup) = cgroup.filter(|cgroup| cgroup.is_frozen()) else { return };
        if let Err(e) = cgroup.thaw()
            && cgroup.is_frozen()
        {
            commands::log_failure(key, &e.context("thaw cgroup"));
        }
    }

    /// Thaws a container that runs, and that a killed command of the runtime may have frozen: it
    /// is not paused, so that no Resume could thaw it.
    pub fn thaw_running(&self, key: &ProcessKey) {
        let container = self.containers.get(&key.id);
        let is_paused = |state| matches!(state, State::Paused { .. } | State::Resuming { .. });
        if container.is_some_and(|container| !is_paused(container.state)) {
            self.thaw(key);
        }
    }

    /// Kills the processes that remain after the first one has exited, unless the container has its
    /// own PID namespace, in which the kernel kills them.
    pub fn kill_remaining(&mut self, key: &ProcessKey) {
        let Some(container) = self.containers.get(&key.id) else { return };
        let execs = container.execs.values().map(|exec| exec.state);
        let execs: Vec<i32> = execs.filter(|state| state.is_live()).map(|s| s.pid()).collect();
        let may_remain = !container.own_pid_namespace;
        if may_remain && !matches!(container.state, State::Deleting { .. }) {
            let arguments = ["kill", "--all", &key.id, "9"];
            match self.run_for(key.clone(), None, Purpose::KillRemaining, &arguments) {
                Ok(()) => {
                    if let Some(container) = self.containers.get_mut(&key.id) {
                        container.killing_remaining = true;
                    }
                }
                Err(e) => commands::log_failure(key, &e),
            }
            // Also if the command fails, no exec may delay the announcement of the exit.
            for pid in execs.into_iter().filter(|pid| self.processes.contains_key(pid)) {
                // Not reaped yet, so the pid cannot have been reused.
                let _ = sys::kill(pid, libc::SIGKILL);
            }
        }
        self.limit_after_exit(&key.id);
        self.announce_exit_if_done(&key.id);
    }

    /// Handles the end of the command that kills the remaining processes of a container.
    pub fn remaining_killed(&mut self, key: &ProcessKey, done: Result<(), Error>) {
        if let Err(e) = done {
            commands::log_failure(key, &e);
        }
        if let Some(container) = self.containers.get_mut(&key.id) {
            container.killing_remaining = false;
        }
        self.announce_exit_if_done(&key.id);
    }
}

fn signal_process(pid: i32, signal: i32) -> Answer {
    match sys::kill(pid, signal) {
        Ok(()) => response::empty(),
        Err(e) => Err(runtime::kill_error(Error::from(e))),
    }
}
