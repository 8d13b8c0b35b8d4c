//! Deadlines of calls: a command that hangs is killed at the deadline, and nothing of it is left.
//! The same holds for a command that delays an exit.

use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use containerd_shim_protos::api::*;
use containerd_shim_protos::protobuf::Message;
use containerd_shim_protos::ttrpc::Code;
use containerd_shim_protos::ttrpc::proto::{Request, Response};
use rustix::process::{Pid, Signal, kill_process};

use crate::crash::traces;
use crate::ends::slow_runtime;
use crate::hostile::{answer, late_runtime, raw, stop};
use crate::pod::{self, Container, Pod, eventually, exists};

/// The time limit of a call that hangs, and the time by which other calls must be answered.
const LIMIT: Duration = Duration::from_secs(6);
const PROMPT: Duration = Duration::from_secs(40);

/// Sends a call with a time limit.
pub fn send(socket: &mut UnixStream, method: &str, message: &impl Message, limit: Duration) {
    let mut request = Request::new();
    request.service = "containerd.task.v3.Task".to_owned();
    request.method = method.to_owned();
    request.timeout_nano = i64::try_from(limit.as_nanos()).unwrap();
    request.payload = message.write_to_bytes().unwrap();
    socket.write_all(&raw(1, 1, &request.write_to_bytes().unwrap())).unwrap();
}

/// A connection whose answers come in time.
fn socket(pod: &Pod) -> UnixStream {
    let socket = pod.socket();
    socket.set_read_timeout(Some(PROMPT)).unwrap();
    socket
}

/// The code of the next answer.
fn code(socket: &mut UnixStream) -> Code {
    let (_, payload) = answer(socket);
    Response::parse_from_bytes(&payload).unwrap().status.code()
}

/// A runtime that does `before`, and then starts a child and hangs, when `action` is called. The
/// pid of the child is in the file.
fn hanging_runtime(pod: &Pod, action: &str, before: &str) -> (Container, String) {
    let child = pod.path(&format!("child-of-{action}"));
    let commands = format!(
        "{before}\n\
         sleep 1000 & echo $! >{child}.new; mv {child}.new {child}; wait"
    );
    (pod.with_commands_before(action, &commands), child)
}

/// The process that a file names is gone.
fn has_ended(file: &str) {
    let pid = eventually("the child", || std::fs::read_to_string(file).ok());
    let process = format!("/proc/{}", pid.trim());
    eventually(&process, || (!exists(&process)).then_some(()));
}

fn update(pod: &Pod) -> UpdateTaskRequest {
    let mut request = UpdateTaskRequest::new();
    request.id = pod.id("a");
    request.resources.mut_or_insert_default().value = b"{}".to_vec();
    request
}

fn kill(pod: &Pod) -> KillRequest {
    let mut request = KillRequest::new();
    (request.id, request.signal) = (pod.id("a"), 9);
    request
}

fn open_files(pod: &Pod) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", pod.shim.id())).unwrap().count()
}

/// Promise: runtime_command_has_a_deadline.
#[test]
fn an_exec_that_hangs_ends_with_all_its_processes() {
    let mut pod = Pod::new();
    let (with, child) = hanging_runtime(&pod, "exec", ":");
    // The container's own output: its copier thread has files of its own, and stays.
    let with = Container { stdout: pod.fifo("own"), ..with };
    pod.run("a", "exec sleep 1000", &with);
    let before = open_files(&pod);
    let mut start = StartRequest::new();
    (start.id, start.exec_id) = (pod.id("a"), "e".to_owned());
    let with = Container { stdout: pod.fifo("out"), ..Default::default() };
    let _reader = pod::open(&with.stdout);
    pod.exec("a", "e", "true", &with).unwrap();
    let mut started = socket(&pod);
    send(&mut started, "Start", &start, LIMIT);
    assert_eq!(code(&mut started), Code::DEADLINE_EXCEEDED);
    drop(started);
    has_ended(&child);
    pod.delete("a", "e").unwrap();
    eventually("its files are closed", || (open_files(&pod) <= before).then_some(()));
    pod.end("a");
    pod.shut_down();
}

