//! The daemon's [`Identity`] of a process, and the boot id in it.

use std::fs;
use std::sync::Arc;

use process_identity::{Stat, pid_namespace};

use super::Identity;
use crate::error::{IoContext, StepError};

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The id of this boot of the node.
///
/// # Errors
/// The file cannot be read.
pub(crate) fn boot_id() -> Result<Arc<str>, StepError> {
    Ok(fs::read_to_string(BOOT_ID).step_at("read", BOOT_ID)?.trim().into())
}

/// Reads the identity of a process that cannot be reaped meanwhile.
///
/// # Errors
/// The failed step.
pub(crate) fn read_identity(pid: u32, boot_id: &Arc<str>) -> Result<Identity, StepError> {
    let start_time = Stat::of_process(pid)
        .map(|stat| stat.start_time)
        .step_at("read", format!("/proc/{pid}/stat"))?;
    let pid_namespace = pid_namespace(pid).step_at("stat", format!("/proc/{pid}/ns/pid"))?;
    Ok(Identity { pid, start_time, pid_namespace, boot_id: boot_id.clone() })
}

/// Whether the process that has the recorded pid now is the recorded one.
///
/// # Errors
/// The failed step.
pub(crate) fn matches(recorded: &Identity) -> Result<bool, StepError> {
    let now = read_identity(recorded.pid, &recorded.boot_id)?;
    Ok(now == *recorded)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_identity_of_this_process_is_read() {
        let boot = boot_id().unwrap();
        let me = read_identity(std::process::id(), &boot).unwrap();
        assert_eq!(me, read_identity(std::process::id(), &boot).unwrap());
        assert!(me.start_time > 0 && me.pid_namespace > 0);
    }
}
