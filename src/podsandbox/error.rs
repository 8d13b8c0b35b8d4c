//! Why an RPC was refused or failed.

use std::io;

use crate::error::{StepError, StepErrors, bounded};

/// Why an RPC was refused or failed. The wire's table gives each variant its RPC code.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// A field of the request is not what it must be.
    #[error("sandbox {id:?}: {field}: {reason}")]
    Invalid {
        /// The sandbox id as it was given, shortened.
        id: String,
        /// The field of the request.
        field: String,
        /// The reason for the caller.
        reason: String,
    },
    /// There is no such sandbox.
    #[error("sandbox {id}: not found")]
    NotFound {
        /// The sandbox id.
        id: String,
    },
    /// There is such a sandbox already.
    #[error("sandbox {id}: already exists")]
    AlreadyExists {
        /// The sandbox id.
        id: String,
    },
    /// The sandbox's state does not allow the RPC.
    #[error("sandbox {id}: cannot {rpc} in state {state}")]
    State {
        /// The sandbox id.
        id: String,
        /// The RPC, lower case.
        rpc: &'static str,
        /// The state, lower case.
        state: &'static str,
    },
    /// Steps failed. What a Create or Start had made has been undone.
    #[error("{}{rpc}: {steps}", subject(id))]
    Failed {
        /// The sandbox id; empty if the call is about all sandboxes.
        id: String,
        /// The RPC, lower case.
        rpc: &'static str,
        /// The steps that failed; a cleanup may have several.
        steps: StepErrors,
    },
    /// Work that was begun did not end within its time; it continues in the background.
    #[error("sandbox {id}: {rpc}: timed out after {seconds} s; still running in the background")]
    Timeout {
        /// The sandbox id.
        id: String,
        /// The RPC, lower case.
        rpc: &'static str,
        /// The time that it was given, seconds.
        seconds: u64,
    },
    /// The daemon is stopping; the caller should try again.
    #[error("sandbox {id}: the sandboxer is stopping")]
    Stopping {
        /// The sandbox id.
        id: String,
    },
    /// The sandbox's record is quarantined.
    #[error(
        "sandbox {id}: its record is quarantined: {reason}; see `pause-sandboxer list -o json`"
    )]
    Quarantined {
        /// The sandbox id.
        id: String,
        /// Why.
        reason: String,
    },
    /// A fault of the daemon itself, such as a task that panicked.
    #[error("sandbox {id}: {rpc}: internal fault: {reason}")]
    Fault {
        /// The sandbox id.
        id: String,
        /// The RPC, lower case.
        rpc: &'static str,
        /// The reason for operators.
        reason: String,
    },
}

impl Error {
    /// A field of the request of sandbox `id` is not what it must be.
    pub fn invalid(id: &str, field: &str, reason: String) -> Self {
        Self::Invalid { id: shorten(id), field: field.to_owned(), reason }
    }

    /// The file that a field of the request names cannot be read. The field is not what it must be,
    /// unless the node lacks what a reader needs.
    pub fn unreadable(id: &str, field: &str, path: &str, e: io::Error) -> Self {
        match e.raw_os_error() {
            Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM) => {
                let steps = StepError::at("read", path, e).into();
                Self::Failed { id: shorten(id), rpc: "create", steps }
            }
            _ => Self::invalid(id, field, format!("{}: {e}", shorten(path))),
        }
    }
}

/// The beginning of a message that names the sandbox, if there is one.
fn subject(id: &str) -> String {
    if id.is_empty() { String::new() } else { format!("sandbox {id}: ") }
}

/// Shortens a text of a caller to fit one line of a message.
pub fn shorten(text: &str) -> String {
    bounded(text, 80)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_not_read_for_lack_of_resources_makes_no_field_invalid() {
        let unreadable = |errno| {
            let e = io::Error::from_raw_os_error(errno);
            Error::unreadable("a", "netns_path", "/run/netns/x", e)
        };
        for errno in [libc::EMFILE, libc::ENFILE, libc::ENOMEM] {
            assert!(matches!(unreadable(errno), Error::Failed { .. }), "{errno}");
        }
        for errno in [libc::ENOENT, libc::ENOTDIR, libc::ELOOP, libc::EACCES] {
            assert!(matches!(unreadable(errno), Error::Invalid { .. }), "{errno}");
        }
    }
}
