//! gRPC over HTTP/2 for calls with one request (`PROTOCOL-HTTP2.md` of the gRPC project): messages
//! behind a prefix, metadata in headers, the status in trailers. The daemon's server, the client of
//! containerd, the tests and the fuzzer use this module; HTTP/2 itself is `h2`'s.
//!
//! tonic would replace this file, but a pending Wait over tonic was measured at 4.0 to 6.1 kB, as
//! much memory as a whole sandbox. Each pod has one pending Wait for its whole life.

use std::time::Duration;

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use h2::client::{ResponseFuture, SendRequest};
use h2::server::SendResponse;
use h2::{Reason, RecvStream};
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, header};

pub use ttrpc::Code;

/// Maximum size of a message that is read, bytes. containerd reads and sends as much.
pub const MAX_MESSAGE: usize = 16 << 20;
/// Metadata key of containerd's namespace.
pub const NAMESPACE: &str = "containerd-namespace";

/// Size of the prefix of a message, bytes: whether it is compressed, and its length in four bytes.
const PREFIX: usize = 5;
/// Maximum size of an error message, bytes: it is sent in a header, which clients bound.
const MAX_TEXT: usize = 4096;
/// The largest number of a timeout: eight digits.
const MAX_TIMEOUT: u128 = 99_999_999;
const CONTENT_TYPE: HeaderValue = HeaderValue::from_static("application/grpc");
const STATUS: &str = "grpc-status";
const MESSAGE: &str = "grpc-message";
const TIMEOUT: &str = "grpc-timeout";

/// How a call failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("code {}: {message}", *.code as i32)]
pub struct Status {
    /// The gRPC code; never OK.
    pub code: Code,
    /// The reason for operators.
    pub message: String,
}

impl Status {
    /// A status whose message is shortened to what fits a header.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        let mut message = message.into();
        if message.len() > MAX_TEXT {
            message.truncate(message.floor_char_boundary(MAX_TEXT - "…".len()));
            message.push('…');
        }
        Self { code, message }
    }

    /// How a call ended, if these headers or trailers say so. A code that gRPC does not define is
    /// UNKNOWN.
    fn read(headers: &HeaderMap) -> Option<Result<(), Self>> {
        let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
        let code = match text(STATUS)?.parse().ok()? {
            0 => return Some(Ok(())),
            code => protobuf::Enum::from_i32(code).unwrap_or(Code::UNKNOWN),
        };
        Some(Err(Self { code, message: percent_decode(text(MESSAGE).unwrap_or_default()) }))
    }
}

/// Why a call has no message.
#[derive(Debug, thiserror::Error)]
pub enum CallFailure {
    /// The connection or the call's stream broke.
    #[error("transport: {0}")]
    Lost(#[from] h2::Error),
    /// The peer violates gRPC. The status is a server's answer to such a request.
    #[error("{}", .0.message)]
    Malformed(Status),
    /// The server ended the call with this status.
    #[error(transparent)]
    Refused(Status),
}

impl CallFailure {
    fn malformed(code: Code, message: impl Into<String>) -> Self {
        Self::Malformed(Status::new(code, message))
    }
}

impl From<CallFailure> for Status {
    fn from(failure: CallFailure) -> Self {
        match failure {
            CallFailure::Malformed(status) | CallFailure::Refused(status) => status,
            // A peer that gives up a call, because its deadline has passed, resets the stream.
            CallFailure::Lost(e) if e.reason() == Some(Reason::CANCEL) => {
                Self::new(Code::CANCELLED, "the peer has reset the stream")
            }
            lost @ CallFailure::Lost(_) => Self::new(Code::UNAVAILABLE, lost.to_string()),
        }
    }
}

/// A message with its prefix. Messages are bounded far below 4 GiB.
pub fn frame(message: &[u8]) -> Bytes {
    let mut body = BytesMut::with_capacity(PREFIX + message.len());
    body.put_u8(0);
    body.put_u32(message.len() as u32);
    body.put_slice(message);
    body.freeze()
}

/// Takes the first message from `buffer` if all of it has arrived.
fn take_message(buffer: &mut BytesMut) -> Result<Option<Bytes>, CallFailure> {
    if buffer.first().is_some_and(|compressed| *compressed != 0) {
        let text = "compressed messages are not served";
        return Err(CallFailure::malformed(Code::UNIMPLEMENTED, text));
    }
    let Some([_, a, b, c, d]) = buffer.first_chunk::<PREFIX>().copied() else { return Ok(None) };
    let length = u32::from_be_bytes([a, b, c, d]) as usize;
    if length > MAX_MESSAGE {
        let text = format!("the message has {length} bytes, at most {MAX_MESSAGE} are read");
        return Err(CallFailure::malformed(Code::RESOURCE_EXHAUSTED, text));
    }
    if buffer.len() < PREFIX + length {
        return Ok(None);
    }
    buffer.advance(PREFIX);
    Ok(Some(buffer.split_to(length).freeze()))
}

/// The messages of a request or of an answer.
#[derive(Debug)]
pub struct Messages {
    body: RecvStream,
    buffer: BytesMut,
}

impl Messages {
    /// The messages of this body.
    pub fn new(body: RecvStream) -> Self {
        Self { body, buffer: BytesMut::new() }
    }

