//! Calls of the Task API of a shim, version 3 or 2, which have the same messages.

use std::io;
use std::path::Path;
use std::time::Duration;

use containerd_shim_protos::api::{ConnectRequest, ShutdownRequest};
use protobuf::Message;
use ttrpc::asynchronous::Client;
use ttrpc::proto::Request;
use ttrpc::{Code, Error};

use crate::error::StepError;
use crate::process::Identity;

/// The services of the two versions.
const VERSION_3: &str = "containerd.task.v3.Task";
const VERSION_2: &str = "containerd.task.v2.Task";

/// Why a call has no answer.
#[derive(Debug)]
pub enum TaskError {
    /// The shim has refused.
    Refused(StepError),
    /// There was no answer: the connection is gone, or it took too long. What the shim has done is
    /// unknown.
    Lost(StepError),
}

impl TaskError {
    /// The failed step.
    pub fn step(self) -> StepError {
        match self {
            Self::Refused(step) | Self::Lost(step) => step,
        }
    }
}

/// Calls a method of one of the shim's services. The content of the answer is not needed.
async fn send_request(
    client: &Client,
    service: &str,
    method: &str,
    payload: Vec<u8>,
    within: Duration,
) -> Result<(), Error> {
    let call = Request {
        service: service.to_owned(),
        method: method.to_owned(),
        payload,
        timeout_nano: i64::try_from(within.as_nanos()).unwrap_or(i64::MAX),
        ..Default::default()
    };
    client.request(call).await.map(drop)
}

fn encode(request: &impl Message) -> Result<Vec<u8>, Error> {
    request.write_to_bytes().map_err(|e| Error::Others(e.to_string()))
}

fn failure(what: &'static str, socket: &Path, e: &Error) -> TaskError {
    match e {
        Error::RpcStatus(status) => {
            let step = StepError::at(what, socket, io::Error::other(status.message.clone()));
            match status.code() {
                Code::DEADLINE_EXCEEDED => TaskError::Lost(step),
                _ => TaskError::Refused(step),
            }
        }
        other => TaskError::Lost(StepError::at(what, socket, io::Error::other(other.to_string()))),
    }
}

/// Tells the shim to end, which it does when it serves no container.
///
/// # Errors
/// It cannot be reached, refuses, or hangs up, as one does that ends: [`TaskError::Lost`].
pub async fn shut_down(socket: &Path, id: &str, within: Duration) -> Result<(), TaskError> {
    let call = async {
        let client = connect(socket).await?;
        let request = ShutdownRequest { id: id.to_owned(), now: true, ..Default::default() };
        let payload = encode(&request)?;
        let shut_down =
            |service| send_request(&client, service, "Shutdown", payload.clone(), within);
        match shut_down(VERSION_3).await {
            Err(Error::RpcStatus(status)) if status.code() == Code::UNIMPLEMENTED => {
                shut_down(VERSION_2).await
            }
            other => other,
        }
    };
    within_time("shut down shim", socket, within, call).await
}

/// This project's own service at the sockets of its shims.
const OWN_SERVICE: &str = "pause_sandboxer.shim.v1.Sandbox";

/// Why a shim does not serve the sandbox's task.
#[derive(Debug)]
pub enum PauseRefused {
    /// It does not know how: it is another shim, or one of an earlier version.
    Unsupported,
    /// The step that failed.
    Failed(StepError),
}

/// Sends the identity of the pause process to this project's own shim, which verifies it.
///
/// # Errors
/// The shim cannot serve it, or the failed step.
pub async fn set_pause(
    socket: &Path,
    id: &str,
    pause: &Identity,
    within: Duration,
) -> Result<(), PauseRefused> {
    let call = async {
        let client = connect(socket).await?;
        let named =
            serde_json::json!({ "id": id, "pid": pause.pid, "start_time": pause.start_time });
        let payload = named.to_string().into_bytes();
        match send_request(&client, OWN_SERVICE, "SetPause", payload, within).await {
            Err(Error::RpcStatus(status)) if status.code() == Code::UNIMPLEMENTED => Ok(false),
            other => other.map(|()| true),
        }
    };
    match within_time("set pause process of the shim", socket, within, call).await {
        Ok(true) => Ok(()),
        Ok(false) => Err(PauseRefused::Unsupported),
        Err(failed) => Err(PauseRefused::Failed(failed.step())),
    }
}

/// Calls the shim about a task that it need not have: returns when it answers at all.
///
/// # Errors
/// It cannot be reached, hangs up or does not answer.
pub async fn probe(socket: &Path, id: &str, within: Duration) -> Result<(), StepError> {
    let call = async {
        let client = connect(socket).await?;
        let request = ConnectRequest { id: id.to_owned(), ..Default::default() };
        match send_request(&client, VERSION_3, "Connect", encode(&request)?, within).await {
            Err(Error::RpcStatus(_)) => Ok(()),
            other => other,
        }
    };
    within_time("ask shim", socket, within, call).await.map_err(TaskError::step)
}

async fn connect(socket: &Path) -> Result<Client, Error> {
    Client::connect(&format!("unix://{}", socket.display())).await
}

/// Also connecting takes its time without a listener that accepts.
async fn within_time<T>(
    what: &'static str,
    socket: &Path,
    within: Duration,
    call: impl Future<Output = Result<T, Error>>,
) -> Result<T, TaskError> {
    match tokio::time::timeout(within, call).await {
        Ok(answer) => answer.map_err(|e| failure(what, socket, &e)),
        Err(_) => Err(TaskError::Lost(StepError::at(what, socket, io::ErrorKind::TimedOut.into()))),
    }
}
