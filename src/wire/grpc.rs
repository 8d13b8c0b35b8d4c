//! The gRPC transport: unary calls over HTTP/2 (gRPC over HTTP2, the protocol document of the gRPC
//! project).

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use h2::server::SendResponse;
use h2::{Reason, RecvStream};
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, header};
use tokio::net::UnixStream;
use tokio::task::JoinSet;

use super::MAX_CALLS;
use super::connections;
use super::handler::{Call, Dispatched, Handler, Wait};
use super::namespace;
use super::request_budget::{BudgetedRequest, REQUEST_TIMEOUT, RequestBudget};
use super::response::{Answer, GRPC_ANSWER, MAX_MESSAGE};
use super::service::SandboxService;
use super::status::{Code, Status};
use crate::log_context::{TRACEPARENT, TraceId};

/// Before each message: a byte that says whether it is compressed, and its length in four.
const PREFIX: usize = 5;
/// The largest list of request headers, bytes: a caller's metadata.
const MAX_HEADERS: u32 = 16 << 10;
/// What a small DATA frame costs of h2's budget for frames that wait to be read, at most; bytes.
const SMALL_FRAME: usize = 256;
/// How long a caller may take to speak HTTP/2.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// How long a caller who must make room may take to read that.
const GOODBYE: Duration = Duration::from_millis(100);
/// How long the rest of a request that is already answered is read.
const REST: Duration = Duration::from_secs(5);
const STATUS: &str = "grpc-status";
const MESSAGE: &str = "grpc-message";
const TIMEOUT: &str = "grpc-timeout";
const CONTENT_TYPE: &str = "application/grpc";

/// Serves one connection until the caller closes it or the daemon stops.
///
/// # Errors
/// Why the connection broke.
pub(super) async fn serve<V: SandboxService>(
    stream: UnixStream,
    handler: Handler<V>,
    of: Arc<connections::Connection>,
) -> Result<(), h2::Error> {
    let mut builder = h2::server::Builder::new();
    builder
        .max_concurrent_streams(MAX_CALLS as u32)
        .max_header_list_size(MAX_HEADERS)
        // A request that waits for budget must leave others some of the connection's window.
        .initial_window_size(1 << 18)
        .initial_connection_window_size(4 << 20)
        // One caller's cancelled calls must not cost all others their connection: the Waits of
        // every pod are on it.
        .max_pending_accept_reset_streams(MAX_CALLS)
        // Nor must calls that break the rules of HTTP/2, however many in the life of a connection.
        .max_local_error_reset_streams(None)
        // Nor must many small requests that come at once.
        .data_frame_budget(MAX_CALLS * SMALL_FRAME);
    let mut connection = tokio::select! {
        connection = builder.handshake::<_, Bytes>(stream) => connection?,
        () = tokio::time::sleep(HANDSHAKE) => return Err(Reason::SETTINGS_TIMEOUT.into()),
        () = handler.stopping() => return Ok(()),
        () = of.evicted() => return Ok(()),
    };
    // Dropped with the connection, and the calls with it: their caller is gone.
    let mut calls = JoinSet::new();
    // The Waits of every pod are here for as long as the pod lives; as tasks they would be several
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
                    let pending = of.begin();
                    let (handler, asked) = (Arc::clone(&handler), ParsedRequest::from(request));
                    calls.spawn(serve_call(handler, asked, respond, pending));
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
            // GOAWAY names the last call that was begun; a caller repeats those after it.
            () = of.evicted(), if !draining => {
                connection.abrupt_shutdown(Reason::NO_ERROR);
                let _ = tokio::time::timeout(GOODBYE, connection.accept()).await;
                return Ok(());
            }
            () = &mut stopping, if !draining => {
                draining = true;
                std::mem::take(&mut waits).into_iter().for_each(PendingWait::stop);
                connection.graceful_shutdown();
            }
        }
    }
}

/// The parts of a request that its call needs.
struct ParsedRequest {
    grpc: bool,
    call: Call,
    body: RecvStream,
}

impl From<Request<RecvStream>> for ParsedRequest {
    fn from(request: Request<RecvStream>) -> Self {
        let (head, body) = request.into_parts();
        let kind = head.headers.get(header::CONTENT_TYPE);
        let path = head.uri.path();
        let trace = head
            .headers
            .get(TRACEPARENT)
            .and_then(|value| TraceId::of_traceparent(value.to_str().ok()?));
        Self {
            grpc: kind.is_some_and(|kind| kind.as_bytes().starts_with(CONTENT_TYPE.as_bytes())),
            call: Call {
                path: path.strip_prefix('/').unwrap_or_default().into(),
                deadline: timeout(&head.headers),
                trace,
                namespace: namespace(&head.headers),
                max_answer: GRPC_ANSWER,
                serves_operators: false,
            },
            body,
        }
    }
}

