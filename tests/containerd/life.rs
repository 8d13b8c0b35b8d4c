//! The life of a pod as kubelet leads it: run, asked, stopped, removed, each of the last two twice.

use std::time::SystemTime;

use anyhow::{Context, Result, ensure};
use kit::cri::api;
use kit::machine::cgroup_driver::CgroupDriver;
use kit::{ContainerSpec, Handler, PodSpec, grpc};

use crate::harness::{Bench, Case, Difference, cases};

pub(crate) fn cases() -> Vec<Case> {
    cases![both: life, list, without_linux_section, restart_of_containerd]
}

/// Promise: cri_works.
async fn life(bench: Bench) -> Result<()> {
    let cri = bench.node.cri();
    let events = bench.node.events().await?;
    let before = nanoseconds(SystemTime::now())?;
    let pod = bench.run(PodSpec::new("life").label("colour", "green")).await?;
    let after = nanoseconds(SystemTime::now())?;

    let status = pod.status().await?;
    ensure!(status.id == pod.id(), "id is {}", status.id);
    ensure!(
        status.state.enum_value() == Ok(api::PodSandboxState::SANDBOX_READY),
        "state is {:?}",
        status.state
    );
    ensure!(
        status.metadata.name == "life" && status.metadata.namespace == "default",
        "metadata is {:?}",
        status.metadata
    );
    ensure!(
        status.labels.get("colour").is_some_and(|c| c == "green"),
        "labels are {:?}",
        status.labels
    );
    ensure!(
        status.runtime_handler == bench.handler.name(),
        "handler is {}",
        status.runtime_handler
    );
    ensure!(
        (before..=after).contains(&status.created_at),
        "created at {}, not in {before}..={after}",
        status.created_at
    );
    let modes = &status.linux.namespaces.options;
    ensure!(
        modes.pid.enum_value() == Ok(api::NamespaceMode::CONTAINER),
        "PID mode is {:?}",
        modes.pid
    );
    ensure!(!status.network.ip.is_empty(), "no address");

    let container = pod.run(ContainerSpec::sleeping("main")).await?;
    ensure!(container.sh("echo runs").await? == "runs\n", "the container does not run");

    pod.stop().await?;
    ensure!(!pod.is_ready().await?, "ready after stop");
    let state = container.status().await?.state;
    ensure!(
        state.enum_value() == Ok(api::ContainerState::CONTAINER_EXITED),
        "the container is {state:?} after stop"
    );
    pod.stop().await.context("stop again")?;
    ensure!(!pod.is_ready().await?, "ready after the second stop");

    cri.remove_pod_sandbox(pod.id()).await.context("remove")?;
    cri.remove_pod_sandbox(pod.id()).await.context("remove again")?;
    cri.stop_pod_sandbox(pod.id()).await.context("stop after remove")?;
    match cri.pod_sandbox_status(pod.id(), false).await {
        Err(status) if status.code == grpc::NOT_FOUND => {}
        other => anyhow::bail!("status after remove: {other:?}"),
    }

    use api::ContainerEventType::{
        CONTAINER_CREATED_EVENT, CONTAINER_DELETED_EVENT, CONTAINER_STARTED_EVENT,
        CONTAINER_STOPPED_EVENT,
    };
    events.until(pod.id(), CONTAINER_DELETED_EVENT, std::time::Duration::from_secs(20)).await?;
    let published = events.of(pod.id())?;
    let expected = [
        CONTAINER_CREATED_EVENT,
        CONTAINER_STARTED_EVENT,
        CONTAINER_STOPPED_EVENT,
        CONTAINER_DELETED_EVENT,
    ];
    ensure!(published == expected, "events of the sandbox: {published:?}");
    pod.clear().await
}

