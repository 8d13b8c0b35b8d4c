//! The sandbox as a container with a task in containerd: like the built-in controller's, through
//! restarts, and gone with the pod. A pod never depends on it.

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use kit::machine::processes::stop;
use kit::{ContainerSpec, Handler, Node, Pod, PodSpec, until};
use nix::sys::signal::Signal;

use crate::harness::{
    Case, Harness, Kind, SOON, cases, end_empty, no_shim, none, not_ready, one_shim, removed,
    shims, signal,
};

/// How long the end of a pod waits for the deletion of its task, if the shim hangs.
const TASK_DELETED: Duration = Duration::from_secs(2);

pub(crate) fn cases() -> Vec<Case> {
    cases![Kind::Own =>
        a_sandbox_is_a_container_with_a_task_as_the_built_ins,
        a_pod_without_containers_has_no_task,
        it_stays_through_restarts_of_both_daemons,
        the_next_shim_serves_the_task_again,
        a_signal_to_the_task_reaches_the_pause,
        it_is_removed_when_containerd_was_down_at_the_removal,
        it_is_removed_by_the_next_daemon,
        a_daemon_that_is_stopped_removes_it_before_its_end,
        a_container_of_another_stays,
        many_at_once_are_recorded_and_removed,
        shims_that_hang_delay_no_other_pod,
        the_setting_turns_it_off,
    ]
}

/// The output of `ctr`, in the namespace of CRI.
fn ctr(node: &Node, arguments: &[&str]) -> Result<String> {
    let output = Command::new(node.parts().program("ctr"))
        .arg("--address")
        .arg(node.layout().containerd_socket())
        .args(["--namespace", "k8s.io"])
        .args(arguments)
        .output()
        .context("run ctr")?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "ctr {}: {errors}", arguments.join(" "));
    Ok(String::from_utf8(output.stdout)?)
}

/// containerd's record of a container.
fn info(node: &Node, id: &str) -> Result<serde_json::Value> {
    Ok(serde_json::from_str(&ctr(node, &["containers", "info", id])?)?)
}

pub(crate) fn is_recorded(node: &Node, id: &str) -> Result<bool> {
    Ok(ctr(node, &["containers", "list", "--quiet"])?.lines().any(|line| line == id))
}

/// Pid and status of a task.
fn task(node: &Node, id: &str) -> Result<Option<(u32, String)>> {
    let listed = ctr(node, &["tasks", "list"])?;
    let fields = listed.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    for fields in fields {
        if let [shown, pid, status] = fields[..]
            && shown == id
        {
            return Ok(Some((pid.parse()?, status.to_owned())));
        }
    }
    Ok(None)
}

/// Pid and status of a sandbox's task.
pub(crate) fn task_of(pod: &Pod) -> Result<Option<(u32, String)>> {
    task(pod.node(), pod.id())
}

/// The task runs as the pod's pause.
pub(crate) async fn has_task(pod: &Pod) -> Result<()> {
    let pause = pod.pause_pid().await?;
    until("a task that runs", SOON, async || {
        let task = task(pod.node(), pod.id())?;
        ensure!(task == Some((pause, "RUNNING".to_owned())), "{task:?}, not {pause}");
        Ok(())
    })
    .await
}

pub(crate) async fn is_gone(node: &Node, id: &str) -> Result<()> {
    until("no container of the sandbox", SOON, async || {
        ensure!(!is_recorded(node, id)?, "it is recorded");
        ensure!(task(node, id)?.is_none(), "it has a task");
        Ok(())
    })
    .await
}

/// CRI shows the pod once, and its containers and not the sandbox.
async fn is_shown_once(pod: &Pod, containers: usize) -> Result<()> {
    let cri = pod.node().cri();
    let pods = cri.list_pod_sandbox(Default::default()).await?;
    ensure!(pods.iter().filter(|listed| listed.id == pod.id()).count() == 1, "{pods:?}");
    let all = cri.list_containers(Default::default()).await?;
    let own = all.iter().filter(|listed| listed.pod_sandbox_id == pod.id()).count();
    ensure!(own == containers && !all.iter().any(|listed| listed.id == pod.id()), "{all:?}");
    Ok(())
}

