//! The pod's sandbox as a task, whose pause is no child of the shim.

use std::fs;
use std::io::{Read as _, Write as _};

use containerd_shim_protos::api::*;
use containerd_shim_protos::ttrpc::Code;
use containerd_shim_protos::ttrpc::proto::{Request, Response};
use containerd_shim_protos::types::task::Status;
use protobuf::Message as _;

use crate::pod::{self, Container, Pod, code, context};

/// The sandbox of [`Pod`].
const ID: &str = "pod";

/// The daemon sets the pause process; the code of the answer, 0 for success.
fn set_pause(pod: &Pod, id: &str, pid: u32, start_time: u64) -> i32 {
    let mut request = Request::new();
    request.service = "pause_sandboxer.shim.v1.Sandbox".to_owned();
    request.method = "SetPause".to_owned();
    request.payload =
        format!(r#"{{"id":"{id}","pid":{pid},"start_time":{start_time}}}"#).into_bytes();
    let message = request.write_to_bytes().unwrap();
    let mut socket = pod.socket();
    let mut frame = u32::try_from(message.len()).unwrap().to_be_bytes().to_vec();
    frame.extend([0, 0, 0, 1, 1, 0]);
    frame.extend(message);
    socket.write_all(&frame).unwrap();
    let mut head = [0; 10];
    socket.read_exact(&mut head).unwrap();
    let mut body = vec![0; u32::from_be_bytes(head[..4].try_into().unwrap()) as usize];
    socket.read_exact(&mut body).unwrap();
    Response::parse_from_bytes(&body).unwrap().status.code.value()
}

fn start_time(pid: u32) -> u64 {
    let line = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let mut fields = line.rsplit_once(')').unwrap().1.split_whitespace();
    fields.nth(22 - 3).unwrap().parse().unwrap()
}

fn create(pod: &Pod) -> Result<u32, Code> {
    let mut request = CreateTaskRequest::new();
    (request.id, request.bundle) = (ID.to_owned(), pod.path("bundle"));
    pod.client.create(context(), &request).map(|answer| answer.pid).map_err(|e| code(&e))
}

fn state(pod: &Pod) -> (u32, Status) {
    let request = StateRequest { id: ID.to_owned(), ..Default::default() };
    let state = pod.client.state(context(), &request).unwrap();
    (state.pid, state.status.unwrap())
}

fn delete(pod: &Pod) -> Result<u32, Code> {
    let request = DeleteRequest { id: ID.to_owned(), ..Default::default() };
    pod.client.delete(context(), &request).map(|answer| answer.exit_status).map_err(|e| code(&e))
}

fn shut_down(pod: &Pod) {
    let request = ShutdownRequest { id: ID.to_owned(), ..Default::default() };
    pod.client.shutdown(context(), &request).unwrap();
}

/// Promise: foreign_process_survives.
#[test]
fn a_sandbox_is_created_only_with_its_pause() {
    let mut pod = Pod::new();
    let mut pause = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    let (pid, started) = (pause.id(), start_time(pause.id()));
    let invalid = Code::INVALID_ARGUMENT as i32;
    // A shim that was executed anew does not know the pause process, and runs no container in its
    // place.
    assert_eq!(create(&pod), Err(Code::FAILED_PRECONDITION));
    assert_eq!(set_pause(&pod, "other", pid, started), invalid);
    assert_eq!(set_pause(&pod, ID, 1, started), invalid);
    // The number of a process that is another one by now.
    assert_eq!(set_pause(&pod, ID, pid, started + 1), Code::NOT_FOUND as i32);
    assert_eq!(create(&pod), Err(Code::FAILED_PRECONDITION));
    assert_eq!(set_pause(&pod, ID, pid, started), 0);
    assert_eq!(set_pause(&pod, ID, pid, started), 0, "again");
    let unknown = StateRequest { id: ID.to_owned(), ..Default::default() };
    assert_eq!(code(&pod.client.state(context(), &unknown).unwrap_err()), Code::NOT_FOUND);
    assert_eq!(create(&pod), Ok(pid));
    pause.kill().unwrap();
    pause.wait().unwrap();
    pod::eventually("its end is seen", || (state(&pod).1 == Status::STOPPED).then_some(()));
    assert_eq!(create(&pod), Err(Code::FAILED_PRECONDITION));
    assert_eq!(delete(&pod), Ok(255));
    pod.shut_down();
}

/// Promise: sandbox_is_a_container.
#[test]
fn the_task_of_a_sandbox_is_its_pause() {
    let mut pod = Pod::new();
    let mut pause = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    let pid = pause.id();
    assert_eq!(set_pause(&pod, ID, pid, start_time(pid)), 0);
    assert_eq!(create(&pod), Ok(pid));
    let start = StartRequest { id: ID.to_owned(), ..Default::default() };
    assert_eq!(pod.client.start(context(), &start).unwrap().pid, pid);
    assert_eq!(state(&pod), (pid, Status::RUNNING));
    let connect = ConnectRequest { id: ID.to_owned(), ..Default::default() };
    assert_eq!(pod.client.connect(context(), &connect).unwrap().task_pid, pid);
    let pids = PidsRequest { id: ID.to_owned(), ..Default::default() };
    let pids = pod.client.pids(context(), &pids).unwrap().processes;
    assert_eq!(pids.iter().map(|process| process.pid).collect::<Vec<_>>(), [pid]);
    // containerd that has forgotten it creates it again.
    assert_eq!(create(&pod), Ok(pid));
    pod.client.start(context(), &start).unwrap();
    assert_eq!(delete(&pod), Err(Code::FAILED_PRECONDITION), "it runs");
    // The shim stays for it, with containers and without.
    pod.run("a", "sleep 1000", &Container::default());
    pod.end("a");
    shut_down(&pod);
    assert_eq!(state(&pod), (pid, Status::RUNNING));
    let client = pod.connect();
    let wait = WaitRequest { id: ID.to_owned(), ..Default::default() };
    let waits = std::thread::spawn(move || client.wait(context(), &wait).unwrap().exit_status);
    let mut kill = KillRequest::new();
    (kill.id, kill.signal) = (ID.to_owned(), 9);
    pod.client.kill(context(), &kill).unwrap();
    pause.wait().unwrap();
    // Only its parent has its status.
    assert_eq!(waits.join().unwrap(), 255);
    assert_eq!(state(&pod), (pid, Status::STOPPED));
    assert_eq!(code(&pod.client.kill(context(), &kill).unwrap_err()), Code::NOT_FOUND);
    assert_eq!(delete(&pod), Ok(255));
    assert_eq!(delete(&pod), Err(Code::NOT_FOUND));
    pod.shut_down();
}
