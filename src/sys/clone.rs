//! clone3(2) of a child that shares the daemon's memory.

use std::arch::asm;
use std::cell::UnsafeCell;
use std::ffi::c_int;
use std::marker::PhantomData;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::atomic::AtomicI32;
use std::sync::atomic::Ordering::{Acquire, Release};

use super::exec::sigmask;
use super::{Errno, Result, check, owned, syscall};

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
    pub(crate) born: Option<&'a ClonedChildSlot>,
    /// The child's stack; without one it runs on the caller's, below what the caller uses.
    pub(crate) stack: Option<&'a Stack>,
}

/// A cloned child, for threads that must know it while the calling thread is blocked.
#[derive(Debug, Default)]
pub(crate) struct ClonedChildSlot {
    /// 0: not yet.
    pid: AtomicI32,
    /// In the table of the clone's caller.
    pidfd: AtomicI32,
}

impl ClonedChildSlot {
    /// The child's pid, once there is a child.
    pub(crate) fn pid(&self) -> Option<c_int> {
        Some(self.pid.load(Acquire)).filter(|pid| *pid > 0)
    }

    /// Forgets the child.
    pub(crate) fn forget(&self) {
        self.pid.store(0, Release);
    }

    /// pidfd_send_signal(2) of SIGKILL to the child. Only a thread calls it that shares the
    /// descriptors of the clone's caller, as long as that one has not closed the child's.
    pub(crate) fn kill(&self) -> Result<()> {
        // A clone that fails may have written the number of a descriptor that it then did not make;
        // of the pid it has written nothing.
        if self.pid().is_none() {
            return Err(Errno::SRCH);
        }
        let pidfd = self.pidfd.load(Acquire) as usize;
        let arguments = [pidfd, libc::SIGKILL as usize, 0, 0, 0, 0];
        // SAFETY: a null siginfo is allowed.
        unsafe { syscall(libc::SYS_pidfd_send_signal, arguments) }.map(drop)
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

/// The arguments of clone3(2). The kernel writes the child's pidfd to `born`, and its pid too if
/// that is the one of `how`.
fn arguments(how: &Clone<'_>, born: &ClonedChildSlot) -> libc::clone_args {
    let own_child = how.flags & libc::CLONE_PARENT as u64 == 0;
    let mut args = libc::clone_args {
        flags: how.flags | (libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD) as u64,
        pidfd: born.pidfd.as_ptr() as u64,
        child_tid: 0,
        parent_tid: 0,
        // With CLONE_PARENT the child has the exit signal of the caller.
        exit_signal: if own_child { libc::SIGCHLD as u64 } else { 0 },
        stack: 0,
        stack_size: 0,
        tls: 0,
        set_tid: 0,
        set_tid_size: 0,
        cgroup: 0,
    };
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
    args
}

/// Clones a child that shares the caller's memory, as vfork(2) does, and runs `child(argument)`;
/// answers pid and pidfd. The calling thread is blocked until the child has ended or executed
/// another program, so the child is for all that is kept per thread the calling thread itself.
/// Costs the same however large the process is.
///
/// `argument` must stay where it is until the child has ended or executed, also where the caller, a
/// child itself, is killed meanwhile: with a [`Stack`] of its own the child then continues.
///
/// The child should make system calls only: what it locks stays locked when it ends. Signals are
/// blocked in the child, and during the call in the caller.
pub(crate) fn clone_child<T>(
    how: &Clone<'_>,
    argument: &T,
    child: extern "C" fn(&T) -> !,
) -> Result<(c_int, OwnedFd)> {
    let own = ClonedChildSlot::default();
    let born = how.born.unwrap_or(&own);
    let args = arguments(how, born);
    let blocked = BlockedSignals::new()?;
    let answer: isize;
    // SAFETY: the child continues on the caller's stack below all that the caller uses (no
    // `nostack`: the compiler keeps nothing there), or on a stack of its own, and `child` never
    // returns, so the caller's frame is as it was when the caller continues. That is only after the
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
