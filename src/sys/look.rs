//! System calls that look at files of other users without waiting for the servers of their file
//! systems, and at descriptors of other processes.

use std::ffi::{CStr, c_int, c_uint};
use std::mem::size_of;
use std::os::fd::{BorrowedFd, OwnedFd};

use super::{Plain, Result, arg, owned, syscall, zeroed};

// SAFETY: numbers only.
unsafe impl Plain for libc::statx {}

/// statx(2): device and inode of the file that `path` leads to, as far as the kernel knows them
/// without a question to a server.
pub(crate) fn device_and_inode(path: &CStr) -> Result<(u64, u64)> {
    const _: () = assert!(size_of::<libc::statx>() == 256);
    let mut about: libc::statx = zeroed();
    let (here, flags) = (libc::AT_FDCWD as usize, libc::AT_STATX_DONT_SYNC as usize);
    let (path, mask) = (path.as_ptr() as usize, libc::STATX_INO as c_uint as usize);
    // SAFETY: the path ends in NUL; the structure has the kernel's size.
    unsafe { syscall(libc::SYS_statx, [here, path, flags, mask, &raw mut about as usize, 0]) }?;
    Ok((libc::makedev(about.stx_dev_major, about.stx_dev_minor), about.stx_ino))
}

/// getxattr(2): an extended attribute of the file that `path` leads to; how much of `value` it
/// fills.
pub(crate) fn attribute(path: &CStr, name: &CStr, value: &mut [u8]) -> Result<usize> {
    let (path, name) = (path.as_ptr() as usize, name.as_ptr() as usize);
    // SAFETY: both strings end in NUL; pointer and length are a slice's.
    unsafe {
        syscall(libc::SYS_getxattr, [path, name, value.as_mut_ptr() as usize, value.len(), 0, 0])
    }
}

/// pidfd_getfd(2), since Linux 5.6: a descriptor of our own for one of another process. It closes at
/// exec.
pub(crate) fn pidfd_getfd(pidfd: BorrowedFd<'_>, number: c_int) -> Result<OwnedFd> {
    let number = number.unsigned_abs() as usize;
    // SAFETY: no pointers.
    unsafe { syscall(libc::SYS_pidfd_getfd, [arg(pidfd), number, 0, 0, 0, 0]) }.map(owned)
}
