//! Known results of critest's cases.

use anyhow::{Context, Result};

/// Cases that fail by chance with all three, which are tried again.
pub(crate) const FLAKY: [&str; 0] = [];

/// Cases that cannot run here, and why.
pub(crate) const CANNOT_RUN: [(&str, &str); 3] = [
    (
        "[k8s.io] Image Manager public image with digest should be pulled and removed \
         [Conformance]",
        "it wants one image by its digest, which none that is made here can have",
    ),
    (
        "[k8s.io] NRI plugin synchronization should receive a callback for container created \
         during the Synchronize call",
        LOST_BY_NRI,
    ),
    (
        "[k8s.io] NRI plugin synchronization should receive information about all containers \
         without the race condition during initialization",
        LOST_BY_NRI,
    ),
];

const LOST_BY_NRI: &str =
    "containerd loses containers created while a plugin connects: it skips itself by chance";

/// How many cases at least pass with each of the three, by the beginning of containerd's version:
/// a case that none runs any more, or that all fail, is no success. Where the kernel has AppArmor
/// there are more.
const FLOORS: [(&str, usize); 4] = [("2.0.", 105), ("2.1.", 105), ("2.3.", 112), ("2.4.", 107)];

/// That number for a version of containerd.
///
/// # Errors
/// The version has none.
pub(crate) fn floor(version: &str) -> Result<usize> {
    let floor = FLOORS.iter().find(|(release, _)| version.starts_with(release));
    Ok(floor.with_context(|| format!("containerd {version} has no floor in known.rs"))?.1)
}
