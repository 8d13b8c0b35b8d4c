//! Answers that are incomplete, and objects that the credentials of a node can write.

use std::fs;
use std::process::Stdio;

use serde_json::{Value, json};

use super::{ANNOTATION, Cluster, REVISION, said, until};

/// The paths of the requests of each cycle.
const CONFIG: &str = "/api/v1/namespaces/system/configmaps/release";
const NODES: &str = "/api/v1/nodes";
const PODS: &str = "/api/v1/pods";

#[test]
fn a_run_waits_while_the_api_server_does_not_answer() {
    let cluster = Cluster::new(&["a"]);
    cluster.api.objects().is_down = true;
    let run = cluster.command("install").stdout(Stdio::null()).spawn().unwrap();
    until("a request", || {
        fs::read_to_string(cluster.arguments()).is_ok_and(|text| text.lines().count() > 2)
    });
    cluster.api.objects().is_down = false;
    let output = run.wait_with_output().unwrap();
    assert!(output.status.success());
    assert_eq!(cluster.journal(), ["install a", "label a \"true\""]);
}

#[test]
fn an_answer_that_is_cut_off_ends_no_run() {
    for path in [CONFIG, NODES] {
        let cluster = Cluster::new(&["a"]);
        cluster.api.objects().cut = Some(path);
        cluster.ends("install", 0);
        assert_eq!(cluster.journal(), ["install a", "label a \"true\""], "{path}");
        // `helm uninstall` deletes the objects after the hook has succeeded.
        cluster.api.objects().cut = Some(path);
        cluster.hook(0);
        assert_eq!((cluster.label("a"), cluster.record("a")), (Value::Null, Value::Null), "{path}");
    }
}

#[test]
fn pods_whose_list_is_cut_off_keep_the_label() {
    let cluster = Cluster::new(&["a"]);
    cluster.ends("install", 0);
    let _ = cluster.journal();
    let mut objects = cluster.api.objects();
    objects.pods.insert("web".to_owned(), "a".to_owned());
    objects.cut = Some(PODS);
    drop(objects);
    cluster.hook(3);
    assert_eq!(cluster.journal(), [""; 0]);
}

/// The credentials of a node can write its annotations.
#[test]
fn the_annotation_of_a_node_holds_up_no_other() {
    let long = "x".repeat(200_000);
    for (result, time, label) in
        [("waiting", json!("x"), json!("true")), ("removing", json!(1), json!(long))]
    {
        let cluster = Cluster::new(&["a", "b"]);
        cluster.ends("install", 0);
        cluster.removes();
        let record = json!({
            "release": "system/release", "revision": REVISION, "boot": "first", "job": "",
            "result": result, "time": time, "label": label, "message": "",
        });
        cluster.api.objects().nodes.get_mut("b").unwrap()["metadata"]["annotations"] =
            json!({ ANNOTATION: record.to_string() });
        cluster.ends("uninstall", 0);
        assert_eq!((cluster.label("a"), cluster.record("a")), (Value::Null, Value::Null));
    }
}

/// A node can report any text of its pods.
#[test]
fn a_long_message_is_cut() {
    let cluster = Cluster::new(&["a", "b"]);
    cluster.jobs_end("a", 1, &"x".repeat(200_000));
    cluster.ends("install", 0);
    assert_eq!(cluster.record("a")["message"].as_str().unwrap().len(), 1000);
    assert_eq!(cluster.label("b"), "true");
}

/// A node can create mirror pods with any label. Their owner is the node.
#[test]
fn the_result_of_a_job_is_that_of_its_own_pod() {
    let cluster = Cluster::new(&["a"]);
    cluster.jobs_end("a", None, "");
    let run = cluster.command("install").stdout(Stdio::null()).spawn().unwrap();
    until("a Job", || !cluster.api.objects().jobs.is_empty());
    let mut objects = cluster.api.objects();
    let name = objects.jobs.keys().next().unwrap().clone();
    objects.ended.push(json!({
        "metadata": {
            "labels": { "job-name": name },
            "ownerReferences": [{ "kind": "Node", "uid": "uid-b" }],
            "creationTimestamp": "9",
        },
        "status": { "containerStatuses": [
            { "state": { "terminated": { "exitCode": 77, "message": "forged" } } },
        ] },
    }));
    for job in objects.jobs.values_mut() {
        job["seen"] = 0.into();
    }
    objects.outcomes.insert("a".to_owned(), (Some(1), "no disk".to_owned()));
    drop(objects);
    assert!(run.wait_with_output().unwrap().status.success());
    let record = cluster.record("a");
    assert_eq!((&record["result"], &record["message"]), (&json!("failed"), &json!("no disk")));
}

#[test]
fn a_job_that_never_had_a_container_fails_with_its_reason() {
    let cluster = Cluster::new(&["a"]);
    cluster.jobs_end("a", None, "");
    let run = cluster.command("install").stdout(Stdio::piped()).spawn().unwrap();
    until("a Job", || !cluster.api.objects().jobs.is_empty());
    for job in cluster.api.objects().jobs.values_mut() {
        job["status"] = json!({ "conditions": [
            { "type": "Failed", "status": "True", "message": "was active longer than 900 s" },
        ] });
    }
    let said = said(run.wait_with_output().unwrap(), 0);
    assert!(said.contains("a: failed: was active longer than 900 s"), "{said}");
    assert_eq!(cluster.label("a"), Value::Null);
}
