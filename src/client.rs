//! What operators ask of the daemon that runs, over its ttrpc socket.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::runtime::Runtime;
use ttrpc::Code;
use ttrpc::asynchronous::Client as Connection;
use ttrpc::context;

use crate::config::Config;
use crate::error::{IoContext as _, StepError};
use crate::protos::inspect::{InspectRequest, ListRequest};
use crate::protos::inspect_ttrpc::InspectClient;

pub use crate::protos::inspect::{Sandbox, Usage};

/// How long an answer may take. A daemon that still takes over its pods answers when it has them
/// all.
const PATIENCE: Duration = Duration::from_secs(15);

/// What the protocol is told of it: more, since its own error for a deadline looks like that of a
/// connection which is lost.
const DEADLINE: Duration = Duration::from_secs(2 * PATIENCE.as_secs());

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no daemon to ask.
    #[error("no daemon answers on {}: {reason} -> {advice}", .socket.display())]
    Down {
        /// The ttrpc socket.
        socket: PathBuf,
        /// What happened.
        reason: String,
        /// What to do.
        advice: &'static str,
    },
    /// It answered that it cannot.
    #[error("{0}")]
    Refused(String),
    /// No sandbox, or more than one, has an id that begins so.
    #[error("{0}")]
    NoSuch(String),
    /// This side failed.
    #[error(transparent)]
    Step(#[from] StepError),
}

/// A connection to the daemon.
pub struct Client {
    runtime: Runtime,
    inspect: InspectClient,
    socket: PathBuf,
}

impl Client {
    /// Connects to the daemon of `config`.
    ///
    /// # Errors
    /// [`Error::Down`].
    pub fn connect(config: &Config) -> Result<Self, Error> {
        let socket = config.ttrpc_socket();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .step("make the runtime")?;
        // A plain connection first: it says in the system's own words why there is none.
        std::os::unix::net::UnixStream::connect(&socket).map_err(|e| down(&socket, &e))?;
        let connected =
            runtime.block_on(Connection::connect(&format!("unix://{}", socket.display())));
        let connection = connected.map_err(|e| down(&socket, &io::Error::other(e.to_string())))?;
        Ok(Self { runtime, inspect: InspectClient::new(connection), socket })
    }

    /// All sandboxes, by id; with what their pods use if `usage` is asked for.
    ///
    /// # Errors
    /// [`Error::Down`], or what the daemon answers.
    pub fn list(&self, usage: bool) -> Result<Vec<Sandbox>, Error> {
        let mut all: Vec<Sandbox> = Vec::new();
        loop {
            let after = all.last().map(|last| last.id.clone()).unwrap_or_default();
            let request = ListRequest { after, usage, ..Default::default() };
            let page =
                self.answer(self.inspect.list(context::with_duration(DEADLINE), &request))?;
            let empty = page.sandboxes.is_empty();
            all.extend(page.sandboxes);
            if !page.more || empty {
                return Ok(all);
            }
        }
    }

    /// All that is known of the one sandbox whose id begins with `id`, or whose pod is
    /// `NAMESPACE/POD`: a JSON object.
    ///
    /// # Errors
    /// [`Error::NoSuch`], [`Error::Down`], or what the daemon answers.
    pub fn inspect(&self, id: &str) -> Result<serde_json::Value, Error> {
        let all = self.list(false)?;
        let id = resolve(id, &all)?.id.clone();
        let request = InspectRequest { id, ..Default::default() };
        let json =
            self.answer(self.inspect.inspect(context::with_duration(DEADLINE), &request))?.json;
        serde_json::from_str(&json)
            .map_err(|e| Error::Refused(format!("the daemon's answer is no JSON: {e}")))
    }

    /// Waits for what a call answers.
    fn answer<T>(&self, call: impl Future<Output = ttrpc::Result<T>>) -> Result<T, Error> {
        let answer = self.runtime.block_on(async { tokio::time::timeout(PATIENCE, call).await });
        answer.map_err(|_| self.late())?.map_err(|e| self.failed(e))
    }

