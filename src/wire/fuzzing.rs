//! Entry points of the fuzzer in `fuzz/`: each transport at one end of a socket pair, and the
//! handler behind both.

use std::future::ready;
use std::sync::Arc;

use bytes::Bytes;
use containerd_api::framing::MAX_MESSAGE;
use tokio::net::UnixStream;
use tokio::sync::watch;

use super::handler::{Call, Handler};
use super::status::Status;
use super::{grpc, ttrpc};
use crate::controller::SandboxService;

/// CRI's namespace: calls that name another one are refused.
pub use crate::config::CONTAINERD_NAMESPACE as NAMESPACE;

/// Serves one gRPC connection until it ends.
///
/// # Errors
/// Why it broke.
pub async fn serve_grpc<V: SandboxService>(
    sandboxes: Arc<V>,
    stream: UnixStream,
) -> Result<(), String> {
    let (_running, stop) = watch::channel(false);
    grpc::serve(stream, handler(sandboxes, stop)).await.map_err(|e| e.to_string())
}

/// Serves one ttrpc connection until it ends.
///
/// # Errors
/// Why it broke.
pub async fn serve_ttrpc<V: SandboxService>(
    sandboxes: Arc<V>,
    stream: UnixStream,
) -> Result<(), String> {
    let (_running, stop) = watch::channel(false);
    ttrpc::serve(stream, handler(sandboxes, stop)).await.map_err(|e| e.to_string())
}

/// Answers one call of `path`, which is service and method with a slash between them.
///
/// # Errors
/// The error that its caller gets.
pub async fn handle_call<V: SandboxService>(
    sandboxes: Arc<V>,
    path: &str,
    message: &[u8],
) -> Result<Vec<u8>, Status> {
    let (_running, stop) = watch::channel(false);
    let call = Call {
        path: path.into(),
        deadline: Ok(None),
        trace: None,
        namespace: Some(NAMESPACE.into()),
        max_answer: MAX_MESSAGE,
        serves_operators: true,
    };
    let message = Bytes::copy_from_slice(message);
    handler(sandboxes, stop).handle_call(&call, Box::pin(ready(Ok(message)))).await
}

fn handler<V: SandboxService>(sandboxes: Arc<V>, stop: watch::Receiver<bool>) -> Handler<V> {
    let (_, sandboxes) = watch::channel(Some(sandboxes));
    Handler::new(sandboxes, stop, Arc::default())
}
