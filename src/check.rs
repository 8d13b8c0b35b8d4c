//! Whether the daemon can work on this node: the part of `pause-sandboxer check` that needs the
//! daemon's own code.
//!
//! Each module reads a part of the node and passes it to a pure function, which makes the
//! [`Finding`]s. `smoke` starts and kills one pause process, and makes and removes its cgroups, to
//! test what the kernel and its security modules permit.

use node::check::Finding;

use crate::config::Config;

mod capabilities;
mod cgroup;
mod kernel;
mod mounts;
mod program;
mod shims;
mod smoke;

pub use shims::{examine as shims, inheritance};

/// Examines the node, in the order in which problems must be solved.
pub async fn run(config: &Config) -> Vec<Finding> {
    let mut findings = kernel::examine(config);
    findings.extend(capabilities::examine(config));
    findings.extend(cgroup::examine());
    findings.extend(smoke::examine(config).await);
    findings.extend(mounts::examine(config));
    findings.extend(program::examine(config));
    findings
}

/// A file's text, or the finding that it cannot be read.
fn read_file(subject: &'static str, path: &str) -> Result<String, Finding> {
    std::fs::read_to_string(path).map_err(|e| {
        Finding::fail(subject, format!("read {path}: {e}"), "mount /proc and /sys as usual")
    })
}
