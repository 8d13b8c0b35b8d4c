//! A cgroup that a Start makes, as long as it may have to be undone.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, Mode, mkdirat, unlinkat};

use super::Cgroups;
use super::hierarchy::{OpenHierarchy, ancestors, below};
use crate::sys::{self, Errno};

/// Mode of a new cgroup.
const DIRECTORY_MODE: Mode = Mode::from_bits_retain(0o755);

/// Directories that a Start has made; removed when dropped, unless kept.
#[derive(Debug)]
pub(crate) struct NewCgroup<'a> {
    pub(super) cgroups: &'a Cgroups,
    pub(super) hand_down: bool,
    /// Hierarchy and path, parents first.
    pub(super) directories: Vec<(usize, CString)>,
    pub(super) leaf: Option<OwnedFd>,
}

impl NewCgroup<'_> {
    /// The cgroup's own directory, version 2.
    pub(crate) fn v2(&self) -> Option<BorrowedFd<'_>> {
        self.leaf.as_ref().map(AsFd::as_fd)
    }

    /// Leaves all as it is.
    pub(crate) fn keep(mut self) {
        self.directories.clear();
    }

    /// Makes the cgroup in one hierarchy.
    pub(super) fn make_in(
        &mut self,
        index: usize,
        hierarchy: &OpenHierarchy,
        cgroup: &CStr,
    ) -> Result<(), (CString, Errno)> {
        let fail = |e| (cgroup.to_owned(), e);
        // A parent that another Start had made may go between its making and its use.
        let mut attempts = 3;
        loop {
            attempts -= 1;
            match mkdirat(hierarchy.root.as_fd(), cgroup, DIRECTORY_MODE) {
                // It may be left over from an interrupted Start of the same sandbox.
                Ok(()) | Err(Errno::EXIST) => {
                    break self.directories.push((index, cgroup.to_owned()));
                }
                Err(Errno::NOENT) if attempts > 0 => self.parents(index, hierarchy, cgroup)?,
                Err(e) => return Err(fail(e)),
            }
        }
        if let Some((file, value)) = hierarchy.weight {
            let write = || sys::write_file(hierarchy.root.as_fd(), &below(cgroup, file), value);
            let written = match write() {
                Err(Errno::NOENT) if self.hand_down => {
                    hierarchy.enable_cpu_controller(cgroup);
                    write()
                }
                written => written,
            };
            match written {
                // Its parents have no such controller to hand down.
                Ok(()) | Err(Errno::NOENT) => {}
                Err(e) => return Err(fail(e)),
            }
        }
        if hierarchy.cpuset { hierarchy.fill_cpuset(cgroup).map_err(fail) } else { Ok(()) }
    }

    fn parents(
        &mut self,
        index: usize,
        hierarchy: &OpenHierarchy,
        cgroup: &CStr,
    ) -> Result<(), (CString, Errno)> {
        for parent in ancestors(cgroup) {
            match mkdirat(hierarchy.root.as_fd(), &parent, DIRECTORY_MODE) {
                Ok(()) => self.directories.push((index, parent)),
                Err(Errno::EXIST) => {}
                Err(e) => return Err((parent, e)),
            }
        }
        Ok(())
    }
}

impl Drop for NewCgroup<'_> {
    fn drop(&mut self) {
        for (index, path) in self.directories.drain(..).rev() {
            let Some(hierarchy) = self.cgroups.hierarchies.get(index) else { continue };
            // A parent that is in use by now stays; the cleanup finds what else fails, or it does
            // no harm.
            match unlinkat(hierarchy.root.as_fd(), &path, AtFlags::REMOVEDIR) {
                Ok(()) | Err(Errno::NOENT | Errno::NOTEMPTY | Errno::BUSY) => {}
                Err(e) => {
                    log::warn!(
                        "failed to remove cgroup {}: {}",
                        self.cgroups.path(index, &path).display(),
                        io::Error::from(e)
                    )
                }
            }
        }
    }
}
