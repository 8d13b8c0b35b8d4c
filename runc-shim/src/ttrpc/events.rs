//! The queue of events for containerd. Events are sent to its ttrpc socket one after another, and
//! each stays queued until containerd has acknowledged it.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use containerd_shim_protos::api::DeleteResponse;
use containerd_shim_protos::events::task::{TaskDelete, TaskExit, TaskStart};
use containerd_shim_protos::shim::event::Envelope;
use containerd_shim_protos::shim::events::ForwardRequest;
use containerd_shim_protos::ttrpc::proto::{
    KeyValue, MESSAGE_TYPE_REQUEST, MESSAGE_TYPE_RESPONSE, Request, Response,
};
use protobuf::well_known_types::any::Any;
use protobuf::{Message, MessageField};
use rustix::event::epoll::EventFlags;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::error::{Code, Error};
use crate::exits::Exit;
use crate::log;
use crate::process_key::ProcessKey;
use crate::reactor::{Reactor, Source};
use crate::ttrpc::frame::{self, Decoder, Incoming};

const SERVICE: &str = "containerd.services.events.ttrpc.v1.Events";

/// Delays between attempts to reach containerd: the first and the longest.
const FIRST_WAIT: Duration = Duration::from_millis(50);
const LONGEST_WAIT: Duration = Duration::from_secs(2);

/// How often containerd may refuse an event before it is dropped, so that it does not block the
/// others: if containerd reports it as malformed, and for other reasons, which may be temporary.
const MAX_MALFORMED_REFUSALS: u32 = 5;
const MAX_OTHER_REFUSALS: u32 = 150;

/// How many events may be queued before those of execs are dropped. Only calls cause them, so that
/// a restart of containerd queues fewer; but calls may be served while containerd cannot be reached
/// for events, and a probe is an exec.
const MAX_QUEUED: usize = 4096;

/// An event's topic and the name of its message.
pub type Kind = (&'static str, &'static str);

/// A task was created.
pub const CREATE: Kind = ("/tasks/create", "containerd.events.TaskCreate");
/// A task was started.
pub const START: Kind = ("/tasks/start", "containerd.events.TaskStart");
/// A process has exited.
pub const EXIT: Kind = ("/tasks/exit", "containerd.events.TaskExit");
/// A task was deleted.
pub const DELETE: Kind = ("/tasks/delete", "containerd.events.TaskDelete");
/// An exec was added to a task.
pub const EXEC_ADDED: Kind = ("/tasks/exec-added", "containerd.events.TaskExecAdded");
/// An exec was started.
pub const EXEC_STARTED: Kind = ("/tasks/exec-started", "containerd.events.TaskExecStarted");
/// A task was paused.
pub const PAUSED: Kind = ("/tasks/paused", "containerd.events.TaskPaused");
/// A task was resumed.
pub const RESUMED: Kind = ("/tasks/resumed", "containerd.events.TaskResumed");
/// A checkpoint of a task was written.
pub const CHECKPOINTED: Kind = ("/tasks/checkpointed", "containerd.events.TaskCheckpointed");
/// A process was killed by the OOM killer.
pub const OOM: Kind = ("/tasks/oom", "containerd.events.TaskOOM");

/// The message of [`START`].
pub fn start(id: &str, pid: u32) -> TaskStart {
    let mut event = TaskStart::new();
    (event.container_id, event.pid) = (id.to_owned(), pid);
    event
}

/// The message of [`EXIT`].
pub fn exit(key: &ProcessKey, pid: u32, exit: Exit) -> TaskExit {
    let mut event = TaskExit::new();
    (event.container_id, event.id) = (key.id.clone(), key.process().to_owned());
    (event.pid, event.exit_status) = (pid, exit.status);
    event.exited_at = MessageField::some(exit.at());
    event
}

/// The message of [`DELETE`], for the response to the Delete.
pub fn delete(id: &str, response: &DeleteResponse) -> TaskDelete {
    let mut event = TaskDelete::new();
    event.container_id = id.to_owned();
    (event.pid, event.exit_status) = (response.pid, response.exit_status);
    event.exited_at = response.exited_at.clone();
    event
}