/// A runtime that adds a hook, which hangs, to the config of the container that it creates.
fn hooking_runtime(pod: &Pod) -> (Container, String) {
    let (hook, child) = (pod.path("hook"), pod.path("child"));
    pod::script(&hook, &format!("echo $$ >{child}; exec sleep 1000"));
    let hooks = format!("\"hooks\":{{\"createRuntime\":[{{\"path\":\"{hook}\"}}]}}");
    let commands = format!("sed -i 's|\"linux\":|{hooks},&|' config.json");
    (pod.with_commands_before("create", &commands), child)
}

/// Promise: runtime_command_has_a_deadline.
#[test]
fn a_create_whose_hook_hangs_leaves_nothing() {
    let mut pod = Pod::new();
    let (with, child) = hooking_runtime(&pod);
    std::thread::scope(|scope| {
        let created =
            scope.spawn(|| pod.try_create_within("a", "exec sleep 1000", &with, LIMIT * 2));
        eventually("the hook", || exists(&child).then_some(()));
        assert!(!traces(&pod).is_empty());
        // containerd, whose time ends first, has been answered that there is no container.
        std::fs::remove_dir_all(pod.bundle("a")).unwrap();
        created.join().unwrap().unwrap_err();
    });
    has_ended(&child);
    eventually("its end", || pod.delete("a", "").err().filter(|e| pod::code(e) == Code::NOT_FOUND));
    assert_eq!(traces(&pod), Vec::<String>::new());
    assert!(!exists(pod.runtime_state("a")));
    pod.run("a", "exit 3", &Container::default());
    assert_eq!(pod.wait("a", "").unwrap(), 3);
    pod.delete("a", "").unwrap();
    pod.shut_down();
}

/// Deletes a container while it is created, as containerd does with one whose Create it has given
/// up: nothing is left when the Delete is answered.
fn cancels(pod: &Pod, with: &Container, began: &str) {
    std::thread::scope(|scope| {
        let created = scope.spawn(|| pod.try_create("a", "exec sleep 1000", with));
        eventually("the creation", || exists(began).then_some(()));
        // There is no exec; this cancels nothing.
        assert_eq!(pod::code(&pod.delete("a", "e").unwrap_err()), Code::NOT_FOUND);
        assert!(!created.is_finished());
        let begun = Instant::now();
        let deleted = pod.delete("a", "").unwrap_err();
        let (took, left) = (begun.elapsed(), traces(pod));
        // Ends one that was not cancelled.
        std::fs::write(pod.path("go"), "").unwrap();
        created.join().unwrap().unwrap_err();
        assert_eq!(pod::code(&deleted), Code::NOT_FOUND);
        assert_eq!(left, Vec::<String>::new());
        assert!(took < PROMPT / 2, "{took:?}");
    });
    assert_eq!(traces(pod), Vec::<String>::new());
    assert!(!exists(pod.runtime_state("a")));
}

#[test]
fn a_delete_cancels_the_creation_of_its_container() {
    let mut pod = Pod::new();
    let (with, began, go) = late_runtime(&pod, "create");
    cancels(&pod, &with, &began);
    // The logging program of the next container is not ready yet.
    for path in [&began, &go] {
        std::fs::remove_file(path).unwrap();
    }
    let (path, done) = (pod.path("logger"), pod.path("ended"));
    let text = format!(
        "trap '>{done}; exit' TERM; >{began}\n\
         while ! test -e {go}; do sleep 0.01; done; exec 5>&-; cat <&3"
    );
    pod::script(&path, &text);
    let with = Container { stdout: format!("binary://{path}"), ..Default::default() };
    cancels(&pod, &with, &began);
    eventually("the end of the logging program", || exists(&done).then_some(()));
    pod.run("a", "exit 3", &Container::default());
    assert_eq!(pod.wait("a", "").unwrap(), 3);
    pod.delete("a", "").unwrap();
    assert_eq!(pod.events_of(&["a"], 4), ["create a", "start a", "exit a 3", "delete a"]);
    pod.shut_down();
}

