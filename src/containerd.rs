//! gRPC client of containerd: whether it knows a sandbox, its version, its containers and tasks.
//!
//! Each call has a connection of its own, as calls are rare.

pub mod containers;

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use http::{HeaderMap, Request};
use tokio::net::UnixStream;

use crate::error::StepError;
use crate::protos::store::StoreGetRequest;
use crate::protos::version::VersionResponse;
use protobuf::well_known_types::empty::Empty;

const GET: &str = "http://localhost/containerd.services.sandbox.v1.Store/Get";

const VERSION: &str = "http://localhost/containerd.services.version.v1.Version/Version";

/// Timeout of a call.
const WITHIN: Duration = Duration::from_secs(10);

/// Size of the prefix of a gRPC message, a flag and the length; bytes.
const HEAD: usize = 5;

/// Maximum size of a response's message, bytes.
const LARGEST: usize = 4 << 20;

/// gRPC's codes.
mod code {
    pub(super) const OK: u32 = 0;
    pub(super) const INVALID_ARGUMENT: u32 = 3;
    pub(super) const NOT_FOUND: u32 = 5;
    pub(super) const ALREADY_EXISTS: u32 = 6;
    pub(super) const PERMISSION_DENIED: u32 = 7;
    pub(super) const FAILED_PRECONDITION: u32 = 9;
    pub(super) const UNIMPLEMENTED: u32 = 12;
    pub(super) const UNAVAILABLE: u32 = 14;
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

    fn is(&self, wanted: u32) -> bool {
        matches!(self, Self::Refused { code, .. } if *code == wanted)
    }

    /// containerd does not run, or does not answer yet.
    pub fn is_unavailable(&self) -> bool {
        matches!(self, Self::Lost(_)) || self.is(code::UNAVAILABLE)
    }

    /// The same call will be refused again.
    pub fn is_final(&self) -> bool {
        let codes = [
            code::INVALID_ARGUMENT,
            code::PERMISSION_DENIED,
            code::FAILED_PRECONDITION,
            code::UNIMPLEMENTED,
        ];
        codes.into_iter().any(|code| self.is(code))
    }
}

/// The end of a call: gRPC's code and message.
#[derive(Debug)]
struct CallStatus {
    code: u32,
    message: String,
}

/// containerd's record of sandboxes.
#[derive(Clone, Debug)]
pub struct SandboxStore {
    /// containerd's gRPC socket.
    pub address: PathBuf,
    /// The namespace that CRI uses.
    pub namespace: String,
}

impl SandboxStore {
    /// Whether containerd knows the sandbox.
    ///
    /// # Errors
    /// The call failed, or its status is neither OK nor NOT_FOUND.
    pub async fn knows(&self, id: &str) -> Result<bool, StepError> {
        let what = "query containerd for the sandbox";
        let request = StoreGetRequest { sandbox_id: id.to_owned(), ..Default::default() };
        match self.call::<_, Empty>(what, GET, &request).await {
            Ok(_) => Ok(true),
            Err(e) if e.is(code::NOT_FOUND) => Ok(false),
            Err(e) => Err(e.step()),
        }
    }

    /// Whether a gRPC server responds at the address, with whatever status.
    ///
    /// # Errors
    /// There is no server, or it does not speak gRPC.
    pub async fn responds(&self) -> Result<(), StepError> {
        match self.call::<_, Empty>("call", VERSION, &Empty::new()).await {
            Err(CallError::Lost(step)) => Err(step),
            Err(CallError::Refused { .. }) | Ok(_) => Ok(()),
        }
    }

    /// containerd's version, such as `v2.3.4`.
    ///
    /// # Errors
    /// The call failed.
    pub async fn version(&self) -> Result<String, StepError> {
        let what = "query containerd for its version";
        let answer = self.call::<_, VersionResponse>(what, VERSION, &Empty::new()).await;
        answer.map(|answer| answer.version).map_err(CallError::step)
    }

