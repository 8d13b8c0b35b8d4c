//! Copies of mounts, and directories of the bundle for mounts that only the shim uses.

use std::fs;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::{Path, PathBuf};

use rustix::fs::CWD;
use rustix::mount::{MoveMountFlags, OpenTreeFlags, UnmountFlags, move_mount, open_tree, unmount};

use crate::error::{Context as _, Error};

/// A directory of the bundle for a mount of the shim alone. Detached and removed on drop.
#[derive(Debug)]
pub struct PrivatePlace {
    /// The directory.
    pub path: PathBuf,
}

impl PrivatePlace {
    /// Makes the directory.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn make(bundle: &Path, name: &str) -> Result<Self, Error> {
        let path = bundle.join(name);
        fs::create_dir_all(&path).context(format_args!("make directory {}", path.display()))?;
        Ok(Self { path })
    }
}

impl Drop for PrivatePlace {
    fn drop(&mut self) {
        // Fails if the mount has failed.
        let _ = unmount(&self.path, UnmountFlags::DETACH);
        let _ = fs::remove_dir(&self.path);
    }
}

/// Makes a copy of the mount at `source`, at `target`. `change` works on the copy before.
///
/// # Errors
/// A step has failed.
pub fn mount_copy(
    source: &Path,
    target: &Path,
    change: impl FnOnce(BorrowedFd<'_>) -> Result<(), Error>,
) -> Result<(), Error> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let tree = open_tree(CWD, source, flags)?;
    change(tree.as_fd())?;
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_SYMLINKS;
    Ok(move_mount(&tree, c"", CWD, target, flags)?)
}
