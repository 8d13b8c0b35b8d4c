//! gRPC client of containerd: whether it knows a sandbox, its version, its containers and tasks,
//! its CRI and its images.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

pub mod containers;
pub mod cri;
mod grpc;
pub mod images;

pub use grpc::{GrpcEndpoint, GrpcReply};

use crate::error::StepError;
use crate::protos::store::StoreGetRequest;
use crate::protos::version::VersionResponse;
use grpc::code;
use protobuf::well_known_types::empty::Empty;

const GET: &str = "containerd.services.sandbox.v1.Store/Get";

const VERSION: &str = "containerd.services.version.v1.Version/Version";

/// Timeout of a call.
const WITHIN: Duration = Duration::from_secs(10);

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
        self.endpoint().reply("call", VERSION, &Empty::new(), WITHIN).await.map(drop)
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

    fn endpoint(&self) -> GrpcEndpoint {
        GrpcEndpoint::new(&self.address, &self.namespace)
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
        let endpoint = self.endpoint();
        let each = |message: &[u8]| {
            each(B::parse_from_bytes(message).map_err(io::Error::other)?);
            Ok(())
        };
        let reply = endpoint.stream(what, method, request, WITHIN, each).await;
        let reply = reply.map_err(CallError::Lost)?;
        endpoint
            .succeeded(what, &reply)
            .map_err(|step| CallError::Refused { code: reply.status, step })
    }
}
