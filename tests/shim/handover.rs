//! Shims that get their socket from the sandboxer: the pods of the native driver.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use kit::machine::processes::{self, Proc};
use kit::{ContainerSpec, Pod};
use nix::sys::signal::Signal;
use sha2::{Digest as _, Sha256};

use crate::harness::{
    Case, Harness, SOON, cases_of_both, end_empty, end_empty_by, inside, no_shim, none, not_ready,
    one_shim, removed, shims, signal,
};
use kit::until;

pub(crate) fn cases() -> Vec<Case> {
    cases_of_both![
        an_idle_pod_has_no_shim_and_a_container_one,
        platform_brings_the_shim,
        an_empty_shim_that_ends_is_followed_by_another,
        a_shim_that_dies_with_containers_ends_the_pod,
        the_end_of_a_shim_touches_no_container_of_another_pod,
        a_shim_that_does_not_come_is_an_error,
        a_killed_daemon_finds_the_shim_again,
        a_restarted_daemon_keeps_the_socket_that_its_shim_has,
        a_shim_that_dies_without_a_daemon_ends_the_pod,
        a_shim_that_cannot_be_looked_for_is_found_later,
        a_pod_that_is_removed_while_its_dead_shim_is_cleaned_up_leaves_nothing,
        calls_that_fail_are_late_or_lost_leave_nothing,
        fifty_pods_leave_no_shim,
        a_shim_has_the_variables_that_are_set,
    ]
}

/// Promise: idle_pod_has_no_shim.
async fn an_idle_pod_has_no_shim_and_a_container_one(harness: Arc<Harness>) -> Result<()> {
    let pod = harness.pod("idle").await?;
    ensure!(shims(&pod)?.is_empty(), "an idle pod has a shim");
    let first = pod.run(ContainerSpec::sleeping("a")).await?;
    let shim = one_shim(&pod).await?;
    let second = pod.run(ContainerSpec::sleeping("b")).await?;
    ensure!(first.sh("echo hello").await?.trim() == "hello", "exec");
    ensure!(one_shim(&pod).await?.pid == shim.pid, "the second container has another shim");
    let own: i32 = fs::read_to_string("/proc/self/oom_score_adj")?.trim().parse()?;
    let score: i32 =
        fs::read_to_string(format!("/proc/{}/oom_score_adj", shim.pid))?.trim().parse()?;
    ensure!(score == own + 1, "oom_score_adj {score}, the daemon's is {own}");
    for container in [first, second] {
        container.stop().await?;
        container.remove().await?;
    }
    pod.remove().await?;
    no_shim(&pod).await
}

async fn platform_brings_the_shim(harness: Arc<Harness>) -> Result<()> {
    let pod = harness.pod("platform").await?;
    harness.node.sandboxer().platform(pod.id()).await?;
    one_shim(&pod).await?;
    pod.remove().await?;
    no_shim(&pod).await
}

/// As containerd has an empty shim do from 2.4 on.
async fn an_empty_shim_that_ends_is_followed_by_another(harness: Arc<Harness>) -> Result<()> {
    let pod = harness.pod("again").await?;
    let first = pod.run(ContainerSpec::sleeping("a")).await?;
    let shim = one_shim(&pod).await?;
    harness.bring_shim(&pod).await?;
    first.stop().await?;
    first.remove().await?;
    end_empty(&pod, &shim).await?;
    no_shim(&pod).await?;
    ensure!(pod.is_ready().await?, "the pod ended with its empty shim");
    pod.run(ContainerSpec::sleeping("b")).await?;
    ensure!(one_shim(&pod).await?.pid != shim.pid, "the same shim");
    pod.remove().await
}

/// Promise: dead_shim_ends_its_pod_alone.
async fn a_shim_that_dies_with_containers_ends_the_pod(harness: Arc<Harness>) -> Result<()> {
    for (name, kill) in [("killed", Signal::SIGKILL), ("terminated", Signal::SIGTERM)] {
        let pod = harness.pod(name).await?;
        let container = pod.run(ContainerSpec::sh("a", "sleep 1000 & sleep 1000")).await?;
        ensure!(!inside(container.id())?.is_empty(), "no process in the container's cgroup");
        let shim = one_shim(&pod).await?;
        signal(shim.pid, kill)?;
        until("not ready", SOON, async || not_ready(&pod).await).await?;
        until("no process of the container", SOON, async || none(&inside(container.id())?)).await?;
        let status = harness.node.sandboxer().status(pod.id(), true).await?;
        let reason = status.info.get("reason").context("no reason in the verbose status")?;
        ensure!(reason.contains("shim") && reason.contains(container.id()), "reason: {reason}");
        removed(&pod).await?;
        no_shim(&pod).await?;
        let bundle = harness
            .node
            .layout()
            .state()
            .join("io.containerd.runtime.v2.task/k8s.io")
            .join(container.id());
        ensure!(!bundle.exists(), "{} is left", bundle.display());
    }
    Ok(())
}

