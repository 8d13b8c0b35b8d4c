//! The streams of a process, as the copier thread handles them.

use std::collections::BTreeMap;
use std::io;
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;

use super::buffer::PIPE;
use super::{CopyResult, Stream};
use crate::log;
use crate::reactor::{Reactor, Source};

/// Delays between checks for a reader of a FIFO whose stream has ended: the first and the longest.
const FIRST_WAIT: Duration = Duration::from_millis(20);
const LONGEST_WAIT: Duration = Duration::from_secs(10);

/// The streams of a process.
#[derive(Debug, Default)]
pub struct Streams {
    /// The container's id, for messages.
    container: String,
    streams: BTreeMap<u32, Stream>,
    /// How many output streams have ended.
    ended: usize,
    /// The ids of streams that may have more to copy.
    ready: Vec<u32>,
    /// An error of epoll was logged.
    has_logged: bool,
}

impl Streams {
    /// No streams yet.
    pub fn new(container: &str) -> Self {
        Self { container: container.to_owned(), ..Self::default() }
    }

    /// Begins to copy the streams of the process.
    pub fn copy(&mut self, streams: Vec<Stream>, reactor: &Reactor) {
        for (id, stream) in (0..).zip(streams) {
            self.add(id, stream, reactor);
        }
    }

    fn add(&mut self, id: u32, mut stream: Stream, reactor: &Reactor) {
        let from = stream.from.iter().map(|from| (from, EventFlags::IN));
        for (end, flag) in from.chain([(&stream.to, EventFlags::OUT)]) {
            match reactor.add(end, Source::Stream(id), flag | EventFlags::ET) {
                // epoll refuses a regular file, which is always ready.
                Err(e) if e.raw_os_error() != Some(libc::EPERM) => {
                    stream.is_watched = false;
                    self.log_unwatched(&e);
                }
                _ => {}
            }
        }
        self.streams.insert(id, stream);
        self.ready.push(id);
    }

    /// Logs once that streams are copied by time: the node has no memory, or too many watches
    /// (`fs.epoll.max_user_watches`), for epoll.
    fn log_unwatched(&mut self, e: &io::Error) {
        if !std::mem::replace(&mut self.has_logged, true) {
            log::warn(format_args!(
                "container {}: failed to watch streams; copying every 100 ms: {e}",
                self.container
            ));
        }
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
            let result = stream.copy_available();
            if let Some(e) = stream.take_write_error() {
                log::warn(format_args!(
                    "container {}: failed to write a stream; retrying: {e}",
                    self.container
                ));
            }
            match result {
                CopyResult::Blocked => {}
                CopyResult::More => self.ready.push(id),
                CopyResult::Ended => self.end(id),
            }
        }
    }

    /// How many output streams have ended since the last call.
    pub fn take_ended(&mut self) -> usize {
        std::mem::take(&mut self.ended)
    }

    /// Handles the exit of a process with a terminal, or its hang-up: an output stream ends when
    /// its pending output is copied. Input is read and discarded until the process is deleted:
    /// containerd stops reading the output when a write of input fails (`ExecIO.Attach` of CRI),
    /// and waits for a FIFO of input that has no reader.
    pub fn finish(&mut self) {
        self.streams.retain(|_, stream| stream.is_output || stream.discard());
        for stream in self.streams.values_mut().filter(|stream| stream.is_output) {
            stream.finishing = true;
        }
        self.ready.extend(self.streams.keys());
    }

    /// Handles the deletion of the process: pending output is still copied as long as its FIFO has
    /// a reader; any other stream is closed. What other processes with the same pipe write later is
    /// not copied: containerd waits for the end of the output of a deleted exec (`process.Delete`
    /// of its client), and these processes may never exit.
    pub fn process_deleted(&mut self) {
        self.streams.retain(|_, stream| {
            stream.reader = None;
            let is_pending = stream.is_output && stream.last_wait.is_none() && stream.is_to_fifo();
            // A terminal has no pipe size; it holds less.
            let size = |from| rustix::pipe::fcntl_getpipe_size(from).unwrap_or(PIPE);
            let in_pipe = stream.from.as_ref().map_or(0, size);
            stream.left_to_copy = Some(in_pipe + stream.buffer.pending().len());
            is_pending && stream.has_reader()
        });
        self.ready.extend(self.streams.keys());
    }

    /// Whether output of a deleted process is being copied.
    pub fn has_output_of_deleted(&self) -> bool {
        self.streams.values().any(|stream| stream.left_to_copy.is_some())
    }

    /// Whether there is no stream.
    pub fn is_empty(&self) -> bool {
        self.streams.is_empty()
    }

    /// When [`Streams::run`] or [`Streams::handle_timeouts`] has work to do at the latest.
    pub fn deadline(&self) -> Option<Instant> {
        if !self.ready.is_empty() {
            return Some(Instant::now());
        }
        let times = self.streams.values().map(|stream| {
            let last = stream.last_wait.map(|(at, _)| at);
            [last.or(stream.retry_at), stream.buffer.deadline()].into_iter().flatten().min()
        });
        times.flatten().min()
    }

    /// Closes the FIFOs that have got a reader or lost their name, copies the streams whose next
    /// attempt is due, and gives memory back.
    pub fn handle_timeouts(&mut self) {
        let now = Instant::now();
        for stream in self.streams.values_mut() {
            stream.shrink(now);
        }
        let due = self
            .streams
            .iter_mut()
            .filter_map(|(id, stream)| stream.retry_at.take_if(|at| *at <= now).map(|_| *id));
        let due: Vec<u32> = due.collect();
        for id in due {
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

    /// Ends a stream. The FIFO of an output stays open, also an empty one, until it has a reader:
    /// containerd may be restarting.
    fn end(&mut self, id: u32) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        if stream.is_output {
            self.ended += 1;
            if stream.reader.is_some() && !stream.may_close() {
                stream.last_wait = Some((Instant::now() + FIRST_WAIT, FIRST_WAIT));
                // A terminal hangs up.
                stream.from = None;
                return;
            }
        } else if stream.from.is_none() {
            self.streams.values_mut().for_each(|stream| stream.reader = None);
            self.ready.extend(self.streams.keys());
        }
        self.streams.remove(&id);
    }
}

