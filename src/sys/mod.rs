//! The daemon's unsafe code: the system calls that no safe function of a crate makes.
//!
//! The child of [`clone_child`] shares the daemon's memory. It may call only what is here and what
//! rustix offers with C strings: both make system calls directly and touch neither `errno` nor
//! anything that the C library keeps per thread.

#![allow(unsafe_code)]

use std::arch::asm;
use std::ffi::{CStr, c_int, c_uint};
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use libc::c_long;
use rustix::fs::{CWD, Mode, OFlags};
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions};
use rustix::thread::UnshareFlags;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

mod clone;
mod exec;
pub(crate) mod filter;
mod memory;

pub(crate) use clone::{CLONE_CLEAR_SIGHAND, Clone, ClonedChildSlot, Stack, clone_child};
pub(crate) use exec::{
    Limits, Pointers, RESOURCES, close_at_execute, default_signals, duplicate_to, execute,
    execute_open, execute_path, exit, inherit, inherit_to, own_signals, pointers,
    unshare_descriptors,
};
pub(crate) use memory::limit_arenas;
pub(crate) use rustix::io::{Errno, Result};

/// Makes a system call; unused arguments are 0.
///
/// # Safety
/// The arguments must be what the call `number` expects; memory that they point to must be valid
/// for what it does with it.
#[inline(always)]
unsafe fn syscall(number: c_long, a: [usize; 6]) -> Result<usize> {
    let answer: isize;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the kernel keeps all registers but rax, rcx and r11 and uses no user stack; the rest
    // is the caller's promise.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number as isize => answer,
            in("rdi") a[0],
            in("rsi") a[1],
            in("rdx") a[2],
            in("r10") a[3],
            in("r8") a[4],
            in("r9") a[5],
            out("rcx") _,
            out("r11") _,
            options(nostack),
        );
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the kernel keeps all registers but x0 and uses no user stack; the rest is the
    // caller's promise.
    unsafe {
        asm!(
            "svc #0",
            in("x8") number,
            inlateout("x0") a[0] as isize => answer,
            in("x1") a[1],
            in("x2") a[2],
            in("x3") a[3],
            in("x4") a[4],
            in("x5") a[5],
            options(nostack),
        );
    }
    check(answer)
}

fn check(answer: isize) -> Result<usize> {
    if (-4095..0).contains(&answer) {
        Err(Errno::from_raw_os_error(-(answer as i32)))
    } else {
        Ok(answer as usize)
    }
}

/// A descriptor as an argument.
fn arg(fd: BorrowedFd<'_>) -> usize {
    fd.as_raw_fd() as usize
}

/// Takes a new descriptor from an answer of the kernel.
fn owned(answer: usize) -> OwnedFd {
    // SAFETY: only called on a descriptor that the kernel has just made and that has no owner yet.
    unsafe { OwnedFd::from_raw_fd(answer as RawFd) }
}

/// The owner of a descriptor that a child opened in the table that it shares with this process.
pub(crate) fn take_descriptor(number: RawFd) -> OwnedFd {
    owned(number as usize)
}

/// pidfd_open(2).
///
/// # Errors
/// EINVAL also for a number that no process can have.
pub(crate) fn pidfd_open(pid: c_int) -> Result<OwnedFd> {
    let pid = if pid > 0 { Pid::from_raw(pid) } else { None };
    rustix::process::pidfd_open(pid.ok_or(Errno::INVAL)?, PidfdFlags::empty())
}

/// Sends SIGKILL to a process. Success also if it has ended.
pub(crate) fn kill(pidfd: BorrowedFd<'_>) -> Result<()> {
    match rustix::process::pidfd_send_signal(pidfd, Signal::KILL) {
        Err(Errno::SRCH) => Ok(()),
        other => other,
    }
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// By exit(2), with this code.
    Code(i32),
    /// By this signal.
    Signal(i32),
}

impl End {
    /// From a status as wait4(2) stores it.
    pub(crate) fn from_status(status: c_int) -> Self {
        if libc::WIFSIGNALED(status) {
            Self::Signal(libc::WTERMSIG(status))
        } else {
            Self::Code(libc::WEXITSTATUS(status))
        }
    }
}

/// waitid(2): reaps an ended child. `None`: it lives (only without `block`).
///
/// # Errors
/// ECHILD: not a child of this process, or reaped already.
pub(crate) fn reap(pidfd: BorrowedFd<'_>, block: bool) -> Result<Option<End>> {
    let mut options = WaitIdOptions::EXITED | WaitIdOptions::from_bits_retain(libc::__WALL as u32);
    options.set(WaitIdOptions::NOHANG, !block);
    let wait = || rustix::process::waitid(WaitId::PidFd(pidfd), options);
    let status = rustix::io::retry_on_intr(wait)?;
    Ok(status.and_then(|status| match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => Some(End::Code(code)),
        (None, signal) => signal.map(End::Signal),
    }))
}

