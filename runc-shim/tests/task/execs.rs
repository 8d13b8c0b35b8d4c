//! Processes that are executed in a container.

use containerd_shim_protos::api::*;
use containerd_shim_protos::ttrpc::Code;

use crate::pod::{self, Container, Pod, code, context};

/// Adds an exec of this program.
fn add_exec(pod: &Pod, exec: &str, program: &str, stderr: &str) {
    let mut request = ExecProcessRequest::new();
    (request.id, request.exec_id) = (pod.id("a"), exec.to_owned());
    request.stderr = stderr.to_owned();
    let spec = format!(r#"{{"args":["{program}"],"cwd":"/","user":{{}}}}"#);
    request.spec.mut_or_insert_default().value = spec.into_bytes();
    pod.client.exec(context(), &request).unwrap();
}

#[test]
fn an_exec_that_cannot_be_started_says_why_and_is_deleted() {
    let mut pod = Pod::new();
    pod.run("a", "sleep 1000", &Container::default());
    let err = pod.fifo("err");
    let stderr = pod::open(&err);
    add_exec(&pod, "bad", "/no/such/program", &err);
    let error = pod.start("a", "bad").unwrap_err().to_string();
    assert!(error.contains("/no/such/program") && error.contains("exec failed"), "{error}");
    pod.delete("a", "bad").unwrap();
    let said = rustix::io::ioctl_fionread(&stderr).unwrap();
    assert_eq!(said, 0, "what the runtime says is not the container's");
    let missing = pod.start("a", "bad").unwrap_err();
    assert_eq!(code(&missing), Code::NOT_FOUND);
    pod.exec("a", "good", "exit 3", &Container::default()).unwrap();
    assert_eq!(code(&pod.kill("a", "good", 9).unwrap_err()), Code::FAILED_PRECONDITION);
    let twice = pod.exec("a", "good", "true", &Container::default()).unwrap_err();
    assert_eq!(code(&twice), Code::ALREADY_EXISTS);
    pod.start("a", "good").unwrap();
    assert_eq!(pod.wait("a", "good").unwrap(), 3);
    pod.end("a");
    pod.shut_down();
}

#[test]
fn an_exec_that_cannot_be_started_has_not_succeeded() {
    let mut pod = Pod::new();
    pod.run("a", "sleep 1000", &Container::default());
    add_exec(&pod, "bad", "/no/such/program", "");
    let mut request = WaitRequest::new();
    (request.id, request.exec_id) = (pod.id("a"), "bad".to_owned());
    let wait = || pod.client.wait(context(), &request).unwrap();
    std::thread::scope(|scope| {
        let early = scope.spawn(wait);
        // Most likely it waits by then.
        std::thread::sleep(std::time::Duration::from_millis(100));
        pod.start("a", "bad").unwrap_err();
        let (early, late) = (early.join().unwrap(), wait());
        assert_eq!((early.exit_status, late.exit_status), (255, 255));
        assert!(early.exited_at.is_some());
        assert_eq!(early.exited_at, late.exited_at);
    });
    assert_eq!(pod.delete("a", "bad").unwrap().exit_status, 255);
    pod.end("a");
    pod.shut_down();
}

#[test]
fn execs_that_fail_again_and_again_do_not_fill_the_bundle() {
    let mut pod = Pod::new();
    pod.run("a", "sleep 1000", &Container::default());
    let missing = format!("/{}", "x".repeat(50_000));
    for number in 0..20 {
        let exec = format!("e{number}");
        add_exec(&pod, &exec, &missing, "");
        pod.start("a", &exec).unwrap_err();
        pod.delete("a", &exec).unwrap();
    }
    let log = pod.bundle("a").join("log.json");
    let size = std::fs::metadata(log).unwrap().len();
    assert!((1..=64 << 10).contains(&size), "{size}");
    pod.end("a");
    pod.shut_down();
}

/// The number of an exec that has ended is another process's when its start is answered.
#[test]
fn an_exec_whose_number_another_process_has_does_not_hang() {
    let mut pod = Pod::new();
    let other = std::process::id();
    let commands = format!(
        "while test $# -gt 1; do test $1 = --pid-file && file=$2; shift; done\n\
         echo {other} >$file; exit"
    );
    let with = pod.with_commands_before("exec", &commands);
    pod.run("a", "exec sleep 1000", &with);
    pod.exec("a", "e", "exit 4", &Container::default()).unwrap();
    assert_eq!(pod.start("a", "e").unwrap(), other);
    assert_eq!(pod.wait("a", "e").unwrap(), 255);
    assert_eq!(pod.delete("a", "e").unwrap().exit_status, 255);
    pod.end("a");
    pod.shut_down();
}

#[test]
fn a_process_without_standard_input_cannot_write_to_it() {
    let mut pod = Pod::new();
    pod.run("a", "sleep 1000", &Container::default());
    let script = "(echo text >&0) 2>/dev/null && exit 3; exit 4";
    pod.exec("a", "e", script, &Container::default()).unwrap();
    pod.start("a", "e").unwrap();
    assert_eq!(pod.wait("a", "e").unwrap(), 4);
    pod.end("a");
    pod.shut_down();
}
