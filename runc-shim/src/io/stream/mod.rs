//! Streams between a process and containerd, copied by the process's copier thread.

mod buffer;
mod streams;

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::FileType;
use rustix::io::Errno;
use rustix::termios::SpecialCodeIndex;

use self::buffer::Buffer;
pub use self::streams::Streams;
use crate::reactor::UNWATCHED_WAIT;
use crate::runtime;

/// Maximum number of bytes, and of reads, that are copied of one stream before the other streams.
/// A pipe in packet mode (`O_DIRECT`) returns one packet for each read, which may be one byte.
const MAX_BYTES_AT_ONCE: usize = 1 << 20;
const MAX_READS_AT_ONCE: usize = 256;

/// The default of the character that ends the input of a terminal (termios(3)).
const EOT: u8 = 4;

/// Delay before another write after one that has failed, for example because the disk is full.
const FAILED_WAIT: Duration = Duration::from_millis(500);

/// One stream: bytes are copied in one direction.
#[derive(Debug)]
pub struct Stream {
    /// `None`: nothing more is read. The stream ends when its buffer is written, or, after the end
    /// of an output, when its FIFO has a reader.
    from: Option<OwnedFd>,
    to: OwnedFd,
    /// The shim's own reading end of the FIFO at `to`, so that the FIFO always has a reader. `None`
    /// once the input of a terminal has ended: a caller that is gone does not read, either, and
    /// then the terminal hangs up.
    reader: Option<OwnedFd>,
    is_output: bool,
    /// The process's end is a terminal.
    is_terminal: bool,
    buffer: Buffer,
    /// Nothing more is copied, `from` is closed, and the FIFO waits for a reader: the time of the
    /// next check, and the delay before it.
    last_wait: Option<(Instant, Duration)>,
    /// The process has exited: the stream ends when its pending output is copied.
    finishing: bool,
    /// The process was deleted: how many bytes are still copied. The stream also ends when nothing
    /// is pending, and when its FIFO has no reader.
    left_to_copy: Option<usize>,
    /// A write has failed, or epoll does not watch the stream; time of the next attempt.
    retry_at: Option<Instant>,
    /// epoll watches the stream.
    is_watched: bool,
    /// The first error of a write that is retried.
    write_error: Option<Errno>,
    /// It was logged.
    has_logged: bool,
}

/// The result of [`Stream::copy_available`].
#[derive(Debug, PartialEq, Eq)]
enum CopyResult {
    /// Nothing more can be copied now.
    Blocked,
    /// There may be more to copy.
    More,
    /// All is copied, or copying has failed.
    Ended,
}

/// Why [`Stream::copy`] has copied nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Failure {
    /// Nothing can be read, or written, now.
    Blocked,
    /// The write may succeed later.
    Temporary,
    /// One of the ends was closed.
    Final,
}

impl Failure {
    fn of_read(e: Errno) -> Self {
        match e {
            Errno::AGAIN => Self::Blocked,
            _ => Self::Final,
        }
    }

    /// An error of a log file, for example on a network file system, may pass. If it ended the
    /// stream, the next write of the container would kill it by SIGPIPE.
    fn of_write(e: Errno, is_output: bool) -> Self {
        match e {
            Errno::AGAIN => Self::Blocked,
            Errno::NOSPC | Errno::DQUOT | Errno::NOMEM | Errno::NOBUFS => Self::Temporary,
            Errno::PIPE => Self::Final,
            _ if is_output => Self::Temporary,
            _ => Self::Final,
        }
    }
}

impl Stream {
    /// A stream from a process to containerd. Makes both ends non-blocking: one thread copies all
    /// streams of a process, and none may block the others.
    ///
    /// # Errors
    /// The kernel refuses that.
    pub fn output(from: OwnedFd, to: OwnedFd, reader: Option<OwnedFd>) -> Result<Self, Errno> {
        for end in [&from, &to] {
            rustix::io::ioctl_fionbio(end, true)?;
        }
        Ok(Self {
            from: Some(from),
            to,
            reader,
            is_output: true,
            is_terminal: false,
            buffer: Buffer::default(),
            last_wait: None,
            finishing: false,
            left_to_copy: None,
            retry_at: None,
            is_watched: true,
            write_error: None,
            has_logged: false,
        })
    }

    /// The same stream, with a terminal at the process's end.
    pub fn of_terminal(self) -> Self {
        Self { is_terminal: true, ..self }
    }

