//! The shim that containerd starts with the pod's first container: where its socket is and how it
//! is ended.
//!
//! containerd up to 2.3 never shuts down the shim of a sandboxed pod, it leaves that to the
//! controller.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use sha2::{Digest as _, Sha256};
use tokio::io::AsyncReadExt as _;
use tokio::net::UnixStream;
use tokio::time::timeout;

use super::{Shims, containers, task};
use crate::error::{IoContext as _, StepError};
use crate::id::SandboxId;
use crate::pool::{self, Class};

/// Where every shim built on containerd's Go library puts its socket, whatever containerd's `state`
/// is.
const SOCKETS: &str = "/run/containerd/s";

/// How long an empty shim may take to exit after Shutdown.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);

/// An endpoint whose shim containerd starts.
#[derive(Clone, Debug)]
pub struct ContainerdOwned {
    shims: Arc<Shims>,
    id: SandboxId,
}

impl ContainerdOwned {
    /// The endpoint of sandbox `id`.
    pub(super) fn new(shims: Arc<Shims>, id: SandboxId) -> Self {
        Self { shims, id }
    }

    /// What Start answers.
    pub(super) fn address(&self) -> String {
        self.shims.settings.on_demand_address.clone()
    }

    /// Where the shim will listen.
    pub(super) fn socket(&self) -> Socket {
        let settings = &self.shims.settings;
        Socket::new(&settings.containerd_address, &settings.containerd_namespace, &self.id)
    }

    /// Shuts the shim down, if containerd has no container in it. Its socket is removed by the end.
    pub(super) async fn dismiss(self: Box<Self>) {
        if !self.socket().path().exists() {
            return;
        }
        let tasks = self.shims.settings.tasks();
        let id = self.id.clone();
        let empty = pool::run(Class::Shim, move || containers::none(&tasks, &id)).await.flatten();
        if matches!(empty, Ok(true))
            && let Err(failure) =
                task::shut_down(self.socket().path(), &self.id, SHUTDOWN_TIMEOUT).await
        {
            let step = failure.step();
            log::debug!(sandbox = self.id.as_str(); "failed to shut down empty shim: {step}");
        }
    }

    /// [`Socket::end_shim`].
    ///
    /// # Errors
    /// As of that.
    pub(super) async fn close(&self) -> Result<(), StepError> {
        self.socket().end_shim(&self.id).await
    }
}

/// The socket that containerd and the pod's shim agree on by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Socket {
    path: PathBuf,
}

impl Socket {
    /// The socket of the shim that serves group `id` (containerd `pkg/shim.SocketAddress`).
    pub fn new(containerd_address: &Path, namespace: &str, id: &str) -> Self {
        let name = format!("{}/{namespace}/{id}", containerd_address.display());
        let digest = Sha256::digest(name.as_bytes());
        let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        Self { path: Path::new(SOCKETS).join(hex) }
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Ends the shim and removes its socket. No shim is success.
    ///
    /// # Errors
    /// The failed step; a shim that still serves containers does not end.
    pub async fn end_shim(&self, id: &str) -> Result<(), StepError> {
        let late = || Err(io::ErrorKind::TimedOut.into());
        match timeout(SHUTDOWN_TIMEOUT, UnixStream::connect(&self.path))
            .await
            .unwrap_or_else(|_| late())
        {
            Ok(watched) => self.shut_down(id, watched).await?,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            // The file outlived its server.
            Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {}
            Err(e) => return Err(StepError::at("connect to shim", &self.path, e)),
        }
        match fs::remove_file(&self.path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other.step_at("remove shim socket", &self.path),
        }
    }

    /// Tells the shim to end and waits until `watched`, a second connection to it, is closed.
    async fn shut_down(&self, id: &str, mut watched: UnixStream) -> Result<(), StepError> {
        let answer = task::shut_down(&self.path, id, SHUTDOWN_TIMEOUT).await;
        let late = || Err(io::ErrorKind::TimedOut.into());
        let ended =
            timeout(SHUTDOWN_TIMEOUT, watched.read(&mut [0])).await.unwrap_or_else(|_| late());
        match (ended, answer) {
            // Whether the answer was lost or not: the shim has ended.
            (Ok(0), _) => Ok(()),
            (Err(e), _) if e.kind() == io::ErrorKind::ConnectionReset => Ok(()),
            (_, Err(failure)) => Err(failure.step()),
            (_, Ok(_)) => Err(StepError::at(
                "shut down shim",
                &self.path,
                io::Error::other("it still runs, as a shim does that serves containers"),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn socket_is_named_as_containerd_names_it() {
        // printf %s /run/containerd/containerd.sock/k8s.io/abc | sha256sum
        let socket = Socket::new(Path::new("/run/containerd/containerd.sock"), "k8s.io", "abc");
        let name = socket.path().file_name().and_then(|n| n.to_str()).map(str::to_owned);
        assert_eq!(
            name.as_deref(),
            Some("a99a1752d3a0fadfb1f869026f16760475df03a572e20f4ccea9e6c1e5470b72")
        );
    }

    #[tokio::test]
    async fn the_end_of_a_shim_without_a_socket_succeeds() {
        if kit::skip_without_root() {
            return;
        }
        let socket = Socket::new(Path::new("/nowhere"), "k8s.io", "no-such-sandbox");
        assert!(socket.end_shim("no-such-sandbox").await.is_ok());
    }
}
