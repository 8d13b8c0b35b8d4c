//! The ttrpc server: connections, and the frames on them.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use containerd_shim_protos::ttrpc::get_status;
use containerd_shim_protos::ttrpc::proto::{
    MESSAGE_LENGTH_MAX, MESSAGE_TYPE_REQUEST, MESSAGE_TYPE_RESPONSE, Request, Response,
};
use protobuf::{Message, MessageField};
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::{SocketFlags, sockopt};

use crate::error::{Code, Error};
use crate::reactor::{Reactor, Source};
use crate::ttrpc::frame::{self, Decoder, Incoming};

/// Maximum size of the answers that a caller has not read, bytes. With more, the shim reads no
/// calls of this caller.
const MAX_UNREAD: usize = 1 << 20;

/// Maximum number of connections. Further callers wait in the queue of the socket. A connection can
/// hold a message that is not complete.
const MAX_CONNECTIONS: usize = 1024;

/// Delay before the next accept after a failed one, or while there are too many connections.
const ACCEPT_WAIT: Duration = Duration::from_millis(100);

/// Identifies the call that an answer is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Reply {
    connection: u32,
    stream: u32,
    deadline: Option<Instant>,
}

impl Reply {
    /// When the caller stops waiting for the answer; `None`: it waits without a limit.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// That of a call with this deadline.
    #[cfg(test)]
    pub fn of_a_test(deadline: Option<Instant>) -> Self {
        Self { connection: 1, stream: 1, deadline }
    }

    /// Whether the caller no longer waits for the answer.
    pub fn is_late(&self, now: Instant) -> bool {
        self.deadline.is_some_and(|at| at <= now)
    }
}

/// A call.
#[derive(Debug)]
pub struct Call {
    /// Identifies the call in [`Server::respond`].
    pub reply: Reply,
    /// The request.
    pub request: Request,
}

/// A connection.
#[derive(Debug)]
struct Connection {
    socket: OwnedFd,
    decoder: Decoder,
    /// Encoded answers that are not sent yet.
    out: Vec<u8>,
    /// The events that epoll reports.
    flags: EventFlags,
}

/// A listening socket.
#[derive(Debug)]
pub struct Listener {
    /// The socket.
    pub socket: OwnedFd,
    /// Its file, if this process removes it.
    pub file: Option<PathBuf>,
}

/// The server.
#[derive(Debug)]
pub struct Server {
    listener: Listener,
    connections: BTreeMap<u32, Connection>,
    /// The id of the next connection. No id is used twice, so that no answer goes to another
    /// caller.
    next_id: u32,
    /// After a failed accept: when connections are accepted again.
    accept_again_at: Option<Instant>,
    /// Connections are accepted; see [`Server::stop_accepting`].
    accepts: bool,
}

