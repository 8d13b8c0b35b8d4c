//! Streams between a container and containerd, copied by the container's copier thread.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use crate::reactor::{Reactor, Source};

/// Maximum number of bytes that are copied of one stream before the other streams.
const MAX_BYTES_AT_ONCE: usize = 1 << 20;

/// Size of one read, bytes.
const BUFFER: usize = 8192;

/// Default size of a pipe, bytes (pipe(7)).
const PIPE_SIZE: usize = 64 << 10;

/// Delays between checks for a reader of the last output: the first and the longest.
const FIRST_WAIT: Duration = Duration::from_millis(20);
const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// Delay before another write to a full disk.
const FULL_WAIT: Duration = Duration::from_millis(500);

/// One stream: bytes are copied in one direction.
#[derive(Debug)]
pub struct Stream {
    from: OwnedFd,
    to: OwnedFd,
    /// The shim's own reading end of the FIFO at `to`, so that the FIFO always has a reader.
    reader: Option<OwnedFd>,
    is_output: bool,
    /// `from` is a terminal.
    is_terminal: bool,
    /// Bytes that were read and not written yet.
    held: Vec<u8>,
    /// All is copied and the FIFO is kept open for a reader: the time of the next check, and the
    /// delay before it.
    last_wait: Option<(Instant, Duration)>,
    /// The process has exited: the stream ends when its pending output is copied.
    finishing: bool,
    /// The process was deleted: how many bytes are still copied. The stream also ends when nothing
    /// is pending, and when its FIFO has no reader.
    left_to_copy: Option<usize>,
    /// The disk was full; time of the next attempt.
    retry_at: Option<Instant>,
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

impl Stream {
    /// A stream from a process to containerd. Makes both ends non-blocking: one thread copies all
    /// streams of the container, and no process may block it.
    ///
    /// # Errors
    /// The kernel refuses that.
    pub fn output(from: OwnedFd, to: OwnedFd, reader: Option<OwnedFd>) -> Result<Self, Errno> {
        for end in [&from, &to] {
            rustix::io::ioctl_fionbio(end, true)?;
        }
        Ok(Self {
            from,
            to,
            reader,
            is_output: true,
            is_terminal: false,
            held: Vec::new(),
            last_wait: None,
            finishing: false,
            left_to_copy: None,
            retry_at: None,
        })
    }

    /// The same stream, with a terminal as its source.
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
        [self.from, self.to].into_iter().chain(self.reader)
    }

    fn copy_available(&mut self) -> CopyResult {
        let mut moved = 0;
        while moved < MAX_BYTES_AT_ONCE {
            if self.left_to_copy == Some(0) {
                return CopyResult::Ended;
            }
            match self.copy() {
                Ok(0) => return CopyResult::Ended,
                Ok(count) => moved += count,
                Err(Errno::AGAIN) if self.is_over() => return CopyResult::Ended,
                Err(Errno::AGAIN) => return CopyResult::Blocked,
                Err(Errno::NOSPC | Errno::DQUOT) => {
                    self.retry_at = Some(Instant::now() + FULL_WAIT);
                    return CopyResult::Blocked;
                }
                Err(Errno::INTR) => {}
                // The other end was closed.
                Err(_) => return CopyResult::Ended,
            }
        }
        CopyResult::More
    }

    /// Reads once and writes what was read. Does not use splice(2), which holds the locks of both
    /// pipes, so that containerd would sleep together with this thread.
    fn copy(&mut self) -> Result<usize, Errno> {
        if self.held.is_empty() {
            let mut buffer = [0; BUFFER];
            let count = match rustix::io::read(&self.from, &mut buffer) {
                // No process has the terminal open, but one may open it again.
                Err(Errno::IO) if self.is_terminal => return Err(Errno::AGAIN),
                read => read?,
            };
            self.held.extend_from_slice(buffer.get(..count).unwrap_or_default());
            if count == 0 {
                return Ok(0);
            }
        }
        let count = rustix::io::write(&self.to, &self.held)?;
        self.left_to_copy = self.left_to_copy.map(|left| left.saturating_sub(count));
        if count == self.held.len() {
            self.held = Vec::new();
        } else {
            self.held.drain(..count);
        }
        Ok(count)
    }

    /// Whether the stream ends although not all writers have closed it.
    fn is_over(&self) -> bool {
        let drained = self.held.is_empty() && !is(&self.from, PollFlags::IN);
        match self.left_to_copy {
            Some(_) => drained || !self.has_reader(),
            None => self.finishing && drained,
        }
    }

    /// Whether the FIFO has a reader. `reader` must be closed, so that the shim is not counted.
    fn has_reader(&self) -> bool {
        !is(&self.to, PollFlags::ERR)
    }

    /// Closes the shim's own reading end, and says whether the FIFO may be closed: it has a reader,
    /// or it is empty.
    fn may_close(&mut self) -> bool {
        self.reader = None;
        self.has_reader() || rustix::io::ioctl_fionread(&self.to).unwrap_or(0) == 0
    }
}

/// Whether poll reports `flag` now.
fn is(fd: &OwnedFd, flag: PollFlags) -> bool {
    let mut fds = [PollFd::new(fd, flag)];
    let polled = rustix::event::poll(&mut fds, Some(&Timespec::default()));
    let [fd] = fds;
    polled.is_ok() && fd.revents().contains(flag)
}