/// A process in the IPC namespace of a pod, and in the cgroups of `member`, or in one that is named
/// by `stranger`, which neither containerd nor the runtime knows.
struct Visitor {
    process: std::process::Child,
    made: Option<PathBuf>,
}

impl Visitor {
    fn new(pause: u32, member: Option<u32>, stranger: &str) -> Result<Self> {
        let mut command = std::process::Command::new("nsenter");
        let process = command
            .args(["-t", &pause.to_string(), "--ipc", "sleep", "1003"])
            .spawn()
            .context("nsenter")?;
        let made = member.is_none().then(|| Path::new("/sys/fs/cgroup/pids").join(stranger));
        let dirs = match (member, &made) {
            (Some(member), _) => {
                let cgroups = fs::read_to_string(format!("/proc/{member}/cgroup"))
                    .context("cgroups of the member")?;
                let joined = cgroups.lines().filter_map(|line| {
                    let mut fields = line.splitn(3, ':').skip(1);
                    let (controllers, path) =
                        (fields.next()?, fields.next()?.trim_start_matches('/'));
                    Some(Path::new("/sys/fs/cgroup").join(controllers).join(path))
                });
                joined.filter(|dir| dir.join("cgroup.procs").exists()).collect()
            }
            (None, Some(made)) => {
                fs::create_dir_all(made).context("make a cgroup")?;
                vec![made.clone()]
            }
            (None, None) => Vec::new(),
        };
        ensure!(!dirs.is_empty(), "no cgroup to join");
        for dir in dirs {
            fs::write(dir.join("cgroup.procs"), process.id().to_string())
                .with_context(|| format!("{}", dir.display()))?;
        }
        Ok(Self { process, made })
    }

    async fn arrived(&self, pause: u32) -> Result<()> {
        let ipc = |pid: u32| fs::read_link(format!("/proc/{pid}/ns/ipc"));
        until("a visitor", SOON, async || {
            ensure!(ipc(self.process.id())? == ipc(pause)?, "it is not inside");
            Ok(())
        })
        .await
    }

    fn lives(&mut self) -> Result<bool> {
        Ok(self.process.try_wait()?.is_none())
    }
}

impl Drop for Visitor {
    fn drop(&mut self) {
        let _ = (self.process.kill(), self.process.wait());
        if let Some(made) = &self.made {
            let _ = fs::remove_dir(made);
        }
    }
}

