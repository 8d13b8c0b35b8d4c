//! A daemon whose unit was given a mount namespace of its own, as by `PrivateTmp=yes`.

use std::fs;
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use kit::{ContainerSpec, Handler, Node, PodSpec};

use crate::harness::{Case, binary, on_node};

pub(crate) fn cases() -> Vec<Case> {
    on_node![node_mount_namespace_of_its_own]
}

/// Without the refusal its pods run, and their containers have a /dev/shm that is not the pod's.
async fn node_mount_namespace_of_its_own(node: Arc<Node>) -> Result<()> {
    ensure!(found(&node)?.contains("ok    mounts: "), "in one namespace check says\n{}", found(&node)?);
    node.stop_sandboxer().await?;
    let plain = node.sandboxer_command()?;
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "slave"]).arg(plain.get_program()).args(plain.get_args());
    node.start_sandboxer_as(command).await?;

    let failed = node.run(Handler::Ours, PodSpec::new("apart")).await.err().context("the pod was made")?;
    let said = format!("{failed:#}");
    for part in ["code 9: ", "mount where containerd sees it", "PrivateTmp="] {
        ensure!(said.contains(part), "{part} is not in {said}");
    }
    let log = fs::read_to_string(node.layout().sandboxer_log())?;
    ensure!(log.matches("pods are refused: ").count() == 1, "the log says it not once:\n{log}");
    let findings = found(&node)?;
    ensure!(findings.contains("FAIL  mounts: mount where containerd sees it"), "check says\n{findings}");

    node.stop_sandboxer().await?;
    node.start_sandboxer().await?;
    let pod = node.run(Handler::Ours, PodSpec::new("together")).await?;
    let containers = [pod.run(ContainerSpec::sleeping("a")).await?, pod.run(ContainerSpec::sleeping("b")).await?];
    containers[0].sh("echo shared > /dev/shm/file").await?;
    ensure!(containers[1].sh("cat /dev/shm/file").await? == "shared\n", "no shared memory");
    pod.remove().await
}

/// What `check` prints of the node.
fn found(node: &Node) -> Result<String> {
    let layout = node.layout();
    let mut command = Command::new(binary());
    command.arg("check").arg("--config").arg(layout.sandboxer_config());
    command.arg("--containerd-config").arg(layout.containerd_config());
    Ok(String::from_utf8(command.output()?.stdout)?)
}
