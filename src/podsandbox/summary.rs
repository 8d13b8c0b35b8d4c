//! The line of a sandbox in the answer to `pause-sandboxer list`, and the memory of its shim.
//! Callers choose the texts of a line: each has a bound, so that a page of lines fits an answer.

use protobuf::MessageField;

use super::actor::Published;
use super::jobs::Jobs;
use super::machine::Phase;
use crate::error::{StepError, bounded};
use crate::log_context::PodNames;
use crate::protos::cri::PodSandboxConfig;
use crate::protos::inspect::Sandbox;

/// Longest name that is kept of a pod and its like, bytes; no name of Kubernetes is longer.
const LONGEST_NAME: usize = 253;

/// Longest reason in a line, bytes.
const LONGEST_REASON: usize = 1024;

/// The line of a record that recovery could not adopt.
pub fn quarantined(id: &str, reason: &str) -> Sandbox {
    Sandbox {
        id: id.to_owned(),
        state: "quarantined".to_owned(),
        reason: bounded(reason, LONGEST_REASON),
        ..Default::default()
    }
}

/// The line of a sandbox. Blocks: the reason of its end may be in a file.
pub(super) fn summarize(jobs: &Jobs, published: Published) -> Sandbox {
    let pod = jobs.log_context.pod();
    let reason = jobs.end_reason(published.exit).unwrap_or_default();
    Sandbox {
        id: jobs.id().to_string(),
        pod: pod.name.to_string(),
        namespace: pod.namespace.to_string(),
        uid: pod.uid.to_string(),
        state: published.phase.name().to_owned(),
        pid: living(published),
        created_at: MessageField::some(jobs.facts.created_at.into()),
        runtime: bounded(&jobs.facts.runtime.name, LONGEST_NAME),
        failed_cleanups: published.failures,
        reason: bounded(&reason, LONGEST_REASON),
        ..Default::default()
    }
}

/// Memory that the pod's shim has for itself, bytes; `None`: it has none, or it cannot be read.
/// Blocks.
pub(super) fn shim_memory(jobs: &Jobs) -> Option<u64> {
    let failed = |step: &StepError| {
        log::debug!(sandbox = jobs.id().as_str(); "failed to read memory of shim: {step}");
    };
    jobs.shim.private_memory().inspect_err(failed).ok().flatten()
}

/// Process id of the pause process; 0 if it does not run: its pid may have been reused.
fn living(published: Published) -> u32 {
    if matches!(published.phase, Phase::Ready | Phase::Unknown) && published.exit.is_none() {
        published.pid
    } else {
        0
    }
}

/// The pod's names in its CRI config.
pub(super) fn pod_names(pod: &PodSandboxConfig) -> PodNames {
    let name = |text: &str| bounded(text, LONGEST_NAME).into();
    PodNames {
        name: name(&pod.metadata.name),
        namespace: name(&pod.metadata.namespace),
        uid: name(&pod.metadata.uid),
    }
}
