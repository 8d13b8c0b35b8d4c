//! The few numbers of a pod's cgroup that a list of pods shows; [`super::read_metrics`] reads all
//! there are.

use std::path::Path;

use cgroup_metrics::directory::{Directory, of_controller};

use super::{failed_read, parent};
use crate::cgroup::mounts::{ROOT, unified};
use crate::error::StepError;

/// The resource usage of a pod's cgroup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes.
    pub memory: u64,
    /// Microseconds of processor time.
    pub cpu_usec: u64,
    /// Processes and threads; 0 where the kernel does not count them.
    pub tasks: u64,
}

/// Reads it. `None`: the pod has no cgroup of its own. Blocks.
///
/// # Errors
/// The failed step.
pub fn read_usage(cgroup_parent: &str) -> Result<Option<Usage>, StepError> {
    if cgroup_parent.is_empty() {
        return Ok(None);
    }
    let (root, parent) = (Path::new(ROOT), parent(cgroup_parent)?);
    let unified = unified(root)?;
    read(root, &parent, unified).map_err(failed_read)
}

/// Reads the cgroup `parent` below `root`, on cgroup v2 where `unified`.
fn read(root: &Path, parent: &Path, unified: bool) -> Result<Option<Usage>, cgroup_metrics::Error> {
    if unified {
        let Some(directory) = Directory::open(root.join(parent))? else { return Ok(None) };
        return Ok(Some(Usage {
            memory: directory.number("memory.current", u64::MAX)?.unwrap_or_default(),
            cpu_usec: directory.numbers("cpu.stat")?.unwrap_or_default().get("usage_usec"),
            tasks: directory.number("pids.current", u64::MAX)?.unwrap_or_default(),
        }));
    }
    let mut found = false;
    let mut number = |controller, file| -> Result<u64, cgroup_metrics::Error> {
        let Some(directory) = Directory::open(of_controller(root, controller, parent))? else {
            return Ok(0);
        };
        found = true;
        Ok(directory.number(file, u64::MAX)?.unwrap_or_default())
    };
    let usage = Usage {
        memory: number("memory", "memory.usage_in_bytes")?,
        // In nanoseconds.
        cpu_usec: number("cpuacct", "cpuacct.usage")? / 1000,
        tasks: number("pids", "pids.current")?,
    };
    Ok(found.then_some(usage))
}
