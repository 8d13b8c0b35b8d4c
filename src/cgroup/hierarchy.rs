//! One mounted hierarchy, with reads and writes of its files.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::{IoContext, StepError};
use crate::sys::{self, Errno};

/// One mounted hierarchy.
#[derive(Debug)]
pub(super) struct OpenHierarchy {
    pub(super) mount: PathBuf,
    pub(super) root: Arc<OwnedFd>,
    /// Version 1 with the freezer controller.
    pub(super) freezer: bool,
    /// Version 1 with the cpuset controller: a new cgroup has no CPUs and takes no process until it
    /// is given some.
    pub(super) cpuset: bool,
    /// File and value that give a pause process the least CPU time of all that want some.
    pub(super) weight: Option<Weight>,
}

pub(super) type Weight = (&'static CStr, &'static [u8]);

/// The shares that containerd gives its sandboxes (`DefaultSandboxCPUshares`).
const SHARES: Weight = (c"cpu.shares", b"2");

/// The weight that runc converts these shares to for version 2.
const WEIGHT: Weight = (c"cpu.weight", b"1");

/// Files of version 1's cpuset controller that are empty in a new cgroup.
const CPUSET: [&CStr; 2] = [c"cpuset.cpus", c"cpuset.mems"];

/// File of version 1's freezer, and what it says of a cgroup in which processes run: it counts
/// those above in.
pub(super) const THAWED: (&CStr, &[u8]) = (c"freezer.state", b"THAWED");
/// File of version 2, and the line of a cgroup in which processes run.
pub(super) const UNFROZEN: (&CStr, &[u8]) = (c"cgroup.events", b"frozen 0");

impl OpenHierarchy {
    /// Opens the hierarchy with these controllers; `unified`: it is of version 2.
    ///
    /// # Errors
    /// Its mount point cannot be opened.
    pub(super) fn open(
        mount: PathBuf,
        controllers: &[String],
        unified: bool,
    ) -> Result<Self, StepError> {
        let root = c_path(&mount).and_then(|path| {
            sys::open(None, &path, libc::O_PATH | libc::O_DIRECTORY, 0).step_at("open", &mount)
        })?;
        // In version 1 one hierarchy has it, in its root too. With version 2 it depends on the
        // parent cgroup.
        let has_shares =
            unified || sys::open(Some(root.as_fd()), SHARES.0, libc::O_PATH, 0).is_ok();
        let weight = has_shares.then_some(if unified { WEIGHT } else { SHARES });
        let has = |controller: &str| controllers.iter().any(|name| name == controller);
        Ok(Self {
            mount,
            root: Arc::new(root),
            freezer: has("freezer"),
            cpuset: has("cpuset"),
            weight,
        })
    }

    /// The directory of a cgroup.
    pub(super) fn open_directory(&self, cgroup: &CStr) -> Result<OwnedFd, Errno> {
        sys::open(Some(self.root.as_fd()), cgroup, libc::O_PATH | libc::O_DIRECTORY, 0)
    }

    /// The content of a file.
    pub(super) fn read_file(&self, path: &CStr) -> Result<Vec<u8>, Errno> {
        let file = sys::open(Some(self.root.as_fd()), path, libc::O_RDONLY, 0)?;
        let mut content = Vec::new();
        // `read_to_end` begins with tiny reads, and asks for the size, which these files do
        // not tell.
        let mut buffer = [0; 4096];
        loop {
            match rustix::io::read(&file, &mut buffer)? {
                0 => break Ok(content),
                length => content.extend_from_slice(buffer.get(..length).unwrap_or_default()),
            }
        }
    }

    /// Enables the cpu controller in `cgroup.subtree_control` of every ancestor of a version 2
    /// cgroup, as runc does for the pod's containers. An ancestor with processes of its own
    /// refuses; the cgroup then has no CPU weight.
    pub(super) fn enable_cpu_controller(&self, cgroup: &CStr) {
        const CONTROL: &CStr = c"cgroup.subtree_control";
        let parents = ancestors(cgroup).into_iter().map(|parent| below(&parent, CONTROL));
        for control in [CONTROL.to_owned()].into_iter().chain(parents) {
            if let Err(e) = sys::write_file(self.root.as_fd(), &control, b"+cpu") {
                log::debug!(
                    "write +cpu to {} of {}: {}",
                    control.to_string_lossy(),
                    self.mount.display(),
                    io::Error::from(e)
                );
            }
        }
    }

    /// Gives a cgroup the CPUs and memory nodes of its parent, and the parent those of its own
    /// where it has none.
    pub(super) fn fill_cpuset(&self, cgroup: &CStr) -> Result<(), Errno> {
        for file in CPUSET {
            let mut chain = ancestors(cgroup);
            // The nearest that has some; the root always has.
            let mut value = Vec::new();
            let mut empty = vec![cgroup.to_owned()];
            while let Some(path) = chain.pop() {
                value = self.read_file(&below(&path, file))?;
                if !value.trim_ascii().is_empty() {
                    break;
                }
                empty.push(path);
            }
            if value.trim_ascii().is_empty() {
                value = self.read_file(file)?;
            }
            while let Some(path) = empty.pop() {
                sys::write_file(self.root.as_fd(), &below(&path, file), &value)?;
            }
        }
        Ok(())
    }
}

/// All parents of a path, the topmost first.
pub(super) fn ancestors(cgroup: &CStr) -> Vec<CString> {
    let bytes = cgroup.to_bytes();
    let slashes = bytes.iter().enumerate().filter(|(_, byte)| **byte == b'/');
    slashes.filter_map(|(at, _)| CString::new(&bytes[..at]).ok()).collect()
}

/// The path of a file in a cgroup.
pub(super) fn below(directory: &CStr, file: &CStr) -> CString {
    let path = [directory.to_bytes(), b"/", file.to_bytes()].concat();
    CString::new(path).unwrap_or_default()
}

fn c_path(path: &Path) -> Result<CString, StepError> {
    CString::new(path.as_os_str().as_bytes()).step_at("open", path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ancestors_topmost_first() {
        assert_eq!(ancestors(c"a/b/id"), [c"a".to_owned(), c"a/b".to_owned()]);
        assert_eq!(ancestors(c"id"), Vec::<CString>::new());
    }
}
