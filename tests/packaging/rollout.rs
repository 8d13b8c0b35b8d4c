//! The script that installs and removes the sandboxer on the nodes of a cluster, with an API server
//! of the test.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use serde_json::{Value, json};

use super::kubernetes::DIR;

mod api;
mod removal;
mod untrusted;

use api::Api;

const REVISION: &str = "one";
const ANNOTATION: &str = "pause-sandboxer/installer";

struct Cluster {
    api: Api,
    dir: tempfile::TempDir,
}

impl Cluster {
    fn new(nodes: &[&str]) -> Self {
        let cluster = Self { api: Api::new(), dir: tempfile::tempdir().unwrap() };
        fs::write(cluster.dir.path().join("token"), "secret").unwrap();
        fs::create_dir(cluster.dir.path().join("bin")).unwrap();
        let curl = "#!/bin/sh\necho \"$*\" >>\"$ARGUMENTS\"\nPATH=${PATH#*:} exec curl \"$@\"\n";
        kit::write_program(cluster.dir.path().join("bin/curl"), curl.as_bytes()).unwrap();
        let mut objects = cluster.api.objects();
        for name in nodes {
            objects.nodes.insert((*name).to_owned(), node(name));
        }
        let job = json!({ "metadata": { "labels": {} }, "spec": { "template": { "spec": {
            "containers": [{}] } } } });
        objects.config = json!({ "data": { "revision": REVISION, "job": job.to_string() } });
        drop(objects);
        cluster
    }

    fn arguments(&self) -> PathBuf {
        self.dir.path().join("arguments")
    }

    fn command(&self, word: &str) -> Command {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join(DIR);
        let mut command = Command::new("timeout");
        let path = std::env::var("PATH").unwrap();
        let removal = if word == "uninstall" { "-removal" } else { "" };
        command
            .args(["300".as_ref(), dir.join("rollout.sh").as_os_str(), word.as_ref()])
            .env("PATH", format!("{}:{path}", self.dir.path().join("bin").display()))
            .env("ARGUMENTS", self.arguments())
            .env("ACCOUNT", self.dir.path())
            .env("TMPDIR", self.dir.path())
            .env("PLAN", dir.join("plan.jq"))
            .env("API", &self.api.address)
            .env("KUBERNETES_SERVICE_HOST", "api")
            .env("RELEASE", "release")
            .env("NAMESPACE", "system")
            .env("REVISION", format!("{REVISION}{removal}"))
            .env("NODES", "os=linux")
            .env("LABEL", "label/ready")
            .env("CLASS", "class")
            .env("PARALLEL", "2")
            .env("MAX_FAILURES", "1")
            .env("EVERY", "0.05")
            .env("WAIT", "1")
            .env("PATIENCE", "1")
            .stdin(Stdio::null());
        command
    }

    fn run(&self, word: &str) -> Output {
        self.command(word).output().unwrap()
    }

    /// A run that must have this exit status; returns its output.
    fn ends(&self, word: &str, status: i32) -> String {
        said(self.run(word), status)
    }

    /// The removal of `helm uninstall`.
    fn hook(&self, status: i32) -> String {
        // It counts the results of its own time, in seconds.
        std::thread::sleep(Duration::from_millis(1100));
        let mut command = self.command("uninstall");
        said(command.env("REFUSE", "true").env("RETRY", "true").output().unwrap(), status)
    }

    /// What was done since the last call.
    fn journal(&self) -> Vec<String> {
        std::mem::take(&mut self.api.objects().journal)
    }

    fn label(&self, node: &str) -> Value {
        self.api.objects().nodes[node]["metadata"]["labels"]["label/ready"].clone()
    }

    /// What the script has written down about a node.
    fn record(&self, node: &str) -> Value {
        let text = self.api.objects().nodes[node]["metadata"]["annotations"][ANNOTATION].clone();
        text.as_str().map_or(Value::Null, |text| serde_json::from_str(text).unwrap())
    }

