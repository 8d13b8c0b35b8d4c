//! Requests of the Task service and of the daemon's own service.

use containerd_shim_protos::api;
use protobuf::Message;

use crate::error::{Code, Error};
use crate::process_key::ProcessKey;
use crate::ttrpc::pause_process::{self, PauseProcess};

/// The names of the Task service in containerd 2 and 1, with the same messages.
const SERVICES: [&str; 2] = ["containerd.task.v3.Task", "containerd.task.v2.Task"];

/// A request.
#[derive(Debug)]
pub struct Request {
    /// The process that it is for; without ids if it is for none.
    pub key: ProcessKey,
    /// The method, with the fields of the message that are used besides the ids.
    pub method: Method,
}

/// A method of the Task service, or of the daemon's own service.
#[derive(Debug)]
pub enum Method {
    /// The state of a process.
    State,
    /// Creates a container.
    Create(Box<api::CreateTaskRequest>),
    /// Starts a process.
    Start,
    /// Deletes a process.
    Delete,
    /// All pids of a container.
    Pids,
    /// Pauses a container.
    Pause,
    /// Resumes a container.
    Resume,
    /// Writes a checkpoint of a container.
    Checkpoint(api::CheckpointTaskRequest),
    /// Sends a signal to a process.
    Kill(api::KillRequest),
    /// Adds an exec to a container.
    Exec(api::ExecProcessRequest),
    /// Changes the size of a terminal.
    ResizePty(api::ResizePtyRequest),
    /// Closes standard input.
    CloseIo,
    /// Changes a container's resources.
    Update(api::UpdateTaskRequest),
    /// Waits for the exit of a process.
    Wait,
    /// The metrics of a container.
    Stats,
    /// The pids of shim and container.
    Connect,
    /// Shuts down the shim, if it has no container and its sandbox no running task.
    Shutdown,
    /// Sets the pause process; a method of the daemon's own service.
    SetPause(PauseProcess),
}

/// Decodes a request.
pub fn decode(service: &str, method: &str, payload: &[u8]) -> Result<Request, Error> {
    use Method as M;
    use api::*;
    fn parse<T: Message>(payload: &[u8]) -> Result<T, Error> {
        T::parse_from_bytes(payload).map_err(Error::from)
    }
    let (p, none) = (payload, String::new());
    let (id, exec, method) = match method {
        _ if service == pause_process::SERVICE => {
            (none.clone(), none, M::SetPause(PauseProcess::decode(method, p)?))
        }
        _ if !SERVICES.contains(&service) => {
            return Err(Error::new(Code::UNIMPLEMENTED, format!("service {service}")));
        }
        "State" => parse(p).map(|r: StateRequest| (r.id, r.exec_id, M::State))?,
        "Create" => {
            parse(p).map(|r: CreateTaskRequest| (r.id.clone(), none, M::Create(r.into())))?
        }
        "Start" => parse(p).map(|r: StartRequest| (r.id, r.exec_id, M::Start))?,
        "Delete" => parse(p).map(|r: DeleteRequest| (r.id, r.exec_id, M::Delete))?,
        "Pids" => parse(p).map(|r: PidsRequest| (r.id, none, M::Pids))?,
        "Pause" => parse(p).map(|r: PauseRequest| (r.id, none, M::Pause))?,
        "Resume" => parse(p).map(|r: ResumeRequest| (r.id, none, M::Resume))?,
        "Checkpoint" => {
            parse(p).map(|r: CheckpointTaskRequest| (r.id.clone(), none, M::Checkpoint(r)))?
        }
        "Kill" => parse(p).map(|r: KillRequest| (r.id.clone(), r.exec_id.clone(), M::Kill(r)))?,
        "Exec" => parse(p).map(|r: ExecProcessRequest| (r.id.clone(), none, M::Exec(r)))?,
        "ResizePty" => parse(p)
            .map(|r: ResizePtyRequest| (r.id.clone(), r.exec_id.clone(), M::ResizePty(r)))?,
        "CloseIO" => parse(p).map(|r: CloseIORequest| (r.id, r.exec_id, M::CloseIo))?,
        "Update" => parse(p).map(|r: UpdateTaskRequest| (r.id.clone(), none, M::Update(r)))?,
        "Wait" => parse(p).map(|r: WaitRequest| (r.id, r.exec_id, M::Wait))?,
        "Stats" => parse(p).map(|r: StatsRequest| (r.id, none, M::Stats))?,
        "Connect" => parse(p).map(|r: ConnectRequest| (r.id, none, M::Connect))?,
        "Shutdown" => parse(p).map(|_: ShutdownRequest| (none.clone(), none, M::Shutdown))?,
        _ => return Err(Error::new(Code::UNIMPLEMENTED, format!("method {method}"))),
    };
    Ok(Request { key: ProcessKey { id, exec }, method })
}
