//! Core scheduling domains of pods (`SCHED_CORE` in `shim_env`).

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use kit::{Container, ContainerSpec, PROBE};

use crate::harness::{Case, Harness, cases_of_both, no_shim, removed};

pub(crate) fn cases() -> Vec<Case> {
    cases_of_both![the_containers_of_a_pod_have_a_core_scheduling_domain_of_their_own]
}

/// Or they do not run, where the kernel has no such domains: it is built without them, or the
/// processors have one thread for each core.
async fn the_containers_of_a_pod_have_a_core_scheduling_domain_of_their_own(
    harness: Arc<Harness>,
) -> Result<()> {
    let file = harness.node.layout().sandboxer_config();
    let config = fs::read_to_string(&file)?;
    let asking = config.replace("shim_env = [", r#"shim_env = ["SCHED_CORE=1", "#);
    ensure!(asking != config, "the setting is not in the config");
    fs::write(&file, asking)?;
    harness.restart().await?;
    let result = match of_this_test()? {
        Ok(own) => domains(&harness, &own).await,
        Err(reason) => none(&harness, &reason).await,
    };
    fs::write(&file, config)?;
    harness.restart().await?;
    result
}

/// The domain of this process, or what the kernel has against such domains.
fn of_this_test() -> Result<Result<String, String>> {
    let dir = tempfile::tempdir()?;
    let probe = dir.path().join("probe");
    fs::write(&probe, PROBE)?;
    fs::set_permissions(&probe, fs::Permissions::from_mode(0o755))?;
    let output = Command::new(&probe).args(["core-domain", "0"]).output()?;
    if output.status.success() {
        return Ok(Ok(String::from_utf8(output.stdout)?.trim().to_owned()));
    }
    let error = String::from_utf8(output.stderr)?;
    let reason = error.trim().rsplit("core-domain 0: ").next().context("no reason")?;
    Ok(Err(reason.to_owned()))
}

/// Of its first process, and of one that is started in it later.
async fn domain(container: &Container) -> Result<String> {
    let first = container.sh("probe core-domain 1").await?;
    let later = container.sh("probe core-domain 0").await?;
    ensure!(first == later, "a container has domains {first:?} and {later:?}");
    Ok(first.trim().to_owned())
}

async fn domains(harness: &Harness, own: &str) -> Result<()> {
    let (one, other) = (harness.pod("one").await?, harness.pod("other").await?);
    let (a, b) = (
        one.run(ContainerSpec::sleeping("a")).await?,
        one.run(ContainerSpec::sleeping("b")).await?,
    );
    let c = other.run(ContainerSpec::sleeping("c")).await?;
    let (a, b, c) = (domain(&a).await?, domain(&b).await?, domain(&c).await?);
    println!("core scheduling domains: of the node {own}, of two pods {a} and {c}");
    ensure!(a == b, "one pod has domains {a} and {b}");
    ensure!(a != c && a != own && c != own, "pods have {a} and {c}, the node has {own}");
    for pod in [one, other] {
        removed(&pod).await?;
        no_shim(&pod).await?;
    }
    Ok(())
}

async fn none(harness: &Harness, reason: &str) -> Result<()> {
    println!("no core scheduling domains: {reason}");
    let pod = harness.pod("none").await?;
    ensure!(
        pod.run(ContainerSpec::sleeping("a")).await.is_err(),
        "the container runs without the domain that was asked for"
    );
    // containerd hears only that its shim's connection has ended.
    let log = fs::read_to_string(harness.node.layout().sandboxer_log())?;
    let mut of_pod = log.lines().filter(|line| line.contains(pod.id()));
    ensure!(
        of_pod.any(|line| line.contains("make core scheduling domain") && line.contains(reason)),
        "no line of the pod says {reason:?}"
    );
    removed(&pod).await?;
    no_shim(&pod).await
}