    fn jobs_end(&self, node: &str, code: impl Into<Option<i64>>, message: &str) {
        let outcome = (code.into(), message.to_owned());
        self.api.objects().outcomes.insert(node.to_owned(), outcome);
    }

    /// The removal begins with the revision of the chart's values.
    fn removes(&self) {
        self.api.objects().config["data"]["revision"] = format!("{REVISION}-removal").into();
    }
}

fn said(output: Output, status: i32) -> String {
    let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    assert_eq!(output.status.code(), Some(status), "{said}");
    said
}

fn node(name: &str) -> Value {
    json!({
        "metadata": { "name": name, "uid": format!("uid-{name}"), "labels": {}, "annotations": {} },
        "status": {
            "nodeInfo": { "bootID": "first" },
            "conditions": [{ "type": "Ready", "status": "True" }],
        },
    })
}

/// Waits until it holds.
fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < Duration::from_secs(240), "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Ends a run with this signal: `timeout` is the leader of a process group.
fn end(mut run: Child, signal: Signal) {
    killpg(Pid::from_raw(run.id().try_into().unwrap()), signal).unwrap();
    let _ = run.wait().unwrap();
}

/// Promise: rollout_stops_at_failures.
#[test]
fn every_node_is_changed_and_at_most_so_many_at_once() {
    let cluster = Cluster::new(&["a", "b", "c", "d", "e"]);
    let said = cluster.ends("install", 0);
    assert!(said.contains("5 nodes: 5 done"), "{said}");
    for name in ["a", "b", "c", "d", "e"] {
        assert_eq!(cluster.label(name), "true");
        assert_eq!(cluster.record(name)["result"], "installed");
    }
    let journal = cluster.journal();
    // The first node goes alone: a mistake in the values changes one node.
    assert_eq!(journal[..2], ["install a", "label a \"true\""], "{journal:?}");
    assert_eq!(journal.iter().filter(|line| line.starts_with("install ")).count(), 5);
    assert_eq!(cluster.api.objects().peak, 2);
    // Nothing stays of Jobs that have succeeded, and another run does nothing.
    assert!(cluster.api.objects().jobs.is_empty());
    cluster.ends("install", 0);
    assert_eq!(cluster.journal(), [""; 0]);
    // The token is on no command line: every user of the node reads these.
    let arguments = fs::read_to_string(cluster.arguments()).unwrap();
    assert!(arguments.contains("-H @-") && !arguments.contains("secret"), "{arguments}");
}

/// A result makes room for the next node: a rollout waits for Jobs only.
#[test]
fn after_a_result_the_next_node_is_changed_at_once() {
    let cluster = Cluster::new(&["a", "b", "c"]);
    let sleeps = cluster.dir.path().join("sleeps");
    let script = format!("#!/bin/sh\necho >>{}\n", sleeps.display());
    kit::write_program(cluster.dir.path().join("bin/sleep"), script.as_bytes()).unwrap();
    cluster.ends("install", 0);
    assert_eq!(cluster.journal().len(), 6);
    // Of the first node, and of the two others, whose Jobs end at the second look.
    assert_eq!(fs::read_to_string(sleeps).unwrap().lines().count(), 4);
}

#[test]
fn a_job_is_bound_to_its_node_and_ends_with_it() {
    let cluster = Cluster::new(&["a"]);
    cluster.jobs_end("a", None, "");
    let run = cluster.command("install").stdout(Stdio::null()).spawn().unwrap();
    until("a Job", || !cluster.api.objects().jobs.is_empty());
    let (name, job) = cluster.api.objects().jobs.clone().pop_first().unwrap();
    end(run, Signal::SIGTERM);
    assert!(name.starts_with("release-"), "{name}");
    let owner = json!([{ "apiVersion": "v1", "kind": "Node", "name": "a", "uid": "uid-a" }]);
    assert_eq!(job["metadata"]["ownerReferences"], owner);
    let spec = &job["spec"]["template"]["spec"];
    assert_eq!(spec["containers"][0]["args"], json!(["install"]));
    let term = spec
        .pointer("/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution")
        .unwrap();
    let field = json!({ "key": "metadata.name", "operator": "In", "values": ["a"] });
    assert_eq!(term["nodeSelectorTerms"], json!([{ "matchFields": [field] }]));
}

