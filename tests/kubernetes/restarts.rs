//! Restarts of the node's daemons, while pods come and go.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::Run;
use crate::cluster::until;
use crate::side::{Facts, LIMIT, Side, at, container, sleeping, with};

pub(crate) const CASES: &[(&str, Run)] = &[
    ("restart_of_the_sandboxer", Run::Both(sandboxer)),
    ("restart_of_containerd", Run::Both(containerd)),
    ("restart_of_kubelet", Run::Both(kubelet)),
    ("without_the_sandboxer", Run::Both(without_the_sandboxer)),
    ("death_of_the_pause_process", Run::Each(dead_pause)),
];

fn sandboxer(sides: &[Side; 2]) -> Result<[Facts; 2]> {
    restarts(sides, "pause-sandboxer")
}

fn containerd(sides: &[Side; 2]) -> Result<[Facts; 2]> {
    restarts(sides, "containerd")
}

fn kubelet(sides: &[Side; 2]) -> Result<[Facts; 2]> {
    restarts(sides, "kubelet")
}

/// The facts of a living pod that must stay.
fn identity(side: &Side, name: &str) -> Result<Value> {
    let pod = side.get(&format!("pod/{name}"))?;
    let container = &pod["status"]["containerStatuses"][0];
    Ok(json!({
        "uid": pod["metadata"]["uid"],
        "ip": pod["status"]["podIP"],
        "container": container["containerID"],
        "restarts": container["restartCount"],
        "namespaces": side.sh(name, "for of in net ipc uts; do readlink /proc/self/ns/$of; done")?,
    }))
}

const LIVING: [&str; 3] = ["lives-alone", "lives-shared", "lives-on-host"];

/// Makes pods and deletes them until it should stop; how many there were.
fn churn(side: &Side, stop: &AtomicBool) -> Result<usize> {
    let mut number = 0;
    while !stop.load(Ordering::Relaxed) {
        let names = [format!("churn-{number}"), format!("churn-{}", number + 1)];
        for name in &names {
            side.create(name, json!({ "containers": [sleeping("main")] }))?;
        }
        // One is deleted as it starts, the other as it runs.
        side.kubectl(&["delete", "pod", &names[0], "--wait=false"])?;
        side.wait(&format!("pod/{}", names[1]), "condition=Ready")?;
        side.kubectl(&["delete", "pod", &names[1], "--wait=false"])?;
        number += 2;
    }
    Ok(number)
}

fn restarts(sides: &[Side; 2], program: &'static str) -> Result<[Facts; 2]> {
    let cluster = sides[0].cluster;
    for side in sides {
        for (name, spec) in LIVING.into_iter().zip([
            json!({}),
            json!({ "shareProcessNamespace": true }),
            json!({ "hostNetwork": true }),
        ]) {
            side.run(name, with(json!({ "containers": [sleeping("main")] }), spec))?;
        }
    }
    let before = identities(sides)?;
    let stop = AtomicBool::new(false);
    let churned = std::thread::scope(|scope| -> Result<[usize; 2]> {
        let churning = sides.each_ref().map(|side| scope.spawn(|| churn(side, &stop)));
        let restarted = (|| {
            for signal in [Signal::SIGTERM, Signal::SIGKILL, Signal::SIGTERM, Signal::SIGKILL] {
                std::thread::sleep(Duration::from_secs(3));
                cluster.end_program(program, signal)?;
                cluster.start_program(program)?;
                cluster.kubelet_answers()?;
                for side in sides {
                    side.run("after", json!({ "containers": [sleeping("main")] }))?;
                    side.delete(&["pod/after"])?;
                }
            }
            Ok(())
        })();
        stop.store(true, Ordering::Relaxed);
        let churned = churning.map(|churning| churning.join().expect("the churn panicked"));
        restarted.and_then(|()| {
            let [builtin, ours] = churned;
            Ok([builtin?, ours?])
        })
    })?;
    ensure!(churned.iter().all(|churned| *churned > 0), "no pod came and went: {churned:?}");
    let after = identities(sides)?;
    let mut facts = [Facts::default(), Facts::default()];
    for (index, side) in sides.iter().enumerate() {
        for (name, (before, after)) in LIVING.iter().zip(before[index].iter().zip(&after[index])) {
            ensure!(before == after, "{}/{name}: {before} became {after}", side.namespace());
            facts[index].add(*name, "stays");
        }
        until("the churn's pods are gone", LIMIT, || {
            let left = side.kubectl(&["get", "pods", "-o", "name"])?;
            ensure!(!left.contains("churn-"), "{left}");
            Ok(())
        })?;
        side.delete(&LIVING.map(|name| format!("pod/{name}")).each_ref().map(String::as_str))?;
    }
    Ok(facts)
}

