//! Client of the running daemon for operators, over its ttrpc socket.

use std::io;
use std::path::{Path, PathBuf};
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
use containerd_api::protos::inspect::{InspectRequest, ListRequest};
use containerd_api::protos::inspect_ttrpc::InspectClient;

pub use containerd_api::protos::inspect::{Sandbox, Usage};

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
    /// No sandbox, or more than one, has that name or id prefix.
    #[error("{0}")]
    NoSuch(String),
}

/// A connection to the daemon.
pub struct Client {
    inspect: InspectClient,
    socket: PathBuf,
    state_dir: PathBuf,
}

impl Client {
    /// Connects to the daemon of `config`.
    ///
    /// # Errors
    /// [`ClientError::Down`].
    pub async fn connect(config: &Config) -> Result<Self, ClientError> {
        let (socket, state_dir) = (config.ttrpc_socket(), config.state_dir.clone());
        match UnixStream::connect(&socket).await {
            Ok(stream) => {
                let inspect = InspectClient::new(Connection::new(Socket::new(stream)));
                Ok(Self { inspect, socket, state_dir })
            }
            // The queue of its socket is full.
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Err(late(&socket, &state_dir)),
            Err(e) => Err(down(&socket, &e)),
        }
    }

    /// All sandboxes, sorted by id; with their resource usage if `usage` is set.
    ///
    /// # Errors
    /// [`ClientError::Down`], or what the daemon answers.
    pub async fn list(&self, usage: bool) -> Result<Vec<Sandbox>, ClientError> {
        let mut all: Vec<Sandbox> = Vec::new();
        loop {
            let after = all.last().map(|last| last.id.clone()).unwrap_or_default();
            let request = ListRequest { after, usage, ..Default::default() };
            let call = self.inspect.list(context::with_duration(DEADLINE), &request);
            let page = self.wait_for_response(call).await?;
            let empty = page.sandboxes.is_empty();
            all.extend(page.sandboxes);
            if !page.more || empty {
                return Ok(all);
            }
        }
    }

    /// Everything known about the one sandbox with this id or id prefix, or with the pod
    /// `NAMESPACE/POD`: a JSON object.
    ///
    /// # Errors
    /// [`ClientError::NoSuch`], [`ClientError::Down`], or what the daemon answers.
    pub async fn inspect(&self, id: &str) -> Result<serde_json::Value, ClientError> {
        let all = self.list(false).await?;
        let id = resolve(id, &all)?.id.clone();
        let request = InspectRequest { id, ..Default::default() };
        let call = self.inspect.inspect(context::with_duration(DEADLINE), &request);
        let json = self.wait_for_response(call).await?.json;
        serde_json::from_str(&json)
            .map_err(|e| ClientError::Refused(format!("the daemon's response is not JSON: {e}")))
    }

    /// Waits for the response of a call.
    async fn wait_for_response<T>(
        &self,
        call: impl Future<Output = ttrpc::Result<T>>,
    ) -> Result<T, ClientError> {
        let response = tokio::time::timeout(TIMEOUT, call).await;
        response.map_err(|_| late(&self.socket, &self.state_dir))?.map_err(|e| self.failed(e))
    }

