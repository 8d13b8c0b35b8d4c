//! The node's cgroup file systems: one answer for all who make, read or judge cgroups.
//!
//! The version is that of the file system on `/sys/fs/cgroup`, as for runc and containerd. What
//! else is mounted does not change it: programs mount single controllers of version 1 for
//! themselves, also on a node of version 2.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, statfs};

use crate::error::{IoContext as _, StepError};

/// Mount point of the one hierarchy of version 2, or directory of those of version 1 (also on a
/// "hybrid" node).
pub const ROOT: &str = "/sys/fs/cgroup";

/// The thread may have a mount namespace of its own.
const MOUNTS: &str = "/proc/thread-self/mountinfo";

/// Mount options of version 1 that are no controllers (kernel `cgroup1_fs_parameters`, and those of
/// every file system).
const OPTIONS: [&[u8]; 7] =
    [b"rw", b"ro", b"xattr", b"clone_children", b"noprefix", b"cpuset_v2_mode", b"favordynmods"];

/// The mounted cgroup file systems.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mounted {
    /// One hierarchy per controller, or per group of controllers; empty where no cgroup file
    /// system is mounted.
    V1(Vec<Hierarchy>),
    /// The unified hierarchy, at its mount point.
    V2(PathBuf),
}

/// A hierarchy of version 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hierarchy {
    /// Where it is mounted.
    pub point: PathBuf,
    /// Its controllers; none in a named one, which is bookkeeping, mostly systemd's.
    pub controllers: Vec<String>,
}

impl Mounted {
    /// Examines the node.
    ///
    /// # Errors
    /// `/sys/fs/cgroup` or the table of mounts cannot be read.
    pub fn find() -> Result<Self, StepError> {
        Self::mounted_at(Path::new(ROOT))
    }

    fn mounted_at(root: &Path) -> Result<Self, StepError> {
        if unified(root)? {
            return Ok(Self::V2(root.to_owned()));
        }
        let mounts = std::fs::read(MOUNTS).step_at("read", MOUNTS)?;
        Ok(Self::V1(parse(&mounts, root)))
    }

    /// The mount points of all hierarchies.
    pub fn points(&self) -> Vec<&Path> {
        match self {
            Self::V1(hierarchies) => {
                hierarchies.iter().map(|hierarchy| hierarchy.point.as_path()).collect()
            }
            Self::V2(point) => vec![point],
        }
    }
}

/// Whether `root`, which is [`ROOT`] but for tests, is of version 2. One system call: cheap enough
/// for every reading of metrics.
///
/// # Errors
/// statfs(2) fails.
pub fn unified(root: &Path) -> Result<bool, StepError> {
    match statfs(root) {
        Ok(found) => Ok(found.filesystem_type() == CGROUP2_SUPER_MAGIC),
        Err(nix::Error::ENOENT) => Ok(false),
        Err(e) => Err(StepError::at("statfs", root, e.into())),
    }
}

/// Mount point of the unified hierarchy, which a node of version 1 may have too, without
/// controllers of its own. It is found by a file that each of its directories has.
pub fn unified_point(root: &Path) -> Option<PathBuf> {
    let mut places = [root.to_owned(), root.join("unified")].into_iter();
    places.find(|dir| dir.join("cgroup.controllers").exists())
}

/// Reads the hierarchies of version 1 from proc_pid_mountinfo(5). A hierarchy that is mounted twice
/// counts once, at its mount point below `root`, else at the first. Without any controller there is
/// nothing to put a process in.
pub fn parse(mountinfo: &[u8], root: &Path) -> Vec<Hierarchy> {
    let mut found: Vec<(&[u8], Hierarchy)> = Vec::new();
    for line in mountinfo.split(|byte| *byte == b'\n') {
        let fields: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
        let Some(dash) = fields.iter().position(|field| *field == b"-") else { continue };
        let (Some(device), Some(point), Some(&b"cgroup")) =
            (fields.get(2), fields.get(4), fields.get(dash + 1))
        else {
            continue;
        };
        let point = PathBuf::from(OsStr::from_bytes(&unescape(point)));
        let options = fields.get(dash + 3).copied().unwrap_or_default().split(|byte| *byte == b',');
        let controllers =
            options.filter(|option| !OPTIONS.contains(option) && !option.contains(&b'='));
        let controllers =
            controllers.map(|name| String::from_utf8_lossy(name).into_owned()).collect();
        match found.iter_mut().find(|(seen, _)| seen == device) {
            None => found.push((device, Hierarchy { point, controllers })),
            Some((_, earlier)) if point.starts_with(root) && !earlier.point.starts_with(root) => {
                earlier.point = point
            }
            Some(_) => {}
        }
    }
    if found.iter().all(|(_, hierarchy)| hierarchy.controllers.is_empty()) {
        found.clear();
    }
    found.into_iter().map(|(_, hierarchy)| hierarchy).collect()
}

