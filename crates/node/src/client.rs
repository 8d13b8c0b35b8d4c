//! Client of the running daemon for operators, over its ttrpc socket.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use protobuf::well_known_types::empty::Empty;
use tokio::net::UnixStream;
use ttrpc::Code;
use ttrpc::asynchronous::Client as Connection;
use ttrpc::asynchronous::transport::Socket;
use ttrpc::context;

use crate::daemon_process::silence;
use base::config::{CONTAINERD_NAMESPACE, Config};
use base::error::StepError;
use containerd_api::GrpcEndpoint;
use containerd_api::protos::controller::ControllerShutdownRequest;
use containerd_api::protos::inspect::ListRequest;
use containerd_api::protos::inspect_ttrpc::InspectClient;

pub use containerd_api::protos::inspect::Sandbox;

/// Timeout of a call. A daemon that recovers its pods may take longer: the error says so.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(2);

/// Deadline passed to ttrpc: longer, as its own error for a deadline equals that of a lost
/// connection.
const DEADLINE: Duration = Duration::from_secs(2 * TIMEOUT.as_secs());

/// Timeout for the removal of a sandbox.
const REMOVED: Duration = Duration::from_secs(30);

/// A failed call.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No daemon responds.
    #[error("cannot reach the daemon at {}: {reason}; {advice}", .socket.display())]
    Down {
        /// The ttrpc socket.
        socket: PathBuf,
        /// The error of the connection or of the call.
        reason: String,
        /// The remedy.
        advice: String,
    },
    /// The daemon rejected the call.
    #[error("{0}")]
    Refused(String),
}

/// All sandboxes of the daemon of `config`, sorted by id.
///
/// # Errors
/// [`ClientError::Down`], or what the daemon answers.
pub async fn list(config: &Config) -> Result<Vec<Sandbox>, ClientError> {
    let stream = UnixStream::connect(config.ttrpc_socket()).await;
    let stream = stream.map_err(|e| match e.kind() {
        // The queue of its socket is full.
        io::ErrorKind::WouldBlock => late(config),
        _ => down(config, &e),
    })?;
    let inspect = InspectClient::new(Connection::new(Socket::new(stream)));
    let mut all: Vec<Sandbox> = Vec::new();
    loop {
        let after = all.last().map(|last| last.id.clone()).unwrap_or_default();
        let request = ListRequest { after, ..Default::default() };
        let call = inspect.list(context::with_duration(DEADLINE), &request);
        let answer = tokio::time::timeout(TIMEOUT, call).await.map_err(|_| late(config))?;
        let page = answer.map_err(|e| failed(config, e))?;
        let empty = page.sandboxes.is_empty();
        all.extend(page.sandboxes);
        if !page.more || empty {
            return Ok(all);
        }
    }
}

fn failed(config: &Config, error: ttrpc::Error) -> ClientError {
    match error {
        ttrpc::Error::RpcStatus(status) => match status.code() {
            Code::DEADLINE_EXCEEDED => late(config),
            Code::UNIMPLEMENTED => {
                ClientError::Refused("the running daemon is older than this program".to_owned())
            }
            _ => ClientError::Refused(status.message),
        },
        other => ClientError::Down {
            socket: config.ttrpc_socket(),
            reason: other.to_string(),
            advice: "the daemon closed the connection: run the command again, as root; if it \
                     fails again, see `systemctl status pause-sandboxer`"
                .to_owned(),
        },
    }
}

fn late(config: &Config) -> ClientError {
    let (reason, advice) = silence(&config.state_dir);
    let reason = format!("no response within {} s: {reason}", TIMEOUT.as_secs());
    ClientError::Down { socket: config.ttrpc_socket(), reason, advice }
}

fn down(config: &Config, e: &io::Error) -> ClientError {
    let advice = match e.kind() {
        io::ErrorKind::PermissionDenied => "run the command as root",
        _ => "start it: systemctl start pause-sandboxer",
    };
    let (socket, advice) = (config.ttrpc_socket(), advice.to_owned());
    ClientError::Down { socket, reason: e.to_string(), advice }
}

/// Removes a sandbox, as containerd does. For one that containerd does not know.
///
/// # Errors
/// The call failed.
pub(crate) async fn remove_sandbox(config: &Config, id: &str) -> Result<(), StepError> {
    let daemon = GrpcEndpoint::new(&config.socket, CONTAINERD_NAMESPACE);
    let request = ControllerShutdownRequest { sandbox_id: id.to_owned(), ..Default::default() };
    let method = "containerd.services.sandbox.v1.Controller/Shutdown";
    Ok(daemon.call::<Empty>("remove sandbox", method, &request, REMOVED).await.map(drop)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Promise: calls_wait_for_recovery.
    #[tokio::test(start_paused = true)]
    async fn a_slow_daemon_is_reported_as_recovering() {
        let dir = tempfile::tempdir().unwrap();
        let config = Config {
            socket: dir.path().join("s.sock"),
            state_dir: dir.path().to_owned(),
            ..Config::default()
        };
        // systemd holds the socket while the daemon recovers: it accepts connections and does not
        // answer.
        let _listener = std::os::unix::net::UnixListener::bind(config.ttrpc_socket()).unwrap();
        std::fs::write(dir.path().join("lock"), std::process::id().to_string()).unwrap();
        let reason = list(&config).await.unwrap_err().to_string();
        let expected = format!(
            "no response within 2 s: process {} starts, or recovers its pods; wait for it",
            std::process::id()
        );
        assert!(reason.contains(&expected), "{reason}");
    }

    #[tokio::test]
    async fn a_full_queue_of_the_socket_is_no_reason_to_wait() {
        let dir = tempfile::tempdir().unwrap();
        let config = Config { socket: dir.path().join("s.sock"), ..Config::default() };
        let listener = std::os::unix::net::UnixListener::bind(config.ttrpc_socket()).unwrap();
        nix::sys::socket::listen(&listener, nix::sys::socket::Backlog::new(1).unwrap()).unwrap();
        let mut waiting = Vec::new();
        while let Ok(stream) = UnixStream::connect(config.ttrpc_socket()).await {
            waiting.push(stream);
        }
        let reason = list(&config).await.unwrap_err().to_string();
        assert!(!waiting.is_empty() && reason.contains("no response within 2 s"), "{reason}");
    }
}
