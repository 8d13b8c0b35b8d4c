//! Pods of the built-in controller.

use anyhow::{Context as _, Result, ensure};
use kit::cri::api::ContainerState;
use kit::machine::processes;
use kit::{Container, ContainerSpec, Handler, Node, Pod, PodSpec, until};
use std::sync::Arc;

use crate::{SOON, kill, no_shims, run, shim};

async fn pod(node: &Arc<Node>, name: &str) -> Result<Pod> {
    node.run(Handler::Builtin, PodSpec::new(name).host_network()).await
}

fn lines(container: &Container) -> Result<Vec<String>> {
    Ok(container.log()?.into_iter().map(|(stream, text)| format!("{stream}: {text}")).collect())
}

/// Waits until the log of a container has a line.
async fn says(container: &Container, line: &str) -> Result<()> {
    until("the line in the log", SOON, async || {
        let lines = lines(container)?;
        ensure!(lines.iter().any(|one| one == line), "{lines:?}");
        Ok(())
    })
    .await
}

/// A container that writes a line for each that `say` gives it.
fn speaking(name: &str) -> ContainerSpec {
    ContainerSpec::sh(name, "mkfifo /p; while true; do cat /p; done")
}

async fn say(container: &Container, text: &str) -> Result<()> {
    container.sh(&format!("until test -p /p; do sleep 0.01; done; echo {text} > /p")).await?;
    says(container, &format!("stdout: {text}")).await
}

/// Promise: shim_works_alone.
#[test]
fn a_pod_with_two_containers_has_one_shim() {
    run(async |node| {
        let pod = pod(node, "two").await?;
        let a = pod.run(speaking("a")).await?;
        let b = pod.run(ContainerSpec::sh("b", "echo out; echo err >&2; exit 7")).await?;
        ensure!(b.exited(SOON).await? == 7, "its exit code");
        says(&b, "stdout: out").await?;
        says(&b, "stderr: err").await?;
        shim(node)?;
        say(&a, "hello").await?;
        let answer = a.exec(&["sh", "-c", "echo in; exit 3"]).await?;
        ensure!((answer.exit_code, answer.stdout.as_slice()) == (3, b"in\n"), "{answer:?}");
        b.remove().await?;
        a.stop().await?;
        ensure!(a.status().await?.exit_code == 137, "{:?}", a.status().await?);
        shim(node).context("the pause is a container of the shim")?;
        pod.remove().await
    });
}

#[test]
fn pods_outlive_a_killed_containerd() {
    run(async |node| {
        let pod = pod(node, "kept").await?;
        let a = pod.run(speaking("a")).await?;
        let ends =
            pod.run(ContainerSpec::sh("b", "while test ! -e /e; do sleep 0.1; done; exit 5"));
        let ends = ends.await?;
        let (before, pause) = (shim(node)?, pod.pause_pid().await?);
        node.kill_containerd()?;
        node.start_containerd().await?;
        ensure!(
            shim(node)?.pid == before.pid && pod.pause_pid().await? == pause,
            "another process"
        );
        ensure!(pod.is_ready().await?, "not ready");
        say(&a, "again").await?;
        ends.sh("touch /e").await?;
        ensure!(ends.exited(SOON).await? == 5, "its exit code");
        let c = pod.run(ContainerSpec::sleeping("c")).await?;
        ensure!(c.sh("echo c").await? == "c\n", "it does not run");
        ensure!(shim(node)?.pid == before.pid, "another shim");
        // The exit of a container while there is no containerd.
        let d = pod.run(ContainerSpec::sh("d", "while test ! -e /e; do sleep 0.1; done; exit 6"));
        let d = d.await?;
        d.sh("(sleep 1; touch /e) >/dev/null 2>&1 &").await?;
        node.kill_containerd()?;
        until("its end", SOON, async || {
            let all = processes::all()?;
            ensure!(!all.iter().any(|it| it.command.contains("exit 6")), "it runs");
            Ok(())
        })
        .await?;
        node.start_containerd().await?;
        ensure!(d.exited(SOON).await? == 6, "its exit code");
        pod.remove().await
    });
}

/// containerd cleans up after each container of a shim that has died.
/// Promise: shim_works_alone.
#[test]
fn a_killed_shim_leaves_nothing() {
    run(async |node| {
        for while_down in [false, true] {
            let pod = pod(node, "killed").await?;
            let a = pod.run(ContainerSpec::sleeping("a")).await?;
            let b = pod.run(ContainerSpec::sleeping("b")).await?;
            if while_down {
                node.kill_containerd()?;
            }
            kill(&shim(node)?)?;
            if while_down {
                node.start_containerd().await?;
            }
            for container in [&a, &b] {
                container.exited(SOON).await?;
            }
            until("the pod is not ready", SOON, async || {
                ensure!(!pod.is_ready().await?, "ready");
                Ok(())
            })
            .await?;
            let state = node.layout().state().join("io.containerd.runtime.v2.task/k8s.io");
            until("nothing is left", SOON, async || {
                let left: Vec<_> = processes::all()?
                    .into_iter()
                    .filter(|it| {
                        [a.id(), b.id(), pod.id()].iter().any(|id| it.cgroups.contains(id))
                    })
                    .collect();
                ensure!(left.is_empty(), "{left:?}");
                let bundles: Vec<_> = std::fs::read_dir(&state)?.flatten().collect();
                ensure!(bundles.is_empty(), "{bundles:?}");
                let socket = node.layout().shim_socket(pod.id());
                ensure!(!socket.exists(), "{}", socket.display());
                Ok(())
            })
            .await?;
            no_shims(node).await?;
            let state = a.status().await?.state.enum_value();
            ensure!(state == Ok(ContainerState::CONTAINER_EXITED), "{state:?}");
            pod.remove().await?;
        }
        Ok(())
    });
}

#[test]
fn many_pods_and_containers_start_and_end_at_once() {
    run(async |node| {
        let count = kit::fewer("pods at once", 12);
        let one = async |number: u32| -> Result<()> {
            let pod = pod(node, &format!("p{number}")).await?;
            let (a, b) = tokio::join!(
                pod.run(ContainerSpec::sleeping("a")),
                pod.run(ContainerSpec::sh("b", "exit 4"))
            );
            let (a, b) = (a?, b?);
            ensure!(b.exited(SOON * 3).await? == 4, "its exit code");
            ensure!(a.sh("echo a").await? == "a\n", "it does not run");
            pod.remove().await
        };
        let all: Vec<_> = (0..count).map(&one).collect();
        for done in futures::future::join_all(all).await {
            done?;
        }
        no_shims(node).await?;
        Ok(())
    });
}