impl Server {
    /// A server on a listening socket.
    pub fn new(listener: Listener, reactor: &Reactor) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&listener.socket, true)?;
        reactor.add(&listener.socket, Source::Listener, EventFlags::IN)?;
        let connections = BTreeMap::new();
        Ok(Self { listener, connections, next_id: 0, accept_again_at: None, accepts: true })
    }

    /// Accepts no connection any more. New callers wait in the queue of the listening socket, which
    /// the daemon keeps for the next shim. This process keeps it, too: a daemon that has restarted
    /// takes it from here. A file of its own is removed, so that new callers find another shim: at
    /// once, because `start` may have replaced it when the socket is closed.
    pub fn stop_accepting(&mut self, reactor: &Reactor) {
        (self.accepts, self.accept_again_at) = (false, None);
        // Fails only if it was removed already.
        let _ = reactor.remove(&self.listener.socket);
        if let Some(file) = self.listener.file.take() {
            let _ = std::fs::remove_file(file);
        }
    }

    /// Accepts the pending connections. Closes those of users other than root and the shim's own.
    pub fn accept(&mut self, reactor: &Reactor) {
        // The listener may have become ready before.
        if !self.accepts {
            return;
        }
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        loop {
            if self.connections.len() >= MAX_CONNECTIONS {
                return self.listen(false, reactor);
            }
            let socket = match rustix::net::accept_with(&self.listener.socket, flags) {
                Ok(socket) => socket,
                Err(Errno::AGAIN) => return,
                Err(Errno::CONNABORTED) => continue,
                // Mostly too many open files: the caller waits, and the main loop must not spin.
                Err(_) => return self.listen(false, reactor),
            };
            let own = rustix::process::geteuid();
            match sockopt::socket_peercred(&socket) {
                Ok(peer) if peer.uid == own || peer.uid.is_root() => {}
                _ => continue,
            }
            let id = self.next_id;
            self.next_id = self.next_id.wrapping_add(1);
            let flags = EventFlags::IN;
            if reactor.add(&socket, Source::Connection(id), flags).is_ok() {
                let (decoder, out) = Default::default();
                self.connections.insert(id, Connection { socket, decoder, out, flags });
            }
        }
    }

    /// When [`Server::retry`] must be called.
    pub fn deadline(&self) -> Option<Instant> {
        self.accept_again_at
    }

    /// Accepts connections again.
    pub fn retry(&mut self, reactor: &Reactor) {
        self.accept_again_at = None;
        self.listen(true, reactor);
    }

    fn listen(&mut self, listens: bool, reactor: &Reactor) {
        let flags = if listens { EventFlags::IN } else { EventFlags::empty() };
        let changed = reactor.change(&self.listener.socket, Source::Listener, flags);
        if changed.is_err() || !listens {
            self.accept_again_at = Some(Instant::now() + ACCEPT_WAIT);
        }
    }

    /// Reads and writes after a connection has become ready. Returns the calls that were received.
    pub fn ready(&mut self, id: u32, reactor: &Reactor) -> Vec<Call> {
        let Some(connection) = self.connections.get_mut(&id) else { return Vec::new() };
        if connection.out.len() >= MAX_UNREAD {
            self.flush(id, reactor);
            return Vec::new();
        }
        let read = frame::read(&connection.socket, &mut connection.decoder);
        let is_open = read.is_ok();
        let frames = read.unwrap_or_else(|(frames, _)| frames);
        let mut calls = Vec::new();
        for frame in frames {
            match call(id, frame) {
                None => {}
                Some((reply, Ok(request))) => calls.push(Call { reply, request }),
                Some((reply, Err(e))) => self.respond(reply, Err(e), reactor),
            }
        }
        if is_open {
            self.flush(id, reactor);
        } else {
            self.connections.remove(&id);
        }
        calls
    }

    /// Answers a call. The answer is dropped if the connection was closed.
    pub fn respond(&mut self, reply: Reply, answer: Result<Vec<u8>, Error>, reactor: &Reactor) {
        let Some(connection) = self.connections.get_mut(&reply.connection) else { return };
        let response = response(answer);
        frame::encode(&mut connection.out, reply.stream, MESSAGE_TYPE_RESPONSE, &response);
        self.flush(reply.connection, reactor);
    }

    /// Whether the connection of the caller is open.
    pub fn is_connected(&self, reply: Reply) -> bool {
        self.connections.contains_key(&reply.connection)
    }

    /// Whether any answer is not sent yet.
    pub fn has_unsent(&self) -> bool {
        self.connections.values().any(|connection| !connection.out.is_empty())
    }

    fn flush(&mut self, id: u32, reactor: &Reactor) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        if frame::write(&connection.socket, &mut connection.out).is_err() {
            self.connections.remove(&id);
            return;
        }
        let mut flags = EventFlags::empty();
        flags.set(EventFlags::IN, connection.out.len() < MAX_UNREAD);
        flags.set(EventFlags::OUT, !connection.out.is_empty());
        if flags != connection.flags {
            let source = Source::Connection(id);
            if reactor.change(&connection.socket, source, flags).is_err() {
                self.connections.remove(&id);
                return;
            }
            connection.flags = flags;
        }
    }
}

/// Decodes a frame; `None`: the frame is not a call.
fn call(connection: u32, frame: Incoming) -> Option<(Reply, Result<Request, Error>)> {
    match frame {
        Incoming::TooLong { stream, length } => {
            let message = format!("message length {length} exceeds {}", MESSAGE_LENGTH_MAX);
            let refused = Error::new(Code::RESOURCE_EXHAUSTED, message);
            Some((Reply { connection, stream, deadline: None }, Err(refused)))
        }
        Incoming::Message { stream, kind: MESSAGE_TYPE_REQUEST, payload } => {
            let request = Request::parse_from_bytes(&payload).map_err(Error::from);
            let deadline = request.as_ref().ok().and_then(|it| deadline(it.timeout_nano));
            Some((Reply { connection, stream, deadline }, request))
        }
        Incoming::Message { .. } => None,
    }
}

/// The deadline of a call that was received now; 0: none. A caller whose deadline has passed sends
/// a negative number.
fn deadline(timeout_nano: i64) -> Option<Instant> {
    let timeout = Duration::from_nanos(u64::try_from(timeout_nano).unwrap_or(0));
    (timeout_nano != 0).then(|| Instant::now().checked_add(timeout)).flatten()
}

fn response(answer: Result<Vec<u8>, Error>) -> Vec<u8> {
    let mut response = Response::new();
    match answer {
        Ok(payload) => response.payload = payload,
        Err(e) => response.status = MessageField::some(get_status(e.code, e.message)),
    }
    // Encoding fails only for messages of 2 GiB.
    response.write_to_bytes().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_has_the_deadline_of_its_request() {
        assert_eq!(deadline(0), None);
        let in_an_hour = deadline(3_600_000_000_000).unwrap();
        let left = in_an_hour.saturating_duration_since(Instant::now());
        assert!(left > Duration::from_secs(3500) && left <= Duration::from_secs(3600), "{left:?}");
        for passed in [-1, i64::MIN] {
            assert!(deadline(passed).unwrap() <= Instant::now());
        }
        assert!(deadline(i64::MAX).is_none_or(|at| at > in_an_hour));
    }
}
