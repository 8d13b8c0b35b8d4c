//! What happens to a pod's shim.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use kit::cri::api::ContainerState;
use kit::grpc::DEADLINE_EXCEEDED;
use kit::machine::processes;
use kit::strace::Fault;
use kit::{Container, ContainerSpec, Pod, until};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::cell::{Cell, seconds};
use crate::events::{Run, inside, shim};

/// How long CRI may take to notice an end.
const NOTICED: Duration = Duration::from_secs(30);
/// Kills in StartContainer.
const KILLS: u32 = 20;

pub(crate) fn signal(pid: u32, signal: Signal) -> Result<()> {
    Ok(kill(Pid::from_raw(pid.cast_signed()), signal)?)
}

/// Whether CRI says that a container runs.
async fn runs(container: &Container) -> Result<bool> {
    Ok(container.status().await?.state.enum_value() == Ok(ContainerState::CONTAINER_RUNNING))
}

/// The shim is killed.
pub(crate) async fn killed(run: Run) -> Result<Cell> {
    let mut cell = Cell::default();
    let pod = run.pod("killed").await?;
    let container = pod.run(ContainerSpec::sleeping("main")).await?;
    let begun = Instant::now();
    signal(shim(&pod)?.pid, Signal::SIGKILL)?;
    let noticed = until("the container is not running", NOTICED, async || {
        ensure!(!runs(&container).await?, "it runs");
        Ok(())
    })
    .await;
    match noticed {
        Ok(()) => cell.fact(format!("noticed in {:.2} s", begun.elapsed().as_secs_f32())),
        Err(_) => cell.loss(format!("not noticed in {} s", NOTICED.as_secs())),
    }
    cell.remove(&pod).await?;
    let living = inside(container.id())?.len();
    if living > 0 {
        cell.loss("the container's process runs on");
    }
    Ok(cell)
}

/// The shim is killed at different moments of StartContainer, each time that of another pod.
pub(crate) async fn killed_in_start(run: Run) -> Result<Cell> {
    let mut cell = Cell::default();
    let pod = run.pod("whole").await?;
    let container = pod.create(ContainerSpec::sleeping("main")).await?;
    let begun = Instant::now();
    run.node.cri().start_container(container.id()).await?;
    let whole = begun.elapsed();
    pod.remove().await?;
    let (mut slowest, mut interrupted) = (Duration::ZERO, 0);
    let kills = if run.short { 3 } else { KILLS };
    for nth in 0..kills {
        let pod = run.pod(&format!("killed-{nth}")).await?;
        let container = pod.create(ContainerSpec::sleeping("main")).await?;
        let shim = shim(&pod)?.pid;
        let (node, id) = (run.node.clone(), container.id().to_owned());
        let starting = tokio::spawn(async move { node.cri().start_container(&id).await });
        tokio::time::sleep(whole.mul_f32((nth as f32 + 0.5) / kills as f32)).await;
        signal(shim, Signal::SIGKILL)?;
        // The call has failed, or it had ended before the kill.
        interrupted += usize::from(starting.await?.is_err());
        let begun = Instant::now();
        if !Cell::default().remove(&pod).await? {
            cell.loss("a pod cannot be removed");
        }
        slowest = slowest.max(begun.elapsed());
    }
    ensure!(interrupted > 0, "each call was done before its kill");
    cell.fact(format!("{kills} kills, spread over {} ms", whole.as_millis()));
    cell.fact(format!("stop and remove take {} at most", seconds(slowest)));
    Ok(cell)
}

/// Each umount2 of the shim takes 12 s.
pub(crate) async fn slow_unmount(run: Run) -> Result<Cell> {
    let mut cell = Cell::default();
    let pod = run.pod("slow").await?;
    pod.run(ContainerSpec::sleeping("main")).await?;
    let slow = Fault::begin(shim(&pod)?.pid, &["umount2:delay_enter=12s"]).await?;
    cell.remove(&pod).await?;
    drop(slow);
    Ok(cell)
}

/// The shim is stopped while containerd starts, and continued after that.
pub(crate) async fn hangs_at_start(run: Run) -> Result<Cell> {
    let mut cell = Cell::default();
    let pod = run.pod("hangs").await?;
    let container = pod.run(ContainerSpec::sleeping("main")).await?;
    let shim = shim(&pod)?.pid;
    processes::stop(shim).await?;
    run.node.kill_containerd()?;
    let begun = Instant::now();
    let started = run.node.start_containerd().await;
    cell.check(started.is_ok(), format!("containerd is ready in {}", seconds(begun.elapsed())));
    started?;
    // A shim that was killed as one that hangs is gone.
    let _ = signal(shim, Signal::SIGCONT);
    let ready = pod.is_ready().await?;
    cell.check(ready, if ready { "the pod stays Ready" } else { "the pod is NotReady" });
    let works = container.sh("echo runs").await.is_ok_and(|said| said == "runs\n");
    cell.check(works, if works { "exec works" } else { "exec fails" });
    if ready && !works {
        replace(&mut cell, &pod, &container).await?;
    }
    cell.remove(&pod).await?;
    Ok(cell)
}

/// kubelet starts another container for one that CRI reports as ended, without a StopContainer.
async fn replace(cell: &mut Cell, pod: &Pod, old: &Container) -> Result<()> {
    let next = pod.run(ContainerSpec::sleeping("main").attempt(1)).await?;
    let works = next.sh("echo runs").await.is_ok_and(|said| said == "runs\n");
    cell.check(works, if works { "another container runs" } else { "no other container runs" });
    if !inside(old.id())?.is_empty() {
        cell.loss("beside the old one");
    }
    Ok(())
}

/// The shim is stopped, and stays so.
pub(crate) async fn hangs(run: Run) -> Result<Cell> {
    let mut cell = Cell::default();
    let pod = run.pod("hangs").await?;
    pod.run(ContainerSpec::sleeping("main")).await?;
    processes::stop(shim(&pod)?.pid).await?;
    let begun = Instant::now();
    let stats = run.node.cri().list_pod_sandbox_stats("").await;
    let took = seconds(begun.elapsed());
    match stats {
        Ok(_) => cell.fact(format!("the node's stats take {took}")),
        // The client has given up.
        Err(status) if status.code == DEADLINE_EXCEEDED => {
            cell.loss(format!("the node's stats do not come in {took}"));
        }
        Err(_) => cell.loss(format!("the node's stats fail after {took}")),
    }
    cell.remove(&pod).await?;
    Ok(cell)
}
