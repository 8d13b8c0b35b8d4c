//! Exits of the shim, and its leftovers.

use std::io::Write as _;
use std::os::unix::net::UnixListener;

use containerd_shim_protos::api::*;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use crate::hostile::{answer, frame};
use crate::pod::{self, Container, Pod, context, eventually, exists};

#[test]
fn a_shim_with_containers_does_not_shut_down() {
    let mut pod = Pod::new();
    pod.run("a", "sleep 1000", &Container::default());
    pod.client.shutdown(context(), &ShutdownRequest::new()).unwrap();
    assert_eq!(pod.status("a"), Status::RUNNING);
    pod.end("a");
    pod.shut_down();
}

#[test]
fn a_signal_ends_the_shim_and_not_its_containers() {
    for signal in [libc::SIGTERM, libc::SIGINT] {
        let mut pod = Pod::new();
        let pid = pod.run("a", "sleep 1000", &Container::default());
        pod.events_of(&["a"], 2);
        pod.stop_containerd();
        pod.run("b", "exit 3", &Container::default());
        assert_eq!(pod.wait("b", "").unwrap(), 3);
        pod::signal(&pod.shim, signal);
        pod.start_containerd();
        pod.has_ended();
        assert_eq!(pod.events_of(&["b"], 3), ["create b", "start b", "exit b 3"]);
        assert!(exists(format!("/proc/{pid}")));
        for id in ["a", "b"] {
            pod.delete_after_shim(id);
        }
    }
}

/// The socket on which the shim listens, which the daemon keeps for the next shim.
fn listener(pod: &Pod) -> UnixListener {
    let shim = pidfd_open(Pid::from_child(&pod.shim), PidfdFlags::empty()).unwrap();
    UnixListener::from(pidfd_getfd(shim, 3, PidfdGetfdFlags::empty()).unwrap())
}

#[test]
fn a_caller_that_connects_during_the_shutdown_waits_for_the_next_shim() {
    let mut pod = Pod::new();
    let mut known = pod.socket();
    // The shutdown lasts until the events are delivered.
    pod.stop_containerd();
    pod.run("a", "exec sleep 1000", &Container::default());
    pod.end("a");
    let listener = listener(&pod);
    pod.client.shutdown(context(), &ShutdownRequest::new()).unwrap();
    let mut new = pod.socket();
    new.write_all(&frame(1, "Create", &CreateTaskRequest::new())).unwrap();
    known.write_all(&frame(5, "Connect", &ConnectRequest::new())).unwrap();
    assert_eq!(answer(&mut known).0, 5);
    pod.start_containerd();
    pod.has_ended();
    // It would wait for a caller that the shim has accepted.
    listener.set_nonblocking(true).unwrap();
    let (mut call, _) = listener.accept().unwrap();
    call.set_nonblocking(false).unwrap();
    assert_eq!(answer(&mut call).0, 1);
}

/// A runtime that creates the first file when `action` is called, and waits for the second.
pub fn slow_runtime(pod: &Pod, action: &str) -> (Container, String, String) {
    let (began, go) = (pod.path("began"), pod.path("go"));
    let commands = format!(">{began}; while ! test -e {go}; do sleep 0.01; done");
    (pod.with_commands_before(action, &commands), began, go)
}

#[test]
fn a_deletion_after_the_shim_is_not_interrupted() {
    let mut pod = Pod::new();
    let (with, began, go) = slow_runtime(&pod, "delete");
    pod.run("a", "sleep 1000", &with);
    pod::signal(&pod.shim, libc::SIGKILL);
    pod.shim.wait().unwrap();
    let mut deletion = pod.deletion("a").stdout(std::process::Stdio::null()).spawn().unwrap();
    eventually("the runtime runs", || exists(&began).then_some(()));
    for signal in [libc::SIGTERM, libc::SIGINT] {
        pod::signal(&deletion, signal);
    }
    std::fs::write(&go, "").unwrap();
    assert!(deletion.wait().unwrap().success());
    assert!(!exists(format!("{}/{}", pod.path("runc/test"), pod.id("a"))));
}

#[test]
fn a_container_that_is_being_created_is_answered_before_the_end() {
    let mut pod = Pod::new();
    let (with, began, go) = slow_runtime(&pod, "create");
    let pid = std::thread::scope(|scope| {
        let created = scope.spawn(|| pod.try_create("a", "sleep 1000", &with));
        eventually("the runtime runs", || exists(&began).then_some(()));
        pod::signal(&pod.shim, libc::SIGTERM);
        std::fs::write(&go, "").unwrap();
        created.join().unwrap().unwrap()
    });
    pod.has_ended();
    assert_eq!(pod.events_of(&["a"], 1), ["create a"]);
    assert!(exists(format!("/proc/{pid}")));
    pod.delete_after_shim("a");
}

#[test]
fn what_a_dead_shim_has_left_is_deleted() {
    let mut pod = Pod::new();
    let pid = pod.run("a", "sleep 1000", &Container::default());
    pod.shim.kill().unwrap();
    pod.shim.wait().unwrap();
    assert!(exists(format!("/proc/{pid}")));
    let deleted = pod.delete_after_shim("a");
    assert_eq!((deleted.pid, deleted.exit_status), (pid, 137));
}

#[test]
fn a_program_that_cannot_be_executed_exits_with_a_status_and_not_by_a_signal() {
    let mut pod = Pod::new();
    let shell = pod.path("root/bin/sh");
    std::fs::remove_file(&shell).unwrap();
    // Executable by its mode, but of no format that the kernel knows.
    kit::write_program(&shell, &[1, 2, 3, 4]).unwrap();
    pod.create("a", "true", &Container::default());
    pod.start("a", "").unwrap();
    // The first process may write to the log of the command that has created it, which has ended.
    let status = pod.wait("a", "").unwrap();
    assert!((1..128).contains(&status) || status == 255, "{status}");
    pod.delete("a", "").unwrap();
    pod.shut_down();
}
