//! Calls of the Task API of a shim, version 3 or, where the shim does not know it, version 2.

use std::io;
use std::path::Path;
use std::time::Duration;

use containerd_shim_protos::api::{ConnectRequest, ShutdownRequest};
use containerd_shim_protos::shim_async::{Client, TaskClient};
use ttrpc::{Code, Error};

use crate::error::Step;
use crate::protos::{task_v2, task_v2_ttrpc};

/// Tells the shim to end, which it does when it serves no container.
///
/// # Errors
/// It cannot be reached, or refuses.
pub async fn shut_down(socket: &Path, id: &str, within: Duration) -> Result<(), Step> {
    let call = async {
        let client = connect(socket).await?;
        let request = ShutdownRequest { id: id.to_owned(), now: true, ..Default::default() };
        match TaskClient::new(client.clone()).shutdown(context(within), &request).await {
            Err(e) if unimplemented(&e) => {
                let request = task_v2::ShutdownRequest { id: id.to_owned(), now: true, ..Default::default() };
                task_v2_ttrpc::TaskClient::new(client).shutdown(context(within), &request).await.map(drop)
            }
            other => other.map(drop),
        }
    };
    bounded("shut down shim", socket, within, call).await
}

/// Asks the shim for a task that it need not have: returns when it answers anything at all.
///
/// # Errors
/// It cannot be reached, hangs up or is silent.
pub async fn answers(socket: &Path, id: &str, within: Duration) -> Result<(), Step> {
    let call = async {
        let client = connect(socket).await?;
        let request = ConnectRequest { id: id.to_owned(), ..Default::default() };
        match TaskClient::new(client).connect(context(within), &request).await {
            Err(Error::RpcStatus(_)) | Ok(_) => Ok(()),
            Err(e) => Err(e),
        }
    };
    bounded("ask shim", socket, within, call).await
}

async fn connect(socket: &Path) -> Result<Client, Error> {
    Client::connect(&format!("unix://{}", socket.display())).await
}

fn context(within: Duration) -> ttrpc::context::Context {
    ttrpc::context::with_timeout(i64::try_from(within.as_nanos()).unwrap_or(i64::MAX))
}

fn unimplemented(e: &Error) -> bool {
    matches!(e, Error::RpcStatus(status) if status.code() == Code::UNIMPLEMENTED)
}

/// Also connecting takes its time where nobody accepts.
async fn bounded<T>(
    what: &'static str,
    socket: &Path,
    within: Duration,
    call: impl Future<Output = Result<T, Error>>,
) -> Result<T, Step> {
    match tokio::time::timeout(within, call).await {
        Ok(answer) => answer.map_err(|e| Step::at(what, socket, io::Error::other(e.to_string()))),
        Err(_) => Err(Step::at(what, socket, io::ErrorKind::TimedOut.into())),
    }
}
