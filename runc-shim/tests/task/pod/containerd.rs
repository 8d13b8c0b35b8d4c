//! A stand-in of containerd that takes events.

use std::io::{self, Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use containerd_shim_protos::protobuf::well_known_types::any::Any;
use containerd_shim_protos::protobuf::{EnumOrUnknown, Message as _, MessageField};
use containerd_shim_protos::shim::events::ForwardRequest;
use containerd_shim_protos::ttrpc::proto::{Code, Request, Response, Status};

/// Events that were taken: topic and message.
pub type Taken = Arc<Mutex<Vec<(String, Any)>>>;

/// The way in which events are handled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Answers {
    /// Each event is taken.
    Takes,
    /// Each event is taken, and the connection is closed before the answer.
    Dies,
    /// Each event is taken, and not answered, as by a containerd that is stopped.
    Hangs,
    /// So many are refused for a reason that passes.
    Refuses(u32),
    /// So many are refused as malformed.
    Malformed(u32),
}

/// A containerd that runs until it is dropped.
pub struct Containerd {
    path: PathBuf,
    ends: Arc<AtomicBool>,
    connections: Arc<Mutex<Vec<UnixStream>>>,
    thread: Option<JoinHandle<()>>,
}

impl Containerd {
    /// Listens at `path`.
    pub fn start(path: &Path, taken: Taken, answers: Answers) -> Self {
        // An earlier stand-in leaves its socket behind.
        let _ = std::fs::remove_file(path);
        let listener = UnixListener::bind(path).unwrap();
        let ends = Arc::new(AtomicBool::new(false));
        let connections: Arc<Mutex<Vec<UnixStream>>> = Arc::default();
        let (ended, known) = (ends.clone(), connections.clone());
        let refused = Arc::new(AtomicU32::new(0));
        let thread = std::thread::spawn(move || {
            for stream in listener.incoming() {
                if ended.load(Ordering::SeqCst) {
                    return;
                }
                let stream = stream.unwrap();
                known.lock().unwrap().push(stream.try_clone().unwrap());
                let (taken, refused) = (taken.clone(), refused.clone());
                std::thread::spawn(move || serve(stream, &taken, answers, &refused));
            }
        });
        Self { path: path.to_owned(), ends, connections, thread: Some(thread) }
    }
}

impl Drop for Containerd {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::SeqCst);
        // Wakes the thread that accepts.
        let _ = UnixStream::connect(&self.path);
        self.thread.take().unwrap().join().unwrap();
        for connection in self.connections.lock().unwrap().iter() {
            let _ = connection.shutdown(Shutdown::Both);
        }
    }
}

fn refusal(code: Code, message: &str) -> MessageField<Status> {
    let mut status = Status::new();
    (status.code, status.message) = (EnumOrUnknown::new(code), message.to_owned());
    MessageField::some(status)
}

fn serve(
    mut stream: UnixStream,
    taken: &Taken,
    answers: Answers,
    refused: &AtomicU32,
) -> io::Result<()> {
    loop {
        let mut head = [0; 10];
        stream.read_exact(&mut head)?;
        let mut payload = vec![0; u32::from_be_bytes(head[..4].try_into().unwrap()) as usize];
        stream.read_exact(&mut payload)?;
        let request = Request::parse_from_bytes(&payload).unwrap();
        assert_eq!(request.service, "containerd.services.events.ttrpc.v1.Events");
        assert_eq!(request.method, "Forward");
        let forward = ForwardRequest::parse_from_bytes(&request.payload).unwrap();
        let envelope = forward.envelope.unwrap_or_default();
        assert_eq!(envelope.namespace, "test");
        let mut answer = Response::new();
        match answers {
            Answers::Refuses(times) if refused.fetch_add(1, Ordering::SeqCst) < times => {
                answer.status = refusal(Code::UNAVAILABLE, "not yet");
            }
            Answers::Malformed(times) if refused.fetch_add(1, Ordering::SeqCst) < times => {
                answer.status = refusal(Code::INVALID_ARGUMENT, "malformed");
            }
            _ => {
                let event = (envelope.topic, envelope.event.unwrap_or_default());
                taken.lock().unwrap().push(event);
            }
        }
        match answers {
            Answers::Dies => return stream.shutdown(Shutdown::Both),
            Answers::Hangs => continue,
            _ => {}
        }
        let answer = answer.write_to_bytes().unwrap();
        let mut frame = (answer.len() as u32).to_be_bytes().to_vec();
        frame.extend(&head[4..8]);
        frame.extend([2, 0]);
        frame.extend(answer);
        stream.write_all(&frame)?;
    }
}