/// Promise: sandbox_is_a_container.
async fn a_sandbox_is_a_container_with_a_task_as_the_built_ins(
    harness: Arc<Harness>,
) -> Result<()> {
    let mut seen = Vec::new();
    for handler in Handler::ALL {
        let spec = PodSpec::new("record").host_network().label("app", "kit").label("tier", "x");
        let pod = harness.node.run(handler, spec).await?;
        pod.run(ContainerSpec::sleeping("a")).await?;
        has_task(&pod).await.with_context(|| format!("{handler:?}"))?;
        is_shown_once(&pod, 1).await?;
        let info = info(&harness.node, pod.id())?;
        ensure!(
            info["Extensions"]["io.cri-containerd.sandbox.metadata"].is_null()
                == (handler == Handler::Ours),
            "{info}"
        );
        let processes = ctr(&harness.node, &["tasks", "ps", pod.id()])?;
        let pids: Vec<&str> =
            processes.lines().skip(1).filter_map(|l| l.split_whitespace().next()).collect();
        let pause = pod.pause_pid().await?.to_string();
        ensure!(pids == [pause.as_str()], "{handler:?}: {processes}");
        // Its cgroup's.
        let metrics = ctr(&harness.node, &["tasks", "metrics", pod.id()])?;
        let names: Vec<String> = metrics
            .lines()
            .filter_map(|line| line.split_whitespace().next())
            .map(str::to_owned)
            .collect();
        let mut facts = BTreeMap::new();
        for key in ["Labels", "Runtime", "Image"] {
            // The built-in has its image.
            if key != "Image" {
                facts.insert(key, info[key].to_string().replace(pod.id(), "ID"));
            }
        }
        let annotations = &info["Spec"]["annotations"];
        for key in ["io.kubernetes.cri.container-type", "io.kubernetes.cri.sandbox-namespace"] {
            facts.insert(key, annotations[key].to_string());
        }
        facts.insert("metrics", names.join(" ").replace(pod.id(), "ID"));
        seen.push(facts);
        removed(&pod).await?;
        is_gone(&harness.node, pod.id()).await?;
    }
    ensure!(seen[0]["Labels"].contains("io.cri-containerd.kind"), "{seen:?}");
    ensure!(seen[0] == seen[1], "the built-in's: {:?}\nours: {:?}", seen[0], seen[1]);
    Ok(())
}

/// It has a container, and neither a task nor a shim.
async fn a_pod_without_containers_has_no_task(harness: Arc<Harness>) -> Result<()> {
    let pod = harness.pod("idle").await?;
    until("recorded", SOON, async || {
        ensure!(is_recorded(&harness.node, pod.id())?, "it is not recorded");
        Ok(())
    })
    .await?;
    ensure!(task(&harness.node, pod.id())?.is_none(), "it has a task");
    none(&shims(&pod)?)?;
    removed(&pod).await?;
    is_gone(&harness.node, pod.id()).await
}