    /// A stream from containerd to a process, as [`Stream::output`].
    ///
    /// # Errors
    /// As there.
    pub fn input(from: OwnedFd, to: OwnedFd) -> Result<Self, Errno> {
        Ok(Self { is_output: false, ..Self::output(from, to, None)? })
    }

    /// Whether the stream is output of a process.
    pub fn is_output(&self) -> bool {
        self.is_output
    }

    /// The descriptors of a stream that was never copied.
    pub fn into_ends(self) -> impl Iterator<Item = OwnedFd> {
        [self.from, Some(self.to), self.reader].into_iter().flatten()
    }

    fn copy_available(&mut self) -> CopyResult {
        let mut moved = 0;
        for _ in 0..MAX_READS_AT_ONCE {
            if moved >= MAX_BYTES_AT_ONCE {
                break;
            }
            if self.left_to_copy == Some(0) {
                return CopyResult::Ended;
            }
            match self.copy() {
                Ok(0) => return CopyResult::Ended,
                Ok(count) => moved += count,
                Err(Failure::Blocked) if self.is_over() => return CopyResult::Ended,
                Err(Failure::Blocked) => {
                    self.shrink(Instant::now());
                    if !self.is_watched {
                        self.retry_at = Some(Instant::now() + UNWATCHED_WAIT);
                    }
                    return CopyResult::Blocked;
                }
                Err(Failure::Temporary) => {
                    self.retry_at = Some(Instant::now() + FAILED_WAIT);
                    return CopyResult::Blocked;
                }
                Err(Failure::Final) => return CopyResult::Ended,
            }
        }
        CopyResult::More
    }

    /// Reads once and writes what was read. Does not use splice(2), which holds the locks of both
    /// pipes, so that containerd would sleep together with this thread.
    fn copy(&mut self) -> Result<usize, Failure> {
        if self.buffer.pending().is_empty() && self.read()? == 0 && !self.write_end_of_file() {
            return Ok(0);
        }
        let written = rustix::io::write(&self.to, self.buffer.pending());
        let count = written.map_err(|e| self.write_failed(e))?;
        self.buffer.advance(count);
        self.left_to_copy = self.left_to_copy.map(|left| left.saturating_sub(count));
        Ok(count)
    }

    /// Reads once; 0: there will be nothing more.
    fn read(&mut self) -> Result<usize, Failure> {
        let Some(from) = &self.from else { return Ok(0) };
        match self.buffer.read(from, &self.to) {
            // No process has the terminal open, but one may open it again.
            Err(Errno::IO) if self.is_terminal => Err(Failure::Blocked),
            read => read.map_err(Failure::of_read),
        }
    }

    /// Gives memory back that is not used.
    fn shrink(&mut self, now: Instant) {
        self.buffer.shrink(self.from.iter().chain([&self.to]), now);
    }

    /// Has the input of a terminal end with the characters after which the process reads the end of
    /// the file. False: this is another stream, or they were written.
    fn write_end_of_file(&mut self) -> bool {
        if self.is_output || !self.is_terminal || self.from.take().is_none() {
            return false;
        }
        let attributes = rustix::termios::tcgetattr(&self.to);
        let character = attributes.map_or(EOT, |it| it.special_codes[SpecialCodeIndex::VEOF]);
        // The first one only ends a line that is not complete.
        self.buffer.put(vec![character; 2]);
        true
    }

    fn write_failed(&mut self, e: Errno) -> Failure {
        let failure = Failure::of_write(e, self.is_output);
        if failure == Failure::Temporary {
            self.write_error.get_or_insert(e);
        }
        failure
    }

    /// The first write error that is retried, once.
    fn take_write_error(&mut self) -> Option<Errno> {
        let e = self.write_error?;
        (!std::mem::replace(&mut self.has_logged, true)).then_some(e)
    }

    /// Whether the stream ends although not all writers have closed it.
    fn is_over(&self) -> bool {
        let has_more = |from| is(from, PollFlags::IN);
        let drained = self.buffer.pending().is_empty() && !self.from.as_ref().is_some_and(has_more);
        match self.left_to_copy {
            Some(_) => drained || !self.has_reader(),
            None if self.finishing => drained,
            None => {
                let may_hang_up = self.is_output && self.is_terminal && self.reader.is_none();
                may_hang_up && !self.has_reader()
            }
        }
    }

