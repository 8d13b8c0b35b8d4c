//! Calls of containerd's gRPC services, each over a connection of its own, as they are rare.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use http::{HeaderMap, Request};
use protobuf::Message;
use tokio::net::UnixStream;

use base::error::{IoContext as _, StepError};

/// Size of the prefix of a gRPC message, a flag and the length; bytes.
const HEAD: usize = 5;

/// Maximum size of a response's message, bytes.
const LARGEST: usize = 16 << 20;

/// gRPC's codes.
pub(super) mod code {
    pub(crate) const OK: u32 = 0;
    pub(crate) const NOT_FOUND: u32 = 5;
    pub(crate) const ALREADY_EXISTS: u32 = 6;
    pub(crate) const UNIMPLEMENTED: u32 = 12;
    pub(crate) const UNAVAILABLE: u32 = 14;
}

/// The status of a call.
#[derive(Debug)]
struct GrpcStatus {
    /// gRPC's status code.
    code: u32,
    /// The message of the server.
    words: String,
}

/// Why a call has no result.
#[derive(Clone, Debug)]
pub enum CallError {
    /// There was no answer: what containerd has done is unknown.
    Lost(StepError),
    /// containerd has answered with another code than OK.
    Refused {
        /// The code (gRPC).
        code: u32,
        /// The failed step.
        step: StepError,
    },
}

impl CallError {
    /// The failed step.
    pub fn step(self) -> StepError {
        match self {
            Self::Lost(step) | Self::Refused { step, .. } => step,
        }
    }

    pub(super) fn is(&self, wanted: u32) -> bool {
        matches!(self, Self::Refused { code, .. } if *code == wanted)
    }

    /// containerd does not run, or does not answer yet.
    pub fn is_unavailable(&self) -> bool {
        matches!(self, Self::Lost(_)) || self.is(code::UNAVAILABLE)
    }
}

impl From<CallError> for StepError {
    fn from(e: CallError) -> Self {
        e.step()
    }
}

/// containerd's gRPC socket, and the metadata of each call.
#[derive(Clone, Debug)]
pub struct GrpcEndpoint {
    /// The socket.
    pub address: PathBuf,
    /// containerd's namespace.
    pub namespace: String,
    /// Id of the lease that protects what a call makes from garbage collection; may be empty.
    pub lease: String,
}

impl GrpcEndpoint {
    /// An endpoint without a lease.
    pub fn new(address: impl Into<PathBuf>, namespace: impl Into<String>) -> Self {
        Self { address: address.into(), namespace: namespace.into(), lease: String::new() }
    }

    /// A call with one answer, within `within`; an answer without a message is a default one.
    ///
    /// # Errors
    /// There is no answer in time, it is no such message, or the status is not OK.
    pub async fn call<A: Message>(
        &self,
        what: &'static str,
        method: &str,
        request: &impl Message,
        within: Duration,
    ) -> Result<A, CallError> {
        let mut answer = A::new();
        self.stream(what, method, request, within, |message| answer = message).await?;
        Ok(answer)
    }

    /// A call with any number of answers within `within`, which `each` gets one by one.
    ///
    /// # Errors
    /// The call does not end in time, a message is invalid, or the status is not OK.
    pub async fn stream<A: Message>(
        &self,
        what: &'static str,
        method: &str,
        request: &impl Message,
        within: Duration,
        mut each: impl FnMut(A) + Send,
    ) -> Result<(), CallError> {
        let each = |message: &[u8]| {
            each(A::parse_from_bytes(message).map_err(io::Error::other)?);
            Ok(())
        };
        let sent = async {
            let request = request.write_to_bytes().map_err(io::Error::other)?;
            self.send(method, &request, each).await
        };
        let answered = tokio::time::timeout(within, sent).await;
        let GrpcStatus { code, words } = answered
            .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
            .step_at(what, &self.address)
            .map_err(CallError::Lost)?;
        if code == code::OK {
            return Ok(());
        }
        let reason = match words.as_str() {
            "" => format!("gRPC status {code}"),
            words => format!("{words} (gRPC status {code})"),
        };
        let step = StepError::at(what, &self.address, io::Error::other(reason));
        Err(CallError::Refused { code, step })
    }

    async fn send(
        &self,
        method: &str,
        request: &[u8],
        mut each: impl FnMut(&[u8]) -> io::Result<()> + Send,
    ) -> io::Result<GrpcStatus> {
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
        if let Some(status) = status(&head.headers) {
            return Ok(status);
        }
        let mut rest = BytesMut::new();
        while let Some(data) = body.data().await {
            let data: Bytes = data.map_err(io::Error::other)?;
            body.flow_control().release_capacity(data.len()).map_err(io::Error::other)?;
            rest.extend_from_slice(&data);
            while let Some(message) = next_message(&mut rest)? {
                each(&message)?;
            }
        }
        if !rest.is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let trailers = body.trailers().await.map_err(io::Error::other)?.unwrap_or_default();
        status(&trailers).ok_or_else(|| io::Error::other("a response without a gRPC status"))
    }
}

/// Takes the first message, if all of it is there: a flag, its length in four bytes, and itself.
fn next_message(bytes: &mut BytesMut) -> io::Result<Option<Bytes>> {
    let Some([flag, a, b, c, d]) = bytes.first_chunk::<HEAD>().copied() else { return Ok(None) };
    if flag != 0 {
        return Err(io::Error::other("a compressed message, which no request allows"));
    }
    let length = u32::from_be_bytes([a, b, c, d]) as usize;
    if length > LARGEST {
        return Err(io::Error::other(format!("a message of {length} bytes")));
    }
    if bytes.len() < HEAD + length {
        return Ok(None);
    }
    bytes.advance(HEAD);
    Ok(Some(bytes.split_to(length).freeze()))
}

/// The status, if the headers have one.
fn status(headers: &HeaderMap) -> Option<GrpcStatus> {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
    let words = text("grpc-message").map(decoded).unwrap_or_default();
    Some(GrpcStatus { code: text("grpc-status")?.parse().ok()?, words })
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
    fn messages_are_taken_whole() {
        let mut bytes = BytesMut::from(&[0, 0, 0, 0, 2, 7][..]);
        assert_eq!(next_message(&mut bytes).unwrap(), None);
        bytes.extend_from_slice(&[8, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(next_message(&mut bytes).unwrap().as_deref(), Some(&[7, 8][..]));
        assert_eq!(next_message(&mut bytes).unwrap().as_deref(), Some(&[][..]));
        assert_eq!(next_message(&mut bytes).unwrap(), None);
        assert_eq!(bytes.len(), 2);
        assert!(next_message(&mut BytesMut::from(&[1, 0, 0, 0, 0][..])).is_err());
        let mut long = BytesMut::from(&[0, 255, 0, 0, 0][..]);
        assert!(next_message(&mut long).is_err());
    }
}
