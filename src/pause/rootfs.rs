//! The empty root of all pause processes: one mount namespace with one empty read-only tmpfs, made
//! once.
//!
//! A process that shares the pod's PID namespace finds nothing behind `/proc/1/root`, and no pod
//! pays for a copy of the node's mount table.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, Ordering::Relaxed};

use rustix::fs::CWD;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountPropagationFlags, MoveMountFlags, UnmountFlags,
    fsconfig_create, fsconfig_set_string, fsmount, fsopen, mount_change, move_mount, unmount,
};
use rustix::process::{fchdir, pivot_root};

use crate::error::{IoContext, StepError};
use crate::process::report::ChildReport;
use crate::sys::{self, Errno};

/// The steps of the child.
const STEPS: [&str; 7] = [
    "unshare mount namespace",
    "make mounts private",
    "open mount namespace",
    "attach the empty root",
    "enter the empty root",
    "pivot to the empty root (is the daemon's own root a mount point?)",
    "detach the node's mounts",
];

struct RootfsWork<'a> {
    tmpfs: BorrowedFd<'a>,
    report: ChildReport,
    /// The namespace's descriptor, in the table that child and daemon share.
    namespace: AtomicI32,
}

/// A new tmpfs that is mounted nowhere; it lives as long as something in it is open.
pub(super) fn new_tmpfs(
    options: &[(&CStr, &CStr)],
    attributes: MountAttrFlags,
) -> Result<OwnedFd, Errno> {
    let context = fsopen(c"tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    for (key, value) in options {
        fsconfig_set_string(context.as_fd(), *key, *value)?;
    }
    fsconfig_create(context.as_fd())?;
    fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)
}

/// Makes the namespace; it lives as long as the descriptor or a process in it.
///
/// # Errors
/// The failed step.
pub(super) fn make_empty_root() -> Result<OwnedFd, StepError> {
    // One page and one inode: the root's own.
    let options =
        [(c"size", c"4k"), (c"nr_inodes", c"1"), (c"mode", c"555"), (c"source", c"empty")];
    let attributes = MountAttrFlags::MOUNT_ATTR_RDONLY
        | MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    let tmpfs = new_tmpfs(&options, attributes).step("make the tmpfs of the empty root")?;
    let work = RootfsWork {
        tmpfs: tmpfs.as_fd(),
        report: ChildReport::default(),
        namespace: AtomicI32::new(-1),
    };
    let how = sys::Clone { flags: libc::CLONE_FILES as u64, cgroup: None, born: None, stack: None };
    let (_, pidfd) =
        sys::clone_child(&how, &work, child).step("clone the maker of the empty root")?;
    let namespace =
        Some(work.namespace.load(Relaxed)).filter(|fd| *fd >= 0).map(sys::take_descriptor);
    sys::reap(pidfd.as_fd(), true).step("reap the maker of the empty root")?;
    let step = STEPS.get(work.report.step()).copied().unwrap_or(STEPS[0]);
    match (work.report.errno(), namespace) {
        (None, Some(namespace)) => Ok(namespace),
        // A signal ended it.
        (None, None) => Err(StepError::new(step, io::ErrorKind::Interrupted.into())),
        (Some(errno), _) => Err(StepError::new(step, errno.into())),
    }
}

extern "C" fn child(work: &RootfsWork<'_>) -> ! {
    work.report.exit(enter_empty_root(work))
}

fn enter_empty_root(work: &RootfsWork<'_>) -> Result<(), Errno> {
    let report = &work.report;
    sys::unshare(libc::CLONE_NEWNS)?;
    report.enter(1);
    mount_change(c"/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)?;
    report.enter(2);
    let namespace = sys::open(None, c"/proc/self/ns/mnt", libc::O_RDONLY, 0)?;
    report.enter(3);
    move_mount(work.tmpfs, c"", CWD, c"/", MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
    report.enter(4);
    fchdir(work.tmpfs)?;
    report.enter(5);
    pivot_root(c".", c".")?;
    report.enter(6);
    unmount(c".", UnmountFlags::DETACH)?;
    work.namespace.store(namespace.into_raw_fd(), Relaxed);
    Ok(())
}