    /// Whether the destination is a FIFO, or a pipe.
    fn is_to_fifo(&self) -> bool {
        let stat = rustix::fs::fstat(&self.to);
        stat.is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode).is_fifo())
    }

    /// Whether the FIFO has a reader. `reader` must be closed, so that the shim is not counted.
    fn has_reader(&self) -> bool {
        has_reader(&self.to)
    }

    /// Discards the rest of an input. False: the stream must be closed, because the input has ended
    /// or no descriptor is available.
    fn discard(&mut self) -> bool {
        let null = self.from.as_ref().and_then(|_| runtime::null().ok());
        let Some(null) = null else { return false };
        (self.to, self.is_terminal) = (null, false);
        true
    }

    /// Closes the shim's own reading end, and says whether the FIFO may be closed: it has a reader,
    /// or its name was removed, so that it cannot get one. An empty FIFO also waits: a reader that
    /// opens a FIFO without a writer waits for one.
    fn may_close(&mut self) -> bool {
        self.reader = None;
        is_removed(&self.to) || self.has_reader()
    }
}

/// Whether a FIFO or pipe, of which this is the writing end, has a reader.
pub fn has_reader(to: &OwnedFd) -> bool {
    !is(to, PollFlags::ERR)
}

/// Whether the name of a FIFO was removed.
pub fn is_removed(fifo: &OwnedFd) -> bool {
    rustix::fs::fstat(fifo).is_ok_and(|stat| stat.st_nlink == 0)
}

/// Whether poll reports `flag` now.
fn is(fd: &OwnedFd, flag: PollFlags) -> bool {
    let mut fds = [PollFd::new(fd, flag)];
    let polled = rustix::event::poll(&mut fds, Some(&Timespec::default()));
    let [fd] = fds;
    polled.is_ok() && fd.revents().contains(flag)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};

    use rustix::event::EventfdFlags;
    use rustix::pipe::PipeFlags;

    use super::*;
    use crate::testing;

    #[test]
    fn a_stream_of_small_reads_does_not_delay_the_others() {
        // Each read returns 8 bytes.
        let from = rustix::event::eventfd(1000, EventfdFlags::SEMAPHORE).unwrap();
        let to = std::fs::OpenOptions::new().write(true).open("/dev/null").unwrap();
        let mut stream = Stream::output(from, to.into(), None).unwrap();
        for _ in 0..1000 / MAX_READS_AT_ONCE {
            assert_eq!(stream.copy_available(), CopyResult::More);
        }
        assert_eq!(stream.copy_available(), CopyResult::Blocked);
    }

    #[test]
    fn an_output_whose_destination_fails_for_a_while_loses_nothing() {
        if testing::ran_alone() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let (from, writer) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).unwrap();
        let to = rustix::net::socket(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::STREAM,
            None,
        );
        let mut stream = Stream::output(from, to.unwrap(), None).unwrap();
        rustix::io::write(&writer, b"word").unwrap();
        // ENOTCONN, until it is connected.
        assert_eq!(stream.copy_available(), CopyResult::Blocked);
        assert!(stream.retry_at.is_some());
        let listener = UnixListener::bind(dir.path().join("s")).unwrap();
        let address = rustix::net::SocketAddrUnix::new(dir.path().join("s")).unwrap();
        rustix::net::connect(&stream.to, &address).unwrap();
        let (mut reader, _): (UnixStream, _) = listener.accept().unwrap();
        drop(writer);
        assert_eq!(stream.copy_available(), CopyResult::Ended);
        drop(stream);
        assert_eq!(std::io::read_to_string(&mut reader).unwrap(), "word");
    }

    #[test]
    fn only_a_closed_end_is_final() {
        for e in [Errno::NOSPC, Errno::DQUOT, Errno::NOMEM, Errno::NOBUFS] {
            assert_eq!(Failure::of_write(e, true), Failure::Temporary, "{e}");
            assert_eq!(Failure::of_write(e, false), Failure::Temporary, "{e}");
        }
        for e in [Errno::IO, Errno::STALE] {
            assert_eq!(Failure::of_write(e, true), Failure::Temporary, "{e}");
            assert_eq!(Failure::of_write(e, false), Failure::Final, "{e}");
        }
        assert_eq!(Failure::of_write(Errno::PIPE, true), Failure::Final);
        assert_eq!(Failure::of_read(Errno::IO), Failure::Final);
    }
}
