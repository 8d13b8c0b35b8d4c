//! Events on their way to containerd: by its ttrpc socket, one after another, each until
//! containerd has taken it.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use containerd_shim_protos::events::task::TaskOOM;
use containerd_shim_protos::shim::event::Envelope;
use containerd_shim_protos::shim::events::ForwardRequest;
use containerd_shim_protos::ttrpc::proto::{KeyValue, Request, Response};
use protobuf::well_known_types::any::Any;
use protobuf::well_known_types::timestamp::Timestamp;
use protobuf::{Message, MessageField};
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::error::{Code, Error};
use crate::frame::{self, Decoder, Incoming};
use crate::log;
use crate::reactor::{Reactor, Source};

const SERVICE: &str = "containerd.services.events.ttrpc.v1.Events";

/// Waits between attempts to reach containerd: the first, and the longest.
const FIRST_WAIT: Duration = Duration::from_millis(50);
const LONGEST_WAIT: Duration = Duration::from_secs(2);

/// How often containerd may refuse an event that it has read: if the event is what is wrong, and
/// for other reasons, which pass. No event keeps the others waiting for ever.
const REFUSALS: u32 = 5;
const REFUSALS_OF_OTHERS: u32 = 150;

/// An event's topic and the name of its message.
pub type Kind = (&'static str, &'static str);

/// A task was created.
pub const CREATE: Kind = ("/tasks/create", "containerd.events.TaskCreate");
/// It was started.
pub const START: Kind = ("/tasks/start", "containerd.events.TaskStart");
/// A process has ended.
pub const EXIT: Kind = ("/tasks/exit", "containerd.events.TaskExit");
/// It was deleted.
pub const DELETE: Kind = ("/tasks/delete", "containerd.events.TaskDelete");
/// A process is to be executed in it.
pub const EXEC_ADDED: Kind = ("/tasks/exec-added", "containerd.events.TaskExecAdded");
/// And was started.
pub const EXEC_STARTED: Kind = ("/tasks/exec-started", "containerd.events.TaskExecStarted");
/// It was paused.
pub const PAUSED: Kind = ("/tasks/paused", "containerd.events.TaskPaused");
/// It was resumed.
pub const RESUMED: Kind = ("/tasks/resumed", "containerd.events.TaskResumed");
/// A checkpoint was made.
pub const CHECKPOINTED: Kind = ("/tasks/checkpointed", "containerd.events.TaskCheckpointed");
/// A process was killed for want of memory.
const OOM: Kind = ("/tasks/oom", "containerd.events.TaskOOM");

/// An event that waits.
#[derive(Debug)]
struct Queued {
    topic: &'static str,
    /// Its encoded [`ForwardRequest`].
    request: Vec<u8>,
    refusals: u32,
    /// It says no more than another one of the same container: that it was short of memory.
    repeats: Option<String>,
}

/// A connection to containerd.
#[derive(Debug)]
struct Connection {
    socket: OwnedFd,
    decoder: Decoder,
    /// Of the request on its way: what is not sent. `None`: there is no request.
    sending: Option<Vec<u8>>,
    /// The request's stream; the next has two more.
    stream: u32,
}

/// The queue.
#[derive(Debug)]
pub struct Events {
    address: Option<String>,
    namespace: String,
    queue: VecDeque<Queued>,
    connection: Option<Connection>,
    wait: Duration,
    /// When containerd is tried again.
    again: Option<Instant>,
}

impl Events {
    /// Events of a namespace, for the socket at `address`; dropped without one.
    pub fn new(address: Option<String>, namespace: String) -> Self {
        let (queue, connection, again) = Default::default();
        Self { address, namespace, queue, connection, wait: FIRST_WAIT, again }
    }

    /// Queues an event.
    pub fn send(&mut self, kind: Kind, event: &impl Message, reactor: &Reactor) {
        self.queue(kind, event, None, reactor);
    }

    /// Queues an event that a container causes as often as it likes, unless one of its is queued
    /// and not on its way.
    pub fn send_oom(&mut self, event: &TaskOOM, reactor: &Reactor) {
        let id = Some(event.container_id.clone());
        if self.queue.iter().skip(1).all(|queued| queued.repeats != id) {
            self.queue(OOM, event, id, reactor);
        }
    }

