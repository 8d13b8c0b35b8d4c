//! Shims that hang, and shims that are slow or held: the former are killed, the latter are not.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use kit::machine::cgroup;
use kit::machine::processes::stop;
use kit::{Container, ContainerSpec, Pod, until};
use nix::sys::signal::Signal;

use crate::harness::{
    Case, Harness, Kind, SOON, cases, inside, none, one_shim, removed, shims, signal,
};

/// How long a shim may hang: four looks with 10 s between them, and one that is not complete.
const BOUND: Duration = Duration::from_secs(50);

pub(crate) fn cases() -> Vec<Case> {
    cases![Kind::Own =>
        a_pod_whose_shim_hangs_is_removed_and_the_node_has_stats,
        shims_that_are_slow_or_held_are_not_killed,
    ]
}

/// A process that traces another one until it is dropped.
struct Tracer(std::process::Child);

impl Tracer {
    fn attach(pid: u32) -> Result<Self> {
        let script = "syscall($ARGV[0] + 0, $ARGV[1] + 0, $ARGV[2] + 0, 0, 0); sleep 1000";
        let calls = [libc::SYS_ptrace, i64::from(libc::PTRACE_SEIZE), i64::from(pid)];
        let arguments = calls.map(|number| number.to_string());
        let tracer = Command::new("perl").args(["-e", script]).args(arguments).spawn();
        Ok(Self(tracer.context("run perl")?))
    }
}

impl Drop for Tracer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The cgroup of a shim, frozen until it is dropped.
struct FrozenShim {
    dir: PathBuf,
    pid: u32,
}

impl FrozenShim {
    fn new(pid: u32) -> Result<Self> {
        let root = if cgroup::unified()? { "/sys/fs/cgroup" } else { "/sys/fs/cgroup/freezer" };
        let dir = Path::new(root).join(format!("frozen-shim-{pid}"));
        fs::create_dir(&dir).context("make a cgroup")?;
        let frozen = Self { dir, pid };
        fs::write(frozen.dir.join("cgroup.procs"), pid.to_string()).context("move the shim")?;
        frozen.set("FROZEN", "1")?;
        Ok(frozen)
    }

    fn set(&self, state: &str, freeze: &str) -> Result<()> {
        let (file, word) =
            if cgroup::unified()? { ("cgroup.freeze", freeze) } else { ("freezer.state", state) };
        fs::write(self.dir.join(file), word).context("freeze or thaw")
    }
}

impl Drop for FrozenShim {
    fn drop(&mut self) {
        let _ = self.set("THAWED", "0");
        let root = self.dir.parent().map(|root| root.join("cgroup.procs"));
        let _ = root.map(|procs| fs::write(procs, self.pid.to_string()));
        let _ = fs::remove_dir(&self.dir);
    }
}

fn killed(harness: &Harness) -> Result<Vec<String>> {
    let log = fs::read_to_string(harness.node.layout().sandboxer_log())?;
    let lines = log.lines().filter(|line| line.contains("killing shim that hangs"));
    Ok(lines.map(str::to_owned).collect())
}

async fn is_stopped_in_time(pod: &Pod, container: &Container) -> Result<()> {
    until("the pod of the shim that hangs is stopped", BOUND, async || pod.stop().await).await?;
    until("no process of the container", SOON, async || none(&inside(container.id())?)).await
}

/// Promise: hung_shim_is_killed.
async fn a_pod_whose_shim_hangs_is_removed_and_the_node_has_stats(
    harness: Arc<Harness>,
) -> Result<()> {
    let (pod, other) = (harness.pod("hanging").await?, harness.pod("other").await?);
    let lost = pod.run(ContainerSpec::sleeping("a")).await?;
    let container = other.run(ContainerSpec::sleeping("a")).await?;
    stop(one_shim(&pod).await?.pid).await?;
    until("stats of the node", BOUND, async || {
        let stats = harness.node.cri().list_pod_sandbox_stats("").await?;
        ensure!(stats.iter().any(|stats| stats.attributes.id == other.id()), "{stats:?}");
        Ok(())
    })
    .await?;
    is_stopped_in_time(&pod, &lost).await?;
    removed(&pod).await?;
    let lines: Vec<String> =
        killed(&harness)?.into_iter().filter(|line| line.contains(pod.id())).collect();
    ensure!(lines.len() == 1, "{lines:?}");
    ensure!(container.sh("echo hello").await?.trim() == "hello", "exec in the other pod");
    removed(&other).await
}

/// The shim of another pod hangs for as long. One of them answers late, one is traced and stopped,
/// and one is in a frozen cgroup.
///
/// Promise: hung_shim_is_killed.
async fn shims_that_are_slow_or_held_are_not_killed(harness: Arc<Harness>) -> Result<()> {
    let hanging = harness.pod("clock").await?;
    let lost = hanging.run(ContainerSpec::sleeping("a")).await?;
    let mut others = Vec::new();
    for name in ["traced", "frozen", "slow"] {
        // The calls of this shim pass through a program that does not wait for events.
        harness.order(if name == "slow" { "proxy" } else { "good" })?;
        let pod = harness.pod(name).await?;
        let container = pod.run(ContainerSpec::sleeping("a")).await?;
        let pid = shims(&pod)?.first().context("no shim")?.pid;
        others.push((pod, container, pid));
    }
    harness.order("good")?;
    let pids: Vec<u32> = others.iter().map(|(_, _, pid)| *pid).collect();
    let tracer = Tracer::attach(pids[0])?;
    until("it is traced", SOON, async || {
        let status = fs::read_to_string(format!("/proc/{}/status", pids[0]))?;
        ensure!(!status.contains("TracerPid:\t0\n"), "{status}");
        Ok(())
    })
    .await?;
    signal(pids[0], Signal::SIGSTOP)?;
    let frozen = FrozenShim::new(pids[1])?;
    harness.misbehave("Connect", "late 15")?;
    stop(one_shim(&hanging).await?.pid).await?;
    is_stopped_in_time(&hanging, &lost).await?;
    signal(pids[0], Signal::SIGCONT)?;
    drop((tracer, frozen));
    harness.behave()?;
    removed(&hanging).await?;
    for (pod, container, shim) in &others {
        let killed = killed(&harness)?.into_iter().find(|line| line.contains(pod.id()));
        ensure!(killed.is_none(), "{killed:?}");
        ensure!(shims(pod)?.iter().any(|now| now.pid == *shim), "another shim");
        ensure!(container.sh("echo hello").await?.trim() == "hello", "exec");
        removed(pod).await?;
    }
    Ok(())
}
