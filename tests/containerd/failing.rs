//! Pods that cannot be, and callers that do not wait for them. Neither may leave anything.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use kit::cri::api;
use kit::{ContainerSpec, Handler, PAUSE_IMAGE, PodSpec, grpc, until};

use crate::harness::{Bench, Case, cases};

pub(crate) fn cases() -> Vec<Case> {
    cases![
        both: bad_netns, impossible_cgroup, unknown_sysctl, no_pause_image, caller_gives_up,
        caller_gives_up_on_a_host_network_pod
    ]
}

/// containerd hands over the path of a file that is no namespace: its pod network has unmounted it.
///
/// Promise: failed_start_leaves_nothing.
async fn bad_netns(bench: Bench) -> Result<()> {
    let home = bench.node.prepare(PodSpec::new("bad-netns"))?;
    let answer =
        bench.node.cri().run_pod_sandbox(home.config(), bench.handler.with_bad_netns()).await;
    let error = answer.err().context("it ran")?;
    if bench.handler == Handler::Ours {
        // The built-in passes on what runc says, which is not much.
        ensure!(error.message.contains("netns_path"), "the error does not name the field: {error}");
    }
    home.clear().context("after the error")?;
    // The loopback plugin refuses to work on what is no namespace, at the clean-up too; containerd
    // then keeps the pod for kubelet to remove.
    remove_listed(bench.node.cri()).await?;
    then_a_good_one(&bench).await
}

/// The cgroup's parent is below a file.
///
/// Promise: failed_start_leaves_nothing.
async fn impossible_cgroup(bench: Bench) -> Result<()> {
    let parent = format!("{}/cgroup.procs/pod", bench.node.layout().cgroup());
    let error = refused(&bench, PodSpec::new("no-cgroup").cgroup_parent(&parent)).await?;
    ensure!(error.message.contains("cgroup.procs"), "the error does not name the cgroup: {error}");
    then_a_good_one(&bench).await
}

/// A sysctl of the pod's own network that does not exist is found out in the middle of Start,
/// inside the pod's namespaces.
///
/// Promise: failed_start_leaves_nothing.
async fn unknown_sysctl(bench: Bench) -> Result<()> {
    let error =
        refused(&bench, PodSpec::new("no-sysctl").sysctl("net.ipv4.no_such_thing", "1")).await?;
    ensure!(error.message.contains("no_such_thing"), "the error does not name the sysctl: {error}");
    then_a_good_one(&bench).await
}

/// The pause image is gone and its registry does not answer. containerd looks for the image between
/// Create and Start, and forgets the sandbox without a call. Kubelet tries again and again.
///
/// Promise: orphans_are_removed.
async fn no_pause_image(bench: Bench) -> Result<()> {
    bench.node.cri().remove_image(PAUSE_IMAGE).await?;
    let mut outcomes = Vec::new();
    for number in 0..3 {
        let home = bench.node.prepare(PodSpec::new(&format!("no-image-{number}")))?;
        let answer = bench.node.cri().run_pod_sandbox(home.config(), bench.handler.name()).await;
        outcomes.push((home, answer));
    }
    bench.node.import_images().await?;
    for (home, answer) in outcomes {
        match answer {
            Err(error) => ensure!(error.message.contains(PAUSE_IMAGE), "{error}"),
            // A release whose CRI does not look for the image.
            Ok(id) => {
                ensure!(bench.handler == Handler::Ours, "the built-in runs without its image");
                bench.node.cri().stop_pod_sandbox(&id).await?;
                bench.node.cri().remove_pod_sandbox(&id).await?;
            }
        }
        home.clear()?;
    }
    then_a_good_one(&bench).await
}

async fn refused(bench: &Bench, spec: PodSpec) -> Result<grpc::Status> {
    let home = bench.node.prepare(spec)?;
    let answer = bench.node.cri().run_pod_sandbox(home.config(), bench.handler.name()).await;
    let error = answer.err().context("it ran")?;
    home.clear().context("after the error")?;
    Ok(error)
}

