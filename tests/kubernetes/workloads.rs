//! The makers of pods: controllers, files of kubelet; and the causes of their end.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::Run;
use crate::cluster::until;
use crate::side::{Facts, LIMIT, Side, at, container, limit, sleeping, timeout, with};

pub(crate) const CASES: &[(&str, Run)] = &[
    ("deployment", Run::Each(deployment)),
    ("job", Run::Each(job)),
    ("stateful_set", Run::Each(stateful_set)),
    ("daemon_set", Run::Each(daemon_set)),
    ("static_pod", Run::Each(static_pod)),
    ("eviction", Run::Each(eviction)),
    ("fifty_deletions", Run::Alone(fifty_deletions)),
];

/// A controller of pods with one label.
fn workload(side: &Side, kind: &str, name: &str, more: Value, pod: Value) -> Value {
    let mut spec = json!({
        "selector": { "matchLabels": { "app": name } },
        "template": { "metadata": { "labels": { "app": name } }, "spec": side.spec(pod) },
    });
    spec = with(spec, more);
    json!({ "apiVersion": "apps/v1", "kind": kind, "metadata": { "name": name }, "spec": spec })
}

fn rolled_out(side: &Side, object: &str) -> Result<()> {
    side.kubectl(&["rollout", "status", object, &limit()]).map(drop)
}

/// The names of the pods that a label selects, and which of their containers are ready.
fn gone(side: &Side, label: &str) -> Result<()> {
    until(&format!("no pod of {label}"), LIMIT, || {
        let left = side.pods(label)?.len();
        ensure!(left == 0, "{left} pods");
        Ok(())
    })
}

fn deployment(side: &Side) -> Result<Facts> {
    let mut facts = Facts::default();
    let version = |version: &str| {
        let main = with(
            sleeping("main"),
            json!({
                "env": [{ "name": "VERSION", "value": version }],
                "readinessProbe": { "exec": { "command": ["true"] }, "periodSeconds": 1,
                    "timeoutSeconds": 20 },
            }),
        );
        let more = json!({
            "replicas": 3,
            "strategy": { "rollingUpdate": { "maxSurge": 1, "maxUnavailable": 0 } },
        });
        workload(side, "Deployment", "rolls", more, json!({ "containers": [main] }))
    };
    let versions = |facts: &mut Facts, when: &str| -> Result<()> {
        let mut seen = Vec::new();
        for pod in side.pods("app=rolls")? {
            if at(&pod, "metadata.deletionTimestamp") == "none" {
                seen.push(side.sh(&at(&pod, "metadata.name"), "echo $VERSION")?.trim().to_owned());
            }
        }
        facts.add(format!("versions {when}"), seen.join(" "));
        Ok(())
    };
    side.apply(&version("1"))?;
    rolled_out(side, "deployment/rolls")?;
    versions(&mut facts, "at first")?;
    side.apply(&version("2"))?;
    rolled_out(side, "deployment/rolls")?;
    versions(&mut facts, "after the update")?;
    side.kubectl(&["rollout", "undo", "deployment/rolls"])?;
    rolled_out(side, "deployment/rolls")?;
    versions(&mut facts, "after the way back")?;
    side.kubectl(&["scale", "deployment/rolls", "--replicas=1"])?;
    until("one pod is left", LIMIT, || {
        let left = side.pods("app=rolls")?.len();
        ensure!(left == 1, "{left} pods");
        Ok(())
    })?;
    side.delete(&["deployment/rolls"])?;
    gone(side, "app=rolls")?;
    Ok(facts)
}

fn job(side: &Side) -> Result<Facts> {
    let mut facts = Facts::default();
    let job = |name: &str, script: &str, more: Value| {
        let pod = side.spec(json!({
            "restartPolicy": "Never", "containers": [container("main", script)],
        }));
        let spec = with(json!({ "template": { "spec": pod } }), more);
        json!({
            "apiVersion": "batch/v1", "kind": "Job", "metadata": { "name": name }, "spec": spec,
        })
    };
    let indexed = json!({ "completions": 3, "parallelism": 2, "completionMode": "Indexed" });
    side.apply(&job("works", "echo $JOB_COMPLETION_INDEX", indexed))?;
    side.apply(&job("fails", "exit 5", json!({ "backoffLimit": 1 })))?;
    side.wait("job/works", "condition=Complete")?;
    let mut logs = String::new();
    for pod in side.pods("job-name=works")? {
        logs += &side.logs(&[&at(&pod, "metadata.name")])?;
    }
    let mut indexes: Vec<&str> = logs.lines().collect();
    indexes.sort_unstable();
    facts.expect("indexes", indexes.join(" "), "0 1 2")?;
    facts.expect("succeeded", at(&side.get("job/works")?, "status.succeeded"), "3")?;
    side.wait("job/fails", "condition=Failed")?;
    facts.expect("failed", at(&side.get("job/fails")?, "status.failed"), "2")?;
    side.delete(&["job/works", "job/fails"])?;
    gone(side, "job-name=works")?;
    Ok(facts)
}

