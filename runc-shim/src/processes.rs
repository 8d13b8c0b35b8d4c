//! Processes of containers: signals, exits, and the ends of their streams.

use std::time::Instant;

use containerd_shim_protos::api;
use containerd_shim_protos::events::task as task_events;
use protobuf::MessageField;

use crate::cgroup::Cgroup;
use crate::commands::{self, Purpose};
use crate::container::Process;
use crate::container::state::{Event, State};
use crate::error::{Code, Error};
use crate::events;
use crate::exec;
use crate::exits::Exit;
use crate::io::logger;
use crate::io::stream::Stream;
use crate::runtime;
use crate::server::Reply;
use crate::shim::{Key, Shim};
use crate::sys;
use crate::task::{self, Answer};

impl Shim {
    /// Sends a signal to a process.
    pub fn kill(&mut self, reply: Reply, request: &api::KillRequest) -> Answer {
        let key = Key::new(&request.id, &request.exec_id);
        let signal = i32::try_from(request.signal)
            .map_err(|_| Error::new(Code::InvalidArgument, "no such signal"))?;
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

    /// Handles the exit of a process of a container.
    pub fn process_exited(&mut self, key: &Key, exit: Exit) {
        if key.exec.is_empty() {
            self.unwatch_memory(&key.id);
            self.change(key, Event::Exited(exit));
            self.thaw(key);
            self.kill_remaining(key);
        } else if let Ok(exec) = self.exec(key) {
            let pid = exec.state.pid();
            if let Ok(Some(next)) = exec::state::step(exec.state, exec::state::Event::Exited(exit))
            {
                exec.state = next;
                self.announce_exit(key, pid, exit);
            }
            self.announce_exit_if_done(&key.id);
        }
    }

    /// Whether the cgroup of a container is frozen.
    pub fn is_frozen(&self, key: &Key) -> bool {
        let container = self.containers.get(&key.id);
        container.and_then(|container| container.cgroup.as_ref()).is_some_and(Cgroup::is_frozen)
    }

    /// Thaws the cgroup of a container whose processes were or will be sent SIGKILL: with version 1
    /// a frozen process does not exit. The freezer is read in every state, because also another
    /// program can freeze a container, or the container itself. runc thaws the cgroup after
    /// SIGKILL, too; crun does not.
    pub fn thaw(&self, key: &Key) {
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
    pub fn thaw_running(&self, key: &Key) {
        let container = self.containers.get(&key.id);
        let is_paused = |state| matches!(state, State::Paused { .. } | State::Resuming { .. });
        if container.is_some_and(|container| !is_paused(container.state)) {
            self.thaw(key);
        }
    }

    /// Kills the processes that remain after the first one has exited, unless the container has its
    /// own PID namespace, in which the kernel kills them.
    pub fn kill_remaining(&mut self, key: &Key) {
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
    pub fn remaining_killed(&mut self, key: &Key) {
        if let Some(container) = self.containers.get_mut(&key.id) {
            container.killing_remaining = false;
        }
        self.announce_exit_if_done(&key.id);
    }

    /// Announces the exit of a container, if no exec and no kill of remaining processes is left.
    pub fn announce_exit_if_done(&mut self, id: &str) {
        let Some(container) = self.containers.get(id) else { return };
        let is_done = !container.killing_remaining && !container.has_live_execs();
        if is_done && matches!(container.state, State::Exiting { .. }) {
            self.change(&Key::new(id, ""), Event::ExecsGone);
        }
    }

    /// Announces the exit of a process, and answers the calls that wait for it.
    pub fn announce_exit(&mut self, key: &Key, pid: i32, exit: Exit) {
        let mut event = task_events::TaskExit::new();
        event.container_id.clone_from(&key.id);
        event.id = key.process().to_owned();
        event.pid = task::unsigned(pid);
        event.exit_status = exit.status;
        event.exited_at = MessageField::some(exit.at());
        self.events.send(events::EXIT, &event, &self.reactor);
        let Ok(process) = self.process(key) else { return };
        let waiters = std::mem::take(&mut process.waiters);
        if let Some(console) = process.console.take() {
            process.stdin = None;
            let streams = process.streams.clone();
            if let Some(copier) = self.copiers.of(&key.id) {
                streams.into_iter().for_each(|stream| copier.finish(stream));
                copier.close(vec![console]);
            }
        }
        for waiter in waiters {
            let answer = task::now(&task::waited(Some(exit)));
            self.answer(waiter, answer);
        }
    }

    /// Handles the end of a stream: hangs up the terminal of the process, and continues a deletion
    /// that waits for the last output.
    pub fn stream_ended(&mut self, id: &str, stream: u32) {
        let Some(key) = self.stream_owner(id, stream) else { return };
        let Ok(process) = self.process(&key) else { return };
        let console = process.console.take();
        let streams = process.streams.clone();
        if let (Some(console), Some(copier)) = (console, self.copiers.of(id)) {
            streams.iter().for_each(|stream| copier.hang_up(*stream));
            copier.close(vec![console]);
        }
        if !self.is_draining(&key) {
            self.drained(&key);
        }
    }

    fn stream_owner(&self, id: &str, stream: u32) -> Option<Key> {
        let has = |process: &Process| process.streams.contains(&stream);
        let container = self.containers.get(id)?;
        if has(&container.process) {
            return Some(Key::new(id, ""));
        }
        let exec = container.execs.iter().find(|(_, exec)| has(&exec.process));
        exec.map(|(exec, _)| Key::new(id, exec))
    }

    /// Starts the copier thread of a container before a process is created, if the process has
    /// streams: without a thread nothing is left to remove.
    pub fn start_copier(&mut self, key: &Key) -> Result<(), Error> {
        if self.known_process(key)?.stdio.is_none() {
            return Ok(());
        }
        self.copiers.start(&key.id)
    }

    /// Forgets a logging program that has exited, because its pid can be reused once it is reaped,
    /// and continues a deletion that waits for it.
    pub fn logger_ended(&mut self, pid: i32) {
        let mut keys = Vec::new();
        for (id, container) in &mut self.containers {
            let execs = container.execs.iter_mut();
            let execs = execs.map(|(exec, it)| (exec.as_str(), &mut it.process));
            for (exec, process) in execs.chain([("", &mut container.process)]) {
                if process.logger.take_if(|logger| *logger == pid).is_some() {
                    keys.push(Key::new(id, exec));
                }
            }
        }
        for key in keys {
            if !self.is_draining(&key) {
                self.drained(&key);
            }
        }
    }

    /// Closes the streams and the terminal of a deleted process, fails the calls that wait for it,
    /// and ends its logging program.
    pub fn close_process(&mut self, id: &str, process: Process) {
        if let Some(copier) = self.copiers.of(id) {
            process.streams.iter().for_each(|stream| copier.process_deleted(*stream));
        }
        let prepared = process.prepared.into_iter().flat_map(Stream::into_ends);
        self.copiers.close(id, prepared.chain(process.console).collect());
        for waiter in &process.waiters {
            let gone = Err(Error::not_found("process was deleted"));
            self.answer(*waiter, gone);
        }
        if let Some(pid) = process.logger {
            self.end_logger(pid);
        }
    }

    /// Sends SIGTERM to a logging program that runs, and sets the time at which it is killed.
    /// A logging program should exit when its input ends; this is for one that does not.
    pub fn end_logger(&mut self, pid: i32) {
        if let Some(end) = self.loggers.get_mut(&pid) {
            let _ = sys::kill(pid, libc::SIGTERM);
            *end = Some(Instant::now() + logger::EXIT_TIMEOUT);
        }
    }
}

fn signal_process(pid: i32, signal: i32) -> Answer {
    match sys::kill(pid, signal) {
        Ok(()) => task::empty(),
        Err(e) => Err(runtime::kill_error(Error::from(e))),
    }
}