/// The shim reads both at once, and the Delete first.
#[test]
fn a_delete_cancels_a_creation_whose_logging_program_becomes_ready_then() {
    let mut pod = Pod::new();
    let (with, child) = hanging_runtime(&pod, "create", ":");
    let (path, [began, go, ready]) = (pod.path("logger"), ["b", "g", "r"].map(|it| pod.path(it)));
    let text = format!(
        ">{began}; while ! test -e {go}; do sleep 0.01; done; exec 5>&-; >{ready}; cat <&3"
    );
    pod::script(&path, &text);
    let with = Container { stdout: format!("binary://{path}"), ..with };
    let mut delete = DeleteRequest::new();
    delete.id = pod.id("a");
    let mut deleted = socket(&pod);
    // The shim has accepted the connection.
    send(&mut deleted, "Delete", &delete, LIMIT);
    assert_eq!(code(&mut deleted), Code::NOT_FOUND);
    std::thread::scope(|scope| {
        let created = scope.spawn(|| pod.try_create_within("a", "exec sleep 1000", &with, LIMIT));
        eventually("the logging program", || exists(&began).then_some(()));
        stop(&pod);
        send(&mut deleted, "Delete", &delete, PROMPT);
        std::fs::write(&go, "").unwrap();
        eventually("it is ready", || exists(&ready).then_some(()));
        pod::signal(&pod.shim, libc::SIGCONT);
        assert_eq!(code(&mut deleted), Code::NOT_FOUND);
        created.join().unwrap().unwrap_err();
    });
    assert!(!exists(&child), "the runtime was started");
    pod.shut_down();
}

/// The process that a file names, once it does.
fn started(file: &str) -> Pid {
    eventually("the child", || {
        Pid::from_raw(std::fs::read_to_string(file).ok()?.trim().parse().ok()?)
    })
}

fn parent(pid: Pid) -> Pid {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let after_name = stat.rsplit(") ").next().unwrap();
    Pid::from_raw(after_name.split(' ').nth(1).unwrap().parse().unwrap()).unwrap()
}

/// As the OOM killer does.
#[test]
fn a_create_whose_runtime_another_program_kills_leaves_no_cgroup() {
    let mut pod = Pod::new();
    let (with, child) = hooking_runtime(&pod);
    std::thread::scope(|scope| {
        let created = scope.spawn(|| pod.try_create("a", "exec sleep 1000", &with));
        let hook = started(&child);
        assert!(traces(&pod).iter().any(|trace| trace.starts_with("cgroup ")));
        kill_process(parent(hook), Signal::KILL).unwrap();
        created.join().unwrap().unwrap_err();
        kill_process(hook, Signal::KILL).unwrap();
    });
    assert_eq!(traces(&pod), Vec::<String>::new());
    assert!(!exists(pod.runtime_state("a")));
    pod.shut_down();
}

/// The stand-in of a runtime begins the container anew, instead of restoring it, and is killed
/// before the runtime has recorded its state.
#[test]
fn a_restore_whose_runtime_another_program_kills_leaves_nothing_after_a_delete() {
    let mut pod = Pod::new();
    let (path, runtime) = (pod.path("restores"), pod::runtime().display().to_string());
    let state = pod.runtime_state("a");
    let text = format!(
        "case \" $* \" in *\" restore \"*) {runtime} --root $2 run --detach {id}\n\
         rm -r {state}/*; kill -9 $$;; esac\n\
         exec {runtime} \"$@\"",
        id = pod.id("a")
    );
    pod::script(&path, &text);
    let mut with = Container { checkpoint: pod.path("image"), ..Default::default() };
    with.options.binary_name = path;
    for _ in 0..2 {
        assert_eq!(pod.create("a", "exec sleep 1000", &with), 0);
        pod.start("a", "").unwrap_err();
        let left = traces(&pod);
        assert!(left.iter().any(|trace| trace.starts_with("process ")), "{left:?}");
        pod.delete("a", "").unwrap();
        assert_eq!(traces(&pod), Vec::<String>::new());
        assert!(!exists(&state));
    }
    pod.shut_down();
}

/// Kills the first process of a container without the runtime.
fn kill_first(pid: u32) {
    kill_process(Pid::from_raw(i32::try_from(pid).unwrap()).unwrap(), Signal::KILL).unwrap();
}