/// Promise: dead_shim_ends_its_pod_alone.
async fn the_end_of_a_shim_touches_no_container_of_another_pod(
    harness: Arc<Harness>,
) -> Result<()> {
    let (pod, other) = (harness.pod("visited").await?, harness.pod("visiting").await?);
    let foreign = other.run(ContainerSpec::sleeping("agent")).await?;
    let member = until("one process of the foreign container", SOON, async || {
        match inside(foreign.id())?.as_slice() {
            [one] if one.command.contains("sleep 3600") => Ok(one.pid),
            others => bail!("{others:?}"),
        }
    })
    .await?;
    let pause = pod.pause_pid().await?;
    let stranger = "5".repeat(64);
    let mut agent = Visitor::new(pause, Some(member), &stranger)?;
    let mut unknown = Visitor::new(pause, None, &stranger)?;
    agent.arrived(pause).await?;
    unknown.arrived(pause).await?;
    ensure!(inside(foreign.id())?.len() == 2, "the agent is not in the foreign container");
    ensure!(inside(&stranger)?.len() == 1, "the unknown one is in no container");
    // An empty shim that ends, as with containerd 2.4 after each container.
    for name in ["a", "b"] {
        let container = pod.run(ContainerSpec::sleeping(name)).await?;
        let shim = one_shim(&pod).await?;
        harness.bring_shim(&pod).await?;
        container.stop().await?;
        container.remove().await?;
        end_empty(&pod, &shim).await?;
        no_shim(&pod).await?;
    }
    // An empty shim that is killed.
    let container = pod.run(ContainerSpec::sleeping("killed")).await?;
    let shim = one_shim(&pod).await?;
    harness.bring_shim(&pod).await?;
    container.stop().await?;
    container.remove().await?;
    end_empty_by(&pod, &shim, Signal::SIGKILL).await?;
    no_shim(&pod).await?;
    pod.run(ContainerSpec::sleeping("c")).await.context("after the shims that ended")?;
    ensure!(pod.is_ready().await?, "the pod ended with its visitors");
    ensure!(agent.lives()? && unknown.lives()?, "a visitor was killed");
    ensure!(
        other.is_ready().await? && inside(foreign.id())?.len() == 2,
        "the foreign container was touched"
    );
    // A shim that dies ends the pod, with processes of unknown containers below the pod's cgroup,
    // and no process of another's cgroup.
    let below = format!("{}/{}", pod.config().linux.cgroup_parent, "6".repeat(64));
    let mut lost = Visitor::new(pause, None, below.trim_start_matches('/'))?;
    lost.arrived(pause).await?;
    signal(one_shim(&pod).await?.pid, Signal::SIGKILL)?;
    until("not ready", SOON, async || not_ready(&pod).await).await?;
    until("the end of the pod's own", SOON, || {
        let lives = lost.lives();
        async move {
            ensure!(!lives?, "it lives on in a pod that is gone");
            Ok(())
        }
    })
    .await?;
    drop(lost);
    removed(&pod).await?;
    ensure!(agent.lives()? && unknown.lives()?, "a visitor was killed with the pod");
    ensure!(foreign.sh("echo lives").await?.trim() == "lives", "the foreign container was touched");
    drop((agent, unknown));
    removed(&other).await
}

/// Promise: failed_shim_leaves_nothing.
async fn a_shim_that_does_not_come_is_an_error(harness: Arc<Harness>) -> Result<()> {
    let pod = harness.pod("misbehaving").await?;
    for (word, limit) in [("exit", 8), ("end", 8), ("hang", 20), ("chatter", 20)] {
        harness.order(word)?;
        let begun = Instant::now();
        let answer = pod.run(ContainerSpec::sleeping(word)).await;
        harness.order("good")?;
        ensure!(answer.is_err(), "{word}: the container runs");
        let took = begun.elapsed();
        ensure!(took < Duration::from_secs(limit), "{word}: took {took:?}");
        no_shim(&pod).await.context(word)?;
        ensure!(pod.is_ready().await?, "{word}: the pod is not ready");
    }
    let log = fs::read_to_string(harness.node.layout().sandboxer_log())?;
    for expected in
        ["cannot continue", "exited with status 7", "did not answer", "the next are dropped"]
    {
        ensure!(log.contains(expected), "the log does not say {expected:?}");
    }
    pod.run(ContainerSpec::sleeping("good")).await.context("after the bad ones")?;
    pod.remove().await
}

/// Promise: shim_is_found_again.
async fn a_killed_daemon_finds_the_shim_again(harness: Arc<Harness>) -> Result<()> {
    let (idle, busy) = (harness.pod("idle").await?, harness.pod("busy").await?);
    let first = busy.run(ContainerSpec::sleeping("a")).await?;
    let shim = one_shim(&busy).await?;
    harness.restart().await?;
    ensure!(one_shim(&busy).await?.pid == shim.pid, "another shim");
    ensure!(first.sh("echo hello").await?.trim() == "hello", "exec");
    let second = busy.run(ContainerSpec::sleeping("b")).await?;
    ensure!(one_shim(&busy).await?.pid == shim.pid, "another shim for the second container");
    ensure!(shims(&idle)?.is_empty(), "the idle pod has a shim");
    idle.run(ContainerSpec::sleeping("a")).await.context("in the idle pod")?;
    one_shim(&idle).await?;
    // As if the daemon had been killed between the launch and its record.
    harness.node.kill_sandboxer()?;
    let record = harness.record(&busy);
    fs::write(&record, "\"launching\"")?;
    harness.node.start_sandboxer().await?;
    let recorded = fs::read_to_string(&record)?;
    ensure!(recorded.contains(&format!("\"pid\":{}", shim.pid)), "the record is {recorded}");
    harness.bring_shim(&busy).await?;
    for container in [first, second] {
        container.stop().await?;
        container.remove().await?;
    }
    end_empty(&busy, &shim).await?;
    no_shim(&busy).await?;
    busy.run(ContainerSpec::sleeping("c")).await.context("after the shim that was taken over")?;
    for pod in [idle, busy] {
        pod.remove().await?;
        no_shim(&pod).await?;
    }
    Ok(())
}

