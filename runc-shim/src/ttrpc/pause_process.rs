//! The request of the daemon's own service.

use serde::Deserialize;

use crate::error::{Code, Error};
use crate::process_key;

/// The daemon's own service at a pod's socket. A shim without it answers UNIMPLEMENTED.
pub const SERVICE: &str = "pause_sandboxer.shim.v1.Sandbox";

/// Its method.
const SET_PAUSE: &str = "SetPause";

/// The request of SetPause, JSON: it identifies the pause process. The answer is empty.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct PauseProcess {
    /// The sandbox id.
    pub id: String,
    /// The pid in the node's PID namespace.
    pub pid: i32,
    /// Field 22 of `/proc/PID/stat`, clock ticks after boot.
    pub start_time: u64,
}

impl PauseProcess {
    /// Decodes a request.
    ///
    /// # Errors
    /// The request is malformed, or for another method.
    pub fn decode(method: &str, payload: &[u8]) -> Result<Self, Error> {
        if method != SET_PAUSE {
            return Err(Error::new(Code::UNIMPLEMENTED, format!("method {method}")));
        }
        let malformed = |reason: String| Error::new(Code::INVALID_ARGUMENT, reason);
        let pause: Self =
            serde_json::from_slice(payload).map_err(|e| malformed(format!("SetPause: {e}")))?;
        process_key::check_id(&pause.id)?;
        if pause.pid <= 1 {
            return Err(malformed(format!("SetPause: invalid pid {}", pause.pid)));
        }
        Ok(pause)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_names_a_sandbox_and_a_process() {
        let decode = |json: &str| PauseProcess::decode(SET_PAUSE, json.as_bytes());
        let pause = PauseProcess { id: "a".to_owned(), pid: 7, start_time: 8 };
        assert_eq!(decode(r#"{"id":"a","pid":7,"start_time":8}"#).unwrap(), pause);
        // A later daemon may send more fields.
        assert_eq!(decode(r#"{"id":"a","pid":7,"start_time":8,"x":1}"#).unwrap(), pause);
        for malformed in [
            "",
            r#"{"id":"a","pid":7}"#,
            r#"{"id":"a","pid":1,"start_time":8}"#,
            r#"{"id":"a","pid":-7,"start_time":8}"#,
            r#"{"id":"../a","pid":7,"start_time":8}"#,
        ] {
            assert_eq!(decode(malformed).unwrap_err().code, Code::INVALID_ARGUMENT, "{malformed}");
        }
        assert_eq!(PauseProcess::decode("Other", b"").unwrap_err().code, Code::UNIMPLEMENTED);
    }
}
