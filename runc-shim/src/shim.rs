//! The shim: its whole state, and the main loop.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use containerd_shim_protos::events::task::TaskCreate;
use rustix::event::epoll::EventFlags;

use crate::commands::Job;
use crate::container::Container;
use crate::create::PendingStart;
use crate::error::{Context as _, Error};
use crate::events::Events;
use crate::exits::{self, Exit, Exits};
use crate::io::copiers::Copiers;
use crate::log;
use crate::memory::Watch;
use crate::reactor::{Reactor, Source};
use crate::sandbox::Sandbox;
use crate::server::Server;
use crate::signals::Signals;

/// How long the shutdown waits until containerd has received the last events, and until running
/// commands of the runtime have ended.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum number of exits that are handled before other work.
const MAX_EXITS_AT_ONCE: usize = 256;

/// Identifies a process: the first one of a container, or an exec.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// The container.
    pub id: String,
    /// The exec; empty: the first process.
    pub exec: String,
}

impl Key {
    /// The key of a process.
    pub fn new(id: &str, exec: &str) -> Self {
        Self { id: id.to_owned(), exec: exec.to_owned() }
    }

    /// The id of the process in events and answers.
    pub fn process(&self) -> &str {
        if self.exec.is_empty() { &self.id } else { &self.exec }
    }
}

/// The shim.
#[derive(Debug)]
pub struct Shim {
    /// The epoll instance of the main loop.
    pub reactor: Reactor,
    /// The ttrpc server.
    pub server: Server,
    /// The queue of events for containerd.
    pub events: Events,
    /// Exits of unknown children.
    pub exits: Exits,
    /// The threads that copy the processes' streams.
    pub copiers: Copiers,
    /// containerd's namespace.
    pub namespace: String,
    /// The pod's sandbox id.
    pub id: String,
    /// The containers by their ids.
    pub containers: BTreeMap<String, Container>,
    /// The TaskCreate events of containers that are being created; sent when that has succeeded.
    pub create_events: BTreeMap<String, TaskCreate>,
    /// Running commands of the runtime and helpers, by their pids.
    pub jobs: BTreeMap<i32, Job>,
    /// The containers' processes by their pids.
    pub processes: BTreeMap<i32, Key>,
    /// Starts of processes that wait for a logging program to be ready, by their ids.
    pub pending_starts: BTreeMap<u32, PendingStart>,
    /// Running logging programs by their pids, and when SIGKILL follows, if SIGTERM was sent.
    pub loggers: BTreeMap<i32, Option<Instant>>,
    /// The pod's sandbox, once the daemon has named its pause.
    pub sandbox: Option<Sandbox>,
    /// Watches for OOM kills in the containers' cgroups, by their ids.
    pub memory: BTreeMap<u32, Watch>,
    /// The id that was assigned last, to a console socket, a pending start or a memory watch.
    pub last_id: u32,
    /// Shutdown was requested: the shim exits when all work is done, at the latest at this time.
    pub shutdown_deadline: Option<Instant>,
    signals: Signals,
    /// There may be unhandled exits although no SIGCHLD is pending.
    more_exits: bool,
}

impl Shim {
    /// A shim that serves on a listening socket and sends events to the socket at `events`.
    pub fn new(
        listener: OwnedFd,
        signals: Signals,
        namespace: String,
        id: String,
        events: Option<String>,
    ) -> Result<Self, Error> {
        let reactor = Reactor::new().context("make epoll instance")?;
        reactor.add(&signals, Source::Signals, EventFlags::IN).context("watch signals")?;
        Ok(Self {
            server: Server::new(listener, &reactor).context("serve")?,
            events: Events::new(events, namespace.clone()),
            exits: Exits::default(),
            copiers: Copiers::new(&reactor).context("watch copier threads")?,
            reactor,
            namespace,
            id,
            containers: BTreeMap::new(),
            create_events: BTreeMap::new(),
            jobs: BTreeMap::new(),
            processes: BTreeMap::new(),
            pending_starts: BTreeMap::new(),
            loggers: BTreeMap::new(),
            sandbox: None,
            memory: BTreeMap::new(),
            last_id: 0,
            shutdown_deadline: None,
            signals,
            more_exits: false,
        })
    }

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

    /// Requests the shutdown: the shim exits when all events, answers and streams are delivered and
    /// no command runs, or after [`SHUTDOWN_TIMEOUT`]. Callers that connect from now on wait for
    /// the next shim.
    pub fn begin_shutdown(&mut self) {
        self.server.stop_accepting(&self.reactor);
        self.shutdown_deadline.get_or_insert(Instant::now() + SHUTDOWN_TIMEOUT);
    }

    /// A new id for a console socket, a pending start or a memory watch.
    pub fn new_id(&mut self) -> u32 {
        self.last_id = self.last_id.wrapping_add(1);
        self.last_id
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
            Source::Memory(id) => self.memory_event(id),
            Source::Pause => self.pause_ready(),
        }
    }

    /// Handles pending signals. On SIGTERM and SIGINT the shim shuts down; its containers keep
    /// running.
    fn signalled(&mut self) {
        if let Some(signal) = self.signals.take() {
            let left = self.containers.len();
            log::warn(format_args!("shim exits on {signal}; containers: {left}"));
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
                drained.push(Key::new(id, ""));
            }
            let execs = container.execs.iter().filter(|(_, exec)| is_due(&exec.drain));
            drained.extend(execs.map(|(exec, _)| Key::new(id, exec)));
        }
        for key in drained {
            self.drained(&key);
        }
    }
}
