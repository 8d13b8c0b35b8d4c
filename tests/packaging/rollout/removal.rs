//! Removal of the sandboxer from the nodes.

use std::process::Stdio;

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::{Cluster, REVISION, end, said, until};

/// Promise: removal_waits_for_pods.
#[test]
fn a_removal_waits_for_the_pods_of_a_node_and_not_for_those_of_others() {
    let cluster = Cluster::new(&["a", "b", "c"]);
    cluster.ends("install", 0);
    let _ = cluster.journal();
    cluster.removes();
    cluster.api.objects().pods.insert("web".to_owned(), "a".to_owned());
    // The node knows of something that the cluster does not.
    cluster.jobs_end("b", 75, "default: runc-pause is the default handler");
    let run = cluster.command("uninstall").stdout(Stdio::piped()).spawn().unwrap();
    until("the removal of c", || cluster.record("c").is_null());
    until("b waits", || cluster.record("b")["result"] == "waiting");
    assert_eq!((cluster.label("a"), cluster.label("c")), (json!("true"), Value::Null));
    let journal = cluster.journal();
    assert!(!journal.contains(&"uninstall a".to_owned()), "{journal:?}");
    let at = |line: &str| journal.iter().position(|one| one == line).unwrap();
    // No pod comes to a node from which the handler is removed.
    assert!(at("label c null") < at("uninstall c"), "{journal:?}");
    // The node that waits has its label.
    assert!(at("label b null") < at("uninstall b"), "{journal:?}");
    until("the label of b", || {
        cluster.journal().contains(&"label b \"true\"".to_owned()) || cluster.label("b") == "true"
    });
    cluster.jobs_end("b", 0, "");
    cluster.api.objects().pods.clear();
    let said = said(run.wait_with_output().unwrap(), 0);
    assert!(said.contains("a: waiting: pods need it: default/web"), "{said}");
    assert!(said.contains("b: waiting: default: runc-pause"), "{said}");
    for name in ["a", "b", "c"] {
        assert_eq!((cluster.label(name), cluster.record(name)), (Value::Null, Value::Null));
    }
}

/// The run is killed between the removal of the label and that of the sandboxer.
#[test]
fn a_pod_gets_the_label_back_that_an_interrupted_removal_has_taken() {
    let cluster = Cluster::new(&["a"]);
    cluster.ends("install", 0);
    cluster.removes();
    cluster.jobs_end("a", None, "");
    let run = cluster.command("uninstall").stdout(Stdio::null()).spawn().unwrap();
    until("a Job", || !cluster.api.objects().jobs.is_empty());
    end(run, Signal::SIGKILL);
    assert_eq!(cluster.label("a"), Value::Null);
    cluster.jobs_end("a", 75, "pod: default/web");
    for job in cluster.api.objects().jobs.values_mut() {
        job["seen"] = 1.into();
    }
    let run = cluster.command("uninstall").stdout(Stdio::null()).spawn().unwrap();
    until("the label", || cluster.label("a") == "true");
    end(run, Signal::SIGTERM);
    // A rollback to the installation.
    cluster.api.objects().config["data"]["revision"] = REVISION.into();
    cluster.jobs_end("a", 0, "");
    cluster.ends("install", 0);
    assert_eq!(
        (cluster.label("a"), cluster.record("a")["result"].clone()),
        (json!("true"), json!("installed"))
    );
}

#[test]
fn helm_uninstall_refuses_while_pods_need_the_sandboxer() {
    let cluster = Cluster::new(&["a", "b"]);
    cluster.ends("install", 0);
    let _ = cluster.journal();
    cluster.api.objects().pods.insert("web".to_owned(), "b".to_owned());
    let said = cluster.hook(3);
    assert!(
        said.contains("nothing is changed: pods on b need the sandboxer: default/web"),
        "{said}"
    );
    assert_eq!(cluster.journal(), [""; 0]);
    assert_eq!(cluster.record("a")["result"], "installed");
    // What only the node knows is found later.
    cluster.api.objects().pods.clear();
    cluster.jobs_end("b", 75, "default: runc-pause is the default handler");
    let said = cluster.hook(3);
    assert!(said.contains("b: waiting: default: runc-pause"), "{said}");
    assert_eq!((cluster.record("a"), cluster.label("b")), (Value::Null, json!("true")));
    // A run that installs would bring it back.
    cluster.ends("install", 0);
    assert_eq!(cluster.record("a"), Value::Null);
    cluster.jobs_end("b", 0, "");
    cluster.hook(0);
    assert_eq!((cluster.record("b"), cluster.label("b")), (Value::Null, Value::Null));
    assert!(cluster.api.objects().jobs.values().all(|job| job.get("status").is_some()));
}

/// The node has no annotation yet.
#[test]
fn a_removal_includes_a_node_whose_installation_has_not_ended() {
    let cluster = Cluster::new(&["a", "b"]);
    cluster.jobs_end("a", None, "");
    let run = cluster.command("install").stdout(Stdio::null()).spawn().unwrap();
    until("a Job", || !cluster.api.objects().jobs.is_empty());
    end(run, Signal::SIGKILL);
    cluster.jobs_end("a", 0, "");
    for job in cluster.api.objects().jobs.values_mut() {
        job["seen"] = 0.into();
    }
    cluster.hook(0);
    let journal = cluster.journal();
    assert_eq!(journal[..2], ["install a", "config \"one-removal\""], "{journal:?}");
    assert!(journal.contains(&"uninstall a".to_owned()), "{journal:?}");
    assert_eq!((cluster.label("a"), cluster.record("a")), (Value::Null, Value::Null));
}

/// kubelet removes the sandbox of a deleted pod later than the pod.
#[test]
fn helm_uninstall_waits_for_what_is_left_of_a_deleted_pod() {
    let cluster = Cluster::new(&["a"]);
    cluster.ends("install", 0);
    cluster.jobs_end("a", 75, "pod: default/web");
    let mut run = cluster.command("uninstall");
    run.env("REFUSE", "true").env("PATIENCE", "300").stdout(Stdio::piped());
    let run = run.spawn().unwrap();
    until("a waits", || cluster.record("a")["result"] == "waiting");
    cluster.jobs_end("a", 0, "");
    let said = said(run.wait_with_output().unwrap(), 0);
    assert!(said.contains("a: waiting: pod: default/web"), "{said}");
    assert_eq!((cluster.label("a"), cluster.record("a")), (Value::Null, Value::Null));
}

#[test]
fn a_removal_that_fails_on_a_node_names_it() {
    let cluster = Cluster::new(&["a", "b"]);
    cluster.ends("install", 0);
    cluster.removes();
    cluster.jobs_end("a", 1, "cannot remove the handler");
    let said = cluster.ends("uninstall", 3);
    assert!(said.contains("a: failed: cannot remove the handler"), "{said}");
    assert!(said.contains("still have the sandboxer"), "{said}");
    assert_eq!(cluster.record("b"), Value::Null);
}
