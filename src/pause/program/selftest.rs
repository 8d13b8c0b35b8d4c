//! The program of the containers of `pause-sandboxer selftest`: writes its first argument to
//! standard output; with a second one it then waits for SIGTERM.
//!
//! Freestanding as the pause program is, so that it needs no library in its image.
#![no_std]
#![no_main]

mod arch;

use arch::{EXIT_GROUP, RT_SIGPROCMASK, RT_SIGTIMEDWAIT, syscall};

const WRITE: usize = if cfg!(target_arch = "x86_64") { 1 } else { 64 };
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
