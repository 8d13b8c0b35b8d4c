//! System calls that need `unsafe`, one function each.

#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};
use std::ptr;
use std::sync::OnceLock;

/// The open file limits that this process was started with; its children get the soft limit.
static OPEN_FILES: OnceLock<libc::rlimit> = OnceLock::new();

/// Stack size of a child until it executes its program, bytes.
const STACK: usize = 16 << 10;

/// Descriptors of a child are moved to this number or above before they get their final numbers.
const ABOVE: c_int = 32;

/// The error of a system call that has returned a negative number.
fn done(result: impl Into<i64>) -> io::Result<()> {
    if result.into() < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Takes over a descriptor that this process was started with; `None` if it is not open. To be
/// called once for each number, before this process opens a file.
pub fn inherited(fd: RawFd) -> Option<OwnedFd> {
    // SAFETY: fcntl with F_SETFD takes no pointer.
    let known = unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) } == 0;
    // SAFETY: the descriptor is open and has no other owner: `serve` and `helper::input` take over
    // numbers of their own, each once, before anything else opens a file.
    known.then(|| unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Locks one byte of a file until each copy of the descriptor is closed, also those of other
/// processes (open file description lock, fcntl_locking(2)). Waits for it.
pub fn lock_byte(file: BorrowedFd<'_>, offset: i64) -> io::Result<()> {
    let lock = libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: offset,
        l_len: 1,
        l_pid: 0,
    };
    // SAFETY: the kernel reads the structure during the call.
    done(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLKW, &raw const lock) })
}

/// Blocks these signals and returns a signalfd for them. Resets their dispositions, because this
/// process may have inherited `SIG_IGN`.
pub fn signals(wanted: &[c_int]) -> io::Result<OwnedFd> {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigemptyset initialises the set that the others read; a default disposition runs no
    // code of this process.
    let fd = unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        for signal in wanted {
            libc::sigaddset(set.as_mut_ptr(), *signal);
            libc::signal(*signal, libc::SIG_DFL);
        }
        done(libc::sigprocmask(libc::SIG_BLOCK, set.as_ptr(), ptr::null_mut()))?;
        libc::signalfd(-1, set.as_ptr(), libc::SFD_CLOEXEC | libc::SFD_NONBLOCK)
    };
    done(fd)?;
    // SAFETY: signalfd returned a new descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Raises the soft limit of open files to the hard limit. Children get the earlier soft limit.
pub fn raise_open_files() -> io::Result<()> {
    let mut before = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel fills the structure, and reads the other.
    unsafe {
        done(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut before))?;
        let before = OPEN_FILES.get_or_init(|| before);
        let raised = libc::rlimit { rlim_cur: before.rlim_max, ..*before };
        done(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const raised))
    }
}

/// Has glibc use one heap for all threads, and give large freed blocks back to the kernel. musl
/// does both by itself.
#[cfg(target_env = "gnu")]
pub fn save_memory() {
    // SAFETY: mallopt takes numbers only.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
        // The default, which a block that is freed no longer raises.
        libc::mallopt(libc::M_MMAP_THRESHOLD, 128 << 10);
    }
}

/// A program to run.
#[derive(Debug)]
pub struct Spawn<'a> {
    /// Path of the executable.
    pub program: &'a CStr,
    /// Arguments; the first one is the name of the program.
    pub arguments: &'a [CString],
    /// Environment, `NAME=value`.
    pub environment: &'a [CString],
    /// Working directory; `None`: that of this process.
    pub directory: Option<BorrowedFd<'a>>,
    /// Descriptors, and their numbers in the child. No others are inherited, because all
    /// descriptors of this process are close-on-exec.
    pub descriptors: &'a [(BorrowedFd<'a>, RawFd)],
    /// The kernel kills the child when this process exits.
    pub dies_with_parent: bool,
}

/// The data that [`spawn`] shares with its child.
struct Work<'a> {
    spawn: &'a Spawn<'a>,
    arguments: Vec<*const c_char>,
    environment: Vec<*const c_char>,
    parent: c_int,
    open_files: Option<&'static libc::rlimit>,
    errno: c_int,
}

