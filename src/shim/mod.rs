//! The pod's shim: the Task endpoint of its containers, and the shim that serves there.
//!
//! The daemon makes the socket, launches a shim with it on the first call, watches the shim and
//! ends it: [`Endpoint`]. The shim is this project's own ([`own`]) or the runtime's, by the setting
//! `shim`; either accepts on the socket that it inherits as descriptor 3.

mod bundle;
mod command;
pub mod containerd;
mod containers;
mod endpoint;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
pub mod hang;
mod log;
pub mod own;
mod placement;
mod pod_shim;
pub mod resolve;
mod runtime;
mod task;

use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use sha2::{Digest as _, Sha256};
use tokio::sync::Notify;

use crate::config::{CONTAINERD_NAMESPACE, Config};
use crate::error::{IoContext as _, StepError, StepErrors, gone};
use crate::process::handle::NamespaceHandle;
use crate::process::inheritance::Inheritance;
use crate::process::spawn::Launcher;

use containerd::Containerd;
use endpoint::SpareDescriptor;
use own::OwnShim;
use runtime::Runtimes;

pub use endpoint::Endpoint;
pub use runtime::Runtime;
pub use task::PauseRefused;

/// Version of the Task API at the endpoints: of a lower one containerd starts the shim itself.
pub const TASK_VERSION: u32 = 3;

/// The settings that all shims of a daemon share.
#[derive(Debug)]
pub struct ShimSettings {
    /// The daemon's settings.
    pub config: Arc<Config>,
    /// The attributes that the daemon was started with.
    pub own: Inheritance,
    /// This project's own shim, if it can be used.
    pub own_shim: Option<OwnShim>,
}

impl ShimSettings {
    /// containerd's ttrpc socket, to which shims publish events.
    fn containerd_ttrpc(&self) -> String {
        format!("{}.ttrpc", self.config.containerd_address.display())
    }

    /// Where containerd has the bundles of its tasks.
    fn tasks(&self) -> PathBuf {
        let state = &self.config.containerd_state;
        state.join("io.containerd.runtime.v2.task").join(CONTAINERD_NAMESPACE)
    }

    /// The socket of a pod's endpoint. Its name is a hash: an id under a long directory would not
    /// fit into a socket's path.
    fn socket(&self, id: &str) -> PathBuf {
        let digest = Sha256::digest(id.as_bytes());
        let hex: String =
            digest.iter().take(SOCKET_NAME / 2).map(|byte| format!("{byte:02x}")).collect();
        self.config.state_dir.join(SOCKETS).join(hex)
    }
}

/// Directory of the endpoints' sockets in the daemon's own.
const SOCKETS: &str = "shims";

/// Length of a socket's name, bytes.
const SOCKET_NAME: usize = 32;

/// Length of the path of an endpoint's socket in the daemon's directory, with the name that it has
/// until it listens; bytes.
pub const SOCKET_SUFFIX: usize = 1 + SOCKETS.len() + 1 + SOCKET_NAME + bundle::NEW.len();

/// Makes endpoints.
#[derive(Debug)]
pub struct Shims {
    settings: ShimSettings,
    launcher: Launcher,
    containerd: Containerd,
    runtimes: Runtimes,
    /// Notifies those who wait for the end of a launch, of any pod.
    launches: Notify,
    spare: SpareDescriptor,
}

impl Shims {
    /// The shims of a daemon with these settings.
    ///
    /// # Errors
    /// The boot id cannot be read.
    pub fn new(settings: ShimSettings) -> Result<Self, StepError> {
        Ok(Self {
            launcher: Launcher::new()?,
            containerd: Containerd::new(
                settings.config.containerd_address.clone(),
                settings.own.clone(),
                settings.config.container_limits.clone(),
            ),
            settings,
            runtimes: Runtimes::default(),
            launches: Notify::new(),
            spare: SpareDescriptor::new(),
        })
    }

    /// Removes the sockets of all but these sandboxes: those whose records are gone. Blocks. For
    /// recovery, before a sandbox can be created, whose socket would be mistaken for one of them:
    /// nothing is removed after `until`.
    ///
    /// # Errors
    /// Every step that failed; the others were done all the same.
    pub fn remove_strays(&self, sandboxes: &[&str], until: Instant) -> Result<(), StepErrors> {
        let dir = self.settings.config.state_dir.join(SOCKETS);
        let entries = match fs::read_dir(&dir) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            other => other.step_at("read directory", &dir)?,
        };
        let known: HashSet<PathBuf> = sandboxes.iter().map(|id| self.settings.socket(id)).collect();
        let mut failed = StepErrors::default();
        for entry in
            entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_socket()))
        {
            let path = entry.path();
            // The second name of one that begins to listen.
            let socket =
                if path.extension().is_some() { path.with_extension("") } else { path.clone() };
            if Instant::now() > until {
                let late = io::Error::from(io::ErrorKind::TimedOut);
                failed.check(Err(late).step_at("remove sockets in", dir));
                break;
            }
            if !known.contains(&socket) {
                failed.check(gone(fs::remove_file(&path)).step_at("remove socket", path));
            }
        }
        failed.into_result()
    }

    /// Whether this project's own shim can be used.
    pub fn has_own(&self) -> bool {
        self.settings.own_shim.is_some()
    }

    /// The runtime, shared by all pods that have it.
    pub fn runtime(&self, runtime: Runtime) -> Arc<Runtime> {
        self.runtimes.share(runtime)
    }
}

/// The pod, as its endpoint sees it.
pub trait Pod: Send + Sync {
    /// The namespaces that are the pod's own. None while there is no pause process. Blocks.
    ///
    /// # Errors
    /// They cannot be looked at.
    fn namespaces(&self) -> Result<Vec<NamespaceHandle>, StepError>;

    /// The cgroup of the pod, as in the plan of its pause process. Empty: it has none.
    fn cgroup_parent(&self) -> &str;

    /// Whether the pod has not ended, as far as is known: it may get containers.
    fn lives(&self) -> bool;

    /// Notifies that its shim serves: launched now, or by an earlier daemon. Returns at once.
    fn on_shim_serving(&self) {}

    /// The sandbox fails: its shim has exited with containers in it.
    fn fail(&self);
}
