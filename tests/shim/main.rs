//! The pods' own shims under a real containerd: started, lost, found again and ended, with a shim that misbehaves on order.
//!
//! All cases share one node and run one after another; after each the machine must be as it was before.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use kit::machine::processes::{self, Proc};
use kit::{ContainerSpec, Handler, Node, Options, Pod, PodSpec, until};
use libtest_mimic::{Arguments, Failed, Trial};
use tokio::runtime::Runtime;

/// What happens at once on an idle machine may take a while on a busy one.
const SOON: Duration = Duration::from_secs(20);

/// A node whose sandboxer uses the wrapped shim.
struct Bench {
    node: Arc<Node>,
    order: PathBuf,
    _dir: tempfile::TempDir,
}

impl Bench {
    async fn start() -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let (order, shim) = (dir.path().join("order"), dir.path().join("shim"));
        let real = kit::Parts::get()?.program("containerd-shim-runc-v2");
        let script = include_str!("wrapper.sh")
            .replace("REAL_SHIM", &real.display().to_string())
            .replace("ORDER_FILE", &order.display().to_string());
        fs::write(&shim, script)?;
        fs::set_permissions(&shim, fs::Permissions::from_mode(0o755))?;
        fs::write(&order, "good")?;
        let node = Node::start(Options {
            sandboxer: Some(env!("CARGO_BIN_EXE_pause-sandboxer").into()),
            sandboxer_config: format!("shims = {{ \"io.containerd.runc.v2\" = \"{}\" }}\n", shim.display()),
            ..Options::default()
        })
        .await?;
        node.start_sandboxer().await?;
        let bench = Self { node, order, _dir: dir };
        // containerd makes directories of its own with the first container.
        let pod = bench.pod("first").await?;
        pod.run(ContainerSpec::sleeping("a")).await?;
        pod.remove().await?;
        Ok(bench)
    }

    fn order(&self, word: &str) -> Result<()> {
        Ok(fs::write(&self.order, word)?)
    }

    async fn pod(&self, name: &str) -> Result<Pod> {
        self.node.run(Handler::Ours, PodSpec::new(name).host_network()).await
    }

    async fn restart(&self) -> Result<()> {
        self.node.kill_sandboxer()?;
        self.node.start_sandboxer().await
    }
}

/// The shims of a pod, whatever their program.
fn shims(pod: &Pod) -> Result<Vec<Proc>> {
    let named = format!("-id {} ", pod.id());
    let all = processes::all()?.into_iter();
    Ok(all.filter(|process| process.state != 'Z' && process.command.contains(&named)).collect())
}

async fn one_shim(pod: &Pod) -> Result<Proc> {
    until("one shim", SOON, async || match shims(pod)?.as_slice() {
        [one] => Ok(one.clone()),
        other => bail!("shims: {other:?}"),
    })
    .await
}

async fn no_shim(pod: &Pod) -> Result<()> {
    until("no shim", SOON, async || none(&shims(pod)?)).await
}

fn none(processes: &[Proc]) -> Result<()> {
    ensure!(processes.is_empty(), "{processes:?}");
    Ok(())
}

async fn not_ready(pod: &Pod) -> Result<()> {
    ensure!(!pod.is_ready().await?, "it is ready");
    Ok(())
}

fn signal(pid: u32, signal: nix::sys::signal::Signal) -> Result<()> {
    let pid = nix::unistd::Pid::from_raw(i32::try_from(pid)?);
    nix::sys::signal::kill(pid, signal).context("kill")
}

/// Removes a pod as kubelet does, again and again: CRI takes a container whose shim is gone for running until it has handled its exit.
async fn removed(pod: &Pod) -> Result<()> {
    until("removed", SOON, async || {
        pod.stop().await?;
        pod.node().cri().remove_pod_sandbox(pod.id()).await.context("RemovePodSandbox")
    })
    .await?;
    pod.clear().await
}

/// The processes in the cgroup of a container.
fn inside(id: &str) -> Result<Vec<Proc>> {
    Ok(processes::all()?.into_iter().filter(|process| process.cgroups.contains(id) && process.state != 'Z').collect())
}

async fn an_idle_pod_has_no_shim_and_a_container_one(bench: Arc<Bench>) -> Result<()> {
    let pod = bench.pod("idle").await?;
    ensure!(shims(&pod)?.is_empty(), "an idle pod has a shim");
    let first = pod.run(ContainerSpec::sleeping("a")).await?;
    let shim = one_shim(&pod).await?;
    let second = pod.run(ContainerSpec::sleeping("b")).await?;
    ensure!(first.sh("echo hello").await?.trim() == "hello", "exec");
    ensure!(one_shim(&pod).await?.pid == shim.pid, "the second container has another shim");
    let own: i32 = fs::read_to_string("/proc/self/oom_score_adj")?.trim().parse()?;
    let score: i32 = fs::read_to_string(format!("/proc/{}/oom_score_adj", shim.pid))?.trim().parse()?;
    ensure!(score == own + 1, "oom_score_adj {score}, the daemon's is {own}");
    for container in [first, second] {
        container.stop().await?;
        container.remove().await?;
    }
    pod.remove().await?;
    no_shim(&pod).await
}

