//! A thread that copies the streams of one container and of its execs, and the main loop's handle
//! of it. Only this thread reads, writes and closes the pipes that the container shares with the
//! shim.
//!
//! A process can hold the kernel's lock of a pipe for any time with a splice between the pipe and a
//! socket. A thread that uses or closes the pipe meanwhile sleeps uninterruptibly, even for SIGKILL
//! (`pipe_double_lock` in Linux `fs/pipe.c`). The main loop must never sleep so, because it has to
//! kill the process that holds the lock; and no other container may wait, because its last output
//! is lost when containerd removes the FIFOs.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use rustix::event::EventfdFlags;
use rustix::event::epoll::EventFlags;
use rustix::termios::Winsize;

use super::stream::{Stream, Streams};
use crate::error::{Code, Error};
use crate::reactor::{Reactor, Source};

/// Stack size of the thread, bytes. Its calls are not deep, and use one buffer.
const STACK: usize = 128 << 10;

/// Maximum number of queued commands. Beyond it no process gets streams, because the thread sleeps
/// in the kernel. An exec queues about six commands with nine descriptors.
const MAX_QUEUED: usize = 4096;

/// A command for the thread. Stream ids are those that [`Copier::add`] has returned.
#[derive(Debug)]
enum CopierCommand {
    Add(u32, Stream),
    Finish(u32),
    HangUp(u32),
    ProcessDeleted(u32),
    Resize(OwnedFd, Winsize),
    Close(Vec<OwnedFd>),
    /// The container was deleted: the thread ends when its streams have ended.
    End,
}

/// The state that the thread and the main loop share.
#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// Readable while the thread may have queued commands.
    command_eventfd: OwnedFd,
    /// Readable when the main loop should look at the states of all threads.
    notify_eventfd: Arc<OwnedFd>,
}

#[derive(Debug, Default)]
struct State {
    commands: Vec<CopierCommand>,
    /// The ids of streams that have ended.
    ended: Vec<u32>,
    /// The thread executes commands, or copies output of a deleted process.
    is_busy: bool,
    /// The error that has ended the thread.
    failed: Option<io::Error>,
}

impl Shared {
    fn new(notify_eventfd: Arc<OwnedFd>) -> io::Result<Self> {
        Ok(Self { state: Mutex::default(), command_eventfd: eventfd()?, notify_eventfd })
    }

