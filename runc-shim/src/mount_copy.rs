//! Copies of mounts.

use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::Path;

use rustix::fs::CWD;
use rustix::mount::{MoveMountFlags, OpenTreeFlags, move_mount, open_tree};

use crate::error::Error;

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