/// A queued event.
#[derive(Debug)]
struct Queued {
    topic: &'static str,
    /// The encoded [`ForwardRequest`].
    request: Vec<u8>,
    /// How often containerd has refused the event.
    refusals: u32,
    about: About,
}

/// The subject of an event that may be left out.
#[derive(Debug, PartialEq, Eq)]
pub enum About {
    /// An event that must be delivered.
    Other,
    /// The container of a TaskOOM event; all TaskOOM events of one container are equal.
    OomOf(String),
    /// An exec.
    Exec,
}

/// A connection to containerd.
#[derive(Debug)]
struct Connection {
    socket: OwnedFd,
    decoder: Decoder,
    /// The unsent bytes of the request that is not answered yet; `None`: there is no request.
    sending: Option<Vec<u8>>,
    /// The ttrpc stream id of the request. The id of the next request is higher by two.
    stream: u32,
}

/// The queue of events, and the connection to containerd.
#[derive(Debug)]
pub struct Events {
    address: Option<String>,
    namespace: String,
    queue: VecDeque<Queued>,
    connection: Option<Connection>,
    wait: Duration,
    /// Time of the next attempt after a failure.
    retry_at: Option<Instant>,
    /// Events of execs were dropped since the queue was empty.
    has_dropped: bool,
}

impl Events {
    /// An empty queue for events of a namespace. Without an `address` events are dropped.
    pub fn new(address: Option<String>, namespace: String) -> Self {
        let (queue, connection, retry_at, has_dropped) = Default::default();
        Self { address, namespace, queue, connection, wait: FIRST_WAIT, retry_at, has_dropped }
    }

    /// Queues an event, unless it is of an exec and [`MAX_QUEUED`] are queued, or it is a TaskOOM
    /// and one of the same container is queued behind the first event, which may have been sent. A
    /// container can cause any number of these events.
    pub fn send(
        &mut self,
        (topic, name): Kind,
        event: &impl Message,
        about: About,
        reactor: &Reactor,
    ) {
        let is_repeated = || self.queue.iter().skip(1).any(|queued| queued.about == about);
        if self.address.is_none() || matches!(about, About::OomOf(_)) && is_repeated() {
            return;
        }
        if about == About::Exec && self.queue.len() >= MAX_QUEUED {
            if !std::mem::replace(&mut self.has_dropped, true) {
                log::warn(format_args!(
                    "containerd takes no events; {MAX_QUEUED} are queued: dropping those of execs"
                ));
            }
            return;
        }
        let mut any = Any::new();
        any.type_url = name.to_owned();
        any.value = event.write_to_bytes().unwrap_or_default();
        let mut envelope = Envelope::new();
        envelope.timestamp = MessageField::some(Exit::now(0).at());
        envelope.namespace.clone_from(&self.namespace);
        envelope.topic = topic.to_owned();
        envelope.event = MessageField::some(any);
        let mut request = ForwardRequest::new();
        request.envelope = MessageField::some(envelope);
        let request = request.write_to_bytes().unwrap_or_default();
        self.queue.push_back(Queued { topic, request, refusals: 0, about });
        if self.retry_at.is_none() {
            self.advance(reactor);
        }
    }

    /// Whether containerd has acknowledged all events.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// When [`Events::retry`] must be called.
    pub fn deadline(&self) -> Option<Instant> {
        self.retry_at
    }

    /// Retries at the time of [`Events::deadline`].
    pub fn retry(&mut self, reactor: &Reactor) {
        self.retry_at = None;
        self.advance(reactor);
    }

    /// Reads and writes after the connection has become ready.
    pub fn ready(&mut self, reactor: &Reactor) {
        if let Err(e) = self.receive().and_then(|()| self.transmit()) {
            self.disconnect(&e);
        }
        if self.retry_at.is_none() {
            self.advance(reactor);
        }
    }

