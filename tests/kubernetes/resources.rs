//! Resources of a pod: requests and limits, overhead, resizing, and what happens without.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use kit::Handler;
use serde_json::{Value, json};

use crate::Run;
use crate::cgroups::{children, hierarchy, path};
use crate::cluster::until;
use crate::side::{Facts, LIMIT, Side, at, container, sleeping, with};

pub(crate) const CASES: &[(&str, Run)] = &[
    ("qos_classes", Run::Each(qos)),
    ("pod_overhead", Run::Each(overhead)),
    ("resize_in_place", Run::Each(resize)),
    ("oom", Run::Each(oom)),
    ("crash_loop", Run::Each(crash_loop)),
    ("active_deadline", Run::Each(deadline)),
];

/// Files of a pod's cgroup, of version 1 or 2.
const LIMITS: [&str; 6] = [
    "memory/memory.limit_in_bytes",
    "cpu/cpu.shares",
    "cpu/cpu.cfs_quota_us",
    "memory.max",
    "cpu.weight",
    "cpu.max",
];

/// The limits of a cgroup, and how many cgroups are in it.
fn limits(facts: &mut Facts, name: &str, cgroup: &str) -> Result<()> {
    let top = PathBuf::from("/sys/fs/cgroup");
    let mut read = 0;
    for limit in LIMITS {
        let (hierarchy, file) = limit.split_once('/').unwrap_or(("", limit));
        if let Ok(text) = fs::read_to_string(top.join(hierarchy).join(cgroup).join(file)) {
            facts.add(format!("{name}: {limit}"), text);
            read += 1;
        }
    }
    ensure!(read > 0, "no limit below {cgroup}");
    facts.add(format!("{name}: cgroups"), children(&hierarchy().join(cgroup))?.len());
    Ok(())
}

fn limited(container: Value, requests: Value, limits: Value) -> Value {
    with(container, json!({ "resources": { "requests": requests, "limits": limits } }))
}

fn qos(side: &Side) -> Result<Facts> {
    let mut facts = Facts::default();
    let much = json!({ "cpu": "50m", "memory": "32Mi" });
    let kinds: [(&str, Value); 3] = [
        ("guaranteed", limited(sleeping("main"), much.clone(), much.clone())),
        ("burstable", limited(sleeping("main"), json!({ "cpu": "10m" }), much)),
        ("best-effort", sleeping("main")),
    ];
    for (name, container) in kinds {
        side.run(name, json!({ "containers": [container] }))?;
        let pod = side.get(&format!("pod/{name}"))?;
        facts.add(format!("{name}: class"), at(&pod, "status.qosClass"));
        let adjusted = side.sh(name, "cat /proc/1/oom_score_adj")?;
        facts.add(format!("{name}: oom_score_adj"), adjusted);
        limits(&mut facts, name, &path(&pod))?;
    }
    side.delete(&["pod/guaranteed", "pod/burstable", "pod/best-effort"])?;
    Ok(facts)
}

fn overhead(side: &Side) -> Result<Facts> {
    let mut facts = Facts::default();
    let class = format!("overhead-{}", side.namespace());
    side.cluster.apply(&json!({
        "apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass",
        "metadata": { "name": class },
        "handler": match side.handler {
            Handler::Builtin => "runc",
            Handler::Ours => side.handler.name(),
        },
        "overhead": { "podFixed": { "cpu": "20m", "memory": "24Mi" } },
    }))?;
    let much = json!({ "cpu": "50m", "memory": "32Mi" });
    side.run(
        "overhead",
        json!({
            "runtimeClassName": class,
            "containers": [limited(sleeping("main"), much.clone(), much)],
        }),
    )?;
    let pod = side.get("pod/overhead")?;
    facts.expect("overhead", at(&pod, "spec.overhead.memory"), "24Mi")?;
    limits(&mut facts, "pod", &path(&pod))?;
    side.delete(&["pod/overhead"])?;
    side.cluster.kubectl(&["delete", "runtimeclass", &class])?;
    Ok(facts)
}

