//! A command of the runtime, or a helper, that was started, and its error.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde::Deserialize;

use crate::error::Error;
use crate::exits::{self, Exit};

/// How much of a log is read, bytes: the end, which has the last error.
const MAX_LOG: u64 = 64 << 10;

/// How much of an output an error message has, bytes.
const MAX_TEXT: usize = 4 << 10;

/// A command that was started. It writes to files in memory, which are read if it fails.
#[derive(Debug)]
pub struct Command {
    /// The pid.
    pub pid: i32,
    /// The log; `None` for a helper.
    log: Option<File>,
    /// The standard output and error; `None`: they are those of the process that it creates.
    output: Option<File>,
}

impl Command {
    /// A command of the runtime, and the files of its log and of its output.
    pub fn new(pid: i32, log: OwnedFd, output: Option<OwnedFd>) -> Self {
        Self { pid, log: Some(log.into()), output: output.map(File::from) }
    }

    /// A helper, and the file of its output.
    pub fn helper(pid: i32, output: OwnedFd) -> Self {
        Self { pid, log: None, output: Some(output.into()) }
    }

    /// Waits until the command has exited, and reaps it. `None`: it still runs at this time. Not
    /// for the main loop, which does not wait.
    ///
    /// # Errors
    /// No descriptor is available for a pidfd.
    pub fn wait(&self, until: Instant) -> io::Result<Option<Exit>> {
        let pid = Pid::from_raw(self.pid).ok_or(Errno::SRCH)?;
        let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
        let left = Timespec::try_from(until.saturating_duration_since(Instant::now())).ok();
        if rustix::event::poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], left.as_ref())? == 0 {
            return Ok(None);
        }
        let exit = exits::exit_of_child(self.pid);
        exits::reap(self.pid);
        Ok(exit)
    }

    /// The error of a command that has failed, with `what` in front unless that is empty: the last
    /// error of its log, or its output, or its exit status. Writes the log to `log.json` in the
    /// bundle, if that is known, in place of the log of an earlier command: the log of a probe that
    /// fails at every attempt would fill the bundle's file system.
    pub fn failure(&self, what: &str, status: u32, bundle: Option<&Path>) -> Error {
        let log = self.log.as_ref().map(end_of).unwrap_or_default();
        if let (Some(_), Some(bundle)) = (&self.log, bundle) {
            // A failure is ignored, because the answer contains the error.
            let _ = std::fs::write(bundle.join("log.json"), &log);
        }
        let output = self.output.as_ref().map(end_of).unwrap_or_default();
        let reason = last_error(&String::from_utf8_lossy(&log))
            .or_else(|| Some(last_text(&output)).filter(|output| !output.is_empty()))
            .unwrap_or_else(|| format!("exit status {status}"));
        let e = Error::unknown(reason);
        if what.is_empty() { e } else { e.context(what) }
    }
}

/// The end of a file, at most 64 KiB; nothing if it cannot be read.
fn end_of(file: &File) -> Vec<u8> {
    let length = file.metadata().map_or(0, |it| it.len());
    let mut end = vec![0; usize::try_from(length.min(MAX_LOG)).unwrap_or(0)];
    let count = file.read_at(&mut end, length.saturating_sub(MAX_LOG)).unwrap_or(0);
    end.truncate(count);
    end
}

/// The last 4 KiB of an output, for an error message.
pub fn last_text(output: &[u8]) -> String {
    let end = output.get(output.len().saturating_sub(MAX_TEXT)..).unwrap_or_default();
    String::from_utf8_lossy(end).trim().to_owned()
}

/// The last error in a log of JSON objects. runc writes each on one line, crun 1.28 on several.
pub fn last_error(log: &str) -> Option<String> {
    #[derive(Deserialize)]
    struct Entry {
        level: String,
        msg: String,
    }
    let parsed = |(at, _): (usize, &str)| {
        let rest = log.get(at..).unwrap_or_default();
        serde_json::Deserializer::from_str(rest).into_iter::<Entry>().next()?.ok()
    };
    let mut entries = log.rmatch_indices('{').filter_map(parsed);
    entries.find(|entry| entry.level == "error").map(|entry| entry.msg.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn the_last_error_of_a_log_is_found() {
        let log = "{\"level\":\"error\",\"msg\":\"first\"}\nrubbish\n\
                   {\"level\":\"error\",\"msg\":\" second \\n\",\"time\":\"t\"}\n\
                   {\"level\":\"warning\",\"msg\":\"third\"}\n{\"level\":\"err";
        assert_eq!(last_error(log).as_deref(), Some("second"));
        let of_crun = "{\n  \"msg\": \"no {hybrid} mode\",\n  \"level\": \"error\"\n}\n";
        assert_eq!(last_error(&[log, of_crun].concat()).as_deref(), Some("no {hybrid} mode"));
        assert_eq!(last_error(""), None);
    }

    #[test]
    fn an_error_message_has_the_end_of_an_output() {
        let mut file = tempfile::tempfile().unwrap();
        assert_eq!(end_of(&file), b"");
        file.write_all(&vec![b'x'; 100_000]).unwrap();
        file.write_all(b" reason\n").unwrap();
        let end = end_of(&file);
        assert!(end.len() == 64 << 10 && end.ends_with(b"x reason\n"));
        let text = last_text(&end);
        assert!(text.ends_with("x reason") && text.len() < MAX_TEXT);
    }
}
