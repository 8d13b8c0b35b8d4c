//! What happens to containerd while pods run.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use kit::cri::api::PodSandboxFilter;
use kit::{ContainerSpec, PodSpec, until};

use crate::cell::{Cell, seconds};
use crate::events::{Run, inside};

/// The exit code of the containers.
const CODE: i32 = 42;
/// A container that exits with it when there is this file.
const UNTIL: &str = "while [ ! -e /dev/shm/end ]; do sleep 0.05; done; exit 42";
/// How long ends may take.
const SOON: Duration = Duration::from_secs(30);
/// How often containerd is killed in RunPodSandbox.
const KILLS: u32 = 20;

/// The event that begins with an older containerd.
pub(crate) const UPGRADE: &str = "containerd is upgraded from the next older release under the pod";

/// Ends a container from outside, and waits until none of its processes is there.
async fn end(container: &kit::Container) -> Result<()> {
    let first = inside(container.id())?.into_iter().next().context("the container has ended")?;
    std::fs::write(format!("/proc/{}/root/dev/shm/end", first.pid), "")?;
    until("the container has ended", SOON, async || {
        let living = inside(container.id())?;
        ensure!(living.is_empty(), "{living:?}");
        Ok(())
    })
    .await
}

/// Adds the exit code that CRI reports.
async fn exit_code(cell: &mut Cell, container: &kit::Container) -> Result<()> {
    match container.exited(SOON).await {
        Ok(CODE) => cell.fact("its exit code"),
        Ok(code) => {
            let reason = container.status().await?.reason;
            cell.loss(format!("exit code {code}, `{reason}`"));
        }
        Err(_) => cell.loss(format!("no exit in {} s", SOON.as_secs())),
    }
    Ok(())
}

/// A container exits while containerd is down.
pub(crate) async fn exit_while_down(run: Run) -> Result<Cell> {
    let mut cell = Cell::default();
    let pod = run.pod("exits").await?;
    let container = pod.run(ContainerSpec::sh("main", UNTIL)).await?;
    run.node.kill_containerd()?;
    end(&container).await?;
    run.node.start_containerd().await?;
    exit_code(&mut cell, &container).await?;
    cell.remove(&pod).await?;
    Ok(cell)
}

/// containerd is killed while an exec probe runs that would run for long.
pub(crate) async fn killed_in_exec(run: Run) -> Result<Cell> {
    const PROBE: [&str; 2] = ["sleep", "600"];
    let mut cell = Cell::default();
    let pod = run.pod("probed").await?;
    let container = pod.run(ContainerSpec::sh("main", UNTIL)).await?;
    let (node, id) = (run.node.clone(), container.id().to_owned());
    let probe =
        tokio::spawn(async move { node.cri().exec_sync_within(&id, &PROBE, 3).await.map(drop) });
    let probes = || -> Result<usize> {
        Ok(inside(container.id())?.iter().filter(|p| p.command == PROBE.join(" ")).count())
    };
    let are = |many: usize| -> Result<()> {
        let now = probes()?;
        ensure!(now == many, "{now} processes");
        Ok(())
    };
    until("the probe runs", SOON, async || are(1)).await?;
    run.node.kill_containerd()?;
    ensure!(probe.await?.is_err(), "the probe was answered");
    run.node.start_containerd().await?;
    let gone = until("its process is gone", Duration::from_secs(10), async || are(0)).await;
    let text = "the probe's process runs 10 s after the restart";
    match gone {
        Ok(()) => cell.fact("the probe's process is gone"),
        Err(_) => cell.fact(text),
    }
    let begun = Instant::now();
    let works = container.sh("echo runs").await.is_ok_and(|said| said == "runs\n");
    let took = seconds(begun.elapsed());
    cell.check(works, if works { format!("the next works: {took}") } else { "exec fails".into() });
    let first = inside(container.id())?.into_iter().find(|p| p.command.contains("/dev/shm/end"));
    let first = first.context("the container has ended")?;
    std::fs::write(format!("/proc/{}/root/dev/shm/end", first.pid), "")?;
    exit_code(&mut cell, &container).await?;
    cell.remove(&pod).await?;
    Ok(cell)
}

/// containerd is killed at different moments of RunPodSandbox.
pub(crate) async fn killed_in_run(run: Run) -> Result<Cell> {
    let mut cell = Cell::default();
    let begun = Instant::now();
    let pod = run.pod("whole").await?;
    let whole = begun.elapsed();
    pod.remove().await?;
    let kills = if run.short { 3 } else { KILLS };
    let mut interrupted = 0;
    for nth in 0..kills {
        let home = run.node.prepare(PodSpec::new(&format!("killed-{nth}")))?;
        let (node, handler, config) = (run.node.clone(), run.handler, home.config().clone());
        let running =
            tokio::spawn(async move { node.cri().run_pod_sandbox(&config, handler.name()).await });
        tokio::time::sleep(whole.mul_f32((nth as f32 + 0.5) / kills as f32)).await;
        run.node.kill_containerd()?;
        // Its answer is lost, or it came before.
        interrupted += usize::from(running.await?.is_err());
        run.node.start_containerd().await?;
        for pod in run.node.cri().list_pod_sandbox(PodSandboxFilter::new()).await? {
            let stopped = run.node.cri().stop_pod_sandbox(&pod.id).await;
            let removed = run.node.cri().remove_pod_sandbox(&pod.id).await;
            if stopped.and(removed).is_err() {
                cell.loss("a pod cannot be removed");
            }
        }
        // What it holds still is among the leftovers.
        let _ = home.clear();
    }
    ensure!(interrupted > 0, "each call was done before its kill");
    cell.fact(format!("{kills} kills, spread over {} ms", whole.as_millis()));
    Ok(cell)
}

/// Another containerd takes over a running pod.
pub(crate) async fn upgraded(run: Run) -> Result<Cell> {
    let mut cell = Cell::default();
    let newer = run.newer.as_ref().context("there is no older release")?;
    let pod = run.pod("upgraded").await?;
    let container = pod.run(ContainerSpec::sh("main", UNTIL)).await?;
    let from = run.node.parts().version();
    run.node.stop_containerd().await?;
    let path = std::env::var("PATH").unwrap_or_default();
    let mut command = std::process::Command::new(newer.program("containerd"));
    command
        .arg("--config")
        .arg(run.node.layout().containerd_config())
        .env("PATH", format!("{}:{path}:/usr/sbin:/sbin", newer.bin().display()));
    run.node.start_containerd_as(command).await?;
    cell.fact(format!("from {from}"));
    let ready = pod.is_ready().await?;
    cell.check(ready, if ready { "the pod stays Ready" } else { "the pod is NotReady" });
    let works = container.sh("echo runs").await.is_ok_and(|said| said == "runs\n");
    cell.check(works, if works { "exec works" } else { "exec fails" });
    let second = pod.run(ContainerSpec::sleeping("second")).await;
    let started = second.is_ok();
    cell.check(started, if started { "a new container runs" } else { "no new container runs" });
    end(&container).await?;
    exit_code(&mut cell, &container).await?;
    cell.remove(&pod).await?;
    Ok(cell)
}
