//! Processes that were killed and hang in the kernel.

use std::path::Path;

/// All threads that are left of a process, by its directory in `/proc`, have SIGKILL pending: they
/// hang in the kernel and never run another instruction of the program.
pub fn is_killed(process: &Path) -> bool {
    const SIGKILL_PENDING: u64 = 1 << (libc::SIGKILL - 1);
    let Ok(threads) = std::fs::read_dir(process.join("task")) else { return false };
    let mut hanging = 0;
    for thread in threads.flatten() {
        // A thread that has gone meanwhile has ended.
        let Ok(status) = std::fs::read_to_string(thread.path().join("status")) else { continue };
        let field = |name: &str| {
            status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().trim()
        };
        if field("State:").starts_with(['Z', 'X']) {
            continue;
        }
        let pending = u64::from_str_radix(field("SigPnd:"), 16).unwrap_or(0);
        if pending & SIGKILL_PENDING == 0 {
            return false;
        }
        hanging += 1;
    }
    hanging > 0
}
