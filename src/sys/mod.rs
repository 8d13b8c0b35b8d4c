//! The system calls of the drivers, one function each; all of the daemon's unsafe code.
//!
//! They are made directly, not through libc: the same functions serve the daemon and the child of
//! [`clone_child`], which shares the daemon's memory and must touch neither `errno` nor anything
//! that libc keeps per thread.

#![allow(unsafe_code)]

use std::arch::asm;
use std::cell::UnsafeCell;
use std::ffi::{CStr, c_int, c_uint};
use std::io;
use std::marker::PhantomData;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::AtomicI32;
use std::sync::atomic::Ordering::{Acquire, Release};

use libc::c_long;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

pub(crate) mod filter;
mod look;
mod memory;
mod mount;
mod privileges;
mod program;

pub(crate) use look::{attribute, device_and_inode, pidfd_getfd};
pub(crate) use memory::limit_arenas;
pub(crate) use mount::{
    attach_mount, detach_here, enter_directory, make_mounts_private, new_tmpfs, pivot_here,
};
pub(crate) use privileges::{
    clear_groups, clear_inheritable, drop_bounding, install_filter, keep_capabilities,
    no_new_privs, set_dumpable, set_ids,
};
#[cfg(test)]
pub(crate) use program::core_cookie;
pub(crate) use program::{
    Pointers, change_directory, close_at_execute, core_domain, default_signals, duplicate_to,
    execute_path, lift_process_limit, limit_open_files, limit_open_files_of, own_signals, pointers,
};

/// A system call's error number (errno(3)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Errno(pub(crate) i32);

impl From<Errno> for io::Error {
    fn from(errno: Errno) -> Self {
        Self::from_raw_os_error(errno.0)
    }
}

/// A system call's answer.
pub(crate) type Result<T> = std::result::Result<T, Errno>;

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
        asm!("syscall", inlateout("rax") number as isize => answer, in("rdi") a[0], in("rsi") a[1], in("rdx") a[2],
            in("r10") a[3], in("r8") a[4], in("r9") a[5], out("rcx") _, out("r11") _, options(nostack));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the kernel keeps all registers but x0 and uses no user stack; the rest is the
    // caller's promise.
    unsafe {
        asm!("svc #0", in("x8") number, inlateout("x0") a[0] as isize => answer, in("x1") a[1], in("x2") a[2],
            in("x3") a[3], in("x4") a[4], in("x5") a[5], options(nostack));
    }
    check(answer)
}

fn check(answer: isize) -> Result<usize> {
    if (-4095..0).contains(&answer) { Err(Errno(-(answer as i32))) } else { Ok(answer as usize) }
}

/// A descriptor as an argument.
fn arg(fd: BorrowedFd<'_>) -> usize {
    fd.as_raw_fd() as usize
}

/// Takes a new descriptor from an answer of the kernel.
fn owned(answer: usize) -> OwnedFd {
    // SAFETY: only called on a descriptor that the kernel has just made, which nobody else owns
    // yet.
    unsafe { OwnedFd::from_raw_fd(answer as RawFd) }
}

// ---- processes ----

/// clone3(2): handlers of signals become the default in the child (`<linux/sched.h>`).
pub(crate) const CLONE_CLEAR_SIGHAND: u64 = 0x1_0000_0000;
/// clone3(2): the child is born in a cgroup of version 2 (`<linux/sched.h>`).
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// Arguments of [`clone_child`].
pub(crate) struct Clone<'a> {
    /// `CLONE_NEW…`, `CLONE_FILES`, `CLONE_PARENT`, `CLONE_CLEAR_SIGHAND`. `CLONE_VM`,
    /// `CLONE_VFORK` and `CLONE_PIDFD` are always added.
    pub(crate) flags: u64,
    /// cgroup (v2) that the child is born in; adds `CLONE_INTO_CGROUP`.
    pub(crate) cgroup: Option<BorrowedFd<'a>>,
    /// Where the kernel writes which child it is before the child runs; adds `CLONE_PARENT_SETTID`.
    pub(crate) born: Option<&'a Born>,
    /// The child's stack; without one it runs on the caller's, below what the caller uses.
    pub(crate) stack: Option<&'a Stack>,
}

