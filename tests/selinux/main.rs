//! The labels of pods under a kernel with SELinux: beside the built-in controller's, and enforced.
//!
//! For a node that may be messed up: it loads the policy beside it, `policy.bin` in the working
//! directory, and enforces it. `tests/selinux/run-in-vm` runs it on the machine of `tests/vm`.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Once};

use kit::cri::api::SELinuxOption;
use kit::{Container, ContainerSpec, Node, Pod, PodSpec, grpc};
use kit::{Handler, Options};
use serde_json::Value;

const PROCESS: &str = "system_u:system_r:container_t";
const FILE: &str = "system_u:object_r:container_file_t";

/// Loads the policy and gives it its labels for containers, once.
fn policy() {
    static LOADED: Once = Once::new();
    LOADED.call_once(|| {
        fs::create_dir_all("/etc/selinux/few/contexts").unwrap();
        fs::write("/etc/selinux/config", "SELINUX=permissive\nSELINUXTYPE=few\n").unwrap();
        let labels = format!(
            "process = \"{PROCESS}:s0\"\nfile = \"{FILE}:s0\"\n\
             ro_file = \"system_u:object_r:container_ro_file_t:s0\"\n"
        );
        fs::write("/etc/selinux/few/contexts/lxc_contexts", labels).unwrap();
        fs::write("/sys/fs/selinux/load", fs::read("policy.bin").unwrap()).unwrap();
    });
}

fn enforce(on: bool) {
    fs::write("/sys/fs/selinux/enforce", if on { "1" } else { "0" }).unwrap();
}

async fn node(categories: u32) -> Arc<Node> {
    policy();
    let node = Node::start(Options {
        sandboxer: Some(PathBuf::from(env!("CARGO_BIN_EXE_pause-sandboxer"))),
        cri_config: "enable_selinux = true\n".to_owned(),
        sandboxer_config: format!("enable_selinux = true\nselinux_category_range = {categories}\n"),
        ..Options::default()
    });
    let node = node.await.unwrap();
    node.start_sandboxer().await.unwrap();
    // The first pod and the first container make directories that stay.
    let first = node.run(Handler::Ours, PodSpec::new("first")).await.unwrap();
    sleeping(&first, "first").await;
    first.remove().await.unwrap();
    node
}

fn options(user: &str, role: &str, kind: &str, level: &str) -> SELinuxOption {
    let [user, role, type_, level] = [user, role, kind, level].map(str::to_owned);
    SELinuxOption { user, role, type_, level, ..Default::default() }
}

fn with(spec: PodSpec, options: SELinuxOption) -> PodSpec {
    spec.with(|config| {
        let security =
            config.linux.mut_or_insert_default().security_context.mut_or_insert_default();
        security.selinux_options = Some(options).into();
    })
}

/// The label of a process.
fn label(pid: &str) -> String {
    let text = fs::read_to_string(format!("/proc/{pid}/attr/current")).unwrap();
    text.trim_end_matches(['\0', '\n', ' ']).to_owned()
}

