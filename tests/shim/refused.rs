//! Refusals: a pod whose runtime the sandboxer does not serve, with the remedy, which works, and a
//! container whose shim does not start, with the reason.

use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use kit::{ContainerSpec, PodSpec, grpc};

use crate::harness::{Case, Harness, Kind, cases, cases_of_both, removed};

/// A handler of such a runtime with this sandboxer, and one without any `sandboxer`.
pub(crate) const HANDLERS: &str = r#"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.not-served]
runtime_type = "io.containerd.kata.v2"
sandboxer = "pause-sandboxer"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.builtin]
runtime_type = "io.containerd.runc.v2"
"#;

pub(crate) fn cases() -> Vec<Case> {
    let mut all = cases![Kind::Own => a_runtime_that_is_not_served_is_refused_with_the_remedy];
    all.extend(cases_of_both![the_reason_why_no_shim_came_is_in_the_answer_to_the_next_container]);
    all
}

async fn a_runtime_that_is_not_served_is_refused_with_the_remedy(
    harness: Arc<Harness>,
) -> Result<()> {
    let cri = harness.node.cri();
    let home = harness.node.prepare(PodSpec::new("refused").host_network())?;
    let refused = cri.run_pod_sandbox(home.config(), "not-served").await;
    let status = refused.err().context("the pod runs")?;
    ensure!(status.code == grpc::INVALID_ARGUMENT, "{status:?}");
    for said in ["io.containerd.kata.v2", "leave `sandboxer` out of its handler"] {
        ensure!(status.message.contains(said), "{status:?}");
    }
    home.clear()?;
    // The built-in controller serves a handler without `sandboxer` on the same node.
    let home = harness.node.prepare(PodSpec::new("served").host_network())?;
    let id = cri.run_pod_sandbox(home.config(), "builtin").await?;
    let ours = harness.node.sandboxer().status(&id, false).await;
    ensure!(ours.is_err_and(|status| status.code == grpc::NOT_FOUND), "it is the sandboxer's");
    cri.stop_pod_sandbox(&id).await?;
    cri.remove_pod_sandbox(&id).await?;
    home.clear()?;
    Ok(())
}

/// kubelet shows it in the pod's events. The reason is not a stale one: the container that is
/// created when a shim comes again is created at once.
async fn the_reason_why_no_shim_came_is_in_the_answer_to_the_next_container(
    harness: Arc<Harness>,
) -> Result<()> {
    let pod = harness.pod("without-shim").await?;
    harness.order("exit")?;
    ensure!(pod.run(ContainerSpec::sleeping("a")).await.is_err(), "it runs without a shim");
    let answer = pod.create(ContainerSpec::sleeping("b")).await;
    let error = format!("{:#}", answer.err().context("it is created without a shim")?);
    ensure!(error.contains("it exited with status 7 before it answered"), "{error}");
    harness.order("good")?;
    pod.run(ContainerSpec::sleeping("c")).await.context("with a shim")?;
    removed(&pod).await
}
