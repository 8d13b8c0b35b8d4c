//! The epoll instance, and what each of its descriptors belongs to.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;

/// What a descriptor belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The socket on which the shim listens.
    Listener,
    /// The signalfd.
    Signals,
    /// The connection on which events are sent to containerd.
    Events,
    /// A connection of a caller, by its id.
    Connection(u32),
    /// A stream between a container and containerd, by its id.
    Stream(u32),
    /// Notifications of the copier threads, or commands for one of them.
    Copier,
    /// The ready descriptor of a logging program, by the id of the pending start.
    Logger(u32),
    /// OOM notifications of a container's cgroup, by the id of the watch.
    Memory(u32),
    /// The pidfd of the pause process.
    Pause,
}

impl Source {
    fn encode(self) -> u64 {
        let (kind, id) = match self {
            Self::Listener => (0, 0),
            Self::Signals => (1, 0),
            Self::Events => (2, 0),
            Self::Connection(id) => (3, id),
            Self::Stream(id) => (4, id),
            Self::Logger(id) => (5, id),
            Self::Memory(id) => (6, id),
            Self::Pause => (7, 0),
            Self::Copier => (8, 0),
        };
        kind << 32 | u64::from(id)
    }

    fn decode(encoded: u64) -> Option<Self> {
        let id = u32::try_from(encoded & u64::from(u32::MAX)).ok()?;
        Some(match encoded >> 32 {
            0 => Self::Listener,
            1 => Self::Signals,
            2 => Self::Events,
            3 => Self::Connection(id),
            4 => Self::Stream(id),
            5 => Self::Logger(id),
            6 => Self::Memory(id),
            7 => Self::Pause,
            8 => Self::Copier,
            _ => return None,
        })
    }
}

/// An epoll instance.
#[derive(Debug)]
pub struct Reactor {
    epoll: OwnedFd,
}

impl Reactor {
    /// An instance without descriptors.
    pub fn new() -> io::Result<Self> {
        Ok(Self { epoll: epoll::create(epoll::CreateFlags::CLOEXEC)? })
    }

    /// Reports `source` whenever `fd` is ready for `flags`, until all copies of `fd` are closed.
    pub fn add(&self, fd: impl AsFd, source: Source, flags: EventFlags) -> io::Result<()> {
        epoll::add(&self.epoll, fd, EventData::new_u64(source.encode()), flags)?;
        Ok(())
    }

    /// Changes the events that are reported for a descriptor.
    pub fn change(&self, fd: impl AsFd, source: Source, flags: EventFlags) -> io::Result<()> {
        epoll::modify(&self.epoll, fd, EventData::new_u64(source.encode()), flags)?;
        Ok(())
    }

    /// Waits until a descriptor is ready, or until this time.
    pub fn wait(&self, until: Option<Instant>) -> io::Result<Vec<(Source, EventFlags)>> {
        let timeout = until.map(|until| {
            let left = until.saturating_duration_since(Instant::now());
            rustix::event::Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: left.subsec_nanos().into(),
            }
        });
        let mut ready: [epoll::Event; 16] =
            [const { epoll::Event { flags: EventFlags::empty(), data: EventData::new_u64(0) } };
                16];
        let count = match epoll::wait(&self.epoll, &mut ready[..], timeout.as_ref()) {
            Err(Errno::INTR) => 0,
            other => other?,
        };
        let sources = ready.iter().take(count).filter_map(|event| {
            Source::decode(event.data.u64()).map(|source| (source, event.flags))
        });
        Ok(sources.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_survives_its_encoding() {
        let all = [
            Source::Listener,
            Source::Signals,
            Source::Events,
            Source::Connection(u32::MAX),
            Source::Stream(7),
            Source::Logger(0),
            Source::Memory(1),
            Source::Pause,
            Source::Copier,
        ];
        for source in all {
            assert_eq!(Source::decode(source.encode()), Some(source));
        }
        assert_eq!(Source::decode(u64::MAX), None);
    }
}