/// A child that is born, for who must know of it while its caller stands still.
#[derive(Debug, Default)]
pub(crate) struct Born {
    /// 0: not yet.
    pid: AtomicI32,
    /// In the table of the clone's caller.
    pidfd: AtomicI32,
}

impl Born {
    /// The child's pid, once there is a child.
    pub(crate) fn pid(&self) -> Option<c_int> {
        Some(self.pid.load(Acquire)).filter(|pid| *pid > 0)
    }

    /// Forgets the child.
    pub(crate) fn forget(&self) {
        self.pid.store(0, Release);
    }

    /// pidfd_send_signal(2) to the child. For a thread that shares the descriptors of the clone's
    /// caller, as long as that one has not closed the child's.
    pub(crate) fn signal(&self, signal: c_int) -> Result<()> {
        // A clone that fails may have written the number of a descriptor that it then did not make;
        // of the pid it has written nothing.
        if self.pid().is_none() {
            return Err(Errno(libc::ESRCH));
        }
        let pidfd = self.pidfd.load(Acquire) as usize;
        // SAFETY: a null siginfo is allowed.
        unsafe { syscall(libc::SYS_pidfd_send_signal, [pidfd, signal as usize, 0, 0, 0, 0]) }
            .map(drop)
    }
}

/// Memory for the stack of a child that may outlive its caller's frame. The child writes to it.
pub(crate) struct Stack(Box<[UnsafeCell<MaybeUninit<u128>>]>);

impl Stack {
    /// A stack of 64 KiB.
    pub(crate) fn new() -> Self {
        let words = 64 * 1024 / size_of::<u128>();
        Self((0..words).map(|_| UnsafeCell::new(MaybeUninit::uninit())).collect())
    }

    /// Its lowest address and its length in bytes.
    fn memory(&self) -> (u64, u64) {
        (UnsafeCell::raw_get(self.0.as_ptr()) as u64, size_of_val::<[_]>(&self.0) as u64)
    }
}

/// Clones a child that shares the caller's memory, as vfork(2) does, and runs `child(argument)`;
/// answers pid and pidfd. The calling thread stands still until the child has ended or executed
/// another program, so the child is for all that is kept per thread the calling thread itself.
/// Costs the same however large the process is.
///
/// `argument` must stay where it is until the child has ended or executed, also where the caller, a
/// child itself, is killed meanwhile: with a [`Stack`] of its own the child goes on then.
///
/// The child should make system calls only: what it locks stays locked when it ends. Signals are
/// blocked in the child, and during the call in the caller.
pub(crate) fn clone_child<T>(
    how: &Clone<'_>,
    argument: &T,
    child: extern "C" fn(&T) -> !,
) -> Result<(c_int, OwnedFd)> {
    let own = Born::default();
    let born = how.born.unwrap_or(&own);
    let mut args: libc::clone_args = zeroed();
    args.flags = how.flags | (libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD) as u64;
    args.pidfd = born.pidfd.as_ptr() as u64;
    // A child of another parent's making takes that one's exit signal.
    args.exit_signal =
        if how.flags & libc::CLONE_PARENT as u64 == 0 { libc::SIGCHLD as u64 } else { 0 };
    if let Some(cgroup) = how.cgroup {
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = cgroup.as_raw_fd() as u64;
    }
    if how.born.is_some() {
        args.flags |= libc::CLONE_PARENT_SETTID as u64;
        args.parent_tid = born.pid.as_ptr() as u64;
    }
    if let Some(stack) = how.stack {
        (args.stack, args.stack_size) = stack.memory();
    }
    let blocked = BlockedSignals::new()?;
    let answer: isize;
    // SAFETY: the child continues on the caller's stack below all that the caller uses (no
    // `nostack`: the compiler keeps nothing there), or on a stack of its own, and `child` never
    // returns, so the caller's frame is as it was when the caller goes on. That is only after the
    // child has left this memory (CLONE_VFORK), so `argument` lives long enough, unless the caller
    // is killed, of which the documentation speaks; a `born` outlives the call as it is borrowed.
    // The kernel keeps all registers that are not named as outputs.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, r12",
            "call r13",
            "ud2",
            "2:",
            inlateout("rax") libc::SYS_clone3 as isize => answer,
            in("rdi") &raw const args,
            in("rsi") size_of::<libc::clone_args>(),
            in("r12") ptr::from_ref(argument),
            in("r13") child,
            out("rcx") _,
            out("r11") _,
        );
    }
    // SAFETY: as above.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        asm!(
            "svc #0",
            "cbnz x0, 2f",
            "mov x29, #0",
            "mov x0, x20",
            "blr x21",
            "brk #1",
            "2:",
            in("x8") libc::SYS_clone3,
            inlateout("x0") &raw const args => answer,
            in("x1") size_of::<libc::clone_args>(),
            in("x20") ptr::from_ref(argument),
            in("x21") child,
        );
    }
    drop(blocked);
    check(answer).map(|pid| (pid as c_int, owned(born.pidfd.load(Acquire) as usize)))
}

