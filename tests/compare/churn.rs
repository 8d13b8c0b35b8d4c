//! Many short pods, while containerd, the sandboxer and shims are killed and a writer keeps the
//! disk busy, except in the test; then what is lost and what is left.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Seek as _, Write as _};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use kit::cri::api::{ContainerState, PodSandboxFilter};
use kit::grpc::NOT_FOUND;
use kit::machine::cgroup;
use kit::{Container, ContainerSpec, Dice, Handler, Left, Node, Pod, PodSpec};
use nix::sys::signal::Signal;
use tokio::task::JoinSet;

use crate::events::{COLLECT, LOST_IN_A_CHURN, Plan, id_of, shims};
use crate::shims::signal;

/// Pods at once.
const CLIENTS: usize = 4;
/// One kill for so many pods.
const EVERY: usize = 6;
/// How long a call is tried again.
const AGAIN: Duration = Duration::from_secs(120);

/// What a churn has come to.
#[derive(Debug, Default)]
pub(crate) struct Churn {
    pub(crate) pods: usize,
    /// Kills of containerd, of the sandboxer and of shims.
    pub(crate) kills: [usize; 3],
    /// Pods that ended before their container ran, and were made anew.
    pub(crate) anew: usize,
    /// Pods whose container did not start in any of them.
    pub(crate) not_run: usize,
    /// Containers that were started, whose shim was not killed, and whose exit code is another or
    /// does not come; without those that follow.
    pub(crate) codes_lost: usize,
    /// The same if containerd has logged the right one.
    pub(crate) codes_forgotten: usize,
    /// Pods that could not be removed.
    pub(crate) stuck: usize,
    pub(crate) left: Left,
    pub(crate) took: Duration,
}

impl Churn {
    /// Whether containerd and the sandboxer were killed, and no more than that explains was excused:
    /// a kill of containerd can make it forget the codes of the pods of that moment, and any kill
    /// can end them.
    pub(crate) fn is_explained_by_its_kills(&self) -> bool {
        let [containerd, sandboxer, shims] = self.kills;
        containerd > 0
            && sandboxer > 0
            && self.codes_forgotten <= containerd * CLIENTS
            && self.anew <= (containerd + sandboxer + shims) * CLIENTS
    }
}

