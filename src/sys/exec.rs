//! The system calls that turn a cloned child into another program.

use std::ffi::{CStr, CString, c_int, c_uint};
use std::marker::PhantomData;
use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::ptr;

use rustix::fs::Mode;
use rustix::io::FdFlags;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::{Errno, Result, arg, close_range, syscall};

/// exit_group(2).
pub(crate) fn exit(status: c_int) -> ! {
    loop {
        // SAFETY: no pointers.
        let _ = unsafe { syscall(libc::SYS_exit_group, [status as usize, 0, 0, 0, 0, 0]) };
    }
}

/// execveat(2) of an open program, without environment.
pub(crate) fn execute(program: BorrowedFd<'_>, arguments: [&CStr; 2]) -> Errno {
    let argv = [arguments[0].as_ptr(), arguments[1].as_ptr(), ptr::null()];
    let environment = [ptr::null::<libc::c_char>()];
    execute_at(program, &argv, &environment)
}

/// execveat(2) of an open program. `arguments` and `environment` are those of [`execute_path`].
pub(crate) fn execute_open(
    program: BorrowedFd<'_>,
    arguments: &Pointers<'_>,
    environment: &Pointers<'_>,
) -> Errno {
    execute_at(program, &arguments.0, &environment.0)
}

/// Both lists end in null, and hold strings that end in NUL.
fn execute_at(
    program: BorrowedFd<'_>,
    arguments: &[*const libc::c_char],
    environment: &[*const libc::c_char],
) -> Errno {
    let (argv, environment) = (arguments.as_ptr() as usize, environment.as_ptr() as usize);
    let empty = c"".as_ptr() as usize;
    let here = libc::AT_EMPTY_PATH as usize;
    // SAFETY: strings end in NUL, both lists in null, and all live until the call has copied them.
    unsafe { syscall(libc::SYS_execveat, [arg(program), empty, argv, environment, here, 0]) }
        .err()
        .unwrap_or(Errno::IO)
}

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
    unsafe { syscall(libc::SYS_execve, [path, argv as usize, environment as usize, 0, 0, 0]) }
        .err()
        .unwrap_or(Errno::IO)
}

/// A list of strings as execve(2) takes it.
pub(crate) struct Pointers<'a>(Vec<*const libc::c_char>, PhantomData<&'a CStr>);

/// The list of `strings`, with its null.
pub(crate) fn pointers(strings: &[CString]) -> Pointers<'_> {
    Pointers(strings.iter().map(|s| s.as_ptr()).chain([ptr::null()]).collect(), PhantomData)
}

/// Makes `number` refer to what `file` refers to, kept open over an exec: dup3(2), or fcntl(2)
/// F_SETFD where it does already. The caller is a child with a table of its own.
pub(crate) fn duplicate_to(file: BorrowedFd<'_>, number: RawFd) -> Result<()> {
    if file.as_raw_fd() == number {
        return rustix::io::fcntl_setfd(file, FdFlags::empty());
    }
    // SAFETY: no pointers; in the child's own table `number` has no owner.
    unsafe { syscall(libc::SYS_dup3, [arg(file), number as usize, 0, 0, 0, 0]) }.map(drop)
}

/// Makes the exec close all descriptors from `first` on: until then all of the daemon's stay open.
/// Linux before 5.11 cannot (close_range(2) CLOSE_RANGE_CLOEXEC); there all but `kept`, which the
/// exec itself needs, are closed at once. The caller is a child with a table of its own.
pub(crate) fn close_at_execute(first: c_uint, kept: Option<BorrowedFd<'_>>) -> Result<()> {
    match close_range(first, c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC) {
        Err(Errno::INVAL | Errno::NOSYS) => {}
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

/// Gives a program back all signals that this process blocks (all, in a child of
/// [`super::clone_child`]) and ignores: SIGPIPE, as every Rust program does, and those that the
/// daemon was started with. The caller is a child with handlers of its own.
pub(crate) fn default_signals() -> Result<()> {
    const LAST: c_int = 64;
    for signal in (1..=LAST).filter(|signal| ![libc::SIGKILL, libc::SIGSTOP].contains(signal)) {
        default_action(signal)?;
    }
    sigmask(libc::SIG_SETMASK, 0, None)
}

/// Restores the default signals of this process, which has one thread: its parent may have blocked
/// any.
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

/// Number of resource limits (getrlimit(2)).
pub(crate) const RESOURCES: usize = 16;

/// All resource limits.
pub(crate) type Limits = [(Resource, Rlimit); RESOURCES];

/// Sets the resource limits and the umask of this process, which is a child. A hard limit that the
/// system does not permit to raise stays, and bounds the soft one.
pub(crate) fn inherit(limits: &Limits, umask: u32) -> Result<()> {
    for (resource, wanted) in *limits {
        match setrlimit(resource, wanted) {
            Err(Errno::PERM) => {
                let maximum = getrlimit(resource).maximum;
                let soft = [wanted.current, maximum].into_iter().flatten().min();
                setrlimit(resource, Rlimit { current: soft, maximum })?;
            }
            done => done?,
        }
    }
    rustix::process::umask(Mode::from_bits_truncate(umask));
    Ok(())
}

/// Has the child of a command do as [`inherit`] does, before it executes the program.
pub(crate) fn inherit_to(command: &mut Command, limits: Limits, umask: u32) {
    // SAFETY: after the fork the closure makes system calls with what it owns and its own stack; it
    // neither allocates nor locks.
    unsafe { command.pre_exec(move || inherit(&limits, umask).map_err(Into::into)) };
}

/// Gives the thread a descriptor table of its own, without ever copying what is above `highest`.
pub(crate) fn unshare_descriptors(highest: c_uint) -> Result<()> {
    close_range(highest + 1, c_uint::MAX, libc::CLOSE_RANGE_UNSHARE)
}

/// rt_sigprocmask(2).
pub(super) fn sigmask(how: c_int, set: u64, before: Option<&mut u64>) -> Result<()> {
    let before = before.map_or(ptr::null_mut(), ptr::from_mut);
    // SAFETY: both sets have the kernel's 8 bytes; null is allowed for the old one.
    unsafe {
        syscall(
            libc::SYS_rt_sigprocmask,
            [how as usize, &raw const set as usize, before as usize, size_of::<u64>(), 0, 0],
        )
    }
    .map(drop)
}
