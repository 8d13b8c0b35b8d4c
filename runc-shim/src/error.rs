//! Errors of calls: a gRPC status code and a message.

use std::fmt;
use std::io;

/// The gRPC status codes that the shim uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum Code {
    /// Anything else, such as a failure of the OCI runtime.
    Unknown = 2,
    /// The request is malformed.
    InvalidArgument = 3,
    /// The operation took too long.
    DeadlineExceeded = 4,
    /// There is no such container or process.
    NotFound = 5,
    /// There is already such a container or process.
    AlreadyExists = 6,
    /// A limit of the shim was reached.
    ResourceExhausted = 8,
    /// The operation is not allowed in this state.
    FailedPrecondition = 9,
    /// There is no such method.
    Unimplemented = 12,
    /// The shim is shutting down.
    Unavailable = 14,
}

impl Code {
    /// The code of a number; [`Code::Unknown`] for any other.
    pub fn of_number(number: i32) -> Self {
        [
            Self::InvalidArgument,
            Self::DeadlineExceeded,
            Self::NotFound,
            Self::AlreadyExists,
            Self::ResourceExhausted,
            Self::FailedPrecondition,
            Self::Unimplemented,
            Self::Unavailable,
        ]
        .into_iter()
        .find(|code| *code as i32 == number)
        .unwrap_or(Self::Unknown)
    }
}

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

    /// [`Code::Unknown`].
    pub fn unknown(message: impl Into<String>) -> Self {
        Self::new(Code::Unknown, message)
    }

    /// [`Code::NotFound`].
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(Code::NotFound, message)
    }

    /// [`Code::FailedPrecondition`].
    pub fn state(message: impl Into<String>) -> Self {
        Self::new(Code::FailedPrecondition, message)
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
        Self::new(Code::InvalidArgument, format!("malformed message: {e}"))
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
