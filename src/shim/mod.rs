//! The pod's shim: the Task endpoint of its containers, and what serves there.
//!
//! The setting `shim` (`config::ShimOwner`) decides the kind of a new pod's shim; with the driver
//! `shim` it is [`ShimKind::RunsPause`] instead. The record keeps the kind by a name of its own:
//!
//! | setting `shim` | [`ShimKind`]      | in the record | module               | makes the socket |
//! |----------------|-------------------|---------------|----------------------|------------------|
//! | `own`          | `Handover`        | `sandboxer`   | `handover`, [`own`]  | the daemon       |
//! | `runtime`      | `Handover`        | `sandboxer`   | `handover`           | the daemon       |
//! | `started`      | `SelfStarted`     | `started`     | `self_started`       | the shim's start |
//! | `containerd`   | `ContainerdOwned` | `containerd`  | [`containerd_owned`] | the shim's start |
//! | (driver `shim`)| `RunsPause`       | `driver`      | `self_started`,      | the shim's start |
//! |                |                   |               | [`driver`]           |                  |
//!
//! The variants of `config::ShimOwner` have the names of the values, and those of [`Endpoint`] the
//! names of the modules. That a pod has this project's own shim is recorded beside the kind, as
//! `own_shim`.
//!
//! - With a `handover` the daemon makes the socket, launches the shim with it on the first call,
//!   watches the shim and ends it.
//! - A `self_started` shim is started by the daemon with the pod. It makes its socket in its
//!   `start`, and may run the pause process as well: [`driver`].
//! - A [`containerd_owned`] shim is started by containerd with the pod's first container. The
//!   daemon knows only where its socket is.

mod bootstrap;
mod bundle;
mod command;
pub mod containerd_owned;
mod containers;
pub mod driver;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
mod handover;
mod log;
pub mod own;
mod placement;
mod pod_shim;
pub mod resolve;
mod rootfs;
mod runtime;
mod self_started;
mod task;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt as _;
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::Instant;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::error::{IoContext as _, StepError, gone};
use crate::id::SandboxId;
use crate::pause::Plan;
use crate::process::Identity;
use crate::process::handle::NamespaceHandle;
use crate::process::memory::private_memory;
use crate::process::spawn::Launcher;

use containerd_owned::ContainerdOwned;
use handover::Handover;
use own::OwnShim;
use pod_shim::PodShim;
use runtime::Runtimes;
use self_started::SelfStarted;

pub use command::path;
pub use rootfs::user_namespace;
pub use runtime::Runtime;
pub use task::PauseRefused;

/// Which program starts a pod's shim and how. Recorded, because containerd receives the address
/// once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ShimKind {
    /// containerd starts it with the first container.
    #[default]
    #[serde(rename = "containerd")]
    ContainerdOwned,
    /// The daemon starts it and hands it its socket when containerd creates a container.
    #[serde(rename = "sandboxer")]
    Handover,
    /// The daemon starts it with the pod, by the shim's own `start`.
    #[serde(rename = "started")]
    SelfStarted,
    /// As [`ShimKind::SelfStarted`], and it also runs the pause process.
    #[serde(rename = "driver")]
    RunsPause,
}

impl ShimKind {
    /// The shim runs the pause process as well.
    pub fn runs_pause(self) -> bool {
        self == Self::RunsPause
    }
}

/// What all shims of a daemon share.
#[derive(Debug)]
pub struct ShimSettings {
    /// containerd's gRPC socket.
    pub containerd_address: PathBuf,
    /// containerd's namespace of CRI.
    pub containerd_namespace: String,
    /// containerd's `state`.
    pub containerd_state: PathBuf,
    /// The daemon's own directory.
    pub state_dir: PathBuf,
    /// Directory of the sandboxes' own directories.
    pub sandboxes: PathBuf,
    /// What Start answers where containerd starts the shim; anything that containerd can parse.
    pub on_demand_address: String,
    /// Shims that an operator has set, by runtime name.
    pub binaries: BTreeMap<String, PathBuf>,
    /// The soft limit of open files that shims get, and containers from them; without, the
    /// daemon's.
    pub open_files: Option<u64>,
    /// Variables that an operator has set for shims.
    pub environment: BTreeMap<String, String>,
    /// This project's own shim, if it can be used.
    pub own_shim: Option<OwnShim>,
}

impl ShimSettings {
    /// containerd's ttrpc socket, to which shims publish events.
    fn containerd_ttrpc(&self) -> String {
        format!("{}.ttrpc", self.containerd_address.display())
    }

    /// Where containerd has the bundles of its tasks.
    fn tasks(&self) -> PathBuf {
        self.containerd_state.join("io.containerd.runtime.v2.task").join(&self.containerd_namespace)
    }

