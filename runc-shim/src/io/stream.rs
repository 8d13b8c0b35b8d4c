//! Streams between containers and containerd, copied by a thread.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use crate::reactor::{Reactor, Source};

/// What one stream moves before others have their turn; bytes.
const TURN: usize = 1 << 20;

/// What is read at once; bytes.
const BUFFER: usize = 8192;

/// Waits for a reader of the last output: the first, and the longest.
const FIRST_WAIT: Duration = Duration::from_millis(20);
const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// How long a full disk is left alone.
const FULL_WAIT: Duration = Duration::from_millis(500);

/// One direction of one stream.
#[derive(Debug)]
pub struct Stream {
    from: OwnedFd,
    to: OwnedFd,
    /// A reader of the FIFO that is written to, so that there is always one.
    reader: Option<OwnedFd>,
    is_output: bool,
    /// It comes from a terminal.
    is_terminal: bool,
    /// What was read and could not be written.
    held: Vec<u8>,
    /// All is copied; the FIFO is kept until a reader comes.
    last_wait: Option<(Instant, Duration)>,
    /// The process has ended: there is no more than what is there.
    finishing: bool,
    /// The process is deleted: it is copied as long as there is a reader.
    left: bool,
    /// The disk was full; it is tried again then.
    again: Option<Instant>,
}

/// What became of a turn.
#[derive(Debug, PartialEq, Eq)]
enum Turn {
    /// Nothing can be done now.
    Blocked,
    /// There is more.
    More,
    /// All is copied, or nothing can be any more.
    Ended,
}

impl Stream {
    /// From a process to containerd.
    pub fn output(from: OwnedFd, to: OwnedFd, reader: Option<OwnedFd>) -> Self {
        Self {
            from,
            to,
            reader,
            is_output: true,
            is_terminal: false,
            held: Vec::new(),
            last_wait: None,
            finishing: false,
            left: false,
            again: None,
        }
    }

    /// The same from a terminal.
    pub fn of_terminal(self) -> Self {
        Self { is_terminal: true, ..self }
    }

    /// From containerd to a process.
    pub fn input(from: OwnedFd, to: OwnedFd) -> Self {
        Self { is_output: false, ..Self::output(from, to, None) }
    }

    /// Whether it copies from a process.
    pub fn is_output(&self) -> bool {
        self.is_output
    }

    /// Its descriptors, for one that is not copied.
    pub fn into_ends(self) -> impl Iterator<Item = OwnedFd> {
        [self.from, self.to].into_iter().chain(self.reader)
    }

    fn turn(&mut self) -> Turn {
        let mut moved = 0;
        while moved < TURN {
            match self.copy() {
                Ok(0) => return Turn::Ended,
                Ok(count) => moved += count,
                Err(Errno::AGAIN) if self.is_over() => return Turn::Ended,
                Err(Errno::AGAIN) => return Turn::Blocked,
                Err(Errno::NOSPC | Errno::DQUOT) => {
                    self.again = Some(Instant::now() + FULL_WAIT);
                    return Turn::Blocked;
                }
                Err(Errno::INTR) => {}
                // The other end is gone.
                Err(_) => return Turn::Ended,
            }
        }
        Turn::More
    }

    /// Reads, and writes what was read. No splice: it holds the locks of both pipes, so that
    /// containerd would sleep with this thread.
    fn copy(&mut self) -> Result<usize, Errno> {
        if self.held.is_empty() {
            let mut buffer = [0; BUFFER];
            let count = match rustix::io::read(&self.from, &mut buffer) {
                // No process has the terminal open, and one may open it again.
                Err(Errno::IO) if self.is_terminal => return Err(Errno::AGAIN),
                read => read?,
            };
            self.held.extend_from_slice(buffer.get(..count).unwrap_or_default());
            if count == 0 {
                return Ok(0);
            }
        }
        let count = rustix::io::write(&self.to, &self.held)?;
        if count == self.held.len() {
            self.held = Vec::new();
        } else {
            self.held.drain(..count);
        }
        Ok(count)
    }

    /// Whether nothing more can be copied, although not all writers are gone.
    fn is_over(&self) -> bool {
        let drained = self.held.is_empty() && !is(&self.from, PollFlags::IN);
        (self.finishing && drained) || (self.left && !self.has_reader())
    }

