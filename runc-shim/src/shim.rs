//! The shim: all that it has, and its loop.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use containerd_shim_protos::events::task::TaskCreate;
use rustix::event::epoll::EventFlags;

use crate::commands::Job;
use crate::container::Container;
use crate::create::Pending;
use crate::error::{Context as _, Error};
use crate::events::Events;
use crate::exits::{self, Exit, Exits};
use crate::io::copier::Copier;
use crate::log;
use crate::memory::Watch;
use crate::reactor::{Reactor, Source};
use crate::sandbox::Sandbox;
use crate::server::Server;
use crate::signals::Signals;

/// How long the end waits for containerd to take the last events, and for commands of the runtime.
const LAST_WORK: Duration = Duration::from_secs(5);

/// How many exits are handled before others have their turn.
const TURN: usize = 256;

/// A process of a container: the container, and the exec unless it is the first process.
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

    /// Its id in events and answers.
    pub fn process(&self) -> &str {
        if self.exec.is_empty() { &self.id } else { &self.exec }
    }
}

/// The shim.
#[derive(Debug)]
pub struct Shim {
    /// The loop's descriptors.
    pub reactor: Reactor,
    /// Calls and answers.
    pub server: Server,
    /// Events for containerd.
    pub events: Events,
    /// Exits of children that are not known.
    pub exits: Exits,
    /// What copies the processes' streams.
    pub copier: Copier,
    /// containerd's namespace.
    pub namespace: String,
    /// The pod's sandbox id.
    pub id: String,
    /// The containers by their ids.
    pub containers: BTreeMap<String, Container>,
    /// The events of containers that are being created.
    pub announced: BTreeMap<String, TaskCreate>,
    /// Commands of the runtime by their pids.
    pub jobs: BTreeMap<i32, Job>,
    /// The containers' processes by their pids.
    pub processes: BTreeMap<i32, Key>,
    /// Processes that wait for their logging program.
    pub pending: BTreeMap<u32, Pending>,
    /// Logging programs that are to end, and when they are killed.
    pub loggers: BTreeMap<i32, Option<Instant>>,
    /// The pod's sandbox, once the daemon has named its pause.
    pub sandbox: Option<Sandbox>,
    /// What watches the containers' memory.
    pub memory: BTreeMap<u32, Watch>,
    /// A number for what needs one.
    pub next: u32,
    /// It is to end when all is said, or then.
    pub ending: Option<Instant>,
    signals: Signals,
    /// There may be exits that are not handled, whatever signals say.
    more_exits: bool,
}

impl Shim {
    /// Serves at a socket.
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
            copier: Copier::start(&reactor).context("start thread that copies")?,
            reactor,
            namespace,
            id,
            containers: BTreeMap::new(),
            announced: BTreeMap::new(),
            jobs: BTreeMap::new(),
            processes: BTreeMap::new(),
            pending: BTreeMap::new(),
            loggers: BTreeMap::new(),
            sandbox: None,
            memory: BTreeMap::new(),
            next: 0,
            ending: None,
            signals,
            more_exits: false,
        })
    }

    /// Runs until it is shut down.
    pub fn run(mut self) -> Result<(), Error> {
        while !self.has_ended() {
            let ready = self.reactor.wait(self.deadline()).context("wait")?;
            for (source, _) in ready {
                self.ready(source);
            }
            for number in self.copier.take_ended().context("copy streams")? {
                self.stream_ended(number);
            }
            self.pass_time();
        }
        Ok(())
    }

    fn has_ended(&self) -> bool {
        let said = self.events.is_empty() && !self.server.has_unsent() && !self.copier.has_left();
        let done = said && self.jobs.is_empty();
        self.ending.is_some_and(|at| done || at <= Instant::now())
    }

    /// Asks for the end: when containerd has the events and answers that are due, and the runtime
    /// has done what was begun.
    pub fn end(&mut self) {
        self.ending.get_or_insert(Instant::now() + LAST_WORK);
    }

    /// A number that is not used.
    pub fn number(&mut self) -> u32 {
        self.next = self.next.wrapping_add(1);
        self.next
    }

    fn ready(&mut self, source: Source) {
        match source {
            Source::Listener => self.server.accept(&self.reactor),
            Source::Signals => self.signalled(),
            Source::Events => self.events.ready(&self.reactor),
            Source::Connection(number) => {
                for call in self.server.ready(number, &self.reactor) {
                    self.call(call);
                }
            }
            // Taken after this; streams are the thread's.
            Source::Copier | Source::Stream(_) => {}
            Source::Logger(number) => self.logger_ready(number),
            Source::Memory(number) => self.memory_event(number),
            Source::Pause => self.pause_ready(),
        }
    }

    /// Signals have arrived. On SIGTERM the shim ends and its containers keep running.
    fn signalled(&mut self) {
        if let Some(signal) = self.signals.take() {
            let left = self.containers.len();
            log::warn(format_args!("shim exits on {signal}; containers: {left}"));
            self.end();
        }
        self.reap();
    }

    /// Handles exits, up to a bound: others have their turn while a container makes children of
    /// this process faster than they are reaped.
    fn reap(&mut self) {
        for _ in 0..TURN {
            let Some((pid, exit)) = exits::ended() else {
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

    /// When something is to be done although nothing is ready.
    fn deadline(&self) -> Option<Instant> {
        if self.more_exits {
            return Some(Instant::now());
        }
        let drains = self.containers.values().flat_map(|container| {
            let execs = container.execs.values().filter_map(|exec| exec.drain);
            execs.chain(container.drain).map(|(_, at)| at)
        });
        let pending = self.pending.values().map(|pending| pending.until);
        let loggers = self.loggers.values().copied().flatten();
        let rest =
            [self.events.deadline(), self.server.deadline(), self.discard_deadline(), self.ending];
        drains.chain(pending).chain(loggers).chain(rest.into_iter().flatten()).min()
    }

    /// Does what has become due.
    fn pass_time(&mut self) {
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
                // It was not reaped: its number is its own.
                let _ = crate::sys::kill(*pid, libc::SIGKILL);
            }
        }
        let late = self.pending.iter().filter(|(_, pending)| pending.until <= now);
        let late: Vec<u32> = late.map(|(number, _)| *number).collect();
        for number in late {
            self.logger_late(number);
        }
        self.retry_discards(now);
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