async fn list(bench: Bench) -> Result<()> {
    let cri = bench.node.cri();
    let ready = bench.run(PodSpec::new("ready").label("suite", "list")).await?;
    let stopped = bench.run(PodSpec::new("stopped").label("suite", "list")).await?;
    stopped.stop().await?;

    let filter = |state: Option<api::PodSandboxState>| api::PodSandboxFilter {
        label_selector: [("suite".to_owned(), "list".to_owned())].into(),
        state: state
            .map(|s| api::PodSandboxStateValue { state: s.into(), ..Default::default() })
            .into(),
        ..Default::default()
    };
    let listed = async |state| -> Result<Vec<String>> {
        let mut ids: Vec<String> =
            cri.list_pod_sandbox(filter(state)).await?.into_iter().map(|pod| pod.id).collect();
        ids.sort();
        Ok(ids)
    };
    let mut both = vec![ready.id().to_owned(), stopped.id().to_owned()];
    both.sort();
    ensure!(listed(None).await? == both, "all: {:?}", listed(None).await?);
    let up = listed(Some(api::PodSandboxState::SANDBOX_READY)).await?;
    ensure!(up == [ready.id()], "ready: {up:?}");
    let down = listed(Some(api::PodSandboxState::SANDBOX_NOTREADY)).await?;
    ensure!(down == [stopped.id()], "not ready: {down:?}");

    let by_id = api::PodSandboxFilter { id: ready.id().to_owned(), ..Default::default() };
    let found = cri.list_pod_sandbox(by_id).await?;
    let [pod] = found.as_slice() else { anyhow::bail!("by id: {found:?}") };
    ensure!(
        pod.created_at == ready.status().await?.created_at,
        "list and status differ in the time of creation"
    );
    ensure!(pod.metadata.name == "ready", "metadata: {:?}", pod.metadata);

    stopped.remove().await?;
    ready.remove().await
}

/// A config may have no `linux` section at all. Where systemd keeps the cgroups runc takes no
/// container without a slice to put it in, and who would name it is the pod's config. The pause
/// needs none.
async fn without_linux_section(bench: Bench) -> Result<()> {
    const NO_SLICE: &str = "slice:prefix:name";
    let in_slices = CgroupDriver::chosen() == CgroupDriver::Systemd;
    if in_slices && bench.handler == Handler::Builtin {
        let refused =
            bench.run(PodSpec::new("bare").without_linux()).await.err().context("it ran")?;
        ensure!(format!("{refused:#}").contains(NO_SLICE), "{refused:#}");
        return Ok(());
    }
    let pod = bench.run(PodSpec::new("bare").without_linux()).await?;
    ensure!(pod.is_ready().await?, "not ready");
    if in_slices {
        let refused = pod
            .run(ContainerSpec::sleeping("main"))
            .await
            .err()
            .context("a container ran without a slice")?;
        ensure!(format!("{refused:#}").contains(NO_SLICE), "{refused:#}");
        return pod.remove().await;
    }
    let container = pod.run(ContainerSpec::sleeping("main")).await?;
    ensure!(
        container.sh("hostname").await? == "bare\n",
        "hostname is {}",
        container.sh("hostname").await?
    );
    pod.remove().await
}

/// containerd may be restarted under a living pod.
///
/// Promise: cri_works.
async fn restart_of_containerd(bench: Bench) -> Result<()> {
    let pod = bench.run(PodSpec::new("restart").pid(api::NamespaceMode::POD)).await?;
    let container = pod.run(ContainerSpec::sleeping("old")).await?;
    container.sh("echo kept > /dev/shm/file").await?;
    let (pause, created_at) = (pod.pause_pid().await?, pod.status().await?.created_at);

    bench.node.stop_containerd().await?;
    bench.node.start_containerd().await?;

    ensure!(pod.is_ready().await?, "not ready after the restart");
    ensure!(pod.pause_pid().await? == pause, "another pause after the restart");
    ensure!(
        pod.status().await?.created_at == created_at,
        "another time of creation after the restart"
    );
    let listed = bench.node.cri().list_pod_sandbox(api::PodSandboxFilter::new()).await?;
    bench.differs(
        "containerd's list of pods has the true time of creation after its restart",
        &listed.iter().all(|pod| pod.created_at == created_at),
        Difference {
            builtin: true,
            ours: false,
            why: "containerd keeps it in memory alone for an external sandboxer, and takes the \
                time of its restart instead",
        },
    )?;
    ensure!(
        container.sh("cat /dev/shm/file").await? == "kept\n",
        "the old container has lost its shared memory"
    );
    let new = pod.run(ContainerSpec::sleeping("new")).await?;
    ensure!(
        new.sh("cat /dev/shm/file").await? == "kept\n",
        "the new container does not share the memory"
    );
    ensure!(
        new.sh("cat /etc/hosts").await? == std::fs::read_to_string("/etc/hosts")?,
        "the new container has no hosts"
    );
    pod.remove().await
}

/// Nanoseconds since the epoch, as CRI counts.
fn nanoseconds(time: SystemTime) -> Result<i64> {
    Ok(i64::try_from(time.duration_since(SystemTime::UNIX_EPOCH)?.as_nanos())?)
}
