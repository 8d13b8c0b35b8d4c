//! The bytes of a stream that were read and not written yet.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::io::Errno;

/// Size of the buffer of a stream that carries little, bytes.
const SMALL: usize = 8 << 10;

/// Size of the buffer of a stream that carries much, bytes. With a small one a process that fills
/// the pipe is woken and interrupted for each part of its output. The C library maps so much memory
/// separately, and gives it back to the kernel.
const LARGE: usize = 128 << 10;

/// Default size of a pipe, bytes (pipe(7)).
pub const PIPE: usize = 64 << 10;

/// Size of the pipes of a stream that carries much, bytes. On a busy node the thread and containerd
/// run late; meanwhile the process can write.
const LARGE_PIPE: usize = 256 << 10;

/// How long the large buffer and pipes are kept after they were needed. The kernel limits the
/// memory of all pipes of a user (`pipe-user-pages-soft`), and then makes small ones.
const KEPT: Duration = Duration::from_millis(100);

/// A buffer that takes memory while it is used, and much memory while much is read.
#[derive(Debug, Default)]
pub struct Buffer {
    bytes: Vec<u8>,
    /// How many of the bytes are written.
    written: usize,
    /// When the large buffer and pipes are given back; `None`: small ones are enough.
    large_until: Option<Instant>,
}

impl Buffer {
    /// The bytes that are not written yet.
    pub fn pending(&self) -> &[u8] {
        self.bytes.get(self.written..).unwrap_or_default()
    }

    /// Notes that so many bytes are written.
    pub fn advance(&mut self, count: usize) {
        self.written += count;
    }

    /// Takes these bytes in place of the ones before, which are written.
    pub fn put(&mut self, bytes: Vec<u8>) {
        (self.bytes, self.written) = (bytes, 0);
    }

    /// Reads once, when all bytes are written, which will be written to `to`. Returns how many were
    /// read.
    pub fn read(&mut self, from: &OwnedFd, to: &OwnedFd) -> Result<usize, Errno> {
        let size = if self.large_until.is_some() { LARGE } else { SMALL };
        if self.bytes.capacity() != size {
            self.put(Vec::with_capacity(size));
        }
        self.bytes.clear();
        self.written = 0;
        let count = rustix::io::read(from, spare_capacity(&mut self.bytes))?;
        if count >= SMALL && self.large_until.replace(Instant::now() + KEPT).is_none() {
            resize([from, to], PIPE, LARGE_PIPE);
        }
        Ok(count)
    }

    /// When [`Buffer::shrink`] has work to do.
    pub fn deadline(&self) -> Option<Instant> {
        self.large_until
    }

    /// Gives memory back that is not used, the large buffer and pipes only if they were not needed
    /// for a while.
    pub fn shrink<'a>(&mut self, ends: impl IntoIterator<Item = &'a OwnedFd>, now: Instant) {
        if self.large_until.take_if(|at| *at <= now).is_some() {
            resize(ends, LARGE_PIPE, PIPE);
        }
        if self.large_until.is_none() && self.pending().is_empty() {
            self.put(Vec::new());
        }
    }
}

/// Changes the size of those ends that are pipes of a size. Others stay: the process may have
/// changed its pipe. A pipe that contains too much to become smaller, because its reader is slow,
/// stays large until the stream has carried much again.
fn resize<'a>(ends: impl IntoIterator<Item = &'a OwnedFd>, from: usize, to: usize) {
    for end in ends {
        if rustix::pipe::fcntl_getpipe_size(end) == Ok(from) {
            // Fails also if the user has too many pages in pipes, or the limit of a pipe is lower.
            let _ = rustix::pipe::fcntl_setpipe_size(end, to);
        }
    }
}
