//! The cgroup of a container: its processes, metrics, freezer state, and removal.

pub mod oom_watch;
mod tree;

use std::fs;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use cgroup_metrics::{v1, v2};
use protobuf::Message as _;
use protobuf::well_known_types::any::Any;
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, PidfdFlags, Signal};

use crate::error::{Context as _, Error};

/// The directory below which the hierarchies are mounted.
const ROOT: &str = "/sys/fs/cgroup";

/// Number of retries to remove a cgroup, and the delay before each: killed processes are in it
/// until they have exited.
const REMOVE_TRIES: u32 = 100;
const REMOVE_WAIT: Duration = Duration::from_millis(20);

/// A cgroup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cgroup {
    /// Version 1: each controller, and the cgroup's path in its hierarchy.
    V1(Vec<(String, PathBuf)>),
    /// Version 2: the path of the cgroup.
    V2(PathBuf),
}

impl Cgroup {
    /// The cgroup of a process; `None`: it has none, or there is no such process.
    pub fn of_process(pid: i32) -> Option<Self> {
        let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
        let unified = Path::new(ROOT).join("cgroup.controllers").exists();
        Self::parse(&text, Path::new(ROOT), unified)
    }

    /// Reads `/proc/PID/cgroup` (cgroups(7)).
    pub fn parse(text: &str, root: &Path, unified: bool) -> Option<Self> {
        let mut controllers = Vec::new();
        for line in text.lines() {
            let mut fields = line.splitn(3, ':');
            let (hierarchy, names, path) = (fields.next()?, fields.next()?, fields.next()?);
            let path = path.trim_start_matches('/');
            if Path::new(path).components().any(|part| part == Component::ParentDir) {
                // The cgroup is outside of this process's cgroup namespace.
                continue;
            }
            if unified && hierarchy == "0" {
                return Some(Self::V2(root.join(path)));
            }
            let named =
                names.split(',').filter(|name| !name.is_empty() && !name.contains(['=', '/', '.']));
            controllers.extend(named.map(|name| (name.to_owned(), root.join(name).join(path))));
        }
        (!unified && !controllers.is_empty()).then_some(Self::V1(controllers))
    }

    /// The cgroup of an OCI config's `cgroupsPath` (`/PATH/NAME`, or `SLICE:PREFIX:NAME` of
    /// systemd), if its name is `id`.
    pub fn named(path: &str, id: &str) -> Option<Self> {
        let path = in_hierarchy(path, id)?;
        let root = Path::new(ROOT);
        if root.join("cgroup.controllers").exists() {
            return Some(Self::V2(root.join(path)));
        }
        let entries = fs::read_dir(root).ok()?.flatten();
        // Symbolic links name hierarchies that are listed anyway.
        let dirs = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        let paths = dirs
            .map(|dir| (dir.file_name().to_string_lossy().into_owned(), dir.path().join(&path)));
        Some(Self::V1(paths.filter(|(_, path)| is_cgroup(path)).collect()))
    }

    /// Removes the cgroup and all below it, and kills their processes if that is necessary.
    /// Succeeds if the cgroup does not exist.
    pub fn remove(&self) -> Result<(), Error> {
        let paths: Vec<&Path> = match self {
            Self::V1(paths) => paths.iter().map(|(_, path)| path.as_path()).collect(),
            Self::V2(path) => vec![path],
        };
        let mut tries = 0;
        loop {
            // In all hierarchies, also if one removal fails.
            let each: Vec<_> = paths.iter().map(|path| tree::remove(path)).collect();
            let removed = each.into_iter().collect::<io::Result<()>>();
            match removed {
                Err(e) if tries < REMOVE_TRIES && e.raw_os_error() == Some(libc::EBUSY) => {
                    tries += 1;
                    paths.iter().try_for_each(|path| kill_below(path))?;
                    std::thread::sleep(REMOVE_WAIT);
                }
                other => return Ok(other?),
            }
        }
    }

    /// The path in the hierarchy of a controller.
    pub fn controller(&self, wanted: &str) -> Option<&Path> {
        match self {
            Self::V2(path) => Some(path),
            Self::V1(paths) => {
                paths.iter().find(|(name, _)| name == wanted).map(|(_, path)| path.as_path())
            }
        }
    }

    /// Whether its processes are frozen, or are being frozen.
    pub fn is_frozen(&self) -> bool {
        self.freezer().is_some_and(|(path, thawed)| {
            fs::read_to_string(path).is_ok_and(|state| state.trim() != thawed)
        })
    }