    fn queue(
        &mut self,
        (topic, name): Kind,
        event: &impl Message,
        repeats: Option<String>,
        reactor: &Reactor,
    ) {
        if self.address.is_none() {
            return;
        }
        let mut any = Any::new();
        any.type_url = name.to_owned();
        any.value = event.write_to_bytes().unwrap_or_default();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut at = Timestamp::new();
        at.seconds = i64::try_from(now.as_secs()).unwrap_or(i64::MAX);
        at.nanos = i32::try_from(now.subsec_nanos()).unwrap_or(0);
        let mut envelope = Envelope::new();
        envelope.timestamp = MessageField::some(at);
        envelope.namespace.clone_from(&self.namespace);
        envelope.topic = topic.to_owned();
        envelope.event = MessageField::some(any);
        let mut request = ForwardRequest::new();
        request.envelope = MessageField::some(envelope);
        let request = request.write_to_bytes().unwrap_or_default();
        self.queue.push_back(Queued { topic, request, refusals: 0, repeats });
        if self.again.is_none() {
            self.advance(reactor);
        }
    }

    /// Whether all events are taken.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// When [`Events::advance`] is to be called at the latest.
    pub fn deadline(&self) -> Option<Instant> {
        self.again
    }

    /// The time of [`Events::deadline`] has come.
    pub fn retry(&mut self, reactor: &Reactor) {
        self.again = None;
        self.advance(reactor);
    }

    /// The connection is ready.
    pub fn ready(&mut self, reactor: &Reactor) {
        if let Err(e) = self.receive().and_then(|()| self.transmit()) {
            self.disconnect(&e);
        }
        if self.again.is_none() {
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

    /// The event that was on its way stays queued: whether containerd has taken it is not known.
    fn disconnect(&mut self, why: &Error) {
        self.connection = None;
        if self.queue.is_empty() {
            return;
        }
        if self.wait == FIRST_WAIT {
            log::warn(format_args!("failed to send events to containerd; retrying: {why}"));
        }
        self.again = Some(Instant::now() + self.wait);
        self.wait = (self.wait * 2).min(LONGEST_WAIT);
    }

    /// Sends what can be sent of the first event.
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
            frame::encode(&mut out, connection.stream, frame::REQUEST, &request);
            connection.sending = Some(out);
        }
        let Some(out) = &mut connection.sending else { return Ok(()) };
        while !out.is_empty() {
            match rustix::io::write(&connection.socket, out) {
                Ok(count) => {
                    out.drain(..count);
                }
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }

    /// Reads answers.
    fn receive(&mut self) -> Result<(), Error> {
        let mut buffer = [0; 1024];
        loop {
            let Some(connection) = &mut self.connection else { return Ok(()) };
            let count = match rustix::io::read(&connection.socket, &mut buffer) {
                Ok(0) => return Err(Error::unknown("containerd has closed the connection")),
                Ok(count) => count,
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => continue,
                Err(e) => return Err(e.into()),
            };
            for answer in connection.decoder.feed(buffer.get(..count).unwrap_or_default()) {
                self.answered(answer)?;
            }
        }
    }

    fn answered(&mut self, answer: Incoming) -> Result<(), Error> {
        let Some(connection) = &mut self.connection else { return Ok(()) };
        let Incoming::Message { stream, kind: frame::RESPONSE, payload } = answer else {
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
            let malformed = response.status.code.value() == Code::InvalidArgument as i32;
            let most = if malformed { REFUSALS } else { REFUSALS_OF_OTHERS };
            let (topic, times, reason) = (first.topic, first.refusals, &response.status.message);
            if times < most {
                return Err(Error::unknown(format!("event {topic}: {reason}")));
            }
            log::warn(format_args!(
                "containerd refused event {topic} {times} times; dropped: {reason}"
            ));
        }
        self.wait = FIRST_WAIT;
        self.queue.pop_front();
        if self.queue.is_empty() {
            self.queue = VecDeque::new();
        }
        self.transmit()
    }
}
