//! Commands that operators type: crictl's commands, from a pod's start to its end.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kit::machine::processes::{self, Proc};
use kit::{Node, TEST_IMAGE, until};
use serde_json::{Value, json};

/// Runs a pod of the handler `name` with a container by `crictl` and looks at both with it. Its
/// shim must be this program, if one is given.
pub(crate) async fn session(
    program: &Path,
    node: &Node,
    name: &str,
    shim: Option<&Path>,
) -> Result<()> {
    let crictl = |arguments: &[&str]| crictl(program, node, arguments);
    let top = &node.layout().top;
    let (pod_file, container_file) = (top.join("pod.json"), top.join("container.json"));
    let logs = top.join(format!("crictl-{name}"));
    let pod = json!({
        "metadata": { "name": name, "namespace": "crictl", "uid": name, "attempt": 1 },
        "hostname": "by-crictl",
        "log_directory": logs,
        "linux": { "cgroup_parent": node.layout().cgroup() },
    });
    let container = json!({
        "metadata": { "name": "main" },
        "image": { "image": TEST_IMAGE },
        "command": ["/bin/sh", "-c", "hostname; sleep 1000"],
        "log_path": "main.log",
        "linux": {},
    });
    fs::write(&pod_file, pod.to_string())?;
    fs::write(&container_file, container.to_string())?;
    let (pod_file, container_file) = (pod_file.to_string_lossy(), container_file.to_string_lossy());

    let id = crictl(&["runp", "--runtime", name, &pod_file])?;
    let inspected: Value = serde_json::from_str(&crictl(&["inspectp", &id])?)?;
    let status = &inspected["status"];
    ensure!(status["state"] == "SANDBOX_READY", "inspectp: {status}");
    ensure!(status["runtimeHandler"] == name, "inspectp: {status}");
    ensure!(inspected["info"]["pid"].as_u64() > Some(0), "inspectp: {inspected}");
    if let Some(shim) = shim {
        let all = processes::all()?;
        let exe = |it: &Proc| fs::read_link(format!("/proc/{}/exe", it.pid)).ok();
        let is_shim = |it: &Proc| it.command.contains(&id) && exe(it).as_deref() == Some(shim);
        ensure!(all.iter().any(is_shim), "{id} has another shim than {}", shim.display());
    }
    let container = crictl(&["create", &id, &container_file, &pod_file])?;
    crictl(&["start", &container])?;
    let hostname = crictl(&["exec", "-s", &container, "cat", "/etc/hostname"])?;
    ensure!(hostname == "by-crictl", "exec: {hostname:?}");
    until("crictl logs", Duration::from_secs(10), async || {
        let logs = crictl(&["logs", &container])?;
        ensure!(logs == "by-crictl", "logs: {logs:?}");
        Ok(())
    })
    .await?;
    crictl(&["statsp", "--id", &id])?;
    let listed = crictl(&["pods", "-q", "--state", "ready"])?;
    ensure!(listed.contains(&id), "pods: {listed}");
    crictl(&["stopp", &id])?;
    crictl(&["rmp", &id])?;
    let listed = crictl(&["pods", "-q"])?;
    ensure!(!listed.contains(&id), "pods after rmp: {listed}");
    Ok(())
}

fn crictl(program: &Path, node: &Node, arguments: &[&str]) -> Result<String> {
    let socket = format!("unix://{}", node.layout().containerd_socket().display());
    let done = Command::new(program)
        .args(["--config", "/dev/null", "--runtime-endpoint", &socket, "--image-endpoint", &socket])
        .args(arguments)
        .output()
        .context("run crictl")?;
    let said = String::from_utf8_lossy(&done.stderr);
    ensure!(done.status.success(), "crictl {}: {}", arguments.join(" "), said.trim());
    Ok(String::from_utf8(done.stdout)?.trim().to_owned())
}
