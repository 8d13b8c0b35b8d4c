//! The annotations `io.kubernetes.cri.*` of a sandbox's spec (containerd
//! `internal/cri/annotations`).

use std::collections::HashMap;

use crate::config::Pattern;
use crate::protos::cri::PodSandboxConfig;

/// All annotations of the sandbox: its own, and those of the pod's that one of the patterns fits,
/// whose names may be those of resources.
pub(super) fn for_sandbox(
    id: &str,
    pod: &PodSandboxConfig,
    passed: &[Pattern],
) -> HashMap<String, String> {
    let mut annotations = HashMap::with_capacity(12);
    let mut put =
        |name: &str, value: String| annotations.insert(format!("io.kubernetes.cri.{name}"), value);

    if let Some(resources) = pod.linux.resources.as_ref() {
        put("sandbox-cpu-period", resources.cpu_period.to_string());
        put("sandbox-cpu-quota", resources.cpu_quota.to_string());
        put("sandbox-cpu-shares", resources.cpu_shares.to_string());
        put("sandbox-memory", resources.memory_limit_in_bytes.to_string());
    }
    let fits = |name: &str| passed.iter().any(|pattern| pattern.fits(name));
    annotations.extend(
        pod.annotations.iter().filter(|(name, _)| fits(name)).map(|(n, v)| (n.clone(), v.clone())),
    );
    let mut put =
        |name: &str, value: String| annotations.insert(format!("io.kubernetes.cri.{name}"), value);
    put("sandbox-id", id.to_owned());
    put("sandbox-namespace", pod.metadata.namespace.clone());
    put("sandbox-uid", pod.metadata.uid.clone());
    put("sandbox-name", pod.metadata.name.clone());
    put("sandbox-log-directory", pod.log_directory.clone());
    // Nothing in containerd reads it; the key stays for those who list the annotations.
    put("podsandbox.image-name", String::new());
    put("container-type", "sandbox".to_owned());
    annotations
}
