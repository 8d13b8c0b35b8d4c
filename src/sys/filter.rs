//! Filters of system calls (seccomp(2)).

use libc::sock_filter;

use super::{Result, syscall};

/// Offsets in `struct seccomp_data`; arguments by their low half (little-endian).
pub(crate) const NUMBER: u32 = 0;
pub(crate) const ARCH: u32 = 4;
pub(crate) const ARGUMENT_0: u32 = 16;

/// Loads the word at `offset`.
pub(crate) const fn load(offset: u32) -> sock_filter {
    sock_filter {
        code: (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16,
        jt: 0,
        jf: 0,
        k: offset,
    }
}

/// Jumps from instruction `here` to `yes` if the loaded word equals `k`, else to `no`; forwards
/// only.
pub(crate) const fn equal(here: usize, k: u32, yes: usize, no: usize) -> sock_filter {
    let code = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    sock_filter { code, jt: (yes - here - 1) as u8, jf: (no - here - 1) as u8, k }
}

/// Ends the filter with this answer.
pub(crate) const fn return_action(k: u32) -> sock_filter {
    sock_filter { code: (libc::BPF_RET | libc::BPF_K) as u16, jt: 0, jf: 0, k }
}

/// seccomp(2): installs a filter for this thread; needs no_new_privs.
pub(crate) fn install(filter: &[libc::sock_filter]) -> Result<()> {
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
    // SAFETY: pointer and length are a slice's; the kernel copies it and writes nothing.
    unsafe {
        syscall(
            libc::SYS_seccomp,
            [libc::SECCOMP_SET_MODE_FILTER as usize, 0, &raw const program as usize, 0, 0, 0],
        )
    }
    .map(drop)
}

/// Has this thread and its children answered `errno` where they ask for descriptors to be closed at
/// the exec, as by Linux before 5.11.
#[cfg(test)]
pub(crate) fn without_close_at_execute(errno: i32) {
    const ARGUMENT_2: u32 = ARGUMENT_0 + 2 * 8;
    let filter = [
        load(NUMBER),
        equal(1, libc::SYS_close_range as u32, 2, 4),
        load(ARGUMENT_2),
        equal(3, libc::CLOSE_RANGE_CLOEXEC, 5, 4),
        return_action(libc::SECCOMP_RET_ALLOW),
        return_action(libc::SECCOMP_RET_ERRNO | errno.unsigned_abs()),
    ];
    rustix::thread::set_no_new_privs(true).and_then(|()| install(&filter)).unwrap();
}

/// Has this thread and its children answered `errno`, or success by 0, where they ask for a core
/// scheduling domain for all threads of a process other than `but` (PR_SCHED_CORE_CREATE,
/// PIDTYPE_TGID), in the stead of a kernel that has such domains. No other call is touched.
#[cfg(test)]
pub(crate) fn with_core_domains(but: u32, errno: i32) {
    const SCHED_CORE: u32 = 62;
    const CREATE: u32 = 1;
    const THREAD_GROUP: u32 = 1;
    let argument = |number: u32| load(ARGUMENT_0 + number * 8);
    let filter = [
        load(NUMBER),
        equal(1, libc::SYS_prctl as u32, 2, 11),
        argument(0),
        equal(3, SCHED_CORE, 4, 11),
        argument(1),
        equal(5, CREATE, 6, 11),
        argument(2),
        equal(7, but, 11, 8),
        argument(3),
        equal(9, THREAD_GROUP, 10, 11),
        return_action(libc::SECCOMP_RET_ERRNO | errno.unsigned_abs()),
        return_action(libc::SECCOMP_RET_ALLOW),
    ];
    rustix::thread::set_no_new_privs(true).and_then(|()| install(&filter)).unwrap();
}
