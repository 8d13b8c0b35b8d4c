//! Sandboxes that containerd has forgotten.
//!
//! When RunPodSandbox is given up before Start, or right after Start was answered, CRI drops its
//! record of the sandbox and asks for neither Stop nor Shutdown. Such a sandbox is one that nobody
//! has ever asked about. It is removed when containerd itself says, twice, that it does not know
//! the id, and the pod has no shim, so no container either.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use crate::containerd::Store;
use crate::controller::Controller;
use crate::podsandbox::Sandbox;

/// Looks for forgotten sandboxes every `interval`, for ever.
pub async fn collect(controller: Arc<Controller>, store: Store, interval: Duration) {
    let mut suspects: HashSet<String> = HashSet::new();
    let mut ticks = tokio::time::interval(interval);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    // The first tick comes at once, when containerd had no time to ask for anything.
    ticks.tick().await;
    let mut seen: HashSet<String> = HashSet::new();
    loop {
        ticks.tick().await;
        // Only those that nobody has asked about for a whole interval.
        let unasked: Vec<Arc<Sandbox>> =
            controller.live().into_iter().filter(|s| s.is_unasked()).collect();
        let ids = unasked.iter().map(|sandbox| sandbox.id().to_owned()).collect();
        for sandbox in unasked.into_iter().filter(|sandbox| seen.contains(sandbox.id())) {
            match store.knows(sandbox.id()).await {
                Ok(false) if suspects.contains(sandbox.id()) => end(sandbox).await,
                Ok(false) => {
                    suspects.insert(sandbox.id().to_owned());
                }
                Ok(true) => {
                    suspects.remove(sandbox.id());
                }
                // containerd may be down; that says nothing about the sandbox.
                Err(e) => log::debug!(sandbox = sandbox.id(); "{e}"),
            }
        }
        suspects.retain(|id| HashSet::contains(&ids, id));
        seen = ids;
    }
}

async fn end(sandbox: Arc<Sandbox>) {
    // Asked about while containerd was answering.
    if !sandbox.is_unasked() {
        return;
    }
    log::warn!(sandbox = sandbox.id(); "containerd does not know it and nobody ever asked for it: it is removed");
    if let Err(e) = sandbox.shutdown().await {
        log::error!(sandbox = sandbox.id(); "{e}");
    }
}
