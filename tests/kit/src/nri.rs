//! An NRI plugin that records the pods that it receives.
//!
//! It attaches itself to containerd's NRI socket. One connection carries two, each frame headed by
//! the number of its connection and its length: over one containerd calls the plugin, over the
//! other the plugin calls containerd, both in ttrpc.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use protobuf::Message;

use crate::proto::nri::{
    ConfigureResponse, Event, OfPod, PodSandbox, RegisterPluginRequest, Request, Response,
    StateChangeEvent,
};

/// Number of the connection over which containerd calls the plugin.
const TO_PLUGIN: u32 = 1;
/// Number of the one over which the plugin calls containerd.
const TO_RUNTIME: u32 = 2;

/// Types of a ttrpc message.
const REQUEST: u8 = 1;
const RESPONSE: u8 = 2;

/// Length of a ttrpc message's head: length of the rest, stream, type, flags.
const HEAD: usize = 10;

/// The largest ttrpc message, bytes.
const LARGEST: usize = 4 << 20;

/// The events that the plugin asks for.
const EVENTS: [Event; 4] = [
    Event::RUN_POD_SANDBOX,
    Event::STOP_POD_SANDBOX,
    Event::REMOVE_POD_SANDBOX,
    Event::CREATE_CONTAINER,
];

/// The calls by which a runtime of NRI 0.11 tells of them; an older one uses `StateChange` for all
/// but the last.
const METHODS: [(&str, Event); 4] = [
    ("RunPodSandbox", Event::RUN_POD_SANDBOX),
    ("StopPodSandbox", Event::STOP_POD_SANDBOX),
    ("RemovePodSandbox", Event::REMOVE_POD_SANDBOX),
    ("CreateContainer", Event::CREATE_CONTAINER),
];

/// The events that the plugin received.
type Received = Arc<Mutex<Vec<(Event, PodSandbox)>>>;

/// A plugin that is attached as long as this lives.
#[derive(Debug)]
pub struct Plugin {
    received: Received,
    stream: UnixStream,
    reader: Option<JoinHandle<()>>,
}

impl Plugin {
    /// Attaches a plugin and waits until containerd has configured it.
    ///
    /// # Errors
    /// containerd does not take it within a time that is ample.
    pub fn attach(socket: &Path) -> Result<Self> {
        let stream = UnixStream::connect(socket)
            .with_context(|| format!("connect to {}", socket.display()))?;
        let received = Received::default();
        let mut link = Link { stream: stream.try_clone()?, unread: Vec::new() };
        let register = RegisterPluginRequest {
            plugin_name: "looks".to_owned(),
            plugin_idx: "90".to_owned(),
            ..Default::default()
        };
        let call = Request {
            service: "nri.pkg.api.v1alpha1.Runtime".to_owned(),
            method: "RegisterPlugin".to_owned(),
            payload: register.write_to_bytes()?,
            ..Default::default()
        };
        link.write(TO_RUNTIME, 1, REQUEST, &call.write_to_bytes()?)?;
        stream.set_read_timeout(Some(Duration::from_secs(30)))?;
        // Pods that are there already come before the first event.
        while link.serve(&received).context("while attaching")? != "Synchronize" {}
        stream.set_read_timeout(None)?;
        let telling = Arc::clone(&received);
        let reader = std::thread::spawn(move || while link.serve(&telling).is_ok() {});
        Ok(Self { received, stream, reader: Some(reader) })
    }

    /// The pod of that id as that event sent it, if it did.
    pub fn pod(&self, event: Event, id: &str) -> Option<PodSandbox> {
        let received = self.received.lock().unwrap_or_else(PoisonError::into_inner);
        received
            .iter()
            .find(|(kind, pod)| *kind == event && pod.id == id)
            .map(|(_, pod)| pod.clone())
    }
}

impl Drop for Plugin {
    fn drop(&mut self) {
        // Ends the reader, too.
        let _ = self.stream.shutdown(Shutdown::Both);
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

/// The connection.
struct Link {
    stream: UnixStream,
    /// Bytes from containerd after the last whole message.
    unread: Vec<u8>,
}

impl Link {
    fn write(&mut self, connection: u32, stream: u32, kind: u8, message: &[u8]) -> io::Result<()> {
        let length = |length: usize| u32::try_from(length).map_err(io::Error::other);
        let mut frame = Vec::with_capacity(8 + HEAD + message.len());
        frame.extend(connection.to_be_bytes());
        frame.extend(length(HEAD + message.len())?.to_be_bytes());
        frame.extend(length(message.len())?.to_be_bytes());
        frame.extend(stream.to_be_bytes());
        frame.extend([kind, 0]);
        frame.extend(message);
        self.stream.write_all(&frame)
    }

    /// Reads until containerd has called, and answers; the method.
    fn serve(&mut self, received: &Received) -> Result<String> {
        let (stream, request) = loop {
            if let Some(call) = self.call()? {
                break call;
            }
            let mut head = [0; 8];
            self.stream.read_exact(&mut head)?;
            let [a, b, c, d, e, f, g, h] = head;
            let (connection, length) =
                (u32::from_be_bytes([a, b, c, d]), u32::from_be_bytes([e, f, g, h]) as usize);
            ensure!(length <= HEAD + LARGEST, "a frame of {length} bytes");
            let mut payload = vec![0; length];
            self.stream.read_exact(&mut payload)?;
            match connection {
                TO_PLUGIN => self.unread.extend(payload),
                // The answer to the registration: what it is shows by what follows.
                TO_RUNTIME => {}
                other => bail!("a frame of connection {other}"),
            }
        };
        let seen = |event, pod: protobuf::MessageField<PodSandbox>| {
            let pod = pod.into_option().unwrap_or_default();
            received.lock().unwrap_or_else(PoisonError::into_inner).push((event, pod));
        };
        let answer = match request.method.as_str() {
            "Configure" => {
                let events = EVENTS.iter().map(|event| 1 << (*event as i32 - 1)).sum();
                ConfigureResponse { events, ..Default::default() }.write_to_bytes()?
            }
            "StateChange" => {
                let change = StateChangeEvent::parse_from_bytes(&request.payload)?;
                seen(change.event.enum_value_or_default(), change.pod);
                Vec::new()
            }
            method => {
                if let Some((_, event)) = METHODS.iter().find(|(name, _)| *name == method) {
                    seen(*event, OfPod::parse_from_bytes(&request.payload)?.pod);
                }
                // An empty answer changes nothing.
                Vec::new()
            }
        };
        let response = Response { payload: answer, ..Default::default() };
        self.write(TO_PLUGIN, stream, RESPONSE, &response.write_to_bytes()?)?;
        Ok(request.method)
    }

    /// The next whole call, with its stream.
    fn call(&mut self) -> Result<Option<(u32, Request)>> {
        let Some((head, rest)) = self.unread.split_first_chunk::<HEAD>() else { return Ok(None) };
        let [a, b, c, d, e, f, g, h, kind, _] = *head;
        let (length, stream) =
            (u32::from_be_bytes([a, b, c, d]) as usize, u32::from_be_bytes([e, f, g, h]));
        ensure!(
            length <= LARGEST && kind == REQUEST,
            "a message of type {kind} and {length} bytes"
        );
        let Some(message) = rest.get(..length) else { return Ok(None) };
        let request = Request::parse_from_bytes(message)?;
        self.unread.drain(..HEAD + length);
        Ok(Some((stream, request)))
    }
}
