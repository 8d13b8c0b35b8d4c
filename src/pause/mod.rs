//! The pause process of a sandbox and the drivers that make it.
//!
//! A [`Driver`] turns a checked [`Plan`] into a running [`Pause`]; what it learns of the process
//! comes back as an [`Exit`]. Drivers know nothing of verbs, states or wire types.

use std::fmt;
use std::future::Future;
use std::path::PathBuf;
use std::pin::Pin;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use crate::error::Step;
use crate::text::Text;

pub mod cgroup;
mod child;
mod deadline;
mod emptyroot;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
pub mod held;
mod identity;
pub mod image;
pub mod launch;
pub mod native;
mod process;
mod seccomp;
mod strays;
mod userns;
mod watch;

pub use watch::Watched;

/// A descriptor of our own for one that the service manager passed. The passed one stays open as
/// long as the process.
///
/// # Errors
/// It is not open.
pub fn inherited(descriptor: std::os::fd::RawFd) -> std::io::Result<std::os::fd::OwnedFd> {
    crate::sys::inherited(descriptor).map_err(Into::into)
}

/// Lets all threads allocate from few heaps: what threads that come and go leave free in heaps of
/// their own is of use to nobody. For the daemon's beginning, before there are other threads.
pub fn share_heaps() {
    const HEAPS: std::ffi::c_int = 2;
    crate::sys::limit_arenas(HEAPS);
}

/// Takes back the signals that the daemon was started with blocked, and SIGCHLD if it was ignored.
/// For the daemon's beginning, before there are other threads.
///
/// # Errors
/// The system's.
pub fn take_signals() -> std::io::Result<()> {
    crate::sys::own_signals().map_err(Into::into)
}

/// A future that a trait object hands out.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Whose namespace of one kind a pod uses (CRI `NamespaceMode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Namespace {
    /// The pod's own, made at Start.
    Private,
    /// The node's.
    Node,
}

/// One line of `/proc/PID/uid_map` or `gid_map` (user_namespaces(7)); ids, not bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdMapping {
    /// First id inside the namespace.
    pub container_id: u32,
    /// First id on the node.
    pub host_id: u32,
    /// How many ids are mapped.
    pub length: u32,
}

/// The pod's user namespace (CRI `UserNamespace` with mode POD).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserNamespace {
    /// The one uid mapping.
    pub uid: IdMapping,
    /// The one gid mapping.
    pub gid: IdMapping,
}

/// All that a driver must know to make one pause process. Made from the CRI config and checked at
/// Create.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// The sandbox id; a valid containerd identifier, so safe as one path component.
    pub id: Text,
    /// Bind-mounted network namespace; `None`: the node's network.
    pub netns: Option<PathBuf>,
    /// PID namespace.
    pub pid: Namespace,
    /// IPC namespace.
    pub ipc: Namespace,
    /// UTS namespace; the node's with host network.
    pub uts: Namespace,
    /// Set in a private UTS namespace; at most 64 bytes (sethostname(2)). Empty: left as the
    /// node's.
    pub hostname: String,
    /// `None`: the node's user namespace. With `netns`, the namespace that owns it is joined;
    /// without, a new one is made.
    pub userns: Option<UserNamespace>,
    /// Namespaced sysctls as dotted name and value, in order; set before the program runs.
    pub sysctls: Vec<(String, String)>,
    /// Where the pause's cgroup is: in a path of the cgroup file system, or in the systemd slice of
    /// this bare name (`….slice` without a slash). Empty: the daemon's own cgroup is kept.
    pub cgroup_parent: String,
    /// For `/proc/PID/oom_score_adj`; already raised to the daemon's own value when restricted.
    pub oom_score_adj: i32,
    /// SELinux label of the process; empty where it has none of its own: SELinux is off, or the pod
    /// is privileged.
    pub selinux_label: String,
}

impl Plan {
    /// Its site.
    pub fn site(&self) -> Site {
        Site { id: self.id.clone(), cgroup_parent: self.cgroup_parent.as_str().into() }
    }
}

/// What a driver must know of a plan to look for its pause and to clean up after it: all of it that
/// is kept while the pause lives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Site {
    /// The sandbox id.
    pub id: Text,
    /// As in [`Plan::cgroup_parent`].
    pub cgroup_parent: Box<str>,
}

/// What names a pause process across a restart of the daemon; never a bare pid.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Process id on the node.
    pub pid: u32,
    /// Field 22 of `/proc/PID/stat`: clock ticks after boot at which the process started.
    pub start_time: u64,
    /// Inode of `/proc/PID/ns/pid`.
    pub pid_namespace: u64,
    /// `/proc/sys/kernel/random/boot_id`.
    pub boot_id: Text,
}

/// The end of a pause process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exit {
    /// Exit code, or 128 + signal (137 for SIGKILL), or 255 where nobody could tell.
    pub status: u32,
    /// When it was seen.
    pub at: SystemTime,
}

/// Exit status where the kernel no longer tells (containerd's `unknownExitCode`).
pub const UNKNOWN_EXIT: u32 = 255;

/// A running pause process.
pub trait Pause: Send + Sync + fmt::Debug {
    /// What names it across restarts.
    fn identity(&self) -> &Identity;

    /// Sends SIGKILL. A process that has ended is success.
    ///
    /// # Errors
    /// The failed step.
    fn kill(&self) -> Result<(), Step>;

    /// Ends when the process has ended; may be asked any number of times and then answers the same.
    fn exited(&self) -> BoxFuture<'_, Exit>;
}

/// What [`Driver::adopt`] found of a recorded process.
#[derive(Debug)]
pub enum Adoption {
    /// Alive and the same process.
    Alive(Box<dyn Pause>),
    /// Ended, or another process has its pid by now; the exit, or 255 where nobody can tell.
    Dead(Exit),
    /// Could not be decided.
    Unknown(Step),
}

/// Makes, adopts and cleans up pause processes. Its methods block and are called off the runtime's
/// workers.
pub trait Driver: Send + Sync + fmt::Debug {
    /// The driver's name in config, record and metrics.
    fn name(&self) -> &'static str;

    /// Makes the cgroup and the process of a sandbox.
    ///
    /// # Errors
    /// The failed step, also when it failed in the child; all that was made has been undone then.
    fn start(&self, plan: &Plan) -> Result<Box<dyn Pause>, Step>;

    /// Finds a recorded process again after a restart of the daemon.
    fn adopt(&self, site: &Site, identity: &Identity) -> Adoption;

    /// Removes what outlives the process: its cgroup and whatever the driver keeps for it. Gone
    /// already is success.
    ///
    /// # Errors
    /// Every step that failed; the others were done all the same.
    fn cleanup(&self, site: &Site) -> Result<(), Vec<Step>>;

    /// Ends the pauses that an earlier daemon of the same state directory has made and whose
    /// sandboxes are not `recorded` as started, and removes their cgroups. For recovery, before
    /// anything is started.
    ///
    /// # Errors
    /// Every step that failed; the others were done all the same.
    fn end_strays(&self, _recorded: &dyn Fn(&str) -> bool) -> Result<(), Vec<Step>> {
        Ok(())
    }
}
