//! Calls of containerd's gRPC services, each over a connection of its own, as they are rare.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use protobuf::Message;
use tokio::net::UnixStream;

use base::error::{IoContext as _, StepError};

use super::framing::{self, Answers, CallFailure, Code, Status};

/// Why a call has no result.
#[derive(Clone, Debug)]
pub enum CallError {
    /// There was no answer: what containerd has done is unknown.
    Lost(StepError),
    /// containerd has answered with another code than OK.
    Refused {
        /// The code.
        code: Code,
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

    pub(super) fn is(&self, wanted: Code) -> bool {
        matches!(self, Self::Refused { code, .. } if *code == wanted)
    }

    /// Whether containerd does not run, or does not answer yet.
    pub fn is_unavailable(&self) -> bool {
        matches!(self, Self::Lost(_)) || self.is(Code::UNAVAILABLE)
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
        let answered = async {
            let mut answers = self.send(method, request).await?;
            loop {
                match answers.next().await {
                    Ok(Some(message)) => {
                        each(A::parse_from_bytes(&message).map_err(io::Error::other)?);
                    }
                    Ok(None) => return Ok(None),
                    Err(CallFailure::Refused(status)) => return Ok(Some(status)),
                    Err(lost) => return Err(io::Error::other(lost)),
                }
            }
        };
        let refused = tokio::time::timeout(within, answered)
            .await
            .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
            .step_at(what, &self.address)
            .map_err(CallError::Lost)?;
        let Some(Status { code, message }) = refused else { return Ok(()) };
        let reason = match message.as_str() {
            "" => format!("gRPC status {}", code as i32),
            message => format!("{message} (gRPC status {})", code as i32),
        };
        let step = StepError::at(what, &self.address, io::Error::other(reason));
        Err(CallError::Refused { code, step })
    }

    /// Sends a request over a new connection.
    async fn send(&self, method: &str, request: &impl Message) -> io::Result<Answers> {
        let message = request.write_to_bytes().map_err(io::Error::other)?;
        let mut metadata = vec![(framing::NAMESPACE, self.namespace.as_str())];
        if !self.lease.is_empty() {
            metadata.push(("containerd-lease", &self.lease));
        }
        let head = framing::request(method, &metadata, None).map_err(io::Error::other)?;
        let stream = UnixStream::connect(&self.address).await?;
        let (server, connection) = h2::client::handshake(stream).await.map_err(io::Error::other)?;
        // The task ends with the last handle on the connection.
        tokio::spawn(async move { drop(connection.await) });
        let mut server = server.ready().await.map_err(io::Error::other)?;
        framing::send(&mut server, head, framing::frame(&message)).map_err(io::Error::other)
    }
}