struct Shared {
    node: Arc<Node>,
    handler: Handler,
    pods: usize,
    next: AtomicUsize,
    done: AtomicUsize,
    counts: Mutex<Churn>,
    /// The pods' own cgroups that were not empty yet when their pods were removed.
    cgroups: Mutex<Vec<String>>,
    /// Pods whose shim was killed.
    killed: Mutex<BTreeSet<String>>,
    quiet: AtomicBool,
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs so many pods.
pub(crate) async fn run(plan: &Plan, handler: Handler, pods: usize) -> Result<Churn> {
    let node = plan.node(handler, &plan.parts, COLLECT).await?;
    let before = node.inventory().await?;
    let shared = Arc::new(Shared {
        node: Arc::clone(&node),
        handler,
        pods,
        next: AtomicUsize::new(0),
        done: AtomicUsize::new(0),
        counts: Mutex::new(Churn { pods, ..Churn::default() }),
        cgroups: Mutex::default(),
        killed: Mutex::default(),
        quiet: AtomicBool::new(false),
    });
    let begun = Instant::now();
    // In a lane of the tests the node is in memory.
    let writer = (!plan.short).then(|| {
        let shared = Arc::clone(&shared);
        std::thread::spawn(move || press(&shared))
    });
    let mut clients = JoinSet::new();
    for _ in 0..CLIENTS {
        let shared = Arc::clone(&shared);
        clients.spawn(async move {
            loop {
                let nth = shared.next.fetch_add(1, Ordering::Relaxed);
                if nth >= shared.pods {
                    return anyhow::Ok(());
                }
                live(&shared, nth).await?;
                shared.done.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    let killer = kill(&shared).await;
    while let Some(ended) = clients.join_next().await {
        ended??;
    }
    let took = begun.elapsed();
    shared.quiet.store(true, Ordering::Relaxed);
    if let Some(writer) = writer {
        writer.join().ok().context("the writer panicked")??;
    }
    killer.with_context(|| node.log_tails(10))?;
    sweep(&node, PodSandboxFilter::new()).await;
    let excused = plan.excused(LOST_IN_A_CHURN);
    let mut left = node.left_beside(&before, COLLECT, excused).await?;
    if !left.is_empty_but_for(excused) {
        // kubelet removes a pod's own cgroup when nothing is in it any more.
        for cgroup in lock(&shared.cgroups).iter() {
            let _ = cgroup::remove(cgroup);
        }
        left = node.left_beside(&before, Duration::ZERO, excused).await?;
    }
    let counts = std::mem::take(&mut *lock(&shared.counts));
    drop(shared);
    tokio::task::spawn_blocking(move || drop(node)).await?;
    Ok(Churn { left, took, ..counts })
}

/// Writes and syncs until it is quiet.
fn press(shared: &Shared) -> Result<()> {
    /// The size of the file.
    const BLOCKS: usize = 32;
    let path = shared.node.layout().top.join("logs/pressure");
    let mut file = File::create(&path)?;
    let block = vec![0x5a_u8; 1 << 20];
    while !shared.quiet.load(Ordering::Relaxed) {
        file.rewind()?;
        for _ in 0..BLOCKS {
            file.write_all(&block)?;
            file.sync_all()?;
        }
    }
    Ok(std::fs::remove_file(path)?)
}

/// Kills something each time when a few more pods are done.
async fn kill(shared: &Shared) -> Result<()> {
    let node = &shared.node;
    let mut dice = Dice(0x9e37_79b9_7f4a_7c15);
    for nth in 0.. {
        let at = (nth + 1) * EVERY;
        while shared.done.load(Ordering::Relaxed) < at {
            if at > shared.pods || shared.next.load(Ordering::Relaxed) >= shared.pods {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        tokio::time::sleep(Duration::from_millis(dice.below(200) as u64)).await;
        match nth % 4 {
            0 => {
                node.kill_containerd()?;
                node.start_containerd().await?;
                lock(&shared.counts).kills[0] += 1;
            }
            2 if shared.handler == Handler::Ours => {
                node.kill_sandboxer()?;
                node.start_sandboxer().await?;
                lock(&shared.counts).kills[1] += 1;
            }
            2 => {}
            _ => {
                let all = shims(node, None)?;
                if let Some(one) = all.get(dice.below(all.len().max(1))) {
                    let id = id_of(one).unwrap_or_default().to_owned();
                    lock(&shared.killed).insert(id.clone());
                    if signal(one.pid, Signal::SIGKILL).is_ok() {
                        lock(&shared.counts).kills[2] += 1;
                    } else {
                        // It has ended by itself.
                        lock(&shared.killed).remove(&id);
                    }
                }
            }
        }
    }
    Ok(())
}

/// The life of one pod, with kubelet's patience: one that ends is removed and made anew.
async fn live(shared: &Shared, nth: usize) -> Result<()> {
    let begun = Instant::now();
    while !live_once(shared, nth).await? {
        if begun.elapsed() > AGAIN {
            eprintln!("compare: the container of churn-{nth} did not start");
            lock(&shared.counts).not_run += 1;
            return Ok(());
        }
        lock(&shared.counts).anew += 1;
    }
    Ok(())
}

/// Answers whether the pod's container ran.
async fn live_once(shared: &Shared, nth: usize) -> Result<bool> {
    let name = format!("churn-{nth}");
    let code = i32::try_from(1 + nth % 200)?;
    let home = shared.node.prepare(PodSpec::new(&name).label("churn", &name))?;
    let config = home.config().clone();
    let begun = Instant::now();
    let id = loop {
        match shared.node.cri().run_pod_sandbox(&config, shared.handler.name()).await {
            Ok(id) => break Some(id),
            Err(_) if begun.elapsed() > AGAIN => break None,
            Err(_) => {
                sweep(&shared.node, named(&name)).await;
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        }
    };
    let Some(id) = id else {
        if home.clear().is_err() {
            lock(&shared.cgroups).extend(home.cgroup().map(str::to_owned));
        }
        return Ok(false);
    };
    let pod = Pod::new(&shared.node, shared.handler, home, id);
    let started = start(&pod, code).await;
    if let Some(container) = &started {
        judge(shared, &pod, container, code).await?;
    }
    if !remove(shared, pod.id()).await {
        eprintln!("compare: {name} cannot be removed");
        lock(&shared.counts).stuck += 1;
    }
    sweep(&shared.node, named(&name)).await;
    if pod.clear().await.is_err() {
        lock(&shared.cgroups).extend(pod.home().cgroup().map(str::to_owned));
    }
    Ok(started.is_some())
}

/// Starts the pod's container, again and again while the pod lives.
async fn start(pod: &Pod, code: i32) -> Option<Container> {
    let begun = Instant::now();
    for attempt in 0.. {
        let spec = ContainerSpec::sh("main", &format!("sleep 0.2; exit {code}")).attempt(attempt);
        match pod.run(spec).await {
            Ok(container) => return Some(container),
            Err(_) if begun.elapsed() > AGAIN => break,
            Err(_) => tokio::time::sleep(Duration::from_secs(1)).await,
        }
        // A daemon that starts does not answer, which says nothing of the pod.
        if let Ok(false) = pod.is_ready().await {
            break;
        }
    }
    None
}

/// Waits for the container's exit code, and counts it if it is lost.
async fn judge(shared: &Shared, pod: &Pod, container: &Container, code: i32) -> Result<()> {
    let reported = exit_code(container).await;
    if reported == Some(code) || lock(&shared.killed).contains(pod.id()) {
        return Ok(());
    }
    // containerd logs an exit that it has received before it does anything about it.
    let log = std::fs::read_to_string(shared.node.layout().containerd_log())?;
    let (id, status) = (container.id(), format!("exit_status:{code} "));
    let received = log.lines().any(|line| line.contains(id) && line.contains(&status));
    let mut counts = lock(&shared.counts);
    if received {
        counts.codes_forgotten += 1;
    } else {
        eprintln!("compare: container {id}: exit code {reported:?}, not {code}");
        counts.codes_lost += 1;
    }
    Ok(())
}

async fn exit_code(container: &Container) -> Option<i32> {
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(60) {
        if let Ok(status) = container.status().await
            && status.state.enum_value() == Ok(ContainerState::CONTAINER_EXITED)
        {
            return Some(status.exit_code);
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    None
}

/// Stops and removes a pod; answers whether that is done.
async fn remove(shared: &Shared, id: &str) -> bool {
    let (cri, begun) = (shared.node.cri(), Instant::now());
    let gone = |done: Result<(), kit::grpc::Status>| match done {
        Err(status) => status.code == NOT_FOUND,
        Ok(()) => true,
    };
    while begun.elapsed() < AGAIN {
        if gone(cri.stop_pod_sandbox(id).await) && gone(cri.remove_pod_sandbox(id).await) {
            return true;
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    false
}

/// The pods of this name.
fn named(name: &str) -> PodSandboxFilter {
    PodSandboxFilter {
        label_selector: [("churn".to_owned(), name.to_owned())].into(),
        ..Default::default()
    }
}

/// Removes these pods of CRI's list, once, as kubelet's garbage collection does: failed calls of
/// RunPodSandbox leave some.
async fn sweep(node: &Node, filter: PodSandboxFilter) {
    for pod in node.cri().list_pod_sandbox(filter).await.unwrap_or_default() {
        let _ = node.cri().stop_pod_sandbox(&pod.id).await;
        let _ = node.cri().remove_pod_sandbox(&pod.id).await;
    }
}
