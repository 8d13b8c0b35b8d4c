//! Processes that hold the kernel's lock of their standard streams.

use containerd_shim_protos::api::*;

use crate::pod::{self, Container, Pod, eventually};

/// Whether a thread of a process sleeps so that no signal wakes it.
fn sleeps_uninterruptibly(pid: u32) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let mut stats = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("stat")).ok());
    stats.any(|stat| stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('D')))
}

/// How many threads a process has.
fn threads(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().count()
}

/// Runs a container that holds the lock of its standard input, on which the shim then sleeps.
fn run_holder(pod: &Pod, id: &str) -> std::thread::JoinHandle<Vec<u8>> {
    let (input, out) = (pod.fifo("held-in"), pod.fifo("held-out"));
    let stdout = pod::reader(&out);
    let with = Container { stdin: input.clone(), stdout: out, ..Default::default() };
    pod.run(id, "exec probe hold-input", &with);
    eventually("the lock", || {
        pod::write(&input, b"more");
        sleeps_uninterruptibly(pod.shim.id()).then_some(())
    });
    stdout
}

/// Promise: container_delays_no_other.
#[test]
fn a_process_that_holds_the_lock_of_its_pipe_can_be_killed() {
    let mut pod = Pod::new();
    let other = pod.run("b", "sleep 1000", &Container::default());
    let stdout = run_holder(&pod, "a");
    assert_eq!(pod.state("b", "").unwrap().pid, other);
    pod.kill("a", "", 9).unwrap();
    assert_eq!(pod.wait("a", "").unwrap(), 137);
    pod.delete("a", "").unwrap();
    assert_eq!(stdout.join().unwrap(), b"full\n");
    pod.end("b");
    eventually("the end of its thread", || (threads(pod.shim.id()) == 1).then_some(()));
    pod.shut_down();
}

/// Promise: container_delays_no_other.
#[test]
fn a_process_that_holds_the_lock_of_its_pipe_delays_no_exec_of_its_container() {
    let mut pod = Pod::new();
    let held = run_holder(&pod, "a");
    let out = pod.fifo("out");
    let stdout = pod::reader(&out);
    pod.exec("a", "e", "echo exec", &Container { stdout: out, ..Default::default() }).unwrap();
    pod.start("a", "e").unwrap();
    assert_eq!(pod.wait("a", "e").unwrap(), 0);
    assert_eq!(stdout.join().unwrap(), b"exec\n");
    pod.delete("a", "e").unwrap();
    assert!(sleeps_uninterruptibly(pod.shim.id()), "the lock is held all the time");
    eventually("the end of the exec's thread", || (threads(pod.shim.id()) == 2).then_some(()));
    pod.end("a");
    assert_eq!(held.join().unwrap(), b"full\n");
    pod.shut_down();
}

/// Promise: container_delays_no_other.
#[test]
fn a_process_that_holds_the_lock_of_its_pipe_delays_no_other_container() {
    let mut pod = Pod::new();
    let (out, exec_out, late_out) = (pod.fifo("out"), pod.fifo("exec-out"), pod.fifo("late-out"));
    let stdout = pod::reader(&out);
    // More than the pipe holds, once the lock is held.
    let script = "while ! test -e /tmp/go; do sleep 0.01; done; seq 100001 130000; exit 3";
    let with = Container { stdout: out, root_is: Some(0), ..Default::default() };
    std::fs::create_dir(pod.path("data")).unwrap();
    pod.run("b", script, &with);
    let held = run_holder(&pod, "a");
    let exec_stdout = pod::reader(&exec_out);
    pod.exec("b", "e", "echo exec", &Container { stdout: exec_out, ..Default::default() }).unwrap();
    pod.start("b", "e").unwrap();
    assert_eq!(pod.wait("b", "e").unwrap(), 0);
    pod.delete("b", "e").unwrap();
    assert_eq!(exec_stdout.join().unwrap(), b"exec\n");
    std::fs::write(pod.path("data/go"), "").unwrap();
    assert_eq!(pod.wait("b", "").unwrap(), 3);
    pod.delete("b", "").unwrap();
    let expected: String = (100_001..=130_000).map(|number| format!("{number}\n")).collect();
    assert!(stdout.join().unwrap() == expected.as_bytes(), "output is lost");
    let late_stdout = pod::reader(&late_out);
    pod.run("c", "echo late", &Container { stdout: late_out, ..Default::default() });
    assert_eq!(pod.wait("c", "").unwrap(), 0);
    pod.delete("c", "").unwrap();
    assert_eq!(late_stdout.join().unwrap(), b"late\n");
    assert_eq!(pod.status("a"), Status::RUNNING);
    assert!(sleeps_uninterruptibly(pod.shim.id()), "the lock is held all the time");
    pod.end("a");
    assert_eq!(held.join().unwrap(), b"full\n");
    pod.shut_down();
}
