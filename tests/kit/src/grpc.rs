//! A small gRPC client over a unix socket: raw bytes in, raw bytes out, and the stream is reset
//! when a call is dropped, which is how containerd's own callers give up.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use h2::RecvStream;
use h2::client::{ResponseFuture, SendRequest};
use http::{HeaderMap, Request};
use tokio::net::UnixStream;
use tokio::sync::Mutex;

/// gRPC status code CANCELLED.
pub const CANCELLED: i32 = 1;
/// gRPC status code UNKNOWN.
pub const UNKNOWN: i32 = 2;
/// gRPC status code INVALID_ARGUMENT.
pub const INVALID_ARGUMENT: i32 = 3;
/// gRPC status code DEADLINE_EXCEEDED.
pub const DEADLINE_EXCEEDED: i32 = 4;
/// gRPC status code NOT_FOUND.
pub const NOT_FOUND: i32 = 5;
/// gRPC status code ALREADY_EXISTS.
pub const ALREADY_EXISTS: i32 = 6;
/// gRPC status code FAILED_PRECONDITION.
pub const FAILED_PRECONDITION: i32 = 9;
/// gRPC status code INTERNAL.
pub const INTERNAL: i32 = 13;
/// gRPC status code UNAVAILABLE.
pub const UNAVAILABLE: i32 = 14;

/// Bytes before each message: a flag and the length.
const PREFIX: usize = 5;

/// How a call ended, other than with an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// gRPC status code.
    pub code: i32,
    /// The server's words, or the transport's.
    pub message: String,
}

impl Status {
    fn transport(e: impl fmt::Display) -> Self {
        Self { code: UNAVAILABLE, message: format!("transport: {e}") }
    }

    /// A server that gives up a call, because its deadline has passed, resets the stream.
    fn reset(e: h2::Error) -> Self {
        match e.reason() {
            Some(h2::Reason::CANCEL) => {
                Self { code: CANCELLED, message: "the server has reset the stream".into() }
            }
            _ => Self::transport(e),
        }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "code {}: {}", self.code, self.message)
    }
}

impl std::error::Error for Status {}

/// One server behind a unix socket. Connects with the first call and again when the connection was
/// lost.
#[derive(Debug)]
pub struct Client {
    socket: PathBuf,
    headers: Vec<(&'static str, String)>,
    connection: Mutex<Option<SendRequest<Bytes>>>,
}

impl Client {
    /// A client of the server at `socket`.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into(), headers: Vec::new(), connection: Mutex::new(None) }
    }

    /// The same client, sending this header with every call.
    #[must_use]
    pub fn header(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }

    /// The server's socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// One request, one answer. `method` is `/package.Service/Method`. Dropping the future resets
    /// the stream. With a `deadline` the request carries it, and the call ends with
    /// DEADLINE_EXCEEDED when it has passed.
    ///
    /// # Errors
    /// The server's status, or UNAVAILABLE when there is no connection.
    pub async fn unary(
        &self,
        method: &str,
        request: Vec<u8>,
        deadline: Option<Duration>,
    ) -> Result<Bytes, Status> {
        let call = async {
            let mut stream = self.stream_with(method, request, deadline).await?;
            let Some(answer) = stream.next().await? else {
                return Err(Status {
                    code: INTERNAL,
                    message: "the call ended well, but without an answer".into(),
                });
            };
            // The status comes after the answer.
            match stream.next().await? {
                None => Ok(answer),
                Some(_) => {
                    Err(Status { code: INTERNAL, message: "two answers to one request".into() })
                }
            }
        };
        match deadline {
            None => call.await,
            Some(limit) => tokio::time::timeout(limit, call).await.unwrap_or_else(|_| {
                Err(Status { code: DEADLINE_EXCEEDED, message: format!("no answer in {limit:?}") })
            }),
        }
    }

    /// One request, any number of answers.
    ///
    /// # Errors
    /// UNAVAILABLE when there is no connection.
    pub async fn stream(&self, method: &str, request: Vec<u8>) -> Result<Answers, Status> {
        self.stream_with(method, request, None).await
    }

