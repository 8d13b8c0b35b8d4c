//! The wire: gRPC and ttrpc transports over one handler.
//!
//! containerd dials the gRPC socket; the ttrpc socket beside it serves the same calls and those of
//! operators (`inspect.rs`). What may be asked and how it is answered is in `handler.rs`, how
//! errors become codes in `status.rs`; neither transport adds to it.
//!
//! Only root connects, so no number of connections or of requests in memory is enforced. Messages
//! and headers are bounded, a panic is an answer, and a listener that cannot accept a connection
//! retries. On shutdown the daemon ends every Wait with UNAVAILABLE and nothing else, because
//! containerd takes any other end of a Wait for the exit of its sandbox. Other calls have a second
//! to complete.

use std::fmt::Display;
use std::future::Future;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::controller::SandboxService;
use crate::error::StepError;
use crate::telemetry::Telemetry;

mod convert;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
mod grpc;
mod handler;
mod inspect;
mod listener;
mod namespace;
mod response;
mod status;
mod ttrpc;

pub use listener::bind;
pub use status::{Code, Status, code};

use handler::Handler;
use listener::Listener;

/// How long connections may take to end after a stop: calls in progress (at most 1 s) and answers.
const DRAIN: Duration = Duration::from_secs(2);
/// The user who may call.
const ROOT: libc::uid_t = 0;

/// The two sockets of a daemon and what answers on them.
#[derive(Debug)]
pub struct Server<V> {
    sandboxes: watch::Receiver<Option<Arc<V>>>,
    grpc: UnixListener,
    ttrpc: UnixListener,
    telemetry: Arc<Telemetry>,
}

impl<V: SandboxService> Server<V> {
    /// Serves `sandboxes` on two bound and listening sockets, made by [`bind`] or inherited.
    pub fn new(sandboxes: Arc<V>, grpc: UnixListener, ttrpc: UnixListener) -> Self {
        Self::before_recovery(watch::channel(Some(sandboxes)).1, grpc, ttrpc)
    }

    /// As [`Server::new`], before recovery is done: connections are accepted, HTTP/2 is served, and
    /// calls wait for the service. If it never comes, its sender is dropped.
    pub fn before_recovery(
        sandboxes: watch::Receiver<Option<Arc<V>>>,
        grpc: UnixListener,
        ttrpc: UnixListener,
    ) -> Self {
        Self { sandboxes, grpc, ttrpc, telemetry: Arc::default() }
    }

    /// Counts calls in `telemetry`.
    #[must_use]
    pub fn counted(mut self, telemetry: Arc<Telemetry>) -> Self {
        self.telemetry = telemetry;
        self
    }

    /// Serves until `stop` says true or its sender is gone. Then ends every Wait with UNAVAILABLE,
    /// and every other call that takes more than another second, and returns within 3 seconds,
    /// whatever the callers do.
    ///
    /// # Errors
    /// A listener that cannot be used.
    ///
    /// # Panics
    /// Outside a tokio runtime with I/O and time.
    pub async fn run(self, stop: watch::Receiver<bool>) -> Result<(), StepError> {
        let handler = Handler::new(self.sandboxes, stop, self.telemetry);
        let grpc = Listener::new(self.grpc, ROOT)?;
        let ttrpc = Listener::new(self.ttrpc, ROOT)?;
        tokio::join!(
            serve("gRPC", grpc, &handler, |stream| grpc::serve(stream, handler.clone())),
            serve("ttrpc", ttrpc, &handler, |stream| ttrpc::serve(stream, handler.clone())),
        );
        Ok(())
    }
}

/// Serves the connections of one socket.
async fn serve<V, E, F>(
    name: &str,
    mut acceptor: Listener,
    handler: &Handler<V>,
    connection: impl Fn(UnixStream) -> F,
) where
    V: SandboxService,
    E: Display + Send + 'static,
    F: Future<Output = Result<(), E>> + Send + 'static,
{
    let mut tasks = JoinSet::new();
    let stopping = handler.stopping();
    tokio::pin!(stopping);
    loop {
        tokio::select! {
            biased;
            () = &mut stopping => break,
            Some(ended) = tasks.join_next() => match ended {
                Ok(Ok(())) => {}
                Ok(Err(e)) => log::debug!("{name} connection ended: {e}"),
                Err(e) => log::error!("task of a {name} connection failed: {e}"),
            },
            stream = acceptor.next() => {
                tasks.spawn(connection(stream));
            }
        }
    }
    // No new connection is accepted. The backlog of an inherited socket is for the daemon's
    // successor.
    drop(acceptor);
    let done = async { while tasks.join_next().await.is_some() {} };
    if tokio::time::timeout(DRAIN, done).await.is_err() {
        log::warn!(
            "{name}: closing {} connections that took over {} s to end",
            tasks.len(),
            DRAIN.as_secs()
        );
        tasks.shutdown().await;
    }
}
