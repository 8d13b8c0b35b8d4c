//! Verbose information, against the JSON that containerd's `SandboxInfo` has.

use std::time::SystemTime;

use containerd_shim_protos::shim::oci::Options;
use protobuf::well_known_types::any::Any;
use protobuf::{EnumOrUnknown, Message as _, MessageField};
use serde_json::json;

use super::*;
use crate::pause::Plan;
use crate::podsandbox::SandboxInfo;
use crate::process::Exit;
use crate::protos::cri::{
    HugepageLimit, Int64Value, LinuxContainerResources, LinuxPodSandboxConfig,
    LinuxSandboxSecurityContext, NamespaceOption, PodSandboxConfig, PodSandboxMetadata,
    PortMapping,
};

const ID: &str = "4c1e5bd5f4b3c6b3f6a14a4c8d7e9f00112233445566778899aabbccddeeff00";

/// The extension that CRI writes before Create.
fn metadata() -> Value {
    json!({"Version": "v1", "Metadata": {
        "ID": ID,
        "Config": {
            "metadata": {"name": "web", "uid": "8a5d0f2e", "namespace": "shop", "attempt": 1},
            "field_of_a_later_cri": {"kept": true},
        },
        "CNIResult": {"Interfaces": {"eth0": {"IPConfigs": [{"IP": "10.88.0.5"}]}}},
    }})
}

fn pod() -> PodSandboxConfig {
    PodSandboxConfig {
        metadata: MessageField::some(PodSandboxMetadata {
            name: "web".to_owned(),
            uid: "8a5d0f2e".to_owned(),
            namespace: "shop".to_owned(),
            ..Default::default()
        }),
        ..Default::default()
    }
}

fn blob(type_url: &str, value: impl Into<Vec<u8>>) -> Any {
    Any { type_url: type_url.to_owned(), value: value.into(), ..Default::default() }
}

fn record(pod: &PodSandboxConfig) -> Record {
    let options = Options {
        binary_name: "/usr/sbin/runc".to_owned(),
        systemd_cgroup: true,
        ..Default::default()
    };
    let plan =
        Plan { netns: Some("/proc/self/ns/net".into()), ..Plan::new(ID.try_into().unwrap()) };
    Record {
        config: blob("runtime.v1.PodSandboxConfig", pod.write_to_bytes().unwrap()),
        netns_path: "/proc/self/ns/net".to_owned(),
        info: SandboxInfo {
            runtime_name: "io.containerd.runc.v2".to_owned(),
            runtime_options: Some(blob(
                "containerd.runc.v1.Options",
                options.write_to_bytes().unwrap(),
            )),
            labels: BTreeMap::new(),
            extensions: [("metadata".to_owned(), blob("m", metadata().to_string()))].into(),
        },
        ..Record::of_plan(plan)
    }
}

fn ready() -> Published {
    Published { phase: Phase::Ready, pid: 4711, exit: None, failures: 0 }
}

fn shown(record: &Record, published: &Published) -> Value {
    let config = Config::default();
    let info = info(record, published, &Arc::new(Layout::new(&config)), &config).unwrap();
    assert_eq!(info.keys().collect::<Vec<_>>(), ["info"]);
    serde_json::from_str(&info["info"]).unwrap()
}

#[test]
fn the_config_keeps_a_field_of_a_later_cri() {
    let info = shown(&record(&pod()), &ready());
    assert_eq!(info["config"], metadata()["Metadata"]["Config"]);
}

#[test]
fn a_sandbox_that_has_ended() {
    let mut record = record(&pod());
    let gone = std::env::temp_dir().join("pause-sandboxer-no-such-netns");
    record.plan.netns = Some(gone);
    let exit = Exit { status: 137, at: SystemTime::now() };
    let info = shown(
        &record,
        &Published { phase: Phase::NotReady, pid: 4711, exit: Some(exit), failures: 0 },
    );
    assert_eq!(info["pid"], 0);
    assert_eq!(info["processStatus"], "deleted");
    assert_eq!(info["netNamespaceClosed"], true);

    record.plan.netns = None;
    let info =
        shown(&record, &Published { phase: Phase::Created, pid: 0, exit: None, failures: 0 });
    assert_eq!(info["processStatus"], "created");
    assert_eq!(info["netNamespaceClosed"], false);
}

