//! Owned shims, and what goes wrong in the middle of a call: the shim, either daemon, or the call
//! itself.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;

use anyhow::{Context as _, Result, bail, ensure};
use kit::machine::cgroup_driver::CgroupDriver;
use kit::machine::{cgroup, processes};
use kit::{Container, ContainerSpec, Pod, until};
use nix::sys::signal::Signal;
use tokio::time::timeout;

use crate::harness::{
    Case, Harness, Kind, SOON, cases, cases_of_both, inside, no_shim, none, not_ready, one_shim,
    removed, signal,
};

pub(crate) fn cases() -> Vec<Case> {
    let mut all = cases![Kind::Own =>
        a_shim_killed_in_the_creation_of_a_container_leaves_nothing,
        a_shim_killed_before_it_creates_a_container_ends_no_pod,
    ];
    all.extend(cases_of_both![
        a_shim_that_dies_under_an_exec_and_a_stop_ends_both,
        a_create_that_hangs_slows_no_other_pod,
        a_start_that_is_refused_leaves_nothing,
        an_interrupted_deletion_leaves_nothing,
        a_daemon_killed_in_the_creation_of_a_container_is_not_missed,
        containerd_killed_in_the_creation_of_a_container_leaves_nothing,
    ]);
    all
}

/// Waits until a process with these arguments runs in the container.
async fn runs(container: &Container, arguments: &str) -> Result<()> {
    until("a process of the container", SOON, async || {
        let all = inside(container.id())?;
        ensure!(
            all.iter().any(|process| process.command.trim() == arguments),
            "no {arguments:?} in {all:?}"
        );
        Ok(())
    })
    .await
}

async fn gone(pod: &Pod) -> Result<()> {
    removed(pod).await?;
    no_shim(pod).await
}

async fn a_shim_that_dies_under_an_exec_and_a_stop_ends_both(harness: Arc<Harness>) -> Result<()> {
    let pod = harness.pod("dying-shim").await?;
    // Does not exit on SIGTERM, and shows that it received it.
    let script = "trap 'sleep 1002 &' TERM; sleep 1003 & while true; do sleep 1; done";
    let container = pod.run(ContainerSpec::sh("a", script)).await?;
    // Until it executes the shell, it is a runtime that ends at SIGTERM.
    runs(&container, "sleep 1003").await?;
    let shim = one_shim(&pod).await?;
    let cri = pod.node().cri();
    let (exec, stop) = (container.sh("sleep 1001"), cri.stop_container(container.id(), SOON * 3));
    let kill = async {
        runs(&container, "sleep 1001").await?;
        runs(&container, "sleep 1002").await?;
        signal(shim.pid, Signal::SIGKILL)
    };
    // Each must end, whether well or not: the container's end is what the one waits for, and the
    // other's command is killed.
    let (exec, _, killed) =
        timeout(SOON * 2, futures::future::join3(exec, stop, kill)).await.context("they hang")?;
    killed?;
    ensure!(exec.is_err(), "the exec has succeeded: {exec:?}");
    until("not ready", SOON, async || not_ready(&pod).await).await?;
    until("no process of the container", SOON, async || none(&inside(container.id())?)).await?;
    let status = harness.node.sandboxer().status(pod.id(), true).await?;
    let reason = status.info.get("reason").context("no reason in the verbose status")?;
    ensure!(reason.contains("shim") && reason.contains(container.id()), "reason: {reason}");
    gone(&pod).await?;
    // The parent that reaps the exec process may be late; a process that has ended is not waited
    // for.
    let log = std::fs::read_to_string(harness.node.layout().sandboxer_log())?;
    let failed = log
        .lines()
        .find(|line| line.contains(pod.id()) && line.contains("failed to clean up container"));
    ensure!(failed.is_none(), "{failed:?}");
    Ok(())
}

