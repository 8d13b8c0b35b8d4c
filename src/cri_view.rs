//! How many running pods CRI lists as NotReady.
//!
//! containerd decides when it starts: if no daemon takes its connection then, it lists the pods of
//! this sandboxer as NotReady until its next start, although it waits for their exit and the daemon
//! answers their status.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::containerd::cri::CriClient;
use crate::containerd::protos::cri::PodSandboxState::SANDBOX_NOTREADY;
use crate::controller::Controller;
use crate::podsandbox::Phase;

/// Counts at once and every `interval`, forever. A pod that starts or ends may count for a moment.
pub async fn count(controller: Arc<Controller>, containerd: &Path, interval: Duration) {
    let cri = CriClient::new(containerd);
    let mut ticks = tokio::time::interval(interval);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let mut pods = match cri.pods().await {
            Ok(pods) => pods,
            // The last number stays: a containerd that is down tells nothing about any pod.
            Err(step) => {
                log::debug!("failed to compare pods with CRI: {step}");
                continue;
            }
        };
        pods.retain(|pod| pod.state.enum_value() == Ok(SANDBOX_NOTREADY));
        let not_ready: BTreeSet<&str> = pods.iter().map(|pod| pod.id.as_str()).collect();
        let live = controller.live();
        let runs = live
            .iter()
            .filter(|sandbox| not_ready.contains(sandbox.id()) && sandbox.phase() == Phase::Ready);
        let number = runs.count().try_into().unwrap_or(i64::MAX);
        controller.telemetry().not_ready_in_cri.set(number);
    }
}
