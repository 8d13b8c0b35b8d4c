//! System calls that make, move and leave mounts.

use std::ffi::CStr;
use std::os::fd::{BorrowedFd, OwnedFd};

use super::{Result, arg, fd, owned, syscall};

/// fsopen(2), fsconfig(2), fsmount(2): a new tmpfs that is mounted nowhere; `options` are its
/// `key=value`s, `attributes` of `MOUNT_ATTR_…`. It lives as long as something in it is open.
pub(crate) fn new_tmpfs(options: &[(&CStr, &CStr)], attributes: u64) -> Result<OwnedFd> {
    const FSCONFIG_SET_STRING: usize = 1;
    const FSCONFIG_CMD_CREATE: usize = 6;
    let close_on_exec = 1; // FSOPEN_CLOEXEC, FSMOUNT_CLOEXEC
    // SAFETY: the name ends in NUL.
    let context = owned(unsafe {
        syscall(libc::SYS_fsopen, [c"tmpfs".as_ptr() as usize, close_on_exec, 0, 0, 0, 0])
    }?);
    let context = fd(&context);
    for (key, value) in options {
        let (key, value) = (key.as_ptr() as usize, value.as_ptr() as usize);
        // SAFETY: both strings end in NUL.
        unsafe {
            syscall(libc::SYS_fsconfig, [arg(context), FSCONFIG_SET_STRING, key, value, 0, 0])
        }?;
    }
    // SAFETY: this command takes no pointers.
    unsafe { syscall(libc::SYS_fsconfig, [arg(context), FSCONFIG_CMD_CREATE, 0, 0, 0, 0]) }?;
    // SAFETY: no pointers.
    unsafe {
        syscall(libc::SYS_fsmount, [arg(context), close_on_exec, attributes as usize, 0, 0, 0])
    }
    .map(owned)
}

/// move_mount(2) of a mount that [`new_tmpfs`] made onto `path`.
pub(crate) fn attach_mount(mount: BorrowedFd<'_>, path: &CStr) -> Result<()> {
    const MOVE_MOUNT_F_EMPTY_PATH: usize = 4;
    let (empty, path) = (c"".as_ptr() as usize, path.as_ptr() as usize);
    let here = libc::AT_FDCWD as usize;
    // SAFETY: both paths end in NUL.
    unsafe {
        syscall(libc::SYS_move_mount, [arg(mount), empty, here, path, MOVE_MOUNT_F_EMPTY_PATH, 0])
    }
    .map(drop)
}

/// mount(2): no mount of this namespace passes anything on or takes anything in any more.
pub(crate) fn make_mounts_private() -> Result<()> {
    let flags = (libc::MS_REC | libc::MS_PRIVATE) as usize;
    // SAFETY: the path ends in NUL; the other pointers may be null with these flags.
    unsafe { syscall(libc::SYS_mount, [0, c"/".as_ptr() as usize, 0, flags, 0, 0]) }.map(drop)
}

/// fchdir(2).
pub(crate) fn enter_directory(directory: BorrowedFd<'_>) -> Result<()> {
    // SAFETY: no pointers.
    unsafe { syscall(libc::SYS_fchdir, [arg(directory), 0, 0, 0, 0, 0]) }.map(drop)
}

/// pivot_root(2) to the working directory, with the old root on top of it.
pub(crate) fn pivot_here() -> Result<()> {
    let here = c".".as_ptr() as usize;
    // SAFETY: the path ends in NUL.
    unsafe { syscall(libc::SYS_pivot_root, [here, here, 0, 0, 0, 0]) }.map(drop)
}

/// umount2(2) of what is on top of the working directory, with all below it.
pub(crate) fn detach_here() -> Result<()> {
    // SAFETY: the path ends in NUL.
    unsafe {
        syscall(libc::SYS_umount2, [c".".as_ptr() as usize, libc::MNT_DETACH as usize, 0, 0, 0, 0])
    }
    .map(drop)
}
