//! The cgroup of a container: its processes, and kills for want of memory.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use cgroup_metrics::{v1, v2};
use protobuf::Message as _;
use protobuf::well_known_types::any::Any;

use crate::error::{Context as _, Error};

/// Where hierarchies are mounted.
const ROOT: &str = "/sys/fs/cgroup";

/// A cgroup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cgroup {
    /// Of version 1: its path in the hierarchy of each controller.
    V1(Vec<(String, PathBuf)>),
    /// Of version 2: its path.
    V2(PathBuf),
}

impl Cgroup {
    /// The cgroup of a process; `None`: it is gone or has none.
    pub fn of(pid: i32) -> Option<Self> {
        let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
        let unified = Path::new(ROOT).join("cgroup.controllers").exists();
        Self::parse(&text, Path::new(ROOT), unified)
    }

    /// Reads `/proc/PID/cgroup` (cgroups(7)).
    fn parse(text: &str, root: &Path, unified: bool) -> Option<Self> {
        let mut controllers = Vec::new();
        for line in text.lines() {
            let mut fields = line.splitn(3, ':');
            let (hierarchy, names, path) = (fields.next()?, fields.next()?, fields.next()?);
            let path = path.trim_start_matches('/');
            if unified && hierarchy == "0" {
                return Some(Self::V2(root.join(path)));
            }
            let named = names.split(',').filter(|name| !name.is_empty() && !name.contains('='));
            controllers.extend(named.map(|name| (name.to_owned(), root.join(name).join(path))));
        }
        (!unified && !controllers.is_empty()).then_some(Self::V1(controllers))
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
        let (controller, file, thawed) = match self {
            Self::V1(_) => ("freezer", "freezer.state", "THAWED"),
            Self::V2(_) => ("", "cgroup.freeze", "0"),
        };
        let path = self.controller(controller).map(|path| path.join(file));
        path.and_then(|path| fs::read_to_string(path).ok())
            .is_some_and(|state| state.trim() != thawed)
    }

    /// Its metrics.
    ///
    /// # Errors
    /// It cannot be read, or is gone.
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

    /// The pids of all of its processes, also in cgroups below.
    ///
    /// # Errors
    /// It cannot be read. One that is gone has no processes.
    pub fn pids(&self) -> Result<Vec<i32>, Error> {
        let path = ["devices", "pids", "memory", "cpu"]
            .into_iter()
            .find_map(|controller| self.controller(controller));
        let mut pids = Vec::new();
        if let Some(path) = path {
            collect_pids(path, &mut pids)
                .context(format_args!("read cgroup {}", path.display()))?;
        }
        Ok(pids)
    }
}

fn collect_pids(cgroup: &Path, pids: &mut Vec<i32>) -> io::Result<()> {
    let gone = |e: &io::Error| {
        e.kind() == io::ErrorKind::NotFound || e.raw_os_error() == Some(libc::ENODEV)
    };
    match fs::read_to_string(cgroup.join("cgroup.procs")) {
        Ok(text) => pids.extend(text.lines().filter_map(|line| line.parse::<i32>().ok())),
        Err(e) if gone(&e) => return Ok(()),
        // A threaded cgroup has its processes above.
        Err(e) if e.raw_os_error() == Some(libc::EOPNOTSUPP) => {}
        Err(e) => return Err(e),
    }
    let entries = match fs::read_dir(cgroup) {
        Err(e) if gone(&e) => return Ok(()),
        other => other?,
    };
    for entry in entries.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            collect_pids(&entry.path(), pids)?;
        }
    }
    Ok(())
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
        for none in ["", "rubbish", "0::/u\n"] {
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
            fs::write(dir.path().join(file), thawed).unwrap();
            assert!(!cgroup.is_frozen());
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