    /// The file of the freezer, and its content when the cgroup is thawed.
    fn freezer(&self) -> Option<(PathBuf, &'static str)> {
        let (controller, file, thawed) = match self {
            Self::V1(_) => ("freezer", "freezer.state", "THAWED"),
            Self::V2(_) => ("", "cgroup.freeze", "0"),
        };
        Some((self.controller(controller)?.join(file), thawed))
    }

    /// Thaws its processes.
    ///
    /// # Errors
    /// The state cannot be written.
    pub fn thaw(&self) -> Result<(), Error> {
        let (path, thawed) = self.freezer().ok_or_else(|| Error::not_found("no freezer"))?;
        let file = fs::File::options().write(true).open(&path);
        let written = file.and_then(|mut file| file.write_all(thawed.as_bytes()));
        written.context(format_args!("write {}", path.display()))
    }

    /// Its metrics.
    ///
    /// # Errors
    /// The cgroup does not exist or cannot be read.
    pub fn stats(&self) -> Result<Any, Error> {
        let failed = |e: cgroup_metrics::Error| Error::unknown(e.to_string());
        let mut any = Any::new();
        match self {
            Self::V1(_) => {
                let path = |controller: &str| self.controller(controller).map(Path::to_owned);
                let stats = v1::read_at(path).map_err(failed)?;
                let gone = || Error::not_found("cgroup does not exist");
                any.type_url = cgroup_metrics::V1.to_owned();
                any.value = stats.ok_or_else(gone)?.write_to_bytes()?;
            }
            Self::V2(path) => {
                let stats = v2::read(path, Path::new("")).map_err(failed)?;
                any.type_url = cgroup_metrics::V2.to_owned();
                any.value = stats.write_to_bytes()?;
            }
        }
        Ok(any)
    }

    /// The metrics of a cgroup that was removed: nothing, as containerd's shim answers.
    pub fn no_stats(&self) -> Any {
        let kind = match self {
            Self::V1(_) => cgroup_metrics::V1,
            Self::V2(_) => cgroup_metrics::V2,
        };
        Any { type_url: kind.to_owned(), ..Default::default() }
    }

    /// Whether it was not removed.
    pub fn exists(&self) -> bool {
        self.controller("memory").is_some_and(Path::exists)
    }

    /// The pids of all processes in the cgroup and in cgroups below it; none if it does not exist.
    ///
    /// # Errors
    /// The cgroup cannot be read.
    pub fn pids(&self) -> Result<Vec<i32>, Error> {
        let path = ["devices", "pids", "memory", "cpu"]
            .into_iter()
            .find_map(|controller| self.controller(controller));
        let mut pids = Vec::new();
        if let Some(path) = path {
            tree::visit(path, &mut |found| {
                pids.extend(processes(found.dir)?);
                Ok(())
            })
            .context(format_args!("read cgroup {}", path.display()))?;
        }
        Ok(pids)
    }
}

/// A path as [`Cgroup::named`] takes it, in a hierarchy.
pub fn in_hierarchy(path: &str, id: &str) -> Option<PathBuf> {
    let plain = |name: &str| !["", ".", ".."].contains(&name) && !name.contains('/');
    if let [slice, prefix, name] = path.split(':').collect::<Vec<_>>()[..] {
        let stem = slice.strip_suffix(".slice")?;
        if name != id || !plain(prefix) || !plain(stem) {
            return None;
        }
        // a-b.slice is in a.slice.
        let ends = stem.match_indices('-').map(|(at, _)| at).chain([stem.len()]);
        let slices = ends.map(|end| format!("{}.slice", stem.get(..end).unwrap_or_default()));
        let mut path: PathBuf = slices.collect();
        path.push(format!("{prefix}-{name}.scope"));
        return Some(path);
    }
    let parts: Vec<&str> = path.strip_prefix('/')?.split('/').collect();
    (parts.iter().all(|part| plain(part)) && parts.last() == Some(&id))
        .then(|| parts.iter().collect())
}

/// Whether this is a cgroup, and not a directory of the file system on which hierarchies are
/// mounted.
fn is_cgroup(path: &Path) -> bool {
    const MAGIC: [i64; 2] = [libc::CGROUP_SUPER_MAGIC, libc::CGROUP2_SUPER_MAGIC];
    rustix::fs::statfs(path).is_ok_and(|stat| MAGIC.contains(&stat.f_type))
}

