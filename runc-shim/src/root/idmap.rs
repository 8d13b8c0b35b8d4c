//! Idmapped mounts (mount options `uidmap` and `gidmap`).

use std::fs::{self, File};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::CWD;
use rustix::mount::{MoveMountFlags, OpenTreeFlags, UnmountFlags, move_mount, open_tree, unmount};
use rustix::process::{Pid, WaitOptions};

use crate::error::{Code, Context as _, Error};
use crate::root::overlay;
use crate::sys;

/// The directory in the bundle on which lower directories are mounted until the overlay is made.
pub const IDMAPPED: &str = "idmapped";

/// A user namespace with these id maps, in the form of mount options: `CONTAINER:HOST:SIZE`,
/// several separated by commas.
pub fn user_namespace(users: &str, groups: &str) -> Result<OwnedFd, Error> {
    let (users, groups) = (id_map(users)?, id_map(groups)?);
    let holder = NamespaceHolder(sys::user_namespace_holder().context("make user namespace")?);
    let file = |name: &str| PathBuf::from(format!("/proc/{}/{name}", holder.0));
    fs::write(file("uid_map"), users).context("write user map")?;
    fs::write(file("gid_map"), groups).context("write group map")?;
    let namespace = File::open(file("ns/user")).context("open user namespace")?;
    Ok(namespace.into())
}

/// An id map in the form of `/proc/PID/uid_map`.
pub fn id_map(map: &str) -> Result<String, Error> {
    let malformed = || Error::new(Code::INVALID_ARGUMENT, format!("id map {map:?}"));
    let mut lines = String::new();
    for entry in map.split(',') {
        let numbers: Vec<u32> = entry.split(':').filter_map(|part| part.parse().ok()).collect();
        let [container, host, size] = numbers[..] else { return Err(malformed()) };
        lines.push_str(&format!("{container} {host} {size}\n"));
    }
    Ok(lines)
}

/// The pid of a process that only keeps a namespace alive; killed and reaped on drop.
struct NamespaceHolder(i32);

impl Drop for NamespaceHolder {
    fn drop(&mut self) {
        let _ = sys::kill(self.0, libc::SIGKILL);
        let _ = rustix::process::waitpid(Pid::from_raw(self.0), WaitOptions::empty());
    }
}

/// Makes an idmapped copy of the mount at `source`, at `target`.
pub fn mount(
    source: &Path,
    target: &Path,
    users: BorrowedFd<'_>,
    read_only: bool,
) -> Result<(), Error> {
    let what = || format!("map users of {}", source.display());
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let tree = open_tree(CWD, source, flags).context(what())?;
    sys::map_mount(tree.as_fd(), users, read_only).context(what())?;
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    move_mount(&tree, c"", CWD, target, flags).context(what())
}

/// An idmapped mount of the lower directories of an overlay, in a directory of the bundle. Detached
/// and removed on drop: the overlay keeps its own references.
#[derive(Debug)]
pub struct IdmappedLowerDirs(PathBuf);

impl IdmappedLowerDirs {
    /// Makes an idmapped mount of the common parent of all lower directories, in the bundle, and
    /// changes the option to name the directories there.
    pub fn map(data: &mut [String], bundle: &Path, users: BorrowedFd<'_>) -> Result<Self, Error> {
        let apart = || {
            Error::new(Code::INVALID_ARGUMENT, "the lower directories have no common parent to map")
        };
        let common = overlay::shorten(data).ok_or_else(apart)?;
        let path = bundle.join(IDMAPPED);
        fs::create_dir_all(&path).context(format_args!("make directory {}", path.display()))?;
        let made = Self(path);
        mount(&common, &made.0, users, true)?;
        for option in data.iter_mut() {
            if let Some(dirs) = option.strip_prefix("lowerdir=") {
                let place = |dir: &str| made.0.join(dir).display().to_string();
                let dirs: Vec<String> = dirs.split(':').map(place).collect();
                *option = format!("lowerdir={}", dirs.join(":"));
            }
        }
        Ok(made)
    }
}

impl Drop for IdmappedLowerDirs {
    fn drop(&mut self) {
        // Fails if the mount has failed.
        let _ = unmount(&self.0, UnmountFlags::DETACH);
        let _ = fs::remove_dir(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_map_becomes_lines_for_the_kernel() {
        assert_eq!(id_map("0:65536:1000").unwrap(), "0 65536 1000\n");
        assert_eq!(id_map("0:1:2,5:6:7").unwrap(), "0 1 2\n5 6 7\n");
        for malformed in ["", "0:1", "0:1:2:3", "a:b:c", "0:1:2,"] {
            assert!(id_map(malformed).is_err(), "{malformed}");
        }
    }
}