#[cfg(test)]
mod tests {
    use rustix::pipe::PipeFlags;

    use super::*;
    use crate::reactor::UNWATCHED_WAIT;
    use crate::testing;

    #[test]
    fn a_fifo_waits_for_a_reader_only_while_it_has_a_name() {
        if testing::ran_alone() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("fifo");
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        for words in ["words", ""] {
            rustix::fs::mkfifoat(rustix::fs::CWD, &path, mode).unwrap();
            let (from, writer) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).unwrap();
            let reader = std::fs::File::options().read(true).write(true).open(&path).unwrap();
            let to = std::fs::File::options().write(true).open(&path).unwrap();
            let mut streams = Streams::default();
            let stream = Stream::output(from, to.into(), Some(reader.into())).unwrap();
            streams.add(1, stream, &Reactor::new().unwrap());
            rustix::io::write(&writer, words.as_bytes()).unwrap();
            drop(writer);
            streams.run();
            assert_eq!(streams.take_ended(), 1);
            assert!(!streams.is_empty(), "{words:?}: the FIFO has no reader yet");
            std::fs::remove_file(&path).unwrap();
            std::thread::sleep(FIRST_WAIT);
            streams.handle_timeouts();
            assert!(streams.is_empty(), "{words:?}: the FIFO cannot get a reader any more");
        }
    }

    #[test]
    fn a_stream_that_epoll_does_not_watch_is_copied_by_time() {
        if testing::ran_alone() {
            return;
        }
        let reactor = Reactor::new().unwrap();
        let (from, writer) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).unwrap();
        let (reader, to) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).unwrap();
        // EEXIST, in place of the errors of a node without memory.
        reactor.add(&from, Source::Copier, EventFlags::empty()).unwrap();
        let mut streams = Streams::default();
        streams.add(1, Stream::output(from, to, None).unwrap(), &reactor);
        streams.run();
        let mut later = || {
            assert!(streams.deadline().is_some(), "the thread wakes");
            std::thread::sleep(UNWATCHED_WAIT);
            streams.handle_timeouts();
            streams.run();
            streams.take_ended()
        };
        rustix::io::write(&writer, b"word").unwrap();
        assert_eq!(later(), 0);
        assert_eq!(rustix::io::read(&reader, &mut [0; 8]).unwrap(), 4);
        drop(writer);
        assert_eq!(later(), 1);
    }
}
