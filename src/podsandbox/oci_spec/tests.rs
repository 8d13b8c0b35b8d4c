//! Specs of pods as kubelet makes them, against specs written by hand after containerd's built-in
//! controller.

use protobuf::{EnumOrUnknown, Message as _, MessageField};
use serde_json::{Value, json};

use super::*;
use crate::pause::{Plan, UserNamespace};
use crate::podsandbox::files::Files;
use crate::protos::cri::{
    LinuxContainerResources, LinuxPodSandboxConfig, LinuxSandboxSecurityContext, NamespaceMode,
    NamespaceOption, PodSandboxMetadata,
};
use kit::controller::{CONFIG_TYPE, any};

const ID: &str = "4c1e5bd5f4b3c6b3f6a14a4c8d7e9f00112233445566778899aabbccddeeff00";
const PARENT: &str = "/kubepods.slice/kubepods-burstable.slice/\
    kubepods-burstable-pod8a5d0f2e_7f3b_4a59_9a53_5f0b9b4f6a11.slice";
const CRI_ROOT: &str = "/var/lib/containerd/io.containerd.grpc.v1.cri";

/// The config that kubelet sends for a burstable pod of one container.
fn kubelet_pod() -> PodSandboxConfig {
    PodSandboxConfig {
        metadata: MessageField::some(PodSandboxMetadata {
            name: "web-6d4cf56db6-x7k2p".to_owned(),
            uid: "8a5d0f2e-7f3b-4a59-9a53-5f0b9b4f6a11".to_owned(),
            namespace: "shop".to_owned(),
            attempt: 1,
            ..Default::default()
        }),
        hostname: "web-6d4cf56db6-x7k2p".to_owned(),
        log_directory:
            "/var/log/pods/shop_web-6d4cf56db6-x7k2p_8a5d0f2e-7f3b-4a59-9a53-5f0b9b4f6a11"
                .to_owned(),
        linux: MessageField::some(LinuxPodSandboxConfig {
            cgroup_parent: PARENT.to_owned(),
            security_context: MessageField::some(LinuxSandboxSecurityContext {
                namespace_options: MessageField::some(NamespaceOption {
                    pid: EnumOrUnknown::new(NamespaceMode::CONTAINER),
                    ..Default::default()
                }),
                ..Default::default()
            }),
            resources: MessageField::some(LinuxContainerResources {
                cpu_period: 100_000,
                cpu_quota: -1,
                cpu_shares: 102,
                memory_limit_in_bytes: 134_217_728,
                ..Default::default()
            }),
            ..Default::default()
        }),
        ..Default::default()
    }
}

fn description(record: &Record, config: &Config) -> Result<Description, String> {
    let pod = record.decode_config().map_err(|e| e.to_string())?;
    let layout = Arc::new(Layout::new(config));
    describe(record, &pod, &layout, config).map_err(|e| e.to_string())
}

fn record(pod: &PodSandboxConfig) -> Record {
    let netns = "/var/run/netns/cni-0f5b2c3d-1111-2222-3333-444455556666";
    let plan = Plan {
        netns: Some(netns.into()),
        hostname: pod.hostname.clone(),
        cgroup_parent: pod.linux.cgroup_parent.rsplit('/').next().unwrap_or_default().to_owned(),
        ..Plan::new(ID.try_into().unwrap())
    };
    Record {
        files: Files {
            hostname: pod.hostname.clone(),
            dns: None,
            shm: true,
            shm_size: crate::config::Size::SHM,
        },
        config: any(CONFIG_TYPE, pod.write_to_bytes().unwrap()),
        netns_path: netns.to_owned(),
        ..Record::of_plan(plan)
    }
}

fn described(record: &Record, config: &Config) -> Value {
    serde_json::from_slice(&description(record, config).unwrap().spec).unwrap()
}

