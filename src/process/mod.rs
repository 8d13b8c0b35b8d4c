//! Processes that the daemon starts, adopts or inspects: their identity, and how they are started,
//! watched, killed and reaped.

use std::fmt;
use std::time::SystemTime;

use futures::future::BoxFuture;
use serde::{Deserialize, Serialize};

use crate::error::StepError;
use crate::sys;
use std::sync::Arc;

pub(crate) mod deadline;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
pub mod handle;
pub(crate) mod identity;
pub mod inheritance;
pub mod killed;
pub(crate) mod memory;
pub(crate) mod pidfd;
pub(crate) mod report;
pub mod spawn;

/// A descriptor of our own for one that the service manager passed. The passed one stays open as
/// long as the process.
///
/// # Errors
/// It is not open.
pub fn inherited(descriptor: std::os::fd::RawFd) -> std::io::Result<std::os::fd::OwnedFd> {
    sys::inherited(descriptor).map_err(Into::into)
}

/// Makes all threads allocate from few heaps: what threads that come and go leave free in heaps of
/// their own is of no use. The daemon calls it first, before there are other threads.
pub fn share_heaps() {
    const HEAPS: std::ffi::c_int = 2;
    sys::limit_arenas(HEAPS);
}

/// Takes back the signals that the daemon was started with blocked, and SIGCHLD if it was ignored.
/// The daemon calls it first, before there are other threads.
///
/// # Errors
/// The system's.
pub fn take_signals() -> std::io::Result<()> {
    sys::own_signals().map_err(Into::into)
}

/// The identity of a process across restarts of the daemon; never a bare pid.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Process id on the node.
    pub pid: u32,
    /// Field 22 of `/proc/PID/stat`: clock ticks after boot at which the process started.
    pub start_time: u64,
    /// Inode of `/proc/PID/ns/pid`.
    pub pid_namespace: u64,
    /// `/proc/sys/kernel/random/boot_id`.
    pub boot_id: Arc<str>,
}

/// The end of a pause process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exit {
    /// Exit code, or 128 + signal (137 for SIGKILL), or 255 if it is unknown.
    pub status: u32,
    /// When it was seen.
    pub at: SystemTime,
}

/// Exit status if it is unknown (containerd's `unknownExitCode`).
pub const UNKNOWN_EXIT: u32 = 255;

/// A running pause process.
pub trait Process: Send + Sync + fmt::Debug {
    /// Its identity across restarts.
    fn identity(&self) -> &Identity;

    /// Sends SIGKILL, and does not block. A process that has ended is success.
    ///
    /// # Errors
    /// The failed step.
    fn kill(&self) -> Result<(), StepError>;

    /// Version 1 may hold the killed process frozen: [`Process::thaw`] is to follow.
    fn may_be_frozen(&self) -> bool {
        false
    }

    /// Moves the killed process out of a cgroup that holds it frozen. A process that is not frozen,
    /// or has ended, is success. Blocks on the kernel's locks of cgroups.
    ///
    /// # Errors
    /// The failed step.
    fn thaw(&self) -> Result<(), StepError> {
        Ok(())
    }

    /// Ends when the process has ended; may be asked any number of times and then answers the same.
    fn exited(&self) -> BoxFuture<'_, Exit>;
}

/// The result of the adoption of a recorded process.
#[derive(Debug)]
pub enum Adoption {
    /// Alive and the same process.
    Alive(Box<dyn Process>),
    /// Exited, and the pid may have been reused; the exit, or 255 if it is unknown.
    Dead(Exit),
    /// Could not be decided.
    Unknown(StepError),
}