/// A kill of the remaining processes, an exec, and a start, as with a hook `poststart`.
#[test]
fn commands_that_hang_delay_exits_for_a_limited_time() {
    let mut pod = Pod::new();
    let (with, kill_child) = hanging_runtime(&pod, "kill", ":");
    let with = Container { host_pids: true, ..with };
    let of_kill = pod.run("a", "sleep 1000 & exec sleep 1000", &with);
    let (with, exec_child) = hanging_runtime(&pod, "exec", ":");
    let of_exec = pod.run("b", "exec sleep 1000", &with);
    let runtime = pod::runtime().display().to_string();
    let (with, start_child) = hanging_runtime(&pod, "start", &format!("{runtime} \"$@\""));
    let of_start = pod.create("c", "exec sleep 1000", &with);
    pod.exec("b", "e", "true", &Container::default()).unwrap();
    let mut starts = ["b", "c"].map(|id| {
        let mut start = StartRequest::new();
        start.id = pod.id(id);
        if id == "b" {
            start.exec_id = "e".to_owned();
        }
        let mut started = socket(&pod);
        send(&mut started, "Start", &start, Duration::ZERO);
        started
    });
    for child in [&exec_child, &start_child] {
        eventually("the command", || exists(child).then_some(()));
    }
    for pid in [of_kill, of_exec, of_start] {
        kill_first(pid);
    }
    for id in ["a", "b", "c"] {
        assert_eq!(pod.wait(id, "").unwrap(), 137);
    }
    let [of_exec, of_container] = &mut starts;
    assert_eq!(code(of_exec), Code::DEADLINE_EXCEEDED);
    assert_eq!(code(of_container), Code::OK, "containerd drops the exit code of one that failed");
    for child in [kill_child, exec_child, start_child] {
        has_ended(&child);
    }
    pod.delete("b", "e").unwrap();
    for id in ["a", "b", "c"] {
        pod.delete(id, "").unwrap();
    }
    for id in ["a", "b", "c"] {
        let [create, start, delete] = ["create", "start", "delete"].map(|it| format!("{it} {id}"));
        assert_eq!(pod.events_of(&[id], 4), [create, start, format!("exit {id} 137"), delete]);
    }
    assert_eq!(traces(&pod), Vec::<String>::new());
    pod.shut_down();
}

#[test]
fn a_command_that_hangs_keeps_no_kill_waiting() {
    let mut pod = Pod::new();
    let (with, child) = hanging_runtime(&pod, "update", ":");
    pod.run("a", "exec sleep 1000", &with);
    let (mut hanging, mut queued) = (socket(&pod), socket(&pod));
    send(&mut hanging, "Update", &update(&pod), LIMIT);
    eventually("the command", || exists(&child).then_some(()));
    // The caller has gone before the kill is tried.
    send(&mut queued, "Kill", &kill(&pod), LIMIT / 30);
    assert_eq!(code(&mut queued), Code::DEADLINE_EXCEEDED);
    assert_eq!(code(&mut hanging), Code::DEADLINE_EXCEEDED);
    has_ended(&child);
    assert_eq!(pod.status("a"), Status::RUNNING);
    std::fs::remove_file(&child).unwrap();
    send(&mut hanging, "Update", &update(&pod), LIMIT);
    eventually("the command", || exists(&child).then_some(()));
    let begun = Instant::now();
    pod.end("a");
    assert!(begun.elapsed() < PROMPT, "{:?}", begun.elapsed());
    pod.shut_down();
}

/// At its deadline, or by another program, as the OOM killer does.
#[test]
fn a_pause_that_is_killed_leaves_the_container_running() {
    for (limit, error) in [(LIMIT, Code::DEADLINE_EXCEEDED), (PROMPT, Code::UNKNOWN)] {
        let mut pod = Pod::new();
        let runtime = pod::runtime().display().to_string();
        let (with, child) = hanging_runtime(&pod, "pause", &format!("{runtime} \"$@\""));
        pod.run("a", "exec sleep 1000", &with);
        let mut pause = PauseRequest::new();
        pause.id = pod.id("a");
        let mut socket = socket(&pod);
        send(&mut socket, "Pause", &pause, limit);
        let hanging = started(&child);
        if limit == PROMPT {
            kill_process(parent(hanging), Signal::KILL).unwrap();
        }
        assert_eq!(code(&mut socket), error);
        is_not_frozen(&pod);
        if limit == PROMPT {
            kill_process(hanging, Signal::KILL).unwrap();
        }
        has_ended(&child);
        pod.end("a");
        pod.shut_down();
    }
}