/// The socket of the pod's endpoint, as the file at its path.
fn socket(harness: &Harness, pod: &Pod) -> Result<u64> {
    let digest = Sha256::digest(pod.id().as_bytes());
    let name: String = digest.iter().take(16).map(|byte| format!("{byte:02x}")).collect();
    let path = harness.node.layout().sandboxer_state().join("shims").join(name);
    Ok(fs::metadata(&path).with_context(|| path.display().to_string())?.ino())
}

/// A new socket at its path would have another inode, and earlier callers would have been
/// refused.
///
/// Promise: shim_is_found_again.
async fn a_restarted_daemon_keeps_the_socket_that_its_shim_has(
    harness: Arc<Harness>,
) -> Result<()> {
    let pod = harness.pod("socket").await?;
    let first = pod.run(ContainerSpec::sleeping("a")).await?;
    let (shim, made) = (one_shim(&pod).await?, socket(&harness, &pod)?);
    for _ in 0..2 {
        harness.restart().await?;
    }
    harness.bring_shim(&pod).await?;
    first.stop().await?;
    first.remove().await?;
    end_empty(&pod, &shim).await?;
    no_shim(&pod).await?;
    let second = pod.run(ContainerSpec::sleeping("b")).await?;
    ensure!(one_shim(&pod).await?.pid != shim.pid, "the same shim");
    ensure!(socket(&harness, &pod)? == made, "another socket");
    ensure!(second.sh("echo hello").await?.trim() == "hello", "exec");
    removed(&pod).await?;
    no_shim(&pod).await
}

/// containerd is stopped: else it may have cleaned up after the container before the daemon
/// looks.
///
/// Promise: dead_shim_ends_its_pod_alone.
async fn a_shim_that_dies_without_a_daemon_ends_the_pod(harness: Arc<Harness>) -> Result<()> {
    let pod = harness.pod("unseen").await?;
    let container = pod.run(ContainerSpec::sleeping("a")).await?;
    let shim = one_shim(&pod).await?;
    harness.node.kill_sandboxer()?;
    let containerd = harness.node.containerd_pid()?;
    processes::stop(containerd).await?;
    signal(shim.pid, Signal::SIGKILL)?;
    let ends = async {
        let ended = until("not ready", SOON, async || {
            let state = harness.node.sandboxer().status(pod.id(), false).await?.state;
            ensure!(state == "SANDBOX_NOTREADY", "{state}");
            Ok(())
        });
        let ended = ended.await;
        signal(containerd, Signal::SIGCONT).and(ended)
    };
    let (started, ended) = futures::future::join(harness.node.start_sandboxer(), ends).await;
    ended.and(started)?;
    until("no process of the container", SOON, async || none(&inside(container.id())?)).await?;
    until("not ready in CRI", SOON, async || not_ready(&pod).await).await?;
    removed(&pod).await
}

/// The daemon that is started cannot read the record, as when the node is out of descriptors.
/// Neither pod nor shim suffers, and both can be ended when it can be read again.
///
/// Promise: shim_is_found_again.
async fn a_shim_that_cannot_be_looked_for_is_found_later(harness: Arc<Harness>) -> Result<()> {
    let pod = harness.pod("unread").await?;
    let container = pod.run(ContainerSpec::sleeping("a")).await?;
    let (shim, pause) = (one_shim(&pod).await?, pod.pause_pid().await?);
    let (record, aside) = (harness.record(&pod), harness.record(&pod).with_extension("aside"));
    harness.node.kill_sandboxer()?;
    fs::rename(&record, &aside)?;
    fs::create_dir(&record)?;
    harness.node.start_sandboxer().await?;
    let log = fs::read_to_string(harness.node.layout().sandboxer_log())?;
    ensure!(log.contains("read record of shim"), "the record could be read");
    ensure!(one_shim(&pod).await?.pid == shim.pid, "another shim");
    ensure!(processes::one(pause)?.state != 'Z', "the pause has ended");
    ensure!(container.sh("echo hello").await?.trim() == "hello", "exec");
    // An end of the sandbox that does not know of the shim would leave it.
    let unknown = harness.node.sandboxer().shutdown(pod.id()).await;
    ensure!(unknown.is_err(), "the sandbox is gone");
    ensure!(one_shim(&pod).await?.pid == shim.pid, "the shim is gone");
    ensure!(!inside(container.id())?.is_empty(), "the container is gone");
    fs::remove_dir(&record)?;
    fs::rename(&aside, &record)?;
    removed(&pod).await?;
    no_shim(&pod).await
}