fn identities(sides: &[Side; 2]) -> Result<[Vec<Value>; 2]> {
    let observed =
        |side: &Side| LIVING.iter().map(|name| identity(side, name)).collect::<Result<Vec<_>>>();
    Ok([observed(&sides[0])?, observed(&sides[1])?])
}

/// While the sandboxer is down, its pods neither begin nor end; those of the built-in do. Both
/// happens when it is back.
fn without_the_sandboxer(sides: &[Side; 2]) -> Result<[Facts; 2]> {
    let ([builtin, ours], cluster) = (sides, sides[0].cluster);
    let mut facts = Facts::default();
    let spec = || json!({ "containers": [sleeping("main")] });
    ours.run("ends-later", spec())?;
    ours.run("lives-on", spec())?;
    let before = at(&ours.get("pod/lives-on")?, "status.containerStatuses.0.containerID");
    cluster.end_program("pause-sandboxer", Signal::SIGTERM)?;
    ours.create("begins-later", spec())?;
    ours.kubectl(&["delete", "pod", "ends-later", "--wait=false"])?;
    builtin.run("begins-now", spec())?;
    builtin.delete(&["pod/begins-now"])?;
    until("kubelet says why the pod waits", LIMIT, || {
        let events = ours.events("begins-later")?;
        ensure!(events.contains("FailedCreatePodSandBox"), "{events}");
        Ok(())
    })?;
    ensure!(ours.get("pod/ends-later").is_ok(), "a pod ended without its sandboxer");
    facts.expect("a living pod", ours.sh("lives-on", "echo runs")?, "runs")?;
    cluster.start_program("pause-sandboxer")?;
    ours.wait("pod/begins-later", "condition=Ready")?;
    ours.wait("pod/ends-later", "delete")?;
    let after = at(&ours.get("pod/lives-on")?, "status.containerStatuses.0.containerID");
    ensure!(before == after, "the living pod was restarted");
    ours.delete(&["pod/begins-later", "pod/lives-on"])?;
    // There is nothing to compare.
    Ok([facts.clone(), facts])
}

/// kubelet makes a pod's sandbox again when its pause process dies.
fn dead_pause(side: &Side) -> Result<Facts> {
    let mut facts = Facts::default();
    side.run(
        "orphaned",
        json!({
            "shareProcessNamespace": true, "containers": [container("main", "exec sleep 100000")],
        }),
    )?;
    let first = side.get("pod/orphaned")?;
    // A process that holds no other namespace of the pod is its pause.
    let inside = side.sh("orphaned", "readlink /proc/self/ns/pid")?;
    let pause = std::fs::read_dir("/proc")?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok())
        .find(|pid| is_first_of(*pid, inside.trim()))
        .context("no pause process")?;
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pause), Signal::SIGKILL)?;
    let ip = at(&first, "status.podIP");
    let pod = side.until("pod/orphaned", "runs in another sandbox", |pod| {
        at(pod, "status.podIP") != ip
            && at(pod, "status.containerStatuses.0.state.running.startedAt") != "none"
    })?;
    // kubelet may see the end of the container before that of the sandbox. It then tries to start
    // the container in the old sandbox, which fails.
    let status = |field: &str| at(&pod, &format!("status.containerStatuses.0.{field}"));
    let last = |field: &str| status(&format!("lastState.terminated.{field}"));
    let (restarts, reason, code) = (status("restartCount"), last("reason"), last("exitCode"));
    match (restarts.as_str(), reason.as_str(), code.as_str()) {
        ("1", "Error", "137") | ("2", "StartError", "128") => {}
        other => bail!("restarts, reason and exit code are {other:?}"),
    }
    facts.expect("runs", side.sh("orphaned", "echo yes")?, "yes")?;
    let changed = side.events("orphaned")?.contains("SandboxChanged");
    facts.expect("SandboxChanged", changed, "true")?;
    side.delete(&["pod/orphaned"])?;
    Ok(facts)
}

/// Whether a process is the first of a PID namespace.
fn is_first_of(pid: i32, namespace: &str) -> bool {
    let is = std::fs::read_link(format!("/proc/{pid}/ns/pid"))
        .is_ok_and(|link| link.to_string_lossy() == namespace);
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    is && status.lines().any(|line| line.starts_with("NSpid:") && line.ends_with("\t1"))
}