/// Promise: rollout_stops_at_failures.
#[test]
fn a_node_that_fails_is_passed_over_and_one_more_stops_the_rollout() {
    let cluster = Cluster::new(&["a", "b", "c", "d", "e"]);
    cluster.jobs_end("b", 1, "containerd 1.6 is too old");
    let said = cluster.ends("install", 0);
    assert!(said.contains("b: failed: containerd 1.6 is too old"), "{said}");
    assert!(said.contains("5 nodes: 4 done, 1 failed"), "{said}");
    assert_eq!((cluster.label("b"), cluster.label("e")), (Value::Null, json!("true")));
    // A run for new nodes does not try it again; that of an upgrade does.
    let _ = cluster.journal();
    cluster.ends("install", 0);
    assert_eq!(cluster.journal(), [""; 0]);
    std::thread::sleep(Duration::from_millis(1100));
    let mut again = cluster.command("install");
    assert!(again.env("RETRY", "true").status().unwrap().success());
    assert_eq!(cluster.journal(), ["install b"]);

    let cluster = Cluster::new(&["a", "b", "c", "d", "e"]);
    cluster.jobs_end("a", 1, "reason of a");
    cluster.jobs_end("b", 1, "reason of b");
    let said = cluster.ends("install", 3);
    assert!(said.contains("reason of a") && said.contains("reason of b"), "{said}");
    assert_eq!(cluster.journal(), ["install a", "install b"], "{said}");
    // Also when the run is repeated.
    cluster.ends("install", 3);
    assert_eq!(cluster.journal(), [""; 0]);
}

#[test]
fn a_run_that_is_killed_is_continued_by_the_next() {
    let cluster = Cluster::new(&["a", "b"]);
    cluster.jobs_end("a", None, "");
    let run = cluster.command("install").stdout(Stdio::null()).spawn().unwrap();
    until("a Job", || !cluster.api.objects().jobs.is_empty());
    end(run, Signal::SIGKILL);
    // It ends while nothing runs.
    cluster.jobs_end("a", 1, "the reason");
    for job in cluster.api.objects().jobs.values_mut() {
        job["seen"] = 1.into();
    }
    let said = cluster.ends("install", 0);
    assert!(said.contains("a: failed: the reason"), "{said}");
    assert_eq!(cluster.journal(), ["install a", "install b", "label b \"true\""]);
}

#[test]
fn two_runs_at_once_change_each_node_once() {
    let nodes = ["a", "b", "c", "d", "e", "f"];
    let cluster = Cluster::new(&nodes);
    let runs: Vec<Child> =
        (0..3).map(|_| cluster.command("install").stdout(Stdio::null()).spawn().unwrap()).collect();
    for mut run in runs {
        assert!(run.wait().unwrap().success());
    }
    let journal = cluster.journal();
    for node in nodes {
        assert_eq!(cluster.label(node), "true");
        let job = format!("install {node}");
        assert_eq!(journal.iter().filter(|line| **line == job).count(), 1, "{journal:?}");
    }
}

#[test]
fn nodes_that_are_gone_or_not_ready_hold_up_no_other() {
    let cluster = Cluster::new(&["a", "b", "c"]);
    cluster.api.objects().nodes.get_mut("b").unwrap()["status"]["conditions"][0]["status"] =
        "Unknown".into();
    cluster.jobs_end("a", None, "");
    let run = cluster.command("install").stdout(Stdio::piped()).spawn().unwrap();
    until("a Job", || !cluster.api.objects().jobs.is_empty());
    // Kubernetes deletes the Job with its node.
    let mut objects = cluster.api.objects();
    objects.nodes.remove("a");
    objects.jobs.clear();
    drop(objects);
    let said = said(run.wait_with_output().unwrap(), 0);
    assert!(said.contains("b: not ready"), "{said}");
    assert_eq!(cluster.journal(), ["install a", "install c", "label c \"true\""]);
    // It comes back.
    cluster.api.objects().nodes.insert("b".to_owned(), node("b"));
    cluster.ends("install", 0);
    assert_eq!(cluster.journal(), ["install b", "label b \"true\""]);
}

