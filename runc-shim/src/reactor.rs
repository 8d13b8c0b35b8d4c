//! The epoll instance and what each of its descriptors belongs to.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;

/// What is ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The socket that calls arrive at.
    Listener,
    /// Signals.
    Signals,
    /// The connection to containerd's events.
    Events,
    /// A connection, by its slot.
    Connection(u32),
    /// A stream between a container and containerd.
    Stream(u32),
    /// News of the thread that copies, or orders for it.
    Copier,
    /// A logging program says that it is ready.
    Logger(u32),
    /// Memory events of a container's cgroup.
    Memory(u32),
    /// The end of the pause.
    Pause,
}

impl Source {
    fn number(self) -> u64 {
        let (kind, slot) = match self {
            Self::Listener => (0, 0),
            Self::Signals => (1, 0),
            Self::Events => (2, 0),
            Self::Connection(slot) => (3, slot),
            Self::Stream(slot) => (4, slot),
            Self::Logger(slot) => (5, slot),
            Self::Memory(slot) => (6, slot),
            Self::Pause => (7, 0),
            Self::Copier => (8, 0),
        };
        kind << 32 | u64::from(slot)
    }

    fn of_number(number: u64) -> Option<Self> {
        let slot = u32::try_from(number & u64::from(u32::MAX)).ok()?;
        Some(match number >> 32 {
            0 => Self::Listener,
            1 => Self::Signals,
            2 => Self::Events,
            3 => Self::Connection(slot),
            4 => Self::Stream(slot),
            5 => Self::Logger(slot),
            6 => Self::Memory(slot),
            7 => Self::Pause,
            8 => Self::Copier,
            _ => return None,
        })
    }
}

/// Waits for descriptors.
#[derive(Debug)]
pub struct Reactor {
    epoll: OwnedFd,
}

impl Reactor {
    /// An empty one.
    pub fn new() -> io::Result<Self> {
        Ok(Self { epoll: epoll::create(epoll::CreateFlags::CLOEXEC)? })
    }

    /// Reports `source` whenever `fd` is ready for `flags`. A descriptor leaves when it is closed.
    pub fn add(&self, fd: impl AsFd, source: Source, flags: EventFlags) -> io::Result<()> {
        epoll::add(&self.epoll, fd, EventData::new_u64(source.number()), flags)?;
        Ok(())
    }

    /// Changes what is reported.
    pub fn change(&self, fd: impl AsFd, source: Source, flags: EventFlags) -> io::Result<()> {
        epoll::modify(&self.epoll, fd, EventData::new_u64(source.number()), flags)?;
        Ok(())
    }

    /// Waits until something is ready or `until` has passed.
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
            Source::of_number(event.data.u64()).map(|source| (source, event.flags))
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
            assert_eq!(Source::of_number(source.number()), Some(source));
        }
        assert_eq!(Source::of_number(u64::MAX), None);
    }
}
