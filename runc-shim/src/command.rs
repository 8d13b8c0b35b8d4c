//! A command of the runtime, or a helper, that was started, and its error.

use std::path::Path;

use containerd_shim_protos::ttrpc::proto::Status;
use protobuf::Message as _;
use serde::Deserialize;

use crate::error::{Code, Error};
use crate::log_pipe::LogPipe;
use crate::output_file::{self, OutputFile};

/// A command that was started.
#[derive(Debug)]
pub struct Command {
    /// The pid.
    pub pid: i32,
    /// The log; `None` for a helper.
    pub log: Option<LogPipe>,
    /// The file that receives the standard streams, if they are kept.
    pub output: Option<OutputFile>,
}

impl Command {
    /// A helper and the file that receives its standard output.
    pub fn without_log(pid: i32, output: OutputFile) -> Self {
        Self { pid, log: None, output: Some(output) }
    }

    /// The output of the command on its standard streams, if it was kept.
    fn output(&mut self) -> Vec<u8> {
        self.output.as_mut().map(OutputFile::content).unwrap_or_default()
    }

    /// The error of a command that has failed: the last error of its log, or its output, or its
    /// exit status. Writes the log to `log.json` in the bundle, if that is known, in place of the
    /// log of an earlier command: the log of a probe that fails at every attempt would fill the
    /// bundle's file system.
    pub fn failure(&mut self, what: &str, status: u32, bundle: Option<&Path>) -> Error {
        let output = self.output();
        let Some(log) = &mut self.log else {
            return helper_failure(&output, status).context(what);
        };
        let log = log.content();
        if let Some(bundle) = bundle {
            // A failure is ignored, because the answer contains the error.
            let _ = std::fs::write(bundle.join("log.json"), log);
        }
        let log = String::from_utf8_lossy(log);
        let reason = last_error(&log)
            .or_else(|| Some(output_file::text(&output)).filter(|output| !output.is_empty()))
            .unwrap_or_else(|| format!("exit status {status}"));
        Error::unknown(format!("{what}: {reason}"))
    }
}

/// The last error in a log of JSON lines.
pub fn last_error(log: &str) -> Option<String> {
    #[derive(Deserialize)]
    struct Line {
        level: String,
        msg: String,
    }
    let lines = log.lines().filter_map(|line| serde_json::from_str::<Line>(line).ok());
    lines.rev().find(|line| line.level == "error").map(|line| line.msg.trim().to_owned())
}

/// The error of a helper that has failed: the one that it has written, or its exit status.
fn helper_failure(output: &[u8], status: u32) -> Error {
    match Status::parse_from_bytes(output) {
        Ok(status) if !status.message.is_empty() => {
            // A response with OK would be a success.
            let code = status.code.enum_value().ok().filter(|code| *code != Code::OK);
            Error::new(code.unwrap_or(Code::UNKNOWN), status.message)
        }
        _ => Error::unknown(format!("exit status {status}")),
    }
}

#[cfg(test)]
mod tests {
    use containerd_shim_protos::ttrpc::get_status;

    use super::*;

    #[test]
    fn the_last_error_of_a_log_is_found() {
        let log = "{\"level\":\"error\",\"msg\":\"first\"}\nrubbish\n\
                   {\"level\":\"error\",\"msg\":\" second \\n\",\"time\":\"t\"}\n\
                   {\"level\":\"warning\",\"msg\":\"third\"}\n{\"level\":\"err";
        assert_eq!(last_error(log).as_deref(), Some("second"));
        assert_eq!(last_error(""), None);
    }

    #[test]
    fn the_error_of_a_helper_has_its_code() {
        let status = get_status(Code::INVALID_ARGUMENT, "no such option");
        let error = helper_failure(&status.write_to_bytes().unwrap(), 1);
        assert_eq!(error, Error::new(Code::INVALID_ARGUMENT, "no such option"));
        let status = get_status(Code::OK, "all well").write_to_bytes().unwrap();
        assert_eq!(helper_failure(&status, 1), Error::unknown("all well"));
        assert_eq!(helper_failure(b"", 137).message, "exit status 137");
        assert_eq!(helper_failure(b"\xff rubbish", 1).message, "exit status 1");
    }
}
