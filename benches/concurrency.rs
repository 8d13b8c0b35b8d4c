//! Many at once: pods per second.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use kit::{Cri, Handler, Pod, PodSpec};
use tokio::task::JoinSet;

use crate::Plan;
use crate::report::Report;
use crate::samples::{median, order};
use crate::setup::{BUILTIN, OURS, Setup, Target};

const CLIENTS: usize = 8;

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

pub(crate) async fn measure(setup: &Setup, plan: &Plan, report: &mut Report) -> Result<()> {
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