/// Answers a call, or gives back the Wait that it is.
async fn serve_call<V: SandboxService>(
    handler: Arc<Handler<V>>,
    asked: ParsedRequest,
    mut respond: SendResponse<Bytes>,
    pending: connections::PendingCall,
) -> Option<PendingWait<V>> {
    let ParsedRequest { grpc, call, mut body } = asked;
    let sent = if !grpc {
        refuse(&mut respond)
    } else {
        let request = Box::pin(message(&mut body, handler.request_budget()));
        let begun = tokio::select! {
            begun = handler.begin(&call, request) => begun,
            // The caller gave up; the call is dropped.
            _ = poll_fn(|cx| respond.poll_reset(cx)) => return None,
        };
        match begun {
            Dispatched::Answered(answer) => send(&mut respond, answer),
            Dispatched::WaitPending(wait) => {
                return Some(PendingWait { handler, wait, respond, _of: pending });
            }
        }
    };
    if let Err(e) = sent {
        log::debug!("failed to send gRPC response of {}: {e}", call.path);
    } else if !body.is_end_stream() {
        // May be late, and is bounded.
        let _ = tokio::time::timeout(REST, Box::pin(discard(body))).await;
    }
    None
}

/// Reads what still comes of a request that is answered, as its stream would be reset otherwise,
/// and each late frame be an error of HTTP/2.
async fn discard(mut body: RecvStream) -> Result<(), h2::Error> {
    let mut rest = MAX_MESSAGE;
    while let Some(chunk) = body.data().await {
        let size = chunk?.len();
        body.flow_control().release_capacity(size)?;
        match rest.checked_sub(size) {
            Some(less) => rest = less,
            None => break,
        }
    }
    Ok(())
}

/// A Wait that is pending.
struct PendingWait<V> {
    handler: Arc<Handler<V>>,
    wait: Wait,
    respond: SendResponse<Bytes>,
    /// Keeps its connection.
    _of: connections::PendingCall,
}

impl<V: SandboxService> PendingWait<V> {
    /// Answers it because the daemon stops.
    fn stop(mut self) {
        let answer = self.handler.stopped(&mut self.wait);
        self.send(answer);
    }

