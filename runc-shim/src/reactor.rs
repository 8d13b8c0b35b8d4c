//! The epoll instance, and what each of its descriptors belongs to.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::Timespec;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;

/// Longest wait; the caller then waits again. rustix passes a timeout of more than `i32::MAX` ms to
/// epoll_pwait2(2), which Linux has from 5.11 on.
const LONGEST_WAIT: Duration = Duration::from_secs(86_400);

/// Delay between two attempts to copy a stream that epoll cannot watch.
pub const UNWATCHED_WAIT: Duration = Duration::from_millis(100);

/// The owner of a descriptor.
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
    /// OOM notifications of a container's cgroup, by the pid of the container's first process, or
    /// the ready descriptor of a logging program, by its pid.
    Child(u32),
    /// The pidfd of the pause process.
    PauseProcess,
}

impl Source {
    fn encode(self) -> u64 {
        let (kind, id) = match self {
            Self::Listener => (0, 0),
            Self::Signals => (1, 0),
            Self::Events => (2, 0),
            Self::Connection(id) => (3, id),
            Self::Stream(id) => (4, id),
            Self::Child(id) => (5, id),
            Self::PauseProcess => (6, 0),
            Self::Copier => (7, 0),
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
            5 => Self::Child(id),
            6 => Self::PauseProcess,
            7 => Self::Copier,
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

    /// Reports nothing for a descriptor any more, although copies of it stay open.
    pub fn remove(&self, fd: impl AsFd) -> io::Result<()> {
        epoll::delete(&self.epoll, fd)?;
        Ok(())
    }

    /// Waits until a descriptor is ready, or until this time. Returns what the ready ones belong
    /// to; may return earlier without any.
    pub fn wait(&self, until: Option<Instant>) -> io::Result<Vec<Source>> {
        let timeout = until.map(|until| timeout(until, Instant::now()));
        let mut ready: [epoll::Event; 16] =
            [const { epoll::Event { flags: EventFlags::empty(), data: EventData::new_u64(0) } };
                16];
        let count = match epoll::wait(&self.epoll, &mut ready[..], timeout.as_ref()) {
            Err(Errno::INTR) => 0,
            other => other?,
        };
        let ready = ready.iter().take(count);
        Ok(ready.filter_map(|event| Source::decode(event.data.u64())).collect())
    }
}

/// The timeout of a wait until this time, at most [`LONGEST_WAIT`].
fn timeout(until: Instant, now: Instant) -> Timespec {
    let left = until.saturating_duration_since(now).min(LONGEST_WAIT);
    // The conversion fails only for a time that the kernel cannot represent.
    Timespec::try_from(left).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_for_a_far_deadline_needs_no_call_of_a_later_kernel() {
        let now = Instant::now();
        let wait = |left: Duration| Duration::try_from(timeout(now + left, now)).unwrap();
        for short in [Duration::ZERO, Duration::from_nanos(1), Duration::from_millis(1500)] {
            assert_eq!(wait(short), short);
        }
        for long in [Duration::from_secs(90_000), Duration::from_secs(1 << 40)] {
            let milliseconds = wait(long).as_millis();
            assert!(milliseconds > 0 && i32::try_from(milliseconds).is_ok(), "{milliseconds}");
        }
        let before = now.checked_sub(Duration::from_secs(1)).unwrap();
        assert_eq!(timeout(before, now), Timespec::default());
    }

    #[test]
    fn a_source_survives_its_encoding() {
        let all = [
            Source::Listener,
            Source::Signals,
            Source::Events,
            Source::Connection(u32::MAX),
            Source::Stream(7),
            Source::Child(1),
            Source::PauseProcess,
            Source::Copier,
        ];
        for source in all {
            assert_eq!(Source::decode(source.encode()), Some(source));
        }
        assert_eq!(Source::decode(u64::MAX), None);
    }
}
