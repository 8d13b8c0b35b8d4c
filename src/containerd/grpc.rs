//! Calls of containerd's gRPC services, each over a connection of its own, as they are rare.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use bytes::{BufMut as _, Bytes, BytesMut};
use http::{HeaderMap, Request};
use protobuf::Message;
use tokio::net::UnixStream;

use crate::error::{IoContext as _, StepError};

/// Size of the prefix of a gRPC message, a flag and the length; bytes.
const HEAD: usize = 5;

/// Maximum size of a response, bytes.
const LARGEST: usize = 16 << 20;

/// gRPC's status OK.
pub const OK: &str = "0";

/// gRPC's status NOT_FOUND.
pub const NOT_FOUND: &str = "5";

/// gRPC's status ALREADY_EXISTS.
pub const ALREADY_EXISTS: &str = "6";

/// The outcome of a call.
#[derive(Debug)]
pub struct GrpcReply {
    /// gRPC's status code, as its decimal number.
    pub status: String,
    /// What the server says about the status.
    pub words: String,
    /// The first message of the response; empty if there is none.
    pub message: Bytes,
}

/// containerd's gRPC socket, and the metadata of each call.
#[derive(Clone, Debug)]
pub struct GrpcEndpoint {
    /// The socket.
    pub address: PathBuf,
    /// containerd's namespace.
    pub namespace: String,
    /// Id of the lease that keeps what a call makes from the garbage collection; may be empty.
    pub lease: String,
}

impl GrpcEndpoint {
    /// An endpoint without a lease.
    pub fn new(address: impl Into<PathBuf>, namespace: impl Into<String>) -> Self {
        Self { address: address.into(), namespace: namespace.into(), lease: String::new() }
    }

    /// A call whose status must be OK; its response.
    ///
    /// # Errors
    /// There is no answer within `within`, or its status is another.
    pub async fn call<A: Message>(
        &self,
        what: &'static str,
        method: &str,
        request: &impl Message,
        within: Duration,
    ) -> Result<A, StepError> {
        let reply = self.reply(what, method, request, within).await?;
        self.succeeded(what, &reply)?;
        A::parse_from_bytes(&reply.message).map_err(io::Error::other).step_at(what, &self.address)
    }

    /// A call with whatever status.
    ///
    /// # Errors
    /// There is no answer within `within`.
    pub async fn reply(
        &self,
        what: &'static str,
        method: &str,
        request: &impl Message,
        within: Duration,
    ) -> Result<GrpcReply, StepError> {
        let sent = async {
            let request = request.write_to_bytes().map_err(io::Error::other)?;
            self.send(method, &request).await
        };
        let answered = tokio::time::timeout(within, sent).await;
        answered
            .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
            .step_at(what, &self.address)
    }

    /// Fails unless the status is OK.
    ///
    /// # Errors
    /// The status and what the server says about it.
    pub fn succeeded(&self, what: &'static str, reply: &GrpcReply) -> Result<(), StepError> {
        let GrpcReply { status, words, .. } = reply;
        if status == OK {
            return Ok(());
        }
        let reason = match words.as_str() {
            "" => format!("gRPC status {status}"),
            words => format!("{words} (gRPC status {status})"),
        };
        Err(StepError::at(what, &self.address, io::Error::other(reason)))
    }

    async fn send(&self, method: &str, request: &[u8]) -> io::Result<GrpcReply> {
        let mut frame = BytesMut::with_capacity(request.len() + HEAD);
        frame.put_u8(0);
        frame.put_u32(u32::try_from(request.len()).map_err(io::Error::other)?);
        frame.put_slice(request);

        let stream = UnixStream::connect(&self.address).await?;
        let (requests, connection) =
            h2::client::handshake(stream).await.map_err(io::Error::other)?;
        // Ends with the last handle on it.
        tokio::spawn(async move { drop(connection.await) });
        let mut requests = requests.ready().await.map_err(io::Error::other)?;
        let mut head = Request::post(format!("http://localhost/{method}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .header("containerd-namespace", &self.namespace);
        if !self.lease.is_empty() {
            head = head.header("containerd-lease", &self.lease);
        }
        let head = head.body(()).map_err(io::Error::other)?;
        let (response, mut body) = requests.send_request(head, false).map_err(io::Error::other)?;
        body.send_data(frame.freeze(), true).map_err(io::Error::other)?;

        let (head, mut body) = response.await.map_err(io::Error::other)?.into_parts();
        // A response without a message has its status in the headers.
        if let Some((status, words)) = status(&head.headers) {
            return Ok(GrpcReply { status, words, message: Bytes::new() });
        }
        let mut answer = BytesMut::new();
        while let Some(data) = body.data().await {
            let data = data.map_err(io::Error::other)?;
            body.flow_control().release_capacity(data.len()).map_err(io::Error::other)?;
            if answer.len() + data.len() > LARGEST {
                return Err(io::Error::other(format!("a response of more than {LARGEST} bytes")));
            }
            answer.extend_from_slice(&data);
        }
        let trailers = body.trailers().await.map_err(io::Error::other)?.unwrap_or_default();
        let (status, words) = status(&trailers)
            .ok_or_else(|| io::Error::other("a response without a gRPC status"))?;
        Ok(GrpcReply { status, words, message: first(answer.freeze()) })
    }
}

/// The first message of a response; a stream has more.
fn first(mut answer: Bytes) -> Bytes {
    let Some(length) = answer.get(1..HEAD).and_then(|length| <[u8; 4]>::try_from(length).ok())
    else {
        return Bytes::new();
    };
    let length = usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX);
    let mut message = answer.split_off(HEAD);
    message.truncate(length);
    message
}

/// Status and words, if the headers have a status.
fn status(headers: &HeaderMap) -> Option<(String, String)> {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
    let words = text("grpc-message").map(decoded).unwrap_or_default();
    text("grpc-status").map(|status| (status.to_owned(), words))
}

/// Undoes the percent-encoding of `grpc-message`.
fn decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        let digits = (*first == b'%').then(|| tail.get(..2)).flatten();
        let byte = digits
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

    #[test]
    fn words_of_a_status_are_decoded() {
        assert_eq!(decoded("a%20b%"), "a b%");
        assert_eq!(decoded("%zz%C3%A4"), "%zz\u{e4}");
    }

    #[test]
    fn the_first_message_of_a_response() {
        assert_eq!(first(Bytes::new()), Bytes::new());
        assert_eq!(first(Bytes::from_static(b"\0\0\0\0\x02ab\0\0\0\0\x01c")), "ab");
        assert_eq!(first(Bytes::from_static(b"\0\0\0\0\x09ab")), "ab");
    }
}
