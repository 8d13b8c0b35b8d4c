//! Many pods at once.

use std::collections::BTreeSet;
use std::sync::Arc;

use anyhow::{Result, ensure};
use kit::cri::api;
use kit::{Cri, PodSpec};
use tokio::task::JoinSet;

use crate::harness::{Bench, Case, cases};

const PODS: u32 = 50;
const CLIENTS: usize = 8;

pub(crate) fn cases() -> Vec<Case> {
    cases![both: fifty_pods]
}

/// Promise: removal_leaves_nothing.
async fn fifty_pods(bench: Bench) -> Result<()> {
    let how_many = kit::fewer("pods", PODS) as usize;
    // Each client has a connection of its own and runs its share one after another.
    let mut clients = JoinSet::new();
    for client in 0..CLIENTS {
        let (node, handler) = (Arc::clone(&bench.node), bench.handler);
        clients.spawn(async move {
            let cri = Cri::new(node.layout().containerd_socket());
            let mut pods = Vec::new();
            for number in (client..how_many).step_by(CLIENTS) {
                let home = node.prepare(PodSpec::new(&format!("pod-{number}")))?;
                let id = cri.run_pod_sandbox(home.config(), handler.name()).await?;
                pods.push(kit::Pod::new(&node, handler, home, id));
            }
            anyhow::Ok(pods)
        });
    }
    let mut pods = Vec::new();
    while let Some(ended) = clients.join_next().await {
        pods.extend(ended??);
    }

    let ready = api::PodSandboxFilter {
        state: Some(api::PodSandboxStateValue {
            state: api::PodSandboxState::SANDBOX_READY.into(),
            ..Default::default()
        })
        .into(),
        ..Default::default()
    };
    let listed: BTreeSet<String> =
        bench.node.cri().list_pod_sandbox(ready).await?.into_iter().map(|p| p.id).collect();
    let ran: BTreeSet<String> = pods.iter().map(|pod| pod.id().to_owned()).collect();
    ensure!(
        ran.len() == how_many && listed == ran,
        "{} ran, {} are listed as ready",
        ran.len(),
        listed.len()
    );
    let (mut addresses, mut pauses) = (BTreeSet::new(), BTreeSet::new());
    for pod in &pods {
        addresses.insert(pod.ip().await?);
        pauses.insert(pod.pause_pid().await?);
    }
    ensure!(addresses.len() == how_many, "{} addresses", addresses.len());
    ensure!(pauses.len() == how_many, "{} pauses", pauses.len());

    let mut clients = JoinSet::new();
    for share in pods.chunks(how_many.div_ceil(CLIENTS)) {
        let share = share.to_vec();
        clients.spawn(async move {
            for pod in share {
                pod.remove().await?;
            }
            anyhow::Ok(())
        });
    }
    while let Some(ended) = clients.join_next().await {
        ended??;
    }
    Ok(())
}