#[test]
fn a_pod_of_kubelet() {
    let spec = described(&record(&kubelet_pod()), &Config::default());
    let slice = "kubepods-burstable-pod8a5d0f2e_7f3b_4a59_9a53_5f0b9b4f6a11.slice";
    let bind = json!(["rbind", "ro", "nosuid", "nodev", "noexec"]);
    let expected = json!({
        "ociVersion": "1.2.0",
        "process": {
            "user": {"uid": 65535, "gid": 65535},
            "args": ["/pause"],
            "cwd": "/",
            "capabilities": {},
            "noNewPrivileges": true,
            "oomScoreAdj": -998,
        },
        "root": {"path": "rootfs", "readonly": true},
        "hostname": "web-6d4cf56db6-x7k2p",
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc",
             "options": ["nosuid", "noexec", "nodev"]},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs",
             "options": ["nosuid", "strictatime", "mode=755", "size=65536k"]},
            {"destination": "/dev/pts", "type": "devpts", "source": "devpts",
             "options": ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"]},
            {"destination": "/dev/mqueue", "type": "mqueue", "source": "mqueue",
             "options": ["nosuid", "noexec", "nodev"]},
            {"destination": "/sys", "type": "sysfs", "source": "sysfs",
             "options": ["nosuid", "noexec", "nodev", "ro"]},
            {"destination": "/dev/shm", "type": "bind", "options": bind,
             "source": format!("/run/containerd/io.containerd.grpc.v1.cri/sandboxes/{ID}/shm")},
            {"destination": "/etc/resolv.conf", "type": "bind", "options": bind,
             "source": format!("{CRI_ROOT}/sandboxes/{ID}/resolv.conf")},
            {"destination": "/etc/hostname", "type": "bind", "options": bind,
             "source": format!("{CRI_ROOT}/sandboxes/{ID}/hostname")},
            {"destination": "/etc/hosts", "type": "bind", "options": bind,
             "source": format!("{CRI_ROOT}/sandboxes/{ID}/hosts")},
        ],
        "annotations": {
            "io.kubernetes.cri.container-type": "sandbox",
            "io.kubernetes.cri.podsandbox.image-name": "",
            "io.kubernetes.cri.sandbox-cpu-period": "100000",
            "io.kubernetes.cri.sandbox-cpu-quota": "-1",
            "io.kubernetes.cri.sandbox-cpu-shares": "102",
            "io.kubernetes.cri.sandbox-id": ID,
            "io.kubernetes.cri.sandbox-log-directory":
                "/var/log/pods/shop_web-6d4cf56db6-x7k2p_8a5d0f2e-7f3b-4a59-9a53-5f0b9b4f6a11",
            "io.kubernetes.cri.sandbox-memory": "134217728",
            "io.kubernetes.cri.sandbox-name": "web-6d4cf56db6-x7k2p",
            "io.kubernetes.cri.sandbox-namespace": "shop",
            "io.kubernetes.cri.sandbox-uid": "8a5d0f2e-7f3b-4a59-9a53-5f0b9b4f6a11",
        },
        "linux": {
            "resources": {"devices": [{"allow": false, "access": "rwm"}], "cpu": {"shares": 2}},
            "cgroupsPath": format!("{slice}:cri-containerd:{ID}"),
            "namespaces": [
                {"type": "pid"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"},
                {"type": "network",
                 "path": "/var/run/netns/cni-0f5b2c3d-1111-2222-3333-444455556666"},
            ],
            "maskedPaths": [
                "/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys",
                "/proc/latency_stats", "/proc/timer_list", "/proc/timer_stats",
                "/proc/sched_debug", "/sys/firmware", "/sys/devices/virtual/powercap",
                "/proc/scsi",
            ],
            "readonlyPaths": [
                "/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger",
            ],
        },
    });
    assert_eq!(spec, expected, "{spec:#}");
}