    /// The next message; `None` at the end of the body.
    ///
    /// # Errors
    /// The stream broke, or this is no gRPC message.
    pub async fn next(&mut self) -> Result<Option<Bytes>, CallFailure> {
        loop {
            if let Some(message) = take_message(&mut self.buffer)? {
                return Ok(Some(message));
            }
            if !self.read().await? {
                return if self.buffer.is_empty() { Ok(None) } else { Err(not_one()) };
            }
        }
    }

    /// The message of a body that has exactly one.
    ///
    /// # Errors
    /// The stream broke, or the body has no message, a malformed one or more than one.
    pub async fn only(&mut self) -> Result<Bytes, CallFailure> {
        let message = self.next().await?.ok_or_else(not_one)?;
        while self.buffer.is_empty() && self.read().await? {}
        if self.buffer.is_empty() { Ok(message) } else { Err(not_one()) }
    }

    /// Reads and drops the rest of the body: without a reader, each frame that still arrives is an
    /// error of HTTP/2. At most one message of the maximum size is dropped.
    ///
    /// # Errors
    /// The stream broke.
    pub async fn discard(mut self) -> Result<(), h2::Error> {
        let mut dropped = 0;
        while dropped <= MAX_MESSAGE && self.read().await? {
            dropped += self.buffer.len();
            self.buffer.clear();
        }
        Ok(())
    }

    /// Whether the body has been read to its end.
    pub fn is_end(&self) -> bool {
        self.body.is_end_stream()
    }

    /// Reads what has arrived into the buffer; false at the end of the body.
    async fn read(&mut self) -> Result<bool, h2::Error> {
        let Some(chunk) = self.body.data().await else { return Ok(false) };
        let chunk = chunk?;
        self.body.flow_control().release_capacity(chunk.len())?;
        self.buffer.extend_from_slice(&chunk);
        Ok(true)
    }
}

fn not_one() -> CallFailure {
    CallFailure::malformed(Code::INVALID_ARGUMENT, "the request is not one whole gRPC message")
}

/// The head of a call of `method` (`package.Service/Method`) with this metadata.
///
/// # Errors
/// The method or the metadata cannot be sent in HTTP.
pub fn request(
    method: &str,
    metadata: &[(&str, &str)],
    deadline: Option<Duration>,
) -> Result<Request<()>, http::Error> {
    let mut head = Request::post(format!("http://localhost/{method}"))
        .header(header::CONTENT_TYPE, CONTENT_TYPE)
        .header(header::TE, "trailers");
    for (name, value) in metadata {
        head = head.header(*name, *value);
    }
    if let Some(limit) = deadline {
        head = head.header(TIMEOUT, format!("{}m", limit.as_millis().min(MAX_TIMEOUT)));
    }
    head.body(())
}

/// Sends a request, framed with [`frame`]. Dropping the answers resets the stream.
///
/// # Errors
/// The connection broke.
pub fn send(
    server: &mut SendRequest<Bytes>,
    head: Request<()>,
    body: Bytes,
) -> Result<Answers, h2::Error> {
    let (response, mut stream) = server.send_request(head, false)?;
    // It fails if the server has already ended the call; the answer has the reason.
    let _ = stream.send_data(body, true);
    Ok(Answers::new(response))
}

/// The answers to one call.
#[derive(Debug)]
pub struct Answers {
    response: Option<ResponseFuture>,
    messages: Option<Messages>,
}

impl Answers {
    /// The answers of this response.
    pub fn new(response: ResponseFuture) -> Self {
        Self { response: Some(response), messages: None }
    }

