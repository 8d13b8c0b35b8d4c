//! A command of the runtime, or a helper, that was started, and its error.

use std::io;
use std::path::Path;
use std::time::Instant;

use containerd_shim_protos::ttrpc::proto::Status;
use protobuf::Message as _;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde::Deserialize;

use crate::error::{Code, Error};
use crate::exits::{self, Exit};
use crate::runtime::output_pipe::{self, OutputPipe};

/// A command that was started.
#[derive(Debug)]
pub struct Command {
    /// The pid.
    pub pid: i32,
    /// The log; `None` for a helper.
    pub log: Option<OutputPipe>,
    /// The standard output and error, as far as they are kept.
    pub output: Vec<OutputPipe>,
}

impl Command {
    /// A command without a log, such as a helper, and its output.
    pub fn without_log(pid: i32, output: OutputPipe) -> Self {
        Self { pid, log: None, output: vec![output] }
    }

    /// The pipes to which the command writes.
    pub fn pipes_mut(&mut self) -> impl Iterator<Item = &mut OutputPipe> {
        self.log.iter_mut().chain(&mut self.output)
    }

    /// The pipes that have not ended.
    pub fn open_pipes(&self) -> impl Iterator<Item = &OutputPipe> {
        self.log.iter().chain(&self.output).filter(|pipe| !pipe.has_ended())
    }

    /// The end of what the command has written to its standard streams, if it was kept.
    pub fn output(&mut self) -> Vec<u8> {
        self.output.iter_mut().flat_map(|output| output.content().to_owned()).collect()
    }

    /// Waits until the command has exited, and reaps it. Reads what it writes meanwhile. `None`:
    /// the command still runs at this time. Not for the main loop, which does not wait.
    ///
    /// # Errors
    /// No descriptor is available for a pidfd.
    pub fn wait(&mut self, until: Option<Instant>) -> io::Result<Option<Exit>> {
        let pid = Pid::from_raw(self.pid).ok_or(Errno::SRCH)?;
        let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
        loop {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            let timeout = left.and_then(|left| Timespec::try_from(left).ok());
            let mut fds = vec![PollFd::new(&pidfd, PollFlags::IN)];
            fds.extend(self.open_pipes().map(|pipe| PollFd::new(pipe, PollFlags::IN)));
            match rustix::event::poll(&mut fds, timeout.as_ref()) {
                Err(Errno::INTR) => {}
                ready => drop(ready?),
            }
            if fds.first().is_some_and(|pidfd| !pidfd.revents().is_empty()) {
                let exit = exits::exit_of_child(self.pid);
                exits::reap(self.pid);
                return Ok(exit);
            }
            // Also if the command writes without end.
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(None);
            }
            for pipe in self.pipes_mut() {
                pipe.advance();
            }
        }
    }

    /// The error of a command that has failed, with `what` in front unless that is empty: the last
    /// error of its log, or its output, or its exit status. Writes the log to `log.json` in the
    /// bundle, if that is known, in place of the log of an earlier command: the log of a probe that
    /// fails at every attempt would fill the bundle's file system.
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
            .or_else(|| Some(output_pipe::last_text(&output)).filter(|output| !output.is_empty()))
            .unwrap_or_else(|| format!("exit status {status}"));
        let e = Error::unknown(reason);
        if what.is_empty() { e } else { e.context(what) }
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