    /// Whether the FIFO has a reader other than this process, which is none any more.
    fn has_reader(&self) -> bool {
        !is(&self.to, PollFlags::ERR)
    }

    /// Whether the FIFO may be closed: it has a reader, or nothing is in it.
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

/// All streams.
#[derive(Debug, Default)]
pub struct Streams {
    streams: BTreeMap<u32, Stream>,
    /// Those that have ended.
    ended: Vec<u32>,
    /// Those that have more to copy and have had their turn.
    ready: Vec<u32>,
}

impl Streams {
    /// Begins to copy a stream, which gets this number.
    pub fn add(&mut self, number: u32, stream: Stream, reactor: &Reactor) {
        let source = Source::Stream(number);
        let (read, write) = (EventFlags::IN | EventFlags::ET, EventFlags::OUT | EventFlags::ET);
        // A file is always ready.
        let _ = reactor.add(&stream.from, source, read);
        let _ = reactor.add(&stream.to, source, write);
        self.streams.insert(number, stream);
        self.ready.push(number);
    }

    /// A stream is ready.
    pub fn ready(&mut self, number: u32) {
        if self.streams.contains_key(&number) && !self.ready.contains(&number) {
            self.ready.push(number);
        }
    }

    /// Copies.
    pub fn run(&mut self) {
        for number in std::mem::take(&mut self.ready) {
            let Some(stream) = self.streams.get_mut(&number) else { continue };
            if stream.last_wait.is_some() {
                continue;
            }
            match stream.turn() {
                Turn::Blocked => {}
                Turn::More => self.ready.push(number),
                Turn::Ended => self.end(number),
            }
        }
    }

    /// The numbers of those that have ended since the last call.
    pub fn take_ended(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.ended)
    }

    /// The process has ended: what is left of a terminal's output is copied, and no more.
    pub fn finish(&mut self, number: u32) {
        match self.streams.get_mut(&number) {
            Some(stream) if stream.is_output => {
                stream.finishing = true;
                self.ready(number);
            }
            _ => self.remove(number),
        }
    }

    /// A terminal is hung up: copies what is there, and ends it.
    pub fn hang_up(&mut self, number: u32) {
        if let Some(stream) = self.streams.get_mut(&number) {
            // Others may still write to it: what was there is less than this.
            let _ = (0..16).find(|_| stream.turn() != Turn::More);
            self.end(number);
        }
    }

    /// The process is deleted. Output that a slow reader has not taken is still copied.
    pub fn leave(&mut self, number: u32) {
        if let Some(stream) = self.streams.get_mut(&number)
            && stream.is_output
            && stream.last_wait.is_none()
            && stream.reader.take().is_some()
            && stream.has_reader()
        {
            stream.left = true;
        } else {
            self.remove(number);
        }
    }

    /// Whether output of a deleted process is being copied.
    pub fn has_left(&self) -> bool {
        self.streams.values().any(|stream| stream.left)
    }

    fn remove(&mut self, number: u32) {
        self.streams.remove(&number);
    }

    /// When there is something to do although nothing is ready: more to copy, or a time that has
    /// come ([`Streams::pass_time`]).
    pub fn deadline(&self) -> Option<Instant> {
        if !self.ready.is_empty() {
            return Some(Instant::now());
        }
        let times = self.streams.values().map(|stream| {
            let last = stream.last_wait.map(|(at, _)| at);
            last.or(stream.again)
        });
        times.flatten().min()
    }

    /// Closes the FIFOs that have found a reader, and tries full disks again.
    pub fn pass_time(&mut self) {
        let now = Instant::now();
        let full = self
            .streams
            .iter_mut()
            .filter_map(|(number, stream)| stream.again.take_if(|at| *at <= now).map(|_| *number));
        let full: Vec<u32> = full.collect();
        for number in full {
            self.ready(number);
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

    /// A stream has ended. The last output of a process stays in its FIFO until there is a reader,
    /// which there may not be while containerd is restarted.
    fn end(&mut self, number: u32) {
        let Some(stream) = self.streams.get_mut(&number) else { return };
        self.ended.push(number);
        let keeps = stream.reader.is_some() && !stream.may_close();
        if keeps {
            stream.last_wait = Some((Instant::now() + FIRST_WAIT, FIRST_WAIT));
        } else {
            self.streams.remove(&number);
        }
    }
}
