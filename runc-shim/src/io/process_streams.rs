//! A process of a container: its streams, and the calls that wait for its exit.

use std::os::fd::OwnedFd;

use crate::io::Stdio;
use crate::io::stream::Stream;
use crate::ttrpc::server::Reply;

/// Maximum number of calls that wait for the exit of one process.
pub const WAITERS: usize = 1024;

/// The streams of a process, and the calls that wait for its exit.
#[derive(Debug, Default)]
pub struct ProcessStreams {
    /// The streams that containerd named.
    pub stdio: Stdio,
    /// The ids of the streams that are copied.
    pub streams: Vec<u32>,
    /// Streams that are copied once the process is created.
    pub prepared: Vec<Stream>,
    /// Keeps standard input open until CloseIO.
    pub stdin: Option<OwnedFd>,
    /// CloseIO was called, possibly before standard input was opened.
    pub stdin_closed: bool,
    /// The terminal's master.
    pub console: Option<OwnedFd>,
    /// The pid of the logging program that receives the output.
    pub logger: Option<i32>,
    /// The Wait calls that are pending.
    pub waiters: Vec<Reply>,
}
