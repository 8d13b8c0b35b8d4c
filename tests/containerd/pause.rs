//! An unexpected exit of the pause process.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kit::cri::api;
use kit::machine::cgroup_driver::CgroupDriver;
use kit::{ContainerSpec, PodSpec, until};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::harness::{Bench, Case, cases};

/// How long the exit of a pause process may take to be published.
const SOON: Duration = Duration::from_secs(20);
/// 128 + SIGKILL.
const KILLED: u32 = 137;

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = cases![both: killed_pause, killed_pause_of_an_idle_pod];
    cases.extend(cases![ours, "it keeps no reason": reasons, reason_of_an_oom_kill]);
    cases
}

/// The reason is in the verbose status, also of the next daemon, and is counted once.
///
/// Promise: operators_see_why_a_sandbox_ended.
async fn reasons(bench: Bench) -> Result<()> {
    let ends = [
        (Some(Signal::SIGKILL), "killed by signal 9", "signal"),
        (Some(Signal::SIGTERM), "exited with status 0", "exited"),
        (None, "stopped by a call of Stop", "stopped"),
    ];
    let mut pods = Vec::new();
    for (signal, text, name) in ends {
        let pod = bench.run(PodSpec::new("ended").pid(api::NamespaceMode::POD)).await?;
        match signal {
            Some(signal) => kill(Pid::from_raw(pod.pause_pid().await?.cast_signed()), signal)?,
            None => pod.stop().await?,
        }
        reason_becomes(&bench, pod.id(), &[text]).await?;
        let logged = std::fs::read_to_string(bench.node.layout().sandboxer_log())?;
        let is_end = |line: &&str| line.contains("sandbox stopped") && line.contains(pod.id());
        let lines: Vec<&str> = logged.lines().filter(is_end).collect();
        let [line] = lines[..] else { anyhow::bail!("{lines:?}") };
        ensure!(line.contains(&format!(" reason={name} ")), "{line}");
        pods.push((pod, text));
    }
    let unseen = bench.run(PodSpec::new("unseen").pid(api::NamespaceMode::POD)).await?;
    let pause = unseen.pause_pid().await?;
    bench.node.stop_sandboxer().await?;
    kill(Pid::from_raw(pause.cast_signed()), Signal::SIGKILL)?;
    bench.node.start_sandboxer().await?;
    // Linux 6.15 and newer keeps the status.
    reason_becomes(&bench, unseen.id(), &["killed by signal 9", "it ended while no daemon"])
        .await?;
    unseen.remove().await?;
    for (pod, text) in pods {
        reason_becomes(&bench, pod.id(), &[text]).await?;
        pod.remove().await?;
    }
    Ok(())
}

/// The kernel kills the pause process, and no other, because its cgroup has no memory left.
///
/// Promise: operators_see_why_a_sandbox_ended.
async fn reason_of_an_oom_kill(bench: Bench) -> Result<()> {
    let pod = bench.run(PodSpec::new("oom").pid(api::NamespaceMode::POD)).await?;
    // With it the runtime enables the memory controller, where that is needed.
    pod.run(ContainerSpec::sleeping("main")).await?;
    let pause = pod.pause_pid().await?;
    let cgroup = memory_cgroup(pause)?;
    let (limit, swap) = match kit::machine::cgroup::unified()? {
        true => ("memory.max", ("memory.swap.max", "0")),
        false => ("memory.limit_in_bytes", ("memory.swappiness", "0")),
    };
    std::fs::write(cgroup.join(limit), "64M")?;
    // A kernel without swap may lack the file.
    let _ = std::fs::write(cgroup.join(swap.0), swap.1);
    // No process maps the memory of the file, so that the pause process has the highest score
    // whenever the limit is reached.
    std::fs::write(format!("/proc/{pause}/oom_score_adj"), "1000")?;
    let file = memfd_create(c"memory", MFdFlags::MFD_CLOEXEC)?;
    let script = format!("echo $$ >{}/cgroup.procs; exec head -c 128M", cgroup.display());
    let mut writer = std::process::Command::new("sh")
        .args(["-c", &script])
        .stdin(File::open("/dev/zero")?)
        .stdout(file)
        .spawn()?;
    let text = match CgroupDriver::chosen() {
        CgroupDriver::Cgroupfs => "killed by the kernel: out of memory",
        // systemd has removed the scope with its counter.
        CgroupDriver::Systemd => "killed by ",
    };
    let ended = reason_becomes(&bench, pod.id(), &[text]).await;
    writer.kill()?;
    writer.wait()?;
    ended?;
    pod.remove().await
}