    fn failed(&self, error: ttrpc::Error) -> ClientError {
        match error {
            ttrpc::Error::RpcStatus(status) => match status.code() {
                Code::DEADLINE_EXCEEDED => late(&self.socket, &self.state_dir),
                Code::UNIMPLEMENTED => {
                    ClientError::Refused("the running daemon is older than this program".to_owned())
                }
                _ => ClientError::Refused(status.message),
            },
            other => ClientError::Down {
                socket: self.socket.clone(),
                reason: other.to_string(),
                advice: "the daemon closed the connection: run the command again, as root; if it \
                         fails again, see `systemctl status pause-sandboxer`"
                    .to_owned(),
            },
        }
    }
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

fn late(socket: &Path, state_dir: &Path) -> ClientError {
    let (reason, advice) = silence(state_dir);
    let reason = format!("no response within {} s: {reason}", TIMEOUT.as_secs());
    ClientError::Down { socket: socket.to_owned(), reason, advice }
}

fn down(socket: &Path, e: &io::Error) -> ClientError {
    let advice = match e.kind() {
        io::ErrorKind::PermissionDenied => "run the command as root",
        _ => "start it: systemctl start pause-sandboxer",
    };
    let (socket, advice) = (socket.to_owned(), advice.to_owned());
    ClientError::Down { socket, reason: e.to_string(), advice }
}

/// The one sandbox with this id, id prefix or `NAMESPACE/POD`.
fn resolve<'a>(name: &str, all: &'a [Sandbox]) -> Result<&'a Sandbox, ClientError> {
    let mut found: Vec<&Sandbox> = match name.split_once('/') {
        Some((namespace, pod)) => {
            all.iter().filter(|one| one.namespace == namespace && one.pod == pod).collect()
        }
        None => all
            .iter()
            .filter(|one| one.id == name || !name.is_empty() && one.id.starts_with(name))
            .collect(),
    };
    if let Some(exact) = found.iter().position(|one| one.id == name) {
        found = vec![found.swap_remove(exact)];
    }
    match found.as_slice() {
        [one] => Ok(one),
        [] => Err(ClientError::NoSuch(format!("no sandbox {name:?}"))),
        many => Err(ClientError::NoSuch(format!(
            "{name:?} matches {} sandboxes: {}",
            many.len(),
            many.iter().map(|one| one.id.as_str()).collect::<Vec<_>>().join(", ")
        ))),
    }
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
        let client = Client::connect(&config).await.unwrap();
        for reason in [
            client.list(false).await.unwrap_err().to_string(),
            client.inspect("x").await.unwrap_err().to_string(),
        ] {
            let expected = format!(
                "no response within 2 s: process {} starts, or recovers its pods; wait for it",
                std::process::id()
            );
            assert!(reason.contains(&expected), "{reason}");
        }
    }

    #[tokio::test]
    async fn a_full_queue_of_the_socket_is_no_reason_to_wait() {
        let dir = tempfile::tempdir().unwrap();
        let config = Config { socket: dir.path().join("s.sock"), ..Config::default() };
        let listener = std::os::unix::net::UnixListener::bind(config.ttrpc_socket()).unwrap();
        nix::sys::socket::listen(&listener, nix::sys::socket::Backlog::new(1).unwrap()).unwrap();
        let mut waiting = Vec::new();
        let reason = loop {
            match Client::connect(&config).await {
                Ok(client) => waiting.push(client),
                Err(e) => break e.to_string(),
            }
        };
        assert!(!waiting.is_empty() && reason.contains("no response within 2 s"), "{reason}");
    }

    #[test]
    fn a_name_means_one_sandbox() {
        let sandbox = |id: &str, pod: &str| Sandbox {
            id: id.to_owned(),
            pod: pod.to_owned(),
            namespace: "default".to_owned(),
            ..Default::default()
        };
        let all =
            [sandbox("ab1", "web"), sandbox("ab2", "db"), sandbox("ab", "db"), sandbox("c", "x")];
        for (name, id) in [("ab1", "ab1"), ("ab", "ab"), ("c", "c"), ("default/web", "ab1")] {
            assert_eq!(resolve(name, &all).unwrap().id, id, "{name}");
        }
        for (name, reason) in [
            ("a", "\"a\" matches 3 sandboxes: ab1, ab2, ab"),
            ("d", "no sandbox \"d\""),
            ("", "no sandbox \"\""),
            ("default/db", "\"default/db\" matches 2 sandboxes: ab2, ab"),
            ("other/web", "no sandbox \"other/web\""),
        ] {
            assert_eq!(resolve(name, &all).unwrap_err().to_string(), reason);
        }
    }
}