/// The shim's `delete` takes its time, and the pod's end does not wait for anybody.
async fn a_pod_that_is_removed_while_its_dead_shim_is_cleaned_up_leaves_nothing(
    harness: Arc<Harness>,
) -> Result<()> {
    let pod = harness.pod("tardy").await?;
    for name in ["a", "b"] {
        pod.run(ContainerSpec::sleeping(name)).await?;
    }
    harness.order("tardy")?;
    signal(one_shim(&pod).await?.pid, Signal::SIGKILL)?;
    until("not ready", SOON, async || not_ready(&pod).await).await?;
    removed(&pod).await?;
    let log = fs::read_to_string(harness.node.layout().sandboxer_log())?;
    let failed = log
        .lines()
        .find(|line| line.contains(pod.id()) && line.contains("failed to clean up container"));
    ensure!(failed.is_none(), "{failed:?}");
    Ok(())
}

async fn fifty_pods_leave_no_shim(harness: Arc<Harness>) -> Result<()> {
    for round in 0..10 {
        let names: Vec<String> = (0..5).map(|n| format!("many-{round}-{n}")).collect();
        let cycles = names.iter().map(|name| async {
            let pod = harness.pod(name).await?;
            pod.run(ContainerSpec::sleeping("a")).await?;
            pod.remove().await
        });
        futures::future::try_join_all(cycles).await?;
    }
    let sockets = fs::read_dir(harness.node.layout().sandboxer_state().join("shims"))?.count();
    ensure!(sockets == 0, "{sockets} sockets are left");
    let named = harness.node.layout().containerd_socket().display().to_string();
    let left: Vec<Proc> = processes::all()?
        .into_iter()
        .filter(|p| p.command.contains("shim") && p.command.contains(&named))
        .collect();
    ensure!(left.is_empty(), "shims are left: {left:?}");
    Ok(())
}

/// containerd's calls to the shim fail on their way; the pod is removed all the same, as
/// kubelet does, and nothing of it stays.
///
/// Promise: failed_shim_leaves_nothing.
async fn calls_that_fail_are_late_or_lost_leave_nothing(harness: Arc<Harness>) -> Result<()> {
    harness.order("proxy")?;
    for (method, how) in [
        ("Delete", "fail 2"),
        ("Delete", "late 12"),
        ("Delete", "lose 1"),
        ("Delete", "cut 1"),
        ("Delete", "die 1"),
        ("Create", "fail 1"),
    ] {
        let named = format!("{method} {how}");
        let before = harness.node.snapshot()?;
        let pod = harness.pod("astray").await?;
        harness.misbehave(method, how)?;
        let other = harness.pod("other").await?;
        match pod.run(ContainerSpec::sleeping("a")).await {
            Ok(container) => drop(container.stop().await),
            Err(e) => ensure!(method == "Create", "{named}: {e:#}"),
        }
        other
            .run(ContainerSpec::sleeping("b"))
            .await
            .with_context(|| format!("{named}: another pod"))?;
        for pod in [pod, other] {
            removed(&pod).await.with_context(|| named.clone())?;
            no_shim(&pod).await.with_context(|| named.clone())?;
        }
        // Neither a cgroup nor a state of the runtime's is left.
        harness.node.settles_to(&before).await.with_context(|| named.clone())?;
        harness.behave()?;
    }
    Ok(())
}

/// Its server, and the command that cleans up after it.
async fn a_shim_has_the_variables_that_are_set(harness: Arc<Harness>) -> Result<()> {
    let pod = harness.pod("variables").await?;
    pod.run(ContainerSpec::sleeping("a")).await?;
    let shim = one_shim(&pod).await?;
    let environment = std::fs::read_to_string(format!("/proc/{}/environ", shim.pid))?;
    let set = environment.split('\0').filter(|variable| *variable == "KIT_VARIABLE=set").count();
    ensure!(set == 1, "{environment:?}");
    signal(shim.pid, Signal::SIGKILL)?;
    until("a call that cleans up", SOON, async || {
        ensure!(harness.deleted()? == "set\n");
        Ok(())
    })
    .await?;
    removed(&pod).await?;
    no_shim(&pod).await
}