/// The owner of a descriptor that a child opened in the table that it shares with this process.
pub(crate) fn take_descriptor(number: RawFd) -> OwnedFd {
    owned(number as usize)
}

/// All signals blocked in this thread until dropped.
struct BlockedSignals {
    before: u64,
    /// The mask is the thread's.
    _thread: PhantomData<*const ()>,
}

impl BlockedSignals {
    fn new() -> Result<Self> {
        let mut before = 0;
        sigmask(libc::SIG_SETMASK, u64::MAX, Some(&mut before))?;
        Ok(Self { before, _thread: PhantomData })
    }
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        // Setting back a mask that the kernel gave cannot fail.
        let _ = sigmask(libc::SIG_SETMASK, self.before, None);
    }
}

/// rt_sigprocmask(2).
fn sigmask(how: c_int, set: u64, before: Option<&mut u64>) -> Result<()> {
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
    let (argv, environment) = (argv.as_ptr() as usize, environment.as_ptr() as usize);
    let empty = c"".as_ptr() as usize;
    // SAFETY: strings end in NUL, both lists in null, and all live until the call has copied them.
    match unsafe {
        syscall(
            libc::SYS_execveat,
            [arg(program), empty, argv, environment, libc::AT_EMPTY_PATH as usize, 0],
        )
    } {
        Err(errno) => errno,
        Ok(_) => Errno(0),
    }
}

/// setsid(2).
pub(crate) fn setsid() -> Result<()> {
    // SAFETY: no pointers.
    unsafe { syscall(libc::SYS_setsid, [0; 6]) }.map(drop)
}

/// pidfd_open(2).
pub(crate) fn pidfd_open(pid: c_int) -> Result<OwnedFd> {
    // SAFETY: no pointers.
    unsafe { syscall(libc::SYS_pidfd_open, [pid as usize, 0, 0, 0, 0, 0]) }.map(owned)
}

/// pidfd_send_signal(2) without further information.
pub(crate) fn pidfd_send_signal(pidfd: BorrowedFd<'_>, signal: c_int) -> Result<()> {
    // SAFETY: a null siginfo is allowed.
    unsafe { syscall(libc::SYS_pidfd_send_signal, [arg(pidfd), signal as usize, 0, 0, 0, 0]) }
        .map(drop)
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
    let mut info: libc::siginfo_t = zeroed();
    let options = libc::WEXITED | libc::__WALL | if block { 0 } else { libc::WNOHANG };
    loop {
        // SAFETY: `info` is a siginfo_t that the kernel may write; a null rusage is allowed.
        let answer = unsafe {
            let info = &raw mut info as usize;
            syscall(
                libc::SYS_waitid,
                [libc::P_PIDFD as usize, arg(pidfd), info, options as usize, 0, 0],
            )
        };
        match answer {
            Err(Errno(libc::EINTR)) => {}
            Err(errno) => return Err(errno),
            Ok(_) => break,
        }
    }
    // SAFETY: all fields of the structure are plain numbers and were zero before; waitid fills in
    // those of SIGCHLD.
    let (pid, status) = unsafe { (info.si_pid(), info.si_status()) };
    if pid == 0 {
        return Ok(None);
    }
    Ok(Some(if info.si_code == libc::CLD_EXITED { End::Code(status) } else { End::Signal(status) }))
}

