//! A new user namespace for a pod with host network.
//!
//! Its maps must be written from outside, by the node's root. A vfork child is of no use for that
//! while it runs, but its user namespace can be had from it when it has ended and is not reaped
//! yet.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};

use super::{IdMapping, UserNamespace};
use crate::error::{IoContext, StepError};
use crate::sys;

/// Makes the namespace; it lives as long as the descriptor or a process in it.
///
/// # Errors
/// The failed step.
pub(super) fn make_user_namespace(user: &UserNamespace) -> Result<OwnedFd, StepError> {
    let how =
        sys::Clone { flags: libc::CLONE_NEWUSER as u64, cgroup: None, born: None, stack: None };
    let (pid, pidfd) = sys::clone_child(&how, &(), exit_at_once).step("make a user namespace")?;
    let namespace = map(pid, user);
    sys::reap(pidfd.as_fd(), true).step("reap the maker of a user namespace")?;
    namespace
}

/// The maker: its namespace is all that it is for.
extern "C" fn exit_at_once(_: &()) -> ! {
    sys::exit(0)
}

fn map(pid: libc::c_int, user: &UserNamespace) -> Result<OwnedFd, StepError> {
    for (name, mapping) in [("uid_map", user.uid), ("gid_map", user.gid)] {
        let path = format!("/proc/{pid}/{name}");
        std::fs::write(&path, line(mapping)).step_at("write", path)?;
    }
    let path = format!("/proc/{pid}/ns/user");
    File::open(&path).step_at("open", path).map(Into::into)
}

fn line(mapping: IdMapping) -> String {
    format!("{} {} {}\n", mapping.container_id, mapping.host_id, mapping.length)
}
