//! The program of the containers of `pause-sandboxer selftest`: writes its first argument to
//! standard output; with a second one it then waits for SIGTERM.
//!
//! Freestanding as the pause program is, so that it needs no library in its image.
#![no_std]
#![no_main]

use core::arch::{asm, global_asm};

#[cfg(target_arch = "x86_64")]
mod arch {
    use super::{asm, global_asm};

    pub const WRITE: usize = 1;
    pub const RT_SIGPROCMASK: usize = 14;
    pub const RT_SIGTIMEDWAIT: usize = 128;
    pub const EXIT_GROUP: usize = 231;

    // The kernel enters with the arguments on the aligned stack.
    global_asm!(
        ".globl _start",
        "_start:",
        "xor ebp, ebp",
        "mov rdi, rsp",
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

    pub const WRITE: usize = 64;
    pub const EXIT_GROUP: usize = 94;
    pub const RT_SIGPROCMASK: usize = 135;
    pub const RT_SIGTIMEDWAIT: usize = 137;

    global_asm!(
        ".globl _start",
        "_start:",
        "mov x29, #0",
        "mov x30, #0",
        "mov x0, sp",
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

use arch::{EXIT_GROUP, RT_SIGPROCMASK, RT_SIGTIMEDWAIT, WRITE, syscall};

const STDOUT: usize = 1;
const SIGTERM: isize = 15;
const SIG_BLOCK: usize = 0;
/// Bytes of the kernel's signal set.
const SIGSET: usize = 8;

static WANTED: u64 = 1 << (SIGTERM - 1);

/// `stack` has the number of arguments, then their addresses (System V ABI, process start).
unsafe extern "C" fn run(stack: *const usize) -> ! {
    // SAFETY: the kernel puts that many addresses of strings that end with NUL there; the others
    // are those of a static of the size that the call reads, or null where it may be.
    unsafe {
        // First, so that no early signal is lost.
        syscall(RT_SIGPROCMASK, SIG_BLOCK, &raw const WANTED as usize, 0, SIGSET);
        let count = stack.read();
        if count > 1 {
            let text = stack.add(2).read() as *const u8;
            let mut length = 0;
            // Volatile, because the compiler would make a call of strlen(3) of it.
            while text.add(length).read_volatile() != 0 {
                length += 1;
            }
            syscall(WRITE, STDOUT, text as usize, length, 0);
        }
        while count > 2
            && syscall(RT_SIGTIMEDWAIT, &raw const WANTED as usize, 0, 0, SIGSET) != SIGTERM
        {}
        loop {
            syscall(EXIT_GROUP, 0, 0, 0, 0);
        }
    }
}

/// Nothing in the program panics; the compiler wants it.
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
