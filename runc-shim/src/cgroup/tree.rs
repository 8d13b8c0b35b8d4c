//! Traversal and removal of a cgroup and all below it, at any depth: a container with a delegated
//! cgroup may nest cgroups deeper than the length of a path allows. Each cgroup is opened from its
//! parent's descriptor; a level of depth takes its name and no further descriptor.

use std::ffi::{CStr, CString};
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

/// A cgroup that [`visit`] has found.
pub struct Visited<'a> {
    /// The cgroup.
    pub dir: BorrowedFd<'a>,
    /// Its parent and its name; `None`: it is the root.
    place: Option<(BorrowedFd<'a>, &'a CStr)>,
}

/// Calls `each` with all cgroups below a cgroup, each after those below it, and then with that
/// cgroup. Skips cgroups that do not exist or are removed meanwhile.
///
/// # Errors
/// The first error of `each` or of the system.
pub fn visit(root: &Path, each: &mut dyn FnMut(&Visited<'_>) -> io::Result<()>) -> io::Result<()> {
    let opened = rustix::fs::openat(CWD, root, DIRECTORY, Mode::empty());
    let Some(mut dir) = present(opened)? else { return Ok(()) };
    // Where the listing of the directory continues.
    let mut next = 0;
    // The names of its ancestors and its own, each with where the listing of the parent continues.
    let mut above: Vec<(CString, u64)> = Vec::new();
    loop {
        if let Some((name, after)) = next_directory(&dir, next)? {
            next = after;
            let opened = rustix::fs::openat(&dir, &*name, DIRECTORY, Mode::empty());
            if let Some(below) = present(opened)? {
                above.push((name, next));
                (dir, next) = (below, 0);
            }
            continue;
        }
        let Some((name, after)) = above.pop() else {
            return each(&Visited { dir: dir.as_fd(), place: None });
        };
        let parent = rustix::fs::openat(&dir, c"..", DIRECTORY, Mode::empty())?;
        each(&Visited { dir: dir.as_fd(), place: Some((parent.as_fd(), &name)) })?;
        (dir, next) = (parent, after);
    }
}

/// Removes the cgroup and all below it, except those with processes.
///
/// # Errors
/// `EBUSY`: some are left. Any other error of the system.
pub fn remove(root: &Path) -> io::Result<()> {
    visit(root, &mut |found| match found.place {
        Some((parent, name)) => match rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR) {
            // The root is busy, too, then.
            Ok(()) | Err(Errno::NOENT | Errno::BUSY | Errno::NOTEMPTY) => Ok(()),
            Err(e) => Err(e.into()),
        },
        None => Ok(()),
    })?;
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

/// The next directory in this one, and where the listing continues.
fn next_directory(dir: &OwnedFd, from: u64) -> io::Result<Option<(CString, u64)>> {
    rustix::fs::seek(dir, SeekFrom::Start(from))?;
    let mut buffer = [MaybeUninit::uninit(); ENTRIES];
    let mut entries = RawDir::new(dir, &mut buffer);
    while let Some(entry) = entries.next() {
        let entry = match entry {
            Err(Errno::NOENT) => return Ok(None),
            other => other?,
        };
        let name = entry.file_name();
        let is_own = name == c"." || name == c"..";
        if entry.file_type() == FileType::Directory && !is_own {
            return Ok(Some((name.to_owned(), entry.next_entry_cookie())));
        }
    }
    Ok(None)
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