/// The node is none the worse.
async fn then_a_good_one(bench: &Bench) -> Result<()> {
    let pod = bench.run(PodSpec::new("good")).await.context("a good pod after a bad one")?;
    pod.remove().await
}

/// Promise: failed_start_leaves_nothing.
async fn caller_gives_up(bench: Bench) -> Result<()> {
    give_up(&bench, PodSpec::new).await
}

async fn caller_gives_up_on_a_host_network_pod(bench: Bench) -> Result<()> {
    give_up(&bench, |name| PodSpec::new(name).host_network()).await
}

/// A caller gives up at moments all over the time that a pod takes, and asks for the same pod
/// again, as kubelet does.
async fn give_up(bench: &Bench, spec: fn(&str) -> PodSpec) -> Result<()> {
    /// Moments, evenly over the time.
    const MOMENTS: u32 = 12;
    let moments = kit::fewer("moments", MOMENTS);
    // A busy machine may be faster the next time, and the pod be there before the moment.
    let tries = 5 * moments;
    bench.builtin_leaves(
        &[
            "process",
            "shim socket",
            "cgroup",
            "mount",
            "directory",
            "file",
            "fifo",
            "interface",
            "CNI result",
            "task",
            "container",
            "snapshot",
        ],
        "containerd kills runc, or the start of a shim, when its caller gives up; what they have \
         made so far stays",
    );
    let begun = Instant::now();
    let pod = bench.run(spec("whole")).await?;
    let mut fastest = begun.elapsed();
    pod.remove().await?;

    let (mut given_up, mut pods) = (0, Vec::new());
    for attempt in 0..tries {
        let home = bench.node.prepare(spec(&format!("given-up-{attempt}")))?;
        let deadline = fastest * (attempt % moments + 1) / (moments + 1);
        let begun = Instant::now();
        match bench
            .node
            .cri()
            .run_pod_sandbox_within(home.config(), bench.handler.name(), deadline)
            .await
        {
            Err(status) if [grpc::DEADLINE_EXCEEDED, grpc::CANCELLED].contains(&status.code) => {
                given_up += 1
            }
            Err(status) => return Err(status).context(format!("given up after {deadline:?}")),
            Ok(_) => fastest = fastest.min(begun.elapsed()),
        }
        let id = again(bench, home.config())
            .await
            .with_context(|| format!("again, after giving up at {deadline:?}"))?;
        let pod = kit::Pod::new(&bench.node, bench.handler, home, id);
        let container = pod.run(ContainerSpec::sleeping("main")).await?;
        ensure!(container.sh("echo runs").await? == "runs\n", "the container does not run");
        pod.stop().await?;
        bench.node.cri().remove_pod_sandbox(pod.id()).await?;
        pods.push(pod);
        if given_up == moments {
            break;
        }
    }
    for pod in pods {
        match bench.handler {
            Handler::Ours => pod.clear().await?,
            // The holders of the pod's cgroup are counted at the end.
            Handler::Builtin => drop(pod.home().clear()),
        }
    }
    ensure!(given_up == moments, "given up only {given_up} times in {tries} tries");
    Ok(())
}

/// The same pod again: what containerd lists of the abandoned one is stopped and removed first, as
/// kubelet does.
async fn again(bench: &Bench, config: &api::PodSandboxConfig) -> Result<String> {
    let cri = bench.node.cri();
    until("the same pod again", Duration::from_secs(20), async || {
        remove_listed(cri).await?;
        // Refused while containerd still cleans up after the abandoned one, which holds the name.
        Ok(cri.run_pod_sandbox(config, bench.handler.name()).await?)
    })
    .await
}

/// kubelet's removal of unwanted pods.
async fn remove_listed(cri: &kit::Cri) -> Result<()> {
    for pod in cri.list_pod_sandbox(api::PodSandboxFilter::new()).await? {
        cri.stop_pod_sandbox(&pod.id).await?;
        cri.remove_pod_sandbox(&pod.id).await?;
    }
    Ok(())
}
