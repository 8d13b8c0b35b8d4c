//! System calls that take privileges from the calling thread.

use std::ffi::c_int;

use super::{Result, syscall};

/// prctl(2) of an option without pointers.
fn prctl(option: c_int, value: usize) -> Result<usize> {
    // SAFETY: only called with options whose arguments are numbers.
    unsafe { syscall(libc::SYS_prctl, [option as usize, value, 0, 0, 0, 0]) }
}

/// prctl(2) PR_SET_DUMPABLE; of the memory, so of the daemon too where a child shares it.
pub(crate) fn set_dumpable(dumpable: bool) -> Result<()> {
    prctl(libc::PR_SET_DUMPABLE, usize::from(dumpable)).map(drop)
}

/// prctl(2) PR_SET_NO_NEW_PRIVS.
pub(crate) fn no_new_privs() -> Result<()> {
    prctl(libc::PR_SET_NO_NEW_PRIVS, 1).map(drop)
}

/// prctl(2) PR_SET_KEEPCAPS: leaving uid 0 keeps the permitted capabilities until the next exec.
pub(crate) fn keep_capabilities() -> Result<()> {
    prctl(libc::PR_SET_KEEPCAPS, 1).map(drop)
}

/// prctl(2) PR_CAPBSET_DROP.
pub(crate) fn drop_bounding(capability: u32) -> Result<()> {
    prctl(libc::PR_CAPBSET_DROP, capability as usize).map(drop)
}

#[repr(C)]
struct CapabilityHeader {
    version: u32,
    pid: c_int,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct CapabilityData {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

/// capget(2) and capset(2): empties the inheritable set, and with it the ambient one.
pub(crate) fn clear_inheritable() -> Result<()> {
    /// `_LINUX_CAPABILITY_VERSION_3`: two words per set.
    const VERSION: u32 = 0x2008_0522;
    let mut header = CapabilityHeader { version: VERSION, pid: 0 };
    let mut data = [CapabilityData::default(); 2];
    let (head, sets) = (&raw mut header as usize, data.as_mut_ptr() as usize);
    // SAFETY: header and the two words per set are what version 3 reads and writes.
    unsafe { syscall(libc::SYS_capget, [head, sets, 0, 0, 0, 0]) }?;
    if data.iter().all(|word| word.inheritable == 0) {
        return Ok(());
    }
    data.iter_mut().for_each(|word| word.inheritable = 0);
    // SAFETY: as above.
    unsafe { syscall(libc::SYS_capset, [head, sets, 0, 0, 0, 0]) }.map(drop)
}

/// setgroups(2) to none; of this thread alone.
pub(crate) fn clear_groups() -> Result<()> {
    // SAFETY: a list of length 0 is not read.
    unsafe { syscall(libc::SYS_setgroups, [0; 6]) }.map(drop)
}

/// setresgid(2) of all three, then setresuid(2) of all three; of this thread alone.
pub(crate) fn set_ids(uid: u32, gid: u32) -> Result<()> {
    let (uid, gid) = (uid as usize, gid as usize);
    // SAFETY: no pointers.
    unsafe { syscall(libc::SYS_setresgid, [gid, gid, gid, 0, 0, 0]) }?;
    // SAFETY: no pointers.
    unsafe { syscall(libc::SYS_setresuid, [uid, uid, uid, 0, 0, 0]) }.map(drop)
}

/// seccomp(2): installs a filter for this thread; needs no_new_privs.
pub(crate) fn install_filter(filter: &[libc::sock_filter]) -> Result<()> {
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
