//! Logging programs, which receive a container's output (`binary://`, `binary-v2://`): its standard
//! output is their descriptor 3, its standard error 4. They close descriptor 5, or write to it,
//! when they are ready.

use std::ffi::CString;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::io::Errno;
use rustix::pipe::PipeFlags;

use crate::error::{Code, Context as _, Error};
use crate::runtime;
use crate::sys;

/// How long a logging program may take to be ready.
pub const READY_TIMEOUT: Duration = Duration::from_secs(30);

/// The logging program that a URI names.
#[derive(Debug, PartialEq, Eq)]
pub struct Program {
    /// The path of the program and its arguments.
    pub arguments: Vec<CString>,
    /// The program must write a byte when it is ready; else it may just close the descriptor.
    strict: bool,
}

/// A running logging program.
#[derive(Debug)]
pub struct Logger {
    /// The pid.
    pub pid: i32,
    /// Readable when the program is ready.
    pub ready: OwnedFd,
    strict: bool,
}

impl Program {
    /// Parses a URI without its scheme: a path, and arguments as names and values of the query.
    pub fn parse(rest: &str, strict: bool) -> Result<Self, Error> {
        let malformed = |what: &str| Error::new(Code::INVALID_ARGUMENT, format!("log URI: {what}"));
        let (path, query) = path_and_query(rest)?;
        let mut arguments = vec![path];
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            arguments.push(decoded(name, true));
            arguments.push(decoded(value, true));
        }
        let arguments = arguments
            .into_iter()
            .map(|argument| CString::new(argument).map_err(|_| malformed("a zero byte")));
        Ok(Self { arguments: arguments.collect::<Result<_, _>>()?, strict })
    }

    /// Starts the program.
    pub fn start(
        &self,
        id: &str,
        namespace: &str,
        stdout: BorrowedFd<'_>,
        stderr: BorrowedFd<'_>,
    ) -> Result<Logger, Error> {
        let (ready, says) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).context("make pipe")?;
        rustix::io::ioctl_fionbio(&ready, true)?;
        let null = runtime::null()?;
        let variable = |name: &str, value: &str| {
            CString::new(format!("{name}={value}"))
                .map_err(|_| Error::new(Code::INVALID_ARGUMENT, "a zero byte in an id"))
        };
        let environment =
            [variable("CONTAINER_ID", id)?, variable("CONTAINER_NAMESPACE", namespace)?];
        let program = self.arguments.first().map(CString::as_c_str).unwrap_or_default();
        let null = null.as_fd();
        let spawned = sys::spawn(&sys::Spawn {
            program,
            arguments: &self.arguments,
            environment: &environment,
            directory: None,
            descriptors: &[
                (null, 0),
                (null, 1),
                (null, 2),
                (stdout, 3),
                (stderr, 4),
                (says.as_fd(), 5),
            ],
            dies_with_parent: false,
        });
        let pid = spawned.context("failed to start binary process")?;
        Ok(Logger { pid, ready, strict: self.strict })
    }
}

impl Logger {
    /// Whether the program is ready, or has failed; `None`: neither yet.
    pub fn is_ready(&self) -> Option<Result<(), Error>> {
        match rustix::io::read(&self.ready, &mut [0; 1]) {
            Ok(0) if self.strict => Some(Err(Error::unknown(
                "logging binary did not call ready (it may have crashed or exited prematurely)",
            ))),
            Ok(_) => Some(Ok(())),
            Err(Errno::AGAIN) => None,
            Err(e) => Some(Err(Error::from(e).context("failed to read from logging binary"))),
        }
    }
}

/// The decoded path of a URI without its scheme, and its query. The host and the fragment are
/// ignored.
///
/// # Errors
/// There is no path.
pub fn path_and_query(rest: &str) -> Result<(Vec<u8>, &str), Error> {
    let no_path = || Error::new(Code::INVALID_ARGUMENT, "log URI: no path");
    let rest = rest.split('#').next().unwrap_or_default();
    let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
    let path = path.find('/').and_then(|at| path.get(at..)).ok_or_else(no_path)?;
    Ok((decoded(path, false), query))
}

/// Decodes `%` sequences, and `+` in a query.
fn decoded(text: &str, query: bool) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        let escaped = match (first, tail) {
            (b'%', [a, b, ..]) => std::str::from_utf8(&[*a, *b])
                .ok()
                .and_then(|digits| u8::from_str_radix(digits, 16).ok()),
            _ => None,
        };
        let (byte, taken) = match (escaped, first) {
            (Some(byte), _) => (byte, 3),
            (None, b'+') if query => (b' ', 1),
            (None, byte) => (*byte, 1),
        };
        bytes.push(byte);
        rest = rest.get(taken..).unwrap_or_default();
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_uri_is_parsed_into_path_and_arguments() {
        let program = Program::parse("/usr/bin/log%20ger?--id=a%2Fb+c&-v", false).unwrap();
        let expected = [c"/usr/bin/log ger", c"--id", c"a/b c", c"-v", c""];
        assert_eq!(program.arguments, expected.map(ToOwned::to_owned));
        assert_eq!(decoded("%zz%4", true), b"%zz%4");
        for malformed in ["", "host", "/a%00"] {
            assert!(Program::parse(malformed, true).is_err(), "{malformed}");
        }
    }
}
