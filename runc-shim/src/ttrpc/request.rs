//! Requests of the Task service and of the daemon's own service.

use std::collections::VecDeque;
use std::time::Instant;

use containerd_shim_protos::api;
use protobuf::Message;

use crate::error::{Code, Error};
use crate::ttrpc::pause_process::{self, PauseProcess};
use crate::ttrpc::server::Reply;

const SERVICE: &str = "containerd.task.v3.Task";

/// A request of the Task service.
#[derive(Debug)]
pub enum Request {
    /// The state of a process.
    State(api::StateRequest),
    /// Creates a container.
    Create(Box<api::CreateTaskRequest>),
    /// Starts a process.
    Start(api::StartRequest),
    /// Deletes a process.
    Delete(api::DeleteRequest),
    /// All pids of a container.
    Pids(api::PidsRequest),
    /// Pauses a container.
    Pause(api::PauseRequest),
    /// Resumes a container.
    Resume(api::ResumeRequest),
    /// Writes a checkpoint of a container.
    Checkpoint(api::CheckpointTaskRequest),
    /// Sends a signal to a process.
    Kill(api::KillRequest),
    /// Adds an exec.
    Exec(api::ExecProcessRequest),
    /// Changes the size of a terminal.
    ResizePty(api::ResizePtyRequest),
    /// Closes standard input.
    CloseIo(api::CloseIORequest),
    /// Changes a container's resources.
    Update(api::UpdateTaskRequest),
    /// Waits for the exit of a process.
    Wait(api::WaitRequest),
    /// The metrics of a container.
    Stats(api::StatsRequest),
    /// The pids of shim and container.
    Connect(api::ConnectRequest),
    /// Shuts down the shim, if it has no container and its sandbox no running task.
    Shutdown,
    /// Sets the pause process; a method of the daemon's own service.
    SetPause(PauseProcess),
}

/// Decodes a request.
pub fn decode(service: &str, method: &str, payload: &[u8]) -> Result<Request, Error> {
    fn parse<M: Message>(payload: &[u8]) -> Result<M, Error> {
        M::parse_from_bytes(payload).map_err(Error::from)
    }
    let p = payload;
    Ok(match method {
        _ if service == pause_process::SERVICE => {
            Request::SetPause(PauseProcess::decode(method, p)?)
        }
        _ if service != SERVICE => {
            return Err(Error::new(Code::UNIMPLEMENTED, format!("service {service}")));
        }
        "State" => Request::State(parse(p)?),
        "Create" => Request::Create(Box::new(parse(p)?)),
        "Start" => Request::Start(parse(p)?),
        "Delete" => Request::Delete(parse(p)?),
        "Pids" => Request::Pids(parse(p)?),
        "Pause" => Request::Pause(parse(p)?),
        "Resume" => Request::Resume(parse(p)?),
        "Checkpoint" => Request::Checkpoint(parse(p)?),
        "Kill" => Request::Kill(parse(p)?),
        "Exec" => Request::Exec(parse(p)?),
        "ResizePty" => Request::ResizePty(parse(p)?),
        "CloseIO" => Request::CloseIo(parse(p)?),
        "Update" => Request::Update(parse(p)?),
        "Wait" => Request::Wait(parse(p)?),
        "Stats" => Request::Stats(parse(p)?),
        "Connect" => Request::Connect(parse(p)?),
        "Shutdown" => {
            parse::<api::ShutdownRequest>(p)?;
            Request::Shutdown
        }
        _ => return Err(Error::new(Code::UNIMPLEMENTED, format!("method {method}"))),
    })
}

impl Request {
    /// Whether this is a Create.
    pub fn is_create(&self) -> bool {
        matches!(self, Self::Create(_))
    }
}

/// Moves the calls of a queue whose deadline has passed to `late`.
pub fn take_late(queue: &mut VecDeque<(Reply, Request)>, now: Instant, late: &mut Vec<Reply>) {
    late.extend(queue.iter().map(|(reply, _)| *reply).filter(|reply| reply.is_late(now)));
    queue.retain(|(reply, _)| !reply.is_late(now));
}

/// The task and the exec that a request is for; the exec is empty for the task's first process, and
/// both are for a request that is for no task.
pub fn task_of(request: &Request) -> (&str, &str) {
    match request {
        Request::State(r) => (&r.id, &r.exec_id),
        Request::Create(r) => (&r.id, ""),
        Request::Start(r) => (&r.id, &r.exec_id),
        Request::Delete(r) => (&r.id, &r.exec_id),
        Request::Pids(r) => (&r.id, ""),
        Request::Pause(r) => (&r.id, ""),
        Request::Resume(r) => (&r.id, ""),
        Request::Checkpoint(r) => (&r.id, ""),
        Request::Kill(r) => (&r.id, &r.exec_id),
        Request::Exec(r) => (&r.id, ""),
        Request::ResizePty(r) => (&r.id, &r.exec_id),
        Request::CloseIo(r) => (&r.id, &r.exec_id),
        Request::Update(r) => (&r.id, ""),
        Request::Wait(r) => (&r.id, &r.exec_id),
        Request::Stats(r) => (&r.id, ""),
        Request::Connect(r) => (&r.id, ""),
        Request::SetPause(_) | Request::Shutdown => ("", ""),
    }
}
