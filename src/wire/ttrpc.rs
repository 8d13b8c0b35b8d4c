//! The ttrpc transport: unary calls framed as containerd's ttrpc frames them.
//!
//! The frames and their messages are the `ttrpc` crate's. The loop is our own, because that crate's
//! server leaves a caller without an answer when a handler panics, takes any number of calls, and
//! ends only after a wait of its own; and so is the reading of a frame, as that crate's takes 4 MiB
//! and no more.

use std::sync::Arc;
use std::time::Duration;

use protobuf::{Message, MessageField};
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader, BufWriter};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use ttrpc::proto::{GenMessage, MESSAGE_TYPE_REQUEST, MessageHeader, Request, Response};

use super::MAX_CALLS;
use super::connections::Connection;
use super::handler::{self, Handler};
use super::namespace;
use super::request_budget::{self, BudgetPermit};
use super::response::{Answer, TTRPC_ANSWER};
use super::service::SandboxService;
use super::status::{Code, Status};
use crate::log_context::{TRACEPARENT, TraceId};

/// How long new calls are still read when the daemon stops: ttrpc has no GOAWAY. A Wait is
/// answered with UNAVAILABLE.
const LINGER: Duration = Duration::from_millis(200);
/// Answers that wait for the writer; calls beyond wait with theirs.
const QUEUE: usize = 64;

/// Serves one connection until the caller closes it or the daemon stops.
///
/// # Errors
/// Why the connection broke.
pub(super) async fn serve<V: SandboxService>(
    stream: UnixStream,
    handler: Handler<V>,
    of: Arc<Connection>,
) -> Result<(), ttrpc::Error> {
    let (reader, writer) = stream.into_split();
    let mut reader = BufReader::new(reader);
    let (answers, queue) = mpsc::channel(QUEUE);
    let mut calls = JoinSet::new();
    let writing = write(writer, queue);
    tokio::pin!(writing);
    tokio::select! {
        // The callers are gone: what still runs is dropped with `calls`.
        ended = read_requests(&mut reader, &handler, &mut calls, &answers, &of) => return ended,
        () = of.evicted() => return Ok(()),
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
    of: &Arc<Connection>,
) -> Result<(), ttrpc::Error> {
    loop {
        let header = MessageHeader::read_from(&mut *reader).await.map_err(|e| broken(&e))?;
        let (stream, length) = (header.stream_id, header.length as usize);
        // Only calls of one message are served; frames of a stream belong to no call here.
        if header.type_ != MESSAGE_TYPE_REQUEST {
            skip(reader, length).await?;
            continue;
        }
        while calls.try_join_next().is_some() {}
        // Only this connection waits: its frames come in order, and are read in order.
        let asked = match handler.request_budget().reserve(length).await {
            Ok(permit) => {
                let payload = payload(reader, length, permit.is_some()).await?;
                request(stream, &payload, calls.len()).map(|request| (request, permit))
            }
            Err(refused) => {
                skip(reader, length).await?;
                Err(refused)
            }
        };
        // An answer that cannot be sent has no caller: the connection is gone.
        match asked {
            Ok((request, permit)) => {
                let (handler, answers, pending) = (handler.clone(), answers.clone(), of.begin());
                calls.spawn(async move {
                    let _pending = pending;
                    let answer = call(&handler, request, permit).await;
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

/// Reads the rest of a frame. One that holds budget delays other requests, and so has a time limit.
async fn payload(
    reader: &mut BufReader<OwnedReadHalf>,
    length: usize,
    holds_budget: bool,
) -> Result<Vec<u8>, ttrpc::Error> {
    let mut payload = vec![0; length];
    let whole = reader.read_exact(&mut payload);
    let read = if holds_budget {
        let late = |_| Err(std::io::ErrorKind::TimedOut.into());
        tokio::time::timeout(request_budget::REQUEST_TIMEOUT, whole).await.unwrap_or_else(late)
    } else {
        whole.await
    };
    read.map_err(|e| broken(&e))?;
    Ok(payload)
}

/// Reads over the rest of a frame.
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
fn request(stream: u32, payload: &[u8], pending: usize) -> Result<Request, Status> {
    if stream % 2 != 1 {
        return Err(Status::new(Code::INVALID_ARGUMENT, format!("stream id {stream} is not odd")));
    }
    if pending >= MAX_CALLS {
        let text = format!("{MAX_CALLS} calls are pending on this connection");
        return Err(Status::new(Code::RESOURCE_EXHAUSTED, text));
    }
    Request::parse_from_bytes(payload).map_err(|e| {
        Status::new(Code::INVALID_ARGUMENT, format!("malformed {}: {e}", Request::NAME))
    })
}

async fn call<V: SandboxService>(
    handler: &Handler<V>,
    request: Request,
    permit: BudgetPermit,
) -> Answer {
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
    handler
        .handle_call(
            &call,
            Box::pin(std::future::ready(Ok(request_budget::BudgetedRequest::new(payload, permit)))),
        )
        .await
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