/// Promise: sandbox_is_a_container.
async fn it_stays_through_restarts_of_both_daemons(harness: Arc<Harness>) -> Result<()> {
    let node = &harness.node;
    let pod = harness.pod("stays").await?;
    let container = pod.run(ContainerSpec::sleeping("a")).await?;
    has_task(&pod).await?;
    let files = node.layout().sandbox_files(pod.id());
    let shim = one_shim(&pod).await?;
    harness.restart().await.context("daemon")?;
    has_task(&pod).await.context("after a restart of the sandboxer")?;
    for (round, kill) in [(1, true), (2, false)] {
        if kill {
            node.kill_containerd()?;
        } else {
            node.stop_containerd().await?;
        }
        node.start_containerd().await?;
        has_task(&pod).await.with_context(|| format!("containerd's restart {round}"))?;
        ensure!(pod.is_ready().await?, "not ready after containerd's restart {round}");
        is_shown_once(&pod, 1).await?;
        ensure!(container.sh("echo hello").await?.trim() == "hello", "exec");
        ensure!(one_shim(&pod).await?.pid == shim.pid, "another shim");
        for file in ["hostname", "hosts", "resolv.conf"] {
            ensure!(files.join(file).exists(), "containerd has deleted {file}");
        }
        let log = fs::read_to_string(node.layout().containerd_log())?;
        let lines = log
            .lines()
            .filter(|line| line.contains("Failed to load sandbox") && line.contains(pod.id()));
        ensure!(lines.count() == round, "not one line for each start: {round}");
    }
    let second = pod.run(ContainerSpec::sleeping("b")).await?;
    ensure!(second.sh("echo again").await?.trim() == "again", "exec in a new container");
    harness.restart().await.context("daemon")?;
    has_task(&pod).await.context("after all")?;
    removed(&pod).await?;
    is_gone(node, pod.id()).await?;
    no_shim(&pod).await
}

async fn the_next_shim_serves_the_task_again(harness: Arc<Harness>) -> Result<()> {
    let pod = harness.pod("next").await?;
    let container = pod.run(ContainerSpec::sleeping("a")).await?;
    has_task(&pod).await?;
    let first = one_shim(&pod).await?;
    container.stop().await?;
    container.remove().await?;
    // The shim serves the sandbox's task, on every release.
    ensure!(one_shim(&pod).await?.pid == first.pid, "it has ended");
    end_empty(&pod, &first).await?;
    pod.run(ContainerSpec::sleeping("b")).await?;
    has_task(&pod).await?;
    ensure!(pod.is_ready().await?, "it is not ready");
    // Its death with containers in it is the pod's, and its task's.
    signal(one_shim(&pod).await?.pid, Signal::SIGKILL)?;
    until("not ready", SOON, async || not_ready(&pod).await).await?;
    removed(&pod).await?;
    is_gone(&harness.node, pod.id()).await
}

/// As with the built-in controller: the end of the pause is the pod's.
async fn a_signal_to_the_task_reaches_the_pause(harness: Arc<Harness>) -> Result<()> {
    let pod = harness.pod("signal").await?;
    pod.run(ContainerSpec::sleeping("a")).await?;
    has_task(&pod).await?;
    ctr(&harness.node, &["tasks", "kill", "--signal", "SIGKILL", pod.id()])?;
    until("not ready", SOON, async || not_ready(&pod).await).await?;
    until("no task", SOON, async || {
        let task = task(&harness.node, pod.id())?;
        ensure!(task.is_none(), "{task:?}");
        Ok(())
    })
    .await?;
    ensure!(is_recorded(&harness.node, pod.id())?, "it is not recorded");
    removed(&pod).await?;
    is_gone(&harness.node, pod.id()).await
}

async fn it_is_removed_when_containerd_was_down_at_the_removal(
    harness: Arc<Harness>,
) -> Result<()> {
    let pod = harness.pod("down").await?;
    has_container_and_task(&pod).await?;
    harness.node.stop_containerd().await?;
    let sandboxer = harness.node.sandboxer();
    sandboxer.stop(pod.id()).await?;
    sandboxer.shutdown(pod.id()).await?;
    harness.node.start_containerd().await?;
    is_gone(&harness.node, pod.id()).await?;
    removed(&pod).await
}

async fn has_container_and_task(pod: &Pod) -> Result<()> {
    let container = pod.run(ContainerSpec::sleeping("a")).await?;
    has_task(pod).await?;
    container.stop().await?;
    container.remove().await
}

