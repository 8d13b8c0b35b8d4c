//! The log of a command of the runtime (`--log`), which the main loop reads while the command runs.
//! A pipe, because the runtime opens its log by a path, to append to it: a file would grow without
//! a bound.

use std::io::Read as _;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::{fs::File, io};

use rustix::fs::OFlags;
use rustix::pipe::{PipeFlags, pipe_with};

use crate::error::{Context as _, Error};

/// The end of a log that is kept, bytes: the last line has the error.
const MAX_LOG: usize = 64 << 10;

/// Size of a read, bytes, and how many a call of [`LogPipe::read`] does at most, so that a runtime
/// which logs without end does not block other work.
const READ_SIZE: usize = 8 << 10;
const MAX_READS: usize = 16;

/// The read end of the pipe, and the end of what was read.
#[derive(Debug)]
pub struct LogPipe {
    /// Identifies the pipe in the main loop.
    pub id: u32,
    reader: File,
    /// Until the command has started.
    writer: Option<OwnedFd>,
    kept: Vec<u8>,
}

/// Whether a log can still grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Log {
    /// A process has the pipe open.
    Open,
    /// No process has: the pipe is ready forever, and need not be watched any more.
    Ended,
}

impl LogPipe {
    /// An empty log.
    ///
    /// # Errors
    /// The pipe cannot be created.
    pub fn new(id: u32) -> Result<Self, Error> {
        let make = || {
            let (reader, writer) = pipe_with(PipeFlags::CLOEXEC)?;
            // Not the write end: the runtime's own must block, or a line would be lost.
            rustix::fs::fcntl_setfl(&reader, OFlags::NONBLOCK)?;
            Ok::<_, rustix::io::Errno>((File::from(reader), writer))
        };
        let (reader, writer) = make().context("make pipe for log")?;
        Ok(Self { id, reader, writer: Some(writer), kept: Vec::new() })
    }

    /// The write end, once.
    pub fn take_writer(&mut self) -> Option<OwnedFd> {
        self.writer.take()
    }

    /// Reads what is in the pipe, up to 128 KiB.
    pub fn read(&mut self) -> Log {
        let mut bytes = [0; READ_SIZE];
        for _ in 0..MAX_READS {
            match self.reader.read(&mut bytes) {
                Ok(0) => return Log::Ended,
                Ok(count) => self.keep(bytes.get(..count).unwrap_or_default()),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        Log::Open
    }

    /// The end of the log of a command that has exited.
    pub fn content(&mut self) -> &[u8] {
        self.read();
        self.kept.get(self.kept.len().saturating_sub(MAX_LOG)..).unwrap_or_default()
    }

    fn keep(&mut self, bytes: &[u8]) {
        if self.kept.len() + bytes.len() > 2 * MAX_LOG {
            self.kept.drain(..self.kept.len() - MAX_LOG);
        }
        self.kept.extend_from_slice(bytes);
    }
}

impl AsFd for LogPipe {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.reader.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn the_end_of_a_long_log_is_kept() {
        let mut log = LogPipe::new(1).unwrap();
        let mut writer = File::from(log.take_writer().unwrap());
        assert!(log.take_writer().is_none());
        assert_eq!((log.read(), log.content()), (Log::Open, &b""[..]));
        for number in 0..100_000 {
            writeln!(writer, "line {number:06}").unwrap();
            if number % 1000 == 0 {
                assert_eq!(log.read(), Log::Open);
                assert!(log.kept.capacity() <= 4 * MAX_LOG);
            }
        }
        drop(writer);
        let content = log.content();
        assert_eq!(content.len(), MAX_LOG);
        assert!(content.ends_with(b"line 099998\nline 099999\n"));
        assert_eq!(log.read(), Log::Ended);
    }
}