#[test]
fn a_pod_of_the_node() {
    // All of the node's, and a config as bare as a config can be.
    let pod = PodSandboxConfig { hostname: "ignored".to_owned(), ..Default::default() };
    let mut record = record(&pod);
    record.plan.netns = None;
    (record.plan.pid, record.plan.ipc, record.plan.uts) =
        (Namespace::Node, Namespace::Node, Namespace::Node);
    record.files.shm = false;
    let spec = described(&record, &Config::default());
    assert_eq!(spec["linux"]["namespaces"], json!([{"type": "mount"}]));
    assert_eq!(spec["mounts"][5]["source"], "/dev/shm");
    for absent in [
        "/hostname",
        "/linux/cgroupsPath",
        "/linux/sysctl",
        "/linux/uidMappings",
        "/process/selinuxLabel",
    ] {
        assert_eq!(spec.pointer(absent), None, "{absent}");
    }
    assert_eq!(spec["annotations"].as_object().unwrap().len(), 7);
    assert_eq!(spec["annotations"]["io.kubernetes.cri.sandbox-name"], "");
}

#[test]
fn user_namespaces() {
    let map = |host_id| IdMapping { container_id: 0, host_id, length: 65536 };
    let mut record = record(&kubelet_pod());
    record.plan.userns = Some(UserNamespace { uid: map(131_072), gid: map(196_608) });
    record.plan.sysctls = vec![("net.ipv4.ip_unprivileged_port_start".to_owned(), "0".to_owned())];
    let spec = described(&record, &Config::default());
    assert_eq!(spec["linux"]["namespaces"][5], json!({"type": "user"}));
    assert_eq!(
        spec["linux"]["uidMappings"],
        json!([{"containerID": 0, "hostID": 131_072, "size": 65536}])
    );
    assert_eq!(
        spec["linux"]["gidMappings"],
        json!([{"containerID": 0, "hostID": 196_608, "size": 65536}])
    );
    assert_eq!(spec["linux"]["sysctl"], json!({"net.ipv4.ip_unprivileged_port_start": "0"}));
    assert_eq!(spec["mounts"][4]["type"], "sysfs");

    record.plan.netns = None;
    let spec = described(&record, &Config::default());
    let sys: Vec<&Value> = spec["mounts"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|mount| mount["destination"] == "/sys")
        .collect();
    let bound = json!({"destination": "/sys", "type": "bind", "source": "/sys",
        "options": ["rbind", "rro", "nosuid", "nodev", "noexec"]});
    assert_eq!(sys, [&bound]);
}

#[test]
fn labels_and_privileged_pods() {
    let mut pod = kubelet_pod();
    let label = "system_u:system_r:container_t:s0:c1,c2";
    let mut labelled = record(&pod);
    labelled.plan.selinux_label = label.to_owned();
    labelled.labels.mount = "system_u:object_r:container_file_t:s0:c1,c2".to_owned();
    let spec = described(&labelled, &Config::default());
    assert_eq!(spec["process"]["selinuxLabel"], label);
    assert_eq!(spec["linux"]["mountLabel"], labelled.labels.mount);

    pod.linux.as_mut().unwrap().security_context.as_mut().unwrap().privileged = true;
    // Create's check gives such a plan.
    labelled.plan.selinux_label.clear();
    labelled.config.value = pod.write_to_bytes().unwrap();
    let spec = described(&labelled, &Config::default());
    assert_eq!(spec["process"].get("selinuxLabel"), None);
    assert_eq!(spec["mounts"][4]["options"], json!(["nosuid", "noexec", "nodev", "rw"]));
}

#[test]
fn paths_of_cgroups() {
    let path = |parent: &str| {
        let mut plan = record(&kubelet_pod()).plan;
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
    let mut pod = kubelet_pod();
    pod.labels.insert("app".to_owned(), "web".to_owned());
    pod.labels.insert("io.cri-containerd.kind".to_owned(), "container".to_owned());
    let labels = description(&record(&pod), &Config::default()).unwrap().labels;
    let expected = [("app", "web"), ("io.cri-containerd.kind", "sandbox")];
    assert_eq!(labels, expected.map(|(key, value)| (key.to_owned(), value.to_owned())).into());
}

#[test]
fn a_config_that_cannot_be_decoded_is_named() {
    let mut record = record(&kubelet_pod());
    record.config.value = vec![0xff; 3];
    let error = description(&record, &Config::default()).unwrap_err();
    assert!(error.contains("options: is not a runtime.v1.PodSandboxConfig"), "{error}");
}