/// Promise: sandbox_is_a_container.
async fn it_is_removed_by_the_next_daemon(harness: Arc<Harness>) -> Result<()> {
    let pod = harness.pod("left").await?;
    has_container_and_task(&pod).await?;
    let other = harness.pod("other").await?;
    other.run(ContainerSpec::sleeping("a")).await?;
    has_task(&other).await?;
    harness.node.stop_containerd().await?;
    let sandboxer = harness.node.sandboxer();
    sandboxer.stop(pod.id()).await?;
    sandboxer.shutdown(pod.id()).await?;
    harness.node.kill_sandboxer()?;
    // The sandboxer answers through containerd.
    let started = tokio::join!(harness.node.start_containerd(), harness.node.start_sandboxer());
    started.0.and(started.1)?;
    is_gone(&harness.node, pod.id()).await?;
    has_task(&other).await.context("that of a pod that lives")?;
    for pod in [pod, other] {
        removed(&pod).await?;
    }
    Ok(())
}

async fn a_daemon_that_is_stopped_removes_it_before_its_end(harness: Arc<Harness>) -> Result<()> {
    let pod = harness.pod("last").await?;
    has_container_and_task(&pod).await?;
    removed(&pod).await?;
    harness.node.stop_sandboxer().await?;
    ensure!(!is_recorded(&harness.node, pod.id())?, "it is recorded");
    harness.node.start_sandboxer().await
}

/// A container that has the sandbox's id already: the pod runs, and the container stays.
///
/// Promise: foreign_process_survives.
async fn a_container_of_another_stays(harness: Arc<Harness>) -> Result<()> {
    let (node, id) = (&harness.node, "f".repeat(64));
    ctr(node, &["containers", "create", "--label", "of=another", "--rootfs", "/", &id, "true"])?;
    let home = node.prepare(PodSpec::new("foreign").host_network())?;
    let sandboxer = node.sandboxer();
    sandboxer.create(&id, home.config(), "").await?;
    let started = sandboxer.start(&id).await?;
    sandboxer.platform(&id).await?;
    let log = node.layout().sandboxer_log();
    until("it is refused", SOON, async || {
        let text = fs::read_to_string(&log)?;
        let refused = "sandbox has no container or task in containerd: containerd has another";
        ensure!(text.lines().any(|l| l.contains(refused) && l.contains(&id)), "it says nothing");
        Ok(())
    })
    .await?;
    // Until then the script of the harness runs, which a daemon that starts does not take for a
    // shim.
    until("its shim runs", SOON, async || {
        let all = kit::machine::processes::all()?;
        let is_shim =
            |p: &kit::machine::processes::Proc| p.comm == "runc-shim" && p.command.contains(&id);
        ensure!(all.iter().any(is_shim), "there is none");
        Ok(())
    })
    .await?;
    let status = sandboxer.status(&id, false).await?;
    ensure!(status.state == "SANDBOX_READY" && status.pid == started.pid, "{status:?}");
    ensure!(task(node, &id)?.is_none(), "it has a task");
    harness.restart().await?;
    sandboxer.stop(&id).await?;
    sandboxer.shutdown(&id).await?;
    harness.restart().await?;
    let labels = &info(node, &id)?["Labels"];
    ensure!(labels["of"] == "another", "{labels}");
    ctr(node, &["containers", "delete", &id])?;
    home.clear()
}

async fn many_at_once_are_recorded_and_removed(harness: Arc<Harness>) -> Result<()> {
    let many = kit::fewer("pods", 40);
    let run = (0..many).map(|number| {
        let harness = harness.clone();
        async move {
            let pod = harness.pod(&format!("many-{number}")).await?;
            if number % 4 == 0 {
                pod.run(ContainerSpec::sleeping("a")).await?;
            }
            anyhow::Ok((number, pod))
        }
    });
    let pods = futures::future::try_join_all(run).await?;
    for (number, pod) in &pods {
        until("recorded", SOON, async || {
            ensure!(is_recorded(&harness.node, pod.id())?, "{number} is not recorded");
            Ok(())
        })
        .await?;
        if number % 4 == 0 {
            has_task(pod).await?;
        }
    }
    futures::future::try_join_all(pods.iter().map(|(_, pod)| removed(pod))).await?;
    none_is_recorded(&harness.node).await
}

