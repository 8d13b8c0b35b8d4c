//! Readers of the output that come late: containerd opens each FIFO in a thread of its own, which
//! may be later than its call.

use std::path::PathBuf;
use std::thread::{scope, sleep};
use std::time::Duration;

use containerd_shim_protos::api::*;
use containerd_shim_protos::ttrpc::{self, Code};

use crate::deadlines::send;
use crate::pod::{Container, Pod, code, eventually, reader};

/// Much less than the shim waits for a reader.
const WHILE: Duration = Duration::from_millis(500);

/// Waits until the shim waits for the reader of a FIFO, which it has open then.
fn is_awaited(pod: &Pod, fifo: &str) {
    let fds = format!("/proc/{}/fd", pod.shim.id());
    eventually("the wait for a reader", || {
        let mut fds = std::fs::read_dir(&fds).unwrap().flatten();
        let is_it = |path: PathBuf| path.as_os_str() == fifo;
        fds.any(|fd| std::fs::read_link(fd.path()).is_ok_and(is_it)).then_some(())
    });
}

/// Two FIFOs, and a container or an exec with this output.
fn output(pod: &Pod, name: &str) -> (String, String, Container) {
    let [stdout, stderr] = ["out", "err"].map(|which| pod.fifo(&format!("{name}-{which}")));
    let with = Container { stdout: stdout.clone(), stderr: stderr.clone(), ..Default::default() };
    (stdout, stderr, with)
}

/// Promise: output_is_not_lost.
#[test]
fn a_process_is_created_when_its_output_has_readers() {
    let mut pod = Pod::new();
    let (stdout, stderr, with) = output(&pod, "container");
    let (exec_stdout, exec_stderr, exec_with) = output(&pod, "exec");
    let create = || pod.try_create("a", "echo word; exec sleep 1000", &with);
    let exec = || {
        pod.start("a", "").unwrap();
        pod.exec("a", "e", "echo word", &exec_with).unwrap();
        pod.start("a", "e")
    };
    let late = |call: &(dyn Fn() -> ttrpc::Result<u32> + Sync), stdout: &str, stderr: &str| {
        scope(|scope| {
            let called = scope.spawn(call);
            is_awaited(&pod, stdout);
            sleep(WHILE);
            assert!(!called.is_finished(), "without readers");
            let stdout = reader(stdout);
            sleep(WHILE);
            assert!(!called.is_finished(), "without a reader of the standard error");
            let stderr = reader(stderr);
            called.join().unwrap().unwrap();
            (stdout, stderr)
        })
    };
    let readers = late(&create, &stdout, &stderr);
    let exec_readers = late(&exec, &exec_stdout, &exec_stderr);
    assert_eq!(pod.wait("a", "e").unwrap(), 0);
    assert_eq!(exec_readers.0.join().unwrap(), b"word\n");
    assert_eq!(exec_readers.1.join().unwrap(), b"");
    pod.delete("a", "e").unwrap();
    pod.end("a");
    assert_eq!(readers.0.join().unwrap(), b"word\n");
    assert_eq!(readers.1.join().unwrap(), b"");
    pod.shut_down();
}

/// A client that never reads, and containerd that was killed in its call.
#[test]
fn a_process_without_readers_is_created_later() {
    let mut pod = Pod::new();
    pod.run("a", "sleep 1000", &Container::default());
    let fifos = ["waits", "gone"].map(|exec| {
        let (stdout, _, with) = output(&pod, exec);
        pod.exec("a", exec, "echo word", &with).unwrap();
        stdout
    });
    scope(|scope| {
        let waits = scope.spawn(|| pod.start("a", "waits"));
        is_awaited(&pod, &fifos[0]);
        let mut start = StartRequest::new();
        (start.id, start.exec_id) = (pod.id("a"), "gone".to_owned());
        send(&mut pod.socket(), "Start", &start, Duration::ZERO);
        assert_eq!(pod.wait("a", "gone").unwrap(), 0);
        assert!(!waits.is_finished(), "its caller is there");
        waits.join().unwrap().unwrap();
    });
    assert_eq!(pod.wait("a", "waits").unwrap(), 0);
    for (exec, fifo) in ["waits", "gone"].into_iter().zip(&fifos) {
        assert_eq!(reader(fifo).join().unwrap(), b"word\n", "{exec}");
        pod.delete("a", exec).unwrap();
    }
    pod.end("a");
    pod.shut_down();
}

#[test]
fn an_end_is_not_delayed_by_readers_that_do_not_come() {
    let mut pod = Pod::new();
    let (stdout, _, with) = output(&pod, "container");
    scope(|scope| {
        let create = scope.spawn(|| pod.try_create("a", "true", &with));
        is_awaited(&pod, &stdout);
        pod.delete("a", "").unwrap_err();
        assert_eq!(code(&create.join().unwrap().unwrap_err()), Code::DEADLINE_EXCEEDED);
    });
    let fifos = ["waits", "ends"].map(|id| {
        let (stdout, _, with) = output(&pod, id);
        pod.run(id, "sleep 1000", &Container::default());
        pod.exec(id, "e", "true", &with).unwrap();
        stdout
    });
    scope(|scope| {
        let waits = scope.spawn(|| pod.start("waits", "e"));
        is_awaited(&pod, &fifos[0]);
        let ends = scope.spawn(|| pod.start("ends", "e"));
        is_awaited(&pod, &fifos[1]);
        pod.kill("ends", "", 9).unwrap();
        let error = ends.join().unwrap().unwrap_err().to_string();
        assert!(error.contains("init process is not running"), "{error}");
        assert!(!waits.is_finished(), "its container runs");
        pod.kill("waits", "", 9).unwrap();
        waits.join().unwrap().unwrap_err();
    });
    pod.end("waits");
    pod.end("ends");
    pod.shut_down();
}
