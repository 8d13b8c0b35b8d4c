//! Containers whose processes are frozen when their shim ends.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use kit::machine::cgroup;
use kit::{Container, ContainerSpec, Pod, until};
use nix::sys::signal::Signal;

use crate::harness::{
    Case, Harness, SOON, cases_of_both, inside, no_shim, none, not_ready, one_shim, removed, signal,
};

pub(crate) fn cases() -> Vec<Case> {
    let mut all = cases_of_both![a_frozen_container_ends_with_its_shim];
    all.extend(if cgroup::unified().expect("the version of cgroups") {
        cases_of_both![processes_in_frozen_cgroups_above_and_elsewhere_end]
    } else {
        cases_of_both![
            processes_that_do_not_end_cost_the_daemon_nothing,
            callers_do_not_wait_for_a_killed_shim_that_does_not_exit,
        ]
    });
    all
}

/// More processes than the daemon may keep threads or descriptors for.
const MANY: &str =
    "for n in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do sleep 1000 & done; wait";

async fn run(harness: &Harness, name: &str) -> Result<(Pod, Container)> {
    let pod = harness.pod(name).await?;
    let container = pod.run(ContainerSpec::sh("a", MANY)).await?;
    until("all of its processes", SOON, async || {
        ensure!(inside(container.id())?.len() > 20, "not yet");
        Ok(())
    })
    .await?;
    Ok((pod, container))
}

/// The directory of a process's cgroup in the hierarchy that can freeze it.
fn freezer(pid: u32) -> Result<PathBuf> {
    let cgroups = fs::read_to_string(format!("/proc/{pid}/cgroup")).context("cgroups")?;
    let mut lines = cgroups.lines();
    let (root, path) = if cgroup::unified()? {
        ("/sys/fs/cgroup", lines.find_map(|line| line.strip_prefix("0::")))
    } else {
        let path = lines.find_map(|line| line.split_once(":freezer:"));
        ("/sys/fs/cgroup/freezer", path.map(|(_, path)| path))
    };
    let path = path.with_context(|| format!("no freezer in {cgroups:?}"))?;
    Ok(Path::new(root).join(path.trim_start_matches('/')))
}

fn freezer_of(container: &Container) -> Result<PathBuf> {
    freezer(inside(container.id())?.first().context("no process")?.pid)
}