#[test]
fn a_node_is_changed_again_after_a_boot_and_for_another_revision() {
    let cluster = Cluster::new(&["a"]);
    cluster.ends("install", 0);
    cluster.jobs_end("a", 1, "no");
    cluster.api.objects().nodes.get_mut("a").unwrap()["status"]["nodeInfo"]["bootID"] =
        "second".into();
    let _ = cluster.journal();
    cluster.ends("install", 0);
    assert_eq!(cluster.journal(), ["install a"]);
    // An update that fails leaves the old version, and with it the label.
    assert_eq!(cluster.label("a"), "true");
    // The Job that failed is there for its log, until another is needed.
    assert_eq!(cluster.api.objects().jobs.len(), 1);
    cluster.jobs_end("a", 0, "");
    cluster.api.objects().config["data"]["revision"] = "two".into();
    let mut next = cluster.command("install");
    assert!(next.env("REVISION", "two").status().unwrap().success());
    assert_eq!(cluster.journal(), ["install a", "label a \"true\""]);
    assert_eq!(cluster.record("a")["revision"], "two");
    // One of the earlier revision changes nothing back.
    let said = cluster.ends("install", 0);
    assert!(said.contains("revision two has replaced one"), "{said}");
    assert_eq!(cluster.journal(), [""; 0]);
}

/// A kubelet that restarts on a node without the label terminates the pods of the class.
#[test]
fn a_node_that_cannot_run_pods_loses_its_label_unless_it_has_pods() {
    for case in ["none", "there", "arrives"] {
        let cluster = Cluster::new(&["a"]);
        cluster.ends("install", 0);
        let mut objects = cluster.api.objects();
        match case {
            "there" => drop(objects.pods.insert("web".to_owned(), "a".to_owned())),
            "arrives" => objects.arrives = Some("web".to_owned()),
            _ => {}
        }
        objects.nodes.get_mut("a").unwrap()["status"]["nodeInfo"]["bootID"] = "second".into();
        drop(objects);
        cluster.jobs_end("a", 76, "check failed");
        let said = cluster.ends("install", 0);
        let (label, pod) = if case == "none" { ("false", false) } else { ("true", true) };
        assert_eq!(cluster.label("a"), label, "{case}: {said}");
        assert!(said.contains("a: failed: check failed"), "{said}");
        assert_eq!(said.contains("default/web"), pod, "{said}");
        assert_eq!(cluster.record("a")["result"], "failed");
    }
}

#[test]
fn a_node_with_the_package_or_of_another_release_stays_as_it_is() {
    let cluster = Cluster::new(&["a", "b"]);
    cluster.jobs_end("a", 77, "");
    let mut objects = cluster.api.objects();
    objects.nodes.get_mut("b").unwrap()["metadata"]["annotations"][ANNOTATION] =
        r#"{"release":"system/other","result":"installed"}"#.into();
    drop(objects);
    let said = cluster.ends("install", 0);
    assert!(said.contains("b: failed: belongs to release system/other"), "{said}");
    assert_eq!((cluster.label("a"), cluster.label("b")), (Value::Null, Value::Null));
    assert_eq!(cluster.journal(), ["install a"]);
    // An administrator has labelled the node with the package.
    cluster.api.objects().nodes.get_mut("a").unwrap()["metadata"]["labels"]["label/ready"] =
        "true".into();
    cluster.hook(0);
    assert_eq!(cluster.journal(), ["config \"one-removal\""]);
    assert_eq!((cluster.label("a"), cluster.record("a")), (json!("true"), Value::Null));
    assert_eq!(cluster.record("b")["release"], "system/other");
}