    fn send(&mut self, answer: Answer) {
        if let Err(e) = send(&mut self.respond, answer) {
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

/// Reads the one message of a unary call.
async fn message(
    body: &mut RecvStream,
    budget: &RequestBudget,
) -> Result<BudgetedRequest<Bytes>, Status> {
    let mut bytes = BytesMut::new();
    while bytes.len() < PREFIX && read_body(body, &mut bytes).await? {}
    check(&bytes)?;
    let permit = budget.reserve(length(&bytes)).await?;
    let rest = async {
        while read_body(body, &mut bytes).await? {
            check(&bytes)?;
        }
        Ok(())
    };
    match &permit {
        None => rest.await?,
        // Its share of the budget delays other requests.
        Some(_) => {
            tokio::time::timeout(REQUEST_TIMEOUT, Box::pin(rest)).await.unwrap_or_else(|_| {
                let text = format!(
                    "the request has not come whole within {} s",
                    REQUEST_TIMEOUT.as_secs()
                );
                Err(Status::new(Code::DEADLINE_EXCEEDED, text))
            })?
        }
    }
    if bytes.len() < PREFIX || bytes.len() - PREFIX != length(&bytes) {
        return Err(not_one());
    }
    Ok(BudgetedRequest::new(bytes.freeze().slice(PREFIX..), permit))
}

/// Reads what has come of a request; false at its end.
async fn read_body(body: &mut RecvStream, bytes: &mut BytesMut) -> Result<bool, Status> {
    let Some(chunk) = body.data().await else { return Ok(false) };
    // A broken stream: no caller is left to read this answer.
    let chunk =
        chunk.map_err(|e| Status::new(Code::INVALID_ARGUMENT, format!("read the request: {e}")))?;
    bytes.extend_from_slice(&chunk);
    body.flow_control()
        .release_capacity(chunk.len())
        .map_err(|e| Status::new(Code::INTERNAL, format!("flow control: {e}")))?;
    Ok(true)
}

fn not_one() -> Status {
    Status::new(Code::INVALID_ARGUMENT, "the request is not one whole gRPC message")
}

/// Refuses a message by what has come of it so far.
fn check(bytes: &[u8]) -> Result<(), Status> {
    if bytes.first().is_some_and(|compressed| *compressed != 0) {
        return Err(Status::new(Code::UNIMPLEMENTED, "compressed messages are not served"));
    }
    if bytes.len() > PREFIX + length(bytes) && bytes.len() > PREFIX {
        return Err(not_one());
    }
    Ok(())
}

/// The message's length as its prefix says; 0 as long as the prefix is not whole.
fn length(bytes: &[u8]) -> usize {
    match bytes {
        [_, a, b, c, d, ..] => u32::from_be_bytes([*a, *b, *c, *d]) as usize,
        _ => 0,
    }
}

/// The time that the caller gives the call: at most eight digits and a unit.
fn timeout(headers: &HeaderMap) -> Result<Option<Duration>, Status> {
    let Some(value) = headers.get(TIMEOUT) else { return Ok(None) };
    let parsed = value.to_str().ok().and_then(|text| {
        let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
        if digits.is_empty()
            || digits.len() > 8
            || !digits.bytes().all(|digit| digit.is_ascii_digit())
        {
            return None;
        }
        let number: u64 = digits.parse().ok()?;
        match unit {
            "H" => Some(Duration::from_secs(number * 3600)),
            "M" => Some(Duration::from_secs(number * 60)),
            "S" => Some(Duration::from_secs(number)),
            "m" => Some(Duration::from_millis(number)),
            "u" => Some(Duration::from_micros(number)),
            "n" => Some(Duration::from_nanos(number)),
            _ => None,
        }
    });
    match parsed {
        Some(timeout) => Ok(Some(timeout)),
        None => Err(Status::new(Code::INVALID_ARGUMENT, format!("malformed {TIMEOUT}: {value:?}"))),
    }
}

/// The namespace of a call: the first that it names, as containerd reads it.
fn namespace(headers: &HeaderMap) -> Option<Box<str>> {
    headers.get(namespace::GRPC_KEY).map(|value| String::from_utf8_lossy(value.as_bytes()).into())
}

fn send(respond: &mut SendResponse<Bytes>, answer: Answer) -> Result<(), h2::Error> {
    let mut head = Response::new(());
    head.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(CONTENT_TYPE));
    match answer {
        Ok(message) => {
            let mut body = BytesMut::with_capacity(PREFIX + message.len());
            body.put_u8(0);
            // Answers are bounded far below 4 GiB.
            body.put_u32(message.len() as u32);
            body.put_slice(&message);
            let mut stream = respond.send_response(head, false)?;
            stream.send_data(body.freeze(), false)?;
            let mut trailers = HeaderMap::new();
            trailers.insert(STATUS, HeaderValue::from(0));
            stream.send_trailers(trailers)
        }
        Err(status) => {
            head.headers_mut().insert(STATUS, HeaderValue::from(status.code as i32));
            head.headers_mut().insert(MESSAGE, percent(&status.message));
            respond.send_response(head, true).map(drop)
        }
    }
}

/// What is not gRPC gets an answer that its caller understands.
fn refuse(respond: &mut SendResponse<Bytes>) -> Result<(), h2::Error> {
    let mut head = Response::new(());
    *head.status_mut() = StatusCode::UNSUPPORTED_MEDIA_TYPE;
    respond.send_response(head, true).map(drop)
}

/// An error message as gRPC writes it in a header: printable ASCII, all else as %XX.
fn percent(message: &str) -> HeaderValue {
    let mut encoded = String::with_capacity(message.len());
    for byte in message.bytes() {
        if matches!(byte, b' '..=b'~') && byte != b'%' {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    // Nothing but printable ASCII is left, so this cannot fail.
    HeaderValue::try_from(encoded).unwrap_or_else(|_| HeaderValue::from_static(""))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(value: &str) -> Result<Option<Duration>, Code> {
        let headers = HeaderMap::from_iter([(
            http::HeaderName::from_static(TIMEOUT),
            HeaderValue::from_str(value).unwrap(),
        )]);
        timeout(&headers).map_err(|status| status.code)
    }

    #[test]
    fn timeouts_have_digits_and_a_unit() {
        assert_eq!(timeout(&HeaderMap::new()).unwrap(), None);
        assert_eq!(parse("1H"), Ok(Some(Duration::from_secs(3600))));
        assert_eq!(parse("99999999H"), Ok(Some(Duration::from_secs(99_999_999 * 3600))));
        assert_eq!(parse("2M"), Ok(Some(Duration::from_secs(120))));
        assert_eq!(parse("3S"), Ok(Some(Duration::from_secs(3))));
        assert_eq!(parse("4m"), Ok(Some(Duration::from_millis(4))));
        assert_eq!(parse("5u"), Ok(Some(Duration::from_micros(5))));
        assert_eq!(parse("0n"), Ok(Some(Duration::ZERO)));
        for bad in ["", "S", "5", "5s", "+5S", "-1S", "123456789S", "1.5S", " 5S"] {
            assert_eq!(parse(bad), Err(Code::INVALID_ARGUMENT), "{bad:?}");
        }
    }

    #[test]
    fn a_message_is_refused_before_it_has_come_whole() {
        assert!(check(&[]).is_ok());
        assert!(check(&[0, 0xff]).is_ok());
        assert!(check(&[0, 0, 0, 0, 1, 7]).is_ok());
        assert_eq!(check(&[1]).unwrap_err().code, Code::UNIMPLEMENTED);
        assert_eq!(check(&[0, 0, 0, 0, 1, 7, 7]).unwrap_err().code, Code::INVALID_ARGUMENT);
    }

    #[test]
    fn messages_are_percent_encoded() {
        assert_eq!(percent("a b: \"c\" 100%\n/ä"), "a b: \"c\" 100%25%0A/%C3%A4");
    }
}
