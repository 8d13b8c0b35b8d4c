//! An exec: an additional process of a container.

pub mod state;

use std::collections::{BTreeMap, VecDeque};

use serde_json::value::RawValue;

use self::state::State;
use crate::error::{Code, Error};
use crate::io::process_streams::ProcessStreams;
use crate::ttrpc::request::Request;
use crate::ttrpc::server::Reply;

/// An exec.
#[derive(Debug)]
pub struct Exec {
    /// The state.
    pub state: State,
    /// The streams.
    pub process: ProcessStreams,
    /// The `process.json`, until the exec is started.
    pub spec: Vec<u8>,
    /// Calls that were queued while the exec is being started.
    pub queue: VecDeque<(Reply, Request)>,
    /// The Delete that waits for the last output, and its deadline.
    pub drain: Option<(Reply, std::time::Instant)>,
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
