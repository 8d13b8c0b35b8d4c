//! With hundreds and thousands of live pods: Start, memory, and the recovery of all.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use kit::controller::Controller;
use kit::machine::cgroup;
use kit::machine::processes::pss;
use kit::{Pod, PodSpec, until};

use crate::account::of_pods;
use crate::report::Report;
use crate::samples::{Samples, median};
use crate::setup::{OURS, Setup};
use crate::{Plan, concurrency, kernel};

/// The measurements with one number of live pods.
struct Level {
    live: usize,
    /// At the daemon's own socket, and the kernel's steps beside it.
    start: Samples,
    kernel: Samples,
    /// Kilobytes.
    daemon: f64,
    containerd: f64,
}

pub(crate) async fn measure(setup: &mut Setup, plan: &Plan, report: &mut Report) -> Result<()> {
    // A daemon that has done nothing yet but what every daemon has: memory that it once had is not
    // growth.
    restart(setup).await?;
    let parent = format!("{}/scale", setup.node.layout().cgroup());
    cgroup::make(&parent)?;
    let ours = setup.target(OURS).clone();
    let (warm, _) = concurrency::run(setup, &ours, specs(0, 50, &parent)).await?;
    concurrency::remove(warm).await?;

    let mut pods: Vec<Pod> = Vec::new();
    let mut levels = vec![level(setup, plan, 0).await?];
    for live in [plan.most / 4, plan.most] {
        let (more, _) = concurrency::run(setup, &ours, specs(pods.len(), live, &parent)).await?;
        pods.extend(more);
        levels.push(level(setup, plan, live).await?);
    }
    for level in &levels {
        report.median(format!("start_at_{}_us", level.live), level.start.median_us());
        report.median(format!("kernel_start_at_{}_us", level.live), level.kernel.median_us());
        report.p99(format!("start_at_{}_us", level.live), level.start.p99_us());
    }
    let (first, last) = (&levels[0], &levels[levels.len() - 1]);
    let each = |least: f64, most: f64| (most - least) / last.live as f64;
    report.median("daemon_kb_per_sandbox".into(), each(first.daemon, last.daemon));
    report.median("containerd_kb_per_pod".into(), each(first.containerd, last.containerd));
    let pauses = of_pods(&setup.node)?;
    ensure!(pauses.len() >= last.live, "{} pauses of {} pods", pauses.len(), last.live);
    let pause =
        median(pauses.into_iter().take(100).map(|pid| pss(pid).unwrap_or_default()).collect());
    report.median("pause_kb".into(), pause);
    let idle = pause + each(first.daemon, last.daemon);
    report.median("idle_pod_ours_kb".into(), idle);

    recovery(setup, last.live, &pods, report).await?;
    concurrency::remove(pods).await?;

    report.ratio("start_at_2000_over_0", &format!("start_at_{}_us", last.live), "start_at_0_us");
    report.ratio("daemon_kb_per_sandbox", "daemon_kb_per_sandbox", "one");
    Ok(())
}

fn specs(from: usize, to: usize, parent: &str) -> Vec<PodSpec> {
    (from..to)
        .map(|number| PodSpec::new(&format!("scale-{number}")).cgroup_parent(parent))
        .collect()
}

async fn restart(setup: &mut Setup) -> Result<std::time::Duration> {
    let daemon = setup.daemons.get_mut(OURS).context("our daemon")?;
    daemon.kill()?;
    let took = daemon.start().await?.answering;
    setup.accounts[OURS].take(daemon.pid()?)?;
    Ok(took)
}

async fn level(setup: &Setup, plan: &Plan, live: usize) -> Result<Level> {
    let daemon = &setup.daemons[OURS];
    // The work that the pods' creation left is done: memory is measured first, before the Starts
    // that are measured add to it.
    tokio::time::sleep(std::time::Duration::from_secs(2)).await;
    let (own, containerd) = (pss(daemon.pid()?)?, pss(setup.node.containerd_pid()?)?);
    let direct = daemon.client();
    let home = setup.home("scale")?;
    let steps = kernel::Steps::prepare(setup, &format!("level-{live}"))?;
    let (mut start, mut kernel) = (Samples::default(), Samples::default());
    for round in 0..=plan.fast / 2 {
        let id = setup.id();
        let took = start_direct(setup, &direct, &id, &home).await?;
        let (steps, network) = (steps.clone(), setup.network(&id));
        let straight = tokio::task::spawn_blocking(move || steps.cycle(&network)).await??;
        if round > 0 {
            start.push(took);
            kernel.push(straight.start());
        }
    }
    home.clear()?;
    Ok(Level { live, start, kernel, daemon: own, containerd })
}

/// One sandbox at the daemon's own socket, from Create to Shutdown; how long Start took.
async fn start_direct(
    setup: &Setup,
    direct: &Controller,
    id: &str,
    home: &kit::PodHome,
) -> Result<std::time::Duration> {
    direct.create_raw(&setup.request(direct, setup.target(OURS), id, home.config())?).await?;
    let begun = Instant::now();
    direct.start(id).await?;
    let took = begun.elapsed();
    direct.stop(id).await?;
    direct.shutdown(id).await?;
    Ok(took)
}

/// The daemon is killed and started again with all pods alive, some times.
async fn recovery(setup: &mut Setup, live: usize, pods: &[Pod], report: &mut Report) -> Result<()> {
    let (mut full, mut empty) = (Vec::new(), Vec::new());
    for number in 0..3 {
        full.push(restart(setup).await?.as_secs_f64() * 1e6);
        let mut daemon = crate::daemon::Daemon::ours(&setup.node, &format!("empty-{number}"), "")?;
        empty.push(daemon.start().await?.answering.as_secs_f64() * 1e6);
        daemon.kill()?;
    }
    let daemon = setup.daemons[OURS].client();
    for pod in pods.iter().step_by(100) {
        let status = daemon.status(pod.id(), false).await?;
        ensure!(status.state == "SANDBOX_READY", "recovered as {}", status.state);
    }
    // containerd's Waits come back by and by.
    until("containerd reaches it again", std::time::Duration::from_secs(30), async || {
        let through = setup.controller(setup.target(OURS));
        for pod in pods.iter().take(1) {
            through.status(pod.id(), false).await?;
        }
        Ok(())
    })
    .await?;
    let each = (median(full.clone()) - median(empty)) / live as f64;
    report.median(format!("recovery_of_{live}_ms"), median(full) / 1e3);
    report.median("recover_us_per_sandbox".into(), each);
    report.ratio(
        "recover_us_per_sandbox_over_kernel_start",
        "recover_us_per_sandbox",
        "kernel_start_us",
    );
    Ok(())
}
