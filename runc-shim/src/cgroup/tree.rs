//! Traversal and removal of a cgroup and all below it, at any depth: a container with a delegated
//! cgroup may nest cgroups deeper than the length of a path allows. Each cgroup is opened from its
//! parent's descriptor; a level of depth takes 8 bytes and no further descriptor.

use std::ffi::CString;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, RawDir, SeekFrom};
use rustix::io::Errno;

/// Size of the buffer for directory entries, bytes. A name has at most 255.
const ENTRIES: usize = 1024;

const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Calls `each` with the cgroup and then with all below it. Skips cgroups that do not exist or are
/// removed meanwhile.
///
/// # Errors
/// The first error of `each` or of the system.
pub fn visit(
    root: &Path,
    each: &mut dyn FnMut(BorrowedFd<'_>) -> io::Result<()>,
) -> io::Result<()> {
    let Some(root) = present(rustix::fs::openat(CWD, root, DIRECTORY, Mode::empty()))? else {
        return Ok(());
    };
    each(root.as_fd())?;
    let mut at = Position::new(root);
    loop {
        while let Some(name) = at.next()? {
            let opened = rustix::fs::openat(&at.dir, &*name, DIRECTORY, Mode::empty());
            if let Some(below) = present(opened)? {
                each(below.as_fd())?;
                at.descend(below);
            }
        }
        if !at.ascend()? {
            return Ok(());
        }
    }
}

/// Removes the cgroup and all below it, except those with processes.
///
/// # Errors
/// `EBUSY`: some are left. Any other error of the system.
pub fn remove(root: &Path) -> io::Result<()> {
    let Some(opened) = present(rustix::fs::openat(CWD, root, DIRECTORY, Mode::empty()))? else {
        return Ok(());
    };
    let mut at = Position::new(opened);
    // The next entry was entered already: its removal is tried again, and it is not entered again.
    let mut entered = false;
    loop {
        while let Some(name) = at.next()? {
            let known = std::mem::take(&mut entered);
            match rustix::fs::unlinkat(&at.dir, &*name, AtFlags::REMOVEDIR) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(Errno::BUSY | Errno::NOTEMPTY) if known => {}
                Err(Errno::BUSY | Errno::NOTEMPTY) => {
                    let opened = rustix::fs::openat(&at.dir, &*name, DIRECTORY, Mode::empty());
                    if let Some(below) = present(opened)? {
                        // Before this entry, so that it is found again.
                        at.seek_to_last();
                        at.descend(below);
                    }
                }
                Err(e) => return Err(e.into()),
            }
        }
        if !at.ascend()? {
            break;
        }
        entered = true;
    }
    match rustix::fs::rmdir(root) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

/// The opened directory; `None`: it does not exist.
fn present(opened: rustix::io::Result<OwnedFd>) -> io::Result<Option<OwnedFd>> {
    match opened {
        Ok(fd) => Ok(Some(fd)),
        Err(Errno::NOENT | Errno::NODEV) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// A position in the tree: a directory, and where its listing and those of its ancestors continue.
struct Position {
    dir: OwnedFd,
    /// Where the listing continues, and where the last entry was found.
    next: u64,
    last: u64,
    /// Where the listings of the ancestors continue, from the root on.
    above: Vec<u64>,
}

impl Position {
    fn new(dir: OwnedFd) -> Self {
        Self { dir, next: 0, last: 0, above: Vec::new() }
    }

    /// The next directory in this one.
    fn next(&mut self) -> io::Result<Option<CString>> {
        rustix::fs::seek(&self.dir, SeekFrom::Start(self.next))?;
        let mut buffer = [MaybeUninit::uninit(); ENTRIES];
        let mut entries = RawDir::new(&self.dir, &mut buffer);
        while let Some(entry) = entries.next() {
            let entry = match entry {
                Err(Errno::NOENT) => return Ok(None),
                other => other?,
            };
            (self.last, self.next) = (self.next, entry.next_entry_cookie());
            let name = entry.file_name();
            let is_own = name == c"." || name == c"..";
            if entry.file_type() == FileType::Directory && !is_own {
                return Ok(Some(name.to_owned()));
            }
        }
        Ok(None)
    }

    /// Has [`Position::next`] find the last entry again.
    fn seek_to_last(&mut self) {
        self.next = self.last;
    }

    fn descend(&mut self, below: OwnedFd) {
        self.above.push(self.next);
        self.dir = below;
        (self.next, self.last) = (0, 0);
    }

    /// Returns to the parent; whether this was not the root.
    fn ascend(&mut self) -> io::Result<bool> {
        let Some(next) = self.above.pop() else { return Ok(false) };
        self.dir = rustix::fs::openat(&self.dir, c"..", DIRECTORY, Mode::empty())?;
        (self.next, self.last) = (next, next);
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes directories in each other, by descriptors.
    fn nest(root: &Path, depth: usize) {
        let mut at = rustix::fs::openat(CWD, root, DIRECTORY, Mode::empty()).unwrap();
        for _ in 0..depth {
            rustix::fs::mkdirat(&at, c"nested", Mode::RWXU).unwrap();
            at = rustix::fs::openat(&at, c"nested", DIRECTORY, Mode::empty()).unwrap();
        }
    }

    #[test]
    fn directories_beyond_the_length_of_a_path_are_visited() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["a", "b", "c"] {
            std::fs::create_dir(dir.path().join(name)).unwrap();
        }
        nest(&dir.path().join("b"), 1500);
        let mut count = 0;
        visit(dir.path(), &mut |_| {
            count += 1;
            Ok(())
        })
        .unwrap();
        assert_eq!(count, 1504);
        visit(&dir.path().join("none"), &mut |_| panic!("nothing is there")).unwrap();
    }

    #[test]
    fn cgroups_without_processes_are_removed_however_deep_they_are() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        for name in ["a", "b", "c/busy/empty", "d"] {
            std::fs::create_dir_all(root.join(name)).unwrap();
        }
        nest(&root.join("b"), 1500);
        // A file stands for a process.
        let process = root.join("c/busy/process");
        std::fs::write(&process, "").unwrap();
        remove(&root).unwrap_err();
        let left: Vec<_> = std::fs::read_dir(&root).unwrap().flatten().collect();
        assert_eq!(left.len(), 1, "{left:?}");
        assert!(process.exists() && !root.join("c/busy/empty").exists());
        std::fs::remove_file(&process).unwrap();
        remove(&root).unwrap();
        assert!(!root.exists());
        remove(&root).unwrap();
    }
}
