//! The events: what happens, who has reported it, and how one of them is run for a handler.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use kit::machine::processes::{self, Proc};
use kit::{ContainerSpec, Handler, Kind, Node, Options, Parts, Pod, PodSpec};

use crate::cell::Cell;
use crate::{containerd, sandbox, shims};

/// How long what ends a little later may take.
const SETTLE: Duration = Duration::from_secs(15);
/// The same after events whose remains a handler collects by and by: this sandboxer looks for
/// sandboxes that containerd has forgotten once a minute.
pub(crate) const COLLECT: Duration = Duration::from_secs(150);

type Running = Pin<Box<dyn Future<Output = Result<Cell>>>>;

/// The longest time of an event, for what hangs.
const LONGEST: Duration = Duration::from_secs(900);

/// What containerd loses with either handler, if it is killed in RunPodSandbox: what it makes for a
/// pod before it records it.
const LOST_WITH_CONTAINERD: &[Kind] =
    &[Kind::NetworkNamespace, Kind::Interface, Kind::CniResult, Kind::Lease];
/// The same, if a shim is killed while containerd starts a container.
const LOST_WITH_A_SHIM: &[Kind] = &[Kind::Bundle];
/// Both, and what it makes for a container: the churn kills containerd and shims at any time.
pub(crate) const LOST_IN_A_CHURN: &[Kind] = &[
    Kind::NetworkNamespace,
    Kind::Interface,
    Kind::CniResult,
    Kind::Lease,
    Kind::Snapshot,
    Kind::Bundle,
];

/// One row of the table.
#[derive(Clone, Copy)]
pub(crate) struct Event {
    /// What happens.
    pub(crate) what: &'static str,
    /// Threads in which operators report it: `REPOSITORY#NUMBER`.
    pub(crate) reports: &'static [&'static str],
    /// Whether it is part of the short form.
    pub(crate) short: bool,
    /// How long what is left may take to go.
    settle: Duration,
    /// What containerd itself leaves.
    pub(crate) excused: &'static [Kind],
    run: fn(Run) -> Running,
}

/// One event on one node.
#[derive(Clone)]
pub(crate) struct Run {
    pub(crate) node: Arc<Node>,
    pub(crate) handler: Handler,
    /// As few rounds as show it at all.
    pub(crate) short: bool,
    /// The containerd that takes over from that of the node.
    pub(crate) newer: Option<Parts>,
}

impl Run {
    /// A pod with a network of its own.
    pub(crate) async fn pod(&self, name: &str) -> Result<Pod> {
        self.node.run(self.handler, PodSpec::new(name)).await
    }
}

/// The node and the programs of a comparison.
#[derive(Clone)]
pub(crate) struct Plan {
    /// The sandboxer's program; its shim is beside it.
    pub(crate) sandboxer: std::path::PathBuf,
    /// The containerd.
    pub(crate) parts: Parts,
    /// The next older one.
    pub(crate) older: Option<Parts>,
    /// As few rounds as show it at all.
    pub(crate) short: bool,
}

impl Plan {
    /// A node of one handler. What is made once for all pods is there. The test does not wait as
    /// long as the sandboxer's collection takes by default; with the default the collection is too
    /// late to hide what a removal has left.
    pub(crate) async fn node(
        &self,
        handler: Handler,
        parts: &Parts,
        settle: Duration,
    ) -> Result<Arc<Node>> {
        let offline = handler == Handler::Ours && sandbox::pulls_unused(parts);
        let head = if offline {
            format!("imports = [{:?}]\n", sandbox::offline()?)
        } else {
            String::new()
        };
        let node = Node::start(Options {
            containerd_config_head: head,
            sandboxer: Some(self.sandboxer.clone()),
            parts: Some(parts.clone()),
            containerd_config: sandbox::WITHOUT_PULL.to_owned(),
            sandboxer_config: if self.short && settle == COLLECT {
                "forgotten_interval = 1\n"
            } else {
                ""
            }
            .to_owned(),
            lean: true,
            ..Options::default()
        })
        .await?;
        sandbox::put_state_on_tmpfs(&node)?;
        if offline {
            sandbox::import(&node).await?;
        }
        if handler == Handler::Ours {
            node.start_sandboxer().await?;
        }
        let pod = node.run(handler, PodSpec::new("warm-up")).await?;
        pod.run(ContainerSpec::sleeping("main")).await?;
        pod.remove().await?;
        Ok(node)
    }