/// Promise: container_delays_no_other.
async fn a_create_that_hangs_slows_no_other_pod(harness: Arc<Harness>) -> Result<()> {
    harness.order("proxy")?;
    let (pod, other) = (harness.pod("hangs").await?, harness.pod("other").await?);
    // The sandbox's task is created as well.
    harness.bring_shim(&pod).await?;
    harness.misbehave("Create", "hang 1")?;
    let others = async {
        harness.used_up().await?;
        let container = other.run(ContainerSpec::sleeping("b")).await?;
        ensure!(container.sh("echo runs").await? == "runs\n", "it does not run");
        gone(&other).await
    };
    // The caller gives up when the other pod has come and gone.
    tokio::select! {
        biased;
        hung = pod.run(ContainerSpec::sleeping("a")) => bail!("it does not hang: {:?}", hung.err()),
        done = others => done.context("another pod")?,
    }
    ensure!(pod.is_ready().await?, "the pod ended when its caller gave up");
    gone(&pod).await
}

async fn a_start_that_is_refused_leaves_nothing(harness: Arc<Harness>) -> Result<()> {
    harness.order("proxy")?;
    let pod = harness.pod("refused").await?;
    // The sandbox's task is started as well.
    harness.bring_shim(&pod).await?;
    harness.misbehave("Start", "fail 1")?;
    ensure!(pod.run(ContainerSpec::sleeping("a")).await.is_err(), "the container runs");
    pod.run(ContainerSpec::sleeping("b")).await.context("the next container")?;
    gone(&pod).await
}

/// The shim and containerd continue without it.
async fn a_daemon_killed_in_the_creation_of_a_container_is_not_missed(
    harness: Arc<Harness>,
) -> Result<()> {
    harness.order("proxy")?;
    harness.misbehave("Create", "late 2")?;
    let pod = harness.pod("creation").await?;
    let restart = async {
        harness.used_up().await?;
        harness.restart().await
    };
    let (container, restarted) =
        futures::future::join(pod.run(ContainerSpec::sleeping("a")), restart).await;
    restarted?;
    ensure!(container?.sh("echo runs").await? == "runs\n", "it does not run");
    ensure!(pod.is_ready().await?, "the pod is not ready");
    gone(&pod).await
}

async fn containerd_killed_in_the_creation_of_a_container_leaves_nothing(
    harness: Arc<Harness>,
) -> Result<()> {
    harness.order("proxy")?;
    harness.misbehave("Create", "late 2")?;
    let pod = harness.pod("creation").await?;
    let restart = async {
        harness.used_up().await?;
        harness.node.kill_containerd()?;
        harness.node.start_containerd().await
    };
    let (container, restarted) =
        futures::future::join(pod.run(ContainerSpec::sleeping("a")), restart).await;
    restarted?;
    ensure!(container.is_err(), "the container runs, and its creator was killed");
    ensure!(pod.is_ready().await?, "the pod is not ready");
    let next = pod.run(ContainerSpec::sleeping("b")).await.context("the next container")?;
    ensure!(next.sh("echo runs").await? == "runs\n", "it does not run");
    gone(&pod).await
}

