//! The ttrpc transport: unary calls framed as containerd's ttrpc frames them.
//!
//! The frames and their messages are the `ttrpc` crate's. The loop is not, because that crate's
//! server leaves a caller without an answer when a handler panics, and stops only after its own
//! delay. The reading of a frame is not either: that crate reads at most 4 MiB.

use std::time::Duration;

use containerd_api::framing::MAX_MESSAGE;
use protobuf::{Message, MessageField};
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader, BufWriter};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use ttrpc::proto::{GenMessage, MESSAGE_TYPE_REQUEST, MessageHeader, Request, Response};

use super::handler::{self, Handler};
use super::namespace;
use super::response::{Answer, TTRPC_ANSWER};
use super::status::{Code, Status};
use crate::controller::SandboxService;
use crate::log_context::{TRACEPARENT, TraceId};

/// How long new calls are still read when the daemon stops: ttrpc has no GOAWAY. A Wait is
/// answered with UNAVAILABLE.
const LINGER: Duration = Duration::from_millis(200);
/// Maximum number of answers that wait for the writer; further calls wait with theirs.
const QUEUE: usize = 64;

/// Serves one connection until the caller closes it or the daemon stops.
///
/// # Errors
/// Why the connection broke.
pub(super) async fn serve<V: SandboxService>(
    stream: UnixStream,
    handler: Handler<V>,
) -> Result<(), ttrpc::Error> {
    let (reader, writer) = stream.into_split();
    let mut reader = BufReader::new(reader);
    let (answers, queue) = mpsc::channel(QUEUE);
    let mut calls = JoinSet::new();
    let writing = write(writer, queue);
    tokio::pin!(writing);
    tokio::select! {
        // The callers are gone: pending calls are dropped with `calls`.
        ended = read_requests(&mut reader, &handler, &mut calls, &answers) => return ended,
        ended = &mut writing => return ended,
        () = linger(&handler) => {}
    }
    drop(answers);
    let finish = async { while calls.join_next().await.is_some() {} };
    tokio::join!(finish, writing).1
}

async fn linger<V: SandboxService>(handler: &Handler<V>) {
    handler.stopping().await;
    tokio::time::sleep(LINGER).await;
}

async fn read_requests<V: SandboxService>(
    reader: &mut BufReader<OwnedReadHalf>,
    handler: &Handler<V>,
    calls: &mut JoinSet<()>,
    answers: &mpsc::Sender<GenMessage>,
) -> Result<(), ttrpc::Error> {
    loop {
        let header = MessageHeader::read_from(&mut *reader).await.map_err(|e| broken(&e))?;
        let (stream, length) = (header.stream_id, header.length as usize);
        // Only unary calls are served: a frame of a stream belongs to no call.
        if header.type_ != MESSAGE_TYPE_REQUEST {
            skip(reader, length).await?;
            continue;
        }
        while calls.try_join_next().is_some() {}
        let request = if length > MAX_MESSAGE {
            skip(reader, length).await?;
            let text = format!("the message has {length} bytes, at most {MAX_MESSAGE} are read");
            Err(Status::new(Code::RESOURCE_EXHAUSTED, text))
        } else {
            let mut payload = vec![0; length];
            reader.read_exact(&mut payload).await.map_err(|e| broken(&e))?;
            request(stream, &payload)
        };
        // An answer that cannot be sent has no caller: the connection is closed.
        match request {
            Ok(request) => {
                let (handler, answers) = (handler.clone(), answers.clone());
                calls.spawn(async move {
                    let answer = call(&handler, request).await;
                    let _ = answers.send(response(stream, answer)).await;
                });
            }
            Err(refused) => {
                let _ = answers.send(response(stream, Err(refused))).await;
            }
        }
    }
}

fn broken(e: &std::io::Error) -> ttrpc::Error {
    ttrpc::Error::Socket(e.to_string())
}

/// Skips the rest of a frame.
async fn skip(reader: &mut BufReader<OwnedReadHalf>, length: usize) -> Result<(), ttrpc::Error> {
    let mut rest = reader.take(length as u64);
    let skipped =
        tokio::io::copy(&mut rest, &mut tokio::io::sink()).await.map_err(|e| broken(&e))?;
    if skipped < length as u64 {
        return Err(broken(&std::io::ErrorKind::UnexpectedEof.into()));
    }
    Ok(())
}

/// The call that a frame asks for, or why it is refused.
fn request(stream: u32, payload: &[u8]) -> Result<Request, Status> {
    if stream % 2 != 1 {
        return Err(Status::new(Code::INVALID_ARGUMENT, format!("stream id {stream} is not odd")));
    }
    Request::parse_from_bytes(payload).map_err(|e| {
        Status::new(Code::INVALID_ARGUMENT, format!("malformed {}: {e}", Request::NAME))
    })
}

async fn call<V: SandboxService>(handler: &Handler<V>, request: Request) -> Answer {
    let deadline = match request.timeout_nano {
        0 => None,
        nanos => Some(Duration::from_nanos(u64::try_from(nanos).unwrap_or(0))),
    };
    let parent = request.metadata.iter().find(|pair| pair.key == TRACEPARENT);
    let trace = parent.and_then(|pair| TraceId::of_traceparent(&pair.value));
    let namespace = request.metadata.iter().find(|pair| pair.key == namespace::TTRPC_KEY);
    let namespace = namespace.map(|pair| pair.value.as_str().into());
    let Request { service, method, payload, .. } = request;
    let path = format!("{service}/{method}").into();
    let call = handler::Call {
        path,
        deadline: Ok(deadline),
        trace,
        namespace,
        max_answer: TTRPC_ANSWER,
        serves_operators: true,
    };
    handler.handle_call(&call, Box::pin(std::future::ready(Ok(payload.into())))).await
}

fn response(stream: u32, answer: Answer) -> GenMessage {
    let mut response = Response::new();
    let (code, message) = match answer {
        Ok(payload) => {
            response.payload = payload;
            (Code::OK, String::new())
        }
        Err(status) => (status.code, status.message),
    };
    response.status = MessageField::some(ttrpc::get_status(code, message));
    // Writing into memory fails for messages of 2 GiB only; answers are far smaller.
    let payload = response.write_to_bytes().unwrap_or_default();
    GenMessage { header: MessageHeader::new_response(stream, payload.len() as u32), payload }
}

async fn write(
    writer: OwnedWriteHalf,
    mut queue: mpsc::Receiver<GenMessage>,
) -> Result<(), ttrpc::Error> {
    let mut writer = BufWriter::new(writer);
    while let Some(message) = queue.recv().await {
        message.write_to(&mut writer).await?;
    }
    writer.shutdown().await.map_err(|e| ttrpc::Error::Socket(e.to_string()))
}
