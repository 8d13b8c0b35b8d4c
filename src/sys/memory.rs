//! The allocator of the C library.

use std::ffi::c_int;

/// mallopt(3) M_ARENA_MAX: the allocator keeps at most `arenas` heaps, however many threads
/// allocate. Other C libraries than glibc have one anyhow.
pub(crate) fn limit_arenas(arenas: c_int) {
    #[cfg(target_env = "gnu")]
    // SAFETY: no pointers; it may be called at any time. A refusal leaves the allocator as it was.
    let _ = unsafe { libc::mallopt(libc::M_ARENA_MAX, arenas) };
    #[cfg(not(target_env = "gnu"))]
    let _ = arenas;
}