fn stateful_set(side: &Side) -> Result<Facts> {
    let mut facts = Facts::default();
    side.apply(&json!({
        "apiVersion": "v1", "kind": "Service", "metadata": { "name": "state" },
        "spec": { "clusterIP": "None", "selector": { "app": "state" }, "ports": [{ "port": 80 }] },
    }))?;
    let more = json!({ "replicas": 2, "serviceName": "state" });
    let set =
        workload(side, "StatefulSet", "state", more, json!({ "containers": [sleeping("m")] }));
    side.apply(&set)?;
    rolled_out(side, "statefulset/state")?;
    let uid = at(&side.get("pod/state-0")?, "metadata.uid");
    side.kubectl(&["delete", "pod", "state-0"])?;
    side.until("pod/state-0", "is another", |pod| at(pod, "metadata.uid") != uid)?;
    side.wait("pod/state-0", "condition=Ready")?;
    for pod in ["state-0", "state-1"] {
        facts.expect(pod, side.sh(pod, "hostname")?, pod)?;
        let name = side.sh(pod, "tail -1 /etc/hosts | cut -f2-")?;
        facts.add(format!("{pod} in hosts"), name.replace(side.namespace(), "NS"));
    }
    side.delete(&["statefulset/state", "service/state"])?;
    gone(side, "app=state")?;
    Ok(facts)
}

fn daemon_set(side: &Side) -> Result<Facts> {
    let mut facts = Facts::default();
    let pod = json!({ "hostNetwork": true, "containers": [sleeping("main")] });
    side.apply(&workload(side, "DaemonSet", "everywhere", json!({}), pod))?;
    rolled_out(side, "daemonset/everywhere")?;
    let set = side.get("daemonset/everywhere")?;
    facts.expect("ready", at(&set, "status.numberReady"), "1")?;
    side.delete(&["daemonset/everywhere"])?;
    gone(side, "app=everywhere")?;
    Ok(facts)
}

/// A pod that kubelet has from a file, on a node whose API need not answer.
fn static_pod(side: &Side) -> Result<Facts> {
    let mut facts = Facts::default();
    let name = format!("static-{}", side.namespace());
    let path = PathBuf::from(format!("/etc/kubernetes/manifests/{name}.json"));
    let manifest = |script: &str| {
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": { "name": "static", "namespace": side.namespace() },
            "spec": side.spec(json!({
                "hostNetwork": true,
                "containers": [with(sleeping("main"), json!({
                    "env": [{ "name": "VERSION", "value": script }],
                }))],
            })),
        })
        .to_string()
    };
    fs::write(&path, manifest("1"))?;
    side.wait("pod/static-node", "create")?;
    side.wait("pod/static-node", "condition=Ready")?;
    facts.expect("version", side.sh("static-node", "echo $VERSION")?, "1")?;
    facts.add("class", at(&side.get("pod/static-node")?, "status.qosClass"));
    fs::write(&path, manifest("2"))?;
    until("the changed pod runs", LIMIT, || {
        let version = side.sh("static-node", "echo $VERSION")?;
        ensure!(version.trim() == "2", "{version}");
        Ok(())
    })?;
    facts.add("version after a change", 2);
    fs::remove_file(&path)?;
    side.wait("pod/static-node", "delete")?;
    Ok(facts)
}

fn eviction(side: &Side) -> Result<Facts> {
    let mut facts = Facts::default();
    side.apply(&json!({
        "apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": { "name": "budget" },
        "spec": { "minAvailable": 1, "selector": { "matchLabels": { "app": "evicted" } } },
    }))?;
    side.run("evicted", json!({ "containers": [sleeping("main")] }))?;
    side.wait("pdb/budget", "jsonpath={.status.currentHealthy}=1")?;
    let path = format!("/api/v1/namespaces/{}/pods/evicted/eviction", side.namespace());
    let eviction = json!({
        "apiVersion": "policy/v1", "kind": "Eviction", "metadata": { "name": "evicted" },
    })
    .to_string();
    let evict = || side.kubectl_with(&["create", "--raw", &path, "-f", "-"], &eviction);
    let refused = evict().err().context("evicted against the budget")?.to_string();
    facts.expect("refused", refused.contains("disruption budget"), "true")?;
    side.delete(&["pdb/budget"])?;
    until("it is evicted", LIMIT, || evict().map(drop))?;
    side.wait("pod/evicted", "delete")?;
    facts.add("evicted", true);
    Ok(facts)
}

/// More pods than threads of anything, deleted at once.
fn fifty_deletions(side: &Side) -> Result<Facts> {
    let mut facts = Facts::default();
    let many = kit::fewer("pods", 50);
    let more = json!({ "replicas": many, "progressDeadlineSeconds": 1200 });
    let pod = json!({ "containers": [sleeping("main")] });
    let before = sandboxes(side)?;
    side.apply(&workload(side, "Deployment", "many", more, pod))?;
    side.kubectl(&["rollout", "status", "deployment/many", &timeout(10 * LIMIT)])?;
    let pods = side.pods("app=many")?;
    let restarted =
        pods.iter().filter(|pod| at(pod, "status.containerStatuses.0.restartCount") != "0").count();
    facts.expect("pods", pods.len(), &many.to_string())?;
    facts.expect("restarted", restarted, "0")?;
    let limit = timeout(5 * LIMIT);
    side.kubectl(&["delete", "deployment/many", "--wait=false"])?;
    side.kubectl(&["wait", "--for=delete", "pod", "-l", "app=many", &limit])?;
    until("no sandbox is left", LIMIT, || {
        let now = sandboxes(side)?;
        let left: Vec<_> = now.difference(&before).collect();
        ensure!(left.is_empty(), "{left:?}");
        Ok(())
    })?;
    facts.add("sandboxes left", 0);
    Ok(facts)
}

/// The ids of the sandboxes that containerd has.
fn sandboxes(side: &Side) -> Result<BTreeSet<String>> {
    let mut ctr = std::process::Command::new(side.cluster.parts().program("ctr"));
    ctr.args(["-n", "k8s.io", "sandboxes", "list"]);
    let listed = crate::cluster::output(ctr, b"")?;
    let ids = listed.lines().filter_map(|row| row.split_whitespace().next());
    Ok(ids.map(str::to_owned).collect())
}
