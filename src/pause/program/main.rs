//! The pause program: holds a pod's namespaces, and as PID 1 of a PID namespace reaps its orphans.
//!
//! Freestanding: no libc, no standard library, no data segment, no heap. All signals are blocked
//! and taken one by one, so there is no handler and no early SIGTERM is lost. SIGTERM and SIGINT
//! end it with status 0, SIGCHLD makes it reap, all else is ignored. Who starts it has blocked all
//! signals already and confined it (see `child.rs`); it repeats what it can so that it behaves the
//! same under an OCI runtime.
#![no_std]
#![no_main]

use core::arch::{asm, global_asm};

#[cfg(target_arch = "x86_64")]
mod arch {
    use super::{asm, global_asm};

    pub const RT_SIGPROCMASK: usize = 14;
    pub const WAIT4: usize = 61;
    pub const RT_SIGTIMEDWAIT: usize = 128;
    pub const PRCTL: usize = 157;
    pub const EXIT_GROUP: usize = 231;

    // The kernel enters with an aligned stack and without a return address, as `call` leaves it.
    global_asm!(
        ".globl _start",
        "_start:",
        "xor ebp, ebp",
        "call {run}",
        "ud2",
        run = sym super::run
    );

    /// A system call of up to four arguments; the answer, negative on error.
    ///
    /// # Safety
    /// Pointers among the arguments must be valid for what the call does with them.
    #[inline(always)]
    pub unsafe fn syscall(number: usize, a: usize, b: usize, c: usize, d: usize) -> isize {
        let answer: isize;
        // SAFETY: the kernel keeps all registers but rax, rcx and r11; the memory is the caller's
        // promise.
        unsafe {
            asm!(
                "syscall",
                inlateout("rax") number as isize => answer,
                in("rdi") a,
                in("rsi") b,
                in("rdx") c,
                in("r10") d,
                out("rcx") _,
                out("r11") _,
                options(nostack)
            );
        }
        answer
    }
}

#[cfg(target_arch = "aarch64")]
mod arch {
    use super::{asm, global_asm};

    pub const EXIT_GROUP: usize = 94;
    pub const RT_SIGPROCMASK: usize = 135;
    pub const RT_SIGTIMEDWAIT: usize = 137;
    pub const PRCTL: usize = 167;
    pub const WAIT4: usize = 260;

    global_asm!(
        ".globl _start",
        "_start:",
        "mov x29, #0",
        "mov x30, #0",
        "bl {run}",
        "brk #1",
        run = sym super::run
    );

    /// A system call of up to four arguments; the answer, negative on error.
    ///
    /// # Safety
    /// Pointers among the arguments must be valid for what the call does with them.
    #[inline(always)]
    pub unsafe fn syscall(number: usize, a: usize, b: usize, c: usize, d: usize) -> isize {
        let answer: isize;
        // SAFETY: the kernel keeps all registers but x0; the memory is the caller's promise.
        unsafe {
            asm!(
                "svc #0",
                in("x8") number,
                inlateout("x0") a as isize => answer,
                in("x1") b,
                in("x2") c,
                in("x3") d,
                options(nostack)
            );
        }
        answer
    }
}

use arch::{EXIT_GROUP, PRCTL, RT_SIGPROCMASK, RT_SIGTIMEDWAIT, WAIT4, syscall};

const SIGINT: isize = 2;
const SIGTERM: isize = 15;
const SIGCHLD: isize = 17;
const SIG_BLOCK: usize = 0;
/// Bytes of the kernel's signal set.
const SIGSET: usize = 8;
const PR_SET_DUMPABLE: usize = 4;
const PR_SET_NAME: usize = 15;
const WNOHANG: usize = 1;
/// wait4 for any child.
const ANY: usize = usize::MAX;

static ALL: u64 = !0;
static WANTED: u64 = 1 << (SIGINT - 1) | 1 << (SIGTERM - 1) | 1 << (SIGCHLD - 1);
static NAME: [u8; 6] = *b"pause\0";

unsafe extern "C" fn run() -> ! {
    // SAFETY: every pointer passed is that of a static of the size that the call reads, or null
    // where it may be.
    unsafe {
        syscall(RT_SIGPROCMASK, SIG_BLOCK, &raw const ALL as usize, 0, SIGSET);
        syscall(PRCTL, PR_SET_DUMPABLE, 0, 0, 0);
        // An image that is executed by descriptor has the descriptor's or the file's odd name.
        syscall(PRCTL, PR_SET_NAME, &raw const NAME as usize, 0, 0);
        loop {
            match syscall(RT_SIGTIMEDWAIT, &raw const WANTED as usize, 0, 0, SIGSET) {
                SIGCHLD => while syscall(WAIT4, ANY, 0, WNOHANG, 0) > 0 {},
                SIGINT | SIGTERM => loop {
                    syscall(EXIT_GROUP, 0, 0, 0, 0);
                },
                // Interrupted by the freezer or a debugger: wait on.
                _ => {}
            }
        }
    }
}

/// Nothing in the program panics; the compiler wants it.
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
