//! An unexpected exit of the pause process.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kit::cri::api;
use kit::{ContainerSpec, PodSpec, until};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::harness::{Bench, Case, cases};

/// How long the exit of a pause process may take to be published.
const SOON: Duration = Duration::from_secs(10);
/// 128 + SIGKILL.
const KILLED: u32 = 137;

pub(crate) fn cases() -> Vec<Case> {
    cases![both: killed_pause, killed_pause_of_an_idle_pod]
}

/// Promise: exit_is_published_once.
async fn killed_pause(bench: Bench) -> Result<()> {
    bench.builtin_leaves(
        &["process", "shim socket"],
        "containerd ends the pod's shim with the pause's task, which the shim refuses while it \
         still has a container, and never again",
    );
    killed(&bench, true).await
}

/// Promise: exit_is_published_once.
async fn killed_pause_of_an_idle_pod(bench: Bench) -> Result<()> {
    killed(&bench, false).await
}

/// Kills the pause of a new pod and checks everything that is reported of it, until the pod is
/// removed.
async fn killed(bench: &Bench, with_container: bool) -> Result<()> {
    use api::ContainerEventType::{CONTAINER_DELETED_EVENT, CONTAINER_STOPPED_EVENT};

    let events = bench.node.events().await?;
    let pod = bench.run(PodSpec::new("killed").pid(api::NamespaceMode::POD)).await?;
    let container = match with_container {
        true => Some(pod.run(ContainerSpec::sleeping("main")).await?),
        false => None,
    };
    let controller = bench.node.controller(bench.handler);
    let id = pod.id().to_owned();
    let waiting = tokio::spawn(async move { controller.wait(&id).await });

    kill(Pid::from_raw(i32::try_from(pod.pause_pid().await?)?), Signal::SIGKILL)?;

    until("the pod is not ready", SOON, async || {
        ensure!(!pod.is_ready().await?, "it is ready");
        Ok(())
    })
    .await?;
    let waited = tokio::time::timeout(kit::patient(SOON), waiting)
        .await
        .context("a Wait from before the end")???;
    ensure!(
        waited.exit_status == KILLED,
        "exit status {} for a Wait from before the end",
        waited.exit_status
    );
    let again = bench
        .node
        .controller(bench.handler)
        .wait(pod.id())
        .await
        .context("a Wait after the end")?;
    ensure!(
        again.exit_status == KILLED,
        "exit status {} for a Wait after the end",
        again.exit_status
    );
    ensure!(
        again.exited_at == waited.exited_at,
        "exited at {:?}, then at {:?}",
        waited.exited_at,
        again.exited_at
    );
    events.until(pod.id(), CONTAINER_STOPPED_EVENT, SOON).await?;
    if let Some(container) = container {
        // It shared the PID namespace, and so has gone with process 1.
        ensure!(
            container.exited(SOON).await? == i32::try_from(KILLED)?,
            "another exit code of the container"
        );
    }
    ensure!(
        pod.run(ContainerSpec::sleeping("late")).await.is_err(),
        "a container was started in a dead pod"
    );

    pod.stop().await?;
    bench.node.cri().remove_pod_sandbox(pod.id()).await?;
    events.until(pod.id(), CONTAINER_DELETED_EVENT, SOON).await?;
    let published = events.of(pod.id())?;
    let stopped = published.iter().filter(|kind| **kind == CONTAINER_STOPPED_EVENT).count();
    ensure!(stopped == 1, "{stopped} stopped events: {published:?}");
    pod.clear().await
}
