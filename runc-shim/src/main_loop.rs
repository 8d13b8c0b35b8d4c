//! The main loop of the shim.

use std::time::Instant;

use crate::error::{Context as _, Error};
use crate::exits::{self, Exit};
use crate::log;
use crate::process_key::ProcessKey;
use crate::reactor::Source;
use crate::shim::Shim;

/// Maximum number of exits that are handled before other work.
const MAX_EXITS_AT_ONCE: usize = 256;

impl Shim {
    /// Runs until it is shut down.
    pub fn run(mut self) -> Result<(), Error> {
        while !self.may_exit() {
            let ready = self.reactor.wait(self.deadline()).context("wait")?;
            for source in ready {
                self.ready(source);
            }
            for (id, stream) in self.copiers.take_ended().context("copy streams")? {
                self.stream_ended(&id, stream);
            }
            self.handle_timeouts();
        }
        Ok(())
    }

    fn may_exit(&self) -> bool {
        let delivered =
            self.events.is_empty() && !self.server.has_unsent() && !self.copiers.has_pending_work();
        let done = delivered && self.jobs.is_empty();
        self.shutdown_deadline.is_some_and(|at| done || at <= Instant::now())
    }

    fn ready(&mut self, source: Source) {
        match source {
            Source::Listener => self.server.accept(&self.reactor),
            Source::Signals => self.signalled(),
            Source::Events => self.events.ready(&self.reactor),
            Source::Connection(id) => {
                for call in self.server.ready(id, &self.reactor) {
                    self.call(call);
                }
            }
            // `run` handles ended streams next; the copier threads handle the streams.
            Source::Copier | Source::Stream(_) => {}
            Source::Logger(id) => self.logger_ready(id),
            Source::OomWatch(id) => self.oom_event(id),
            Source::PauseProcess => self.pause_process_ready(),
            Source::Output(id) => self.output_ready(id),
        }
    }

    /// Handles pending signals. On SIGTERM and SIGINT the shim shuts down; its containers keep
    /// running.
    fn signalled(&mut self) {
        if let Some(signal) = self.signals.take() {
            let left = self.containers.len();
            log::warn(format_args!("shim exits on {signal}; remaining containers: {left}"));
            self.begin_shutdown();
        }
        self.reap();
    }

    /// Handles at most [`MAX_EXITS_AT_ONCE`] exits, so that a container which causes exits faster
    /// than they are reaped does not block other work.
    fn reap(&mut self) {
        for _ in 0..MAX_EXITS_AT_ONCE {
            let Some((pid, exit)) = exits::next_exited() else {
                self.more_exits = false;
                return;
            };
            self.child_ended(pid, exit);
            exits::reap(pid);
        }
        self.more_exits = true;
    }

    fn child_ended(&mut self, pid: i32, exit: Exit) {
        if let Some(job) = self.jobs.remove(&pid) {
            self.finished(job, exit);
        } else if let Some(key) = self.processes.remove(&pid) {
            self.process_exited(&key, exit);
        } else if self.loggers.remove(&pid).is_some() {
            self.logger_ended(pid);
        } else {
            self.exits.keep(pid, exit);
        }
    }

    /// When [`Shim::handle_timeouts`] has work to do at the latest.
    fn deadline(&self) -> Option<Instant> {
        if self.more_exits {
            return Some(Instant::now());
        }
        let drains = self.containers.values().flat_map(|container| {
            let execs = container.execs.values().filter_map(|exec| exec.drain);
            execs.chain(container.drain).map(|(_, at)| at)
        });
        let pending = self.pending_starts.values().map(|pending| pending.deadline);
        let loggers = self.loggers.values().copied().flatten();
        let rest = [
            self.events.deadline(),
            self.server.deadline(),
            self.discard_deadline(),
            self.call_deadline(),
            self.output_deadline(),
            self.shutdown_deadline,
        ];
        drains.chain(pending).chain(loggers).chain(rest.into_iter().flatten()).min()
    }

    /// Handles all deadlines that have passed.
    fn handle_timeouts(&mut self) {
        let now = Instant::now();
        let due = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        if self.more_exits {
            self.reap();
        }
        self.read_unwatched_output();
        if due(self.server.deadline()) {
            self.server.retry(&self.reactor);
        }
        if due(self.events.deadline()) {
            self.events.retry(&self.reactor);
        }
        for (pid, at) in &mut self.loggers {
            if due(*at) {
                *at = None;
                // Not reaped yet, so the pid cannot have been reused.
                let _ = crate::sys::kill(*pid, libc::SIGKILL);
            }
        }
        let late = self.pending_starts.iter().filter(|(_, pending)| pending.deadline <= now);
        let late: Vec<u32> = late.map(|(id, _)| *id).collect();
        for id in late {
            self.logger_late(id);
        }
        self.retry_discards(now);
        if due(self.call_deadline()) {
            self.end_late_calls(now);
        }
        let is_due = |drain: &Option<(_, Instant)>| due(drain.as_ref().map(|(_, at)| *at));
        let mut drained = Vec::new();
        for (id, container) in &self.containers {
            if is_due(&container.drain) {
                drained.push(ProcessKey::new(id, ""));
            }
            let execs = container.execs.iter().filter(|(_, exec)| is_due(&exec.drain));
            drained.extend(execs.map(|(exec, _)| ProcessKey::new(id, exec)));
        }
        for key in drained {
            self.drained(&key);
        }
    }
}
