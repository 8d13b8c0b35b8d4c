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

/// The file of version 2 that counts OOM kills in a cgroup and all below it.
const MEMORY_EVENTS: &str = "memory.events";

/// A watch for OOM kills in a container's cgroup.
#[derive(Debug)]
pub enum OomWatch {
    /// Version 1: an eventfd to which the kernel writes; the path of the cgroup.
    EventFd(OwnedFd, PathBuf),
    /// Version 2.
    MemoryEvents(MemoryEvents),
}

/// The files `memory.events` of version 2.
#[derive(Debug)]
pub struct MemoryEvents {
    own: File,
    /// The highest count of kills that was read.
    kills: u64,
    /// That of the pod, which counts the kills in all of its containers, and the count of those
    /// that this shim had not announced when the watch began.
    pod: Option<(File, u64)>,
}

impl OomWatch {
    /// Opens a watch, which epoll reports as `source`; `None`: the container has no memory cgroup.
    /// `announced` is the count of kills that this shim has announced.
    ///
    /// # Errors
    /// A file of the cgroup cannot be opened, or the kernel refuses the watch.
    pub fn new(
        cgroup: &Cgroup,
        announced: u64,
        reactor: &Reactor,
        source: Source,
    ) -> Result<Option<Self>, Error> {
        let Some(path) = cgroup.controller("memory") else { return Ok(None) };
        Ok(Some(match cgroup {
            Cgroup::V1(_) => {
                let counter = oom_eventfd(path)?;
                reactor.add(&counter, source, EventFlags::IN)?;
                Self::EventFd(counter, path.to_owned())
            }
            Cgroup::V2(_) => {
                let events = MemoryEvents::open(path, announced)?;
                reactor.add(&events.own, source, EventFlags::PRI | EventFlags::ET)?;
                Self::MemoryEvents(events)
            }
        }))
    }

    /// Whether a process was killed since the last call. Adds the kills to those that this shim has
    /// `announced`.
    pub fn has_killed(&mut self, announced: &mut u64) -> bool {
        match self {
            Self::EventFd(counter, path) => {
                let mut count = [0; 8];
                // The kernel also writes when the cgroup is removed.
                matches!(rustix::io::read(counter.as_fd(), &mut count), Ok(8)) && path.exists()
            }
            Self::MemoryEvents(events) => events.has_killed(announced),
        }
    }

    /// Whether a process was killed whose count went with the cgroup, when the first process of the
    /// container has exited. Adds the kills to those that are `announced`.
    pub fn has_lost_kill(&self, announced: &mut u64) -> bool {
        match self {
            Self::EventFd(..) => false,
            Self::MemoryEvents(events) => events.has_lost_kill(announced),
        }
    }
}

impl MemoryEvents {
    fn open(cgroup: &Path, announced: u64) -> Result<Self, Error> {
        let path = cgroup.join(MEMORY_EVENTS);
        let own = File::open(&path).context(format_args!("open {}", path.display()))?;
        let pod = cgroup.parent().filter(|parent| is_of_pod(parent));
        let pod = pod.and_then(|pod| File::open(pod.join(MEMORY_EVENTS)).ok());
        let unannounced = |pod: &File| kills(pod).map(|count| count.saturating_sub(announced));
        Ok(Self {
            kills: kills(&own).unwrap_or(0),
            own,
            pod: pod.and_then(|pod| unannounced(&pod).map(|count| (pod, count))),
        })
    }

    fn has_killed(&mut self, announced: &mut u64) -> bool {
        let more = kills(&self.own).unwrap_or(0).saturating_sub(self.kills);
        self.kills += more;
        *announced += more;
        more > 0
    }

