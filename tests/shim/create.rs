//! Create waits for containerd's record of the sandbox for as long as containerd may answer.

use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use kit::grpc::{self, Client};
use kit::machine::processes::stop;
use kit::{Node, PodHome, PodSpec, until};
use nix::sys::signal::Signal;
use pause_sandboxer::protos::containers::GetContainerRequest;
use protobuf::Message as _;

use crate::container_record::{is_gone, is_recorded, none_is_recorded};
use crate::harness::{Case, Harness, Kind, SOON, cases, signal};

/// containerd's call that reads a container.
const GET: &str = "containerd.services.containers.v1.Containers/Get";

/// The longest delay between two attempts to record a sandbox, and some time for an attempt.
const LONGEST_DELAY: Duration = Duration::from_secs(70);

/// Longer than a node is usually slow.
const SLOW: Duration = Duration::from_secs(2);

pub(crate) fn cases() -> Vec<Case> {
    cases![Kind::Own =>
        it_is_recorded_before_create_answers,
        create_waits_while_containerd_is_slow,
        create_answers_when_containerd_ends,
        a_sandbox_whose_create_was_cancelled_can_be_shut_down,
    ]
}

/// cAdvisor looks for the container once, when the pod's cgroup appears, which is in Start. Many
/// pods at once, as after the start of a node.
async fn it_is_recorded_before_create_answers(harness: Arc<Harness>) -> Result<()> {
    let many = (1..=kit::fewer("pods", 80)).map(|number| {
        let harness = harness.clone();
        async move {
            let (node, id) = (&harness.node, format!("a{number:063x}"));
            let home = node.prepare(PodSpec::new("created").host_network())?;
            node.sandboxer().create(&id, home.config(), "").await?;
            let recorded = recorded_now(node, &id).await;
            anyhow::Ok((id, home, recorded))
        }
    });
    let created = futures::future::try_join_all(many).await?;
    let mut failed = Vec::new();
    for (id, home, recorded) in created {
        harness.node.sandboxer().shutdown(&id).await?;
        home.clear()?;
        failed.extend(recorded.err().map(|e| format!("{id}: {e:#}")));
    }
    none_is_recorded(&harness.node).await?;
    ensure!(failed.is_empty(), "{} without a record: {failed:?}", failed.len());
    Ok(())
}

/// One call, which fails unless containerd has the container.
async fn recorded_now(node: &Node, id: &str) -> Result<()> {
    let containerd =
        Client::new(node.layout().containerd_socket()).header("containerd-namespace", "k8s.io");
    let get = GetContainerRequest { id: id.to_owned(), ..Default::default() }.write_to_bytes()?;
    containerd.unary(GET, get, Some(SOON)).await.context("after Create")?;
    Ok(())
}

async fn create_waits_while_containerd_is_slow(harness: Arc<Harness>) -> Result<()> {
    let (node, sandboxer) = (&harness.node, harness.node.sandboxer());
    let id = format!("b{:063x}", 1);
    let home = node.prepare(PodSpec::new("created").host_network())?;
    let containerd = node.containerd_pid()?;
    stop(containerd).await?;
    let slow = async {
        tokio::time::sleep(SLOW).await;
        signal(containerd, Signal::SIGCONT)
    };
    let called = Instant::now();
    let create = async {
        let created = sandboxer.create(&id, home.config(), "").await;
        (created, called.elapsed(), recorded_now(node, &id).await)
    };
    let ((created, took, recorded), continued) = tokio::join!(create, slow);
    continued?;
    created?;
    ensure!(took >= SLOW, "it took {took:?}: containerd was not waited for");
    recorded?;
    ensure!(!is_reported(node, &id)?, "it is in the log, though it is recorded");
    sandboxer.shutdown(&id).await?;
    is_gone(node, &id).await?;
    home.clear()
}

/// The connection is lost: containerd does not answer any more.
async fn create_answers_when_containerd_ends(harness: Arc<Harness>) -> Result<()> {
    let (node, sandboxer) = (&harness.node, harness.node.sandboxer());
    let id = format!("d{:063x}", 1);
    let home = node.prepare(PodSpec::new("created").host_network())?;
    stop(node.containerd_pid()?).await?;
    let killed = async {
        until("entered", SOON, async || Ok(sandboxer.status(&id, false).await?)).await?;
        node.kill_containerd()?;
        anyhow::Ok(Instant::now())
    };
    let create = async {
        sandboxer.create(&id, home.config(), "").await?;
        anyhow::Ok(Instant::now())
    };
    let (killed, answered) = tokio::join!(killed, create);
    node.start_containerd().await?;
    let waited = answered?.duration_since(killed?);
    // Not for the minute that a slow containerd is given.
    ensure!(waited < SOON, "it waited for {waited:?} after containerd's end");
    ensure!(is_reported(node, &id)?, "it is not in the log");
    until("recorded", LONGEST_DELAY, async || {
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
    stop(containerd).await?;
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