/// Puts a descriptor under the runtime's watch; of a pidfd, readable means ended, of a listening
/// socket, that somebody calls.
///
/// # Errors
/// No runtime, or epoll_ctl(2)'s.
pub(crate) fn watch(file: Arc<OwnedFd>) -> io::Result<AsyncFd<Arc<OwnedFd>>> {
    // SAFETY: the AsyncFd shares the descriptor's ownership, and an OwnedFd behind an Arc can be
    // neither closed nor replaced.
    Ok(unsafe { AsyncFd::register_with_interest(file, Interest::READABLE) }?)
}

/// ppoll(2) of a pidfd: whether the process has ended, also one that is no child.
pub(crate) fn ended(pidfd: BorrowedFd<'_>) -> bool {
    let mut poll = libc::pollfd { fd: pidfd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: one pollfd, a timespec, no signal set.
    unsafe {
        syscall(libc::SYS_ppoll, [&raw mut poll as usize, 1, &raw const now as usize, 0, 0, 0])
    }
    .is_ok_and(|ready| ready > 0)
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

/// ioctl(2) PIDFD_GET_INFO: how a process ended that somebody has reaped (Linux 6.15). `None`: not
/// reaped yet, or the kernel cannot tell.
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

// ---- namespaces ----

/// setns(2): moves the calling thread; `kind` is a `CLONE_NEW…`.
pub(crate) fn setns(namespace: BorrowedFd<'_>, kind: c_int) -> Result<()> {
    // SAFETY: no pointers.
    unsafe { syscall(libc::SYS_setns, [arg(namespace), kind as usize, 0, 0, 0, 0]) }.map(drop)
}

/// unshare(2).
pub(crate) fn unshare(flags: c_int) -> Result<()> {
    // SAFETY: no pointers; CLONE_VM is the kernel's to refuse.
    unsafe { syscall(libc::SYS_unshare, [flags as usize, 0, 0, 0, 0, 0]) }.map(drop)
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

/// fstatfs(2): the magic number of the file system that a file is on.
pub(crate) fn file_system(file: BorrowedFd<'_>) -> Result<i64> {
    let mut buffer: libc::statfs = zeroed();
    // SAFETY: `buffer` is a statfs that the kernel may write.
    unsafe { syscall(libc::SYS_fstatfs, [arg(file), &raw mut buffer as usize, 0, 0, 0, 0]) }?;
    #[allow(clippy::unnecessary_cast, reason = "unsigned in musl's structure")]
    Ok(buffer.f_type as i64)
}

/// sethostname(2).
pub(crate) fn sethostname(name: &[u8]) -> Result<()> {
    // SAFETY: pointer and length are a slice's.
    unsafe { syscall(libc::SYS_sethostname, [name.as_ptr() as usize, name.len(), 0, 0, 0, 0]) }
        .map(drop)
}

// ---- files ----

/// openat(2), close-on-exec; `mode` is for new files.
pub(crate) fn open(
    directory: Option<BorrowedFd<'_>>,
    path: &CStr,
    flags: c_int,
    mode: u32,
) -> Result<OwnedFd> {
    let directory = directory.map_or(libc::AT_FDCWD as usize, arg);
    let flags = (flags | libc::O_CLOEXEC) as usize;
    // SAFETY: the path ends in NUL.
    unsafe {
        syscall(libc::SYS_openat, [directory, path.as_ptr() as usize, flags, mode as usize, 0, 0])
    }
    .map(owned)
}

/// openat(2) and one write(2) of `content` to a file that exists, as the kernel's own files want
/// it.
pub(crate) fn write_file(directory: BorrowedFd<'_>, path: &CStr, content: &[u8]) -> Result<()> {
    let file = open(Some(directory), path, libc::O_WRONLY, 0)?;
    // SAFETY: pointer and length are a slice's.
    let written = unsafe {
        let number = file.as_raw_fd() as usize;
        syscall(libc::SYS_write, [number, content.as_ptr() as usize, content.len(), 0, 0, 0])
    };
    close(file);
    written.map(drop)
}

fn fd(file: &OwnedFd) -> BorrowedFd<'_> {
    use std::os::fd::AsFd;
    file.as_fd()
}

/// close(2), for a child: what closes a dropped descriptor is libc's.
pub(crate) fn close(file: OwnedFd) {
    // SAFETY: the descriptor was owned, and is nobody's from here on. It is closed whatever the
    // call answers.
    let _ = unsafe { syscall(libc::SYS_close, [file.into_raw_fd() as usize, 0, 0, 0, 0, 0]) };
}

/// mkdirat(2).
pub(crate) fn mkdir(directory: BorrowedFd<'_>, path: &CStr, mode: u32) -> Result<()> {
    // SAFETY: the path ends in NUL.
    unsafe {
        syscall(libc::SYS_mkdirat, [arg(directory), path.as_ptr() as usize, mode as usize, 0, 0, 0])
    }
    .map(drop)
}

/// unlinkat(2) of an empty directory.
pub(crate) fn rmdir(directory: BorrowedFd<'_>, path: &CStr) -> Result<()> {
    let flags = libc::AT_REMOVEDIR as usize;
    // SAFETY: the path ends in NUL.
    unsafe { syscall(libc::SYS_unlinkat, [arg(directory), path.as_ptr() as usize, flags, 0, 0, 0]) }
        .map(drop)
}

/// Gives the thread a descriptor table of its own, without ever copying what is above `highest`.
pub(crate) fn unshare_descriptors(highest: c_uint) -> Result<()> {
    close_range(highest + 1, c_uint::MAX, libc::CLOSE_RANGE_UNSHARE)
}

/// close_range(2) by a child; `flags` are `CLOSE_RANGE_…`.
fn close_range(first: c_uint, last: c_uint, flags: c_uint) -> Result<()> {
    // SAFETY: the table is the child's own, or becomes it: no owner loses a descriptor.
    unsafe {
        syscall(libc::SYS_close_range, [first as usize, last as usize, flags as usize, 0, 0, 0])
    }
    .map(drop)
}

/// memfd_create(2), close-on-exec and sealable; `executable` asks for MFD_EXEC (Linux 6.3).
pub(crate) fn memfd(name: &CStr, executable: bool) -> Result<OwnedFd> {
    let flags =
        libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING | if executable { libc::MFD_EXEC } else { 0 };
    // SAFETY: the name ends in NUL.
    unsafe { syscall(libc::SYS_memfd_create, [name.as_ptr() as usize, flags as usize, 0, 0, 0, 0]) }
        .map(owned)
}

/// fcntl(2) F_ADD_SEALS.
pub(crate) fn seal(file: BorrowedFd<'_>, seals: c_int) -> Result<()> {
    // SAFETY: no pointers.
    unsafe {
        syscall(libc::SYS_fcntl, [arg(file), libc::F_ADD_SEALS as usize, seals as usize, 0, 0, 0])
    }
    .map(drop)
}

/// fsetxattr(2).
pub(crate) fn set_attribute(file: BorrowedFd<'_>, name: &CStr, value: &CStr) -> Result<()> {
    let bytes = value.to_bytes_with_nul();
    // SAFETY: the name ends in NUL; pointer and length are a slice's.
    unsafe {
        syscall(
            libc::SYS_fsetxattr,
            [arg(file), name.as_ptr() as usize, bytes.as_ptr() as usize, bytes.len(), 0, 0],
        )
    }
    .map(drop)
}

/// A descriptor of our own for one that the process was started with: fcntl(2), F_DUPFD_CLOEXEC.
pub(crate) fn inherited(descriptor: RawFd) -> Result<OwnedFd> {
    let least = 3;
    let number = usize::try_from(descriptor).map_err(|_| Errno(libc::EBADF))?;
    // SAFETY: no pointers; a number that is no open descriptor is answered by EBADF.
    unsafe { syscall(libc::SYS_fcntl, [number, libc::F_DUPFD_CLOEXEC as usize, least, 0, 0, 0]) }
        .map(owned)
}

/// A structure of the kernel's with every byte 0.
fn zeroed<T: Plain>() -> T {
    // SAFETY: all bytes 0 are a value of every `Plain` type.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

/// Structures of the kernel's that consist of numbers and may be all zero.
///
/// # Safety
/// All bytes 0 must be a value of the type.
unsafe trait Plain {}
// SAFETY: numbers only.
unsafe impl Plain for libc::clone_args {}
// SAFETY: numbers and null pointers only.
unsafe impl Plain for libc::siginfo_t {}
// SAFETY: numbers only.
unsafe impl Plain for libc::statfs {}
