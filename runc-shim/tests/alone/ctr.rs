//! Containers of `ctr`, which names the shim by its path.

use std::process::{Command, Output, Stdio};

use anyhow::{Context as _, Result, ensure};
use kit::{Node, TEST_IMAGE, until};

use crate::{SOON, no_shims, program, run, shim};

pub(crate) fn ctr(node: &Node, words: &[&str]) -> Result<Output> {
    let mut command = Command::new(node.parts().program("ctr"));
    command.arg("--address").arg(node.layout().containerd_socket());
    command.args(["-n", "k8s.io"]).args(words).stdin(Stdio::null());
    command.output().context("run ctr")
}

fn succeeds(node: &Node, words: &[&str]) -> Result<String> {
    let output = ctr(node, words)?;
    ensure!(output.status.success(), "{words:?}: {output:?}");
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Runs a container.
pub(crate) fn run_container(
    node: &Node,
    id: &str,
    options: &[&str],
    script: &str,
) -> Result<Output> {
    let path = program().display().to_string();
    let cgroup = format!("{}/{id}", node.layout().cgroup());
    let mut words = vec!["run", "--runtime", &path, "--snapshotter", node.snapshotter()?];
    words.extend(["--cgroup", &cgroup]);
    words.extend(options);
    words.extend([TEST_IMAGE, id, "sh", "-c", script]);
    ctr(node, &words)
}

/// Promise: shim_works_alone.
#[test]
fn a_container_runs_and_is_killed() {
    run(async |node| {
        // The state of the runtime's containers is in one directory of the machine.
        let [one, two] = &["one", "two"].map(|id| format!("{}-{id}", node.layout().name));
        let output = run_container(node, one, &["--rm"], "echo out; echo err >&2; exit 3")?;
        let said = (output.stdout.as_slice(), output.stderr.as_slice());
        ensure!(output.status.code() == Some(3) && said.0 == b"out\n", "{output:?}");
        no_shims(node).await?;

        let output = run_container(node, two, &["-d"], "exec sleep 1000")?;
        ensure!(output.status.success(), "{output:?}");
        shim(node)?;
        let exec = ["tasks", "exec", "--exec-id", "e", two, "sh", "-c", "echo in; exit 4"];
        let output = ctr(node, &exec)?;
        ensure!(output.status.code() == Some(4) && output.stdout == b"in\n", "{output:?}");
        node.kill_containerd()?;
        node.start_containerd().await?;
        let listed = succeeds(node, &["tasks", "ls"])?;
        ensure!(listed.contains(two) && listed.contains("RUNNING"), "{listed}");
        succeeds(node, &["tasks", "pause", two])?;
        succeeds(node, &["tasks", "resume", two])?;
        succeeds(node, &["tasks", "kill", "-s", "SIGKILL", two])?;
        until("it has ended", SOON, async || {
            let listed = succeeds(node, &["tasks", "ls"])?;
            ensure!(listed.contains("STOPPED"), "{listed}");
            Ok(())
        })
        .await?;
        succeeds(node, &["tasks", "rm", two])?;
        succeeds(node, &["containers", "rm", two])?;
        no_shims(node).await?;
        Ok(())
    });
}

#[test]
fn containers_with_an_annotation_share_a_shim() {
    run(async |node| {
        let ids = &["1", "2", "3"].map(|id| format!("{}-{id}", node.layout().name));
        let group = ["-d", "--annotation", "io.containerd.runc.v2.group=g"];
        for id in ids {
            let output = run_container(node, id, &group, "exec sleep 1000")?;
            ensure!(output.status.success(), "{output:?}");
        }
        let first = shim(node)?;
        for id in ids {
            // The bundle in which the shim was started goes first.
            succeeds(node, &["tasks", "rm", "-f", id])?;
            succeeds(node, &["containers", "rm", id])?;
            if *id != ids[2] {
                ensure!(shim(node)?.pid == first.pid, "another shim");
                let exec = ["tasks", "exec", "--exec-id", "e", &ids[2], "echo", "in"];
                ensure!(succeeds(node, &exec)? == "in\n", "an exec");
            }
        }
        no_shims(node).await?;
        Ok(())
    });
}
