//! Create waits for containerd's record of the sandbox, and for nothing else of containerd.

use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use kit::grpc::{self, Client};
use kit::{Node, PodHome, PodSpec, until};
use nix::sys::signal::Signal;
use pause_sandboxer::protos::containers::GetContainerRequest;
use protobuf::Message as _;

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
        let id = format!("a{number:063x}");
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
    let id = format!("b{:063x}", 1);
    let home = node.prepare(PodSpec::new("created").host_network())?;
    let containerd = node.containerd_pid()?;
    signal(containerd, Signal::SIGSTOP)?;
    let called = Instant::now();
    let created = sandboxer.create(&id, home.config(), "").await;
    let took = called.elapsed();
    signal(containerd, Signal::SIGCONT)?;
    created?;
    ensure!((WAIT..CALL).contains(&took), "it took {took:?}");
    ensure!(is_reported(node, &id)?, "it is not in the log");
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
    let node = &harness.node;
    let home = node.prepare(PodSpec::new("cancelled").host_network())?;
    let containerd = node.containerd_pid()?;
    signal(containerd, Signal::SIGSTOP)?;
    let cancelled = cancelled_create(node, &home).await;
    signal(containerd, Signal::SIGCONT)?;
    let id = cancelled?;
    is_gone(node, &id).await?;
    match node.sandboxer().status(&id, false).await {
        Err(status) if status.code == grpc::NOT_FOUND => {}
        other => bail!("after Shutdown: {other:?}"),
    }
    ensure!(!is_reported(node, &id)?, "it is in the log, though it was removed");
    home.clear()
}

/// Cancels a Create when its sandbox is there, and shuts the sandbox down. On a busy machine Create
/// may answer first; then with the next.
async fn cancelled_create(node: &Node, home: &PodHome) -> Result<String> {
    let sandboxer = node.sandboxer();
    for number in 1..=5 {
        let id = format!("c{number:063x}");
        let cancelled = tokio::select! {
            entered = until("entered", SOON, async || Ok(sandboxer.status(&id, false).await?)) => {
                entered.is_ok()
            }
            created = sandboxer.create(&id, home.config(), "") => {
                created?;
                false
            }
        };
        sandboxer.shutdown(&id).await?;
        if cancelled {
            return Ok(id);
        }
    }
    bail!("each Create answered before its sandbox was there")
}

/// The daemon's log says that the sandbox is not recorded.
fn is_reported(node: &Node, id: &str) -> Result<bool> {
    let log = fs::read_to_string(node.layout().sandboxer_log())?;
    let text = "containerd has not recorded sandbox as a container yet";
    Ok(log.lines().any(|line| line.contains(text) && line.contains(id)))
}
