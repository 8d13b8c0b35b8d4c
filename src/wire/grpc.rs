//! The gRPC transport: unary calls over HTTP/2, framed by [`framing`], which says why this is not
//! tonic.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use containerd_api::framing::{self, Messages};
use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt};
use h2::RecvStream;
use h2::server::SendResponse;
use http::Request;
use tokio::net::UnixStream;
use tokio::task::JoinSet;

use super::handler::{Call, Dispatched, Handler, Wait};
use super::response::{Answer, GRPC_ANSWER};
use super::status::Status;
use crate::controller::SandboxService;
use crate::log_context::{TRACEPARENT, TraceId};

/// Calls that may be pending on one connection: a Wait for every pod of a node, and a reserve.
const MAX_CALLS: usize = 16 << 10;
/// Maximum size of the list of request headers, bytes: a caller's metadata.
const MAX_HEADERS: u32 = 16 << 10;
/// Maximum cost of a small DATA frame in h2's budget for frames that wait to be read, bytes.
const SMALL_FRAME: usize = 256;
/// How long the rest of a request that is already answered is read.
const REST: Duration = Duration::from_secs(5);

/// Serves one connection until the caller closes it or the daemon stops.
///
/// # Errors
/// Why the connection broke.
pub(super) async fn serve<V: SandboxService>(
    stream: UnixStream,
    handler: Handler<V>,
) -> Result<(), h2::Error> {
    let mut builder = h2::server::Builder::new();
    builder
        .max_concurrent_streams(MAX_CALLS as u32)
        .max_header_list_size(MAX_HEADERS)
        // A request whose rest has not arrived must leave others some of the connection's window.
        .initial_window_size(1 << 18)
        .initial_connection_window_size(4 << 20)
        // The Waits of all pods are on one connection, which must survive the bad calls of one
        // caller: cancelled ones, those that break the rules of HTTP/2 (however many in the life
        // of the connection), and many small requests that arrive at once.
        .max_pending_accept_reset_streams(MAX_CALLS)
        .max_local_error_reset_streams(None)
        .data_frame_budget(MAX_CALLS * SMALL_FRAME);
    let mut connection = tokio::select! {
        connection = builder.handshake::<_, Bytes>(stream) => connection?,
        () = handler.stopping() => return Ok(()),
    };
    // Dropped with the connection, and the calls with it: their caller is gone.
    let mut calls = JoinSet::new();
    // The Waits of all pods are here for as long as the pods live; as tasks they would be several
    // times as large.
    let mut waits = FuturesUnordered::new();
    let handler = Arc::new(handler);
    let stopping = handler.stopping();
    tokio::pin!(stopping);
    let mut draining = false;
    loop {
        tokio::select! {
            next = connection.accept() => match next {
                Some(call) => {
                    let (request, respond) = call?;
                    calls.spawn(serve_call(Arc::clone(&handler), request, respond));
                }
                None => return Ok(()),
            },
            Some(ended) = calls.join_next() => match ended {
                Ok(Some(pending)) if draining => pending.stop(),
                Ok(Some(pending)) => waits.push(pending),
                // Answered, or the caller is gone.
                Ok(None) | Err(_) => {}
            },
            Some(()) = waits.next() => {}
            () = &mut stopping, if !draining => {
                draining = true;
                std::mem::take(&mut waits).into_iter().for_each(PendingWait::stop);
                connection.graceful_shutdown();
            }
        }
    }
}

/// The call that a request asks for.
fn call(head: &http::request::Parts) -> Call {
    let text = |name| head.headers.get(name).map(|value| String::from_utf8_lossy(value.as_bytes()));
    Call {
        path: head.uri.path().strip_prefix('/').unwrap_or_default().into(),
        deadline: framing::timeout(&head.headers),
        trace: text(TRACEPARENT).and_then(|parent| TraceId::of_traceparent(&parent)),
        // The first that the call names, as containerd reads it.
        namespace: text(framing::NAMESPACE).map(Into::into),
        max_answer: GRPC_ANSWER,
        serves_operators: false,
    }
}

/// Answers a call, or returns it as a pending Wait.
async fn serve_call<V: SandboxService>(
    handler: Arc<Handler<V>>,
    request: Request<RecvStream>,
    mut respond: SendResponse<Bytes>,
) -> Option<PendingWait<V>> {
    let (head, body) = request.into_parts();
    let (call, mut messages) = (call(&head), Messages::new(body));
    let sent = if framing::is_grpc(&head.headers) {
        drop(head);
        let message = messages.only().map(|message| message.map_err(Status::from)).boxed();
        let begun = tokio::select! {
            begun = handler.begin(&call, message) => begun,
            // The caller gave up; the call is dropped.
            _ = poll_fn(|cx| respond.poll_reset(cx)) => return None,
        };
        match begun {
            Dispatched::Answered(answer) => framing::respond(&mut respond, answer),
            Dispatched::WaitPending(wait) => return Some(PendingWait { handler, wait, respond }),
        }
    } else {
        framing::refuse(&mut respond)
    };
    if let Err(e) = sent {
        log::debug!("failed to send gRPC response of {}: {e}", call.path);
    } else if !messages.is_end() {
        // May be late, and is bounded.
        let _ = tokio::time::timeout(REST, messages.discard().boxed()).await;
    }
    None
}

/// A Wait that is pending.
struct PendingWait<V> {
    handler: Arc<Handler<V>>,
    wait: Wait,
    respond: SendResponse<Bytes>,
}

impl<V: SandboxService> PendingWait<V> {
    /// Answers it because the daemon stops.
    fn stop(mut self) {
        let answer = self.handler.stopped(&mut self.wait);
        self.send(answer);
    }

    fn send(&mut self, answer: Answer) {
        if let Err(e) = framing::respond(&mut self.respond, answer) {
            log::debug!("failed to send Wait response over gRPC: {e}");
        }
    }
}

impl<V: SandboxService> Future for PendingWait<V> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        // The caller gave up; the call is dropped.
        if this.respond.poll_reset(cx).is_ready() {
            return Poll::Ready(());
        }
        let answer = ready!(this.handler.poll(&mut this.wait, cx));
        this.send(answer);
        Poll::Ready(())
    }
}
