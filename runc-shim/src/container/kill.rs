//! Signals for processes of containers.

use containerd_shim_protos::api;

use super::Container;
use super::state::State;
use super::step::Step;
use crate::cgroup::Cgroup;
use crate::error::{Code, Error};
use crate::exec;
use crate::process_key::ProcessKey;
use crate::runtime;
use crate::services::Services;
use crate::sys;
use crate::ttrpc::response::{self, Answer};
use crate::ttrpc::server::Reply;

impl Container {
    /// Sends a signal to a process.
    pub(super) fn kill(
        &mut self,
        services: &mut Services,
        reply: Reply,
        key: &ProcessKey,
        request: &api::KillRequest,
    ) -> Answer {
        let signal = i32::try_from(request.signal)
            .map_err(|_| Error::new(Code::INVALID_ARGUMENT, "no such signal"))?;
        let finished = || Error::not_found("process already finished");
        if *key != self.key {
            return match self.exec(key)?.state {
                exec::State::Running(pid) => signal_process(pid, signal),
                exec::State::Stopped(..) => Err(finished()),
                _ => Err(Error::state("process not created")),
            };
        }
        let has_own_namespace = self.config.own_pid_namespace;
        let is_plain = matches!(self.state, State::Created | State::Running);
        if is_plain && has_own_namespace && !request.all {
            let answer = signal_process(self.pid, signal);
            if answer.is_ok() && signal == libc::SIGKILL {
                self.thaw();
            }
            return answer;
        }
        if has_own_namespace && self.state.has_exited() {
            return Err(finished());
        }
        // The runtime can signal all processes of a container, and the processes of a paused one.
        let number = signal.to_string();
        let mut arguments = vec!["kill"];
        arguments.extend(request.all.then_some("--all"));
        arguments.extend([key.id.as_str(), &number]);
        let caller = self.caller(Some(reply));
        self.run(services, &caller, Step::Kill(signal), &arguments)
    }

    /// Handles the end of the command that sends a signal.
    pub(super) fn kill_ended(&mut self, signal: i32, done: Result<(), Error>) -> Answer {
        if done.is_ok() && signal == libc::SIGKILL {
            self.thaw();
        }
        done.map_err(runtime::kill_error).and_then(|()| response::empty())
    }

    /// Whether the cgroup is frozen.
    pub(super) fn is_frozen(&self) -> bool {
        self.cgroup.as_ref().is_some_and(Cgroup::is_frozen)
    }

    /// Thaws the cgroup of a container whose processes were or will be sent SIGKILL: with version 1
    /// a frozen process does not exit. The freezer is read in every state, because also another
    /// program can freeze a container, or the container itself. runc thaws the cgroup after
    /// SIGKILL, too; crun does not.
    pub(super) fn thaw(&self) {
        let Some(cgroup) = self.cgroup.as_ref().filter(|cgroup| cgroup.is_frozen()) else {
            return;
        };
        if let Err(e) = cgroup.thaw()
            && cgroup.is_frozen()
        {
            self.log_failure(&e.context("thaw cgroup"));
        }
    }

    /// Thaws a container that runs, and that a killed command of the runtime may have frozen: it
    /// is not paused, so that no Resume could thaw it.
    pub(super) fn thaw_running(&self) {
        if self.state != State::Paused {
            self.thaw();
        }
    }

    /// Kills the processes that remain after the first one has exited, unless the container has its
    /// own PID namespace, in which the kernel kills them.
    pub(super) fn kill_remaining(&mut self, services: &mut Services) {
        if !self.config.own_pid_namespace && !self.is_deleting() {
            let caller = self.caller(None);
            let arguments = ["kill", "--all", &caller.key.id, "9"];
            if let Err(e) = self.run(services, &caller, Step::KillRemaining, &arguments) {
                self.log_failure(&e);
            }
            // Also if the command fails, no exec may delay the announcement of the exit.
            for exec in self.execs.values() {
                if let exec::State::Running(pid) = exec.state {
                    // The exec is not reaped yet, so its pid cannot have been reused.
                    let _ = sys::kill(pid, libc::SIGKILL);
                }
            }
        }
        self.limit_after_exit();
        self.announce_exit_if_done(services);
    }

    /// Handles the end of the command that kills the remaining processes.
    pub(super) fn remaining_killed(&mut self, services: &mut Services, done: Result<(), Error>) {
        if let Err(e) = done {
            self.log_failure(&e);
        }
        self.announce_exit_if_done(services);
    }
}

fn signal_process(pid: i32, signal: i32) -> Answer {
    match sys::kill(pid, signal) {
        Ok(()) => response::empty(),
        Err(e) => Err(runtime::kill_error(Error::from(e))),
    }
}
