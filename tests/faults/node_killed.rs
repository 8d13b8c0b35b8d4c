//! The daemon is killed at system calls of its part in what kubelet asks of containerd: a pod is
//! run, its first container is run, it is stopped, it is removed. Whatever the call has answered,
//! kubelet can go ahead after the next start of the daemon, and containerd has nothing of the pod
//! in the end.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use kit::cri::api;
use kit::machine::processes;
use kit::{ContainerSpec, Handler, Node, Pod, PodSpec, Thing, until};

use crate::harness::{Case, on_node};
use crate::tracer::{Seen, Tracer};

/// A machine as slow as this is not what is tested.
const LIMIT: Duration = Duration::from_secs(400);
/// Time for steps that take no time on an idle machine.
const SOON: Duration = Duration::from_secs(20);

pub(crate) fn cases() -> Vec<Case> {
    let cases = on_node![
        node_killed_in_run_pod_sandbox,
        node_killed_in_the_first_container,
        node_killed_in_stop_pod_sandbox,
        node_killed_in_remove_pod_sandbox,
    ];
    cases.into_iter().map(|case| case.within(LIMIT)).collect()
}

/// Which of the calls of a RunPodSandbox: a sample of those at which the cases without containerd
/// kill.
const EVERY: usize = 6;

/// Promise: kill_at_any_call_loses_nothing.
async fn node_killed_in_run_pod_sandbox(node: Arc<Node>) -> Result<()> {
    let before = node.snapshot()?;
    let mut killed = 0;
    for nth in (1..).step_by(EVERY) {
        let home = node.prepare(PodSpec::new("killed"))?;
        let tracer = Tracer::attach(node.sandboxer_pid()?, nth)?;
        let running = node.cri().run_pod_sandbox(home.config(), Handler::Ours.name()).await;
        let seen = tracer.finish()?;
        let at = seen.calls.last().cloned().unwrap_or_default();
        if seen.killed {
            killed += 1;
            node.kill_sandboxer()?;
            node.start_sandboxer().await?;
        }
        let id = match running {
            // Killed after Start was answered, or not at all: it is whole.
            Ok(id) => id,
            // Kubelet asks again, and containerd has cleaned up by then.
            Err(_) => until("the same pod again", Duration::from_secs(20), async || {
                for pod in node.cri().list_pod_sandbox(api::PodSandboxFilter::new()).await? {
                    node.cri().stop_pod_sandbox(&pod.id).await?;
                    node.cri().remove_pod_sandbox(&pod.id).await?;
                }
                Ok(node.cri().run_pod_sandbox(home.config(), Handler::Ours.name()).await?)
            })
            .await
            .with_context(|| format!("killed at call {nth}: {at}"))?,
        };
        let pod = Pod::new(&node, Handler::Ours, home, id);
        ensure!(pod.is_ready().await?, "killed at call {nth}: {at}: not ready");
        let container = pod.run(ContainerSpec::sleeping("main")).await?;
        ensure!(
            container.sh("echo runs").await? == "runs\n",
            "killed at call {nth}: {at}: the container does not run"
        );
        pod.remove().await.with_context(|| format!("killed at call {nth}: {at}"))?;
        node.settles_to(&before).await.with_context(|| format!("killed at call {nth}: {at}"))?;
        if !seen.killed {
            ensure!(killed > 5, "killed only {killed} times");
            return Ok(());
        }
    }
    bail!("unreachable: there are not that many calls")
}

/// The traced part of the life of a pod with a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// CreateContainer and StartContainer of the first container, which bring the pod's shim and
    /// the sandbox's task.
    Container,
    Stop,
    /// Of a pod that is stopped.
    Remove,
}

/// Promise: kill_at_any_call_loses_nothing.
async fn node_killed_in_the_first_container(node: Arc<Node>) -> Result<()> {
    let calls = at_calls(&node, Part::Container, 3).await?;
    have(&calls, &["shim.json", "clone", "child: execve"])
}

/// Promise: kill_at_any_call_loses_nothing.
async fn node_killed_in_stop_pod_sandbox(node: Arc<Node>) -> Result<()> {
    let calls = at_calls(&node, Part::Stop, 1).await?;
    have(&calls, &["pidfd_send_signal", "waitid", "stage.json", "umount2", "shim.json"])
}

/// Promise: kill_at_any_call_loses_nothing.
async fn node_killed_in_remove_pod_sandbox(node: Arc<Node>) -> Result<()> {
    let calls = at_calls(&node, Part::Remove, 1).await?;
    have(&calls, &["/shims/", "record.json"])
}

fn have(calls: &[String], needed: &[&str]) -> Result<()> {
    for needed in needed {
        let seen = calls.iter().any(|call| call.contains(needed));
        ensure!(seen, "nothing of {needed} among {calls:#?}");
    }
    Ok(())
}