    /// The next answer; `None` when the server has ended the call with OK.
    ///
    /// # Errors
    /// The server's status, or why there is none.
    pub async fn next(&mut self) -> Result<Option<Bytes>, CallFailure> {
        if let Some(response) = self.response.take() {
            let (head, body) = response.await?.into_parts();
            // An answer without a message has its status in the headers.
            if let Some(ended) = Status::read(&head.headers) {
                return ended.map(|()| None).map_err(CallFailure::Refused);
            }
            if head.status != StatusCode::OK {
                let text = format!("HTTP status {}", head.status);
                return Err(CallFailure::malformed(Code::UNKNOWN, text));
            }
            self.messages = Some(Messages::new(body));
        }
        let Some(messages) = &mut self.messages else { return Ok(None) };
        if let Some(message) = messages.next().await? {
            return Ok(Some(message));
        }
        let trailers = messages.body.trailers().await?.unwrap_or_default();
        self.messages = None;
        let text = "the call ended without a gRPC status";
        let ended =
            Status::read(&trailers).ok_or_else(|| CallFailure::malformed(Code::UNKNOWN, text))?;
        ended.map(|()| None).map_err(CallFailure::Refused)
    }

    /// The answer to a call that has exactly one.
    ///
    /// # Errors
    /// The server's status, or why there is none.
    pub async fn only(&mut self) -> Result<Bytes, CallFailure> {
        let internal = |text| CallFailure::malformed(Code::INTERNAL, text);
        let answer = self.next().await?;
        // The status follows the answer.
        match (answer, self.next().await?) {
            (Some(answer), None) => Ok(answer),
            (None, _) => Err(internal("the call ended with OK, but without an answer")),
            (_, Some(_)) => Err(internal("two answers to one request")),
        }
    }
}

/// Whether a request says that it is gRPC.
pub fn is_grpc(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE);
    kind.is_some_and(|kind| kind.as_bytes().starts_with(CONTENT_TYPE.as_bytes()))
}

