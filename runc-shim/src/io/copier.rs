//! A thread that copies the streams of one process, and the main loop's handle of it. Only this
//! thread reads, writes and closes the pipes that the process shares with the shim.
//!
//! A process can hold the kernel's lock of a pipe for any time with a splice between the pipe and a
//! socket. A thread that uses or closes the pipe meanwhile sleeps uninterruptibly, even for SIGKILL
//! (`pipe_double_lock` in Linux `fs/pipe.c`). The main loop must never sleep so, because it has to
//! kill the process that holds the lock; and no other process may wait, because its last output is
//! lost when containerd removes the FIFOs, and because the execs of a container are its probes.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use rustix::event::EventfdFlags;
use rustix::event::epoll::EventFlags;
use rustix::termios::Winsize;

use super::stream::{Stream, Streams};
use crate::reactor::{Reactor, Source};

/// Stack size of the thread, bytes. Its calls are not deep.
const STACK: usize = 128 << 10;

/// A command for the thread.
#[derive(Debug)]
enum CopierCommand {
    Copy(Vec<Stream>),
    Finish,
    Resize(OwnedFd, Winsize),
    Close(Vec<OwnedFd>),
    /// The process was deleted: the thread ends when its streams have ended.
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
    /// How many output streams have ended.
    ended: usize,
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

/// The main loop's handle of a process's thread. The thread is never joined: it may sleep in the
/// kernel as long as a process wants.
#[derive(Debug)]
pub struct Copier {
    shared: Arc<Shared>,
    /// How many output streams have not ended, as far as the main loop knows.
    outputs: usize,
}

impl Copier {
    /// Starts the thread of a process of a container, which makes `notify_eventfd` readable when
    /// streams may have ended.
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
            }
            // The main loop, which looks then, closes what the two have shared.
            let notify_eventfd = Arc::clone(&thread_shared.notify_eventfd);
            drop((reactor, thread_shared));
            set(&notify_eventfd);
        })?;
        Ok(Self { shared, outputs: 0 })
    }

    fn send(&self, command: CopierCommand) {
        self.shared.state().commands.push(command);
        set(&self.shared.command_eventfd);
    }

    /// Begins to copy the streams of the process.
    pub fn copy(&mut self, streams: Vec<Stream>) {
        self.outputs += streams.iter().filter(|stream| stream.is_output()).count();
        self.send(CopierCommand::Copy(streams));
    }

    /// Whether output streams have ended since the last call.
    pub(super) fn take_ended(&mut self) -> io::Result<bool> {
        let mut state = self.shared.state();
        if let Some(e) = state.failed.take() {
            return Err(e);
        }
        let ended = std::mem::take(&mut state.ended);
        drop(state);
        self.outputs = self.outputs.saturating_sub(ended);
        Ok(ended > 0)
    }

    /// Handles the exit of a process with a terminal, or its hang-up: an output stream ends when
    /// its pending output is copied, and input is discarded. Then the thread closes the terminal.
    pub fn finish(&self, terminal: OwnedFd) {
        self.send(CopierCommand::Finish);
        self.close(vec![terminal]);
    }

    /// Changes the size of a terminal. The thread does it, because a process can hold the lock of a
    /// terminal, too (`tiocgwinsz`).
    pub fn resize(&self, terminal: OwnedFd, size: Winsize) {
        // A size that the thread has not set yet is outdated.
        let mut state = self.shared.state();
        state.commands.retain(|it| !matches!(it, CopierCommand::Resize(..)));
        drop(state);
        self.send(CopierCommand::Resize(terminal, size));
    }

    /// Has the thread close descriptors that the process shares.
    pub fn close(&self, ends: Vec<OwnedFd>) {
        if !ends.is_empty() {
            self.send(CopierCommand::Close(ends));
        }
    }

    /// Whether an output stream has not ended.
    pub fn is_copying(&self) -> bool {
        self.outputs > 0
    }

    /// Whether commands are queued or executed, or output of a deleted process is being copied.
    pub fn has_pending_work(&self) -> bool {
        let state = self.shared.state();
        state.is_busy || !state.commands.is_empty()
    }

    /// Handles the deletion of the process: ends the thread when its streams have ended. Output is
    /// still copied as long as its FIFO has a reader. Must be the last command.
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
            CopierCommand::Copy(added) => streams.copy(added, reactor),
            CopierCommand::Finish => streams.finish(),
            CopierCommand::Resize(terminal, size) => {
                // Fails for a terminal that is hung up.
                let _ = rustix::termios::tcsetwinsize(&terminal, size);
            }
            CopierCommand::Close(ends) => drop(ends),
            CopierCommand::End => {
                streams.process_deleted();
                ends = true;
            }
        }
    }
    ends
}

/// Reports the streams that have ended, and whether the thread is busy.
fn report(streams: &mut Streams, shared: &Shared) {
    let (ended, is_busy) = (streams.take_ended(), streams.has_output_of_deleted());
    let mut state = shared.state();
    let must_notify = ended > 0 || state.is_busy != is_busy;
    state.ended += ended;
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
    fn only_the_last_size_of_a_terminal_is_kept() {
        // There is no thread that executes the commands.
        let shared = Arc::new(Shared::new(Arc::new(eventfd().unwrap())).unwrap());
        let copier = Copier { shared, outputs: 0 };
        for row in 1..5 {
            let size = Winsize { ws_row: row, ws_col: 1, ws_xpixel: 0, ws_ypixel: 0 };
            // The descriptor may be any, because nothing uses it.
            copier.resize(eventfd().unwrap(), size);
        }
        let commands = &copier.shared.state().commands;
        assert!(matches!(commands[..], [CopierCommand::Resize(_, size)] if size.ws_row == 4));
    }
}
