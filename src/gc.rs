//! Garbage collection of sandboxes that containerd does not know, and of containerd's containers of
//! sandboxes that are gone.
//!
//! CRI drops its record of a sandbox without a call of Stop or Shutdown if it fails between Create
//! and Start, for example at the pull of the pause image, and if RunPodSandbox is cancelled right
//! after the response to Start. containerd stores a sandbox before it calls Create, and as long as
//! it may call again. One that it does not know is removed when it is older than an interval, and
//! either never started, or without a shim, and so without containers, and no client has ever asked
//! for its state.

use std::future::pending;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use crate::containerd::containers::Containers;
use crate::containerd::{CallError, GrpcEndpoint};
use crate::controller::Controller;
use crate::exit;
use crate::podsandbox::Sandbox;

/// Collects at once and every `interval`, forever.
pub async fn collect(controller: Arc<Controller>, containerd: GrpcEndpoint, interval: Duration) {
    let mut ticks = tokio::time::interval(interval);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let is_due = |sandbox: &Arc<Sandbox>| sandbox.is_gc_candidate() && sandbox.age() > interval;
        for sandbox in controller.live().into_iter().filter(is_due) {
            match containerd.knows(sandbox.id()).await {
                Ok(false) => remove(sandbox).await,
                Ok(true) => {}
                // containerd may be down, which tells nothing about any sandbox.
                Err(e) => {
                    log::debug!(sandbox = sandbox.id(); "failed to query containerd: {e}");
                    break;
                }
            }
        }
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
    loop {
        exit::retry(exit::CONTAINERD, pending, async |_| {
            match remove_containers(&controller, &containers).await {
                Ok(()) => ControlFlow::Break(()),
                Err(e) => {
                    let step = e.step();
                    log::debug!(
                        "failed to remove containers of removed sandboxes; retrying: {step}"
                    );
                    ControlFlow::Continue(())
                }
            }
        })
        .await;
        tokio::time::sleep(interval).await;
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
            // The other containers are removed all the same.
            Err(e) => result = Err(e),
        }
    }
    result
}