#[test]
fn malformed_fields_are_null() {
    let well_formed = metadata().to_string();
    for odd in [
        "",
        "{}",
        "null",
        "[1]",
        "{\"Version\":\"v1\"}",
        "{\"Version\":1,\"Metadata\":{}}",
        "\u{0}",
        "{\"a\":",
    ]
    .into_iter()
    .map(str::to_owned)
    .chain([
        well_formed.replace("\"v1\"", "\"v2\""),
        json!({"Version": "v1", "Metadata": {"Config": "text"}}).to_string(),
        json!({"Version": "v1", "Metadata": {"CNIResult": 1}}).to_string(),
    ]) {
        let mut record = record(&pod());
        record.info.extensions.insert("metadata".to_owned(), blob("m", odd.clone()));
        record.info.extensions.insert("updated-resources".to_owned(), blob("u", "[]"));
        record.info.runtime_options = Some(blob("containerd.runc.v1.Options", [0xff]));
        let info = shown(&record, &ready());
        for null in ["sandboxMetadata", "cniResult", "runtimeOptions"] {
            assert_eq!(info[null], Value::Null, "{odd:?} {null}");
        }
        // The config is there all the same, from Create's options.
        assert_eq!(
            info["config"],
            json!({"metadata": {"name": "web", "uid": "8a5d0f2e", "namespace": "shop"}})
        );
        assert_eq!(info.get("resources"), None);
    }

    let mut record = record(&pod());
    record.info.extensions.clear();
    record.config.value = vec![0xff];
    let info = shown(&record, &ready());
    assert_eq!((&info["config"], &info["runtimeSpec"]), (&Value::Null, &Value::Null));
    assert_eq!(info["runtimeOptions"]["systemd_cgroup"], true);
}

#[test]
fn runtime_options_of_every_kind() {
    let decode = |type_url: &str, value: &[u8]| runtime_options::decode(&blob(type_url, value));
    assert_eq!(decode("containerd.runc.v1.Options", &[]), Ok(None));
    // type_url = 1, config_path = 2, config_body = 3
    let generic = b"\x0a\x03a.b\x12\x02/c\x1a\x02\xff\x00";
    let expected = json!({"type_url": "a.b", "config_path": "/c", "config_body": "/wA="});
    assert_eq!(decode("types.example/runtimeoptions.v1.Options", generic), Ok(Some(expected)));
    assert!(decode("runtimeoptions.v1.Options", &[0x0a, 9]).is_err());
    assert_eq!(decode("some.Options", &[1]), Err("unknown type \"some.Options\"".to_owned()));
}

/// Numbers at their limits, an enum of a later version, and messages that are sent though all of
/// them is zero. `tests/parity` compares the configs of pods.
#[test]
fn the_config_has_the_form_that_go_gives_it() {
    let config = PodSandboxConfig {
        port_mappings: vec![PortMapping { host_port: -1, ..Default::default() }],
        labels: [("app".to_owned(), "<web>".to_owned()), ("empty".to_owned(), String::new())]
            .into(),
        linux: MessageField::some(LinuxPodSandboxConfig {
            security_context: MessageField::some(LinuxSandboxSecurityContext {
                namespace_options: MessageField::some(NamespaceOption {
                    pid: EnumOrUnknown::from_i32(77),
                    ..Default::default()
                }),
                run_as_user: MessageField::some(Int64Value::default()),
                supplemental_groups: vec![0, 7],
                ..Default::default()
            }),
            resources: MessageField::some(LinuxContainerResources {
                memory_limit_in_bytes: i64::MAX,
                hugepage_limits: vec![HugepageLimit { limit: u64::MAX, ..Default::default() }],
                ..Default::default()
            }),
            ..Default::default()
        }),
        ..Default::default()
    };
    let expected = json!({
        "port_mappings": [{"host_port": -1}],
        "labels": {"app": "<web>", "empty": ""},
        "linux": {
            "security_context": {
                "namespace_options": {"pid": 77},
                "run_as_user": {},
                "supplemental_groups": [0, 7],
            },
            "resources": {
                "memory_limit_in_bytes": i64::MAX,
                "hugepage_limits": [{"limit": u64::MAX}],
            },
        },
    });
    let encoded = go_json::encode(&config);
    assert_eq!(encoded, expected, "{encoded:#}");
}
