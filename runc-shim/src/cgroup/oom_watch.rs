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
pub struct OomWatch {
    /// The container's id.
    pub id: String,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    /// Version 1: an eventfd to which the kernel writes; the path of the cgroup.
    EventFd(OwnedFd, PathBuf),
    /// Version 2: `memory.events`, and the highest count of kills that was read.
    MemoryEvents(File, u64),
}

impl OomWatch {
    /// Opens a watch; `None`: the container has no memory cgroup.
    pub fn new(id: &str, cgroup: &Cgroup) -> Result<Option<Self>, Error> {
        let Some(path) = cgroup.controller("memory") else { return Ok(None) };
        let kind = match cgroup {
            Cgroup::V1(_) => Kind::EventFd(oom_eventfd(path)?, path.to_owned()),
            Cgroup::V2(_) => {
                let path = path.join("memory.events");
                let file = File::open(&path).context(format_args!("open {}", path.display()))?;
                let kills = kills(&file);
                Kind::MemoryEvents(file, kills)
            }
        };
        Ok(Some(Self { id: id.to_owned(), kind }))
    }

    /// Adds the watch to epoll.
    pub fn add_to(&self, reactor: &Reactor, source: Source) -> Result<(), Error> {
        match &self.kind {
            Kind::EventFd(fd, _) => reactor.add(fd, source, EventFlags::IN)?,
            Kind::MemoryEvents(fd, _) => {
                reactor.add(fd, source, EventFlags::PRI | EventFlags::ET)?
            }
        }
        Ok(())
    }

    /// Whether a process was killed since the last call.
    pub fn has_killed(&mut self) -> bool {
        match &mut self.kind {
            Kind::EventFd(counter, path) => {
                let mut count = [0; 8];
                // The kernel also writes when the cgroup is removed.
                matches!(rustix::io::read(counter.as_fd(), &mut count), Ok(8)) && path.exists()
            }
            Kind::MemoryEvents(file, known) => {
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
        let cgroup = Cgroup::V2(dir.path().to_owned());
        let mut watch = OomWatch::new("a", &cgroup).unwrap().unwrap();
        assert!(!watch.has_killed());
        fs::write(&path, "max 9\noom 8\noom_kill 2\n").unwrap();
        assert!(watch.has_killed());
        assert!(!watch.has_killed());
    }
}