    /// The shim of a runtime.
    fn binary(&self, runtime: &str) -> Result<PathBuf, StepError> {
        match self.binaries.get(runtime) {
            Some(set) => resolve::check(set),
            None => resolve::find_binary(runtime, &command::path(), &self.containerd_address),
        }
    }

    /// The socket of a pod's endpoint. Its name is a hash: an id under a long directory would not
    /// fit into a socket's path.
    fn socket(&self, id: &str) -> PathBuf {
        let digest = Sha256::digest(id.as_bytes());
        let hex: String =
            digest.iter().take(SOCKET_NAME / 2).map(|byte| format!("{byte:02x}")).collect();
        self.state_dir.join(SOCKETS).join(hex)
    }
}

/// Directory of the endpoints' sockets in the daemon's own.
const SOCKETS: &str = "shims";

/// Length of a socket's name, bytes.
const SOCKET_NAME: usize = 32;

/// What an endpoint's socket adds to the path of the daemon's directory, with the name that it has
/// until it listens; bytes.
pub const SOCKET_SUFFIX: usize = 1 + SOCKETS.len() + 1 + SOCKET_NAME + bundle::NEW.len();

/// Makes endpoints.
#[derive(Debug)]
pub struct Shims {
    settings: ShimSettings,
    launcher: Launcher,
    /// The endpoints whose shims run the pause process, by sandbox id, for the driver.
    runs_pause: Mutex<HashMap<SandboxId, Weak<SelfStarted>>>,
    runtimes: Runtimes,
}

impl Shims {
    /// Of a daemon with these settings.
    ///
    /// # Errors
    /// The boot id cannot be read.
    pub fn new(settings: ShimSettings) -> Result<Self, StepError> {
        Ok(Self {
            launcher: Launcher::new(settings.open_files)?,
            settings,
            runs_pause: Mutex::default(),
            runtimes: Runtimes::default(),
        })
    }

    /// Removes the sockets of all but these sandboxes: those whose records are gone. Blocks. For
    /// recovery, before a sandbox can be created, whose socket would be mistaken for one of them:
    /// nothing is removed after `until`.
    ///
    /// # Errors
    /// Every step that failed; the others were done all the same.
    pub fn remove_strays(&self, sandboxes: &[&str], until: Instant) -> Result<(), Vec<StepError>> {
        let dir = self.settings.state_dir.join(SOCKETS);
        let entries = match fs::read_dir(&dir) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            other => other.step_at("read directory", &dir).map_err(|step| vec![step])?,
        };
        let known: HashSet<PathBuf> = sandboxes.iter().map(|id| self.settings.socket(id)).collect();
        let mut failed = Vec::new();
        for entry in
            entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_socket()))
        {
            let path = entry.path();
            // The second name of one that begins to listen.
            let of =
                if path.extension().is_some() { path.with_extension("") } else { path.clone() };
            if Instant::now() > until {
                failed.push(StepError::at(
                    "remove sockets in",
                    dir,
                    io::ErrorKind::TimedOut.into(),
                ));
                break;
            }
            if !known.contains(&of) {
                failed.extend(gone(fs::remove_file(&path)).step_at("remove socket", path).err());
            }
        }
        if failed.is_empty() { Ok(()) } else { Err(failed) }
    }

    /// This project's own shim can be used.
    pub fn has_own(&self) -> bool {
        self.settings.own_shim.is_some()
    }

    /// That runtime, shared by all pods that have it.
    pub fn runtime(&self, runtime: Runtime) -> Arc<Runtime> {
        self.runtimes.share(runtime)
    }

    /// The endpoint of sandbox `id`, which keeps its files in the sandbox's own directory. Nothing
    /// is made yet.
    pub fn endpoint(
        self: &Arc<Self>,
        kind: ShimKind,
        id: &SandboxId,
        runtime: &Arc<Runtime>,
    ) -> Endpoint {
        match kind {
            ShimKind::ContainerdOwned => {
                Endpoint::ContainerdOwned(Box::new(ContainerdOwned::new(self.clone(), id.clone())))
            }
            ShimKind::Handover => {
                Endpoint::Handover(Arc::new(Handover::new(self.pod_shim(id, false, runtime))))
            }
            ShimKind::SelfStarted => Endpoint::SelfStarted(Arc::new(SelfStarted::new(
                self.pod_shim(id, true, runtime),
                false,
            ))),
            ShimKind::RunsPause => {
                let endpoint = Arc::new(SelfStarted::new(self.pod_shim(id, true, runtime), true));
                let mut known = self.runs_pause.lock();
                known.retain(|_, endpoint| endpoint.strong_count() > 0);
                known.insert(id.clone(), Arc::downgrade(&endpoint));
                Endpoint::SelfStarted(endpoint)
            }
        }
    }

    fn pod_shim(
        self: &Arc<Self>,
        id: &SandboxId,
        self_started: bool,
        runtime: &Arc<Runtime>,
    ) -> PodShim {
        PodShim::new(self.clone(), id.clone(), self_started, runtime.clone())
    }

    /// The endpoint of a sandbox whose shim runs the pause process.
    fn that_runs_pause(&self, id: &str) -> Option<Arc<SelfStarted>> {
        self.runs_pause.lock().get(id)?.upgrade()
    }
}

