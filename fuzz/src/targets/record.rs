//! The files of a sandbox in the state directory: the first byte says which, the rest is its
//! content.

use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, SystemTime};

use pause_sandboxer::config::Config;
use pause_sandboxer::error::StepError;
use pause_sandboxer::pause::{IdMapping, Namespace, Plan, UserNamespace};
use pause_sandboxer::podsandbox::fuzzing::{
    Layout, Record, RecordError, RecordStore, Stage, VERSION,
};
use pause_sandboxer::process::{Exit, Identity};

use super::{Seeds, assert_told};

const ID: &str = "6f1c2a9be0d4";

/// The place of the one sandbox.
struct Place {
    store: RecordStore,
    dir: PathBuf,
}

static PLACE: LazyLock<Place> = LazyLock::new(|| {
    let state_dir = crate::scratch().join("state");
    let layout = Arc::new(Layout::new(&Config { state_dir, ..Config::default() }));
    let dir = layout.sandbox(ID);
    fs::create_dir_all(&dir).expect("a directory");
    Place { store: RecordStore::new(&layout, &ID.try_into().expect("an id")), dir }
});

pub fn run(input: &[u8]) {
    match input.split_first() {
        Some((0, content)) => record(content),
        Some((1, content)) => stage(content),
        _ => {}
    }
}

fn record(content: &[u8]) {
    let Place { store, dir } = &*PLACE;
    let path = dir.join("record.json");
    fs::write(&path, content).expect("the record is written");
    match store.read_record() {
        Ok(record) => {
            assert_eq!((record.id.as_str(), record.version <= VERSION), (ID, true));
            store.change(|_| {}).expect("what was read is written");
            assert_eq!(store.read_record().expect("what was written is read"), record);
            fs::remove_file(&path).expect("it is there");
            return;
        }
        Err(e) => {
            assert_told(&e.to_string());
            assert!(e.to_string().contains("record.json"), "{e} does not name the file");
            let version = || {
                serde_json::from_slice::<serde_json::Value>(content).ok()?.get("version")?.as_u64()
            };
            match e {
                RecordError::Missing(_) => panic!("{e}: it is there"),
                // A number that JSON has and no type holds may be elsewhere in it.
                RecordError::Newer { version: reported, .. } => {
                    assert!(
                        reported > VERSION
                            && version().is_none_or(|version| version == u64::from(reported)),
                        "{reported}"
                    );
                }
                RecordError::Malformed { .. } | RecordError::Io(_) => {}
            }
            // It cannot be changed either.
            let e: StepError =
                store.change(|_| panic!("it is changed")).expect_err("it is no record");
            assert_told(&e.to_string());
        }
    }
    assert_eq!(
        fs::read(&path).expect("it is kept"),
        content,
        "a record that is not understood was changed"
    );
    assert!(!dir.join("record.json.new").exists());
}

fn stage(content: &[u8]) {
    let Place { store, dir } = &*PLACE;
    let path = dir.join("stage.json");
    fs::write(&path, content).expect("the stage is written");
    match store.stage() {
        Ok(stage) => {
            store.set_stage(&stage).expect("what was read is written");
            assert_eq!(store.stage().expect("what was written is read"), stage);
        }
        Err(e) => {
            assert_told(&e.to_string());
            assert!(e.to_string().contains("stage.json"), "{e} does not name the file");
            assert_eq!(
                fs::read(&path).expect("it is kept"),
                content,
                "a stage that is not understood was changed"
            );
        }
    }
    fs::remove_file(&path).expect("it is there");
    assert_eq!(store.stage().expect("none is the first"), Stage::Created);
}

/// A record with all that one can have.
pub fn whole() -> Record {
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
        "version": VERSION,
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
    let input = |kind: u8, content: Vec<u8>| [vec![kind], content].concat();
    let json = |kind: u8, value: &dyn Fn() -> serde_json::Result<Vec<u8>>| {
        input(kind, value().expect("it is encoded"))
    };
    let record = |change: fn(&mut serde_json::Value)| {
        let mut value = serde_json::to_value(whole()).expect("it is encoded");
        change(&mut value);
        input(0, value.to_string().into())
    };
    let at = SystemTime::UNIX_EPOCH + Duration::new(1_700_000_000, 5);
    let identity = Identity {
        pid: 4711,
        start_time: 12345,
        pid_namespace: 4_026_531_836,
        boot_id: "7d2f".into(),
    };
    vec![
        ("record".into(), record(|_| {})),
        ("record-newer".into(), record(|value| value["version"] = 2.into())),
        ("record-of-another".into(), record(|value| value["id"] = "other".into())),
        ("record-cut".into(), input(0, b"{\"version\":1,\"id\":\"6f1c2a9be0d4\",".into())),
        ("record-empty".into(), input(0, Vec::new())),
        ("stage-created".into(), json(1, &|| serde_json::to_vec(&Stage::Created))),
        (
            "stage-started".into(),
            json(1, &|| serde_json::to_vec(&Stage::Started { identity: identity.clone() })),
        ),
        (
            "stage-exited".into(),
            json(1, &|| {
                let exit = Exit { status: 137, at };
                serde_json::to_vec(&Stage::Exited { pid: 4711, exit, reason: None })
            }),
        ),
        ("stage-empty".into(), input(1, Vec::new())),
    ]
}