/// Runs a program and returns its pid. Returns after execve(2) has succeeded or failed.
pub fn spawn(spawn: &Spawn<'_>) -> io::Result<i32> {
    let pointers = |strings: &[CString]| {
        strings.iter().map(|string| string.as_ptr()).chain([ptr::null()]).collect::<Vec<_>>()
    };
    let mut work = Work {
        spawn,
        arguments: pointers(spawn.arguments),
        environment: pointers(spawn.environment),
        parent: own_pid(),
        open_files: OPEN_FILES.get(),
        errno: 0,
    };
    let mut stack = vec![0u128; STACK / size_of::<u128>()];
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
    // SAFETY: the stack and `work` outlive the child's use of them: with CLONE_VFORK this thread
    // waits until the child has executed a program or ended. The child gets the end of the stack,
    // which is aligned as u128 is.
    let pid = unsafe {
        let top = stack.as_mut_ptr_range().end.cast::<c_void>();
        libc::clone(child, top, flags, (&raw mut work).cast::<c_void>())
    };
    done(pid)?;
    if work.errno != 0 {
        let error = io::Error::from_raw_os_error(work.errno);
        // Does not wait: the child may block while it closes its descriptors. The main loop reaps
        // it as any unknown child.
        // SAFETY: nothing else has reaped the child; a null status is allowed.
        unsafe { libc::waitpid(pid, ptr::null_mut(), libc::WNOHANG) };
        return Err(error);
    }
    Ok(pid)
}

/// Runs in the child, in the parent's memory: allocates nothing and calls only functions that are
/// safe in a signal handler (signal-safety(7)).
extern "C" fn child(work: *mut c_void) -> c_int {
    // SAFETY: `spawn` passes its `Work` and waits; nothing else uses it meanwhile.
    let work = unsafe { &mut *work.cast::<Work<'_>>() };
    work.errno = become_program(work);
    // SAFETY: ends this process without running anything of the parent's.
    unsafe { libc::_exit(127) }
}

/// Executes the program; returns the errno if that fails.
fn become_program(work: &Work<'_>) -> c_int {
    let errno = || io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
    let spawn = work.spawn;
    let mut moved = [0; 8];
    if spawn.descriptors.len() > moved.len() {
        return libc::EINVAL;
    }
    // SAFETY: all are plain system calls on descriptors, numbers, and memory that `Work` holds:
    // null-terminated arrays of null-terminated strings, and local sets.
    unsafe {
        // First away from the low numbers, so that no descriptor overwrites another's source.
        for (slot, (fd, _)) in moved.iter_mut().zip(spawn.descriptors) {
            *slot = libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, ABOVE);
            if *slot < 0 {
                return errno();
            }
        }
        for (source, (_, number)) in moved.iter().zip(spawn.descriptors) {
            if libc::dup2(*source, *number) < 0 {
                return errno();
            }
        }
        if let Some(directory) = spawn.directory
            && libc::fchdir(directory.as_raw_fd()) != 0
        {
            return errno();
        }
        if let Some(before) = work.open_files {
            // The hard limit may have been lowered meanwhile.
            let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            if libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) != 0 {
                return errno();
            }
            limit.rlim_cur = before.rlim_cur.min(limit.rlim_max);
            if libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) != 0 {
                return errno();
            }
        }
        // No signal stays ignored: every Rust program ignores SIGPIPE, and the program that has
        // started this one may ignore others. The C library refuses to change its own signals.
        for signal in 1..=libc::SIGRTMAX() {
            libc::signal(signal, libc::SIG_DFL);
        }
        let mut none = MaybeUninit::<libc::sigset_t>::uninit();
        libc::sigemptyset(none.as_mut_ptr());
        if libc::sigprocmask(libc::SIG_SETMASK, none.as_ptr(), ptr::null_mut()) != 0 {
            return errno();
        }
        if spawn.dies_with_parent && !die_with(work.parent) {
            return libc::ESRCH;
        }
        libc::execve(spawn.program.as_ptr(), work.arguments.as_ptr(), work.environment.as_ptr());
    }
    errno()
}

/// Has the kernel kill this process when its parent exits. False: that failed, or the parent has
/// exited already, so that no signal will come.
///
/// # Safety
/// No requirements. It is `unsafe` so that only `unsafe` code, such as that of a child, calls it.
unsafe fn die_with(parent: c_int) -> bool {
    let kill = libc::SIGKILL as libc::c_ulong;
    // SAFETY: both calls take numbers only.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, kill, 0, 0, 0) == 0 && libc::getppid() == parent }
}

fn own_pid() -> c_int {
    // SAFETY: getpid takes nothing and does not fail.
    unsafe { libc::getpid() }
}

/// Sets close-on-exec for all descriptors except the first four, if the kernel supports
/// close_range(2) with that flag.
pub fn close_rest_on_exec() {
    // SAFETY: the call takes numbers only, and changes a flag of descriptors.
    unsafe {
        libc::syscall(libc::SYS_close_range, 4, c_int::MAX, libc::CLOSE_RANGE_CLOEXEC);
    }
}

