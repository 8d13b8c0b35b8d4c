//! A pod that crictl runs, and the shim that it has.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use kit::Node;
use kit::machine::processes::{self, Proc};
use serde_json::json;

/// Runs a pod of the handler `name` by `crictl` and removes it. Its shim must be this program, if
/// one is given.
pub(crate) fn session(program: &Path, node: &Node, name: &str, shim: Option<&Path>) -> Result<()> {
    let crictl = |arguments: &[&str]| crictl(program, node, arguments);
    let file = node.layout().top.join("pod.json");
    let pod = json!({
        "metadata": { "name": name, "namespace": "crictl", "uid": name, "attempt": 1 },
        "linux": { "cgroup_parent": node.layout().cgroup() },
    });
    fs::write(&file, pod.to_string())?;
    let id = crictl(&["runp", "--runtime", name, &file.to_string_lossy()])?;
    if let Some(shim) = shim {
        let all = processes::all()?;
        let exe = |it: &Proc| fs::read_link(format!("/proc/{}/exe", it.pid)).ok();
        let is_shim = |it: &Proc| it.command.contains(&id) && exe(it).as_deref() == Some(shim);
        ensure!(all.iter().any(is_shim), "{id} has another shim than {}", shim.display());
    }
    crictl(&["stopp", &id])?;
    crictl(&["rmp", &id])?;
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