async fn platform_brings_the_shim(bench: Arc<Bench>) -> Result<()> {
    let pod = bench.pod("platform").await?;
    let begun = Instant::now();
    bench.node.sandboxer().platform(pod.id()).await?;
    let took = begun.elapsed();
    one_shim(&pod).await?;
    ensure!(took < Duration::from_secs(1), "Platform took {took:?}");
    pod.remove().await?;
    no_shim(&pod).await
}

/// What containerd does from 2.4 on; here the shim is told by a signal, which it takes for the same.
async fn an_empty_shim_that_ends_is_followed_by_another(bench: Arc<Bench>) -> Result<()> {
    let pod = bench.pod("again").await?;
    let first = pod.run(ContainerSpec::sleeping("a")).await?;
    first.stop().await?;
    first.remove().await?;
    let shim = one_shim(&pod).await?;
    signal(shim.pid, nix::sys::signal::Signal::SIGTERM)?;
    no_shim(&pod).await?;
    ensure!(pod.is_ready().await?, "the pod ended with its empty shim");
    pod.run(ContainerSpec::sleeping("b")).await?;
    ensure!(one_shim(&pod).await?.pid != shim.pid, "the same shim");
    pod.remove().await
}

async fn a_shim_that_dies_with_containers_ends_the_pod(bench: Arc<Bench>) -> Result<()> {
    for (name, kill) in [("killed", nix::sys::signal::Signal::SIGKILL), ("told", nix::sys::signal::Signal::SIGTERM)] {
        let pod = bench.pod(name).await?;
        let container = pod.run(ContainerSpec::sh("a", "sleep 1000 & sleep 1000")).await?;
        ensure!(!inside(container.id())?.is_empty(), "no process in the container's cgroup");
        let shim = one_shim(&pod).await?;
        signal(shim.pid, kill)?;
        until("not ready", SOON, async || not_ready(&pod).await).await?;
        until("no process of the container", SOON, async || none(&inside(container.id())?)).await?;
        let status = bench.node.sandboxer().status(pod.id(), true).await?;
        let reason = status.info.get("reason").context("no reason in the verbose status")?;
        ensure!(reason.contains("shim") && reason.contains(container.id()), "reason: {reason}");
        removed(&pod).await?;
        no_shim(&pod).await?;
        let bundle = bench.node.layout().state().join("io.containerd.runtime.v2.task/k8s.io").join(container.id());
        ensure!(!bundle.exists(), "{} is left", bundle.display());
    }
    Ok(())
}

async fn a_shim_that_does_not_come_is_an_error(bench: Arc<Bench>) -> Result<()> {
    let pod = bench.pod("misbehaving").await?;
    for (word, limit) in [("exit", 8), ("end", 8), ("hang", 20), ("chatter", 20)] {
        bench.order(word)?;
        let begun = Instant::now();
        let answer = pod.run(ContainerSpec::sleeping(word)).await;
        bench.order("good")?;
        ensure!(answer.is_err(), "{word}: the container runs");
        let took = begun.elapsed();
        ensure!(took < Duration::from_secs(limit), "{word}: took {took:?}");
        no_shim(&pod).await.context(word)?;
        ensure!(pod.is_ready().await?, "{word}: the pod is not ready");
    }
    let log = fs::read_to_string(bench.node.layout().sandboxer_log())?;
    for expected in ["cannot go on", "ended with status 7", "did not answer", "the next are dropped"] {
        ensure!(log.contains(expected), "the log does not say {expected:?}");
    }
    pod.run(ContainerSpec::sleeping("good")).await.context("after the bad ones")?;
    pod.remove().await
}