/// The label of a file.
fn label_of(path: &Path) -> String {
    let output = Command::new("stat").args(["-c", "%C"]).arg(path).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// The two categories of a label's level.
fn level(label: &str) -> &str {
    label.splitn(4, ':').nth(3).unwrap()
}

async fn inside(container: &Container) -> String {
    let text = container.sh("cat /proc/self/attr/current").await.unwrap();
    text.trim_end_matches(['\0', '\n', ' ']).to_owned()
}

async fn sleeping(pod: &Pod, name: &str) -> Container {
    pod.run(ContainerSpec::sleeping(name)).await.unwrap()
}

/// The visible labels of a pod, with its own level written as `LEVEL`; its second container
/// is privileged, if the pod is.
async fn seen(node: &Arc<Node>, handler: Handler, spec: PodSpec) -> Vec<(&'static str, String)> {
    let pod = node.run(handler, spec).await.unwrap();
    let shm = node.layout().sandbox_shm(pod.id());
    let security = pod.config().linux.security_context.clone();
    let second = ContainerSpec::sleeping("other");
    let second = if security.privileged { second.privileged() } else { second };
    let (one, other) = (sleeping(&pod, "one").await, pod.run(second).await.unwrap());
    let first = inside(&one).await;
    let mut facts = vec![
        ("pause", label(&pod.pause_pid().await.unwrap().to_string())),
        ("container", first.clone()),
        ("second container", inside(&other).await),
    ];
    let info = pod.info().await.unwrap();
    let output = |pointer: &str| {
        info.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned()
    };
    facts.push(("spec: process", output("/runtimeSpec/process/selinuxLabel")));
    facts.push(("spec: mounts", output("/runtimeSpec/linux/mountLabel")));
    if shm.exists() {
        one.sh("echo shared >/dev/shm/file").await.unwrap();
        assert_eq!(other.sh("cat /dev/shm/file").await.unwrap(), "shared\n");
        facts.push(("shared memory", label_of(&shm)));
        facts.push(("file in shared memory", label_of(&shm.join("file"))));
    }
    for file in ["hosts", "hostname", "resolv.conf"] {
        facts.push((file, label_of(&node.layout().sandbox_files(pod.id()).join(file))));
    }
    pod.remove().await.unwrap();
    let own = level(&first).to_owned();
    facts.into_iter().map(|(fact, label)| (fact, label.replace(&own, "LEVEL"))).collect()
}

/// Promise: selinux_labels_equal_the_builtins.
#[tokio::test]
async fn the_labels_are_those_of_the_builtin() {
    let node = node(1024).await;
    let specs = [
        ("plain", PodSpec::new("plain")),
        ("type given", with(PodSpec::new("type"), options("", "", "other_t", ""))),
        (
            "all given",
            with(PodSpec::new("all"), options("other_u", "other_r", "other_t", "s0:c1.c3,c5")),
        ),
        (
            "privileged",
            PodSpec::new("privileged").with(|config| {
                config
                    .linux
                    .mut_or_insert_default()
                    .security_context
                    .mut_or_insert_default()
                    .privileged = true;
            }),
        ),
    ];
    for (name, spec) in specs {
        let theirs = seen(&node, Handler::Builtin, spec.clone()).await;
        let ours = seen(&node, Handler::Ours, spec).await;
        println!("{name}: {ours:#?}");
        assert_eq!(ours, theirs, "{name}: ours beside the built-in's");
        assert!(
            ours.iter().any(|(fact, label)| *fact == "container" && label.ends_with(":LEVEL")),
            "{name}: {ours:?}"
        );
    }
}

/// Promise: selinux_labels_equal_the_builtins.
#[tokio::test]
async fn every_pod_has_a_level_and_keeps_it_over_a_restart() {
    // Three categories are three levels.
    let node = node(3).await;
    let before = node.snapshot().unwrap();
    let mut pods = Vec::new();
    for name in ["one", "two", "three"] {
        let pod = node.run(Handler::Ours, PodSpec::new(name)).await.unwrap();
        // The shared memory has its label before anybody mounts it.
        let shm = label_of(&node.layout().sandbox_shm(pod.id()));
        let pause = label(&pod.pause_pid().await.unwrap().to_string());
        assert_eq!(level(&shm), level(&pause));
        assert!(shm.starts_with(FILE), "{shm}");
        pods.push((pod, pause));
    }
    let levels: HashSet<&str> = pods.iter().map(|(_, label)| level(label)).collect();
    assert_eq!(levels, HashSet::from(["s0:c0,c1", "s0:c0,c2", "s0:c1,c2"]));
    for again in [false, true] {
        let error = node.run(Handler::Ours, PodSpec::new("four")).await.unwrap_err();
        let status: &grpc::Status = error.downcast_ref().unwrap();
        assert!(status.message.contains("all 3 levels of 3 categories are taken"), "{status:?}");
        if !again {
            node.stop_sandboxer().await.unwrap();
            node.start_sandboxer().await.unwrap();
        }
    }
    for (pod, pause) in &pods {
        assert_eq!(inside(&sleeping(pod, "later").await).await, *pause);
    }
    let (gone, freed) = pods.remove(1);
    gone.remove().await.unwrap();
    let four = node.run(Handler::Ours, PodSpec::new("four")).await.unwrap();
    assert_eq!(label(&four.pause_pid().await.unwrap().to_string()), freed);
    four.remove().await.unwrap();
    for (pod, _) in pods {
        pod.remove().await.unwrap();
    }
    node.settles_to(&before).await.unwrap();
}

#[tokio::test]
async fn an_enforced_policy_lets_pods_run_and_refuses_what_it_has_not() {
    let node = node(1024).await;
    let before = node.snapshot().unwrap();
    enforce(true);
    let pod = node.run(Handler::Ours, PodSpec::new("enforced")).await;
    let refused = node
        .run(Handler::Ours, with(PodSpec::new("locked"), options("", "", "locked_t", "")))
        .await;
    let unknown = node
        .run(Handler::Ours, with(PodSpec::new("unknown"), options("", "", "nobodys_t", "")))
        .await;
    let pod = pod.unwrap();
    let pause = label(&pod.pause_pid().await.unwrap().to_string());
    assert!(pause.starts_with(PROCESS), "{pause}");
    assert_eq!(inside(&sleeping(&pod, "one").await).await, pause);
    pod.remove().await.unwrap();
    enforce(false);
    for (failed, step) in
        [(refused, "execute the pause program"), (unknown, "set the SELinux label")]
    {
        let error = failed.unwrap_err();
        let status: &grpc::Status = error.downcast_ref().unwrap();
        assert!(status.message.contains(step), "{status:?}");
    }
    node.settles_to(&before).await.unwrap();
}
