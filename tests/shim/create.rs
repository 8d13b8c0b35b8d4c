//! Create waits for containerd's record of the sandbox, and for nothing else of containerd.

use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use kit::grpc::{self, Client};
use kit::{PodSpec, until};
use nix::sys::signal::Signal;
use pause_sandboxer::protos::containers::GetContainerRequest;
use protobuf::Message as _;
use tokio::time::timeout;

use crate::container_record::{is_gone, is_recorded};
use crate::harness::{Case, Harness, Kind, SOON, cases, signal};

/// containerd's call that reads a container.
const GET: &str = "/containerd.services.containers.v1.Containers/Get";

/// The longest that Create waits for containerd.
const WAIT: Duration = Duration::from_millis(250);

/// A daemon that waits for its call of containerd takes longer.
const CALL: Duration = Duration::from_secs(10);

pub(crate) fn cases() -> Vec<Case> {
    cases![Kind::Own =>
        it_is_recorded_before_create_answers,
        create_does_not_wait_long_for_containerd,
        a_sandbox_whose_create_was_cancelled_can_be_shut_down,
    ]
}

/// cAdvisor looks for the container once, when the pod's cgroup appears, which is in Start.
async fn it_is_recorded_before_create_answers(harness: Arc<Harness>) -> Result<()> {
    let (node, sandboxer) = (&harness.node, harness.node.sandboxer());
    let containerd =
        Client::new(node.layout().containerd_socket()).header("containerd-namespace", "k8s.io");
    let mut in_time = 0;
    for number in 1..=10 {
        let id = format!("{number:064x}");
        let home = node.prepare(PodSpec::new("created").host_network())?;
        let get = GetContainerRequest { id: id.clone(), ..Default::default() }.write_to_bytes()?;
        let called = Instant::now();
        sandboxer.create(&id, home.config(), "").await?;
        let took = called.elapsed();
        let recorded = containerd.unary(GET, get, Some(SOON)).await;
        if took < WAIT {
            in_time += 1;
            recorded.with_context(|| format!("after Create number {number} in {took:?}"))?;
        }
        sandboxer.shutdown(&id).await?;
        is_gone(node, &id).await?;
        home.clear()?;
    }
    ensure!(in_time > 0, "each Create took {WAIT:?} or longer");
    Ok(())
}

async fn create_does_not_wait_long_for_containerd(harness: Arc<Harness>) -> Result<()> {
    let (node, sandboxer) = (&harness.node, harness.node.sandboxer());
    let id = format!("{:064x}", 1);
    let home = node.prepare(PodSpec::new("created").host_network())?;
    let containerd = node.containerd_pid()?;
    signal(containerd, Signal::SIGSTOP)?;
    let called = Instant::now();
    let created = sandboxer.create(&id, home.config(), "").await;
    let took = called.elapsed();
    signal(containerd, Signal::SIGCONT)?;
    created?;
    ensure!(took < CALL, "it took {took:?}");
    let log = fs::read_to_string(node.layout().sandboxer_log())?;
    ensure!(log.contains("containerd has not recorded sandbox as a container yet"), "{log}");
    until("recorded", SOON, async || {
        ensure!(is_recorded(node, &id)?, "it is not recorded");
        Ok(())
    })
    .await?;
    sandboxer.shutdown(&id).await?;
    is_gone(node, &id).await?;
    home.clear()
}

/// The caller of Create gives up while Create waits for containerd.
async fn a_sandbox_whose_create_was_cancelled_can_be_shut_down(
    harness: Arc<Harness>,
) -> Result<()> {
    let (node, sandboxer) = (&harness.node, harness.node.sandboxer());
    let id = format!("{:064x}", 1);
    let home = node.prepare(PodSpec::new("cancelled").host_network())?;
    let containerd = node.containerd_pid()?;
    signal(containerd, Signal::SIGSTOP)?;
    let ended = async {
        let create = sandboxer.create(&id, home.config(), "");
        let cancelled = timeout(WAIT / 2, create).await.is_err();
        sandboxer.shutdown(&id).await?;
        anyhow::Ok((cancelled, sandboxer.status(&id, false).await))
    };
    let ended = ended.await;
    signal(containerd, Signal::SIGCONT)?;
    let (cancelled, status) = ended?;
    ensure!(cancelled, "Create did not wait");
    match status {
        Err(status) if status.code == grpc::NOT_FOUND => {}
        other => anyhow::bail!("after Shutdown: {other:?}"),
    }
    is_gone(node, &id).await?;
    home.clear()
}
