//! An exec: an additional process of a container.

pub mod state;

use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use serde_json::value::RawValue;

use self::state::{Event, State};
use crate::error::{Code, Error};
use crate::io::Stdio;
use crate::process::ProcessStreams;
use crate::ttrpc::request::{Request, take_late};
use crate::ttrpc::server::Reply;

/// An exec.
#[derive(Debug)]
pub struct Exec {
    state: State,
    /// The streams, and the calls that wait for the exit.
    pub process: ProcessStreams,
    /// The `process.json`, until the exec is started.
    pub spec: Vec<u8>,
    /// Calls that wait until the exec is started.
    pub queue: VecDeque<(Reply, Request)>,
}

impl Exec {
    /// An exec with this `process.json`.
    pub fn new(stdio: Stdio, spec: Vec<u8>) -> Self {
        let process = ProcessStreams::new(stdio);
        Self { state: State::Added, process, spec, queue: VecDeque::new() }
    }

    /// The state.
    pub fn state(&self) -> State {
        self.state
    }

    /// Changes the state. An exec that may be deleted stays as it is.
    ///
    /// # Errors
    /// The event is not allowed in the state.
    pub fn change(&mut self, event: Event) -> Result<(), Error> {
        if let Some(next) = state::step(self.state, event).map_err(Error::state)? {
            self.state = next;
        }
        Ok(())
    }

    /// The queue for calls that must wait, while the exec is being started.
    pub fn queue_while_starting(&mut self) -> Option<&mut VecDeque<(Reply, Request)>> {
        (self.state == State::Starting).then_some(&mut self.queue)
    }

    /// The queued calls, once the exec is started.
    pub fn take_released(&mut self) -> VecDeque<(Reply, Request)> {
        match self.state {
            State::Starting => VecDeque::new(),
            _ => std::mem::take(&mut self.queue),
        }
    }

    /// The next deadline of a call that waits for the exec.
    pub fn deadline(&self) -> Option<Instant> {
        let queued = self.queue.iter().filter_map(|(reply, _)| reply.deadline());
        queued.chain(self.process.deadline()).min()
    }

    /// Moves the calls whose deadline has passed to `late`.
    pub fn take_late(&mut self, now: Instant, late: &mut Vec<Reply>) {
        late.extend(self.process.waiters().take_late(now));
        take_late(&mut self.queue, now, late);
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