    /// Locks the state. Never held during a system call on a stream, which may block.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An eventfd, see [`set`] and [`clear`].
pub(super) fn eventfd() -> io::Result<OwnedFd> {
    Ok(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// Makes an eventfd readable; [`clear`] reverts that.
fn set(eventfd: &OwnedFd) {
    // Fails only if the counter is full, and then it is readable.
    let _ = rustix::io::write(eventfd, &1_u64.to_ne_bytes());
}

/// Makes an eventfd unreadable.
pub(super) fn clear(eventfd: &OwnedFd) {
    let _ = rustix::io::read(eventfd, &mut [0; 8]);
}

/// The main loop's handle of a container's thread. The thread is never joined: it may sleep in the
/// kernel as long as a process of the container wants.
#[derive(Debug)]
pub struct Copier {
    shared: Arc<Shared>,
    next_id: u32,
    /// The ids of output streams whose end was not reported yet.
    outputs: BTreeSet<u32>,
}

impl Copier {
    /// Starts the thread of a container, which makes `notify_eventfd` readable when streams may
    /// have ended.
    pub(super) fn start(container: &str, notify_eventfd: Arc<OwnedFd>) -> io::Result<Self> {
        let shared = Arc::new(Shared::new(notify_eventfd)?);
        let reactor = Reactor::new()?;
        reactor.add(&shared.command_eventfd, Source::Copier, EventFlags::IN)?;
        let thread_shared = Arc::clone(&shared);
        let streams = Streams::new(container);
        let thread = std::thread::Builder::new().name("copier".to_owned()).stack_size(STACK);
        thread.spawn(move || {
            if let Err(e) = copy(streams, &reactor, &thread_shared) {
                thread_shared.state().failed = Some(e);
                set(&thread_shared.notify_eventfd);
            }
        })?;
        Ok(Self { shared, next_id: 0, outputs: BTreeSet::new() })
    }

    fn send(&self, command: CopierCommand) {
        self.shared.state().commands.push(command);
        set(&self.shared.command_eventfd);
    }

    /// Checks that the queue has room for the streams of another process.
    ///
    /// # Errors
    /// [`MAX_QUEUED`] commands are queued, because the thread sleeps in the kernel.
    pub fn check_queue(&self) -> Result<(), Error> {
        if self.shared.state().commands.len() < MAX_QUEUED {
            return Ok(());
        }
        let reason = format!(
            "a process holds the kernel's lock of a stream of the container: {MAX_QUEUED} commands \
             wait for it"
        );
        Err(Error::new(Code::RESOURCE_EXHAUSTED, reason))
    }

    /// Begins to copy a stream and returns its id.
    pub fn add(&mut self, stream: Stream) -> u32 {
        let id = self.next_id;
        self.next_id = self.next_id.wrapping_add(1);
        if stream.is_output() {
            self.outputs.insert(id);
        }
        self.send(CopierCommand::Add(id, stream));
        id
    }

    /// The ids of the streams that have ended since the last call.
    pub fn take_ended(&mut self) -> io::Result<Vec<u32>> {
        let mut state = self.shared.state();
        if let Some(e) = state.failed.take() {
            return Err(e);
        }
        let ended = std::mem::take(&mut state.ended);
        drop(state);
        for id in &ended {
            self.outputs.remove(id);
        }
        Ok(ended)
    }

    /// Tells that the process has exited: an output stream ends when its pending output is copied,
    /// an input stream ends at once.
    pub fn finish(&self, id: u32) {
        self.send(CopierCommand::Finish(id));
    }

    /// Closes a terminal: an output stream ends when its pending output is copied.
    pub fn hang_up(&self, id: u32) {
        self.send(CopierCommand::HangUp(id));
    }

    /// Tells that the process was deleted. Output is still copied as long as its FIFO has a reader.
    pub fn process_deleted(&mut self, id: u32) {
        self.outputs.remove(&id);
        self.send(CopierCommand::ProcessDeleted(id));
    }

    /// Changes the size of a terminal. The thread does it, because a process can hold the lock of a
    /// terminal, too (`tiocgwinsz`).
    ///
    /// # Errors
    /// The errors of [`Copier::check_queue`].
    pub fn resize(&self, terminal: OwnedFd, size: Winsize) -> Result<(), Error> {
        self.check_queue()?;
        self.send(CopierCommand::Resize(terminal, size));
        Ok(())
    }

    /// Has the thread close descriptors that a container shares.
    pub fn close(&self, ends: Vec<OwnedFd>) {
        if !ends.is_empty() {
            self.send(CopierCommand::Close(ends));
        }
    }

    /// Whether an output stream has not ended.
    pub fn is_copying(&self, id: u32) -> bool {
        self.outputs.contains(&id)
    }

    /// Whether commands are queued or executed, or output of a deleted process is being copied.
    pub fn has_pending_work(&self) -> bool {
        let state = self.shared.state();
        state.is_busy || !state.commands.is_empty()
    }

    /// Ends the thread when its streams have ended.
    pub(super) fn end(&self) {
        self.send(CopierCommand::End);
    }

    /// Whether the thread has ended.
    pub(super) fn has_ended(&self) -> bool {
        Arc::strong_count(&self.shared) == 1
    }
}

/// The main function of the thread.
fn copy(mut streams: Streams, reactor: &Reactor, shared: &Shared) -> io::Result<()> {
    let mut ends = false;
    while !(ends && streams.is_empty()) {
        for source in reactor.wait(streams.deadline())? {
            match source {
                Source::Stream(id) => streams.ready(id),
                _ => clear(&shared.command_eventfd),
            }
        }
        ends |= execute_commands(&mut streams, reactor, shared);
        streams.run();
        if streams.deadline().is_some_and(|at| at <= Instant::now()) {
            streams.handle_timeouts();
        }
        report(&mut streams, shared);
    }
    Ok(())
}

/// Executes the queued commands. True: one of them was [`CopierCommand::End`].
fn execute_commands(streams: &mut Streams, reactor: &Reactor, shared: &Shared) -> bool {
    let commands = {
        let mut state = shared.state();
        state.is_busy |= !state.commands.is_empty();
        std::mem::take(&mut state.commands)
    };
    let mut ends = false;
    for command in commands {
        match command {
            CopierCommand::Add(id, stream) => streams.add(id, stream, reactor),
            CopierCommand::Finish(id) => streams.finish(id),
            CopierCommand::HangUp(id) => streams.hang_up(id),
            CopierCommand::ProcessDeleted(id) => streams.process_deleted(id),
            CopierCommand::Resize(terminal, size) => {
                // Fails for a terminal that is hung up.
                let _ = rustix::termios::tcsetwinsize(&terminal, size);
            }
            CopierCommand::Close(ends) => drop(ends),
            CopierCommand::End => ends = true,
        }
    }
    ends
}

/// Reports the streams that have ended, and whether the thread is busy.
fn report(streams: &mut Streams, shared: &Shared) {
    let (ended, is_busy) = (streams.take_ended(), streams.has_output_of_deleted());
    let mut state = shared.state();
    let must_notify = !ended.is_empty() || state.is_busy != is_busy;
    state.ended.extend(ended);
    state.is_busy = is_busy;
    drop(state);
    if must_notify {
        set(&shared.notify_eventfd);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_process_gets_streams_while_too_many_commands_are_queued() {
        // There is no thread that executes the commands.
        let shared = Arc::new(Shared::new(Arc::new(eventfd().unwrap())).unwrap());
        let copier = Copier { shared, next_id: 0, outputs: BTreeSet::new() };
        for _ in 0..MAX_QUEUED {
            copier.check_queue().unwrap();
            copier.finish(0);
        }
        assert_eq!(copier.check_queue().unwrap_err().code, Code::RESOURCE_EXHAUSTED);
    }
}