    /// Leftovers of these kinds do not fail the test. In the table each counts.
    pub(crate) fn excused(&self, kinds: &'static [Kind]) -> &'static [Kind] {
        if self.short { kinds } else { &[] }
    }

    /// Lets an event happen to a handler, and looks at what is left.
    pub(crate) async fn run(&self, event: &Event, handler: Handler) -> Result<Cell> {
        let upgrades = event.what == containerd::UPGRADE;
        let older = self.older.as_ref().filter(|_| upgrades);
        let node = self.node(handler, older.unwrap_or(&self.parts), event.settle).await?;
        let before = node.inventory().await?;
        let newer = older.map(|_| self.parts.clone());
        let run = Run { node: Arc::clone(&node), handler, short: self.short, newer };
        let mut cell = tokio::time::timeout(kit::patient(LONGEST), (event.run)(run))
            .await
            .context("not done in time")
            .and_then(|done| done)
            .with_context(|| {
                format!("{}: {}\n{}", event.what, handler.name(), node.log_tails(10))
            })?;
        cell.leave(node.left_beside(&before, event.settle, self.excused(event.excused)).await?);
        // It ends processes, and waits for them.
        tokio::task::spawn_blocking(move || drop(node)).await?;
        Ok(cell)
    }
}

/// The shims of a pod, or of all pods of a node.
pub(crate) fn shims(node: &Node, pod: Option<&str>) -> Result<Vec<Proc>> {
    let socket = node.layout().containerd_socket().display().to_string();
    let is_shim = |process: &Proc| {
        let words: Vec<&str> = process.command.split_whitespace().collect();
        process.state != 'Z'
            && process.command.contains(&socket)
            && !matches!(words.last(), Some(&"start" | &"delete"))
            && id_of(process).is_some_and(|id| pod.is_none_or(|pod| pod == id))
    };
    Ok(processes::all()?.into_iter().filter(is_shim).collect())
}

/// The pod of a shim.
pub(crate) fn id_of(shim: &Proc) -> Option<&str> {
    shim.command.split_whitespace().skip_while(|word| *word != "-id").nth(1)
}

/// The shim of a pod.
pub(crate) fn shim(pod: &Pod) -> Result<Proc> {
    shims(pod.node(), Some(pod.id()))?.into_iter().next().context("the pod has no shim")
}

/// The processes in the cgroups of a container.
pub(crate) fn inside(container: &str) -> Result<Vec<Proc>> {
    let all = processes::all()?.into_iter();
    Ok(all.filter(|p| p.state != 'Z' && p.cgroups.contains(container)).collect())
}

/// Names async functions as runs of events.
macro_rules! event {
    ($what:expr, $reports:expr, $run:path, $short:expr, $settle:expr) => {
        event!($what, $reports, $run, $short, $settle, &[])
    };
    ($what:expr, $reports:expr, $run:path, $short:expr, $settle:expr, $excused:expr) => {
        Event {
            what: $what,
            reports: &$reports,
            short: $short,
            settle: $settle,
            excused: $excused,
            run: |run| Box::pin($run(run)),
        }
    };
}

/// All events, in the order of the page.
pub(crate) fn all() -> Vec<Event> {
    [ends(), states()].concat()
}

/// A daemon or a process of the pod ends or hangs.
fn ends() -> Vec<Event> {
    vec![
        event!(
            "a container exits with 42 while containerd is down",
            [
                "containerd/containerd#10515",
                "containerd/containerd#6771",
                "containerd/containerd#12600"
            ],
            containerd::exit_while_down,
            true,
            SETTLE
        ),
        event!(
            "the pod's shim is killed",
            ["containerd/containerd#8285", "containerd/containerd#11133"],
            shims::killed,
            true,
            SETTLE
        ),
        event!(
            "the pod's shim is killed in StartContainer",
            ["containerd/containerd#6685"],
            shims::killed_in_start,
            true,
            COLLECT,
            LOST_WITH_A_SHIM
        ),
        event!(
            "the pause process is killed",
            ["containerd/containerd#12344", "rancher/rke2#8825"],
            sandbox::pause_killed,
            true,
            SETTLE
        ),
        event!(
            "each unmount in the shim takes 12 s",
            [
                "containerd/containerd#7496",
                "containerd/containerd#9309",
                "containerd/containerd#8931"
            ],
            shims::slow_unmount,
            false,
            SETTLE
        ),
        event!(
            "containerd is killed and starts while the pod's shim hangs (SIGSTOP, then SIGCONT)",
            ["containerd/containerd#13848"],
            shims::hangs_at_start,
            false,
            SETTLE
        ),
        event!(
            "containerd is killed in RunPodSandbox",
            ["containerd/cri#568", "containerd/containerd#6095", "containerd/containerd#5410"],
            containerd::killed_in_run,
            true,
            COLLECT,
            LOST_WITH_CONTAINERD
        ),
    ]
}

/// The node is not as the pod needs it, or changes under it.
fn states() -> Vec<Event> {
    vec![
        event!(
            "a process of another owner is in the pause process's cgroup",
            [],
            sandbox::foreign_process,
            true,
            SETTLE
        ),
        event!(
            "the pause image is gone, and its registry does not answer",
            ["kubernetes/kubernetes#81756", "awslabs/amazon-eks-ami#2166"],
            sandbox::no_pause_image,
            true,
            SETTLE
        ),
        event!(
            "the pod's shim hangs for good (SIGSTOP)",
            ["containerd/containerd#14081"],
            shims::hangs,
            false,
            SETTLE
        ),
        event!(
            "containerd is killed while an exec probe with a timeout of 3 s runs",
            ["containerd/containerd#8856"],
            containerd::killed_in_exec,
            true,
            SETTLE
        ),
        event!(
            "`/run` is full while a pod is stopped and removed",
            ["containerd/containerd#1546", "gitpod-io/gitpod#4135"],
            sandbox::full_run,
            true,
            SETTLE
        ),
        event!(
            containerd::UPGRADE,
            ["canonical/microk8s#761"],
            containerd::upgraded,
            false,
            SETTLE
        ),
    ]
}
