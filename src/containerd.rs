//! gRPC client of containerd: whether it knows a sandbox, its version, its CRI and its images.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use protobuf::Message as _;

pub mod cri;
mod grpc;
pub mod images;

pub use grpc::{GrpcEndpoint, GrpcReply};

use crate::error::{IoContext as _, StepError};
use crate::protos::store::StoreGetRequest;
use crate::protos::version::VersionResponse;
use grpc::{NOT_FOUND, OK};
use protobuf::well_known_types::empty::Empty;

const GET: &str = "containerd.services.sandbox.v1.Store/Get";

const VERSION: &str = "containerd.services.version.v1.Version/Version";

/// Timeout of a call.
const WITHIN: Duration = Duration::from_secs(10);

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
        match self.within(what, GET, &request).await?.status.as_str() {
            OK => Ok(true),
            NOT_FOUND => Ok(false),
            other => Err(self.refused(what, other)),
        }
    }

    /// Whether a gRPC server responds at the address, with whatever status.
    ///
    /// # Errors
    /// There is no server, or it does not speak gRPC.
    pub async fn responds(&self) -> Result<(), StepError> {
        self.within("call", VERSION, &Empty::new()).await.map(drop)
    }

    /// containerd's version, such as `v2.3.4`.
    ///
    /// # Errors
    /// The call failed.
    pub async fn version(&self) -> Result<String, StepError> {
        let what = "query containerd for its version";
        let reply = self.within(what, VERSION, &Empty::new()).await?;
        if reply.status != OK {
            return Err(self.refused(what, &reply.status));
        }
        let answer = VersionResponse::parse_from_bytes(&reply.message).map_err(io::Error::other);
        Ok(answer.step_at(what, &self.address)?.version)
    }

    fn refused(&self, what: &'static str, status: &str) -> StepError {
        StepError::at(what, &self.address, io::Error::other(format!("gRPC status {status}")))
    }

    async fn within(
        &self,
        what: &'static str,
        method: &str,
        message: &impl protobuf::Message,
    ) -> Result<GrpcReply, StepError> {
        let endpoint = GrpcEndpoint::new(&self.address, &self.namespace);
        endpoint.reply(what, method, message, WITHIN).await
    }
}
