//! A gRPC client over a unix socket: raw bytes in, raw bytes out. Dropping a call resets its
//! stream, which is how containerd's own callers give up.

use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use containerd_api::framing::{self, Answers, CallFailure};
use h2::client::SendRequest;
use tokio::net::UnixStream;
use tokio::sync::Mutex;

pub use containerd_api::framing::Code::{
    ALREADY_EXISTS, CANCELLED, DEADLINE_EXCEEDED, FAILED_PRECONDITION, INTERNAL, INVALID_ARGUMENT,
    NOT_FOUND, UNAVAILABLE, UNKNOWN,
};
pub use containerd_api::framing::{Code, Status};

/// One server behind a unix socket. Connects with the first call and again when the connection was
/// lost.
#[derive(Debug)]
pub struct Client {
    socket: PathBuf,
    metadata: Vec<(&'static str, String)>,
    connection: Mutex<Option<SendRequest<Bytes>>>,
}

impl Client {
    /// A client of the server at `socket`.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into(), metadata: Vec::new(), connection: Mutex::new(None) }
    }

    /// The same client, sending this header with every call.
    #[must_use]
    pub fn header(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.metadata.push((name, value.into()));
        self
    }

    /// The server's socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// One request, one answer. `method` is `package.Service/Method`. Dropping the future resets
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
        let call = async { Ok(self.send(method, &request, deadline).await?.0.only().await?) };
        let Some(limit) = deadline else { return call.await };
        tokio::time::timeout(limit, call).await.unwrap_or_else(|_| {
            Err(Status::new(Code::DEADLINE_EXCEEDED, format!("no answer in {limit:?}")))
        })
    }

    /// One request, any number of answers.
    ///
    /// # Errors
    /// UNAVAILABLE when there is no connection.
    pub async fn stream(&self, method: &str, request: Vec<u8>) -> Result<AnswerStream, Status> {
        self.send(method, &request, None).await
    }

    async fn send(
        &self,
        method: &str,
        request: &[u8],
        deadline: Option<Duration>,
    ) -> Result<AnswerStream, Status> {
        let metadata: Vec<(&str, &str)> =
            self.metadata.iter().map(|(name, value)| (*name, value.as_str())).collect();
        let head = framing::request(method, &metadata, deadline)
            .map_err(|e| Status::new(Code::INTERNAL, format!("encode the request: {e}")))?;
        let mut server = self.server().await?;
        let sent = framing::send(&mut server, head, framing::frame(request));
        Ok(AnswerStream(sent.map_err(CallFailure::Lost)?))
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
        let stream = UnixStream::connect(&self.socket).await.map_err(|e| {
            let text = format!("transport: connect {}: {e}", self.socket.display());
            Status::new(Code::UNAVAILABLE, text)
        })?;
        let (sender, driver) = h2::client::Builder::new()
            .initial_window_size(1 << 20)
            .initial_connection_window_size(16 << 20)
            .handshake(stream)
            .await
            .map_err(CallFailure::Lost)?;
        // The task ends with the connection, whose error reaches every call.
        tokio::spawn(driver);
        let ready = sender.ready().await.map_err(CallFailure::Lost)?;
        *connection = Some(ready.clone());
        Ok(ready)
    }
}

/// The answers to one call.
#[derive(Debug)]
pub struct AnswerStream(Answers);

impl AnswerStream {
    /// The next answer; `None` when the server has ended the call with OK.
    ///
    /// # Errors
    /// The server's status, or UNAVAILABLE when the connection is lost.
    pub async fn next(&mut self) -> Result<Option<Bytes>, Status> {
        Ok(self.0.next().await?)
    }
}
