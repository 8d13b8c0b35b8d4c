//! What no pod on a node without SELinux shows. The specs of all others are compared with those of
//! containerd's built-in controller (`tests/parity`).

use protobuf::Message as _;
use serde_json::Value;

use super::*;
use crate::pause::Plan;
use kit::controller::{CONFIG_TYPE, any};

const ID: &str = "4c1e5bd5f4b3c6b3f6a14a4c8d7e9f00112233445566778899aabbccddeeff00";

fn description(record: &Record, config: &Config) -> Result<Description, String> {
    let pod = record.decode_config().map_err(|e| e.to_string())?;
    let layout = Arc::new(Layout::new(config));
    describe(record, &pod, &layout, config).map_err(|e| e.to_string())
}

fn record(pod: &PodSandboxConfig) -> Record {
    Record {
        config: any(CONFIG_TYPE, pod.write_to_bytes().unwrap()),
        ..Record::of_plan(Plan::new(ID.try_into().unwrap()))
    }
}

#[test]
fn selinux_labels() {
    let label = "system_u:system_r:container_t:s0:c1,c2";
    let mut labelled = record(&PodSandboxConfig::default());
    labelled.plan.selinux_label = label.to_owned();
    labelled.labels.mount = "system_u:object_r:container_file_t:s0:c1,c2".to_owned();
    let spec = description(&labelled, &Config::default()).unwrap().spec;
    let spec: Value = serde_json::from_slice(&spec).unwrap();
    assert_eq!(spec["process"]["selinuxLabel"], label);
    assert_eq!(spec["linux"]["mountLabel"], labelled.labels.mount);
}

#[test]
fn paths_of_cgroups() {
    let path = |parent: &str| {
        let mut plan = Plan::new(ID.try_into().unwrap());
        plan.cgroup_parent = parent.to_owned();
        cgroups_path(&plan)
    };
    let auto = |parent: &str| path(parent).unwrap();
    assert_eq!(path(""), None);
    assert_eq!(auto("/kubepods/besteffort/pod1"), format!("/kubepods/besteffort/pod1/{ID}"));
    assert_eq!(auto("/a//b/"), format!("/a/b/{ID}"));
    assert_eq!(auto("a/b"), format!("a/b/{ID}"));
    assert_eq!(auto("/"), format!("/{ID}"));
    assert_eq!(auto("/a.slice/a-b.slice/"), format!("/a.slice/a-b.slice/{ID}"));
    assert_eq!(auto("a-b.slice"), format!("a-b.slice:cri-containerd:{ID}"));
    assert_eq!(auto("/a.slice/b"), format!("/a.slice/b/{ID}"));
}

/// Promise: pods_equal_the_builtins.
#[test]
fn labels_are_those_of_the_pod_and_the_kind() {
    let mut pod = PodSandboxConfig::default();
    pod.labels.insert("app".to_owned(), "web".to_owned());
    pod.labels.insert("io.cri-containerd.kind".to_owned(), "container".to_owned());
    let labels = description(&record(&pod), &Config::default()).unwrap().labels;
    let expected = [("app", "web"), ("io.cri-containerd.kind", "sandbox")];
    assert_eq!(labels, expected.map(|(key, value)| (key.to_owned(), value.to_owned())).into());
}

#[test]
fn a_config_that_cannot_be_decoded_is_named() {
    let mut record = record(&PodSandboxConfig::default());
    record.config.value = vec![0xff; 3];
    let error = description(&record, &Config::default()).unwrap_err();
    assert!(error.contains("options: is not a runtime.v1.PodSandboxConfig"), "{error}");
}
