//! A hundred of everything at once, at a daemon whose threads are bounded.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use kit::controller::Controller;
use kit::cri::api;
use kit::grpc::{self, Status};
use kit::machine::processes::{self, Proc};
use kit::{Handler, Node, Pod, PodSpec, Thing, until};
use tokio::net::UnixDatagram;
use tokio::task::JoinSet;

use crate::endpoint::RUNTIME_SHIM;
use crate::harness::{Case, alone, on_node};
use crate::pods::{Shape, is_whole, remove};
use crate::standalone::Standalone;
use kit::strace::Fault;

/// More than the daemon has threads of any kind.
const CONCURRENT: usize = 100;

/// Removals that hang: twice as many as shims are called at once.
const HANGING: usize = 64;

/// Waits that are pending on them.
const WAITS: usize = 500;

/// How long a caller of the daemon may wait for one RPC, with all restarts in it.
const DEADLINE: Duration = Duration::from_secs(60);

/// A pod that is not concerned is not delayed.
const OTHER: Duration = Duration::from_secs(10);

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = alone![
        removals_that_hang,
        concurrent_calls_and_a_restart,
        the_daemon_runs_while_only_removals_hang,
        the_daemon_exits_when_starts_hang
    ];
    cases.extend(on_node![node_concurrent_pods_and_a_restart_of_containerd]);
    cases
}

/// A daemon whose shim's `delete` takes its time.
async fn with_slow_deletions() -> Result<Standalone> {
    let standalone = Standalone::new("shim = \"runtime\"\n")?;
    let shim = standalone.path("programs").join(RUNTIME_SHIM);
    kit::write_program(&shim, b"#!/bin/sh\nexec sleep 9\n")?;
    standalone.start().await?;
    Ok(standalone)
}

/// Sandboxes that run, each with what a shim that is gone has left: its bundle, and that of a
/// container.
async fn with_left_overs(standalone: &Standalone, count: usize) -> Result<Vec<String>> {
    let (controller, shape) = (standalone.controller(), Shape::plain(standalone));
    let mut ids = Vec::new();
    for number in 0..count {
        let id = standalone.id(&format!("left-{number}"));
        shape.run(&controller, &id).await?;
        fs::create_dir(standalone.record(&id).join("shim"))?;
        let bundle = standalone
            .path("run/io.containerd.runtime.v2.task/k8s.io")
            .join(format!("{number:064x}"));
        fs::create_dir_all(&bundle)?;
        fs::write(bundle.join("sandbox"), &id)?;
        ids.push(id);
    }
    Ok(ids)
}

/// Another pod runs, is looked at and is removed.
async fn another_pod(standalone: &Standalone, word: &str) -> Result<()> {
    let (controller, shape, id) =
        (standalone.controller(), Shape::plain(standalone), standalone.id(word));
    let whole = async {
        shape.run(&controller, &id).await?;
        is_whole(standalone, &controller, &id).await?;
        controller.metrics(&id).await?;
        remove(&controller, &id).await?;
        anyhow::Ok(())
    };
    tokio::time::timeout(OTHER, whole).await.context("another pod was held up")?
}

async fn ended(mut under_way: JoinSet<Result<()>>) -> Result<()> {
    while let Some(ended) = under_way.join_next().await {
        ended??;
    }
    Ok(())
}

/// None of them ends while the other pod does all that pods do.
/// Promise: hung_step_delays_no_other_pod.
async fn removals_that_hang() -> Result<()> {
    /// About half of the 9 s that a deletion takes.
    const HALF: Duration = Duration::from_secs(5);
    let standalone = with_slow_deletions().await?;
    let begun = Instant::now();
    another_pod(&standalone, "before").await?;
    let usual = begun.elapsed();
    let ids = with_left_overs(&standalone, HANGING).await?;
    let controller = Arc::new(standalone.controller());
    let mut removals = JoinSet::new();
    for id in ids {
        let controller = controller.clone();
        removals.spawn(async move { Ok(remove(&controller, &id).await?) });
    }
    // Each is the shell of the shim's script at first.
    let script = standalone.path("programs").join(RUNTIME_SHIM).display().to_string();
    let is_call = |p: &&Proc| p.command.starts_with("sleep 9") || p.command.contains(&script);
    until("the removals hang", DEADLINE / 2, async || {
        let called = processes::all()?.iter().filter(is_call).count();
        ensure!(called >= 32, "{called} shims are called");
        Ok(())
    })
    .await?;
    let begun = Instant::now();
    another_pod(&standalone, "other").await?;
    let took = begun.elapsed();
    ensure!(took < HALF + 10 * usual, "another pod took {took:?}, before {usual:?}");
    tokio::time::timeout(DEADLINE, ended(removals)).await.context("removals hang")??;
    standalone.nothing_left().await
}

