//! The one table from error to RPC code. gRPC and ttrpc number their codes alike.

use std::io;

pub use containerd_api::framing::{Code, Status};

use crate::error::StepError;
use crate::podsandbox::Error;

/// The status of a call of `method` that failed with `error`.
///
/// A Wait for a sandbox whose record is quarantined is UNAVAILABLE: containerd takes any other end
/// of a Wait for the exit of the sandbox, and ends the pod.
pub(super) fn of_call(method: &str, error: &Error) -> Status {
    let code = match error {
        Error::Quarantined { .. } if method == "Wait" => Code::UNAVAILABLE,
        _ => code(error),
    };
    Status::new(code, error.to_string())
}

/// The status when the daemon stops: the only answer after which containerd retries.
pub fn stopping() -> Status {
    Status::new(Code::UNAVAILABLE, "the sandboxer is stopping")
}

/// The RPC code of an error.
///
/// Only a daemon that is stopping is UNAVAILABLE, since containerd then retries indefinitely. Some
/// calls of Wait are as well: `of_call`, and those of another namespace.
pub fn code(error: &Error) -> Code {
    match error {
        Error::Invalid { .. } => Code::INVALID_ARGUMENT,
        Error::NotFound { .. } => Code::NOT_FOUND,
        Error::AlreadyExists { .. } => Code::ALREADY_EXISTS,
        Error::State { .. } => Code::FAILED_PRECONDITION,
        Error::Failed { steps, .. } => {
            // Free resources help only if every step failed for lack of them.
            let mut codes = steps.into_iter().map(step_code);
            let first = codes.next().unwrap_or(Code::INTERNAL);
            if codes.all(|code| code == first) { first } else { Code::INTERNAL }
        }
        Error::Timeout { .. } => Code::DEADLINE_EXCEEDED,
        Error::Stopping { .. } => Code::UNAVAILABLE,
        Error::Quarantined { .. } | Error::Fault { .. } => Code::INTERNAL,
    }
}

/// The code's name in gRPC's list of codes.
pub(super) fn name(code: Code) -> &'static str {
    match code {
        Code::OK => "OK",
        Code::CANCELLED => "CANCELLED",
        Code::UNKNOWN => "UNKNOWN",
        Code::INVALID_ARGUMENT => "INVALID_ARGUMENT",
        Code::DEADLINE_EXCEEDED => "DEADLINE_EXCEEDED",
        Code::NOT_FOUND => "NOT_FOUND",
        Code::ALREADY_EXISTS => "ALREADY_EXISTS",
        Code::PERMISSION_DENIED => "PERMISSION_DENIED",
        Code::UNAUTHENTICATED => "UNAUTHENTICATED",
        Code::RESOURCE_EXHAUSTED => "RESOURCE_EXHAUSTED",
        Code::FAILED_PRECONDITION => "FAILED_PRECONDITION",
        Code::ABORTED => "ABORTED",
        Code::OUT_OF_RANGE => "OUT_OF_RANGE",
        Code::UNIMPLEMENTED => "UNIMPLEMENTED",
        Code::INTERNAL => "INTERNAL",
        Code::UNAVAILABLE => "UNAVAILABLE",
        Code::DATA_LOSS => "DATA_LOSS",
    }
}

/// A node that ran out of something is distinguished from a broken node.
fn step_code(step: &StepError) -> Code {
    match step.io().raw_os_error() {
        Some(
            libc::ENOSPC
            | libc::EDQUOT
            | libc::ENOMEM
            | libc::EMFILE
            | libc::ENFILE
            | libc::EAGAIN
            | libc::ENOBUFS,
        ) => Code::RESOURCE_EXHAUSTED,
        None if matches!(
            step.io().kind(),
            io::ErrorKind::OutOfMemory | io::ErrorKind::StorageFull
        ) =>
        {
            Code::RESOURCE_EXHAUSTED
        }
        // The node is misconfigured: its operator must act, and a retry does not help.
        None if step.io().kind() == io::ErrorKind::Unsupported => Code::FAILED_PRECONDITION,
        _ => Code::INTERNAL,
    }
}

/// The id of the sandbox that failed.
pub(super) fn sandbox(error: &Error) -> &str {
    match error {
        Error::Invalid { id, .. }
        | Error::NotFound { id }
        | Error::AlreadyExists { id }
        | Error::State { id, .. }
        | Error::Failed { id, .. }
        | Error::Timeout { id, .. }
        | Error::Stopping { id }
        | Error::Quarantined { id, .. }
        | Error::Fault { id, .. } => id,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::StepErrors;

    fn step(errno: i32) -> StepError {
        StepError::at("mount", "/run/x", io::Error::from_raw_os_error(errno))
    }

    #[test]
    fn an_error_about_all_sandboxes_names_none() {
        let error = Error::Failed { id: String::new(), rpc: "list", steps: step(5).into() };
        assert_eq!(error.to_string(), "list: mount /run/x: Input/output error (os error 5)");
    }

    fn failed(steps: StepErrors) -> Code {
        code(&Error::Failed { id: String::new(), rpc: "start", steps })
    }

    /// containerd retries indefinitely on UNAVAILABLE, and takes a cancelled Wait for an exit.
    #[test]
    fn no_errno_is_unavailable_or_cancelled() {
        for errno in 1..134 {
            let code = failed(step(errno).into());
            assert!(
                matches!(code, Code::INTERNAL | Code::RESOURCE_EXHAUSTED),
                "errno {errno}: {code:?}"
            );
        }
    }

    #[test]
    fn lack_of_resources_is_distinguished_from_faults() {
        let one = |errno| failed(step(errno).into());
        for errno in
            [libc::ENOSPC, libc::EDQUOT, libc::ENOMEM, libc::EMFILE, libc::ENFILE, libc::EAGAIN]
        {
            assert_eq!(one(errno), Code::RESOURCE_EXHAUSTED);
        }
        let many = |errnos: &[i32]| failed(errnos.iter().map(|errno| step(*errno)).collect());
        assert_eq!(many(&[libc::ENOSPC, libc::EMFILE]), Code::RESOURCE_EXHAUSTED);
        assert_eq!(many(&[libc::ENOSPC, libc::EBUSY]), Code::INTERNAL);
        assert_eq!(many(&[]), Code::INTERNAL);
    }

    #[test]
    fn a_node_in_the_wrong_state_and_one_without_a_system_call_have_different_codes() {
        let code = |e: io::Error| failed(StepError::new("x", e).into());
        assert_eq!(
            code(io::Error::new(io::ErrorKind::Unsupported, "apart")),
            Code::FAILED_PRECONDITION
        );
        assert_eq!(code(io::Error::from_raw_os_error(libc::ENOSYS)), Code::INTERNAL);
    }
}