/// A frozen cgroup, until it is dropped.
struct Frozen(PathBuf, &'static str);

impl Frozen {
    async fn new(dir: &Path) -> Result<Self> {
        // The file and the values that freeze and thaw, and the value that reports all processes as
        // frozen.
        let (file, freeze, thaw, shown, frozen) = if cgroup::unified()? {
            ("cgroup.freeze", "1", "0", "cgroup.events", "frozen 1")
        } else {
            ("freezer.state", "FROZEN", "THAWED", "freezer.state", "FROZEN")
        };
        let file = dir.join(file);
        fs::write(&file, freeze).with_context(|| file.display().to_string())?;
        let guard = Self(file, thaw);
        until("frozen", SOON, async || {
            let state = fs::read_to_string(dir.join(shown))?;
            ensure!(state.lines().any(|line| line == frozen), "{state:?}");
            Ok(())
        })
        .await?;
        Ok(guard)
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        let _ = fs::write(&self.0, self.1);
    }
}

/// A cgroup in which the daemon has no say, with the processes of a container.
struct Elsewhere {
    outer: PathBuf,
    inner: PathBuf,
}

impl Elsewhere {
    fn hold(container: &Container) -> Result<Self> {
        let outer = freezer(std::process::id())?.join(format!("held-{}", std::process::id()));
        let inner = outer.join(container.id());
        fs::create_dir_all(&inner).context("make a cgroup")?;
        for process in inside(container.id())? {
            fs::write(inner.join("cgroup.procs"), process.pid.to_string())
                .context("move a process")?;
        }
        Ok(Self { outer, inner })
    }

    fn remove(self) -> Result<()> {
        for dir in [self.inner, self.outer] {
            fs::remove_dir(&dir).with_context(|| dir.display().to_string())?;
        }
        Ok(())
    }
}

/// Descriptors of processes and threads that the daemon has.
fn kept(daemon: u32) -> Result<(usize, usize)> {
    let links = fs::read_dir(format!("/proc/{daemon}/fd"))?
        .flatten()
        .filter_map(|fd| fs::read_link(fd.path()).ok());
    let pidfds = links.filter(|link| link.to_string_lossy().contains("pidfd")).count();
    Ok((pidfds, fs::read_dir(format!("/proc/{daemon}/task"))?.count()))
}

/// The daemon has no more descriptors and threads than before. One thread may wait in the kernel's
/// stead; those that work on blocking calls come and go.
fn keeps_no_more_than(daemon: u32, before: (usize, usize)) -> Result<()> {
    let after = kept(daemon)?;
    ensure!(
        after.0 <= before.0 + 1 && after.1 <= before.1 + 8,
        "pidfds and threads: {before:?}, then {after:?}"
    );
    Ok(())
}

/// The shim of a pod with frozen processes is killed: they end, at no cost, and so the pod can be
/// removed while what froze them still wants them frozen.
async fn end_frozen(harness: &Harness, pod: &Pod, container: &Container, dir: &Path) -> Result<()> {
    let daemon = harness.node.sandboxer_pid()?;
    let frozen = Frozen::new(dir).await?;
    let before = kept(daemon)?;
    signal(one_shim(pod).await?.pid, Signal::SIGKILL)?;
    until("not ready", SOON, async || not_ready(pod).await).await?;
    until("no process of the container", SOON, async || none(&inside(container.id())?)).await?;
    keeps_no_more_than(daemon, before)?;
    removed(pod).await?;
    drop(frozen);
    no_shim(pod).await
}

/// Frozen by another program, as by a pause of the container: with version 1 it is thawed, as a
/// frozen process does not die there.
///
/// Promise: container_delays_no_other.
async fn a_frozen_container_ends_with_its_shim(harness: Arc<Harness>) -> Result<()> {
    let (pod, container) = run(&harness, "paused").await?;
    let dir = freezer_of(&container)?;
    end_frozen(&harness, &pod, &container, &dir).await
}

/// With version 2 a frozen process dies wherever it is frozen.
async fn processes_in_frozen_cgroups_above_and_elsewhere_end(harness: Arc<Harness>) -> Result<()> {
    let (pod, container) = run(&harness, "above").await?;
    let own = freezer_of(&container)?;
    let above = own.parent().context("a cgroup above")?;
    ensure!(above != Path::new("/sys/fs/cgroup"), "the container is in no pod's cgroup");
    end_frozen(&harness, &pod, &container, above).await?;
    let (pod, container) = run(&harness, "elsewhere").await?;
    let held = Elsewhere::hold(&container)?;
    end_frozen(&harness, &pod, &container, &held.outer).await?;
    held.remove()
}

/// Frozen where the daemon has no say, with version 1 they do not die, as in a system call that
/// does not return.
///
/// Promise: container_delays_no_other.
async fn processes_that_do_not_end_cost_the_daemon_nothing(harness: Arc<Harness>) -> Result<()> {
    let daemon = harness.node.sandboxer_pid()?;
    let (pod, container) = run(&harness, "stuck").await?;
    let held = Elsewhere::hold(&container)?;
    let frozen = Frozen::new(&held.outer).await?;
    let before = kept(daemon)?;
    signal(one_shim(&pod).await?.pid, Signal::SIGKILL)?;
    until("not ready", SOON, async || not_ready(&pod).await).await?;
    for _ in 0..2 {
        ensure!(
            harness.node.sandboxer().shutdown(pod.id()).await.is_err(),
            "it is gone, and its processes are not"
        );
        ensure!(inside(container.id())?.len() > 20, "its processes are gone");
    }
    keeps_no_more_than(daemon, before)?;
    drop(frozen);
    until("no process of the container", SOON, async || none(&inside(container.id())?)).await?;
    removed(&pod).await?;
    held.remove()?;
    no_shim(&pod).await
}

/// A frozen shim does not die with version 1, as in a system call that does not return.
///
/// Promise: failed_shim_leaves_nothing.
async fn callers_do_not_wait_for_a_killed_shim_that_does_not_exit(
    harness: Arc<Harness>,
) -> Result<()> {
    let pod = harness.pod("stiff").await?;
    let dir = freezer(std::process::id())?.join(format!("shim-{}", std::process::id()));
    fs::create_dir(&dir).context("make a cgroup")?;
    harness.order_freeze(&dir)?;
    let begun = Instant::now();
    let answer = pod.run(ContainerSpec::sleeping("a")).await;
    let took = begun.elapsed();
    harness.order("good")?;
    let frozen = fs::read_to_string(dir.join("cgroup.procs"))?;
    let log = fs::read_to_string(harness.node.layout().sandboxer_log())?;
    fs::write(dir.join("freezer.state"), "THAWED")?;
    ensure!(answer.is_err() && !frozen.is_empty(), "{frozen:?}: the shim serves, or has exited");
    ensure!(took < Duration::from_secs(20), "took {took:?}");
    let line = log.lines().find(|line| line.contains(pod.id()) && line.contains("did not answer"));
    ensure!(line.is_some_and(|line| line.contains("failed to launch shim")), "{line:?}");
    no_shim(&pod).await?;
    pod.run(ContainerSpec::sleeping("b")).await.context("after the shim that was frozen")?;
    removed(&pod).await?;
    fs::remove_dir(&dir).context("remove the cgroup")
}