/// What an endpoint must know of its pod.
pub trait Pod: Send + Sync {
    /// The namespaces that are the pod's own. None while there is no pause process. Blocks.
    ///
    /// # Errors
    /// They cannot be looked at.
    fn namespaces(&self) -> Result<Vec<NamespaceHandle>, StepError>;

    /// The cgroup of the pod, as in [`Plan::cgroup_parent`]. Empty: it has none.
    fn cgroup_parent(&self) -> &str;

    /// It has not ended, as far as is known: it may get containers.
    fn lives(&self) -> bool;

    /// Notifies that its shim serves: launched now, or by an earlier daemon. Returns at once.
    fn on_shim_serving(&self) {}

    /// The sandbox fails: its shim has exited with containers in it.
    fn fail(&self);
}

/// The Task endpoint of a pod's containers.
#[derive(Debug)]
pub enum Endpoint {
    /// containerd starts the shim.
    ContainerdOwned(Box<ContainerdOwned>),
    /// The shim is ours and gets its socket from us.
    Handover(Arc<Handover>),
    /// The shim is ours and makes its socket itself.
    SelfStarted(Arc<SelfStarted>),
}

impl Endpoint {
    /// What Start answers: where containerd finds the Task API, `PROTOCOL+URL`.
    pub fn address(&self) -> String {
        match self {
            Self::ContainerdOwned(endpoint) => endpoint.address(),
            Self::Handover(endpoint) => format!("ttrpc+unix://{}", endpoint.socket().display()),
            Self::SelfStarted(endpoint) => {
                endpoint.bootstrap().map(|shim| shim.endpoint()).unwrap_or_default()
            }
        }
    }

    /// Version of the Task API there. containerd starts the shim itself below 3.
    pub fn version(&self) -> u32 {
        match self {
            Self::ContainerdOwned(_) => 2,
            Self::Handover(_) => 3,
            Self::SelfStarted(endpoint) => endpoint.bootstrap().map_or(3, |shim| shim.version),
        }
    }

    /// Takes the spec of the sandbox and what it was made of, for a shim that runs the pause
    /// process. Blocks.
    ///
    /// # Errors
    /// The failed step; call [`Endpoint::close`] then.
    pub fn describe(&self, spec: &[u8], plan: &Plan) -> Result<(), StepError> {
        match self {
            Self::ContainerdOwned(_) | Self::Handover(_) => Ok(()),
            Self::SelfStarted(endpoint) => endpoint.describe(spec, plan),
        }
    }

    /// [`Endpoint::listen`] starts nothing, and may be done again.
    pub fn listens_only(&self) -> bool {
        !matches!(self, Self::SelfStarted(_))
    }

    /// Begins to listen.
    ///
    /// # Errors
    /// The failed step.
    pub async fn listen(&self) -> Result<(), StepError> {
        match self {
            Self::ContainerdOwned(_) => Ok(()),
            Self::Handover(endpoint) => endpoint.listen().await,
            Self::SelfStarted(endpoint) => endpoint.start().await,
        }
    }