/// Asks until the daemon has an answer, across its restart.
async fn asked<T, F: Future<Output = Result<T, Status>>>(ask: impl Fn() -> F) -> Result<T> {
    let answered = async {
        loop {
            match ask().await {
                Err(status) if status.code == grpc::UNAVAILABLE => {
                    tokio::time::sleep(Duration::from_millis(50)).await
                }
                answered => return answered,
            }
        }
    };
    Ok(tokio::time::timeout(DEADLINE, answered).await.context("no answer in time")??)
}

/// Runs a sandbox as kubelet does: one whose start was interrupted by the restart is made anew.
async fn run(controller: &Controller, shape: &Shape, id: &str) -> Result<()> {
    for _ in 0..5 {
        match asked(|| shape.create(controller, id)).await {
            Ok(()) => {}
            // The answer was lost, not the sandbox.
            Err(e) if code(&e) == Some(grpc::ALREADY_EXISTS) => {}
            Err(e) => return Err(e),
        }
        match asked(|| controller.start(id)).await {
            Ok(_) => return Ok(()),
            Err(e) => {
                // Started, and the answer was lost; or interrupted and removed.
                if controller
                    .status(id, false)
                    .await
                    .is_ok_and(|status| status.state == "SANDBOX_READY")
                {
                    return Ok(());
                }
                ensure!(code(&e) == Some(grpc::NOT_FOUND), "{id}: {e:#}");
            }
        }
    }
    bail!("{id}: not started")
}

fn code(e: &anyhow::Error) -> Option<grpc::Code> {
    e.downcast_ref::<Status>().map(|status| status.code)
}

/// Removals, starts, Waits and a restart of the daemon by SIGKILL in the middle of them.
async fn concurrent_calls_and_a_restart() -> Result<()> {
    let standalone = Standalone::started().await?;
    let (controller, shape) = (Arc::new(standalone.controller()), Shape::plain(&standalone));
    let old: Vec<String> =
        (0..CONCURRENT).map(|number| standalone.id(&format!("old-{number}"))).collect();
    for id in &old {
        shape.run(&controller, id).await?;
    }
    let mut waits = JoinSet::new();
    for number in 0..WAITS {
        let (controller, id) = (controller.clone(), old[number % CONCURRENT].clone());
        waits.spawn(async move {
            match asked(|| controller.wait(&id)).await {
                Ok(_) => Ok(()),
                // Removed before the call was repeated.
                Err(e) if code(&e) == Some(grpc::NOT_FOUND) => Ok(()),
                Err(e) => Err(e),
            }
        });
    }
    let mut tasks = JoinSet::new();
    for id in old {
        let controller = controller.clone();
        tasks.spawn(async move {
            // Once removed it is not found, which containerd takes for success.
            match asked(|| controller.stop(&id)).await {
                Err(e) if code(&e) != Some(grpc::NOT_FOUND) => {
                    return Err(e.context(format!("stop {id}")));
                }
                _ => {}
            }
            asked(|| controller.shutdown(&id)).await.with_context(|| format!("shut down {id}"))
        });
    }
    let new: Vec<String> =
        (0..CONCURRENT).map(|number| standalone.id(&format!("new-{number}"))).collect();
    for id in new.clone() {
        let (controller, shape) = (controller.clone(), shape.clone());
        tasks.spawn(async move { run(&controller, &shape, &id).await });
    }
    tokio::time::sleep(Duration::from_millis(100)).await;
    standalone.kill()?;
    standalone.start().await?;
    ended(tasks).await?;
    ended(waits).await?;
    for id in &new {
        is_whole(&standalone, &controller, id).await?;
    }
    for id in &new {
        remove(&controller, id).await?;
    }
    standalone.nothing_left().await
}

/// After which a service manager would take the daemon for hung.
const WATCHDOG: Duration = Duration::from_millis(500);

/// A daemon with a service manager's watchdog.
struct Watched {
    standalone: Standalone,
    keep_alives: Arc<AtomicUsize>,
    /// Reads the service manager's socket: the daemon waits while it is full.
    _reader: JoinSet<()>,
}