/// Registers a descriptor with the runtime. A pidfd is readable when its process has ended, a
/// listening socket when a connection waits.
///
/// # Errors
/// No runtime, or epoll_ctl(2)'s.
pub(crate) fn watch(file: Arc<OwnedFd>) -> io::Result<AsyncFd<Arc<OwnedFd>>> {
    // SAFETY: the AsyncFd shares the descriptor's ownership, and an OwnedFd behind an Arc can be
    // neither closed nor replaced.
    Ok(unsafe { AsyncFd::register_with_interest(file, Interest::READABLE) }?)
}

/// `struct pidfd_info` of Linux 6.13 (`<linux/pidfd.h>`), its first published size.
#[repr(C)]
#[derive(Default)]
struct PidfdInfo {
    mask: u64,
    cgroupid: u64,
    pid: u32,
    tgid: u32,
    ppid: u32,
    ids: [u32; 8],
    exit_code: i32,
}

/// ioctl(2) PIDFD_GET_INFO: how a process ended that its parent has reaped (Linux 6.15). `None`:
/// not reaped yet, or the kernel cannot tell.
pub(crate) fn pidfd_exit(pidfd: BorrowedFd<'_>) -> Option<End> {
    const PIDFD_INFO_EXIT: u64 = 1 << 3;
    /// `_IOWR(0xff, 11, struct pidfd_info)`.
    const PIDFD_GET_INFO: usize = (3 << 30) | (size_of::<PidfdInfo>() << 16) | (0xff << 8) | 11;
    let mut info = PidfdInfo { mask: PIDFD_INFO_EXIT, ..PidfdInfo::default() };
    // SAFETY: the request's number carries the structure's size, which is all that the kernel
    // writes.
    unsafe {
        syscall(libc::SYS_ioctl, [arg(pidfd), PIDFD_GET_INFO, &raw mut info as usize, 0, 0, 0])
    }
    .ok()?;
    (info.mask & PIDFD_INFO_EXIT != 0).then(|| End::from_status(info.exit_code))
}

/// unshare(2); `flags` are `CLONE_NEW…`.
pub(crate) fn unshare(flags: c_int) -> Result<()> {
    // SAFETY: the flags make namespaces; no descriptor and no memory is concerned.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::from_bits_retain(flags as u32)) }
}

/// ioctl(2) NS_GET_NSTYPE: the `CLONE_NEW…` of a namespace. Only for a file that is known to be a
/// namespace.
pub(crate) fn namespace_kind(namespace: BorrowedFd<'_>) -> Result<c_int> {
    // SAFETY: no pointers.
    unsafe { syscall(libc::SYS_ioctl, [arg(namespace), libc::NS_GET_NSTYPE as usize, 0, 0, 0, 0]) }
        .map(|kind| kind as c_int)
}

/// ioctl(2) NS_GET_USERNS: the user namespace that owns a namespace.
pub(crate) fn namespace_owner(namespace: BorrowedFd<'_>) -> Result<OwnedFd> {
    // SAFETY: no pointers.
    unsafe { syscall(libc::SYS_ioctl, [arg(namespace), libc::NS_GET_USERNS as usize, 0, 0, 0, 0]) }
        .map(owned)
}

/// openat(2), close-on-exec; `mode` is for new files.
pub(crate) fn open(
    directory: Option<BorrowedFd<'_>>,
    path: &CStr,
    flags: c_int,
    mode: u32,
) -> Result<OwnedFd> {
    let flags = OFlags::from_bits_retain(flags as u32) | OFlags::CLOEXEC;
    rustix::fs::openat(directory.unwrap_or(CWD), path, flags, Mode::from_bits_retain(mode))
}

/// openat(2) and one write(2) of `content` to a file that exists: files of the kernel take a value
/// in one call.
pub(crate) fn write_file(directory: BorrowedFd<'_>, path: &CStr, content: &[u8]) -> Result<()> {
    let file = open(Some(directory), path, libc::O_WRONLY, 0)?;
    let written = rustix::io::write(&file, content);
    close(file);
    written.map(drop)
}

/// close(2), for a child: what closes a dropped descriptor is the C library's.
pub(crate) fn close(file: OwnedFd) {
    // SAFETY: the descriptor was owned, and has no owner from here on.
    unsafe { rustix::io::close(file.into_raw_fd()) };
}

/// A descriptor of our own for one that the process was started with: fcntl(2), F_DUPFD_CLOEXEC.
pub(crate) fn inherited(descriptor: RawFd) -> Result<OwnedFd> {
    let least = 3;
    let number = usize::try_from(descriptor).map_err(|_| Errno::BADF)?;
    // SAFETY: no pointers; a number that is no open descriptor is answered by EBADF.
    unsafe { syscall(libc::SYS_fcntl, [number, libc::F_DUPFD_CLOEXEC as usize, least, 0, 0, 0]) }
        .map(owned)
}

/// close_range(2) by a child; `flags` are `CLOSE_RANGE_…`.
fn close_range(first: c_uint, last: c_uint, flags: c_uint) -> Result<()> {
    // SAFETY: the table is the child's own, or becomes it: no owner loses a descriptor.
    unsafe {
        syscall(libc::SYS_close_range, [first as usize, last as usize, flags as usize, 0, 0, 0])
    }
    .map(drop)
}