/// Kills the processes of a cgroup and of those below it, one by one. A process is killed by a
/// pidfd, and only if its pid is still in the cgroup after the pidfd was opened, so that a reused
/// pid is not killed.
fn kill_below(cgroup: &Path) -> io::Result<()> {
    tree::visit(cgroup, &mut |found| {
        let held: Vec<(i32, OwnedFd)> = processes(found.dir)?
            .into_iter()
            .filter_map(|pid| {
                let pidfd = rustix::process::pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty());
                pidfd.ok().map(|fd| (pid, fd))
            })
            .collect();
        let there = if held.is_empty() { Vec::new() } else { processes(found.dir)? };
        for (_, fd) in held.iter().filter(|(pid, _)| there.contains(pid)) {
            // Fails if the process has exited by itself.
            let _ = rustix::process::pidfd_send_signal(fd, Signal::KILL);
        }
        Ok(())
    })
}

/// The pids of the processes of an open cgroup; none if the cgroup was removed.
fn processes(cgroup: BorrowedFd<'_>) -> io::Result<Vec<i32>> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let mut text = String::new();
    let read = rustix::fs::openat(cgroup, c"cgroup.procs", flags, Mode::empty())
        .map_err(io::Error::from)
        .and_then(|file| fs::File::from(file).read_to_string(&mut text));
    match read {
        Ok(_) => Ok(text.lines().filter_map(|line| line.parse().ok()).collect()),
        // The processes of a threaded cgroup are listed in an ancestor.
        Err(e) => match e.raw_os_error() {
            Some(libc::ENOENT | libc::ENODEV | libc::EOPNOTSUPP) => Ok(Vec::new()),
            _ => Err(e),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cgroup_of_a_process_is_found() {
        let root = Path::new("/r");
        let hybrid = "5:cpu,cpuacct:/a/b\n4:memory:/a/b\n1:name=systemd:/s\n0::/u\n";
        let Some(Cgroup::V1(paths)) = Cgroup::parse(hybrid, root, false) else { panic!() };
        let found: Vec<(&str, &str)> =
            paths.iter().map(|(name, path)| (name.as_str(), path.to_str().unwrap())).collect();
        let expected =
            [("cpu", "/r/cpu/a/b"), ("cpuacct", "/r/cpuacct/a/b"), ("memory", "/r/memory/a/b")];
        assert_eq!(found, expected);
        let unified = Cgroup::parse("0::/a/b\n", root, true);
        assert_eq!(unified, Some(Cgroup::V2("/r/a/b".into())));
        for none in ["", "rubbish", "0::/u\n", "4:memory:/../b\n", "4:/b:/a\n"] {
            assert_eq!(Cgroup::parse(none, root, false), None, "{none}");
        }
    }

    #[test]
    fn a_cgroup_is_frozen_until_it_is_thawed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().to_owned();
        let v1 = Cgroup::V1(vec![("freezer".to_owned(), path.clone())]);
        for (cgroup, file, frozen, thawed) in [
            (v1, "freezer.state", ["FREEZING\n", "FROZEN\n"], "THAWED\n"),
            (Cgroup::V2(path), "cgroup.freeze", ["1\n", "1\n"], "0\n"),
        ] {
            assert!(!cgroup.is_frozen(), "it is gone");
            for state in frozen {
                fs::write(dir.path().join(file), state).unwrap();
                assert!(cgroup.is_frozen());
            }
            cgroup.thaw().unwrap();
            assert!(!cgroup.is_frozen());
            let written = fs::read_to_string(dir.path().join(file)).unwrap();
            assert_eq!(written, thawed);
        }
    }

    #[test]
    fn only_a_cgroup_named_by_the_id_is_found() {
        let path = |path: &str| in_hierarchy(path, "id").map(|path| path.display().to_string());
        assert_eq!(path("/kubepods/pod1/id").as_deref(), Some("kubepods/pod1/id"));
        assert_eq!(path("/id").as_deref(), Some("id"));
        let systemd = "kubepods.slice/kubepods-pod1.slice/cri-containerd-id.scope";
        assert_eq!(path("kubepods-pod1.slice:cri-containerd:id").as_deref(), Some(systemd));
        for other in [
            "",
            "/",
            "id",
            "/a/id/",
            "/a/other",
            "/../id",
            "/a/../id",
            "a.slice:p:other",
            "a.slice:../p:id",
            "../a.slice:p:id",
            "a:p:id",
            "a.slice:p:id:x",
        ] {
            assert_eq!(path(other), None, "{other}");
        }
    }

    #[test]
    fn processes_of_cgroups_below_count() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("below")).unwrap();
        fs::write(dir.path().join("cgroup.procs"), "7\n8\n").unwrap();
        fs::write(dir.path().join("below/cgroup.procs"), "9\n").unwrap();
        let mut pids = Cgroup::V2(dir.path().to_owned()).pids().unwrap();
        pids.sort_unstable();
        assert_eq!(pids, [7, 8, 9]);
        assert!(Cgroup::V2(dir.path().join("none")).pids().unwrap().is_empty());
    }
}
