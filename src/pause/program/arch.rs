//! What the freestanding programs need of the processor: their start and system calls.

use core::arch::{asm, global_asm};

const IS_X86: bool = cfg!(target_arch = "x86_64");
pub const RT_SIGPROCMASK: usize = if IS_X86 { 14 } else { 135 };
pub const RT_SIGTIMEDWAIT: usize = if IS_X86 { 128 } else { 137 };
pub const EXIT_GROUP: usize = if IS_X86 { 231 } else { 94 };

// The kernel enters with the arguments on the aligned stack and without a return address, as `call`
// leaves it.
#[cfg(target_arch = "x86_64")]
global_asm!(
    ".globl _start",
    "_start:",
    "xor ebp, ebp",
    "mov rdi, rsp",
    "call {run}",
    "ud2",
    run = sym super::run
);
#[cfg(target_arch = "aarch64")]
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
    // SAFETY: the kernel keeps all registers but rax, rcx and r11; the memory is the caller's
    // promise.
    #[cfg(target_arch = "x86_64")]
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
    // SAFETY: the kernel keeps all registers but x0; the memory is the caller's promise.
    #[cfg(target_arch = "aarch64")]
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
