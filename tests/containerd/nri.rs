//! The data that an NRI plugin receives about a pod.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kit::nri::Plugin;
use kit::proto::nri::{Event, PodSandbox};
use kit::{ContainerSpec, Handler, PodSpec};

use crate::harness::{Bench, Case, Difference, cases};

pub(crate) fn cases() -> Vec<Case> {
    cases![both: nri_plugin, nri_plugin_on_a_host_network_pod]
}

/// A pod's data in its spec: its cgroup and its namespaces as type and path, sorted.
type Spec = (String, Vec<(String, String)>);

fn spec(pod: &PodSandbox) -> Spec {
    let namespaces = pod
        .linux
        .namespaces
        .iter()
        .map(|namespace| (namespace.type_.clone(), namespace.path.clone()));
    let mut namespaces: Vec<_> = namespaces.collect();
    namespaces.sort();
    (pod.linux.cgroups_path.clone(), namespaces)
}

/// containerd tells its plugins of the spec that a sandboxer answers from 2.3 on. Before, it reads
/// the spec of a containerd container, which no external sandboxer has.
async fn tells_plugins(bench: &Bench) -> Result<bool> {
    let version = bench.node.cri().version().await?.runtime_version;
    let mut numbers =
        version.trim_start_matches('v').split(['.', '-', '+', '~']).map(str::parse::<u32>);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => Ok((major, minor) >= (2, 3)),
        _ => anyhow::bail!("containerd's version is {version:?}"),
    }
}

/// Promise: pods_equal_the_builtins.
async fn nri_plugin(bench: Bench) -> Result<()> {
    plugin_receives(bench, PodSpec::new("nri").label("of", "the pod")).await
}

async fn nri_plugin_on_a_host_network_pod(bench: Bench) -> Result<()> {
    plugin_receives(bench, PodSpec::new("nri-host").host_network().label("of", "the pod")).await
}

async fn plugin_receives(bench: Bench, wanted: PodSpec) -> Result<()> {
    let socket = bench.node.layout().nri_socket();
    #[allow(clippy::disallowed_methods, reason = "a test's own thread")]
    let plugin = tokio::task::spawn_blocking(move || Plugin::attach(&socket)).await??;
    let pod = bench.run(wanted).await?;
    pod.run(ContainerSpec::sleeping("main")).await?;
    let (id, pid) = (pod.id().to_owned(), pod.pause_pid().await?);
    let parent = pod.home().cgroup().context("the pod has a cgroup")?.to_owned();
    let netns =
        pod.info().await?["runtimeSpec"]["linux"]["namespaces"].as_array().and_then(|all| {
            let network = all.iter().find(|namespace| namespace["type"] == "network")?;
            network["path"].as_str().map(str::to_owned)
        });
    pod.remove().await?;

    let expected: Spec = {
        let private = ["ipc", "mount", "pid"].map(|kind| (kind.to_owned(), String::new()));
        let network =
            netns.map(|path| [("network".to_owned(), path), ("uts".to_owned(), String::new())]);
        let mut namespaces: Vec<_> =
            private.into_iter().chain(network.into_iter().flatten()).collect();
        namespaces.sort();
        // As runc takes a scope of systemd, or a directory.
        let cgroup = match parent.rsplit('/').next() {
            Some(slice) if slice.ends_with(".slice") => format!("{slice}:cri-containerd:{id}"),
            _ => format!("{parent}/{id}"),
        };
        (cgroup, namespaces)
    };
    let told_by_answer = tells_plugins(&bench).await?;
    let complete = bench.handler == Handler::Builtin || told_by_answer;
    for event in [
        Event::RUN_POD_SANDBOX,
        Event::CREATE_CONTAINER,
        Event::STOP_POD_SANDBOX,
        Event::REMOVE_POD_SANDBOX,
    ] {
        let seen = kit::until("the plugin receives the pod", Duration::from_secs(10), async || {
            plugin.pod(event, &id).with_context(|| format!("{event:?} of pod {id}"))
        })
        .await?;
        ensure!(
            seen.labels.get("of").is_some_and(|label| label == "the pod"),
            "{event:?}: {seen:?}"
        );
        ensure!(seen.linux.cgroup_parent == parent, "{event:?}: {seen:?}");
        if complete {
            // The spec is the same in all of them, and gone with the sandbox at the last.
            let gone = event == Event::REMOVE_POD_SANDBOX;
            ensure!(
                gone || spec(&seen) == expected,
                "{event:?}: {:?}, not {expected:?}",
                spec(&seen)
            );
            ensure!(
                seen.pid == pid || event != Event::CREATE_CONTAINER,
                "{event:?}: {}, not {pid}",
                seen.pid
            );
        }
    }
    let seen = plugin.pod(Event::CREATE_CONTAINER, &id).map(|pod| spec(&pod) == expected);
    if !told_by_answer {
        bench.differs(
            "an NRI plugin sees the cgroup and the namespaces of the pod",
            &seen,
            Difference {
                builtin: Some(true),
                ours: Some(false),
                why: "containerd before 2.3 takes them from a containerd container, which no \
                    external sandboxer has; later ones from Start's answer",
            },
        )?;
    }
    Ok(())
}
