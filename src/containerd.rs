//! The one question that is asked of containerd: whether it still knows a sandbox.
//!
//! Unary gRPC over a unix socket, on a connection of its own: asked rarely, so nothing is kept open.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use bytes::{BufMut as _, BytesMut};
use http::{HeaderMap, Request};
use protobuf::Message as _;
use tokio::net::UnixStream;

use crate::error::{IoContext as _, Step};
use crate::protos::store::StoreGetRequest;

const GET: &str = "http://localhost/containerd.services.sandbox.v1.Store/Get";

/// How long containerd may take to answer.
const WITHIN: Duration = Duration::from_secs(10);

/// gRPC's OK and NOT_FOUND.
const OK: &str = "0";
const NOT_FOUND: &str = "5";

/// containerd's record of sandboxes.
#[derive(Clone, Debug)]
pub struct Store {
    /// containerd's gRPC socket.
    pub address: PathBuf,
    /// The namespace that CRI uses.
    pub namespace: String,
}

impl Store {
    /// Whether containerd knows the sandbox.
    ///
    /// # Errors
    /// When containerd cannot be asked, or answers with anything but yes and no.
    pub async fn knows(&self, id: &str) -> Result<bool, Step> {
        let what = "ask containerd for the sandbox";
        let asked = tokio::time::timeout(WITHIN, self.ask(id)).await;
        let status = asked.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())).step_at(what, &self.address)?;
        match status.as_str() {
            OK => Ok(true),
            NOT_FOUND => Ok(false),
            other => Err(Step::at(what, &self.address, io::Error::other(format!("gRPC status {other}")))),
        }
    }

    /// The call's gRPC status.
    async fn ask(&self, id: &str) -> io::Result<String> {
        let message = StoreGetRequest { sandbox_id: id.to_owned(), ..Default::default() };
        let message = message.write_to_bytes().map_err(io::Error::other)?;
        let mut frame = BytesMut::with_capacity(message.len() + 5);
        frame.put_u8(0);
        frame.put_u32(u32::try_from(message.len()).map_err(io::Error::other)?);
        frame.put_slice(&message);

        let stream = UnixStream::connect(&self.address).await?;
        let (requests, connection) = h2::client::handshake(stream).await.map_err(io::Error::other)?;
        // Ends with the last handle on it.
        tokio::spawn(async move { drop(connection.await) });
        let mut requests = requests.ready().await.map_err(io::Error::other)?;
        let request = Request::post(GET)
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .header("containerd-namespace", &self.namespace)
            .body(())
            .map_err(io::Error::other)?;
        let (response, mut body) = requests.send_request(request, false).map_err(io::Error::other)?;
        body.send_data(frame.freeze(), true).map_err(io::Error::other)?;

        let (head, mut body) = response.await.map_err(io::Error::other)?.into_parts();
        // An answer without a message carries its status in front.
        if let Some(status) = status(&head.headers) {
            return Ok(status);
        }
        while let Some(data) = body.data().await {
            let data = data.map_err(io::Error::other)?;
            body.flow_control().release_capacity(data.len()).map_err(io::Error::other)?;
        }
        let trailers = body.trailers().await.map_err(io::Error::other)?.unwrap_or_default();
        status(&trailers).ok_or_else(|| io::Error::other("an answer without a gRPC status"))
    }
}

fn status(headers: &HeaderMap) -> Option<String> {
    headers.get("grpc-status").and_then(|value| value.to_str().ok()).map(str::to_owned)
}
