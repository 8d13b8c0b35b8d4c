//! The signals of the shim, read from a signalfd: SIGCHLD, and SIGTERM and SIGINT, which request
//! the shutdown. There are no handlers of signals: no system call but epoll_wait(2) is interrupted.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::sys;

/// Size of a signal as it is read (signalfd(2)), bytes. The signal number is its first field.
const SIZE: usize = size_of::<libc::signalfd_siginfo>();

/// A signalfd of blocked signals.
#[derive(Debug)]
pub struct Signals(OwnedFd);

impl Signals {
    /// Blocks the signals and opens the signalfd.
    pub fn new() -> io::Result<Self> {
        sys::signals(&[libc::SIGCHLD, libc::SIGTERM, libc::SIGINT]).map(Self)
    }

    /// Reads all pending signals. Returns the name of one that requests the shutdown. The fields of
    /// SIGCHLD are ignored, because exits are read by waitid(2).
    pub fn take(&self) -> Option<&'static str> {
        let mut asked = None;
        let mut buffer = [0; 4 * SIZE];
        while let Ok(count @ 1..) = rustix::io::read(&self.0, &mut buffer) {
            let (signals, _) = buffer.get(..count).unwrap_or_default().as_chunks::<SIZE>();
            asked = signals.iter().find_map(end).or(asked);
        }
        asked
    }
}

fn end(signal: &[u8; SIZE]) -> Option<&'static str> {
    let number = signal.first_chunk().map(|number| u32::from_ne_bytes(*number))?;
    match i32::try_from(number).ok()? {
        libc::SIGTERM => Some("SIGTERM"),
        libc::SIGINT => Some("SIGINT"),
        _ => None,
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
