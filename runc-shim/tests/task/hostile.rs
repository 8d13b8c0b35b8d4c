//! Callers, containers and disks that do what they should not.

use std::io::{Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::time::Duration;

use containerd_shim_protos::api::*;
use containerd_shim_protos::protobuf::Message as _;
use containerd_shim_protos::ttrpc::Code;
use containerd_shim_protos::ttrpc::proto::{Request, Response};
use rustix::process::{Pid, Signal, kill_process};

use crate::pod::{self, Container, Pod, code, context, eventually, exists, script};

/// A frame of a call.
pub fn frame(
    stream: u32,
    method: &str,
    message: &impl containerd_shim_protos::protobuf::Message,
) -> Vec<u8> {
    let mut request = Request::new();
    request.service = "containerd.task.v3.Task".to_owned();
    request.method = method.to_owned();
    request.payload = message.write_to_bytes().unwrap();
    raw(stream, 1, &request.write_to_bytes().unwrap())
}

pub fn raw(stream: u32, kind: u8, payload: &[u8]) -> Vec<u8> {
    let mut frame = (payload.len() as u32).to_be_bytes().to_vec();
    frame.extend(stream.to_be_bytes());
    frame.extend([kind, 0]);
    frame.extend(payload);
    frame
}

/// The stream of the next answer.
pub fn answer(socket: &mut impl std::io::Read) -> (u32, Vec<u8>) {
    let mut head = [0; 10];
    socket.read_exact(&mut head).unwrap();
    let mut payload = vec![0; u32::from_be_bytes(head[..4].try_into().unwrap()) as usize];
    socket.read_exact(&mut payload).unwrap();
    (u32::from_be_bytes(head[4..8].try_into().unwrap()), payload)
}

#[test]
fn malformed_frames_and_ids_are_refused_and_harm_no_other() {
    let mut pod = Pod::new();
    let pid = pod.run("a", "sleep 1000", &Container::default());
    for bytes in [
        vec![0xff; 5000],
        raw(1, 1, &[0xff; 40]),
        raw(2, 3, b"data"),
        raw(1, 1, b"")[..7].to_vec(),
        [&(u32::MAX - 1).to_be_bytes()[..], &[0, 0, 0, 1, 1, 0], &[7; 100_000]].concat(),
    ] {
        // The shim may hang up before it has read all.
        let _ = pod.socket().write_all(&bytes);
    }
    let mut socket = pod.socket();
    socket.write_all(&raw(1, 1, &[0xff; 40])).unwrap();
    socket.write_all(&frame(3, "NoMethod", &StateRequest::new())).unwrap();
    assert_eq!((answer(&mut socket).0, answer(&mut socket).0), (1, 3));
    let long = "a".repeat(200);
    for id in ["", "..", "a/b", "../a", "-a", "--root", "a b", "a\0", "\u{e4}", long.as_str()] {
        let mut request = CreateTaskRequest::new();
        (request.id, request.bundle) = (id.to_owned(), pod.path("none"));
        let refused = pod.client.create(context(), &request).unwrap_err();
        assert_eq!(code(&refused), Code::INVALID_ARGUMENT, "{id:?}");
        let refused = pod.exec("a", id, "true", &Container::default()).unwrap_err();
        assert_eq!(code(&refused), Code::INVALID_ARGUMENT, "{id:?}");
    }
    for bundle in ["", "relative", "../a"] {
        let mut request = CreateTaskRequest::new();
        (request.id, request.bundle) = ("b".to_owned(), bundle.to_owned());
        let refused = pod.client.create(context(), &request).unwrap_err();
        assert_eq!(code(&refused), Code::INVALID_ARGUMENT, "{bundle:?}");
    }
    assert_eq!(pod.state("a", "").unwrap().pid, pid);
    pod.end("a");
    pod.shut_down();
}

/// Promise: caller_harms_only_itself.
#[test]
fn too_many_connections_and_waiters_are_bounded() {
    let mut pod = Pod::new();
    pod.run("a", "sleep 1000", &Container::default());
    let mut request = WaitRequest::new();
    request.id = pod.id("a");
    let mut socket = pod.socket();
    for number in 0..1100 {
        socket.write_all(&frame(2 * number + 1, "Wait", &request)).unwrap();
    }
    // containerd takes an error of its Wait, the first, for the container's exit.
    for number in 1024..1100 {
        assert_eq!(answer(&mut socket).0, 2 * number + 1, "the last are refused");
    }
    let limit = rustix::process::Rlimit { current: Some(40), maximum: Some(40) };
    let shim = rustix::process::Pid::from_child(&pod.shim);
    rustix::process::prlimit(Some(shim), rustix::process::Resource::Nofile, limit).unwrap();
    let many: Vec<_> = (0..80).map(|_| pod.socket()).collect();
    let before = pod.time();
    std::thread::sleep(Duration::from_secs(1));
    let spent = pod.time() - before;
    assert!(spent < Duration::from_millis(50), "it spins: {spent:?}");
    assert_eq!(pod.state("a", "").unwrap().id, pod.id("a"));
    drop(many);
    let mut state = StateRequest::new();
    state.id = pod.id("a");
    pod.connect().state(context(), &state).unwrap();
    pod.kill("a", "", 9).unwrap();
    assert_eq!(answer(&mut socket).0, 1, "the first has the exit");
    assert_eq!(pod.wait("a", "").unwrap(), 137);
    pod.delete("a", "").unwrap();
    pod.shut_down();
}

#[test]
fn a_log_that_no_one_reads_stops_nothing() {
    let (read, write) = rustix::pipe::pipe().unwrap();
    rustix::io::ioctl_fionbio(&write, true).unwrap();
    while rustix::io::write(&write, &[0; 4096]).is_ok() {}
    rustix::io::ioctl_fionbio(&write, false).unwrap();
    let mut pod = Pod::with_log(write.into());
    pod.stop_containerd();
    // It logs that containerd cannot be reached.
    pod.run("a", "exit 3", &Container::default());
    assert_eq!(pod.wait("a", "").unwrap(), 3);
    pod.start_containerd();
    pod.delete("a", "").unwrap();
    pod.events_of(&["a"], 4);
    pod.shut_down();
    drop(read);
}

/// A runtime whose `action` does its work, creates the first file, and ends when the second exists.
pub fn late_runtime(pod: &Pod, action: &str) -> (Container, String, String) {
    let (path, began, go) = (pod.path("late"), pod.path("done"), pod.path("go"));
    let runtime = pod::runtime().display().to_string();
    let text = format!(
        "{runtime} \"$@\"; code=$?\ncase \" $* \" in *\" {action} \"*) >{began}; \
         while ! test -e {go}; do sleep 0.01; done;; esac\nexit $code"
    );
    script(&path, &text);
    let mut with = Container::default();
    with.options.binary_name = path;
    (with, began, go)
}

#[test]
fn a_logging_program_that_fails_takes_no_other_s_exit() {
    let mut pod = Pod::new();
    let (with, began, go) = late_runtime(&pod, "exec");
    pod.run("a", "sleep 1000", &with);
    pod.exec("a", "e", "exit 5", &Container::default()).unwrap();
    let pod_ref = &pod;
    std::thread::scope(|scope| {
        let started = scope.spawn(|| pod_ref.start("a", "e"));
        eventually("the exec runs", || exists(&began).then_some(()));
        // It ends before its Start is answered.
        std::thread::sleep(Duration::from_millis(100));
        let broken = Container { stdout: "binary-v2:///bin/true".to_owned(), ..Default::default() };
        pod_ref.try_create("b", "true", &broken).unwrap_err();
        std::fs::write(&go, "").unwrap();
        started.join().unwrap().unwrap();
    });
    assert_eq!(pod.wait("a", "e").unwrap(), 5);
    pod.end("a");
    pod.shut_down();
}

#[test]
fn a_terminal_with_a_logging_program_is_answered() {
    let mut pod = Pod::new();
    let (path, log) = (pod.path("logger"), pod.path("log"));
    script(&path, &format!("exec 5>&-; cat <&3 >{log}; echo end >>{log}"));
    let stdout = format!("binary://{path}");
    let with = Container { stdout, terminal: true, ..Default::default() };
    pod.run("a", "echo out; exit 3", &with);
    assert_eq!(pod.wait("a", "").unwrap(), 3);
    pod.delete("a", "").unwrap();
    eventually("the program's end", || {
        std::fs::read_to_string(&log).ok().filter(|text| text == "out\r\nend\n")
    });
    let stdout = "binary-v2:///bin/true".to_owned();
    let with = Container { stdout, terminal: true, ..Default::default() };
    let error = pod.try_create("b", "sleep 1000", &with).unwrap_err().to_string();
    assert!(error.contains("did not call ready"), "{error}");
    assert!(!exists(format!("{}/{}", pod.path("runc/test"), pod.id("b"))));
    // Its exec is not run.
    pod.run("c", "exec sleep 1000", &Container::default());
    pod.exec("c", "e", "exec sleep 1000", &with).unwrap();
    pod.start("c", "e").unwrap_err();
    let mut request = PidsRequest::new();
    request.id = pod.id("c");
    eventually("its end", || {
        (pod.client.pids(context(), &request).unwrap().processes.len() == 1).then_some(())
    });
    pod.end("c");
    pod.shut_down();
}

/// The streams of a terminal are opened when the runtime has created the process.
#[test]
fn standard_input_that_is_closed_during_the_start_of_a_terminal_ends() {
    let mut pod = Pod::new();
    let (with, began, go) = late_runtime(&pod, "exec");
    pod.run("a", "sleep 1000", &with);
    let input = pod.fifo("in");
    let with = Container { stdin: input.clone(), terminal: true, ..Default::default() };
    pod.exec("a", "e", "exec sleep 1000", &with).unwrap();
    let pod_ref = &pod;
    std::thread::scope(|scope| {
        let started = scope.spawn(|| pod_ref.start("a", "e"));
        eventually("the exec runs", || exists(&began).then_some(()));
        pod_ref.close_input("a", "e");
        std::fs::write(&go, "").unwrap();
        started.join().unwrap().unwrap();
    });
    eventually("the end of the input", || {
        let mut options = std::fs::File::options();
        let opened = options.write(true).custom_flags(libc::O_NONBLOCK).open(&input);
        opened.is_err_and(|e| e.raw_os_error() == Some(libc::ENXIO)).then_some(())
    });
    pod.end("a");
    pod.shut_down();
}

#[test]
fn calls_for_an_exec_are_answered_when_its_container_is_deleted() {
    let mut pod = Pod::new();
    let (with, began, go) = late_runtime(&pod, "exec");
    pod.create("a", "true", &with);
    pod.exec("a", "e", "sleep 1000", &Container::default()).unwrap();
    let pod_ref = &pod;
    std::thread::scope(|scope| {
        let started = scope.spawn(|| pod_ref.start("a", "e"));
        eventually("the exec runs", || exists(&began).then_some(()));
        let killed = scope.spawn(|| pod_ref.kill("a", "e", 9));
        let waited = scope.spawn(|| pod_ref.wait("a", "e"));
        // They are queued behind the Start.
        std::thread::sleep(Duration::from_millis(100));
        pod_ref.delete("a", "").unwrap();
        assert_eq!(code(&killed.join().unwrap().unwrap_err()), Code::NOT_FOUND);
        assert_eq!(code(&waited.join().unwrap().unwrap_err()), Code::NOT_FOUND);
        std::fs::write(&go, "").unwrap();
        assert_eq!(code(&started.join().unwrap().unwrap_err()), Code::NOT_FOUND);
    });
    pod.shut_down();
}

/// containerd closes the connection when a Delete is answered. A Kill that is not answered by then
/// fails.
#[test]
fn calls_that_come_during_a_deletion_are_answered_before_it() {
    let mut pod = Pod::new();
    let (with, began, go) = late_runtime(&pod, "delete");
    pod.run("a", "true", &Container { host_pids: true, ..with });
    pod.wait("a", "").unwrap();
    let (mut delete, mut kill) = (DeleteRequest::new(), KillRequest::new());
    (delete.id, kill.id, kill.signal) = (pod.id("a"), pod.id("a"), 9);
    let mut state = StateRequest::new();
    state.id = pod.id("a");
    let mut socket = pod.socket();
    socket.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    socket.write_all(&frame(1, "Delete", &delete)).unwrap();
    eventually("the runtime deletes it", || exists(&began).then_some(()));
    socket.write_all(&frame(3, "Kill", &kill)).unwrap();
    // Calls of one connection are taken in order: with its answer the Kill was taken.
    socket.write_all(&frame(5, "State", &state)).unwrap();
    let mut answers = vec![answer(&mut socket)];
    while answers.iter().all(|(stream, _)| *stream != 5) {
        answers.push(answer(&mut socket));
    }
    std::fs::write(&go, "").unwrap();
    while answers.len() < 3 {
        answers.push(answer(&mut socket));
    }
    answers.retain(|(stream, _)| *stream != 5);
    let order: Vec<u32> = answers.iter().map(|(stream, _)| *stream).collect();
    assert_eq!(order, [3, 1]);
    let killed = Response::parse_from_bytes(&answers[0].1).unwrap();
    assert_eq!(killed.status.code.enum_value(), Ok(Code::NOT_FOUND), "{killed:?}");
    let deleted = Response::parse_from_bytes(&answers[1].1).unwrap();
    assert!(deleted.status.is_none(), "{deleted:?}");
    pod.shut_down();
}

#[test]
fn an_exec_s_name_is_not_the_container_s() {
    let mut pod = Pod::new();
    let pid = pod.run("a", "sleep 1000", &Container::default());
    pod.exec("a", "init", "exit 4", &Container::default()).unwrap();
    pod.start("a", "init").unwrap();
    assert_eq!(pod.wait("a", "init").unwrap(), 4);
    pod.delete("a", "init").unwrap();
    let written = std::fs::read_to_string(pod.bundle("a").join("init.pid")).unwrap();
    assert_eq!(written.trim().parse(), Ok(pid));
    pod.end("a");
    pod.shut_down();
}

#[test]
fn a_container_has_no_descriptor_of_the_shim() {
    let mut pod = Pod::new();
    let out = pod.fifo("out");
    let stdout = pod::reader(&out);
    let with = Container { stdout: out, ..Default::default() };
    // The last one is of the directory that is listed.
    let list = "exec echo /proc/self/fd/*";
    pod.run("a", list, &with);
    pod.wait("a", "").unwrap();
    let said = String::from_utf8(stdout.join().unwrap()).unwrap();
    let numbers: Vec<&str> =
        said.split_whitespace().filter_map(|path| path.rsplit('/').next()).collect();
    assert_eq!(numbers, ["0", "1", "2", "3"], "{said}");
    pod.delete("a", "").unwrap();
    pod.shut_down();
}

#[test]
fn a_container_that_forks_floods_and_stops_others_is_killed() {
    let mut pod = Pod::new();
    let (out, err) = (pod.fifo("out"), pod.fifo("err"));
    let with = Container { stdout: out, stderr: err, host_pids: true, ..Default::default() };
    // Orphans are the shim's children; nothing reads the output.
    let forks = "while :; do (true &); done & dd if=/dev/zero & dd if=/dev/zero >&2 & \
                 exec sleep 1000";
    pod.run("forks", forks, &with);
    let stops = "trap '' TERM; while :; do for p in /proc/[0-9]*; do p=${p#/proc/}; \
                 test $p = 1 || kill -STOP $p; done; done";
    pod.run("stops", stops, &Container::default());
    pod.exec("stops", "e", "sleep 1000", &Container::default()).unwrap();
    let pod_ref = &pod;
    std::thread::scope(|scope| {
        let started = scope.spawn(|| pod_ref.start("stops", "e"));
        std::thread::sleep(Duration::from_millis(300));
        for _ in 0..50 {
            pod_ref.state("forks", "").unwrap();
        }
        pod_ref.kill("stops", "", 9).unwrap();
        assert_eq!(pod_ref.wait("stops", "").unwrap(), 137);
        let _ = started.join().unwrap();
    });
    pod.kill("forks", "", 9).unwrap();
    assert_eq!(pod.wait("forks", "").unwrap(), 137);
    for id in ["forks", "stops"] {
        pod.delete(id, "").unwrap();
    }
    pod.shut_down();
}

/// A file system of a few pages that is filled, until it is dropped.
struct Full(String);

impl Full {
    fn new(path: String) -> Self {
        std::fs::create_dir_all(&path).unwrap();
        let flags = rustix::mount::MountFlags::empty();
        rustix::mount::mount("tmpfs", &*path, "tmpfs", flags, Some(c"size=64k")).unwrap();
        let full = Self(path);
        let mut file = std::fs::File::create(full.ballast()).unwrap();
        while file.write_all(&[0; 4096]).is_ok() {}
        full
    }

    fn ballast(&self) -> String {
        format!("{}/ballast", self.0)
    }

    fn free(&self) {
        std::fs::remove_file(self.ballast()).unwrap();
    }
}

impl Drop for Full {
    fn drop(&mut self) {
        rustix::mount::unmount(&*self.0, rustix::mount::UnmountFlags::DETACH).unwrap();
    }
}

#[test]
fn a_full_disk_refuses_a_container_and_loses_no_output() {
    let mut pod = Pod::new();
    let full = Full::new(pod.path("full"));
    let bundle = pod.path("full/b");
    std::fs::create_dir(&bundle).unwrap();
    let mut request = CreateTaskRequest::new();
    (request.id, request.bundle) = (pod.id("b"), bundle.clone());
    let options = request.options.mut_or_insert_default();
    options.type_url = "containerd.runc.v1.Options".to_owned();
    options.value = vec![0x2a, 1, b'r'];
    let error = pod.client.create(context(), &request).unwrap_err().to_string();
    assert!(error.contains("No space left"), "{error}");
    assert_eq!(code(&pod.state("b", "").unwrap_err()), Code::NOT_FOUND);
    let with = Container { stdout: format!("file://{}/log", full.0), ..Default::default() };
    let mut file = std::fs::File::create(format!("{}/log", full.0)).unwrap();
    let write = "i=0; while test $i -lt 2000; do echo line $i; i=$((i+1)); done; exit 3";
    pod.run("a", write, &with);
    std::thread::sleep(Duration::from_millis(200));
    full.free();
    file.flush().unwrap();
    assert_eq!(pod.wait("a", "").unwrap(), 3);
    pod.delete("a", "").unwrap();
    let mut text = String::new();
    std::fs::File::open(format!("{}/log", full.0)).unwrap().read_to_string(&mut text).unwrap();
    let expected: String = (0..2000).map(|number| format!("line {number}\n")).collect();
    assert!(text == expected, "{} of {} bytes", text.len(), expected.len());
    drop(full);
    pod.shut_down();
}

/// Stops the shim, and waits until it has.
pub fn stop(pod: &Pod) {
    pod::signal(&pod.shim, libc::SIGSTOP);
    let stat = format!("/proc/{}/stat", pod.shim.id());
    let is_stopped = || std::fs::read_to_string(&stat).unwrap().contains(") T ");
    eventually("the shim has stopped", || is_stopped().then_some(()));
}

/// Two containers in the cgroup of a pod, where the kills in it are counted: pids and cgroups.
fn two_containers(pod: &Pod, script: &str) -> Option<[(Pid, PathBuf); 2]> {
    if exists("/sys/fs/cgroup/memory") {
        kit::skip("cgroup version 1 has no count of the kills in a pod");
        return None;
    }
    let with = Container { memory: Some(32 << 20), pod_cgroup: true, ..Default::default() };
    Some(["a", "b"].map(|id| {
        let pid = pod.run(id, script, &with);
        let line = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
        let path = format!("/sys/fs/cgroup{}", line.trim().strip_prefix("0::").unwrap());
        (Pid::from_raw(i32::try_from(pid).unwrap()).unwrap(), path.into())
    }))
}

/// The container has ended, and systemd has removed its scope, when the shim looks.
fn ends_unseen((pid, cgroup): &(Pid, PathBuf), signal: Signal) {
    eventually("its last process ends", || {
        // Not reaped yet. A process that handles the signal may not do so at first.
        kill_process(*pid, signal).unwrap();
        std::fs::remove_dir(cgroup).ok()
    });
}

/// A container of the pod is killed, and another one then for want of memory.
#[test]
fn an_oom_kill_is_not_taken_for_that_of_a_container_whose_cgroup_is_gone() {
    let mut pod = Pod::new();
    let Some([a, (_, b)]) = two_containers(&pod, "exec sleep 1000") else { return };
    stop(&pod);
    ends_unseen(&a, Signal::KILL);
    std::fs::write(b.join("memory.max"), "0").unwrap();
    let events = || std::fs::read_to_string(b.join("memory.events")).unwrap();
    eventually("the other one is killed", || events().contains("oom_kill 1").then_some(()));
    pod::signal(&pod.shim, libc::SIGCONT);
    for id in ["a", "b"] {
        assert_eq!(pod.wait(id, "").unwrap(), 137);
        pod.delete(id, "").unwrap();
    }
    let events = pod.events_of(&["b"], 5);
    assert_eq!(events[..4], ["create b", "start b", "oom b", "exit b 137"]);
    let events = pod.events_of(&["a"], 4);
    assert_eq!(events, ["create a", "start a", "exit a 137", "delete a"]);
    pod.shut_down();
    std::fs::remove_dir(b.parent().unwrap()).unwrap();
}

/// Its first process ends by itself, and another container is killed later.
#[test]
fn an_oom_kill_in_a_container_that_has_ended_is_not_that_of_a_later_one() {
    let mut pod = Pod::new();
    let script = "trap 'trap \"\" USR1; dd if=/dev/zero of=/dev/null bs=64M; exit 3' USR1; \
                  while :; do sleep 0.1; done";
    let Some([a, b]) = two_containers(&pod, script) else { return };
    for (id, container, signal, status) in
        [("a", &a, Signal::USR1, 3), ("b", &b, Signal::KILL, 137)]
    {
        stop(&pod);
        ends_unseen(container, signal);
        pod::signal(&pod.shim, libc::SIGCONT);
        assert_eq!(pod.wait(id, "").unwrap(), status);
        pod.delete(id, "").unwrap();
    }
    let pod_events = b.1.parent().unwrap().join("memory.events");
    assert!(std::fs::read_to_string(&pod_events).unwrap().contains("oom_kill 1"));
    let events = pod.events_of(&["b"], 4);
    assert_eq!(events, ["create b", "start b", "exit b 137", "delete b"]);
    pod.shut_down();
    std::fs::remove_dir(b.1.parent().unwrap()).unwrap();
}
