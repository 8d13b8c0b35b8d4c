//! gRPC client of containerd: whether it knows a sandbox, its version, its containers and tasks,
//! its CRI and its images.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub mod containers;
pub mod cri;
pub mod framing;
mod grpc;
pub mod images;
pub mod protos;

pub use grpc::{CallError, GrpcEndpoint};

use crate::protos::introspection::{
    PluginInfoRequest, PluginInfoResponse, RuntimeInfo, RuntimeRequest,
};
use crate::protos::store::StoreGetRequest;
use crate::protos::version::VersionResponse;
use base::error::{IoContext as _, StepError};
use framing::Code;
use protobuf::Message as _;
use protobuf::well_known_types::any::Any;
use protobuf::well_known_types::empty::Empty;

const GET: &str = "containerd.services.sandbox.v1.Store/Get";

const VERSION: &str = "containerd.services.version.v1.Version/Version";

const PLUGIN_INFO: &str = "containerd.services.introspection.v1.Introspection/PluginInfo";

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

    /// Has containerd execute the program at `path` with the only argument `-info`, as it executes
    /// the shims of runtimes, and returns the name in the answer: see [`runtime_info`].
    ///
    /// # Errors
    /// The call failed, the program did, or it has printed something else.
    pub async fn execute(&self, path: &Path) -> Result<String, StepError> {
        const WHAT: &str = "have containerd execute a program";
        let request =
            RuntimeRequest { runtime_path: path.display().to_string(), ..Default::default() };
        let bytes = |message: protobuf::Result<Vec<u8>>| message.map_err(io::Error::other);
        let options = Any {
            type_url: "containerd.types.RuntimeRequest".to_owned(),
            value: bytes(request.write_to_bytes()).step_at(WHAT, path)?,
            ..Default::default()
        };
        let request = PluginInfoRequest {
            type_: "io.containerd.runtime.v2".to_owned(),
            id: "task".to_owned(),
            options: Some(options).into(),
            ..Default::default()
        };
        let answer: PluginInfoResponse = self.call(WHAT, PLUGIN_INFO, &request).await?;
        let info = RuntimeInfo::parse_from_bytes(&answer.extra.value);
        info.map(|info| info.name).map_err(io::Error::other).step_at(WHAT, path)
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

/// The output of a program that [`SandboxStore::execute`] has executed.
///
/// # Errors
/// It cannot be encoded.
pub fn runtime_info(name: String) -> io::Result<Vec<u8>> {
    let info = RuntimeInfo { name, ..Default::default() };
    info.write_to_bytes().map_err(io::Error::other)
}