/// The streams of a container and its execs.
#[derive(Debug, Default)]
pub struct Streams {
    streams: BTreeMap<u32, Stream>,
    /// The ids of streams that have ended.
    ended: Vec<u32>,
    /// The ids of streams that may have more to copy.
    ready: Vec<u32>,
}

impl Streams {
    /// Begins to copy a stream with this id.
    pub fn add(&mut self, id: u32, stream: Stream, reactor: &Reactor) {
        let source = Source::Stream(id);
        let (read, write) = (EventFlags::IN | EventFlags::ET, EventFlags::OUT | EventFlags::ET);
        // epoll refuses a regular file, which is always ready.
        let _ = reactor.add(&stream.from, source, read);
        let _ = reactor.add(&stream.to, source, write);
        self.streams.insert(id, stream);
        self.ready.push(id);
    }

    /// Notes that a stream is ready.
    pub fn ready(&mut self, id: u32) {
        if self.streams.contains_key(&id) && !self.ready.contains(&id) {
            self.ready.push(id);
        }
    }

    /// Copies the streams that are ready.
    pub fn run(&mut self) {
        for id in std::mem::take(&mut self.ready) {
            let Some(stream) = self.streams.get_mut(&id) else { continue };
            if stream.last_wait.is_some() {
                continue;
            }
            match stream.copy_available() {
                CopyResult::Blocked => {}
                CopyResult::More => self.ready.push(id),
                CopyResult::Ended => self.end(id),
            }
        }
    }

    /// The ids of the streams that have ended since the last call.
    pub fn take_ended(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.ended)
    }

    /// Ends a stream after the process has exited: an output stream when its pending output is
    /// copied, an input stream at once.
    pub fn finish(&mut self, id: u32) {
        match self.streams.get_mut(&id) {
            Some(stream) if stream.is_output => {
                stream.finishing = true;
                self.ready(id);
            }
            _ => self.remove(id),
        }
    }

    /// Copies the pending output of a terminal, and then ends the stream.
    pub fn hang_up(&mut self, id: u32) {
        if let Some(stream) = self.streams.get_mut(&id) {
            // Bounded, because processes may still write. The pending output is less than this.
            let _ = (0..16).find(|_| stream.copy_available() != CopyResult::More);
            self.end(id);
        }
    }

    /// Handles the deletion of the process: pending output is still copied as long as its FIFO has
    /// a reader; any other stream is closed. What other processes with the same pipe write later is
    /// not copied: containerd waits for the end of the output of a deleted exec (`process.Delete`
    /// of its client), and these processes may never exit.
    pub fn process_deleted(&mut self, id: u32) {
        if let Some(stream) = self.streams.get_mut(&id)
            && stream.is_output
            && stream.last_wait.is_none()
            && stream.reader.take().is_some()
            && stream.has_reader()
        {
            // A terminal has no pipe size; it holds less.
            let in_pipe = rustix::pipe::fcntl_getpipe_size(&stream.from).unwrap_or(PIPE_SIZE);
            stream.left_to_copy = Some(in_pipe + stream.held.len());
            self.ready(id);
        } else {
            self.remove(id);
        }
    }

    /// Whether output of a deleted process is being copied.
    pub fn has_output_of_deleted(&self) -> bool {
        self.streams.values().any(|stream| stream.left_to_copy.is_some())
    }

    /// Whether there is no stream.
    pub fn is_empty(&self) -> bool {
        self.streams.is_empty()
    }

    fn remove(&mut self, id: u32) {
        self.streams.remove(&id);
    }

    /// When [`Streams::run`] or [`Streams::pass_time`] has work to do at the latest.
    pub fn deadline(&self) -> Option<Instant> {
        if !self.ready.is_empty() {
            return Some(Instant::now());
        }
        let times = self.streams.values().map(|stream| {
            let last = stream.last_wait.map(|(at, _)| at);
            last.or(stream.retry_at)
        });
        times.flatten().min()
    }

    /// Closes the FIFOs that have got a reader, and retries writes to full disks.
    pub fn pass_time(&mut self) {
        let now = Instant::now();
        let full = self
            .streams
            .iter_mut()
            .filter_map(|(id, stream)| stream.retry_at.take_if(|at| *at <= now).map(|_| *id));
        let full: Vec<u32> = full.collect();
        for id in full {
            self.ready(id);
        }
        self.streams.retain(|_, stream| {
            let Some((at, wait)) = stream.last_wait else { return true };
            if at <= now {
                if stream.may_close() {
                    return false;
                }
                let wait = (wait * 2).min(LONGEST_WAIT);
                stream.last_wait = Some((now + wait, wait));
            }
            true
        });
    }

    /// Ends a stream. The FIFO stays open until its last output has a reader, because it has none
    /// while containerd restarts.
    fn end(&mut self, id: u32) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        self.ended.push(id);
        let keeps = stream.reader.is_some() && !stream.may_close();
        if keeps {
            stream.last_wait = Some((Instant::now() + FIRST_WAIT, FIRST_WAIT));
        } else {
            self.streams.remove(&id);
        }
    }
}