/// A child that has exited and is not reaped (any, or only `pid`), and its exit status: 128 plus
/// the signal if a signal killed it. Does not reap it, so that the pid cannot be reused.
pub fn ended_child(pid: Option<i32>) -> Option<(i32, u32)> {
    let (kind, pid) = match pid {
        Some(pid) => (libc::P_PID, libc::id_t::try_from(pid).ok()?),
        None => (libc::P_ALL, 0),
    };
    let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
    let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: the kernel fills the structure, of which all-zero is a value too; after waitid it has
    // the fields of a SIGCHLD.
    let (pid, code, status) = unsafe {
        if libc::waitid(kind, pid, info.as_mut_ptr(), flags) != 0 {
            return None;
        }
        let info = info.assume_init();
        (info.si_pid(), info.si_code, info.si_status())
    };
    let status = if code == libc::CLD_EXITED { status } else { 128 + status };
    (pid > 0).then(|| (pid, u32::try_from(status).unwrap_or(255)))
}

/// Makes a detached mount an idmapped mount by a user namespace, and private (mount_setattr(2)).
/// The copy of a shared mount is its peer: what is mounted or unmounted in one, is so in the other.
pub fn map_mount(mount: BorrowedFd<'_>, users: BorrowedFd<'_>, read_only: bool) -> io::Result<()> {
    let attributes = libc::mount_attr {
        attr_set: libc::MOUNT_ATTR_IDMAP | if read_only { libc::MOUNT_ATTR_RDONLY } else { 0 },
        attr_clr: 0,
        propagation: libc::MS_PRIVATE,
        userns_fd: u64::try_from(users.as_raw_fd()).unwrap_or(u64::MAX),
    };
    // SAFETY: the path is an empty string, and the structure has the size that is passed.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attributes,
            size_of::<libc::mount_attr>(),
        )
    };
    done(result)
}

/// Starts a process in a new user namespace that only waits to be killed, and returns its pid. The
/// namespace exists as long as the process or a descriptor of the namespace.
pub fn user_namespace_holder() -> io::Result<i32> {
    // SAFETY: a clone without shared memory and without a new stack is a fork. The child calls
    // nothing but system calls that take no memory.
    unsafe {
        let flags = libc::CLONE_NEWUSER | libc::SIGCHLD;
        let zero = 0 as libc::c_ulong;
        let parent = own_pid();
        let pid = libc::syscall(libc::SYS_clone, flags as libc::c_ulong, zero, zero, zero, zero);
        if pid == 0 {
            while die_with(parent) {
                libc::pause();
            }
            libc::_exit(0);
        }
        done(pid)?;
        i32::try_from(pid).map_err(io::Error::other)
    }
}

/// `LOOP_CTL_GET_FREE` and `LOOP_CONFIGURE` (`linux/loop.h`).
const LOOP_CTL_GET_FREE: libc::Ioctl = 0x4c82;
const LOOP_CONFIGURE: libc::Ioctl = 0x4c0a;

/// Flags of [`LoopConfig`] (`linux/loop.h`).
pub const LOOP_READ_ONLY: u32 = 1;
pub const LOOP_AUTOCLEAR: u32 = 4;
pub const LOOP_DIRECT_IO: u32 = 16;

/// `struct loop_config` of `linux/loop.h`, with its `struct loop_info64`.
#[repr(C)]
struct LoopConfig {
    file: u32,
    block_size: u32,
    /// Device, inode, device number, offset, size limit.
    place: [u64; 5],
    /// Number, type and size of the key.
    numbers: [u32; 3],
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    key: [u8; 32],
    init: [u64; 2],
    reserved: [u64; 8],
}

const _: () = assert!(size_of::<LoopConfig>() == 304);

/// The number of a loop device without a file, which the kernel creates if needed. `control` is
/// `/dev/loop-control`.
pub fn free_loop_device(control: BorrowedFd<'_>) -> io::Result<u32> {
    // SAFETY: the request takes no argument.
    let number = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) };
    u32::try_from(number).map_err(|_| io::Error::last_os_error())
}

/// Attaches a file to a loop device. `name` is the file's name for `losetup`, and may be truncated.
pub fn configure_loop_device(
    device: BorrowedFd<'_>,
    file: BorrowedFd<'_>,
    name: &str,
    flags: u32,
) -> io::Result<()> {
    let mut file_name = [0; 64];
    // The last byte stays zero.
    file_name.iter_mut().take(63).zip(name.bytes()).for_each(|(to, from)| *to = from);
    let config = LoopConfig {
        file: u32::try_from(file.as_raw_fd()).map_err(io::Error::other)?,
        block_size: 0,
        place: [0; 5],
        numbers: [0; 3],
        flags,
        file_name,
        crypt_name: [0; 64],
        key: [0; 32],
        init: [0; 2],
        reserved: [0; 8],
    };
    // SAFETY: the kernel reads a structure of this type, whose layout is that of C, and keeps no
    // pointer to it.
    done(unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE, &raw const config) })
}

/// Sends a signal to a child that was not reaped, so that its pid cannot have been reused.
pub fn kill(pid: i32, signal: i32) -> io::Result<()> {
    // SAFETY: kill takes no pointer.
    done(unsafe { libc::kill(pid, signal) })
}
