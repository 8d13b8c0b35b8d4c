//! The parts of the shim that its containers and its sandbox use: the server, the queue of events,
//! the children, the copier threads and the epoll instance.

use std::io;
use std::os::fd::AsFd;

use protobuf::Message;
use rustix::event::epoll::EventFlags;

use crate::children::Children;
use crate::error::{Context as _, Error};
use crate::io::copiers::Copiers;
use crate::process_key::ProcessKey;
use crate::reactor::{Reactor, Source};
use crate::ttrpc::events::{About, Events, Kind};
use crate::ttrpc::request::Request;
use crate::ttrpc::response::Answer;
use crate::ttrpc::server::{Listener, Reply, Server};

/// The shared parts of the shim.
#[derive(Debug)]
pub struct Services {
    /// The epoll instance.
    pub reactor: Reactor,
    /// The server.
    pub server: Server,
    /// The queue of events.
    pub events: Events,
    /// The children.
    pub children: Children,
    /// The copier threads.
    pub copiers: Copiers,
    /// Count of the OOM kills that were announced, or were in a container that has ended.
    pub oom_kills: u64,
    /// containerd's namespace.
    pub namespace: String,
    /// Calls that have waited for a command and can be executed now.
    released: Vec<(Reply, Request)>,
}

impl Services {
    /// Serves on a listening socket, and sends the events of a namespace to the socket at `events`.
    ///
    /// # Errors
    /// The kernel refuses a descriptor.
    pub fn new(
        listener: Listener,
        namespace: String,
        events: Option<String>,
    ) -> Result<Self, Error> {
        let reactor = Reactor::new().context("make epoll instance")?;
        Ok(Self {
            server: Server::new(listener, &reactor).context("serve")?,
            events: Events::new(events, namespace.clone()),
            children: Children::default(),
            copiers: Copiers::new(&reactor).context("watch copier threads")?,
            reactor,
            oom_kills: 0,
            namespace,
            released: Vec::new(),
        })
    }

    /// Whether no answer, event, output or command is pending.
    pub fn is_idle(&self) -> bool {
        self.events.is_empty()
            && !self.server.has_unsent()
            && !self.copiers.has_pending_work()
            && !self.children.has_commands()
    }

    /// Answers a call, unless it is answered later.
    pub fn respond(&mut self, reply: Reply, answer: Answer) {
        if let Some(answer) = answer.transpose() {
            self.server.respond(reply, answer, &self.reactor);
        }
    }

    /// Sends an event to containerd.
    pub fn send(&mut self, kind: Kind, event: &impl Message) {
        self.send_about(kind, event, About::Other);
    }

    /// Sends an event of a process to containerd.
    pub fn send_of(&mut self, kind: Kind, event: &impl Message, key: &ProcessKey) {
        let about = if key.exec.is_empty() { About::Other } else { About::Exec };
        self.send_about(kind, event, about);
    }

    /// Sends an event that may be left out.
    pub fn send_about(&mut self, kind: Kind, event: &impl Message, about: About) {
        self.events.send(kind, event, about, &self.reactor);
    }

    /// Has calls executed that have waited for a command.
    pub fn release(&mut self, calls: impl IntoIterator<Item = (Reply, Request)>) {
        self.released.extend(calls);
    }

    /// The calls to execute now.
    pub fn take_released(&mut self) -> Vec<(Reply, Request)> {
        std::mem::take(&mut self.released)
    }

    /// Has epoll report when a descriptor can be read.
    ///
    /// # Errors
    /// The kernel has no memory, or too many watches.
    pub fn watch(&self, fd: impl AsFd, source: Source) -> io::Result<()> {
        self.reactor.add(fd, source, EventFlags::IN)
    }
}
