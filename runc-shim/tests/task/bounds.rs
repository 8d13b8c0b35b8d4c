//! Bounds of what callers can have the shim keep.

use std::io::Write as _;
use std::time::Duration;

use containerd_shim_protos::api::*;
use containerd_shim_protos::protobuf::Message as _;
use containerd_shim_protos::ttrpc::Code;
use containerd_shim_protos::ttrpc::proto::Response;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::ends::slow_runtime;
use crate::hostile::{answer, frame};
use crate::pod::{Container, Pod, code, context, eventually, exists};

/// How many calls, execs and connections there may be.
const MOST: usize = 1024;

#[test]
fn too_many_execs_of_a_container_are_refused() {
    let mut pod = Pod::new();
    pod.run("a", "exec sleep 1000", &Container::default());
    let add = |number: usize| pod.exec("a", &format!("e{number}"), "true", &Container::default());
    for number in 0..MOST {
        add(number).unwrap();
    }
    assert_eq!(code(&add(MOST).unwrap_err()), Code::RESOURCE_EXHAUSTED);
    pod.delete("a", "e0").unwrap();
    add(MOST).unwrap();
    pod.end("a");
    pod.shut_down();
}

#[test]
fn too_many_calls_that_wait_for_a_command_are_refused() {
    let mut pod = Pod::new();
    let (with, began, go) = slow_runtime(&pod, "pause");
    pod.run("a", "exec sleep 1000", &with);
    let mut socket = pod.socket();
    socket.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let (mut pause, mut resume) = (PauseRequest::new(), ResumeRequest::new());
    (pause.id, resume.id) = (pod.id("a"), pod.id("a"));
    socket.write_all(&frame(1, "Pause", &pause)).unwrap();
    eventually("the command", || exists(&began).then_some(()));
    for number in 1..=MOST + 50 {
        let stream = u32::try_from(2 * number + 1).unwrap();
        socket.write_all(&frame(stream, "Resume", &resume)).unwrap();
    }
    let status = |payload: &[u8]| Response::parse_from_bytes(payload).unwrap().status.code();
    for number in MOST + 1..=MOST + 50 {
        let (stream, payload) = answer(&mut socket);
        let refused = (stream as usize, status(&payload));
        assert_eq!(refused, (2 * number + 1, Code::RESOURCE_EXHAUSTED));
    }
    std::fs::write(&go, "").unwrap();
    let answers: Vec<_> = (0..=MOST).map(|_| answer(&mut socket)).collect();
    let codes = answers.iter().map(|(_, payload)| status(payload));
    // The Pause and the first Resume; then the container runs.
    assert_eq!(codes.filter(|code| *code == Code::OK).count(), 2);
    assert_eq!(pod.status("a"), Status::RUNNING);
    pod.end("a");
    pod.shut_down();
}

#[test]
fn the_last_error_of_a_runtime_that_writes_8_mb_is_reported_and_the_rest_is_not_kept() {
    let mut pod = Pod::new();
    // To its log (`$4`), and to its output.
    let commands = "yes '{\"level\":\"debug\",\"msg\":\"x\"}' | head -n 300000 >>$4\n\
                    yes output | head -c 8000000; echo output >/dev/stderr\n\
                    echo '{\"level\":\"error\",\"msg\":\"the reason\"}' >>$4; exit 1";
    pod.run("a", "exec sleep 1000", &pod.with_commands_before("pause", commands));
    let before = pod.memory();
    let mut request = PauseRequest::new();
    request.id = pod.id("a");
    for _ in 0..3 {
        let error = pod.client.pause(context(), &request).unwrap_err().to_string();
        assert!(error.contains("runtime pause failed: the reason"), "{error}");
    }
    let log = std::fs::metadata(pod.bundle("a").join("log.json")).unwrap().len();
    assert_eq!(log, 64 << 10);
    let more = pod.memory().saturating_sub(before);
    assert!(more <= 1024, "{more} kB");
    pod.end("a");
    pod.shut_down();
}

#[test]
fn too_many_connections_wait_for_their_turn() {
    let most = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most }).unwrap();
    let mut pod = Pod::new();
    // The shim has accepted the connection of the client.
    pod.client.connect(context(), &ConnectRequest::new()).unwrap();
    let open_files = || std::fs::read_dir(format!("/proc/{}/fd", pod.shim.id())).unwrap().count();
    let before = open_files();
    let mut many: Vec<_> = (0..MOST + 50).map(|_| pod.socket()).collect();
    eventually("connections", || (open_files() >= before + MOST - 1).then_some(()));
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(open_files(), before + MOST - 1);
    pod.client.connect(context(), &ConnectRequest::new()).unwrap();
    many.drain(..100);
    pod.connect().connect(context(), &ConnectRequest::new()).unwrap();
    drop(many);
    pod.shut_down();
}
