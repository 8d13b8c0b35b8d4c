//! Metrics of a pod's parent cgroup, in containerd's form.
//!
//! CRI asks for them from containerd 2.4 on, every second for every pod. So nothing is looked for:
//! the hierarchies are taken where every node has them, as containerd itself takes them, and no
//! table of mounts is read, which grows with the number of pods.

use std::io;
use std::path::{Component, Path, PathBuf};
use std::time::SystemTime;

use cgroup_metrics::{READ, V1, V2, v1, v2};
use protobuf::Message;
use protobuf::well_known_types::any::Any;

use super::Metric;
use crate::cgroup;
use crate::cgroup::mounts::{ROOT, unified};
use crate::error::{IoContext as _, StepError};

/// Reads the metrics of a pod whose parent cgroup that is, as a plan names it. Blocks.
///
/// # Errors
/// The failed step: the pod has no parent cgroup, or it is gone, or one of its files cannot be
/// read. A file that the kernel does not have is no error.
pub fn read_metrics(cgroup_parent: &str) -> Result<Metric, StepError> {
    let parent = parent(cgroup_parent)?;
    let root = Path::new(ROOT);
    let unified = unified(root)?;
    let timestamp = SystemTime::now();
    let data = if unified {
        any(V2, &v2::read(root, &parent).map_err(failed_read)?)
    } else {
        any(V1, &v1::read(root, &parent).map_err(failed_read)?)
    };
    Ok(Metric { timestamp, data: data? })
}

fn any(name: &str, message: &impl Message) -> Result<Any, StepError> {
    let value = message.write_to_bytes().map_err(io::Error::other).step("encode metrics")?;
    Ok(Any { type_url: name.to_owned(), value, ..Default::default() })
}

/// The parent cgroup's path below the root of a hierarchy.
fn parent(cgroup_parent: &str) -> Result<PathBuf, StepError> {
    if cgroup_parent.is_empty() {
        // The built-in controller gives the same answer.
        return Err(StepError::new(
            READ,
            io::Error::new(io::ErrorKind::NotFound, "the pod has no cgroup_parent"),
        ));
    }
    if cgroup::slice::is_slice(cgroup_parent) {
        let refused = |fault| {
            StepError::at(READ, cgroup_parent, io::Error::new(io::ErrorKind::InvalidInput, fault))
        };
        return cgroup::slice::path(cgroup_parent).map_err(refused);
    }
    // Create has refused everything else; nothing but this leads out of the hierarchy.
    let plain = |part| matches!(part, Component::Normal(_));
    Ok(Path::new(cgroup_parent).components().filter(|part| plain(*part)).collect())
}

/// The failed step of a read of `cgroup_metrics`.
fn failed_read(e: cgroup_metrics::Error) -> StepError {
    StepError::at(READ, e.path, e.source)
}

#[cfg(test)]
mod tests;
