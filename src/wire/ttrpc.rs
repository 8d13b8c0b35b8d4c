//! The ttrpc skin: unary calls framed as containerd's ttrpc frames them.
//!
//! The frames and their messages are the `ttrpc` crate's. The loop is our own, because that crate's server leaves a
//! caller without an answer when a handler panics, takes any number of calls, and ends only after a wait of its own.

use std::time::Duration;

use protobuf::{Message, MessageField};
use tokio::io::{AsyncWriteExt, BufReader, BufWriter};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use ttrpc::proto::{GenMessage, GenMessageError, MESSAGE_TYPE_REQUEST, MessageHeader, Request, Response};

use super::MAX_CALLS;
use super::answer::{Answer, MAX_MESSAGE};
use super::code::{Code, Status};
use super::handler::{self, Handler};
use super::namespace;
use super::verbs::Verbs;
use crate::trace::{TRACEPARENT, TraceId};

/// How long new calls are still answered, with UNAVAILABLE, when the daemon goes down: ttrpc cannot say goodbye.
const LINGER: Duration = Duration::from_millis(200);
/// Answers that wait for the writer; calls beyond wait with theirs.
const QUEUE: usize = 64;

/// Serves one connection until the caller closes it or the daemon goes down.
///
/// # Errors
/// Why the connection broke.
pub(super) async fn serve<V: Verbs>(stream: UnixStream, handler: Handler<V>) -> Result<(), ttrpc::Error> {
    let (reader, writer) = stream.into_split();
    let mut reader = BufReader::new(reader);
    let (answers, queue) = mpsc::channel(QUEUE);
    let mut calls = JoinSet::new();
    let writing = write(writer, queue);
    tokio::pin!(writing);
    tokio::select! {
        // Nobody is left to answer: what still runs is dropped with `calls`.
        ended = read(&mut reader, &handler, &mut calls, &answers) => return ended,
        ended = &mut writing => return ended,
        () = linger(&handler) => {}
    }
    drop(answers);
    let finish = async { while calls.join_next().await.is_some() {} };
    tokio::join!(finish, writing).1
}

async fn linger<V: Verbs>(handler: &Handler<V>) {
    handler.stopping().await;
    tokio::time::sleep(LINGER).await;
}

async fn read<V: Verbs>(
    reader: &mut BufReader<OwnedReadHalf>,
    handler: &Handler<V>,
    calls: &mut JoinSet<()>,
    answers: &mpsc::Sender<GenMessage>,
) -> Result<(), ttrpc::Error> {
    loop {
        let (stream, asked) = match GenMessage::read_from(&mut *reader).await {
            // Only calls of one message are served; what belongs to a stream has nobody to go to.
            Ok(frame) if frame.header.type_ != MESSAGE_TYPE_REQUEST => continue,
            Ok(frame) => {
                while calls.try_join_next().is_some() {}
                (frame.header.stream_id, request(&frame, calls.len()))
            }
            Err(GenMessageError::ReturnError(header, _)) => {
                let text = format!("the message has {} bytes, at most {MAX_MESSAGE} are read", header.length);
                (header.stream_id, Err(Status::new(Code::RESOURCE_EXHAUSTED, text)))
            }
            // Also how a caller who closes the connection is seen.
            Err(GenMessageError::InternalError(e)) => return Err(e),
        };
        // An answer that cannot be sent has nobody who waits for it: the connection is gone.
        match asked {
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

/// The call that a frame asks for, or why it is refused.
fn request(frame: &GenMessage, pending: usize) -> Result<Request, Status> {
    let stream = frame.header.stream_id;
    if stream % 2 != 1 {
        return Err(Status::new(Code::INVALID_ARGUMENT, format!("stream id {stream} is not odd")));
    }
    if pending >= MAX_CALLS {
        let text = format!("{MAX_CALLS} calls are pending on this connection");
        return Err(Status::new(Code::RESOURCE_EXHAUSTED, text));
    }
    Request::parse_from_bytes(&frame.payload)
        .map_err(|e| Status::new(Code::INVALID_ARGUMENT, format!("malformed {}: {e}", Request::NAME)))
}

async fn call<V: Verbs>(handler: &Handler<V>, request: Request) -> Answer {
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
    let call = handler::Call { path, deadline: Ok(deadline), trace, namespace, operators: true };
    handler.answer(&call, Box::pin(std::future::ready(Ok(payload)))).await
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

async fn write(writer: OwnedWriteHalf, mut queue: mpsc::Receiver<GenMessage>) -> Result<(), ttrpc::Error> {
    let mut writer = BufWriter::new(writer);
    while let Some(message) = queue.recv().await {
        message.write_to(&mut writer).await?;
    }
    writer.shutdown().await.map_err(|e| ttrpc::Error::Socket(e.to_string()))
}
