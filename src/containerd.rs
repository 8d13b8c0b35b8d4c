//! gRPC client of containerd: whether it knows a sandbox, and its version.
//!
//! Each call has a connection of its own, as calls are rare.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use bytes::{BufMut as _, Bytes, BytesMut};
use http::{HeaderMap, Request};
use protobuf::Message as _;
use tokio::net::UnixStream;

use crate::error::{IoContext as _, StepError};
use crate::protos::store::StoreGetRequest;
use crate::protos::version::VersionResponse;
use protobuf::well_known_types::empty::Empty;

const GET: &str = "http://localhost/containerd.services.sandbox.v1.Store/Get";

const VERSION: &str = "http://localhost/containerd.services.version.v1.Version/Version";

/// Timeout of a call.
const WITHIN: Duration = Duration::from_secs(10);

/// Size of the prefix of a gRPC message, a flag and the length; bytes.
const HEAD: usize = 5;

/// Maximum size of a response, bytes.
const LARGEST: usize = 4 << 20;

/// gRPC's OK and NOT_FOUND.
const OK: &str = "0";
const NOT_FOUND: &str = "5";

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
        match self.within(what, GET, &request).await?.0.as_str() {
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
        let (status, message) = self.within(what, VERSION, &Empty::new()).await?;
        if status != OK {
            return Err(self.refused(what, &status));
        }
        let answer = VersionResponse::parse_from_bytes(&message).map_err(io::Error::other);
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
    ) -> Result<(String, Bytes), StepError> {
        let asked = tokio::time::timeout(WITHIN, self.send_request(method, message)).await;
        asked.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())).step_at(what, &self.address)
    }

    /// The gRPC status and the response of a call.
    async fn send_request(
        &self,
        method: &str,
        message: &impl protobuf::Message,
    ) -> io::Result<(String, Bytes)> {
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
            return Ok((status, Bytes::new()));
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
        let status = status(&trailers)
            .ok_or_else(|| io::Error::other("a response without a gRPC status"))?;
        let message = answer.get(HEAD..).map(Bytes::copy_from_slice).unwrap_or_default();
        Ok((status, message))
    }
}

fn status(headers: &HeaderMap) -> Option<String> {
    headers.get("grpc-status").and_then(|value| value.to_str().ok()).map(str::to_owned)
}