/// Replaces `\040` and the like.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, after)) = rest.split_first() {
        let octal = after.get(..3).filter(|_| *first == b'\\');
        let byte =
            octal.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        plain.push(byte.unwrap_or(*first));
        rest = if byte.is_some() { &after[3..] } else { after };
    }
    plain
}

#[cfg(test)]
mod tests {
    use nix::mount::{MntFlags, MsFlags, mount, umount2};

    use super::*;

    fn hierarchies(list: &[(&str, &[&str])]) -> Vec<Hierarchy> {
        let one = |(point, controllers): &(&str, &[&str])| Hierarchy {
            point: point.into(),
            controllers: controllers.iter().map(|name| (*name).to_owned()).collect(),
        };
        list.iter().map(one).collect()
    }

    #[test]
    fn hierarchies_of_version_1() {
        let text = b"32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
            33 31 0:31 /part /mnt/again rw - cgroup cgroup rw,cpuset\n\
            34 31 0:31 / /sys/fs/cgroup/cpuset rw shared:9 - \
            cgroup cgroup rw,cpuset,clone_children\n\
            34 31 0:31 / /sys/fs/cgroup/third rw - cgroup cgroup rw,cpuset\n\
            35 31 0:37 / /sys/fs/c\\040group rw - cgroup cgroup rw,xattr,name=systemd\n\
            36 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
        let expected: [(&str, &[&str]); 3] = [
            ("/sys/fs/cgroup/cpu,cpuacct", &["cpu", "cpuacct"]),
            ("/sys/fs/cgroup/cpuset", &["cpuset"]),
            ("/sys/fs/c group", &[]),
        ];
        assert_eq!(parse(text, Path::new(ROOT)), hierarchies(&expected));
    }

    #[test]
    fn a_named_hierarchy_alone_is_none() {
        let named =
            b"35 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd\n";
        assert_eq!(parse(named, Path::new(ROOT)), []);
        assert_eq!(parse(b"1 0 0:1 / / rw - ext4 /dev/vda rw\n", Path::new(ROOT)), []);
        assert!(!unified(Path::new("/no/such/directory")).unwrap());
    }

    #[test]
    fn the_version_is_that_of_the_root_whatever_else_is_mounted() {
        if kit::skip_without_root() {
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let (root, elsewhere) = (directory.path().join("cgroup"), directory.path().join("vpn"));
        for (point, kind, options) in
            [(&elsewhere, "cgroup", Some("pids")), (&root, "cgroup2", None)]
        {
            std::fs::create_dir(point).unwrap();
            mount(Some("none"), point, Some(kind), MsFlags::empty(), options).unwrap();
        }
        let listed = std::fs::read_to_string(MOUNTS).unwrap();
        assert!(listed.contains(elsewhere.to_str().unwrap()), "{listed}");
        assert_eq!(Mounted::mounted_at(&root).unwrap(), Mounted::V2(root.clone()));
        umount2(&root, MntFlags::MNT_DETACH).unwrap();
        let Mounted::V1(found) = Mounted::mounted_at(&root).unwrap() else {
            panic!("version 2 without its file system")
        };
        assert!(found.iter().any(|hierarchy| hierarchy.controllers == ["pids"]), "{found:?}");
        umount2(&elsewhere, MntFlags::MNT_DETACH).unwrap();
    }
}