async fn reason_becomes(bench: &Bench, id: &str, texts: &[&str]) -> Result<()> {
    until(&format!("the reason is one of {texts:?}"), SOON, async || {
        let status = bench.node.sandboxer().status(id, true).await?;
        let reason = status.info.get("reason").context("no reason")?;
        ensure!(texts.iter().any(|text| reason.starts_with(text)), "it is {reason}");
        Ok(())
    })
    .await
}

/// The memory of a pod, whose cgroup is the parent of its pause process's; bytes.
pub(crate) fn memory_of_pod(pause: u32) -> Result<u64> {
    let unified = kit::machine::cgroup::unified()?;
    let file = if unified { "memory.current" } else { "memory.usage_in_bytes" };
    let pod = memory_cgroup(pause)?.parent().context("no parent cgroup")?.join(file);
    Ok(std::fs::read_to_string(pod)?.trim().parse()?)
}

/// The directory of a process's cgroup of the memory controller.
fn memory_cgroup(pid: u32) -> Result<PathBuf> {
    let unified = kit::machine::cgroup::unified()?;
    let is_memory = |line: &str| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?);
        let fits = if unified { controllers.is_empty() } else { controllers == "memory" };
        fits.then(|| path.trim_start_matches('/').to_owned())
    };
    let cgroups = std::fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
    let path = cgroups.lines().find_map(is_memory).context("no cgroup with memory")?;
    let root = if unified { "/sys/fs/cgroup" } else { "/sys/fs/cgroup/memory" };
    Ok(Path::new(root).join(path))
}

/// Promise: exit_is_published_once.
async fn killed_pause(bench: Bench) -> Result<()> {
    bench.builtin_leaves(
        &["process", "shim socket"],
        "containerd ends the pod's shim with the pause's task, which the shim refuses while it \
         still has a container, and never again",
    );
    killed(&bench, true).await
}

/// Promise: exit_is_published_once.
async fn killed_pause_of_an_idle_pod(bench: Bench) -> Result<()> {
    killed(&bench, false).await
}

/// Kills the pause of a new pod and checks everything that is reported of it, until the pod is
/// removed.
async fn killed(bench: &Bench, with_container: bool) -> Result<()> {
    use api::ContainerEventType::{CONTAINER_DELETED_EVENT, CONTAINER_STOPPED_EVENT};

    let events = bench.node.events().await?;
    let pod = bench.run(PodSpec::new("killed").pid(api::NamespaceMode::POD)).await?;
    let container = match with_container {
        true => Some(pod.run(ContainerSpec::sleeping("main")).await?),
        false => None,
    };
    let controller = bench.node.controller(bench.handler);
    let id = pod.id().to_owned();
    let waiting = tokio::spawn(async move { controller.wait(&id).await });

    kill(Pid::from_raw(i32::try_from(pod.pause_pid().await?)?), Signal::SIGKILL)?;

    until("the pod is not ready", SOON, async || {
        ensure!(!pod.is_ready().await?, "it is ready");
        Ok(())
    })
    .await?;
    let waited = tokio::time::timeout(kit::patient(SOON), waiting)
        .await
        .context("a Wait from before the end")???;
    ensure!(
        waited.exit_status == KILLED,
        "exit status {} for a Wait from before the end",
        waited.exit_status
    );
    let again = bench
        .node
        .controller(bench.handler)
        .wait(pod.id())
        .await
        .context("a Wait after the end")?;
    ensure!(
        again.exit_status == KILLED,
        "exit status {} for a Wait after the end",
        again.exit_status
    );
    ensure!(
        again.exited_at == waited.exited_at,
        "exited at {:?}, then at {:?}",
        waited.exited_at,
        again.exited_at
    );
    events.until(pod.id(), CONTAINER_STOPPED_EVENT, SOON).await?;
    if let Some(container) = container {
        // It shared the PID namespace, and so has gone with process 1.
        ensure!(
            container.exited(SOON).await? == i32::try_from(KILLED)?,
            "another exit code of the container"
        );
    }
    ensure!(
        pod.run(ContainerSpec::sleeping("late")).await.is_err(),
        "a container was started in a dead pod"
    );

    pod.stop().await?;
    bench.node.cri().remove_pod_sandbox(pod.id()).await?;
    events.until(pod.id(), CONTAINER_DELETED_EVENT, SOON).await?;
    let published = events.of(pod.id())?;
    let stopped = published.iter().filter(|kind| **kind == CONTAINER_STOPPED_EVENT).count();
    ensure!(stopped == 1, "{stopped} stopped events: {published:?}");
    pod.clear().await
}
