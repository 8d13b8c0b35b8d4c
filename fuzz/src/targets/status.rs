//! Data of a request that Status reports: the first byte selects the part, the rest is
//! the part.

use std::sync::LazyLock;

use pause_sandboxer::config::Config;
use pause_sandboxer::pause::{IdMapping, Namespace, Plan, UserNamespace};
use pause_sandboxer::podsandbox::fuzzing::{Record, info};

use super::Seeds;
use crate::service::any;

const ID: &str = "6f1c2a9be0d4";

/// The parts: extensions of containerd's store by name, or the type of the runtime's options.
const PARTS: [&str; 4] =
    ["metadata", "updated-resources", "containerd.runc.v1.Options", "runtimeoptions.v1.Options"];

static CONFIG: LazyLock<Config> = LazyLock::new(Config::default);
static RECORD: LazyLock<Record> = LazyLock::new(|| {
    let mut record = whole();
    record.netns_path = "/proc/self/ns/net".into();
    record.plan.netns = Some("/proc/self/ns/net".into());
    record
});

pub fn run(input: &[u8]) {
    let Some((part, content)) = input.split_first() else { return };
    let mut record = RECORD.clone();
    let name = PARTS[usize::from(*part) % PARTS.len()];
    let blob = any(name, content);
    if name.contains('.') {
        record.info.runtime_options = Some(blob);
    } else {
        record.info.extensions.insert(name.into(), blob);
    }
    let info = info(&record, &CONFIG).expect("whatever is malformed, the rest is reported");
    let text = info.get("info").expect("it is reported");
    let shown: serde_json::Value = serde_json::from_str(text).expect("it is JSON");
    assert_eq!(shown["pid"], 4711);
    assert!(shown["runtimeSpec"].is_object(), "the spec is reported");
}

/// A record with all that one can have.
fn whole() -> Record {
    let mapping = IdMapping { container_id: 0, host_id: 100_000, length: 65536 };
    let plan = Plan {
        id: ID.try_into().expect("an id"),
        netns: Some("/run/netns/cni-1".into()),
        pid: Namespace::Private,
        ipc: Namespace::Private,
        uts: Namespace::Private,
        hostname: "web-0".into(),
        userns: Some(UserNamespace { uid: mapping, gid: mapping }),
        sysctls: vec![("net.core.somaxconn".into(), "1024".into())],
        cgroup_parent: "/kubepods/pod1".into(),
        oom_score_adj: -998,
        selinux_label: "system_u:system_r:container_t:s0:c1,c2".into(),
        privileged: true,
    };
    let json = serde_json::json!({
        "version": 1,
        "id": ID,
        "created_at": { "secs_since_epoch": 1_700_000_000, "nanos_since_epoch": 5 },
        "plan": plan,
        "files": {
            "hostname": "web-0",
            "dns": {
                "servers": ["10.0.0.10"],
                "searches": ["svc.cluster.local"],
                "options": ["ndots:5"],
            },
            "shm": true,
        },
        "config": { "type_url": "runtime.v1.PodSandboxConfig", "value": "EgV3ZWItMA==" },
        "netns_path": "/run/netns/cni-1",
        "info": {
            "runtime_name": "io.containerd.runc.v2",
            "runtime_options": { "type_url": "containerd.runc.v1.Options", "value": "SAE=" },
            "labels": { "io.cri-containerd.kind": "sandbox" },
            "extensions": { "metadata": { "type_url": "m", "value": "e30=" } },
        },
        "own_shim": true,
        "limits": ["nofile=1024:4096"],
        "labels": {
            "process": "system_u:system_r:container_t:s0:c1,c2",
            "mount": "system_u:object_r:container_file_t:s0:c1,c2",
        },
    });
    serde_json::from_value(json).expect("a record")
}

pub fn seeds() -> Seeds {
    let input = |part: u8, content: &[u8]| [&[part], content].concat();
    let metadata = br#"{"Version":"v1","Metadata":{"ID":"x","Name":"n",
"Config":{"metadata":{"name":"web-0"},
"linux":{"overhead":{"cpu_period":1}}},"NetNSPath":"/run/netns/x","IP":"10.0.0.1",
"RuntimeHandler":"r","CNIResult":{"Interfaces":{}}}}"#;
    vec![
        ("metadata".into(), input(0, metadata)),
        ("metadata-odd".into(), input(0, br#"{"Metadata":[1e999,{"a":null}]}"#)),
        (
            "resources".into(),
            input(
                1,
                br#"{"overhead":{"cpu_period":100000},
"resources":{"cpu_shares":2,"unified":{"a":"b"}}}"#,
            ),
        ),
        ("runc".into(), input(2, b"\x08\x01\x2a\x0e/usr/sbin/runc\x32\x02/r\x48\x01")),
        ("generic".into(), input(3, b"\x0a\x01t\x12\x05/a/b.\x1a\x03x=1")),
        ("generic-odd".into(), input(3, b"\x08\x01\x0a\x02\xff\xfe")),
    ]
}
