//! gRPC client of containerd: whether it knows a sandbox, its version, its containers and tasks,
//! its CRI and its images.

use std::path::PathBuf;
use std::time::Duration;

pub mod containers;
pub mod cri;
pub mod framing;
mod grpc;
pub mod images;
pub mod protos;

pub use grpc::{CallError, GrpcEndpoint};

use crate::protos::store::StoreGetRequest;
use crate::protos::version::VersionResponse;
use base::error::StepError;
use framing::Code;
use protobuf::well_known_types::empty::Empty;

const GET: &str = "containerd.services.sandbox.v1.Store/Get";

const VERSION: &str = "containerd.services.version.v1.Version/Version";

/// Timeout of a call.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);

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
        match self.call::<Empty>(what, GET, &request).await {
            Ok(_) => Ok(true),
            Err(e) if e.is(Code::NOT_FOUND) => Ok(false),
            Err(e) => Err(e.step()),
        }
    }

    /// Whether a gRPC server responds at the address, with whatever status.
    ///
    /// # Errors
    /// There is no server, or it does not speak gRPC.
    pub async fn responds(&self) -> Result<(), StepError> {
        match self.call::<Empty>("call", VERSION, &Empty::new()).await {
            Err(CallError::Lost(step)) => Err(step),
            Ok(_) | Err(CallError::Refused { .. }) => Ok(()),
        }
    }

    /// containerd's version, such as `v2.3.4`.
    ///
    /// # Errors
    /// The call failed.
    pub async fn version(&self) -> Result<String, StepError> {
        let what = "query containerd for its version";
        let answer = self.call::<VersionResponse>(what, VERSION, &Empty::new()).await;
        answer.map(|answer| answer.version).map_err(CallError::step)
    }

    fn endpoint(&self) -> GrpcEndpoint {
        GrpcEndpoint::new(&self.address, &self.namespace)
    }

    /// A call with one answer.
    async fn call<A: protobuf::Message>(
        &self,
        what: &'static str,
        method: &str,
        request: &impl protobuf::Message,
    ) -> Result<A, CallError> {
        self.endpoint().call(what, method, request, CALL_TIMEOUT).await
    }

    /// A call with any number of answers.
    async fn stream<A: protobuf::Message>(
        &self,
        what: &'static str,
        method: &str,
        request: &impl protobuf::Message,
        each: impl FnMut(A) + Send,
    ) -> Result<(), CallError> {
        self.endpoint().stream(what, method, request, CALL_TIMEOUT, each).await
    }
}