/// Kills at the first call, and at each `every`th after it, until the part is done before the next
/// comes. Answers the calls of the last, whole run.
async fn at_calls(node: &Arc<Node>, part: Part, every: usize) -> Result<Vec<String>> {
    let (before, begun) = (node.snapshot()?, Instant::now());
    for (killed, nth) in (1..).step_by(every).enumerate() {
        let seen = one(node, part, nth).await.with_context(|| format!("{part:?}, call {nth}"))?;
        let at = seen.calls.last().cloned().unwrap_or_default();
        let settled = node.settles_to(&before).await;
        settled.with_context(|| format!("{part:?}, killed at call {nth}: {at}"))?;
        if !seen.killed {
            let (calls, took) = (seen.calls.len(), begun.elapsed().as_secs_f32());
            eprintln!("{part:?}: killed at {killed} of {calls} calls, {took:.1} s");
            ensure!(killed > 2, "killed only {killed} times");
            return Ok(seen.calls);
        }
    }
    bail!("unreachable: there are not that many calls")
}

/// One life of a pod, in which the daemon is killed at the `nth` call of `part`, if there are as
/// many.
async fn one(node: &Arc<Node>, part: Part, nth: usize) -> Result<Seen> {
    let pod = node.run(Handler::Ours, PodSpec::new("killed").host_network()).await?;
    if part != Part::Container {
        pod.run(ContainerSpec::sleeping("main")).await?;
        has_task(&pod).await?;
    }
    if part == Part::Remove {
        pod.stop().await?;
        has_stopped(&pod).await?;
    }
    let tracer = Tracer::attach(node.sandboxer_pid()?, nth)?;
    // It may fail with the daemon; what counts is what is found afterwards.
    let answer = match part {
        Part::Container => pod.run(ContainerSpec::sleeping("main")).await.map(drop),
        Part::Stop => pod.stop().await,
        Part::Remove => node.cri().remove_pod_sandbox(pod.id()).await.map_err(Into::into),
    };
    if answer.is_ok() {
        follow(&pod, part, &tracer).await?;
    }
    let seen = tracer.finish()?;
    if seen.killed {
        node.kill_sandboxer()?;
        node.start_sandboxer().await?;
    } else {
        answer.context("without a kill")?;
    }
    if part == Part::Container {
        let at = seen.calls.last();
        runs_again(&pod).await.with_context(|| format!("after a kill at {at:?}"))?;
    }
    // Kubelet asks again.
    until("the pod is removed", SOON, async || {
        pod.stop().await?;
        node.cri().remove_pod_sandbox(pod.id()).await.context("RemovePodSandbox")
    })
    .await?;
    pod.clear().await?;
    Ok(seen)
}

/// What follows the answer is part of it, unless the daemon is killed in it.
async fn follow(pod: &Pod, part: Part, tracer: &Tracer) -> Result<()> {
    until("what follows the answer", SOON, async || {
        if tracer.is_finished() {
            return Ok(());
        }
        match part {
            Part::Container => task(pod, has_record()).await,
            Part::Stop => stopped(pod).await,
            Part::Remove => {
                let left = records(pod).await?;
                ensure!(left.is_empty(), "{left:?}");
                Ok(())
            }
        }
    })
    .await
}

/// The kill has ended neither the pod nor its first container, if that was created; and another
/// one runs.
async fn runs_again(pod: &Pod) -> Result<()> {
    ensure!(pod.is_ready().await?, "it is not ready");
    let filter = api::ContainerFilter { pod_sandbox_id: pod.id().to_owned(), ..Default::default() };
    let first = pod.node().cri().list_containers(filter).await?;
    let another = ContainerSpec::sleeping("main").attempt(1);
    let container = until("another container", SOON, async || pod.run(another.clone()).await);
    ensure!(container.await?.sh("echo runs").await? == "runs\n", "it does not run");
    for listed in first {
        let running = api::ContainerState::CONTAINER_RUNNING;
        let status = pod.node().cri().container_status(&listed.id).await?;
        ensure!(
            listed.state.enum_value() != Ok(running) || status.state.enum_value() == Ok(running),
            "the first container has ended: {status:?}"
        );
    }
    has_task(pod).await
}

async fn has_task(pod: &Pod) -> Result<()> {
    until("the sandbox's task", SOON, async || task(pod, has_record()).await).await
}

/// Whether containerd has a record of the sandbox with a task: not with the runtime's shim.
fn has_record() -> bool {
    kit::shim::setting() == "own"
}

async fn has_stopped(pod: &Pod) -> Result<()> {
    until("neither shim nor its record nor task", SOON, async || stopped(pod).await).await
}

async fn stopped(pod: &Pod) -> Result<()> {
    let named = format!("-id {} ", pod.id());
    let shim = processes::all()?.into_iter().find(|process| process.command.contains(&named));
    ensure!(shim.is_none(), "{shim:?}");
    // Its record goes after it.
    let state = pod.node().layout().sandboxer_state();
    let record = state.join("sandboxes").join(pod.id()).join("shim/shim.json");
    ensure!(!record.exists(), "{} is there", record.display());
    task(pod, false).await
}

async fn task(pod: &Pod, wanted: bool) -> Result<()> {
    let records = records(pod).await?;
    let found = records.iter().any(|record| record.kind() == "task");
    ensure!(found == wanted, "{records:?}");
    Ok(())
}

/// containerd's records of the sandbox.
async fn records(pod: &Pod) -> Result<Vec<Thing>> {
    let all = pod.node().records().await?.into_iter();
    Ok(all.filter(|thing| matches!(thing, Thing::Record(id, _) if id == pod.id())).collect())
}
