//! What is known of critest's cases.

use anyhow::{Context, Result};

/// Cases that are not run. One wants an image by its digest, which none that is made here can have.
/// Two skip themselves by chance and leave pods behind, because containerd loses containers that
/// are created while a plugin of NRI connects.
pub(crate) const NOT_RUN: [&str; 3] = [
    "[k8s.io] Image Manager public image with digest should be pulled and removed [Conformance]",
    "[k8s.io] NRI plugin synchronization should receive a callback for container created during \
     the Synchronize call",
    "[k8s.io] NRI plugin synchronization should receive information about all containers without \
     the race condition during initialization",
];

/// How many cases at least pass with this sandboxer, by the beginning of containerd's version:
/// a case that none runs any more, or that all fail, is no success. Where the kernel has AppArmor
/// there are more. Older releases than 2.3 have none: their NRI leaves a pod whose plugin fails.
const FLOORS: [(&str, usize); 2] = [("2.3.", 123), ("2.4.", 124)];

/// That number for a version of containerd.
///
/// # Errors
/// The version has none.
pub(crate) fn floor(version: &str) -> Result<usize> {
    let floor = FLOORS.iter().find(|(release, _)| version.starts_with(release));
    Ok(floor.with_context(|| format!("containerd {version} has no floor in known.rs"))?.1)
}
