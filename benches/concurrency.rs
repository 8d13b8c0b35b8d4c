//! Many at once: pods per second, Start at eight clients, and Status beside pods that start.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use kit::{Cri, Handler, Pod, PodSpec};
use tokio::task::JoinSet;

use crate::report::Report;
use crate::samples::{Samples, median, order};
use crate::setup::{BUILTIN, OURS, Setup, Target};
use crate::{Plan, pods};

const CLIENTS: usize = 8;
/// Pods that start while Status is asked.
const STARTING: usize = 50;

/// Runs pods with the node's network from eight clients, each with a connection of its own and one
/// pod after another; how long until all ran.
pub(crate) async fn run(
    setup: &Setup,
    target: &Target,
    specs: Vec<PodSpec>,
) -> Result<(Vec<Pod>, Duration)> {
    let handler = target.handler();
    let mut shares = vec![Vec::new(); CLIENTS];
    for (number, spec) in specs.into_iter().enumerate() {
        shares[number % CLIENTS].push(setup.node.prepare(spec.host_network())?);
    }
    let begun = Instant::now();
    let mut clients = JoinSet::new();
    for share in shares {
        let (node, handler) = (Arc::clone(&setup.node), handler.clone());
        clients.spawn(async move {
            let cri = Cri::new(node.layout().containerd_socket());
            let mut pods = Vec::new();
            for home in share {
                let id = cri.run_pod_sandbox(home.config(), &handler).await?;
                pods.push(Pod::new(&node, Handler::Ours, home, id));
            }
            anyhow::Ok(pods)
        });
    }
    let mut pods = Vec::new();
    while let Some(ended) = clients.join_next().await {
        pods.extend(ended?.with_context(|| format!("{}: RunPodSandbox", target.name))?);
    }
    Ok((pods, begun.elapsed()))
}

/// Removes pods, from eight clients.
pub(crate) async fn remove(pods: Vec<Pod>) -> Result<()> {
    let mut clients = JoinSet::new();
    let share = pods.len().div_ceil(CLIENTS).max(1);
    for share in pods.chunks(share).map(<[Pod]>::to_vec) {
        clients.spawn(async move {
            let Some(first) = share.first() else { return Ok(()) };
            let cri = Cri::new(first.node().layout().containerd_socket());
            for pod in share {
                cri.stop_pod_sandbox(pod.id()).await.context("StopPodSandbox")?;
                cri.remove_pod_sandbox(pod.id()).await.context("RemovePodSandbox")?;
                pod.clear().await?;
            }
            anyhow::Ok(())
        });
    }
    while let Some(ended) = clients.join_next().await {
        ended??;
    }
    Ok(())
}

fn specs(count: usize) -> Vec<PodSpec> {
    (0..count).map(|number| PodSpec::new(&format!("concurrent-{number}"))).collect()
}

pub(crate) async fn measure(setup: &mut Setup, plan: &Plan, report: &mut Report) -> Result<()> {
    rates(setup, plan, report).await?;
    starts(setup, plan, report).await?;
    statuses(setup, plan, report).await
}

async fn rates(setup: &Setup, plan: &Plan, report: &mut Report) -> Result<()> {
    let mut rates = vec![Vec::new(); setup.targets.len()];
    for round in 0..if plan.calls > 60 { 4 } else { 2 } {
        for index in order(round, setup.targets.len()) {
            let target = &setup.targets[index];
            // Enough of each that it takes a second or more.
            let count = if target.is_fast() { 160 } else { 32 };
            let (pods, took) = run(setup, target, specs(count)).await?;
            rates[index].push(pods.len() as f64 / took.as_secs_f64());
            remove(pods).await?;
        }
    }
    for (target, rates) in setup.targets.iter().zip(rates) {
        report.median(format!("pods_per_s_hostnet_{}", target.name), median(rates));
    }
    let key_of = |who: &str| format!("pods_per_s_hostnet_{who}");
    report.ratio("pods_per_s_hostnet_ours_over_builtin", &key_of(OURS), &key_of(BUILTIN));
    Ok(())
}

/// Those that can be asked often enough for a 99th percentile.
fn fast(setup: &Setup) -> Vec<Target> {
    setup.targets.iter().filter(|target| target.is_fast()).cloned().collect()
}

async fn starts(setup: &Setup, plan: &Plan, report: &mut Report) -> Result<()> {
    let targets = fast(setup);
    let mut all = vec![Samples::default(); targets.len()];
    for round in 0..3 {
        for index in order(round, targets.len()) {
            let target = &targets[index];
            let mut clients = JoinSet::new();
            for client in 0..CLIENTS {
                let controller = setup.controller(target);
                let home = setup.home(&format!("client-{client}"))?;
                let mut requests = Vec::new();
                for _ in 0..plan.fast / 4 {
                    let id = setup.id();
                    requests.push((setup.request(&controller, target, &id, home.config())?, id));
                }
                clients.spawn(async move {
                    let mut samples = Samples::default();
                    for (request, id) in requests {
                        controller.create_raw(&request).await?;
                        let begun = Instant::now();
                        controller.start(&id).await?;
                        samples.push(begun.elapsed());
                        controller.stop(&id).await?;
                        controller.shutdown(&id).await?;
                    }
                    home.clear()?;
                    anyhow::Ok(samples)
                });
            }
            while let Some(ended) = clients.join_next().await {
                all[index]
                    .extend(ended?.with_context(|| format!("{}: eight clients", target.name))?);
            }
        }
    }
    for (target, samples) in targets.iter().zip(&all) {
        report.p99(format!("start_at_8_clients_{}_us", target.name), samples.p99_us());
        report.median(format!("start_at_8_clients_{}_us", target.name), samples.median_us());
    }
    report.p99_ratio(
        "start_at_8_clients_ours_over_floor",
        "start_at_8_clients_ours_us",
        "start_at_8_clients_floor_us",
    );
    Ok(())
}

async fn statuses(setup: &Setup, plan: &Plan, report: &mut Report) -> Result<()> {
    let targets = fast(setup);
    let mut all = vec![Samples::default(); targets.len()];
    for round in 0..if plan.calls > 60 { 6 } else { 3 } {
        for index in order(round, targets.len()) {
            let target = &targets[index];
            let (asked, _) = pods::run(setup, target, PodSpec::new("asked").host_network()).await?;
            let done = Arc::new(AtomicBool::new(false));
            let asking = tokio::spawn({
                let (done, controller, id) =
                    (Arc::clone(&done), setup.controller(target), asked.id().to_owned());
                async move {
                    let mut samples = Samples::default();
                    while !done.load(Ordering::Relaxed) {
                        let begun = Instant::now();
                        controller.status(&id, false).await?;
                        samples.push(begun.elapsed());
                    }
                    anyhow::Ok(samples)
                }
            });
            let (pods, _) = run(setup, target, specs(STARTING)).await?;
            done.store(true, Ordering::Relaxed);
            all[index].extend(asking.await??);
            remove(pods).await?;
            asked.remove().await?;
        }
    }
    for (target, samples) in targets.iter().zip(&all) {
        report.p99(format!("status_while_50_start_{}_us", target.name), samples.p99_us());
    }
    report.p99_ratio(
        "status_while_50_start_ours_over_floor",
        "status_while_50_start_ours_us",
        "status_while_50_start_floor_us",
    );
    Ok(())
}
