//! Calls of the Task service: the first byte says which, the rest is the request's message. Beside
//! them what is in requests: runtime options (17), the process of an exec (18), ids (19). Also the
//! pause process, which the daemon names (20), and what containerd writes to `start` (21).

use containerd_shim_protos::api;
use containerd_shim_protos::bootstrap_api::{BootstrapParams, BootstrapResult, Extension};
use containerd_shim_protos::shim::oci::Options;
use protobuf::Message as _;
use runc_shim::fuzzing::{bootstrap, call, is_id, options_json, process_json};
use serde_json::Value;

use super::{Seeds, assert_told};

const SERVICE: &str = "containerd.task.v3.Task";
const METHODS: [&str; 17] = [
    "State",
    "Create",
    "Start",
    "Delete",
    "Pids",
    "Pause",
    "Resume",
    "Checkpoint",
    "Kill",
    "Exec",
    "ResizePty",
    "CloseIO",
    "Update",
    "Wait",
    "Stats",
    "Connect",
    "Shutdown",
];

pub fn run(input: &[u8]) {
    let Some((kind, content)) = input.split_first() else { return };
    match kind {
        17 => of_options(content),
        18 => of_process(content),
        19 => of_id(content),
        20 => of_pause(content),
        21 => of_bootstrap(content),
        _ => {
            let method = METHODS[usize::from(*kind) % METHODS.len()];
            if let Err(e) = call(SERVICE, method, content) {
                assert_told(&e);
            }
            assert!(call("other", method, content).is_err());
            assert!(call(SERVICE, "Other", content).is_err());
        }
    }
}

/// Options that were written into a bundle can be read again.
fn of_options(content: &[u8]) {
    match options_json("containerd.runc.v1.Options", content) {
        Ok(json) => {
            let json: Value = serde_json::from_str(&json).expect("it is JSON");
            assert!(json.is_object());
        }
        Err(e) => assert_told(&e),
    }
    assert!(options_json("runtimeoptions.v1.Options", content).is_ok());
    assert_eq!(options_json("other", content).is_ok(), content.is_empty());
}

/// All but the terminal is as it was.
fn of_process(content: &[u8]) {
    for terminal in [true, false] {
        match process_json(content, terminal) {
            Ok(json) => {
                // Numbers and depths that this parser does not take are passed on as they are.
                let Ok(mut given) = serde_json::from_slice::<Value>(content) else { continue };
                let made: Value = serde_json::from_slice(&json).expect("it is JSON");
                assert_eq!(made["terminal"], terminal);
                given["terminal"] = terminal.into();
                assert_eq!(made, given);
            }
            Err(e) => assert_told(&e),
        }
    }
}

/// An id is a name in a directory and no option of a command line.
fn of_id(content: &[u8]) {
    let Ok(id) = std::str::from_utf8(content) else { return };
    if is_id(id) {
        assert!(!id.is_empty() && id.len() <= 128 && id != "." && id != "..");
        assert!(!id.starts_with('-') && !id.contains(['/', '\0', ' ', '\n', ':']));
    }
}

/// Only a whole request for the one method is accepted.
fn of_pause(content: &[u8]) {
    const SERVICE: &str = "pause_sandboxer.shim.v1.Sandbox";
    match call(SERVICE, "SetPause", content) {
        Ok(()) => {
            // In fields that it does not know, the parser takes text that is not UTF-8, and numbers
            // and depths that this one does not take.
            let Ok(pause) = serde_json::from_slice::<Value>(content) else { return };
            // The parser takes an array of the fields, too.
            let field = |name, index| if pause.is_array() { &pause[index] } else { &pause[name] };
            assert!(field("pid", 1).as_i64().expect("a pid") > 1);
            assert!(is_id(field("id", 0).as_str().expect("an id")));
        }
        Err(e) => assert_told(&e),
    }
    assert!(call(SERVICE, "Other", content).is_err());
}

/// The answer has the form of the question, and the socket has an absolute path.
fn of_bootstrap(content: &[u8]) {
    match bootstrap(content, "a", "n") {
        Ok((directory, answer)) => {
            assert!(directory.starts_with('/'));
            if let Ok(json) = serde_json::from_slice::<Value>(&answer) {
                assert_eq!(json["address"], "unix:///x");
            } else {
                let result = BootstrapResult::parse_from_bytes(&answer).expect("a result");
                assert_eq!(result.address, "unix:///x");
                let params = BootstrapParams::parse_from_bytes(content).expect("parameters");
                assert_eq!((params.instance_id, params.namespace), ("a".into(), "n".into()));
            }
        }
        Err(e) => assert_told(&e),
    }
}

pub fn seeds() -> Seeds {
    let input = |kind: u8, content: &[u8]| [&[kind], content].concat();
    let encoded =
        |message: &dyn protobuf::MessageDyn| message.write_to_bytes_dyn().expect("it is encoded");
    let mut create = api::CreateTaskRequest::new();
    (create.id, create.bundle) = ("a".into(), "/run/a".into());
    (create.stdout, create.terminal) = ("/run/fifo".into(), true);
    let mut mount = api::Mount::new();
    (mount.type_, mount.source) = ("overlay".into(), "overlay".into());
    mount.options = vec!["lowerdir=/a:/b".into(), "ro".into()];
    create.rootfs.push(mount);
    let mut kill = api::KillRequest::new();
    (kill.id, kill.exec_id, kill.signal, kill.all) = ("a".into(), "e".into(), 9, true);
    let mut exec = api::ExecProcessRequest::new();
    (exec.id, exec.exec_id) = ("a".into(), "e".into());
    exec.spec.mut_or_insert_default().value = br#"{"args":["a"]}"#.to_vec();
    let mut resize = api::ResizePtyRequest::new();
    (resize.id, resize.width, resize.height) = ("a".into(), 80, 25);
    let mut options = Options::new();
    (options.binary_name, options.root) = ("/usr/bin/runc".into(), "/run/r".into());
    (options.systemd_cgroup, options.io_uid) = (true, 1000);
    let mut any = protobuf::well_known_types::any::Any::new();
    any.type_url = "containerd.runc.v1.Options".into();
    any.value = encoded(&options);
    let mut extension = Extension::new();
    extension.value = Some(any.clone()).into();
    let mut params = BootstrapParams::new();
    (params.instance_id, params.namespace) = ("a".into(), "n".into());
    (params.socket_dir, params.extensions) = (Some("/run/s".into()), vec![extension]);
    vec![
        ("bootstrap".into(), input(21, &encoded(&params))),
        ("bootstrap-any".into(), input(21, &encoded(&any))),
        ("create".into(), input(1, &encoded(&create))),
        ("kill".into(), input(8, &encoded(&kill))),
        ("exec".into(), input(9, &encoded(&exec))),
        ("resize".into(), input(10, &encoded(&resize))),
        ("shutdown".into(), input(16, b"")),
        ("options".into(), input(17, &encoded(&options))),
        (
            "process".into(),
            input(18, br#"{"terminal":true,"args":["a",1.50,null],"x":{"y":[1e9]}}"#),
        ),
        ("id".into(), input(19, b"0123-a_b.c")),
        ("id-path".into(), input(19, b"../a")),
        ("pause".into(), input(20, br#"{"id":"a","pid":7,"start_time":9}"#)),
    ]
}
