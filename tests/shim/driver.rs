//! Pods whose pause is run by their shim.

use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use kit::machine::processes;
use kit::{ContainerSpec, Handler, PodSpec, until};
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::handover::a_shim_that_cannot_be_looked_for_is_found_later;
use crate::harness::{
    Case, Harness, Kind, SOON, cases, no_shim, none, not_ready, one_shim, refused, removed, shims,
    signal,
};
use crate::self_started::{
    a_shim_that_dies_with_containers_ends_the_pod_too, a_start_that_fails_is_an_error,
    an_interrupted_deletion_leaves_nothing,
};

pub(crate) fn cases() -> Vec<Case> {
    cases![Kind::Driver =>
        the_bundle_is_the_builtins,
        a_start_that_fails_is_an_error,
        a_shim_that_dies_with_containers_ends_the_pod_too,
        a_create_that_hangs_is_an_error,
        a_create_that_fails_is_an_error,
        deletes_that_fail_are_late_or_lost_are_tried_again,
        a_stop_tries_a_deletion_that_fails_again,
        a_kill_that_is_refused_leaves_no_error_behind,
        an_interrupted_deletion_leaves_nothing,
        a_lost_wait_is_no_exit,
        recovery_adopts_running_pauses_and_reports_others_not_ready,
        an_unreachable_shim_is_unknown_and_can_be_ended,
        a_shim_that_cannot_be_looked_for_is_found_later,
        a_shim_that_refuses_to_kill_is_killed,
        fifty_pods_of_the_driver_leave_nothing,
    ]
}

/// The spec as a list of paths and values, without what differs from pod to pod.
fn facts(spec: &Value, of: &[(&str, &str)]) -> Vec<String> {
    fn walk(value: &Value, path: &str, into: &mut Vec<String>) {
        match value {
            Value::Object(map) => {
                map.iter().for_each(|(key, value)| walk(value, &format!("{path}/{key}"), into))
            }
            Value::Array(items) => items
                .iter()
                .enumerate()
                .for_each(|(at, item)| walk(item, &format!("{path}/{at}"), into)),
            // Nothing said.
            Value::Null => {}
            // A set.
            other if path.contains("/capabilities/") || path.contains("/maskedPaths/") => {
                let set = path.rsplit_once('/').map_or(path, |(set, _)| set);
                into.push(format!("{set} has {other}"));
            }
            other => into.push(format!("{path} = {other}")),
        }
    }
    let mut facts = Vec::new();
    walk(spec, "", &mut facts);
    for fact in &mut facts {
        for (text, name) in of {
            *fact = fact.replace(text, name);
        }
    }
    facts.sort();
    facts
}

