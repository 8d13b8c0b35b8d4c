//! Exits of processes of containers, and the ends of their streams.

use std::time::Instant;

use containerd_shim_protos::events::task as task_events;
use protobuf::MessageField;

use crate::container::state::{Event, State};
use crate::error::Error;
use crate::exec;
use crate::exits::Exit;
use crate::io::logger;
use crate::io::process_streams::ProcessStreams;
use crate::io::stream::Stream;
use crate::process_key::ProcessKey;
use crate::shim::Shim;
use crate::sys;
use crate::ttrpc::events;
use crate::ttrpc::response;

impl Shim {
    /// Handles the exit of a process of a container.
    pub fn process_exited(&mut self, key: &ProcessKey, exit: Exit) {
        if key.exec.is_empty() {
            self.unwatch_oom_kills(&key.id);
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

    /// Announces the exit of a container, if no exec and no kill of remaining processes is left.
    pub fn announce_exit_if_done(&mut self, id: &str) {
        let Some(container) = self.containers.get(id) else { return };
        let is_done = !container.killing_remaining && !container.has_live_execs();
        if is_done && matches!(container.state, State::Exiting { .. }) {
            self.change(&ProcessKey::new(id, ""), Event::ExecsGone);
        }
    }

    /// Announces the exit of a process, and answers the calls that wait for it.
    pub fn announce_exit(&mut self, key: &ProcessKey, pid: i32, exit: Exit) {
        let mut event = task_events::TaskExit::new();
        event.container_id.clone_from(&key.id);
        event.id = key.process().to_owned();
        event.pid = response::unsigned(pid);
        event.exit_status = exit.status;
        event.exited_at = MessageField::some(exit.at());
        if key.exec.is_empty() {
            self.events.send(events::EXIT, &event, &self.reactor);
        } else {
            self.events.send_of_exec(events::EXIT, &event, key, &self.reactor);
        }
        let Ok(process) = self.process(key) else { return };
        let waiters = std::mem::take(&mut process.waiters);
        if let Some(console) = process.console.take() {
            process.stdin = None;
            let streams = process.streams.clone();
            if let Some(copier) = self.copiers.find(&key.id) {
                streams.into_iter().for_each(|stream| copier.finish(stream));
                copier.close(vec![console]);
            }
        }
        self.answer_waiters(waiters, exit);
    }

    /// Handles the end of a stream: hangs up the terminal of the process, and continues a deletion
    /// that waits for the last output.
    pub fn stream_ended(&mut self, id: &str, stream: u32) {
        let Some(key) = self.stream_owner(id, stream) else { return };
        let Ok(process) = self.process(&key) else { return };
        let console = process.console.take();
        let streams = process.streams.clone();
        if let (Some(console), Some(copier)) = (console, self.copiers.find(id)) {
            streams.iter().for_each(|stream| copier.hang_up(*stream));
            copier.close(vec![console]);
        }
        if !self.is_draining(&key) {
            self.drained(&key);
        }
    }

    fn stream_owner(&self, id: &str, stream: u32) -> Option<ProcessKey> {
        let has = |process: &ProcessStreams| process.streams.contains(&stream);
        let container = self.containers.get(id)?;
        if has(&container.process) {
            return Some(ProcessKey::new(id, ""));
        }
        let exec = container.execs.iter().find(|(_, exec)| has(&exec.process));
        exec.map(|(exec, _)| ProcessKey::new(id, exec))
    }

    /// Starts the copier thread of a container before a process is created, if the process has
    /// streams: without a thread nothing is left to remove.
    pub fn start_copier(&mut self, key: &ProcessKey) -> Result<(), Error> {
        if self.process_in_any_state(key)?.stdio.is_none() {
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
                    keys.push(ProcessKey::new(id, exec));
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
    pub fn close_process(&mut self, id: &str, process: ProcessStreams) {
        if let Some(copier) = self.copiers.find(id) {
            process.streams.iter().for_each(|stream| copier.process_deleted(*stream));
        }
        let prepared = process.prepared.into_iter().flat_map(Stream::into_ends);
        self.copiers.close(id, prepared.chain(process.console).collect());
        for waiter in &process.waiters {
            let gone = Err(Error::not_found("process was deleted"));
            self.respond(*waiter, gone);
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