impl Watched {
    async fn start() -> Result<Self> {
        let standalone = Standalone::new("")?;
        let socket = UnixDatagram::bind(standalone.path("notify"))?;
        let (keep_alives, mut reader) = (Arc::<AtomicUsize>::default(), JoinSet::new());
        let count = Arc::clone(&keep_alives);
        reader.spawn(async move {
            let mut text = [0; 4096];
            while let Ok(length) = socket.recv(&mut text).await {
                let is_one = text[..length].windows(10).any(|word| word == b"WATCHDOG=1");
                count.fetch_add(usize::from(is_one), Ordering::Relaxed);
            }
        });
        let mut command = standalone.command();
        command
            .env("NOTIFY_SOCKET", standalone.path("notify"))
            .env("WATCHDOG_USEC", WATCHDOG.as_micros().to_string());
        standalone.start_as(command).await?;
        Ok(Self { standalone, keep_alives, _reader: reader })
    }

    /// How many keep-alives have come since the last call.
    fn fed(&self) -> usize {
        self.keep_alives.swap(0, Ordering::Relaxed)
    }

    async fn is_fed(&self) -> Result<()> {
        self.fed();
        until("the watchdog is fed", DEADLINE, async || {
            ensure!(self.fed() > 0, "it is not");
            Ok(())
        })
        .await
    }

    /// The daemon says that all threads of the class are blocked.
    async fn is_blocked(&self, class: &str) -> Result<()> {
        until("threads are blocked", DEADLINE, async || {
            let log = self.standalone.logged();
            let blocked = "all threads of a class are blocked";
            ensure!(log.lines().any(|l| l.contains(blocked) && l.contains(class)), "{log}");
            Ok(())
        })
        .await
    }
}

/// More removals hang in the kernel than there are threads for them. Other pods are served, and a
/// restart would end none of the threads.
async fn the_daemon_runs_while_only_removals_hang() -> Result<()> {
    let watched = Watched::start().await?;
    let standalone = &watched.standalone;
    let (controller, shape) = (Arc::new(standalone.controller()), Shape::plain(standalone));
    let ids: Vec<String> =
        (0..HANGING).map(|number| standalone.id(&format!("hanging-{number}"))).collect();
    for id in &ids {
        shape.run(&controller, id).await?;
    }
    watched.is_fed().await?;
    let fault = Fault::begin(standalone.pid()?, &["umount2:delay_enter=8s"]).await?;
    let mut removals = JoinSet::new();
    for id in ids {
        let controller = controller.clone();
        removals.spawn(async move {
            // Later ones wait for a permit for longer than a caller may wait.
            let _ = controller.stop(&id).await;
            asked(|| controller.shutdown(&id)).await
        });
    }
    watched.is_blocked("end").await?;
    another_start(standalone).await?;
    watched.fed();
    tokio::time::sleep(2 * WATCHDOG).await;
    ensure!(watched.fed() > 0, "it was not fed while removals hung");
    ensure!(removals.try_join_next().is_none(), "the removals no longer hang");
    fault.end().await?;
    ended(removals).await?;
    remove(&controller, &standalone.id("started")).await?;
    standalone.nothing_left().await
}

/// More starts hang in the kernel than there are threads for them: no pod is served. The daemon
/// exits by itself, so that no caller waits for it, and the next one removes the pods.
async fn the_daemon_exits_when_starts_hang() -> Result<()> {
    let watched = Watched::start().await?;
    let standalone = &watched.standalone;
    watched.is_fed().await?;
    let controller = Arc::new(standalone.controller());
    let shape = Arc::new(Shape::plain(standalone));
    let ids: Vec<String> =
        (0..HANGING).map(|number| standalone.id(&format!("hanging-{number}"))).collect();
    let kept = standalone.id("kept");
    shape.run(&controller, &kept).await?;
    let fault = Fault::begin(standalone.pid()?, &["mount:delay_enter=8s"]).await?;
    let mut starts: JoinSet<Result<()>> = JoinSet::new();
    for id in ids.clone() {
        let (controller, shape) = (controller.clone(), shape.clone());
        starts.spawn(async move { Ok(shape.run(&controller, &id).await.map(drop)?) });
    }
    watched.is_blocked("start").await?;
    // A killed daemon would keep its connection open.
    let waits = controller.wait(&kept).await;
    ensure!(waits.as_ref().is_err_and(|status| status.code == grpc::UNAVAILABLE), "{waits:?}");
    while let Some(start) = starts.join_next().await {
        // Its caller has an answer, too.
        let _ = start?;
    }
    fault.end().await?;
    until("the daemon exits", DEADLINE, async || {
        ensure!(standalone.logged().contains("threads are blocked: see"), "it runs");
        Ok(())
    })
    .await?;
    standalone.kill()?;
    standalone.start().await?;
    is_whole(standalone, &controller, &kept).await?;
    remove(&controller, &kept).await?;
    for id in ids {
        // The stop may have undone its start already.
        let _ = controller.stop(&id).await;
        asked(|| controller.shutdown(&id)).await?;
    }
    standalone.nothing_left().await
}