pub(crate) async fn none_is_recorded(node: &Node) -> Result<()> {
    until("no container is left", SOON, async || {
        let left = ctr(node, &["containers", "list", "--quiet"])?;
        if !left.is_empty() {
            bail!("{left}");
        }
        Ok(())
    })
    .await
}

/// The tasks of pods that have ended cannot be deleted while their shims hang.
async fn shims_that_hang_delay_no_other_pod(harness: Arc<Harness>) -> Result<()> {
    const HANGING: usize = 10;
    let mut hanging = Vec::new();
    for number in 0..HANGING {
        let pod = harness.pod(&format!("hangs-{number}")).await?;
        pod.run(ContainerSpec::sleeping("a")).await?;
        has_task(&pod).await?;
        let (shim, pause) = (one_shim(&pod).await?.pid, pod.pause_pid().await?);
        hanging.push((pod, shim, pause));
    }
    let other = harness.pod("other").await?;
    has_container_and_task(&other).await?;
    let tried = ended_beside(&harness, &hanging, &other).await;
    for (_, shim, _) in &hanging {
        // On a slow machine the daemon may have killed it by now.
        let _ = signal(*shim, Signal::SIGCONT);
    }
    for (pod, ..) in &hanging {
        removed(pod).await?;
        is_gone(&harness.node, pod.id()).await?;
    }
    tried?;
    let log = fs::read_to_string(harness.node.layout().sandboxer_log())?;
    for (pod, ..) in &hanging {
        let mut lines = log.lines().filter(|line| line.contains(pod.id()));
        ensure!(!lines.any(|line| line.contains("as a container")), "of a pod that has ended");
    }
    Ok(())
}

/// Stops the shims and ends their pauses. Then another pod ends and a new one comes, as fast as
/// ever.
async fn ended_beside(harness: &Harness, hanging: &[(Pod, u32, u32)], other: &Pod) -> Result<()> {
    for (_, shim, pause) in hanging {
        stop(*shim).await?;
        signal(*pause, Signal::SIGKILL)?;
    }
    for (pod, ..) in hanging {
        until("not ready", SOON, async || not_ready(pod).await).await?;
    }
    let sandboxer = harness.node.sandboxer();
    sandboxer.stop(other.id()).await?;
    let begun = Instant::now();
    sandboxer.shutdown(other.id()).await?;
    let took = begun.elapsed();
    let new = harness.pod("new").await?;
    ensure!(is_recorded(&harness.node, new.id())?, "the new pod is not recorded");
    new.run(ContainerSpec::sleeping("a")).await?;
    let pause = new.pause_pid().await?.to_string();
    // A list of all tasks waits 2 s for each task of a shim that hangs.
    until("a task of its own", SOON, async || {
        let listed = ctr(&harness.node, &["tasks", "ps", new.id()])?;
        ensure!(listed.split_whitespace().any(|word| word == pause), "{listed:?}, not {pause}");
        Ok(())
    })
    .await?;
    removed(&new).await?;
    removed(other).await?;
    is_gone(&harness.node, other.id()).await?;
    ensure!(took < TASK_DELETED, "the other pod's Shutdown took {took:?}");
    Ok(())
}

async fn the_setting_turns_it_off(harness: Arc<Harness>) -> Result<()> {
    let old = harness.pod("before").await?;
    old.run(ContainerSpec::sleeping("a")).await?;
    has_task(&old).await?;
    harness.node.stop_sandboxer().await?;
    let mut command = harness.node.sandboxer_command()?;
    command.args(["--container-record", "false"]);
    harness.node.start_sandboxer_as(command).await?;
    let new = harness.pod("after").await?;
    new.run(ContainerSpec::sleeping("a")).await?;
    removed(&old).await?;
    is_gone(&harness.node, old.id()).await?;
    ensure!(!is_recorded(&harness.node, new.id())?, "it is recorded");
    harness.restart().await?;
    // Its shim serves, and the settings ask for it now.
    has_task(&new).await?;
    removed(&new).await?;
    is_gone(&harness.node, new.id()).await
}
