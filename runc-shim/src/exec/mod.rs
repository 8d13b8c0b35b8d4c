//! A process that is executed in a container.

pub mod state;

use std::collections::{BTreeMap, VecDeque};

use serde_json::value::RawValue;

use self::state::State;
use crate::container::Process;
use crate::error::{Code, Error};
use crate::server::Reply;
use crate::task::Request;

/// An exec.
#[derive(Debug)]
pub struct Exec {
    /// Its state.
    pub state: State,
    /// Its streams.
    pub process: Process,
    /// Its `process.json`, until it is started.
    pub spec: Vec<u8>,
    /// Calls that have arrived while the runtime starts it.
    pub queue: VecDeque<(Reply, Request)>,
    /// Its deletion waits for the last output until then.
    pub drain: Option<(Reply, std::time::Instant)>,
}

/// A `process.json` whose terminal is as the call says.
pub fn process_json(spec: &[u8], terminal: bool) -> Result<Vec<u8>, Error> {
    let malformed =
        |e: serde_json::Error| Error::new(Code::InvalidArgument, format!("process: {e}"));
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
        assert_eq!(process_json(b"[]", true).unwrap_err().code, Code::InvalidArgument);
    }
}
