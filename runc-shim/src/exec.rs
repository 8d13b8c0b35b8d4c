//! An exec: an additional process of a container.

use std::collections::BTreeMap;

use serde_json::value::RawValue;

use crate::error::{Code, Error};
use crate::exits::Exit;
use crate::io::Stdio;
use crate::process::ProcessStreams;

/// The state of an exec.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// The exec was added and not started.
    Added,
    /// The exec is being started.
    Starting,
    /// The process with this pid runs.
    Running(i32),
    /// The process with this pid has exited; 0: it could not be started, and calls of Wait report
    /// this exit.
    Stopped(i32, Exit),
}

impl State {
    /// The pid of the process; 0: there is none.
    pub fn pid(self) -> i32 {
        match self {
            Self::Added | Self::Starting => 0,
            Self::Running(pid) | Self::Stopped(pid, _) => pid,
        }
    }

    /// The exit of the process, if it has exited or could not be started.
    pub fn exit(self) -> Option<Exit> {
        match self {
            Self::Stopped(_, exit) => Some(exit),
            _ => None,
        }
    }

    /// Whether the exec is being started or runs, so that it cannot be deleted, and the exit of its
    /// container is not announced yet.
    pub fn is_live(self) -> bool {
        matches!(self, Self::Starting | Self::Running(_))
    }
}

/// An exec.
#[derive(Debug)]
pub struct Exec {
    /// The state.
    pub state: State,
    /// The streams, and the calls that wait for the exit.
    pub process: ProcessStreams,
    /// The `process.json`, until the exec is started.
    pub spec: Vec<u8>,
}

impl Exec {
    /// An exec with this `process.json`.
    pub fn new(stdio: Stdio, spec: Vec<u8>) -> Self {
        Self { state: State::Added, process: ProcessStreams::new(stdio), spec }
    }

    /// Begins the start.
    ///
    /// # Errors
    /// It was begun before.
    pub fn begin_start(&mut self) -> Result<(), Error> {
        match self.state {
            State::Added => {
                self.state = State::Starting;
                Ok(())
            }
            State::Starting | State::Running(_) => {
                Err(Error::state("cannot start a running process"))
            }
            State::Stopped(..) => Err(Error::state("cannot start a stopped process")),
        }
    }
}

/// Sets the field `terminal` of a `process.json` to the value in the Exec request.
pub fn process_json(spec: &[u8], terminal: bool) -> Result<Vec<u8>, Error> {
    let malformed =
        |e: serde_json::Error| Error::new(Code::INVALID_ARGUMENT, format!("process: {e}"));
    let mut fields: BTreeMap<String, Box<RawValue>> =
        serde_json::from_slice(spec).map_err(malformed)?;
    let value = RawValue::from_string(terminal.to_string()).map_err(malformed)?;
    fields.insert("terminal".to_owned(), value);
    serde_json::to_vec(&fields).map_err(malformed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_json_changes_only_in_its_terminal() {
        let json = process_json(br#"{"terminal":true,"args":["a",1.50],"x":{}}"#, false).unwrap();
        let expected = br#"{"args":["a",1.50],"terminal":false,"x":{}}"#;
        assert_eq!(json, expected);
        assert_eq!(process_json(b"{}", true).unwrap(), br#"{"terminal":true}"#);
        assert_eq!(process_json(b"[]", true).unwrap_err().code, Code::INVALID_ARGUMENT);
    }
}
