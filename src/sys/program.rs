//! What turns a cloned child into another program.

use std::ffi::{CStr, CString, c_int, c_uint};
use std::marker::PhantomData;
use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::ptr;

use super::{Errno, Result, arg, close_range, sigmask, syscall};

/// execve(2) of the program at `path`. `arguments` and `environment` end in a null pointer; see
/// [`pointers`].
pub(crate) fn execute_path(
    path: &CStr,
    arguments: &Pointers<'_>,
    environment: &Pointers<'_>,
) -> Errno {
    let (path, argv, environment) =
        (path.as_ptr() as usize, arguments.0.as_ptr(), environment.0.as_ptr());
    // SAFETY: strings end in NUL, both lists in null, and all live until the call has copied them.
    match unsafe { syscall(libc::SYS_execve, [path, argv as usize, environment as usize, 0, 0, 0]) }
    {
        Err(errno) => errno,
        Ok(_) => Errno(0),
    }
}

/// A list of strings as execve(2) takes it.
pub(crate) struct Pointers<'a>(Vec<*const libc::c_char>, PhantomData<&'a CStr>);

/// The list of `strings`, with its null.
pub(crate) fn pointers(strings: &[CString]) -> Pointers<'_> {
    Pointers(strings.iter().map(|s| s.as_ptr()).chain([ptr::null()]).collect(), PhantomData)
}

/// Makes `number` refer to what `file` refers to, kept open over an exec: dup3(2), or fcntl(2)
/// F_SETFD where it does already. For a child with a table of its own.
pub(crate) fn duplicate_to(file: BorrowedFd<'_>, number: RawFd) -> Result<()> {
    if file.as_raw_fd() == number {
        // SAFETY: no pointers.
        return unsafe {
            syscall(libc::SYS_fcntl, [arg(file), libc::F_SETFD as usize, 0, 0, 0, 0])
        }
        .map(drop);
    }
    // SAFETY: no pointers; in the child's own table nobody owns `number`.
    unsafe { syscall(libc::SYS_dup3, [arg(file), number as usize, 0, 0, 0, 0]) }.map(drop)
}

/// Makes the exec close all descriptors from `first` on: until then all of the daemon's stay open.
/// Linux before 5.11 cannot (close_range(2) CLOSE_RANGE_CLOEXEC); there all but `kept`, which the
/// exec itself needs, are closed at once. For a child with a table of its own.
pub(crate) fn close_at_execute(first: c_uint, kept: Option<BorrowedFd<'_>>) -> Result<()> {
    match close_range(first, c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC) {
        Err(Errno(libc::EINVAL | libc::ENOSYS)) => {}
        done => return done,
    }
    let kept = kept.map(|kept| kept.as_raw_fd().unsigned_abs()).filter(|kept| *kept >= first);
    if let Some(kept) = kept
        && kept > first
    {
        close_range(first, kept - 1, 0)?;
    }
    close_range(kept.map_or(first, |kept| kept + 1), c_uint::MAX, 0)
}

/// chdir(2).
pub(crate) fn change_directory(path: &CStr) -> Result<()> {
    // SAFETY: the path ends in NUL.
    unsafe { syscall(libc::SYS_chdir, [path.as_ptr() as usize, 0, 0, 0, 0, 0]) }.map(drop)
}

/// Gives a program back the signals that this process blocks (all, in a child of
/// [`super::clone_child`]) and ignores (SIGPIPE, as every Rust program does). For a child with
/// handlers of its own.
pub(crate) fn default_signals() -> Result<()> {
    default_action(libc::SIGPIPE)?;
    sigmask(libc::SIG_SETMASK, 0, None)
}

/// The same for this process, which has one thread: what it was started with may block any signal.
/// Where SIGCHLD is ignored the kernel reaps children before they are asked how they ended.
pub(crate) fn own_signals() -> Result<()> {
    default_action(libc::SIGCHLD)?;
    sigmask(libc::SIG_SETMASK, 0, None)
}

/// rt_sigaction(2) SIG_DFL.
fn default_action(signal: c_int) -> Result<()> {
    /// `struct kernel_sigaction`: handler, flags, restorer, mask; all zero is SIG_DFL.
    const DEFAULT: [usize; 4] = [0; 4];
    let action = DEFAULT.as_ptr() as usize;
    // SAFETY: the action is longer than or as long as the kernel's structure; null is allowed for
    // the old one.
    unsafe { syscall(libc::SYS_rt_sigaction, [signal as usize, action, 0, size_of::<u64>(), 0, 0]) }
        .map(drop)
}

/// prlimit64(2) of this process: soft and hard limit as they were, and as they are from now on if
/// there is a `new` one.
fn limit(resource: c_uint, new: Option<&[u64; 2]>) -> Result<[u64; 2]> {
    let mut old = [0_u64; 2];
    let (resource, new) = (resource as usize, new.map_or(ptr::null(), |new| new.as_ptr()) as usize);
    // SAFETY: two words are what the kernel's structure has, to read and to write; null is allowed
    // for the new one.
    unsafe { syscall(libc::SYS_prlimit64, [0, resource, new, old.as_mut_ptr() as usize, 0, 0]) }?;
    Ok(old)
}

/// The soft limit of open files, which the hard limit bounds.
pub(crate) fn limit_open_files(soft: u64) -> Result<()> {
    let [_, hard] = limit(libc::RLIMIT_NOFILE, None)?;
    limit(libc::RLIMIT_NOFILE, Some(&[soft.min(hard), hard])).map(drop)
}

/// prctl(2) PR_SCHED_CORE: a core scheduling domain of its own for this process.
pub(crate) fn core_domain() -> Result<()> {
    sched_core(libc::PR_SCHED_CORE_CREATE, 0, libc::PR_SCHED_CORE_SCOPE_THREAD_GROUP, 0)
}

fn sched_core(what: c_int, pid: usize, scope: c_int, cookie: usize) -> Result<()> {
    let (option, scope) = (libc::PR_SCHED_CORE as usize, scope as usize);
    // SAFETY: all arguments are numbers, but `cookie`, which is null or the address of a word to
    // write.
    unsafe { syscall(libc::SYS_prctl, [option, what as usize, pid, scope, cookie, 0]) }.map(drop)
}

/// The core scheduling domain of a process; 0: that of all.
#[cfg(test)]
pub(crate) fn core_cookie(pid: u32) -> Result<u64> {
    let mut cookie = 0_u64;
    sched_core(
        libc::PR_SCHED_CORE_GET,
        pid as usize,
        libc::PR_SCHED_CORE_SCOPE_THREAD,
        &raw mut cookie as usize,
    )?;
    Ok(cookie)
}

/// No limit of the user's processes, or the highest that this process may set.
pub(crate) fn lift_process_limit() -> Result<()> {
    match limit(libc::RLIMIT_NPROC, Some(&[libc::RLIM_INFINITY; 2])) {
        Err(Errno(libc::EPERM)) => {}
        done => return done.map(drop),
    }
    let [_, hard] = limit(libc::RLIMIT_NPROC, None)?;
    limit(libc::RLIMIT_NPROC, Some(&[hard; 2])).map(drop)
}

/// Has the child of a command limit its open files as [`limit_open_files`] does, before it executes
/// the program.
pub(crate) fn limit_open_files_of(command: &mut Command, soft: u64) {
    // SAFETY: after the fork the closure makes two system calls on its own stack; it neither
    // allocates nor locks.
    unsafe { command.pre_exec(move || limit_open_files(soft).map_err(Into::into)) };
}