    /// Whether the cgroup is gone, and there was a kill in the pod that no container's own count
    /// has shown: systemd removes the scope of a container with its last process, at times before
    /// the shim has read the count.
    fn has_lost_kill(&self, announced: &mut u64) -> bool {
        let Some((pod, before)) = self.pod.as_ref().filter(|_| kills(&self.own).is_none()) else {
            return false;
        };
        let more = kills(pod).unwrap_or(0).saturating_sub(*before + *announced);
        *announced += more;
        more > 0
    }
}

/// Whether a cgroup is that of a pod, by the names that kubelet gives: `kubepods/QOS/podUID`, and
/// `kubepods-QOS-podUID.slice`. Others contain cgroups of other shims.
fn is_of_pod(cgroup: &Path) -> bool {
    let name = cgroup.file_name().unwrap_or_default().to_string_lossy();
    let is_kubelets = cgroup.to_string_lossy().contains("kubepods");
    is_kubelets && (name.starts_with("pod") || name.contains("-pod"))
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

/// The count of OOM kills in `memory.events`; `None`: the cgroup was removed.
fn kills(file: &File) -> Option<u64> {
    let mut text = [0; 512];
    let count = file.read_at(&mut text, 0).ok()?;
    let text = String::from_utf8_lossy(text.get(..count).unwrap_or_default());
    let line = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
    line.and_then(|count| count.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes the count of kills of a cgroup; `None`: it has none any more, as if it were removed.
    fn count(cgroup: &Path, kills: Option<u64>) {
        fs::create_dir_all(cgroup).unwrap();
        let line = kills.map(|kills| format!("max 9\noom 8\noom_kill {kills}\noom_group_kill 5\n"));
        fs::write(cgroup.join(MEMORY_EVENTS), line.unwrap_or_default()).unwrap();
    }

    #[test]
    fn kills_are_counted() {
        let dir = tempfile::tempdir().unwrap();
        count(dir.path(), Some(0));
        let mut announced = 3;
        let events = MemoryEvents::open(dir.path(), announced).unwrap();
        let mut watch = OomWatch::MemoryEvents(events);
        assert!(!watch.has_killed(&mut announced));
        count(dir.path(), Some(2));
        assert!(watch.has_killed(&mut announced));
        assert!(!watch.has_killed(&mut announced));
        assert_eq!(announced, 5);
    }

    #[test]
    fn a_kill_is_known_of_a_cgroup_that_is_gone_if_no_other_container_had_it() {
        let dir = tempfile::tempdir().unwrap();
        let pod = dir.path().join("kubepods-pod1.slice");
        let [a, b, c] = ["a.scope", "b.scope", "c.scope"].map(|name| pod.join(name));
        count(&pod, Some(7));
        let mut announced = 0;
        let mut watches = [&a, &b, &c].map(|cgroup| {
            count(cgroup, Some(0));
            OomWatch::MemoryEvents(MemoryEvents::open(cgroup, announced).unwrap())
        });
        let [a_watch, b_watch, c_watch] = &mut watches;
        count(&a, Some(1));
        count(&pod, Some(8));
        assert!(a_watch.has_killed(&mut announced));
        // Killed by kubelet: the kill was that of the first one.
        count(&b, None);
        assert!(!b_watch.has_lost_kill(&mut announced));
        count(&pod, Some(9));
        assert!(!c_watch.has_lost_kill(&mut announced), "its own count is known");
        count(&c, None);
        assert!(!c_watch.has_killed(&mut announced));
        assert!(c_watch.has_lost_kill(&mut announced));
        assert!(!b_watch.has_lost_kill(&mut announced), "the kill has its container");
        assert_eq!(announced, 2);
    }

    #[test]
    fn only_the_cgroup_of_a_pod_counts_for_its_containers() {
        let is = |path: &str| is_of_pod(Path::new(path));
        assert!(is("/kubepods/pod1") && is("/kubepods.slice/kubepods-besteffort-pod1.slice"));
        assert!(!is("/") && !is("/k8s.io") && !is("/system.slice") && !is("/kubepods.slice"));
        assert!(!is("/pods") && !is("/machine-podman.slice"));
    }
}