    /// A call with one answer.
    async fn call<A: protobuf::Message, B: protobuf::Message>(
        &self,
        what: &'static str,
        method: &str,
        request: &A,
    ) -> Result<B, CallError> {
        let mut answer = B::new();
        self.stream(what, method, request, |message| {
            answer = message;
        })
        .await?;
        Ok(answer)
    }

    /// A call with any number of answers.
    async fn stream<A: protobuf::Message, B: protobuf::Message>(
        &self,
        what: &'static str,
        method: &str,
        request: &A,
        mut each: impl FnMut(B) + Send,
    ) -> Result<(), CallError> {
        let step = |e: io::Error| StepError::at(what, &self.address, e);
        let sent = self.send_request(method, request, |message| {
            each(B::parse_from_bytes(message).map_err(io::Error::other)?);
            Ok(())
        });
        let late = |_| Err(io::ErrorKind::TimedOut.into());
        let status = tokio::time::timeout(WITHIN, sent).await.unwrap_or_else(late);
        let CallStatus { code, message } = status.map_err(|e| CallError::Lost(step(e)))?;
        if code == code::OK {
            return Ok(());
        }
        let reason = io::Error::other(format!("gRPC status {code}: {message}"));
        Err(CallError::Refused { code, step: step(reason) })
    }

    /// Sends a request; its status when all answers were given to `each`.
    async fn send_request(
        &self,
        method: &str,
        message: &impl protobuf::Message,
        mut each: impl FnMut(&[u8]) -> io::Result<()> + Send,
    ) -> io::Result<CallStatus> {
        let message = message.write_to_bytes().map_err(io::Error::other)?;
        let mut frame = BytesMut::with_capacity(message.len() + HEAD);
        frame.put_u8(0);
        frame.put_u32(u32::try_from(message.len()).map_err(io::Error::other)?);
        frame.put_slice(&message);

        let stream = UnixStream::connect(&self.address).await?;
        let (requests, connection) =
            h2::client::handshake(stream).await.map_err(io::Error::other)?;
        // Ends with the last handle on it.
        tokio::spawn(async move { drop(connection.await) });
        let mut requests = requests.ready().await.map_err(io::Error::other)?;
        let request = Request::post(method)
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .header("containerd-namespace", &self.namespace)
            .body(())
            .map_err(io::Error::other)?;
        let (response, mut body) =
            requests.send_request(request, false).map_err(io::Error::other)?;
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
        let trailers = body.trailers().await.map_err(io::Error::other)?.unwrap_or_default();
        status(&trailers).ok_or_else(|| io::Error::other("a response without a gRPC status"))
    }
}

/// Takes the first message, if all of it is there: a flag, its length in four bytes, and itself.
fn next_message(bytes: &mut BytesMut) -> io::Result<Option<Bytes>> {
    let Some([_, a, b, c, d]) = bytes.first_chunk::<HEAD>().copied() else { return Ok(None) };
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

fn status(headers: &HeaderMap) -> Option<CallStatus> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let code = text("grpc-status")?.parse().ok()?;
    Some(CallStatus { code, message: text("grpc-message").unwrap_or_default().to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_taken_whole() {
        let mut bytes = BytesMut::from(&[0, 0, 0, 0, 2, 7][..]);
        assert_eq!(next_message(&mut bytes).unwrap(), None);
        bytes.extend_from_slice(&[8, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(next_message(&mut bytes).unwrap().as_deref(), Some(&[7, 8][..]));
        assert_eq!(next_message(&mut bytes).unwrap().as_deref(), Some(&[][..]));
        assert_eq!(next_message(&mut bytes).unwrap(), None);
        assert_eq!(bytes.len(), 2);
        let mut long = BytesMut::from(&[0, 255, 0, 0, 0][..]);
        assert!(next_message(&mut long).is_err());
    }
}
