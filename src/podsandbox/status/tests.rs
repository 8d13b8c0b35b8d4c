//! Verbose information, against the JSON that containerd's `SandboxInfo` has.

use std::time::SystemTime;

use containerd_shim_protos::shim::oci::Options;
use protobuf::well_known_types::any::Any;
use protobuf::{EnumOrUnknown, Message as _, MessageField};
use serde_json::json;

use super::*;
use crate::pause::Plan;
use crate::podsandbox::SandboxInfo;
use crate::podsandbox::files::Files;
use crate::process::Exit;
use crate::protos::cri::security_profile::ProfileType;
use crate::protos::cri::{
    DNSConfig, HugepageLimit, IDMapping, Int64Value, LinuxContainerResources,
    LinuxPodSandboxConfig, LinuxSandboxSecurityContext, NamespaceMode, NamespaceOption,
    PodSandboxConfig, PodSandboxMetadata, PortMapping, Protocol, SecurityProfile, UserNamespace,
};

const ID: &str = "4c1e5bd5f4b3c6b3f6a14a4c8d7e9f00112233445566778899aabbccddeeff00";

/// The extension that CRI writes before Create, with the result of the bridge plugin.
fn metadata() -> Value {
    json!({"Version": "v1", "Metadata": {
        "ID": ID,
        "Name": "web_shop_8a5d0f2e_1",
        "Config": {
            "metadata": {"name": "web", "uid": "8a5d0f2e", "namespace": "shop", "attempt": 1},
            "hostname": "web",
            "field_of_a_later_cri": {"kept": true},
            "linux": {"security_context": {"namespace_options": {"pid": 1}}},
        },
        "NetNSPath": "/var/run/netns/cni-1",
        "IP": "10.88.0.5",
        "AdditionalIPs": null,
        "RuntimeHandler": "pause",
        "CNIResult": {
            "Interfaces": {"eth0": {
                "IPConfigs": [{"IP": "10.88.0.5", "Gateway": "10.88.0.1"}],
                "Mac": "c2:11:22:33:44:55", "Sandbox": "/var/run/netns/cni-1",
                "PciID": "", "SocketPath": "",
            }},
            "DNS": [{}], "Routes": [{"dst": "0.0.0.0/0"}],
        },
        "ProcessLabel": "",
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
    let plan = Plan {
        netns: Some("/proc/self/ns/net".into()),
        hostname: "web".to_owned(),
        ..Plan::new(ID.try_into().unwrap())
    };
    Record {
        files: Files {
            hostname: "web".to_owned(),
            dns: None,
            shm: true,
            shm_size: crate::config::Size::SHM,
        },
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
fn a_running_sandbox() {
    let mut info = shown(&record(&pod()), &ready());
    let spec = info["runtimeSpec"].take();
    assert_eq!(spec["annotations"]["io.kubernetes.cri.sandbox-id"], ID);
    let expected = json!({
        "pid": 4711,
        "processStatus": "running",
        "netNamespaceClosed": false,
        "image": "",
        "snapshotKey": "",
        "snapshotter": "",
        "runtimeType": "io.containerd.runc.v2",
        "runtimeOptions": {"binary_name": "/usr/sbin/runc", "systemd_cgroup": true},
        "config": metadata()["Metadata"]["Config"],
        "runtimeSpec": null,
        "cniResult": metadata()["Metadata"]["CNIResult"],
        "sandboxMetadata": metadata(),
    });
    assert_eq!(info, expected, "{info:#}");
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
fn updated_resources_are_shown() {
    let mut record = record(&pod());
    let updated = json!({
        "Overhead": null,
        "Resources": {"cpu_shares": 512, "memory_limit_in_bytes": 268_435_456},
    });
    record.info.extensions.insert("updated-resources".to_owned(), blob("u", updated.to_string()));
    let info = shown(&record, &ready());
    assert_eq!(info["resources"], json!({"linux": updated["Resources"]}));
    assert_eq!(info.get("overhead"), None);
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

/// A config with fields of every kind.
fn full_config() -> PodSandboxConfig {
    let profile = SecurityProfile {
        profile_type: EnumOrUnknown::new(ProfileType::Localhost),
        localhost_ref: "p.json".to_owned(),
        ..Default::default()
    };
    let map = |host_id| IDMapping { host_id, length: 65536, ..Default::default() };
    PodSandboxConfig {
        dns_config: MessageField::some(DNSConfig {
            servers: vec!["10.0.0.10".to_owned()],
            ..Default::default()
        }),
        port_mappings: vec![PortMapping {
            protocol: EnumOrUnknown::new(Protocol::UDP),
            container_port: 53,
            host_port: -1,
            ..Default::default()
        }],
        labels: [("app".to_owned(), "<web>".to_owned()), ("empty".to_owned(), String::new())]
            .into(),
        linux: MessageField::some(LinuxPodSandboxConfig {
            security_context: MessageField::some(LinuxSandboxSecurityContext {
                namespace_options: MessageField::some(NamespaceOption {
                    network: EnumOrUnknown::new(NamespaceMode::NODE),
                    pid: EnumOrUnknown::from_i32(77),
                    userns_options: MessageField::some(UserNamespace {
                        uids: vec![map(100_000)],
                        gids: vec![map(200_000)],
                        ..Default::default()
                    }),
                    ..Default::default()
                }),
                // Sent, though all of it is zero: root.
                run_as_user: MessageField::some(Int64Value::default()),
                supplemental_groups: vec![0, 7],
                privileged: true,
                seccomp: MessageField::some(profile),
                ..Default::default()
            }),
            sysctls: [("net.ipv4.ip_forward".to_owned(), "1".to_owned())].into(),
            overhead: MessageField::some(LinuxContainerResources::default()),
            resources: MessageField::some(LinuxContainerResources {
                cpu_quota: -1,
                memory_limit_in_bytes: i64::MAX,
                hugepage_limits: vec![HugepageLimit {
                    page_size: "2MB".to_owned(),
                    limit: u64::MAX,
                    ..Default::default()
                }],
                ..Default::default()
            }),
            ..Default::default()
        }),
        ..Default::default()
    }
}

#[test]
fn the_config_has_the_form_that_go_gives_it() {
    let expected = json!({
        "dns_config": {"servers": ["10.0.0.10"]},
        "port_mappings": [{"protocol": 1, "container_port": 53, "host_port": -1}],
        "labels": {"app": "<web>", "empty": ""},
        "linux": {
            "security_context": {
                "namespace_options": {
                    "network": 2,
                    "pid": 77,
                    "userns_options": {
                        "uids": [{"host_id": 100_000, "length": 65536}],
                        "gids": [{"host_id": 200_000, "length": 65536}],
                    },
                },
                "run_as_user": {},
                "supplemental_groups": [0, 7],
                "privileged": true,
                "seccomp": {"profile_type": 2, "localhost_ref": "p.json"},
            },
            "sysctls": {"net.ipv4.ip_forward": "1"},
            "overhead": {},
            "resources": {
                "cpu_quota": -1,
                "memory_limit_in_bytes": i64::MAX,
                "hugepage_limits": [{"page_size": "2MB", "limit": u64::MAX}],
            },
        },
    });
    let encoded = go_json::encode(&full_config());
    assert_eq!(encoded, expected, "{encoded:#}");
}
