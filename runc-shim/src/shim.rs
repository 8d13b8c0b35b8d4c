//! The shim: its whole state. The calls and the main loop are in the files that import this one.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use containerd_shim_protos::events::task::TaskCreate;
use rustix::event::epoll::EventFlags;

use crate::cgroup::oom_watch::OomWatch;
use crate::container::Container;
use crate::container::pending_start::PendingStart;
use crate::container::state::State;
use crate::error::{Context as _, Error};
use crate::exec::Exec;
use crate::exits::Exits;
use crate::io::copiers::Copiers;
use crate::io::process_streams::ProcessStreams;
use crate::process_key::ProcessKey;
use crate::reactor::{Reactor, Source};
use crate::runtime::job::Job;
use crate::sandbox::Sandbox;
use crate::signals::Signals;
use crate::ttrpc::events::Events;
use crate::ttrpc::server::Server;

/// How long the shutdown waits until containerd has received the last events, and until running
/// commands of the runtime have ended.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);

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
    pub processes: BTreeMap<i32, ProcessKey>,
    /// Starts of processes that wait for a logging program to be ready, by their ids.
    pub pending_starts: BTreeMap<u32, PendingStart>,
    /// Running logging programs by their pids, and when SIGKILL follows, if SIGTERM was sent.
    pub loggers: BTreeMap<i32, Option<Instant>>,
    /// The pod's sandbox, once the daemon has set its pause process.
    pub sandbox: Option<Sandbox>,
    /// Watches for OOM kills in the containers' cgroups, by their ids.
    pub oom_watches: BTreeMap<u32, OomWatch>,
    /// The id that was assigned last, to a console socket, a pending start or a memory watch.
    pub last_id: u32,
    /// Shutdown was requested: the shim exits when all work is done, at the latest at this time.
    pub shutdown_deadline: Option<Instant>,
    /// SIGCHLD, SIGTERM and SIGINT.
    pub signals: Signals,
    /// There may be unhandled exits although no SIGCHLD is pending.
    pub more_exits: bool,
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
            oom_watches: BTreeMap::new(),
            last_id: 0,
            shutdown_deadline: None,
            signals,
            more_exits: false,
        })
    }

    /// Requests the shutdown: the shim exits when all events, answers and streams are delivered and
    /// no command runs, or after [`SHUTDOWN_TIMEOUT`]. Callers that connect from now on wait for
    /// the next shim.
    pub fn begin_shutdown(&mut self) {
        self.server.stop_accepting(&self.reactor);
        self.shutdown_deadline.get_or_insert(Instant::now() + SHUTDOWN_TIMEOUT);
    }

    /// A new id for a console socket, a pending start, a memory watch or a pipe.
    pub fn new_id(&mut self) -> u32 {
        self.last_id = self.last_id.wrapping_add(1);
        self.last_id
    }

    /// A container whose creation has succeeded.
    pub fn container(&mut self, id: &str) -> Result<&mut Container, Error> {
        let container = self.containers.get_mut(id);
        container
            .filter(|it| !matches!(it.state, State::Creating | State::Discarding))
            .ok_or_else(|| Error::not_found("container not created"))
    }

    /// An exec of a container.
    pub fn exec(&mut self, key: &ProcessKey) -> Result<&mut Exec, Error> {
        let missing = || Error::not_found(format!("process does not exist {}", key.exec));
        self.container(&key.id)?.execs.get_mut(&key.exec).ok_or_else(missing)
    }

    /// The streams of a process.
    pub fn process(&mut self, key: &ProcessKey) -> Result<&mut ProcessStreams, Error> {
        if key.exec.is_empty() {
            Ok(&mut self.container(&key.id)?.process)
        } else {
            Ok(&mut self.exec(key)?.process)
        }
    }

    /// A container in any state, unlike [`Shim::container`].
    pub fn container_in_any_state(&mut self, key: &ProcessKey) -> Result<&mut Container, Error> {
        let missing = || Error::not_found("container not created");
        self.containers.get_mut(&key.id).ok_or_else(missing)
    }

    /// The streams of a process of a container in any state, unlike [`Shim::process`].
    pub fn process_in_any_state(&mut self, key: &ProcessKey) -> Result<&mut ProcessStreams, Error> {
        if key.exec.is_empty() {
            return Ok(&mut self.container_in_any_state(key)?.process);
        }
        let missing = || Error::not_found(format!("process does not exist {}", key.exec));
        let exec = self.container_in_any_state(key)?.execs.get_mut(&key.exec);
        exec.map(|exec| &mut exec.process).ok_or_else(missing)
    }
}