async fn a_killed_daemon_finds_the_shim_again(bench: Arc<Bench>) -> Result<()> {
    let (idle, busy) = (bench.pod("idle").await?, bench.pod("busy").await?);
    let first = busy.run(ContainerSpec::sleeping("a")).await?;
    let shim = one_shim(&busy).await?;
    bench.restart().await?;
    ensure!(one_shim(&busy).await?.pid == shim.pid, "another shim");
    ensure!(first.sh("echo hello").await?.trim() == "hello", "exec");
    let second = busy.run(ContainerSpec::sleeping("b")).await?;
    ensure!(one_shim(&busy).await?.pid == shim.pid, "another shim for the second container");
    ensure!(shims(&idle)?.is_empty(), "the idle pod has a shim");
    idle.run(ContainerSpec::sleeping("a")).await.context("in the idle pod")?;
    one_shim(&idle).await?;
    // As if the daemon had been killed between the launch and its record.
    bench.node.kill_sandboxer()?;
    let record = bench.node.layout().sandboxer_state().join("sandboxes").join(busy.id()).join("shim/shim.json");
    fs::write(&record, "\"launching\"")?;
    bench.node.start_sandboxer().await?;
    let recorded = fs::read_to_string(&record)?;
    ensure!(recorded.contains(&format!("\"pid\":{}", shim.pid)), "the record is {recorded}");
    for container in [first, second] {
        container.stop().await?;
        container.remove().await?;
    }
    signal(shim.pid, nix::sys::signal::Signal::SIGTERM)?;
    no_shim(&busy).await?;
    busy.run(ContainerSpec::sleeping("c")).await.context("after the shim that was taken over")?;
    for pod in [idle, busy] {
        pod.remove().await?;
        no_shim(&pod).await?;
    }
    Ok(())
}

async fn a_shim_that_dies_without_a_daemon_ends_the_pod(bench: Arc<Bench>) -> Result<()> {
    let pod = bench.pod("unseen").await?;
    let container = pod.run(ContainerSpec::sleeping("a")).await?;
    let shim = one_shim(&pod).await?;
    bench.node.kill_sandboxer()?;
    signal(shim.pid, nix::sys::signal::Signal::SIGKILL)?;
    bench.node.start_sandboxer().await?;
    until("not ready", SOON, async || not_ready(&pod).await).await?;
    until("no process of the container", SOON, async || none(&inside(container.id())?)).await?;
    removed(&pod).await
}

async fn fifty_pods_leave_no_shim(bench: Arc<Bench>) -> Result<()> {
    for round in 0..10 {
        let names: Vec<String> = (0..5).map(|n| format!("many-{round}-{n}")).collect();
        let cycles = names.iter().map(|name| async {
            let pod = bench.pod(name).await?;
            pod.run(ContainerSpec::sleeping("a")).await?;
            pod.remove().await
        });
        futures::future::try_join_all(cycles).await?;
    }
    let sockets = fs::read_dir(bench.node.layout().sandboxer_state().join("shims"))?.count();
    ensure!(sockets == 0, "{sockets} sockets are left");
    let named = bench.node.layout().containerd_socket().display().to_string();
    let left: Vec<Proc> =
        processes::all()?.into_iter().filter(|p| p.command.contains("shim") && p.command.contains(&named)).collect();
    ensure!(left.is_empty(), "shims are left: {left:?}");
    Ok(())
}

type Run = fn(Arc<Bench>) -> std::pin::Pin<Box<dyn Future<Output = Result<()>>>>;

macro_rules! cases {
    ($($case:ident),* $(,)?) => { vec![$((stringify!($case), (|bench| Box::pin($case(bench))) as Run)),*] };
}

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // One node, one case at a time.
    arguments.test_threads = Some(1);
    let cases: Vec<(&str, Run)> = cases![
        an_idle_pod_has_no_shim_and_a_container_one,
        platform_brings_the_shim,
        an_empty_shim_that_ends_is_followed_by_another,
        a_shim_that_dies_with_containers_ends_the_pod,
        a_shim_that_does_not_come_is_an_error,
        a_killed_daemon_finds_the_shim_again,
        a_shim_that_dies_without_a_daemon_ends_the_pod,
        fifty_pods_leave_no_shim,
    ];
    let runtime = Arc::new(Runtime::new().expect("a runtime"));
    let bench: Arc<tokio::sync::Mutex<Option<Arc<Bench>>>> = Arc::default();
    let trials = cases.into_iter().map(|(name, run)| {
        let (runtime, bench) = (runtime.clone(), bench.clone());
        Trial::test(name, move || {
            let done = runtime.block_on(async {
                let bench = {
                    let mut shared = bench.lock().await;
                    if shared.is_none() {
                        *shared = Some(Arc::new(Bench::start().await?));
                    }
                    shared.clone().context("a bench")?
                };
                bench.order("good")?;
                let before = bench.node.snapshot()?;
                let result = async {
                    tokio::time::timeout(Duration::from_secs(120), run(bench.clone())).await.context("hangs")??;
                    bench.node.settles_to(&before).await
                }
                .await;
                result.map_err(|e| e.context(bench.node.log_tails(60)))
            });
            done.map_err(|e| Failed::from(format!("{e:#}")))
        })
    });
    let conclusion = libtest_mimic::run(&arguments, trials.collect());
    // Ends the node.
    drop(bench.blocking_lock().take());
    conclusion.exit_code()
}
