//! The system calls that a pause process may make.
//!
//! The filter is installed by the child just before it executes the program, so that a pause
//! process is never without it and a failure is Start's. It therefore allows execveat(2) too, by
//! descriptor only: a pause process has none and can open none.

use libc::sock_filter;

use crate::sys::filter::{ARCH, ARGUMENT_0, NUMBER, equal, load, return_action};

#[cfg(target_arch = "x86_64")]
const ARCHITECTURE: u32 = 0xc000_003e; // AUDIT_ARCH_X86_64
#[cfg(target_arch = "aarch64")]
const ARCHITECTURE: u32 = 0xc000_00b7; // AUDIT_ARCH_AARCH64

/// Allowed with any arguments: what the program calls, and restart_syscall(2), which the kernel
/// makes it call after a stop.
const ALLOWED: [i64; 6] = [
    libc::SYS_rt_sigtimedwait,
    libc::SYS_wait4,
    libc::SYS_rt_sigprocmask,
    libc::SYS_exit_group,
    libc::SYS_exit,
    libc::SYS_restart_syscall,
];

/// Where the parts of the filter begin: the refusal behind the list, then what looks at arguments,
/// then the two answers.
const REFUSED: usize = 6 + ALLOWED.len();
const EXECVEAT: usize = REFUSED + 1;
const PRCTL: usize = EXECVEAT + 2;
const ARGUMENT_REFUSED: usize = PRCTL + 3;
const GRANTED: usize = ARGUMENT_REFUSED + 1;
const LENGTH: usize = GRANTED + 1;

/// The filter. What it does not allow answers EPERM; a call of another architecture kills.
pub(super) static FILTER: [sock_filter; LENGTH] = filter();

const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;
const REFUSE: u32 = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
const KILL: u32 = libc::SECCOMP_RET_KILL_PROCESS;
const ARGUMENT_4: u32 = ARGUMENT_0 + 4 * 8;

const fn filter() -> [sock_filter; LENGTH] {
    let mut program = [return_action(REFUSE); LENGTH];
    program[0] = load(ARCH);
    program[1] = equal(1, ARCHITECTURE, 3, 2);
    program[2] = return_action(KILL);
    // Numbers of the x32 calls of x86_64 have a high bit and so equal none below.
    program[3] = load(NUMBER);
    program[4] = equal(4, libc::SYS_execveat as u32, EXECVEAT, 5);
    program[5] = equal(5, libc::SYS_prctl as u32, PRCTL, 6);
    let mut i = 6;
    while i < REFUSED {
        program[i] = equal(i, ALLOWED[i - 6] as u32, GRANTED, i + 1);
        i += 1;
    }
    program[EXECVEAT] = load(ARGUMENT_4);
    program[EXECVEAT + 1] =
        equal(EXECVEAT + 1, libc::AT_EMPTY_PATH as u32, GRANTED, ARGUMENT_REFUSED);
    program[PRCTL] = load(ARGUMENT_0);
    program[PRCTL + 1] = equal(PRCTL + 1, libc::PR_SET_NAME as u32, GRANTED, PRCTL + 2);
    program[PRCTL + 2] = equal(PRCTL + 2, libc::PR_SET_DUMPABLE as u32, GRANTED, ARGUMENT_REFUSED);
    program[GRANTED] = return_action(ALLOW);
    program
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::process::{DumpableBehavior, set_dumpable_behavior};

    use super::FILTER;
    use crate::sys::{self, Errno};

    extern "C" fn confined(_: &()) -> ! {
        let installed =
            rustix::thread::set_no_new_privs(true).and_then(|()| sys::filter::install(&FILTER));
        let refused = [
            rustix::process::setsid().map(drop),
            // An option of prctl(2) that is not the program's.
            rustix::thread::set_keep_capabilities(true),
            sys::pidfd_open(1).map(drop),
            sys::open(None, c"/", libc::O_PATH, 0).map(drop),
        ];
        let allowed = [set_dumpable_behavior(DumpableBehavior::NotDumpable)];
        if installed.is_err() {
            sys::exit(1);
        }
        if refused.iter().any(|answer| *answer != Err(Errno::PERM)) {
            sys::exit(2);
        }
        sys::exit(if allowed.iter().all(Result::is_ok) { 0 } else { 3 })
    }

    #[test]
    fn only_the_programs_calls_are_allowed() {
        let how = sys::Clone { flags: 0, cgroup: None, born: None, stack: None };
        let (_, pidfd) = sys::clone_child(&how, &(), confined).unwrap();
        assert_eq!(sys::reap(pidfd.as_fd(), true), Ok(Some(sys::End::Code(0))));
    }
}