/// The container runs, and so does an exec in it.
fn is_not_frozen(pod: &Pod) {
    assert_eq!(pod.status("a"), Status::RUNNING);
    pod.exec("a", "e", "exit 3", &Container::default()).unwrap();
    pod.start("a", "e").unwrap();
    assert_eq!(pod.wait("a", "e").unwrap(), 3);
}

#[test]
fn calls_of_wait_that_were_given_up_do_not_count() {
    let mut pod = Pod::new();
    pod.run("a", "exec sleep 1000", &Container::default());
    let mut wait = WaitRequest::new();
    wait.id = pod.id("a");
    let mut given_up = socket(&pod);
    let limit = Duration::from_millis(100);
    for _ in 0..1024 {
        send(&mut given_up, "Wait", &wait, limit);
    }
    let mut state = StateRequest::new();
    state.id = pod.id("a");
    // The shim reads the calls of a connection in their order: their time begins before this. It
    // answers only those that are late at once.
    send(&mut given_up, "State", &state, LIMIT);
    while code(&mut given_up) == Code::DEADLINE_EXCEEDED {}
    std::thread::sleep(limit);
    pod.end("a");
    pod.shut_down();
}

#[test]
fn calls_that_were_given_up_while_a_command_ran_do_not_count() {
    let mut pod = Pod::new();
    let (with, began, go) = slow_runtime(&pod, "pause");
    pod.run("a", "exec sleep 1000", &with);
    let (mut pause, mut resume) = (PauseRequest::new(), ResumeRequest::new());
    (pause.id, resume.id) = (pod.id("a"), pod.id("a"));
    let (mut paused, mut given_up, mut resumed) = (socket(&pod), socket(&pod), socket(&pod));
    send(&mut paused, "Pause", &pause, PROMPT);
    eventually("the command", || exists(&began).then_some(()));
    let limit = Duration::from_millis(100);
    for _ in 0..1024 {
        send(&mut given_up, "Resume", &resume, limit);
    }
    let mut state = StateRequest::new();
    state.id = pod.id("a");
    // The shim reads the calls of a connection in their order: their time begins before this. It
    // answers only those that are late at once.
    send(&mut given_up, "State", &state, LIMIT);
    while code(&mut given_up) == Code::DEADLINE_EXCEEDED {}
    std::thread::sleep(limit);
    send(&mut resumed, "Resume", &resume, PROMPT);
    std::fs::write(&go, "").unwrap();
    assert_eq!((code(&mut paused), code(&mut resumed)), (Code::OK, Code::OK));
    assert_eq!(pod.status("a"), Status::RUNNING);
    pod.end("a");
    pod.shut_down();
}

#[test]
fn a_deletion_that_hangs_ends_and_can_be_repeated() {
    let mut pod = Pod::new();
    let child = pod.path("child");
    let commands = format!(
        "test -e {child} || {{ sleep 1000 & echo $! >{child}.new; mv {child}.new {child}; wait; }}"
    );
    let with = pod.with_commands_before("delete", &commands);
    pod.run("a", "exit 3", &with);
    assert_eq!(pod.wait("a", "").unwrap(), 3);
    let mut delete = DeleteRequest::new();
    delete.id = pod.id("a");
    let mut socket = pod.socket();
    // The shim ends the runtime after a minute, although the caller waits without a limit.
    socket.set_read_timeout(Some(PROMPT * 3)).unwrap();
    send(&mut socket, "Delete", &delete, Duration::ZERO);
    eventually("the deletion", || exists(&child).then_some(()));
    assert_eq!(code(&mut socket), Code::DEADLINE_EXCEEDED);
    has_ended(&child);
    assert_eq!(pod.delete("a", "").unwrap().exit_status, 3);
    assert!(!exists(pod.runtime_state("a")));
    pod.shut_down();
}
