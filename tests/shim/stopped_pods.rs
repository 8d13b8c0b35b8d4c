//! Pods that are stopped and not removed, as completed ones are for as long as their objects exist:
//! of any kind, they keep no shim.

use std::fs;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use kit::{Container, ContainerSpec, Pod, until};
use nix::sys::signal::Signal;

use crate::harness::{
    Case, Harness, SOON, cases_of_both, inside, no_shim, none, not_ready, one_shim, removed, shims,
    signal,
};

pub(crate) fn cases() -> Vec<Case> {
    cases_of_both![
        a_stopped_pod_keeps_no_shim,
        a_pod_whose_pause_has_ended_keeps_no_shim,
        a_pod_that_ends_while_containerd_is_down_has_no_shim,
    ]
}

/// The pod is stopped and has no shim, and its containers are still what they were.
async fn rests(pod: &Pod, containers: &[(&Container, i32)]) -> Result<()> {
    none(&shims(pod)?).context("it has a shim")?;
    ensure!(!pod.is_ready().await?, "it is ready");
    for (container, code) in containers {
        let status = container.status().await?;
        ensure!(status.exit_code == *code, "{}: {status:?}", container.id());
    }
    Ok(())
}

/// CRI does not call Stop for a pod that it knows to have ended.
async fn a_pod_whose_pause_has_ended_keeps_no_shim(harness: Arc<Harness>) -> Result<()> {
    let pod = harness.pod("ended").await?;
    let container = pod.run(ContainerSpec::sleeping("a")).await?;
    one_shim(&pod).await.context("with a container that runs")?;
    signal(pod.pause_pid().await?, Signal::SIGKILL)?;
    until("not ready", SOON, async || not_ready(&pod).await).await?;
    container.stop().await?;
    container.remove().await?;
    no_shim(&pod).await.context("after the last container")?;
    removed(&pod).await
}

/// The pods differ in what the shim has in it when the pause ends: a container that ends too, one
/// that has ended before, and none. containerd connects to the shims of all of them when it starts.
async fn a_pod_that_ends_while_containerd_is_down_has_no_shim(harness: Arc<Harness>) -> Result<()> {
    let node = &harness.node;
    let (both, before, idle) =
        (harness.pod("both").await?, harness.pod("before").await?, harness.pod("idle").await?);
    let running = both.run(ContainerSpec::sleeping("a")).await?;
    let ended = before.run(ContainerSpec::sh("a", "exit 3")).await?;
    ensure!(ended.exited(SOON).await? == 3, "its exit code");
    let deleted = idle.run(ContainerSpec::sleeping("a")).await?;
    harness.bring_shim(&idle).await?;
    deleted.stop().await?;
    deleted.remove().await?;
    let pods = [both, before, idle];
    let mut pauses = Vec::new();
    for pod in &pods {
        pauses.push(pod.pause_pid().await?);
    }
    node.stop_containerd().await?;
    for process in inside(running.id())? {
        signal(process.pid, Signal::SIGKILL)?;
    }
    for pause in pauses {
        signal(pause, Signal::SIGKILL)?;
    }
    for pod in &pods {
        until("the daemon has seen the exit", SOON, async || {
            let status = node.sandboxer().status(pod.id(), false).await?;
            ensure!(status.state == "SANDBOX_NOTREADY", "{status:?}");
            Ok(())
        })
        .await?;
    }
    node.start_containerd().await?;
    for pod in &pods {
        until("not ready", SOON, async || not_ready(pod).await).await?;
        no_shim(pod).await.context("after containerd's start")?;
    }
    // Nor does a later question bring one. The runtime's shim has lost the exit code.
    let code = running.exited(SOON).await?;
    rests(&pods[0], &[(&running, code)]).await?;
    rests(&pods[1], &[(&ended, 3)]).await?;
    for pod in &pods {
        none_comes(pod).await?;
        removed(pod).await?;
    }
    Ok(())
}

/// Containers and tasks are listed, which asks each shim that containerd knows; there is none.
async fn none_comes(pod: &Pod) -> Result<()> {
    crate::container_record::task_of(pod)?;
    none(&shims(pod)?).context("a shim has come")
}

/// Promise: idle_pod_has_no_shim.
async fn a_stopped_pod_keeps_no_shim(harness: Arc<Harness>) -> Result<()> {
    let (pod, other) = (harness.pod("completed").await?, harness.pod("other").await?);
    let neighbour = other.run(ContainerSpec::sleeping("n")).await?;
    let completed = pod.run(ContainerSpec::sh("a", "exit 3")).await?;
    ensure!(completed.exited(SOON).await? == 3, "its exit code");
    let stopped = pod
        .run(ContainerSpec::sh("b", "trap 'exit 4' TERM; while true; do sleep 0.1; done"))
        .await?;
    one_shim(&pod).await.context("with a container that runs")?;
    stopped.stop().await?;
    pod.stop().await?;
    no_shim(&pod).await.context("after the stop")?;
    let code = stopped.status().await?.exit_code;
    let containers = [(&completed, 3), (&stopped, code)];
    rests(&pod, &containers).await?;
    // A daemon that is killed before it has seen this end leaves it to the next one, as a failure.
    until("the daemon has seen the end of the shim", SOON, async || {
        let log = fs::read_to_string(harness.node.layout().sandboxer_log())?;
        let seen = |line: &str| line.contains("empty shim exited") && line.contains(pod.id());
        ensure!(log.lines().any(seen), "it says nothing");
        Ok(())
    })
    .await?;
    harness.restart().await?;
    rests(&pod, &containers).await.context("after a restart of the sandboxer")?;
    harness.node.kill_containerd()?;
    harness.node.start_containerd().await?;
    rests(&pod, &containers).await.context("after a restart of containerd")?;
    // kubelet stops a pod more than once, and a container that has exited.
    pod.stop().await?;
    stopped.stop().await?;
    completed.remove().await?;
    rests(&pod, &[(&stopped, code)]).await?;
    removed(&pod).await?;
    ensure!(neighbour.sh("echo hello").await?.trim() == "hello", "the other pod's container");
    removed(&other).await?;
    let log = fs::read_to_string(harness.node.layout().sandboxer_log())?;
    let error = log.lines().find(|line| {
        line.contains(pod.id())
            && (line.contains(" error ")
                || line.contains("killing shim")
                || line.contains("too soon"))
    });
    ensure!(error.is_none(), "{error:?}");
    Ok(())
}
