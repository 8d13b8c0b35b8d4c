//! A process of a container: its streams, and the calls that wait for its exit or its deletion.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use super::waiters::Waiters;
use crate::error::Error;
use crate::io::Stdio;
use crate::io::copiers::Copiers;
use crate::io::stream::Stream;
use crate::process_key::ProcessKey;
use crate::services::Services;
use crate::ttrpc::server::Reply;

/// How long a deletion waits for the last output, and for the exit of the logging program.
const DRAIN: Duration = Duration::from_secs(10);

/// The streams of a process, and the calls that wait for it.
#[derive(Debug, Default)]
pub struct ProcessStreams {
    /// The streams that containerd named.
    pub stdio: Stdio,
    /// Keeps standard input open until CloseIO or the deletion.
    stdin: Option<OwnedFd>,
    /// CloseIO was called, possibly before standard input was opened.
    stdin_closed: bool,
    /// The terminal's master.
    pub console: Option<OwnedFd>,
    /// The pid of the logging program that receives the output, if it runs.
    pub logger: Option<i32>,
    /// The calls of Wait.
    pub waiters: Waiters,
    /// The Delete that waits for the last output, and its deadline.
    drain: Option<(Reply, Instant)>,
}

impl ProcessStreams {
    /// The streams of a process that does not exist yet.
    pub fn new(stdio: Stdio) -> Self {
        Self { stdio, ..Self::default() }
    }

    /// Begins to copy the streams of a process that was created.
    ///
    /// # Errors
    /// The process has no copier thread.
    pub fn attach(
        &mut self,
        copiers: &mut Copiers,
        key: &ProcessKey,
        streams: Vec<Stream>,
        stdin: Option<OwnedFd>,
    ) -> Result<(), Error> {
        if !streams.is_empty() {
            let missing = || Error::unknown("the process has no copier thread");
            copiers.find(key).ok_or_else(missing)?.copy(streams);
        }
        self.stdin = stdin.filter(|_| !self.stdin_closed);
        Ok(())
    }

    /// Keeps the terminal of the process, and has the copier thread close a former one, because the
    /// last close of a terminal may block.
    pub fn set_console(
        &mut self,
        copiers: &mut Copiers,
        key: &ProcessKey,
        console: Option<OwnedFd>,
    ) {
        let former = std::mem::replace(&mut self.console, console);
        copiers.close(key, former.into_iter().collect());
    }

    /// Closes standard input.
    pub fn close_stdin(&mut self) {
        (self.stdin, self.stdin_closed) = (None, true);
    }

    /// Forgets this logging program, because its pid can be reused once it is reaped. False: it is
    /// not that of this process.
    pub fn logger_ended(&mut self, pid: i32) -> bool {
        self.logger.take_if(|logger| *logger == pid).is_some()
    }

    /// Handles the exit of the process: the terminal is closed when its output is copied. The same
    /// is done when the output has ended before, because its reader is gone: the terminal hangs up.
    pub fn exited(&mut self, copiers: &mut Copiers, key: &ProcessKey) {
        let Some(console) = self.console.take() else { return };
        if let Some(copier) = copiers.find(key) {
            copier.finish(console);
        }
    }

    /// Whether the last output is being copied, or is read by the logging program.
    fn is_draining(&self, copiers: &Copiers, key: &ProcessKey) -> bool {
        self.logger.is_some() || copiers.is_copying(key)
    }

    /// Has a Delete wait for the last output, if there is any. True: it waits.
    ///
    /// # Errors
    /// Another Delete waits.
    pub fn drain(
        &mut self,
        copiers: &Copiers,
        key: &ProcessKey,
        reply: Reply,
    ) -> Result<bool, Error> {
        if self.drain.is_some() {
            return Err(Error::state("the process is being deleted"));
        }
        let is_draining = self.is_draining(copiers, key);
        self.drain = is_draining.then(|| (reply, Instant::now() + DRAIN));
        Ok(is_draining)
    }

    /// Whether a Delete waits for the last output.
    pub fn has_drain(&self) -> bool {
        self.drain.is_some()
    }

    /// The Delete that has waited until there is no output any more.
    pub fn take_drained(&mut self, copiers: &Copiers, key: &ProcessKey) -> Option<Reply> {
        let is_draining = self.is_draining(copiers, key);
        self.drain.take_if(|_| !is_draining).map(|(reply, _)| reply)
    }

    /// The Delete that has waited for too long.
    pub fn take_late_drain(&mut self, now: Instant) -> Option<Reply> {
        self.drain.take_if(|(_, at)| *at <= now).map(|(reply, _)| reply)
    }

    /// When a Delete has waited for too long.
    pub fn deadline(&self) -> Option<Instant> {
        self.drain.map(|(_, at)| at)
    }

    /// Closes the streams and the terminal of a deleted process, fails the calls that wait for it,
    /// and ends its logging program.
    pub fn close(mut self, services: &mut Services, key: &ProcessKey) {
        services.copiers.close(key, self.console.into_iter().collect());
        services.copiers.end(key);
        self.waiters.fail(services);
        if let Some((reply, _)) = self.drain {
            services.respond(reply, Err(Error::not_found("process was deleted")));
        }
        if let Some(pid) = self.logger {
            services.children.end_logger(pid);
        }
    }
}