/// The spec that the runtime gets, beside the one that it gets of the built-in controller for the
/// same pod.
async fn the_bundle_is_the_builtins(harness: Arc<Harness>) -> Result<()> {
    let layout = harness.node.layout();
    for (name, spec) in [
        (
            "plain",
            PodSpec::new("same")
                .label("a", "b")
                .sysctl("net.ipv4.ip_unprivileged_port_start", "80"),
        ),
        ("host network", PodSpec::new("same").host_network()),
    ] {
        let mut seen = Vec::new();
        for handler in [Handler::Builtin, Handler::Ours] {
            let pod = harness.node.run(handler, spec.clone()).await?;
            let (id, cgroup) =
                (pod.id().to_owned(), pod.home().cgroup().context("a cgroup")?.to_owned());
            let bundle = match handler {
                Handler::Builtin => {
                    layout.state().join("io.containerd.runtime.v2.task/k8s.io").join(&id)
                }
                Handler::Ours => layout.sandboxer_state().join("sandboxes").join(&id).join(&id),
            };
            let config: Value = serde_json::from_slice(&fs::read(bundle.join("config.json"))?)?;
            let pause = processes::one(pod.pause_pid().await?)?;
            if handler == Handler::Ours {
                ensure!(
                    pause.parent == one_shim(&pod).await?.pid,
                    "the pause is not a child of the shim: {pause:?}"
                );
            }
            let netns =
                config.pointer("/linux/namespaces").and_then(Value::as_array).into_iter().flatten();
            let netns: Vec<String> =
                netns.filter_map(|one| one["path"].as_str().map(str::to_owned)).collect();
            let uid = pod.config().metadata.uid.clone();
            let mut of =
                vec![(id.as_str(), "ID"), (cgroup.as_str(), "CGROUP"), (uid.as_str(), "UID")];
            of.extend(netns.iter().map(|path| (path.as_str(), "NETNS")));
            let log = pod.config().log_directory.clone();
            of.push((log.as_str(), "LOG"));
            seen.push(facts(&config, &of));
            pod.remove().await?;
        }
        let [theirs, ours] = &seen[..] else { unreachable!("two handlers") };
        let differ: Vec<String> = theirs
            .iter()
            .filter(|fact| !ours.contains(fact))
            .map(|fact| format!("- {fact}"))
            .chain(
                ours.iter().filter(|fact| !theirs.contains(fact)).map(|fact| format!("+ {fact}")),
            )
            // Older releases of containerd do not mask the first, newer ones also the second, of
            // each of the node's CPUs: a pause reads neither.
            .filter(|fact| fact != r#"+ /linux/maskedPaths has "/proc/interrupts""#)
            .filter(|fact| !fact.ends_with(r#"/thermal_throttle""#))
            // There is no image, which has a name and an environment; the version is containerd's
            // own.
            .filter(|fact| {
                !["podsandbox.image-name", "/process/env/", "/ociVersion"]
                    .iter()
                    .any(|of| fact.contains(of))
            })
            .collect();
        ensure!(differ.is_empty(), "{name}:\n{}", differ.join("\n"));
        ensure!(ours.len() > 60, "{name}: {ours:?}");
    }
    Ok(())
}

async fn a_create_that_hangs_is_an_error(harness: Arc<Harness>) -> Result<()> {
    let before = harness.node.snapshot()?;
    harness.order("proxy")?;
    harness.misbehave("Create", "hang 1")?;
    let begun = Instant::now();
    refused(harness.pod("hanging").await, "create pause process")?;
    ensure!(begun.elapsed() < Duration::from_secs(60), "took {:?}", begun.elapsed());
    harness.node.settles_to(&before).await
}

async fn a_create_that_fails_is_an_error(harness: Arc<Harness>) -> Result<()> {
    harness.order("proxy")?;
    for method in ["Create", "Start", "Connect"] {
        let before = harness.node.snapshot()?;
        for how in ["fail 1", "lose 1"] {
            harness.misbehave(method, how)?;
            let expected = match (how, method) {
                ("fail 1", _) => "ordered to fail",
                (_, "Connect") => "ask shim",
                (_, "Create") => "create pause process",
                _ => "start pause process",
            };
            refused(harness.pod("failing").await, expected)
                .with_context(|| format!("{method} {how}"))?;
            harness.node.settles_to(&before).await.with_context(|| format!("{method} {how}"))?;
        }
    }
    harness.behave()?;
    harness.pod("good").await.context("after the bad ones")?.remove().await
}

async fn deletes_that_fail_are_late_or_lost_are_tried_again(harness: Arc<Harness>) -> Result<()> {
    harness.order("proxy")?;
    for how in ["fail 2", "lose 1", "cut 1", "late 12"] {
        let before = harness.node.snapshot()?;
        let pod = harness.pod("deleted").await?;
        let container = pod.run(ContainerSpec::sleeping("a")).await?;
        container.stop().await?;
        container.remove().await?;
        harness.misbehave("Delete", how)?;
        removed(&pod).await.context(how)?;
        no_shim(&pod).await.context(how)?;
        harness.node.settles_to(&before).await.context(how)?;
    }
    Ok(())
}

async fn a_stop_tries_a_deletion_that_fails_again(harness: Arc<Harness>) -> Result<()> {
    harness.order("proxy")?;
    let pod = harness.pod("stopped").await?;
    harness.misbehave("Delete", "fail 2")?;
    pod.stop().await.context("with two deletions that fail")?;
    harness.used_up().await?;
    removed(&pod).await?;
    no_shim(&pod).await
}

async fn a_kill_that_is_refused_leaves_no_error_behind(harness: Arc<Harness>) -> Result<()> {
    harness.order("proxy")?;
    let pod = harness.pod("refused").await?;
    harness.misbehave("Kill", "fail 1")?;
    pod.stop().await?;
    removed(&pod).await?;
    no_shim(&pod).await?;
    let log = fs::read_to_string(harness.node.layout().sandboxer_log())?;
    // The second is what the shim logs when a caller hangs up because its pause has ended.
    let error = log.lines().find(|line| {
        line.contains(pod.id())
            && (line.contains(" error ") || line.contains("failed sending message"))
    });
    ensure!(error.is_none(), "{error:?}");
    Ok(())
}

async fn a_lost_wait_is_no_exit(harness: Arc<Harness>) -> Result<()> {
    harness.order("proxy")?;
    harness.misbehave("Wait", "cut 2")?;
    let pod = harness.pod("waited").await?;
    let log = harness.node.layout().sandboxer_log();
    until("the Wait is lost twice", SOON, async || {
        let text = fs::read_to_string(&log)?;
        let lines = text
            .lines()
            .filter(|line| {
                line.contains(pod.id()) && line.contains("Wait for pause process failed")
            })
            .count();
        ensure!(lines == 2, "{lines} lines");
        Ok(())
    })
    .await?;
    ensure!(pod.is_ready().await?, "the pod ended with a connection");
    pod.run(ContainerSpec::sleeping("a")).await?;
    signal(pod.pause_pid().await?, Signal::SIGKILL)?;
    until("not ready", SOON, async || not_ready(&pod).await).await?;
    let exit = harness.node.sandboxer().wait(pod.id()).await?;
    ensure!(exit.exit_status == 137, "{exit:?}");
    removed(&pod).await?;
    no_shim(&pod).await
}

/// Running: adopted. Ended, or without its shim: not ready, with what is known of it.
async fn recovery_adopts_running_pauses_and_reports_others_not_ready(
    harness: Arc<Harness>,
) -> Result<()> {
    let (lives, ended, orphaned) =
        (harness.pod("lives").await?, harness.pod("ended").await?, harness.pod("orphaned").await?);
    let container = lives.run(ContainerSpec::sleeping("a")).await?;
    let (pause, shim) = (lives.pause_pid().await?, one_shim(&lives).await?.pid);
    let dead = ended.pause_pid().await?;
    let orphan = orphaned.pause_pid().await?;
    harness.node.kill_sandboxer()?;
    signal(dead, Signal::SIGKILL)?;
    signal(one_shim(&orphaned).await?.pid, Signal::SIGKILL)?;
    harness.node.start_sandboxer().await?;
    let status = harness.node.sandboxer().status(lives.id(), false).await?;
    ensure!((status.pid, status.state.as_str()) == (pause, "SANDBOX_READY"), "{status:?}");
    ensure!(one_shim(&lives).await?.pid == shim, "another shim");
    ensure!(container.sh("echo hello").await?.trim() == "hello", "exec");
    lives.run(ContainerSpec::sleeping("b")).await?;
    let exit = harness.node.sandboxer().wait(ended.id()).await?;
    ensure!(exit.exit_status == 137, "{exit:?}");
    until("the orphan is gone", SOON, async || {
        none(
            &processes::all()?
                .into_iter()
                .filter(|p| p.pid == orphan && p.state != 'Z')
                .collect::<Vec<_>>(),
        )
    })
    .await?;
    for pod in [&ended, &orphaned] {
        until("not ready", SOON, async || not_ready(pod).await).await?;
    }
    for pod in [lives, ended, orphaned] {
        removed(&pod).await?;
        no_shim(&pod).await?;
    }
    Ok(())
}

async fn an_unreachable_shim_is_unknown_and_can_be_ended(harness: Arc<Harness>) -> Result<()> {
    harness.order("proxy")?;
    let pod = harness.pod("unreachable").await?;
    harness.node.kill_sandboxer()?;
    harness.misbehave("State", "hang 1")?;
    harness.node.start_sandboxer().await?;
    let status = harness.node.sandboxer().status(pod.id(), false).await?;
    // Unknown at first; Status waits until the pause is found.
    ensure!(status.state == "SANDBOX_READY", "{status:?}");
    harness.behave()?;
    removed(&pod).await?;
    no_shim(&pod).await
}

async fn a_shim_that_refuses_to_kill_is_killed(harness: Arc<Harness>) -> Result<()> {
    harness.order("proxy")?;
    let pod = harness.pod("refusing").await?;
    harness.misbehave("Kill", "fail 1000")?;
    removed(&pod).await?;
    no_shim(&pod).await?;
    let log = fs::read_to_string(harness.node.layout().sandboxer_log())?;
    ensure!(
        log.contains("shim refuses to kill pause process; killing the shim"),
        "the log does not say so"
    );
    Ok(())
}

async fn fifty_pods_of_the_driver_leave_nothing(harness: Arc<Harness>) -> Result<()> {
    for round in 0..10 {
        let names: Vec<String> = (0..5).map(|n| format!("many-{round}-{n}")).collect();
        let cycles = names.iter().map(|name| async {
            let pod = harness.pod(name).await?;
            pod.run(ContainerSpec::sleeping("a")).await?;
            pod.remove().await?;
            ensure!(shims(&pod)?.is_empty(), "a shim is left");
            Ok(())
        });
        futures::future::try_join_all(cycles).await?;
    }
    Ok(())
}
