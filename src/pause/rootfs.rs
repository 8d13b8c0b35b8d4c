//! The empty root of all pauses: one mount namespace with one empty read-only tmpfs, made once.
//!
//! A process that shares the pod's PID namespace finds nothing behind `/proc/1/root`, and no pod
//! pays for a copy of the node's mount table.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering::Relaxed};

use crate::error::{IoContext, Step};
use crate::sys::{self, Errno};

/// `MOUNT_ATTR_RDONLY | NOSUID | NODEV | NOEXEC`.
const ATTRIBUTES: u64 = 1 | 2 | 4 | 8;

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

struct Work<'a> {
    tmpfs: BorrowedFd<'a>,
    step: AtomicUsize,
    errno: AtomicI32,
    /// The namespace's descriptor, in the table that child and daemon share.
    namespace: AtomicI32,
}

/// Makes the namespace; it lives as long as the descriptor or a process in it.
///
/// # Errors
/// The failed step.
pub(super) fn make() -> Result<OwnedFd, Step> {
    // One page and one inode: the root's own.
    let options =
        [(c"size", c"4k"), (c"nr_inodes", c"1"), (c"mode", c"555"), (c"source", c"empty")];
    let tmpfs = sys::new_tmpfs(&options, ATTRIBUTES).step("make the tmpfs of the empty root")?;
    let work = Work {
        tmpfs: tmpfs.as_fd(),
        step: AtomicUsize::new(0),
        errno: AtomicI32::new(0),
        namespace: AtomicI32::new(-1),
    };
    let how = sys::Clone { flags: libc::CLONE_FILES as u64, cgroup: None, born: None, stack: None };
    let (_, pidfd) =
        sys::clone_child(&how, &work, child).step("clone the maker of the empty root")?;
    let namespace =
        Some(work.namespace.load(Relaxed)).filter(|fd| *fd >= 0).map(sys::take_descriptor);
    sys::reap(pidfd.as_fd(), true).step("reap the maker of the empty root")?;
    let step = STEPS.get(work.step.load(Relaxed)).copied().unwrap_or(STEPS[0]);
    match (work.errno.load(Relaxed), namespace) {
        (0, Some(namespace)) => Ok(namespace),
        // Ended by a signal on its way.
        (0, None) => Err(Step::new(step, io::ErrorKind::Interrupted.into())),
        (errno, _) => Err(Step::new(step, io::Error::from_raw_os_error(errno))),
    }
}

extern "C" fn child(work: &Work<'_>) -> ! {
    if let Err(errno) = steps(work) {
        work.errno.store(errno.0, Relaxed);
        sys::exit(1)
    }
    sys::exit(0)
}

fn steps(work: &Work<'_>) -> Result<(), Errno> {
    sys::unshare(libc::CLONE_NEWNS)?;
    work.step.store(1, Relaxed);
    sys::make_mounts_private()?;
    work.step.store(2, Relaxed);
    let namespace = sys::open(None, c"/proc/self/ns/mnt", libc::O_RDONLY, 0)?;
    work.step.store(3, Relaxed);
    sys::attach_mount(work.tmpfs, c"/")?;
    work.step.store(4, Relaxed);
    sys::enter_directory(work.tmpfs)?;
    work.step.store(5, Relaxed);
    sys::pivot_here()?;
    work.step.store(6, Relaxed);
    sys::detach_here()?;
    work.namespace.store(namespace.into_raw_fd(), Relaxed);
    Ok(())
}
