//! The log of a command, or its standard output and error, for an error message. Each is a pipe
//! that is read while the command runs: a file would grow without a bound, and programs
//! open a log or `/dev/stderr` anew, to append to it or to truncate it.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt as _;

use rustix::fs::OFlags;
use rustix::pipe::{PipeFlags, pipe_with};

use crate::error::{Context as _, Error};

/// How much is kept, bytes: the end, which has the last error.
const MAX_KEPT: usize = 64 << 10;

/// How much of it an error message has, bytes.
const MAX_TEXT: usize = 4 << 10;

/// Size of a read, bytes, and how many a call of [`OutputPipe::read`] does at most, so that a
/// command that writes without end does not block other work.
const READ_SIZE: usize = 8 << 10;
const MAX_READS: usize = 16;

/// Maximum number of such calls for what is in the pipe at the end: pages of 64 KiB make 1 MiB.
const MAX_LAST_READS: usize = 16;

/// The read end of a pipe, and the end of what was read.
#[derive(Debug)]
pub struct OutputPipe {
    /// No process has the write end open.
    has_ended: bool,
    reader: File,
    kept: Vec<u8>,
}

/// The result of a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Progress {
    /// The pipe is empty.
    Empty,
    /// There may be more.
    More,
    /// No process has the write end open.
    Ended,
}

impl OutputPipe {
    /// An empty pipe, and its write end.
    ///
    /// # Errors
    /// The pipe cannot be created.
    pub fn new() -> Result<(Self, OwnedFd), Error> {
        let make = || {
            let (reader, writer) = pipe_with(PipeFlags::CLOEXEC)?;
            // Not the write end: a command does not expect that a write would block.
            rustix::fs::fcntl_setfl(&reader, OFlags::NONBLOCK)?;
            Ok::<_, rustix::io::Errno>((File::from(reader), writer))
        };
        let (reader, writer) = make().context("make pipe for the output of a command")?;
        Ok((Self { has_ended: false, reader, kept: Vec::new() }, writer))
    }

    /// The pipe whose write end this is, which another reader may read later.
    ///
    /// # Errors
    /// No descriptor is available.
    pub fn of_writer(writer: BorrowedFd<'_>) -> Result<Self, Error> {
        let path = format!("/proc/self/fd/{}", writer.as_raw_fd());
        let opened = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path);
        let reader = opened.context("open pipe for the output of a command")?;
        Ok(Self { has_ended: false, reader, kept: Vec::new() })
    }

    /// Whether no process has the write end open. A pipe that has ended is ready forever, and is
    /// not to be watched any more.
    pub fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// Reads what is in the pipe.
    pub fn advance(&mut self) {
        self.has_ended = self.has_ended || self.read() == Progress::Ended;
    }

    /// Reads what is in the pipe, up to 128 KiB.
    fn read(&mut self) -> Progress {
        let mut bytes = [0; READ_SIZE];
        for _ in 0..MAX_READS {
            match self.reader.read(&mut bytes) {
                Ok(0) => return Progress::Ended,
                Ok(count) => self.keep(bytes.get(..count).unwrap_or_default()),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Progress::Empty,
            }
        }
        Progress::More
    }

    /// The end of what a command has written that has exited, at most 64 KiB.
    pub fn content(&mut self) -> &[u8] {
        // Another process may still write.
        for _ in 0..MAX_LAST_READS {
            if self.read() != Progress::More {
                break;
            }
        }
        self.kept.get(self.kept.len().saturating_sub(MAX_KEPT)..).unwrap_or_default()
    }

    fn keep(&mut self, bytes: &[u8]) {
        if self.kept.len() + bytes.len() > 2 * MAX_KEPT {
            self.kept.drain(..self.kept.len() - MAX_KEPT);
        }
        self.kept.extend_from_slice(bytes);
    }
}

/// The last 4 KiB of an output, for an error message.
pub fn last_text(output: &[u8]) -> String {
    let end = output.get(output.len().saturating_sub(MAX_TEXT)..).unwrap_or_default();
    String::from_utf8_lossy(end).trim().to_owned()
}

impl AsFd for OutputPipe {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.reader.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;
    use crate::testing;

    #[test]
    fn the_end_of_a_long_output_is_kept() {
        if testing::ran_alone() {
            return;
        }
        let (mut pipe, writer) = OutputPipe::new().unwrap();
        let mut writer = File::from(writer);
        assert_eq!((pipe.read(), pipe.content()), (Progress::Empty, &b""[..]));
        for number in 0..100_000 {
            writeln!(writer, "line {number:06}").unwrap();
            if number % 1000 == 0 {
                assert_eq!(pipe.read(), Progress::Empty);
                assert!(pipe.kept.capacity() <= 4 * MAX_KEPT);
            }
        }
        drop(writer);
        let content = pipe.content();
        assert_eq!(content.len(), MAX_KEPT);
        assert!(content.ends_with(b"line 099998\nline 099999\n"));
        assert_eq!(pipe.read(), Progress::Ended);
    }

    #[test]
    fn all_of_a_large_pipe_is_read_at_the_end() {
        let (mut pipe, writer) = OutputPipe::new().unwrap();
        // As where a page has 64 KiB.
        rustix::pipe::fcntl_setpipe_size(&writer, 1 << 20).unwrap();
        let mut writer = File::from(writer);
        writer.write_all(&vec![b'x'; (1 << 20) - 4]).unwrap();
        writer.write_all(b"last").unwrap();
        assert_eq!(pipe.read(), Progress::More);
        assert!(pipe.content().ends_with(b"xlast"));
    }

    #[test]
    fn an_error_message_has_the_end_of_an_output() {
        assert_eq!(last_text(b" reason\n"), "reason");
        let long = [vec![b'x'; 2 * MAX_TEXT], b" reason\n".to_vec()].concat();
        assert!(last_text(&long).ends_with("x reason") && last_text(&long).len() < MAX_TEXT);
    }
}
