//! Bounds of what callers can have the shim keep.

use std::io::Write as _;
use std::os::unix::net::UnixStream;
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

/// Promise: caller_harms_only_itself.
#[test]
fn a_caller_that_reads_no_answers_is_read_no_further_until_it_does() {
    let mut pod = Pod::new();
    pod.run("a", "exec sleep 1000", &Container::default());
    let mut state = StateRequest::new();
    state.id = pod.id("a");
    // The answers are more than the shim keeps, and the socket takes.
    let streams: Vec<u32> = (0..60_000).map(|number| 2 * number + 1).collect();
    let calls: Vec<u8> =
        streams.iter().flat_map(|stream| frame(*stream, "State", &state)).collect();
    // Sends calls until the shim has read none of them for a while: how many bytes it has taken.
    let fill = |socket: &mut UnixStream| {
        socket.set_write_timeout(Some(Duration::from_secs(3))).unwrap();
        let mut sent = 0;
        while let Ok(count) = socket.write(&calls[sent..]) {
            sent += count;
            assert!(sent < calls.len(), "the shim keeps all answers");
        }
        // An answer is about as long as its call.
        assert!(sent > 1 << 20, "{sent}: the shim is not done");
        sent
    };
    let is_at_rest = || {
        let before = pod.time();
        std::thread::sleep(Duration::from_secs(1));
        let spent = pod.time() - before;
        assert!(spent < Duration::from_millis(50), "it spins: {spent:?}");
    };
    let mut socket = pod.socket();
    let sent = fill(&mut socket);
    is_at_rest();
    assert_eq!(pod.status("a"), Status::RUNNING);
    let (mut writer, rest) = (socket.try_clone().unwrap(), &calls[sent..]);
    let limit = Some(Duration::from_secs(30));
    writer.set_write_timeout(limit).unwrap();
    socket.set_read_timeout(limit).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || writer.write_all(rest).unwrap());
        for stream in &streams {
            assert_eq!(answer(&mut socket).0, *stream);
        }
    });
    is_at_rest();
    // One that ends, and has read nothing.
    fill(&mut socket);
    drop(socket);
    is_at_rest();
    pod.end("a");
    pod.shut_down();
}