    /// Takes the lock that [`Endpoint::bind`] needs; `None`: it needs none.
    pub async fn lock_launch(&self) -> Option<tokio::sync::MutexGuard<'_, ()>> {
        match self {
            Self::ContainerdOwned(_) | Self::SelfStarted(_) => None,
            Self::Handover(endpoint) => Some(endpoint.lock_launch().await),
        }
    }

    /// [`Endpoint::listen`] of one that listens only, on this thread, which saves a change of
    /// threads. To be called with the launch lock held. Blocks.
    ///
    /// # Errors
    /// The failed step.
    pub fn bind(&self) -> Result<(), StepError> {
        match self {
            Self::ContainerdOwned(_) => Ok(()),
            Self::Handover(endpoint) => endpoint.bind(),
            Self::SelfStarted(_) => {
                Err(StepError::new("listen", io::ErrorKind::Unsupported.into()))
            }
        }
    }

    /// To be called before [`Endpoint::recover`]: should that not finish in time, what
    /// [`Endpoint::serve`] has begun does the same.
    pub fn expect_recovery(&self) {
        match self {
            Self::ContainerdOwned(_) => {}
            Self::Handover(endpoint) => endpoint.expect_recovery(),
            Self::SelfStarted(endpoint) => endpoint.expect_recovery(),
        }
    }

    /// Takes over what an earlier daemon left: its shim, or else its socket. Where that cannot be
    /// found out, it is logged, and tried again by what [`Endpoint::serve`] has begun, and by
    /// [`Endpoint::close`].
    pub async fn recover(&self) {
        match self {
            Self::ContainerdOwned(_) => {}
            Self::Handover(endpoint) => endpoint.recover().await,
            Self::SelfStarted(endpoint) => endpoint.recover().await,
        }
    }

    /// Serves the endpoint until its end. Returns at once.
    pub fn serve(&self, pod: Arc<dyn Pod>) {
        match self {
            Self::ContainerdOwned(_) => {}
            Self::Handover(endpoint) => endpoint.serve(pod),
            Self::SelfStarted(endpoint) => drop(tokio::spawn(endpoint.clone().serve(pod))),
        }
    }

    /// containerd creates a container: its shim is started now rather than when a caller connects.
    /// Waits only for a shim whose socket is not there before its start.
    pub async fn prepare(&self) {
        match self {
            Self::ContainerdOwned(_) => {}
            Self::Handover(endpoint) => endpoint.prepare(),
            Self::SelfStarted(endpoint) => endpoint.await_shim().await,
        }
    }

    /// The pod has a shim now.
    pub fn has_shim(&self) -> bool {
        match self {
            Self::ContainerdOwned(endpoint) => endpoint.socket().path().exists(),
            Self::Handover(endpoint) => endpoint.has_shim(),
            Self::SelfStarted(endpoint) => endpoint.process().is_some(),
        }
    }

    /// Memory that the pod's shim has for itself, bytes; `None`: there is none, or containerd
    /// watches it. Blocks.
    ///
    /// # Errors
    /// The failed step.
    pub fn private_memory(&self) -> Result<Option<u64>, StepError> {
        let process = match self {
            Self::ContainerdOwned(_) => None,
            Self::Handover(endpoint) => endpoint.process(),
            Self::SelfStarted(endpoint) => endpoint.process(),
        };
        process.map_or(Ok(None), |process| private_memory(process.identity()))
    }

    /// The pod has a shim that came with its first container.
    pub fn had_container(&self) -> bool {
        !matches!(self, Self::SelfStarted(_)) && self.has_shim()
    }

    /// The pod was stopped and gets no more containers: its shim ends when it is empty. Returns at
    /// once.
    pub fn dismiss(&self) {
        match self {
            Self::ContainerdOwned(endpoint) => drop(tokio::spawn(endpoint.clone().dismiss())),
            Self::Handover(endpoint) if endpoint.has_shim() => {
                drop(tokio::spawn(endpoint.clone().dismiss()))
            }
            Self::SelfStarted(endpoint) if endpoint.process().is_some() => {
                drop(tokio::spawn(endpoint.clone().dismiss()))
            }
            Self::Handover(_) | Self::SelfStarted(_) => {}
        }
    }

    /// The pod's shim can serve a task of the sandbox itself: it is this project's own.
    pub fn serves_sandbox(&self) -> bool {
        matches!(self, Self::Handover(endpoint) if endpoint.has_own_shim())
    }

    /// Names the pause process to the pod's shim, for the sandbox's task.
    ///
    /// # Errors
    /// The shim cannot serve it, or the failed step.
    pub async fn set_pause(&self, pause: &Identity) -> Result<(), PauseRefused> {
        match self {
            Self::Handover(endpoint) => endpoint.set_pause(pause).await,
            Self::ContainerdOwned(_) | Self::SelfStarted(_) => Err(PauseRefused::Unsupported),
        }
    }

    /// Why the shim died with containers in it, if it did.
    pub fn death(&self) -> Option<String> {
        match self {
            Self::ContainerdOwned(_) => None,
            Self::Handover(endpoint) => endpoint.death(),
            Self::SelfStarted(endpoint) => endpoint.death(),
        }
    }

    /// Ends the shim and removes socket and bundle. Gone already is success.
    ///
    /// # Errors
    /// Every step that failed.
    pub async fn close(&self) -> Result<(), Vec<StepError>> {
        match self {
            Self::ContainerdOwned(endpoint) => endpoint.close().await.map_err(|step| vec![step]),
            Self::Handover(endpoint) => endpoint.close().await,
            Self::SelfStarted(endpoint) => endpoint.close().await,
        }
    }
}