    fn late(&self) -> Error {
        Error::Down {
            socket: self.socket.clone(),
            reason: format!("nothing within {} s", PATIENCE.as_secs()),
            advice: "it may still take over its pods: see its log, journalctl -u pause-sandboxer",
        }
    }

    fn failed(&self, error: ttrpc::Error) -> Error {
        match error {
            ttrpc::Error::RpcStatus(status) => match status.code() {
                Code::DEADLINE_EXCEEDED => self.late(),
                Code::UNIMPLEMENTED => {
                    Error::Refused("the daemon that runs is older than this program".to_owned())
                }
                _ => Error::Refused(status.message),
            },
            other => Error::Down {
                socket: self.socket.clone(),
                reason: other.to_string(),
                advice: "it may have been ended just now; only root may ask",
            },
        }
    }
}

fn down(socket: &Path, e: &io::Error) -> Error {
    let advice = match e.kind() {
        io::ErrorKind::PermissionDenied => "only root may ask",
        _ => "start it: systemctl start pause-sandboxer",
    };
    Error::Down { socket: socket.to_owned(), reason: e.to_string(), advice }
}

/// The one sandbox that `name` means: its id or the beginning of it, or `NAMESPACE/POD`.
fn resolve<'a>(name: &str, all: &'a [Sandbox]) -> Result<&'a Sandbox, Error> {
    let mut found: Vec<&Sandbox> = match name.split_once('/') {
        Some((namespace, pod)) => {
            all.iter().filter(|of| of.namespace == namespace && of.pod == pod).collect()
        }
        None => all
            .iter()
            .filter(|of| of.id == name || !name.is_empty() && of.id.starts_with(name))
            .collect(),
    };
    if let Some(exact) = found.iter().position(|of| of.id == name) {
        found = vec![found.swap_remove(exact)];
    }
    match found.as_slice() {
        [one] => Ok(one),
        [] => Err(Error::NoSuch(format!("there is no sandbox {name:?}"))),
        many => Err(Error::NoSuch(format!(
            "{name:?} means {} sandboxes: {}",
            many.len(),
            many.iter().map(|of| of.id.as_str()).collect::<Vec<_>>().join(", ")
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_that_is_slow_to_answer_is_not_taken_for_one_that_has_ended() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s.sock");
        // As systemd holds it while the daemon recovers: it takes connections and says nothing.
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .build()
            .unwrap();
        let address = format!("unix://{}", socket.display());
        let inspect = InspectClient::new(runtime.block_on(Connection::connect(&address)).unwrap());
        let client = Client { runtime, inspect, socket };
        for reason in [
            client.list(false).unwrap_err().to_string(),
            client.inspect("x").unwrap_err().to_string(),
        ] {
            assert!(
                reason.contains("nothing within 15 s -> it may still take over its pods"),
                "{reason}"
            );
        }
    }

    #[test]
    fn a_name_means_one_sandbox() {
        let of = |id: &str, pod: &str| Sandbox {
            id: id.to_owned(),
            pod: pod.to_owned(),
            namespace: "default".to_owned(),
            ..Default::default()
        };
        let all = [of("ab1", "web"), of("ab2", "db"), of("ab", "db"), of("c", "x")];
        for (name, id) in [("ab1", "ab1"), ("ab", "ab"), ("c", "c"), ("default/web", "ab1")] {
            assert_eq!(resolve(name, &all).unwrap().id, id, "{name}");
        }
        for (name, reason) in [
            ("a", "\"a\" means 3 sandboxes: ab1, ab2, ab"),
            ("d", "there is no sandbox \"d\""),
            ("", "there is no sandbox \"\""),
            ("default/db", "\"default/db\" means 2 sandboxes: ab2, ab"),
            ("other/web", "there is no sandbox \"other/web\""),
        ] {
            assert_eq!(resolve(name, &all).unwrap_err().to_string(), reason);
        }
    }
}