/// Another pod starts and is looked at.
async fn another_start(standalone: &Standalone) -> Result<()> {
    let (controller, shape, id) =
        (standalone.controller(), Shape::plain(standalone), standalone.id("started"));
    let started = async {
        shape.run(&controller, &id).await?;
        is_whole(standalone, &controller, &id).await.map(drop)
    };
    tokio::time::timeout(OTHER, started).await.context("another pod was held up")?
}

/// Pods under containerd: as many as a restart of it bears on a small machine.
const PODS: usize = 40;

/// Removes a pod as kubelet does: until it is done.
async fn remove_pod(pod: &Pod) -> Result<()> {
    until("the pod is removed", DEADLINE, async || pod.remove().await).await
}

/// Runs a pod as kubelet does: what is left of a try that failed is removed before the next.
async fn run_pod(node: &Arc<Node>, name: &str) -> Result<Pod> {
    let home = node.prepare(PodSpec::new(name).host_network())?;
    let id = until("the pod runs", DEADLINE, async || {
        for pod in node.cri().list_pod_sandbox(api::PodSandboxFilter::new()).await? {
            if pod.metadata.name == name {
                if pod.state.enum_value() == Ok(api::PodSandboxState::SANDBOX_READY) {
                    return Ok(pod.id);
                }
                node.cri().stop_pod_sandbox(&pod.id).await?;
                node.cri().remove_pod_sandbox(&pod.id).await?;
            }
        }
        Ok(node.cri().run_pod_sandbox(home.config(), Handler::Ours.name()).await?)
    })
    .await?;
    Ok(Pod::new(node, Handler::Ours, home, id))
}

/// Removals, starts and Waits, and containerd is killed in the middle of them and comes again.
async fn node_concurrent_pods_and_a_restart_of_containerd(node: Arc<Node>) -> Result<()> {
    let controller = Arc::new(node.sandboxer());
    let mut old = Vec::new();
    for number in 0..PODS {
        old.push(run_pod(&node, &format!("old-{number}")).await?);
    }
    let mut waits = JoinSet::new();
    for number in 0..WAITS {
        let (controller, id) = (controller.clone(), old[number % PODS].id().to_owned());
        waits.spawn(async move {
            match asked(|| controller.wait(&id)).await {
                Ok(exit) => {
                    ensure!(exit.exit_status == 137, "{id}: exit status {}", exit.exit_status);
                    Ok(())
                }
                // On a busy machine the call arrives after the removal.
                Err(e) if code(&e) == Some(grpc::NOT_FOUND) => Ok(()),
                Err(e) => Err(e),
            }
        });
    }
    let (mut removals, mut starts) = (JoinSet::new(), JoinSet::new());
    for pod in old {
        removals.spawn(async move { remove_pod(&pod).await });
    }
    for number in 0..PODS {
        let node = node.clone();
        starts.spawn(async move { run_pod(&node, &format!("new-{number}")).await });
    }
    tokio::time::sleep(Duration::from_millis(100)).await;
    node.kill_containerd()?;
    node.start_containerd().await?;
    ended(removals).await?;
    ended(waits).await?;
    let mut new = Vec::new();
    while let Some(started) = starts.join_next().await {
        new.push(started??);
    }
    for pod in &new {
        ensure!(pod.is_ready().await?, "{} is not ready", pod.id());
        pod.remove().await?;
    }
    // RunPodSandbox makes the lease of a pod before its record. Killed in between, containerd keeps
    // the lease, with either handler.
    let mut leases = node.records().await?;
    leases.retain(|record| matches!(record, Thing::Record(_, "lease")));
    node.remove_left(&leases).await
}
