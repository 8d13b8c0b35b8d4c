//! The signals of the shim, by one descriptor: SIGCHLD, and those that ask for its end.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::sys;

/// Bytes of a signal as it is read (signalfd(2)); its number comes first.
const SIZE: usize = size_of::<libc::signalfd_siginfo>();

/// The signals, blocked.
#[derive(Debug)]
pub struct Signals(OwnedFd);

impl Signals {
    /// Blocks them and takes them by a descriptor.
    pub fn new() -> io::Result<Self> {
        sys::signals(&[libc::SIGCHLD, libc::SIGTERM, libc::SIGINT]).map(Self)
    }

    /// Takes what is pending; the name of a signal that asks for the end. What SIGCHLD holds is of
    /// no interest: exits are fetched from the kernel.
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