/// The time that the caller gives a call: at most eight digits and a unit.
///
/// # Errors
/// INVALID_ARGUMENT for a malformed one.
pub fn timeout(headers: &HeaderMap) -> Result<Option<Duration>, Status> {
    let Some(value) = headers.get(TIMEOUT) else { return Ok(None) };
    let parsed = value.to_str().ok().and_then(|text| {
        let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
        let is_number = matches!(digits.len(), 1..=8) && digits.bytes().all(|b| b.is_ascii_digit());
        let number: u64 = is_number.then(|| digits.parse().ok())??;
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
    let malformed =
        || Status::new(Code::INVALID_ARGUMENT, format!("malformed {TIMEOUT}: {value:?}"));
    parsed.map(Some).ok_or_else(malformed)
}

/// Answers a unary call.
///
/// # Errors
/// The connection broke, or the caller is gone.
pub fn respond(
    respond: &mut SendResponse<Bytes>,
    answer: Result<Vec<u8>, Status>,
) -> Result<(), h2::Error> {
    let mut head = Response::new(());
    head.headers_mut().insert(header::CONTENT_TYPE, CONTENT_TYPE);
    match answer {
        Ok(message) => {
            let mut stream = respond.send_response(head, false)?;
            stream.send_data(frame(&message), false)?;
            stream.send_trailers(HeaderMap::from_iter([(
                header::HeaderName::from_static(STATUS),
                HeaderValue::from(0),
            )]))
        }
        Err(status) => {
            head.headers_mut().insert(STATUS, HeaderValue::from(status.code as i32));
            head.headers_mut().insert(MESSAGE, percent_encode(&status.message));
            respond.send_response(head, true).map(drop)
        }
    }
}

/// Answers a request that is not gRPC, with a status of HTTP.
///
/// # Errors
/// The connection broke, or the caller is gone.
pub fn refuse(respond: &mut SendResponse<Bytes>) -> Result<(), h2::Error> {
    let mut head = Response::new(());
    *head.status_mut() = StatusCode::UNSUPPORTED_MEDIA_TYPE;
    respond.send_response(head, true).map(drop)
}

/// Encodes an error message for `grpc-message`: printable ASCII, all else as %XX.
fn percent_encode(message: &str) -> HeaderValue {
    let mut encoded = String::with_capacity(message.len());
    for byte in message.bytes() {
        if matches!(byte, b' '..=b'~') && byte != b'%' {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    // Only printable ASCII is left, so this cannot fail.
    HeaderValue::try_from(encoded).unwrap_or_else(|_| HeaderValue::from_static(""))
}

/// Decodes `grpc-message`; a `%` without two digits stays as it is.
fn percent_decode(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        let digits = (*first == b'%').then(|| tail.get(..2)).flatten();
        let byte = digits
            .filter(|digits| digits.iter().all(u8::is_ascii_hexdigit))
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 16).ok());
        bytes.push(byte.unwrap_or(*first));
        rest = if byte.is_some() { &tail[2..] } else { tail };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(value: &str) -> Result<Option<Duration>, Code> {
        let name = header::HeaderName::from_static(TIMEOUT);
        let headers = HeaderMap::from_iter([(name, HeaderValue::from_str(value).unwrap())]);
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
    fn a_deadline_is_read_as_it_is_sent() {
        for (deadline, read) in [(1500, 1500), (u64::MAX, 99_999_999)]
            .map(|(sent, read)| (Duration::from_millis(sent), Duration::from_millis(read)))
        {
            let head = request("a.B/C", &[(NAMESPACE, "k8s.io")], Some(deadline)).unwrap();
            assert_eq!(timeout(head.headers()), Ok(Some(read)));
            assert_eq!((head.uri().path(), is_grpc(head.headers())), ("/a.B/C", true));
            assert_eq!(head.headers()[NAMESPACE], "k8s.io");
        }
    }

    #[test]
    fn messages_are_taken_whole() {
        let mut buffer = BytesMut::from(&[0, 0, 0, 0, 2, 7][..]);
        assert_eq!(take_message(&mut buffer).unwrap(), None);
        buffer.extend_from_slice(&[8, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(take_message(&mut buffer).unwrap().as_deref(), Some(&[7, 8][..]));
        assert_eq!(take_message(&mut buffer).unwrap().as_deref(), Some(&[][..]));
        assert_eq!(take_message(&mut buffer).unwrap(), None);
        assert_eq!(buffer.len(), 2);
        let mut sent = BytesMut::from(&frame(b"abc")[..]);
        assert_eq!(take_message(&mut sent).unwrap().as_deref(), Some(&b"abc"[..]));
    }

    #[test]
    fn a_message_is_refused_before_it_has_arrived_whole() {
        let code = |bytes: &[u8]| match take_message(&mut BytesMut::from(bytes)) {
            Err(CallFailure::Malformed(status)) => Some(status.code),
            _ => None,
        };
        assert_eq!(code(&[1]), Some(Code::UNIMPLEMENTED));
        assert_eq!(code(&[0, 0xff]), None);
        assert_eq!(code(&[0, 1, 0, 0, 1]), Some(Code::RESOURCE_EXHAUSTED));
        assert_eq!(code(&[0, 1, 0, 0, 0]), None);
    }

    #[test]
    fn error_messages_are_percent_encoded() {
        let text = "a b: \"c\" 100%\n/ä";
        assert_eq!(percent_encode(text), "a b: \"c\" 100%25%0A/%C3%A4");
        assert_eq!(percent_decode("a b: \"c\" 100%25%0A/%C3%A4"), text);
        assert_eq!(percent_decode("a%20b%"), "a b%");
        assert_eq!(percent_decode("%+1%1"), "%+1%1");
        assert_eq!(percent_decode("%zz%C3%A4"), "%zz\u{e4}");
    }

    #[test]
    fn a_status_is_read_from_headers() {
        let read = |code: i32| {
            let name = header::HeaderName::from_static(STATUS);
            Status::read(&HeaderMap::from_iter([(name, HeaderValue::from(code))]))
        };
        assert_eq!(Status::read(&HeaderMap::new()), None);
        assert_eq!(read(0), Some(Ok(())));
        assert_eq!(read(5), Some(Err(Status::new(Code::NOT_FOUND, ""))));
        assert_eq!(read(77), Some(Err(Status::new(Code::UNKNOWN, ""))));
    }

    #[test]
    fn a_long_message_is_cut_between_characters() {
        let status = Status::new(Code::INTERNAL, "ä".repeat(1 << 20));
        assert!(status.message.len() <= MAX_TEXT, "{}", status.message.len());
        assert!(status.message.ends_with("ä…"));
        assert_eq!(Status::new(Code::INTERNAL, "short").message, "short");
    }
}
