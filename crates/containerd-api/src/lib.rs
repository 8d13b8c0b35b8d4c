//! gRPC client of containerd: whether it knows a sandbox, its containers and tasks,
//! its CRI and its images.

use std::io;
use std::path::Path;
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

impl GrpcEndpoint {
    /// Whether containerd knows the sandbox.
    ///
    /// # Errors
    /// The call failed, or its status is neither OK nor NOT_FOUND.
    pub async fn knows(&self, id: &str) -> Result<bool, StepError> {
        let what = "query containerd for the sandbox";
        let request = StoreGetRequest { sandbox_id: id.to_owned(), ..Default::default() };
        match self.call::<Empty>(what, GET, &request, CALL_TIMEOUT).await {
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
        match self.call::<Empty>("call", VERSION, &Empty::new(), CALL_TIMEOUT).await {
            Err(CallError::Lost(step)) => Err(step),
            Ok(_) | Err(CallError::Refused { .. }) => Ok(()),
        }
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
        let answer: PluginInfoResponse =
            self.call(WHAT, PLUGIN_INFO, &request, CALL_TIMEOUT).await?;
        let info = RuntimeInfo::parse_from_bytes(&answer.extra.value);
        info.map(|info| info.name).map_err(io::Error::other).step_at(WHAT, path)
    }
}

/// The output of a program that [`GrpcEndpoint::execute`] has executed.
///
/// # Errors
/// It cannot be encoded.
pub fn runtime_info(name: String) -> io::Result<Vec<u8>> {
    let info = RuntimeInfo { name, ..Default::default() };
    info.write_to_bytes().map_err(io::Error::other)
}
