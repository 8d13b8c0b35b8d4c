//! The thread that copies, and the loop's end of it. Only this thread reads, writes and closes the
//! pipes that a container shares with the shim.
//!
//! A process keeps the kernel's lock of a pipe for as long as it likes, by a splice between the
//! pipe and a socket. Whoever uses or closes the pipe meanwhile sleeps, and not even SIGKILL ends
//! that sleep (`pipe_double_lock` of Linux `fs/pipe.c`). The loop must stay awake: its Kill ends
//! the process, and so the sleep.

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

/// The thread's stack, bytes: it calls little, and has one buffer.
const STACK: usize = 128 << 10;

/// How many orders may wait: no process gets streams meanwhile, as a container makes the thread
/// sleep. An exec has about six, with nine descriptors.
const MOST_WAITING: usize = 4096;

/// What the thread is to do.
#[derive(Debug)]
enum Order {
    Add(u32, Stream),
    Finish(u32),
    HangUp(u32),
    Leave(u32),
    Resize(OwnedFd, Winsize),
    Close(Vec<OwnedFd>),
}

/// What the thread and the loop share.
#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// Tells the thread that there are orders.
    orders: OwnedFd,
    /// Tells the loop that there is news.
    news: OwnedFd,
}

#[derive(Debug, Default)]
struct State {
    orders: Vec<Order>,
    /// Streams that have ended.
    ended: Vec<u32>,
    /// Orders are under way, or output of a deleted process is being copied.
    is_busy: bool,
    /// The thread has ended because of this.
    failed: Option<io::Error>,
}

impl Shared {
    fn new() -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let (orders, news) = (rustix::event::eventfd(0, flags)?, rustix::event::eventfd(0, flags)?);
        Ok(Self { state: Mutex::default(), orders, news })
    }

    /// Held for moments only, never while a stream is used.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Makes an eventfd readable, or no longer.
fn set(eventfd: &OwnedFd) {
    // Fails where it is readable already.
    let _ = rustix::io::write(eventfd, &1_u64.to_ne_bytes());
}

fn clear(eventfd: &OwnedFd) {
    let _ = rustix::io::read(eventfd, &mut [0; 8]);
}

/// The loop's end.
#[derive(Debug)]
pub struct Copier {
    shared: Arc<Shared>,
    next: u32,
    /// Output of which the end was not reported yet.
    outputs: BTreeSet<u32>,
}

impl Copier {
    /// Starts the thread. `reactor` reports [`Source::Copier`] when there is news.
    pub fn start(reactor: &Reactor) -> io::Result<Self> {
        let shared = Arc::new(Shared::new()?);
        reactor.add(&shared.news, Source::Copier, EventFlags::IN)?;
        let own = Reactor::new()?;
        own.add(&shared.orders, Source::Copier, EventFlags::IN)?;
        let of_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("copier".to_owned()).stack_size(STACK);
        thread.spawn(move || {
            if let Err(e) = copy(&own, &of_thread) {
                of_thread.state().failed = Some(e);
                set(&of_thread.news);
            }
        })?;
        Ok(Self { shared, next: 0, outputs: BTreeSet::new() })
    }

    fn order(&self, order: Order) {
        self.shared.state().orders.push(order);
        set(&self.shared.orders);
    }

    /// Whether another process can get streams.
    ///
    /// # Errors
    /// The thread sleeps, and too much waits for it.
    pub fn check_room(&self) -> Result<(), Error> {
        if self.shared.state().orders.len() < MOST_WAITING {
            return Ok(());
        }
        let reason = "a container of the pod holds the kernel's lock of its standard streams";
        Err(Error::new(Code::ResourceExhausted, reason))
    }

    /// Begins to copy; the stream's number.
    pub fn add(&mut self, stream: Stream) -> u32 {
        let number = self.next;
        self.next = self.next.wrapping_add(1);
        if stream.is_output() {
            self.outputs.insert(number);
        }
        self.order(Order::Add(number, stream));
        number
    }

    /// The streams that have ended since the last call.
    pub fn take_ended(&mut self) -> io::Result<Vec<u32>> {
        clear(&self.shared.news);
        let mut state = self.shared.state();
        if let Some(e) = state.failed.take() {
            return Err(e);
        }
        let ended = std::mem::take(&mut state.ended);
        drop(state);
        for number in &ended {
            self.outputs.remove(number);
        }
        Ok(ended)
    }

    /// The process has ended: what is left of a terminal's output is copied, and no more.
    pub fn finish(&self, number: u32) {
        self.order(Order::Finish(number));
    }

    /// A terminal is hung up: copies what is there, and ends it.
    pub fn hang_up(&self, number: u32) {
        self.order(Order::HangUp(number));
    }

    /// The process is deleted. Output that a slow reader has not taken is still copied.
    pub fn leave(&mut self, number: u32) {
        self.outputs.remove(&number);
        self.order(Order::Leave(number));
    }

    /// Changes the size of a terminal, of which a process can hold the lock, too (`tiocgwinsz`).
    ///
    /// # Errors
    /// As [`Copier::check_room`].
    pub fn resize(&self, terminal: OwnedFd, size: Winsize) -> Result<(), Error> {
        self.check_room()?;
        self.order(Order::Resize(terminal, size));
        Ok(())
    }

    /// Closes descriptors that a container shares.
    pub fn close(&self, ends: Vec<OwnedFd>) {
        if !ends.is_empty() {
            self.order(Order::Close(ends));
        }
    }

    /// Whether a process's output is still being copied.
    pub fn is_copying(&self, number: u32) -> bool {
        self.outputs.contains(&number)
    }

    /// Whether something is left to do for processes that are deleted.
    pub fn has_left(&self) -> bool {
        let state = self.shared.state();
        state.is_busy || !state.orders.is_empty()
    }
}

/// The thread.
fn copy(reactor: &Reactor, shared: &Shared) -> io::Result<()> {
    let mut streams = Streams::default();
    loop {
        for (source, _) in reactor.wait(streams.deadline())? {
            match source {
                Source::Stream(number) => streams.ready(number),
                _ => clear(&shared.orders),
            }
        }
        let orders = {
            let mut state = shared.state();
            state.is_busy |= !state.orders.is_empty();
            std::mem::take(&mut state.orders)
        };
        for order in orders {
            match order {
                Order::Add(number, stream) => streams.add(number, stream, reactor),
                Order::Finish(number) => streams.finish(number),
                Order::HangUp(number) => streams.hang_up(number),
                Order::Leave(number) => streams.leave(number),
                Order::Resize(terminal, size) => {
                    // One that is hung up has none.
                    let _ = rustix::termios::tcsetwinsize(&terminal, size);
                }
                Order::Close(ends) => drop(ends),
            }
        }
        streams.run();
        if streams.deadline().is_some_and(|at| at <= Instant::now()) {
            streams.pass_time();
        }
        let (ended, is_busy) = (streams.take_ended(), streams.has_left());
        let mut state = shared.state();
        let has_news = !ended.is_empty() || state.is_busy != is_busy;
        state.ended.extend(ended);
        state.is_busy = is_busy;
        drop(state);
        if has_news {
            set(&shared.news);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_process_gets_streams_while_too_many_orders_wait() {
        // Without a thread that takes them.
        let shared = Arc::new(Shared::new().unwrap());
        let copier = Copier { shared, next: 0, outputs: BTreeSet::new() };
        for _ in 0..MOST_WAITING {
            copier.check_room().unwrap();
            copier.finish(0);
        }
        assert_eq!(copier.check_room().unwrap_err().code, Code::ResourceExhausted);
    }
}
