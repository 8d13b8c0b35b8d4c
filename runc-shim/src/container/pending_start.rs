//! A start that waits for a logging program.

use std::time::Instant;

use crate::io::Prepared;
use crate::process_key::ProcessKey;
use crate::ttrpc::server::Reply;

/// The start of a process that waits for its logging program to be ready.
#[derive(Debug)]
pub struct PendingStart {
    /// The process.
    pub key: ProcessKey,
    /// The caller that waits for the result, if any.
    pub reply: Option<Reply>,
    /// The streams of the process.
    pub prepared: Prepared,
    /// The start fails if the logging program is not ready at this time.
    pub deadline: Instant,
    /// The runtime has created the process already: it has a terminal, which came with that.
    pub started: bool,
}
