//! Execs that are started while something else happens to them.

use std::io::Write as _;

use containerd_shim_protos::api::*;
use containerd_shim_protos::ttrpc::Code;

use crate::ends::slow_runtime;
use crate::hostile::{answer, frame, late_runtime};
use crate::pod::{self, Container, Pod, eventually, exists};

/// A runtime whose exec is a process of the node: it writes what `pid_file` prints into the pid
/// file, once the file `go` exists.
fn joining_runtime(pod: &Pod, pid_file: &str) -> (Container, String, String) {
    let (began, go) = (pod.path("began"), pod.path("go"));
    let commands = format!(
        ">{began}\n\
         while test $# -gt 1; do test $1 = --pid-file && file=$2; shift; done\n\
         while ! test -e {go}; do sleep 0.01; done\n\
         {pid_file} >$file; exit"
    );
    (pod.with_commands_before("exec", &commands), began, go)
}

#[test]
fn an_exec_that_joins_a_container_that_has_exited_does_not_delay_its_exit() {
    let mut pod = Pod::new();
    let sleeps = "sleep 1000 </dev/null >/dev/null 2>&1 & echo $!";
    let (with, began, go) = joining_runtime(&pod, sleeps);
    let pid = pod.run("a", "exec sleep 1000", &Container { host_pids: true, ..with });
    pod.exec("a", "e", "", &Container::default()).unwrap();
    std::thread::scope(|scope| {
        let started = scope.spawn(|| pod.start("a", "e"));
        eventually("the exec begins", || exists(&began).then_some(()));
        pod.kill("a", "", 9).unwrap();
        has_exited(pid);
        std::fs::write(&go, "").unwrap();
        started.join().unwrap().unwrap();
    });
    assert_eq!(pod.wait("a", "e").unwrap(), 137);
    assert_eq!(pod.wait("a", "").unwrap(), 137);
    pod.delete("a", "").unwrap();
    let events = pod.events_of(&["a", "e"], 7);
    let exits = ["exec-started e", "exit e 137", "exit a 137", "delete a"];
    assert_eq!(events[events.len() - 4..], exits, "{events:?}");
    pod.shut_down();
}

#[test]
fn an_exec_that_ends_before_its_start_is_answered_keeps_its_exit_when_its_container_exits() {
    let mut pod = Pod::new();
    let (with, began, go) = late_runtime(&pod, "exec");
    for (id, exec, host_pids) in [("a", "ea", false), ("b", "eb", true)] {
        let with = Container { host_pids, ..with.clone() };
        let pid = pod.run(id, "exec sleep 1000", &with);
        pod.exec(id, exec, "exit 4", &Container::default()).unwrap();
        std::thread::scope(|scope| {
            let started = scope.spawn(|| pod.start(id, exec));
            eventually("the exec has run", || exists(&began).then_some(()));
            let file = pod.bundle(id).join(format!("exec-{exec}.pid"));
            has_exited(std::fs::read_to_string(file).unwrap().trim());
            pod.kill(id, "", 9).unwrap();
            has_exited(pid);
            std::fs::write(&go, "").unwrap();
            started.join().unwrap().unwrap();
        });
        assert_eq!(pod.wait(id, exec).unwrap(), 4);
        assert_eq!(pod.wait(id, "").unwrap(), 137);
        pod.delete(id, "").unwrap();
        let events = pod.events_of(&[id, exec], 7);
        let exits =
            [&format!("exec-started {exec}"), &format!("exit {exec} 4"), &format!("exit {id} 137")];
        assert_eq!(events[3..6].iter().collect::<Vec<_>>(), exits, "{events:?}");
        std::fs::remove_file(&began).unwrap();
        std::fs::remove_file(&go).unwrap();
    }
    pod.shut_down();
}

/// The shim has seen the exit of a process.
fn has_exited(pid: impl std::fmt::Display) {
    eventually("the exit", || (!exists(format!("/proc/{pid}"))).then_some(()));
}

#[test]
fn an_exec_whose_container_exits_before_its_logging_program_is_ready_is_not_run() {
    let mut pod = Pod::new();
    let (logger, began, go) = (pod.path("logger"), pod.path("began"), pod.path("go"));
    let text = format!(">{began}; while ! test -e {go}; do sleep 0.01; done; exec 5>&-; cat <&3");
    pod::script(&logger, &text);
    let with = Container { stdout: format!("binary://{logger}"), ..Default::default() };
    let pid = pod.run("a", "exec sleep 1000", &Container::default());
    pod.exec("a", "e", "true", &with).unwrap();
    std::thread::scope(|scope| {
        let started = scope.spawn(|| pod.start("a", "e"));
        eventually("the logging program", || exists(&began).then_some(()));
        pod.kill("a", "", 9).unwrap();
        has_exited(pid);
        std::fs::write(&go, "").unwrap();
        let refused = started.join().unwrap().unwrap_err();
        assert_eq!(pod::code(&refused), Code::FAILED_PRECONDITION, "{refused}");
    });
    assert_eq!(pod.wait("a", "").unwrap(), 137);
    pod.delete("a", "").unwrap();
    pod.shut_down();
}

#[test]
fn a_pid_file_that_names_another_process_takes_no_exit_from_it() {
    let mut pod = Pod::new();
    let (with, _, go) = joining_runtime(&pod, "cat ${file%/*}/init.pid");
    std::fs::write(&go, "").unwrap();
    pod.run("a", "exec sleep 1000", &with);
    pod.exec("a", "e", "", &Container::default()).unwrap();
    let refused = pod.start("a", "e").unwrap_err().to_string();
    assert!(refused.contains("pid"), "{refused}");
    assert_eq!(pod.status("a"), Status::RUNNING);
    pod.delete("a", "e").unwrap();
    pod.end("a");
    pod.shut_down();
}

#[test]
fn a_terminal_has_the_size_that_was_set_during_its_start() {
    let mut pod = Pod::new();
    let (with, began, go) = slow_runtime(&pod, "exec");
    pod.run("a", "exec sleep 1000", &with);
    let with = Container { stdout: pod.fifo("out"), terminal: true, ..Default::default() };
    let _reader = pod::open(&with.stdout);
    let script = "for i in $(seq 200); do test \"$(stty size)\" = '37 91' && exit 4; \
                  sleep 0.05; done";
    pod.exec("a", "e", script, &with).unwrap();
    std::thread::scope(|scope| {
        let started = scope.spawn(|| pod.start("a", "e"));
        eventually("the exec begins", || exists(&began).then_some(()));
        let mut size = ResizePtyRequest::new();
        (size.id, size.exec_id) = (pod.id("a"), "e".to_owned());
        (size.width, size.height) = (91, 37);
        // The shim reads the calls of a connection in their order.
        let mut socket = pod.socket();
        let mut state = StateRequest::new();
        state.id = pod.id("a");
        let calls = [frame(1, "ResizePty", &size), frame(3, "State", &state)].concat();
        socket.write_all(&calls).unwrap();
        // An answer to the first would be one before the start.
        assert_eq!(answer(&mut socket).0, 3);
        std::fs::write(&go, "").unwrap();
        started.join().unwrap().unwrap();
        assert_eq!(answer(&mut socket).0, 1);
    });
    assert_eq!(pod.wait("a", "e").unwrap(), 4);
    pod.end("a");
    pod.shut_down();
}