    fn advance(&mut self, reactor: &Reactor) {
        if self.queue.is_empty() {
            return;
        }
        let done = match self.connection {
            Some(_) => Ok(()),
            None => self.connect(reactor),
        };
        if let Err(e) = done.and_then(|()| self.transmit()) {
            self.disconnect(&e);
        }
    }

    fn connect(&mut self, reactor: &Reactor) -> Result<(), Error> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        let address = self.address.as_deref().unwrap_or_default();
        let path = address.strip_prefix("unix://").unwrap_or(address);
        rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
        let flags = EventFlags::IN | EventFlags::OUT | EventFlags::ET;
        reactor.add(&socket, Source::Events, flags)?;
        let (decoder, sending) = Default::default();
        self.connection = Some(Connection { socket, decoder, sending, stream: 1 });
        Ok(())
    }

    /// Closes the connection. The event that was sent stays queued, because it is unknown whether
    /// containerd has received it.
    fn disconnect(&mut self, why: &Error) {
        self.connection = None;
        if self.queue.is_empty() {
            return;
        }
        if self.wait == FIRST_WAIT {
            log::warn(format_args!("failed to send events to containerd; retrying: {why}"));
        }
        self.retry_at = Some(Instant::now() + self.wait);
        self.wait = (self.wait * 2).min(LONGEST_WAIT);
    }

    /// Sends as much of the first event as the socket takes.
    fn transmit(&mut self) -> Result<(), Error> {
        let Some(connection) = &mut self.connection else { return Ok(()) };
        if connection.sending.is_none() {
            let Some(first) = self.queue.front() else { return Ok(()) };
            let mut namespace = KeyValue::new();
            namespace.key = "containerd-namespace-ttrpc".to_owned();
            namespace.value.clone_from(&self.namespace);
            let mut request = Request::new();
            request.service = SERVICE.to_owned();
            request.method = "Forward".to_owned();
            request.payload.clone_from(&first.request);
            request.metadata.push(namespace);
            let mut out = Vec::new();
            let request = request.write_to_bytes().unwrap_or_default();
            frame::encode(&mut out, connection.stream, MESSAGE_TYPE_REQUEST, &request);
            connection.sending = Some(out);
        }
        let Some(out) = &mut connection.sending else { return Ok(()) };
        Ok(frame::write(&connection.socket, out)?)
    }

    /// Reads responses.
    fn receive(&mut self) -> Result<(), Error> {
        let Some(connection) = &mut self.connection else { return Ok(()) };
        let (frames, end) = match frame::read(&connection.socket, &mut connection.decoder) {
            Ok(frames) => (frames, Ok(())),
            Err((frames, e)) => (frames, Err(e)),
        };
        frames.into_iter().try_for_each(|answer| self.answered(answer))?;
        Ok(end?)
    }

    fn answered(&mut self, answer: Incoming) -> Result<(), Error> {
        let Some(connection) = &mut self.connection else { return Ok(()) };
        let Incoming::Message { stream, kind: MESSAGE_TYPE_RESPONSE, payload } = answer else {
            return Ok(());
        };
        if stream != connection.stream || connection.sending.is_none() {
            return Ok(());
        }
        let response = Response::parse_from_bytes(&payload)?;
        (connection.sending, connection.stream) = (None, stream.wrapping_add(2));
        if response.status.code.value() != 0
            && let Some(first) = self.queue.front_mut()
        {
            first.refusals += 1;
            let malformed = response.status.code == Code::INVALID_ARGUMENT.into();
            let max = if malformed { MAX_MALFORMED_REFUSALS } else { MAX_OTHER_REFUSALS };
            let (topic, times, reason) = (first.topic, first.refusals, &response.status.message);
            if times < max {
                return Err(Error::unknown(format!("event {topic}: {reason}")));
            }
            log::warn(format_args!(
                "containerd refused event {topic} {times} times; dropped: {reason}"
            ));
        }
        self.wait = FIRST_WAIT;
        self.queue.pop_front();
        if self.queue.is_empty() {
            (self.queue, self.has_dropped) = Default::default();
        }
        self.transmit()
    }
}
