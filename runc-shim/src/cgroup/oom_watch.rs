//! Detects OOM kills in the cgroups of containers.

use std::fs::{self, File};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use rustix::event::EventfdFlags;
use rustix::event::epoll::EventFlags;

use crate::cgroup::Cgroup;
use crate::error::{Context as _, Error};
use crate::reactor::{Reactor, Source};

/// A watch for OOM kills in a container's cgroup.
#[derive(Debug)]
pub enum OomWatch {
    /// Version 1: an eventfd to which the kernel writes; the path of the cgroup.
    EventFd(OwnedFd, PathBuf),
    /// Version 2: `memory.events`, and the highest count of kills that was read.
    MemoryEvents(File, u64),
}

impl OomWatch {
    /// Opens a watch, which epoll reports as `source`; `None`: the container has no memory cgroup.
    ///
    /// # Errors
    /// A file of the cgroup cannot be opened, or the kernel refuses the watch.
    pub fn new(cgroup: &Cgroup, reactor: &Reactor, source: Source) -> Result<Option<Self>, Error> {
        let Some(path) = cgroup.controller("memory") else { return Ok(None) };
        Ok(Some(match cgroup {
            Cgroup::V1(_) => {
                let counter = oom_eventfd(path)?;
                reactor.add(&counter, source, EventFlags::IN)?;
                Self::EventFd(counter, path.to_owned())
            }
            Cgroup::V2(_) => {
                let watch = Self::memory_events(&path.join("memory.events"))?;
                if let Self::MemoryEvents(file, _) = &watch {
                    reactor.add(file, source, EventFlags::PRI | EventFlags::ET)?;
                }
                watch
            }
        }))
    }

    fn memory_events(path: &Path) -> Result<Self, Error> {
        let file = File::open(path).context(format_args!("open {}", path.display()))?;
        let kills = kills(&file);
        Ok(Self::MemoryEvents(file, kills))
    }

    /// Whether a process was killed since the last call.
    pub fn has_killed(&mut self) -> bool {
        match self {
            Self::EventFd(counter, path) => {
                let mut count = [0; 8];
                // The kernel also writes when the cgroup is removed.
                matches!(rustix::io::read(counter.as_fd(), &mut count), Ok(8)) && path.exists()
            }
            Self::MemoryEvents(file, known) => {
                // A count that cannot be read is 0, which must not lower the known count.
                let kills = kills(file);
                let more = kills > *known;
                *known = kills.max(*known);
                more
            }
        }
    }
}

/// An eventfd to which the kernel writes when the cgroup of version 1 is out of memory.
fn oom_eventfd(path: &Path) -> Result<OwnedFd, Error> {
    let counter = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    let name = path.join("memory.oom_control");
    let control = File::open(&name).context(format_args!("open {}", name.display()))?;
    let name = path.join("cgroup.event_control");
    let line = format!("{} {}", counter.as_raw_fd(), control.as_raw_fd());
    fs::write(&name, line).context(format_args!("write {}", name.display()))?;
    Ok(counter)
}

/// The count of OOM kills in `memory.events`; 0 if the cgroup was removed.
fn kills(file: &File) -> u64 {
    let mut text = [0; 512];
    let count = file.read_at(&mut text, 0).unwrap_or(0);
    let text = String::from_utf8_lossy(text.get(..count).unwrap_or_default());
    let line = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
    line.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kills_are_counted() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("memory.events");
        fs::write(&path, "low 0\nhigh 0\nmax 9\noom 8\noom_kill 0\noom_group_kill 5\n").unwrap();
        let mut watch = OomWatch::memory_events(&path).unwrap();
        assert!(!watch.has_killed());
        fs::write(&path, "max 9\noom 8\noom_kill 2\n").unwrap();
        assert!(watch.has_killed());
        assert!(!watch.has_killed());
    }
}
