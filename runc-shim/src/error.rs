//! Errors of calls: a gRPC status code and a message.

use std::fmt;
use std::io;

pub use containerd_shim_protos::ttrpc::Code;

/// Why a call fails.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    /// The status code.
    pub code: Code,
    /// The message, which containerd shows.
    pub message: String,
}

impl Error {
    /// An error.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    /// [`Code::UNKNOWN`].
    pub fn unknown(message: impl Into<String>) -> Self {
        Self::new(Code::UNKNOWN, message)
    }

    /// [`Code::NOT_FOUND`].
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(Code::NOT_FOUND, message)
    }

    /// [`Code::FAILED_PRECONDITION`].
    pub fn state(message: impl Into<String>) -> Self {
        Self::new(Code::FAILED_PRECONDITION, message)
    }

    /// The error of a call whose deadline has passed.
    pub fn deadline_passed() -> Self {
        Self::new(Code::DEADLINE_EXCEEDED, "the deadline of the call has passed")
    }

    /// The same error with `what` in front of its message.
    pub fn context(self, what: impl fmt::Display) -> Self {
        Self { message: format!("{what}: {}", self.message), ..self }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

impl From<io::Error> for Error {
    fn from(e: io::Error) -> Self {
        Self::unknown(e.to_string())
    }
}

impl From<rustix::io::Errno> for Error {
    fn from(e: rustix::io::Errno) -> Self {
        Self::from(io::Error::from(e))
    }
}

impl From<protobuf::Error> for Error {
    fn from(e: protobuf::Error) -> Self {
        Self::new(Code::INVALID_ARGUMENT, format!("malformed message: {e}"))
    }
}

/// Adds a description of the failed operation to an error.
pub trait Context<T> {
    /// The error with `what` in front.
    fn context(self, what: impl fmt::Display) -> Result<T, Error>;
}

impl<T, E: Into<Error>> Context<T> for Result<T, E> {
    fn context(self, what: impl fmt::Display) -> Result<T, Error> {
        self.map_err(|e| e.into().context(what))
    }
}
