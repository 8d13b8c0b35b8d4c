//! Garbage collection of sandboxes that containerd no longer knows, and of containerd's containers
//! of sandboxes that are gone.
//!
//! If RunPodSandbox is cancelled before Start, or right after the response to Start, CRI drops its
//! record of the sandbox and calls neither Stop nor Shutdown. No client has ever asked for such a
//! sandbox. It is removed when containerd answers twice that it does not know the id, provided that
//! the pod has no shim, and so no container.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use crate::containerd::containers::Containers;
use crate::containerd::{CallError, SandboxStore};
use crate::controller::Controller;
use crate::exit;
use crate::podsandbox::Sandbox;

/// Collects every `interval`, forever.
pub async fn collect(controller: Arc<Controller>, store: SandboxStore, interval: Duration) {
    let mut unknown_once: HashSet<String> = HashSet::new();
    let mut ticks = tokio::time::interval(interval);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    // The first tick completes at once, before containerd had time for a call.
    ticks.tick().await;
    let mut seen: HashSet<String> = HashSet::new();
    loop {
        ticks.tick().await;
        // Only those without a call for a whole interval.
        let candidates: Vec<Arc<Sandbox>> =
            controller.live().into_iter().filter(|s| s.is_gc_candidate()).collect();
        let ids = candidates.iter().map(|sandbox| sandbox.id().to_owned()).collect();
        for sandbox in candidates.into_iter().filter(|sandbox| seen.contains(sandbox.id())) {
            match store.knows(sandbox.id()).await {
                Ok(false) if unknown_once.contains(sandbox.id()) => remove(sandbox).await,
                Ok(false) => {
                    unknown_once.insert(sandbox.id().to_owned());
                }
                Ok(true) => {
                    unknown_once.remove(sandbox.id());
                }
                // containerd may be down, which tells nothing about the sandbox.
                Err(e) => log::debug!(sandbox = sandbox.id(); "failed to query containerd: {e}"),
            }
        }
        unknown_once.retain(|id| HashSet::contains(&ids, id));
        seen = ids;
    }
}

async fn remove(sandbox: Arc<Sandbox>) {
    // A call may have arrived during the query.
    if !sandbox.is_gc_candidate() {
        return;
    }
    log::warn!(sandbox = sandbox.id(); "removing sandbox that containerd does not know");
    if let Err(e) = sandbox.shutdown().await {
        log::error!(
            sandbox = sandbox.id();
            "failed to remove sandbox that containerd does not know: {e}"
        );
    }
}

/// Removes the containers of removed sandboxes of this daemon's state directory: those that a
/// killed daemon has left, or that containerd refused to remove. At once and every `interval`,
/// forever.
pub async fn collect_containers(
    controller: Arc<Controller>,
    containers: Containers,
    interval: Duration,
) {
    let mut failures = 0;
    loop {
        let delay = match remove_containers(&controller, &containers).await {
            Ok(()) => {
                failures = 0;
                interval
            }
            Err(e) => {
                failures += 1;
                let step = e.step();
                log::debug!("failed to remove containers of removed sandboxes; retrying: {step}");
                exit::CONTAINERD.delay(failures)
            }
        };
        tokio::time::sleep(delay).await;
    }
}

async fn remove_containers(
    controller: &Controller,
    containers: &Containers,
) -> Result<(), CallError> {
    let mut result = Ok(());
    for id in containers.own().await?.into_iter().filter(|id| !controller.has(id)) {
        match containers.remove(&id).await {
            Ok(()) => {
                log::info!(sandbox = id.as_str(); "removed stale container record")
            }
            // The others go all the same.
            Err(e) => result = Err(e),
        }
    }
    result
}
