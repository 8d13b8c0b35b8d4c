//! The pause program: holds a pod's namespaces, and as PID 1 of a PID namespace reaps its orphans.
//!
//! Freestanding: no libc, no standard library, no data segment, no heap. All signals are blocked
//! and taken one by one, so there is no handler and no early SIGTERM is lost. SIGTERM and SIGINT
//! end it with status 0, SIGCHLD makes it reap, all else is ignored. Who starts it has blocked all
//! signals already and confined it (see `child.rs`); it repeats what it can so that it behaves the
//! same under an OCI runtime.
#![no_std]
#![no_main]

mod arch;

use arch::{EXIT_GROUP, RT_SIGPROCMASK, RT_SIGTIMEDWAIT, syscall};

const WAIT4: usize = if cfg!(target_arch = "x86_64") { 61 } else { 260 };
const PRCTL: usize = if cfg!(target_arch = "x86_64") { 157 } else { 167 };
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

unsafe extern "C" fn run(_stack: *const usize) -> ! {
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