    async fn stream_with(
        &self,
        method: &str,
        request: Vec<u8>,
        deadline: Option<Duration>,
    ) -> Result<Answers, Status> {
        let mut builder = Request::post(format!("http://localhost{method}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers");
        for (name, value) in &self.headers {
            builder = builder.header(*name, value);
        }
        if let Some(limit) = deadline {
            builder = builder.header("grpc-timeout", format!("{}m", limit.as_millis()));
        }
        let head = builder.body(()).map_err(Status::transport)?;

        let mut body = BytesMut::with_capacity(PREFIX + request.len());
        body.put_u8(0);
        body.put_u32(u32::try_from(request.len()).map_err(Status::transport)?);
        body.put_slice(&request);

        let mut server = self.server().await?;
        let (response, mut sender) = server.send_request(head, false).map_err(Status::transport)?;
        let mut rest = body.freeze();
        // A request may be larger than the server's window.
        while !rest.is_empty() {
            sender.reserve_capacity(rest.len());
            let room = match std::future::poll_fn(|cx| sender.poll_capacity(cx)).await {
                Some(room) => room.map_err(Status::transport)?,
                // The server has ended the call already; its status says why.
                None => break,
            };
            let part = rest.split_to(room.min(rest.len()));
            sender.send_data(part, rest.is_empty()).map_err(Status::transport)?;
        }
        Ok(Answers { response: Some(response), body: None, buffer: BytesMut::new() })
    }

    /// A connection that takes one more stream.
    async fn server(&self) -> Result<SendRequest<Bytes>, Status> {
        let mut connection = self.connection.lock().await;
        if let Some(known) = connection.take()
            && let Ok(ready) = known.ready().await
        {
            *connection = Some(ready.clone());
            return Ok(ready);
        }
        let stream = UnixStream::connect(&self.socket)
            .await
            .map_err(|e| Status::transport(format!("connect {}: {e}", self.socket.display())))?;
        let (sender, driver) = h2::client::Builder::new()
            .initial_window_size(1 << 20)
            .initial_connection_window_size(16 << 20)
            .handshake(stream)
            .await
            .map_err(Status::transport)?;
        // Ends with the connection; its error reaches every call.
        tokio::spawn(driver);
        let ready = sender.ready().await.map_err(Status::transport)?;
        *connection = Some(ready.clone());
        Ok(ready)
    }
}

/// The answers to one call.
#[derive(Debug)]
pub struct Answers {
    response: Option<ResponseFuture>,
    body: Option<RecvStream>,
    buffer: BytesMut,
}

impl Answers {
    /// The next answer; `None` when the server has ended the call well.
    ///
    /// # Errors
    /// The server's status, or UNAVAILABLE when the connection is lost.
    pub async fn next(&mut self) -> Result<Option<Bytes>, Status> {
        if let Some(response) = self.response.take() {
            let (head, body) = response.await.map_err(Status::reset)?.into_parts();
            // An answer without a body has its status among the headers.
            if head.headers.contains_key("grpc-status") {
                return ended(&head.headers);
            }
            if head.status != http::StatusCode::OK {
                return Err(Status {
                    code: UNKNOWN,
                    message: format!("HTTP status {}", head.status),
                });
            }
            self.body = Some(body);
        }
        let Some(body) = &mut self.body else { return Ok(None) };
        loop {
            if let Some(message) = cut(&mut self.buffer)? {
                return Ok(Some(message));
            }
            match body.data().await {
                Some(data) => {
                    let data = data.map_err(Status::reset)?;
                    body.flow_control().release_capacity(data.len()).map_err(Status::reset)?;
                    self.buffer.extend_from_slice(&data);
                }
                None => {
                    let trailers =
                        body.trailers().await.map_err(Status::reset)?.unwrap_or_default();
                    self.body = None;
                    return ended(&trailers);
                }
            }
        }
    }
}

/// The first whole message of `buffer`.
fn cut(buffer: &mut BytesMut) -> Result<Option<Bytes>, Status> {
    if buffer.len() < PREFIX {
        return Ok(None);
    }
    if buffer[0] != 0 {
        return Err(Status {
            code: INTERNAL,
            message: "a compressed message, which the request does not allow".into(),
        });
    }
    let length = u32::from_be_bytes([buffer[1], buffer[2], buffer[3], buffer[4]]) as usize;
    if buffer.len() < PREFIX + length {
        return Ok(None);
    }
    buffer.advance(PREFIX);
    Ok(Some(buffer.split_to(length).freeze()))
}

/// The end of a call by its trailers.
fn ended(trailers: &HeaderMap) -> Result<Option<Bytes>, Status> {
    let text = |name| trailers.get(name).and_then(|v| v.to_str().ok());
    match text("grpc-status").and_then(|code| code.parse().ok()) {
        Some(0) => Ok(None),
        Some(code) => {
            Err(Status { code, message: unescape(text("grpc-message").unwrap_or_default()) })
        }
        None => {
            Err(Status { code: UNKNOWN, message: "the call ended without a gRPC status".into() })
        }
    }
}

/// Undoes the percent-encoding of `grpc-message`.
fn unescape(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        let escaped = (*first == b'%')
            .then(|| tail.get(..2))
            .flatten()
            .and_then(|digits| std::str::from_utf8(digits).ok());
        match escaped.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &tail[2..];
            }
            None => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}