/// A runtime in the middle of a creation: it has made its directory, and has no state yet.
const CREATES: &str = r#"#!/bin/sh
while [ $# -gt 1 ]; do
    [ "$1" != --root ] || root=$2
    shift
done
mkdir -p "$root/$1" && exec sleep 1000
"#;

/// The runtime dies with the shim. Neither a state of its own nor, once containerd has removed it,
/// a bundle names the container then, and the pod lost nothing that ran. Either daemon may be the
/// first to notice: the other one is stopped.
///
/// Promise: killed_shim_leaves_nothing.
async fn a_shim_killed_in_the_creation_of_a_container_leaves_nothing(
    harness: Arc<Harness>,
) -> Result<()> {
    let layout = harness.node.layout();
    let runtime = layout.programs().join("runc");
    fs::create_dir_all(layout.programs())?;
    for late in [harness.node.sandboxer_pid()?, harness.node.containerd_pid()?] {
        let pod = harness.pod("creation").await?;
        harness.bring_shim(&pod).await?;
        let container = pod.create(ContainerSpec::sleeping("a")).await?;
        let id = container.id();
        let cgroup = format!("{}/{id}", pod.config().linux.cgroup_parent);
        let left = layout.top.join("runc/k8s.io").join(id);
        let bundle = layout.state().join("io.containerd.runtime.v2.task/k8s.io").join(id);
        fs::write(&runtime, CREATES)?;
        fs::set_permissions(&runtime, fs::Permissions::from_mode(0o755))?;
        let kill = async {
            until("the runtime works", SOON, async || {
                ensure!(left.exists(), "it has not begun");
                Ok(())
            })
            .await?;
            fs::remove_file(&runtime)?;
            // systemd removes a scope without processes itself.
            if CgroupDriver::chosen() == CgroupDriver::Cgroupfs {
                cgroup::make(&cgroup)?;
            }
            processes::stop(late).await?;
            signal(one_shim(&pod).await?.pid, Signal::SIGKILL)?;
            until("the other one has noticed", SOON, async || {
                ensure!(!bundle.exists() || !left.exists(), "not yet");
                Ok(())
            })
            .await?;
            signal(late, Signal::SIGCONT)
        };
        let cri = harness.node.cri();
        let (started, killed) = futures::future::join(cri.start_container(id), kill).await;
        killed?;
        ensure!(started.is_err(), "the container has started");
        ensure!(pod.is_ready().await?, "the pod ended");
        pod.run(ContainerSpec::sleeping("b")).await.context("the next container")?;
        gone(&pod).await?;
    }
    Ok(())
}

/// containerd makes the bundle before it calls the shim, and cannot remove it before the daemon has
/// looked.
async fn a_shim_killed_before_it_creates_a_container_ends_no_pod(
    harness: Arc<Harness>,
) -> Result<()> {
    let layout = harness.node.layout();
    let pod = harness.pod("creation").await?;
    harness.bring_shim(&pod).await?;
    let container = pod.create(ContainerSpec::sleeping("a")).await?;
    let bundle = layout.state().join("io.containerd.runtime.v2.task/k8s.io").join(container.id());
    let (shim, containerd) = (one_shim(&pod).await?.pid, harness.node.containerd_pid()?);
    let record = harness.record(&pod);
    let recorded = fs::read(&record).ok();
    ensure!(recorded.is_some(), "the shim has no record");
    processes::stop(shim).await?;
    let kill = async {
        until("the bundle", SOON, async || {
            ensure!(bundle.join("sandbox").exists(), "there is none");
            Ok(())
        })
        .await?;
        processes::stop(containerd).await?;
        signal(shim, Signal::SIGKILL)?;
        // The next shim may have its own record already.
        let handled = until("the daemon has looked", SOON, async || {
            ensure!(fs::read(&record).ok() != recorded, "not yet");
            Ok(())
        });
        let handled = handled.await;
        signal(containerd, Signal::SIGCONT)?;
        handled
    };
    let cri = harness.node.cri();
    // If the call had not been sent yet, it reaches the next shim.
    let (_, killed) = futures::future::join(cri.start_container(container.id()), kill).await;
    killed?;
    ensure!(pod.is_ready().await?, "the pod ended");
    pod.run(ContainerSpec::sleeping("b")).await.context("the next container")?;
    gone(&pod).await
}

/// containerd takes a lost connection for the end of the container, and the shim's runtime is
/// killed with the call.
async fn an_interrupted_deletion_leaves_nothing(harness: Arc<Harness>) -> Result<()> {
    harness.order("proxy")?;
    let pod = harness.pod("cut").await?;
    let container = pod.run(ContainerSpec::sleeping("a")).await?;
    harness.misbehave("Delete", "cut 1")?;
    // Well or not.
    drop(container.stop().await);
    harness.used_up().await?;
    removed(&pod).await?;
    no_shim(&pod).await
}