fn resize(side: &Side) -> Result<Facts> {
    let mut facts = Facts::default();
    let (small, large) =
        (json!({ "cpu": "50m", "memory": "32Mi" }), json!({ "cpu": "100m", "memory": "64Mi" }));
    side.run(
        "resized",
        json!({
            "containers": [limited(sleeping("main"), small.clone(), small)],
        }),
    )?;
    let patch = json!({ "spec": { "containers": [{
        "name": "main", "resources": { "requests": large, "limits": large },
    }] } });
    let patch = patch.to_string();
    side.kubectl(&["patch", "pod", "resized", "--subresource=resize", "--patch", &patch])?;
    let pod = side.until("pod/resized", "has its new size", |pod| {
        at(pod, "status.containerStatuses.0.resources.limits.memory") == "64Mi"
            && at(pod, "status.containerStatuses.0.resources.limits.cpu") == "100m"
    })?;
    facts.expect("restarts", at(&pod, "status.containerStatuses.0.restartCount"), "0")?;
    facts.add(
        "seen inside",
        side.sh(
            "resized",
            "cat /sys/fs/cgroup/memory/memory.limit_in_bytes \
        /sys/fs/cgroup/memory.max 2>/dev/null; true",
        )?,
    );
    limits(&mut facts, "pod", &path(&pod))?;
    side.delete(&["pod/resized"])?;
    facts.add("events", side.events("resized")?);
    Ok(facts)
}

fn oom(side: &Side) -> Result<Facts> {
    let mut facts = Facts::default();
    let little = json!({ "memory": "24Mi", "cpu": "100m" });
    // Only the child allocates: beside a second process that does, the kernel may also kill the
    // shell, before the killed child has released its memory.
    let main = container("main", "tail /dev/zero; exit 0");
    let eats = container("eats", "exec tail /dev/zero");
    side.create(
        "hungry",
        json!({
            "restartPolicy": "Never",
            "containers": [
                limited(eats, little.clone(), little.clone()),
                limited(sleeping("calm"), little.clone(), little.clone()),
                limited(main, little.clone(), little),
            ],
        }),
    )?;
    let pod = side.until("pod/hungry", "is out of memory", |pod| {
        statuses(pod).iter().filter(|s| at(s, "state.terminated.reason") != "none").count() == 2
    })?;
    for status in statuses(&pod) {
        let name = at(&status, "name");
        facts.add(format!("{name}: reason"), at(&status, "state.terminated.reason"));
        facts.add(format!("{name}: exit code"), at(&status, "state.terminated.exitCode"));
    }
    ensure!(facts.get("eats: exit code") == Some("137"), "{:?}", facts.0);
    // Else both could be wrong alike. The built-in controller is at times, as `known.rs` says.
    let reason = facts.get("eats: reason");
    ensure!(side.handler == Handler::Builtin || reason == Some("OOMKilled"), "{reason:?}");
    let calm = side.kubectl(&["exec", "hungry", "-c", "calm", "--", "echo", "runs"])?;
    facts.expect("calm", calm, "runs")?;
    side.delete(&["pod/hungry"])?;
    Ok(facts)
}

fn statuses(pod: &Value) -> Vec<Value> {
    let mut all = pod["status"]["containerStatuses"].as_array().cloned().unwrap_or_default();
    all.sort_by_key(|status| at(status, "name"));
    all
}

fn crash_loop(side: &Side) -> Result<Facts> {
    let mut facts = Facts::default();
    side.create("crashes", json!({ "containers": [container("main", "exit 3")] }))?;
    let first =
        side.until("pod/crashes", "has an address", |pod| at(pod, "status.podIP") != "none")?;
    let pod = side.until("pod/crashes", "waits to be restarted", |pod| {
        at(pod, "status.containerStatuses.0.state.waiting.reason") == "CrashLoopBackOff"
            && at(pod, "status.containerStatuses.0.restartCount")
                .parse()
                .is_ok_and(|restarts: u32| restarts >= 2)
    })?;
    let last = "status.containerStatuses.0.lastState.terminated";
    facts.expect("exit code", at(&pod, &format!("{last}.exitCode")), "3")?;
    facts.add("reason", at(&pod, &format!("{last}.reason")));
    let same = at(&first, "status.podIP") == at(&pod, "status.podIP");
    facts.expect("keeps its sandbox", same, "true")?;
    // Before the deletion, which kills the container if it runs at that moment.
    facts.add("events", side.events("crashes")?);
    side.delete(&["pod/crashes"])?;
    Ok(facts)
}

fn deadline(side: &Side) -> Result<Facts> {
    let mut facts = Facts::default();
    side.create(
        "limited",
        json!({
            "activeDeadlineSeconds": 3, "restartPolicy": "Never", "containers": [sleeping("main")],
        }),
    )?;
    side.wait("pod/limited", "jsonpath={.status.phase}=Failed")?;
    facts.expect("reason", at(&side.get("pod/limited")?, "status.reason"), "DeadlineExceeded")?;
    until("its container ended", LIMIT, || {
        let pod = side.get("pod/limited")?;
        let state = statuses(&pod).first().context("no container")?["state"].clone();
        ensure!(state["terminated"].is_object(), "{state}");
        Ok(())
    })?;
    side.delete(&["pod/limited"])?;
    Ok(facts)
}
