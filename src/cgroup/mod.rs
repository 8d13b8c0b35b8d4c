//! The pause process's cgroup: where it goes, how it is made and removed.
//!
//! The node's cgroup file systems are found once. With version 1 a cgroup is a directory in every
//! mounted hierarchy, which the child joins itself; with version 2 it is one directory, which the
//! child is born in. [`mounts`] finds out which version it is.
//!
//! Below a systemd slice the cgroup is a transient scope. Its directory is made here all the same,
//! before systemd is asked for the scope: the pause process is then in its place from its first
//! instruction on, and a Start that is interrupted at any point leaves it where the cleanup looks.
//! systemd takes over a cgroup that it finds.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, unlinkat};

use crate::error::{IoContext, StepError, StepErrors};
use crate::process::deadline;
use crate::sys::{self, Errno};

mod hierarchy;
pub mod mounts;
mod new_cgroup;
mod placement;
pub mod slice;
mod systemd;

use hierarchy::{OpenHierarchy, THAWED, UNFROZEN, below};
use mounts::Mounted;
pub(crate) use new_cgroup::NewCgroup;
pub use placement::{CgroupRef, check_parent};
pub(crate) use placement::{Placement, placement};
use slice::Scope;
use systemd::Systemd;

/// The CPU shares of a scope: without them systemd sets the default of every unit.
const SCOPE_SHARES: (&str, u64) = ("CPUShares", 2);
/// The CPU weight of a scope with version 2.
const SCOPE_WEIGHT: (&str, u64) = ("CPUWeight", 1);

/// The node's cgroup file systems.
#[derive(Debug)]
pub(crate) struct Cgroups {
    hierarchies: Vec<OpenHierarchy>,
    unified: bool,
    systemd: Systemd,
}

/// Attempts to make a cgroup that is removed before it has a process.
pub(crate) const TRIES: u32 = 3;

/// How often and how long the removal of a busy cgroup is tried again: 511 ms in all.
const RETRIES: u32 = 9;

impl Cgroups {
    /// Opens what is mounted.
    ///
    /// # Errors
    /// A file of `/proc` or a mount point cannot be opened.
    pub(crate) fn find() -> Result<Self, StepError> {
        Self::open(Mounted::find()?)
    }

    fn open(mounted: Mounted) -> Result<Self, StepError> {
        let unified = matches!(mounted, Mounted::V2(_));
        let open = |mount, controllers: &[String]| OpenHierarchy::open(mount, controllers, unified);
        let hierarchies = match mounted {
            Mounted::V2(point) => vec![open(point, &[])?],
            Mounted::V1(found) => found
                .into_iter()
                .map(|h| open(h.point, &h.controllers))
                .collect::<Result<_, StepError>>()?,
        };
        Ok(Self { hierarchies, unified, systemd: Systemd::default() })
    }

    /// The cgroup2 file system at `mount`, whatever else there is.
    #[cfg(test)]
    pub(crate) fn unified_at(mount: &Path) -> Result<Self, StepError> {
        Self::open(Mounted::V2(mount.to_owned()))
    }

    /// Roots of the version 1 hierarchies, which the child joins.
    pub(crate) fn v1_roots(&self) -> Vec<BorrowedFd<'_>> {
        if self.unified {
            Vec::new()
        } else {
            self.hierarchies.iter().map(|h| h.root.as_fd()).collect()
        }
    }

    /// Root of version 1's freezer hierarchy.
    pub(crate) fn freezer(&self) -> Option<Arc<OwnedFd>> {
        self.hierarchies.iter().find(|h| h.freezer).map(|h| Arc::clone(&h.root))
    }

    /// All descriptors that are kept.
    pub(crate) fn roots(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.hierarchies.iter().map(|h| h.root.as_fd())
    }

    /// The path of a cgroup in hierarchy `index`, for messages.
    pub(crate) fn path(&self, index: usize, cgroup: &CStr) -> PathBuf {
        let mount = self.hierarchies.get(index).map_or(Path::new(""), |h| &h.mount);
        mount.join(std::ffi::OsStr::from_bytes(cgroup.to_bytes()))
    }

    /// Makes the cgroup of a pause process, in which it is born.
    ///
    /// # Errors
    /// The failed step; what was made has been removed then.
    pub(crate) fn make_cgroup(
        &self,
        placement: &Placement,
    ) -> Result<Option<NewCgroup<'_>>, StepError> {
        match placement {
            Placement::Inherit => Ok(None),
            Placement::Directory(path) => self.make_directory(path, self.unified).map(Some),
            Placement::Scope(scope) => {
                // Left over from an interrupted Start of the same sandbox.
                if self.exists(&scope.path)
                    && let Some(e) = self.remove_scope(scope).into_iter().next()
                {
                    return Err(e);
                }
                // On version 2 systemd must create the slice, because it delegates the controllers.
                // On version 1 it does nothing for a slice without limits.
                if self.unified && !self.exists(&scope.parent()) {
                    self.systemd.start_slice(&scope.slice)?;
                }
                // systemd decides which controllers the slice delegates.
                self.make_directory(&scope.path, false).map(Some)
            }
        }
    }

    /// Finishes what [`Cgroups::make_cgroup`] began, when the pause process is born.
    ///
    /// # Errors
    /// The failed step; [`Cgroups::remove`] is to undo what was done.
    pub(crate) fn register(&self, placement: &Placement, pid: u32) -> Result<(), StepError> {
        match placement {
            Placement::Inherit | Placement::Directory(_) => Ok(()),
            Placement::Scope(scope) => {
                let weight = if self.unified { SCOPE_WEIGHT } else { SCOPE_SHARES };
                self.systemd.start_scope(scope, pid, weight)?;
                if self.unified { Ok(()) } else { self.move_back(&scope.path, pid) }
            }
        }
    }

    /// Moves a process into its cgroup again in every hierarchy of version 1: where systemd keeps
    /// no cgroup for a scope it puts the processes into the nearest that it keeps, which is that of
    /// some slice.
    fn move_back(&self, cgroup: &CStr, pid: u32) -> Result<(), StepError> {
        let (procs, pid) = (below(cgroup, c"cgroup.procs"), pid.to_string());
        for (index, hierarchy) in self.hierarchies.iter().enumerate() {
            let mut tries = TRIES;
            loop {
                match sys::write_file(hierarchy.root.as_fd(), &procs, pid.as_bytes()) {
                    // It may have ended already: its exit will be seen.
                    Ok(()) | Err(Errno::SRCH) => break,
                    // Removed with the process's move out of it.
                    Err(Errno::NOENT) if tries > 1 => self.make_directory(cgroup, false)?.keep(),
                    Err(e) => {
                        return Err(StepError::at(
                            "move the pause process into cgroup",
                            self.path(index, cgroup),
                            e.into(),
                        ));
                    }
                }
                tries -= 1;
            }
        }
        Ok(())
    }

    /// Whether a child that could not join its cgroup for this reason shall try again: with version
    /// 1 systemd removes empty cgroups below a slice, of controllers that it does not use there,
    /// whenever it updates the slice.
    pub(crate) fn removed_by_systemd(&self, placement: &Placement, e: Errno) -> bool {
        !self.unified
            && matches!(placement, Placement::Scope(_))
            && matches!(e, Errno::NOENT | Errno::NODEV)
    }

    /// Whether the kernel has killed a process of this cgroup because memory had run out. False
    /// where the kernel does not count that, and if the cgroup is gone, as a scope is soon after
    /// the exit.
    pub(crate) fn oom_killed(&self, placement: &Placement) -> bool {
        let Some(cgroup) = placement.path() else { return false };
        let counter = if self.unified { c"memory.events.local" } else { c"memory.oom_control" };
        self.hierarchies.iter().any(|hierarchy| {
            let content = hierarchy.read_file(&below(cgroup, counter)).unwrap_or_default();
            content.split(|byte| *byte == b'\n').any(|line| {
                line.strip_prefix(b"oom_kill ").is_some_and(|count| count.trim_ascii() != b"0")
            })
        })
    }

    /// Removes the cgroup of a pause process. Processes that are in it are killed: those of a Start
    /// that was interrupted. Gone already is success.
    pub(crate) fn remove(&self, placement: &Placement) -> StepErrors {
        match placement {
            Placement::Inherit => StepErrors::default(),
            Placement::Directory(path) => self.remove_directory(path),
            Placement::Scope(scope) => self.remove_scope(scope),
        }
    }

    /// Makes the cgroup in every hierarchy, missing parents too. With `hand_down` the parents let
    /// it have what gives it its weight.
    fn make_directory<'a>(
        &'a self,
        cgroup: &CStr,
        hand_down: bool,
    ) -> Result<NewCgroup<'a>, StepError> {
        const MAKE: &str = "make cgroup";
        if self.hierarchies.is_empty() {
            let e = io::Error::new(io::ErrorKind::NotFound, "no cgroup file system is mounted");
            return Err(StepError::at(MAKE, cgroup.to_string_lossy().as_ref(), e));
        }
        let mut made = NewCgroup { cgroups: self, hand_down, directories: Vec::new(), leaf: None };
        for (index, hierarchy) in self.hierarchies.iter().enumerate() {
            made.make_in(index, hierarchy, cgroup)
                .map_err(|(path, e)| StepError::at(MAKE, self.path(index, &path), e.into()))?;
        }
        self.refuse_frozen(cgroup)?;
        if self.unified
            && let Some(hierarchy) = self.hierarchies.first()
        {
            let leaf = hierarchy.open_directory(cgroup);
            made.leaf = Some(leaf.step_at("open cgroup", self.path(0, cgroup))?);
        }
        Ok(made)
    }

    /// A process in a frozen cgroup does not run, and with version 1 it does not end either.
    fn refuse_frozen(&self, cgroup: &CStr) -> Result<(), StepError> {
        for (index, hierarchy) in self.hierarchies.iter().enumerate() {
            let thawed = if self.unified { UNFROZEN } else { THAWED };
            if !(hierarchy.freezer || self.unified) {
                continue;
            }
            let what = "place the pause process in cgroup";
            let state = match hierarchy.read_file(&below(cgroup, thawed.0)) {
                // It was removed meanwhile: the child finds the same.
                Err(Errno::NOENT | Errno::NODEV) => continue,
                state => state.step_at(what, self.path(index, cgroup))?,
            };
            if !state.split(|byte| *byte == b'\n').any(|line| line == thawed.1) {
                let e = io::Error::new(io::ErrorKind::ResourceBusy, "it or an ancestor is frozen");
                return Err(StepError::at(what, self.path(index, cgroup), e));
            }
        }
        Ok(())
    }

    /// Removes a scope. It ends by itself with its last process, unless systemd was never asked for
    /// it.
    fn remove_scope(&self, scope: &Scope) -> StepErrors {
        // A scope lives no longer than its cgroup, so this needs no systemd to be sure.
        if !self.exists(&scope.path) {
            return StepErrors::default();
        }
        let mut failed = self.in_each("kill what is in cgroup", &scope.path, |hierarchy| {
            self.kill_members(hierarchy, &scope.path)
        });
        let stopped = self.systemd.stop(&scope.unit);
        let removed = self.remove_directory(&scope.path);
        match stopped {
            // The scope ended with its cgroup, whatever the bus or a busy systemd answered.
            Err(e) if removed.is_empty() => {
                log::warn!("failed to stop a scope; removed its cgroup: {e}");
            }
            stopped => failed.extend(stopped.err()),
        }
        failed.extend(removed);
        failed
    }

    /// Whether the cgroup is there in any hierarchy, or may be: it cannot be opened.
    fn exists(&self, cgroup: &CStr) -> bool {
        // An empty path is the root.
        cgroup.is_empty()
            || self.hierarchies.iter().any(|hierarchy| {
                !matches!(
                    hierarchy.open_directory(cgroup),
                    Err(Errno::NOENT | Errno::NOTDIR | Errno::NODEV | Errno::NAMETOOLONG)
                )
            })
    }

    /// Removes the cgroup from every hierarchy where it is empty by then. What is in it stays.
    pub(crate) fn remove_empty(&self, cgroup: &CStr, until: Instant) -> StepErrors {
        self.in_each("remove cgroup", cgroup, |hierarchy| {
            let mut done = Ok(());
            let _ = deadline::poll_until(until, || {
                done = unlinkat(hierarchy.root.as_fd(), cgroup, AtFlags::REMOVEDIR);
                done != Err(Errno::BUSY)
            });
            match done {
                // A path below a file does not exist. A cgroup below this one belongs to others.
                Err(Errno::NOENT | Errno::NOTDIR | Errno::NOTEMPTY) => Ok(()),
                done => done,
            }
        })
    }

    /// Does the work in each hierarchy; the errors.
    fn in_each(
        &self,
        what: &'static str,
        cgroup: &CStr,
        work: impl Fn(&OpenHierarchy) -> Result<(), Errno>,
    ) -> StepErrors {
        let error = |(index, hierarchy)| {
            let e = work(hierarchy).err()?;
            Some(StepError::at(what, self.path(index, cgroup), e.into()))
        };
        self.hierarchies.iter().enumerate().filter_map(error).collect()
    }

    /// Removes the cgroup from every hierarchy with what is in it; parents stay, they are
    /// kubelet's.
    fn remove_directory(&self, cgroup: &CStr) -> StepErrors {
        self.in_each("remove cgroup", cgroup, |hierarchy| self.remove_from(hierarchy, cgroup))
    }

    fn remove_from(&self, hierarchy: &OpenHierarchy, cgroup: &CStr) -> Result<(), Errno> {
        for attempt in 0.. {
            match unlinkat(hierarchy.root.as_fd(), cgroup, AtFlags::REMOVEDIR) {
                // Below what is no directory there is nothing.
                Ok(()) | Err(Errno::NOENT | Errno::NOTDIR) => return Ok(()),
                Err(Errno::BUSY | Errno::NOTEMPTY) if attempt < RETRIES => {}
                Err(e) => return Err(e),
            }
            self.kill_members(hierarchy, cgroup)?;
            thread::sleep(Duration::from_millis(1 << attempt));
        }
        Ok(())
    }

    /// Kills what is in a cgroup of ours.
    fn kill_members(&self, hierarchy: &OpenHierarchy, cgroup: &CStr) -> Result<(), Errno> {
        let members = match hierarchy.read_file(&below(cgroup, c"cgroup.procs")) {
            Err(Errno::NOENT | Errno::NOTDIR | Errno::NODEV) => return Ok(()),
            members => members?,
        };
        for pid in String::from_utf8_lossy(&members).lines().filter_map(|line| line.parse().ok()) {
            // Another process may have got the pid meanwhile: only a process that is a member once
            // it is held is killed.
            let Ok(pidfd) = sys::pidfd_open(pid) else { continue };
            let still = hierarchy.read_file(&below(cgroup, c"cgroup.procs")).unwrap_or_default();
            if String::from_utf8_lossy(&still).lines().any(|line| line.parse() == Ok(pid)) {
                sys::kill(pidfd.as_fd())?;
                self.thaw_killed(cgroup, pid);
            }
        }
        Ok(())
    }

    /// Lets a killed process of the cgroup end where version 1 holds it frozen: such a one keeps
    /// its pid.
    fn thaw_killed(&self, cgroup: &CStr, pid: libc::c_int) {
        for hierarchy in self.hierarchies.iter().filter(|h| h.freezer) {
            let state = hierarchy.read_file(&below(cgroup, THAWED.0)).unwrap_or_default();
            if state.trim_ascii() != THAWED.1
                && !state.is_empty()
                && let Err(e) = deadline::thaw(&hierarchy.root, pid)
            {
                log::debug!(pid = pid; "failed to thaw killed process: {}", io::Error::from(e));
            }
        }
    }
}

/// Path of version 1's `tasks` in a cgroup.
pub(crate) fn tasks(cgroup: &CStr) -> CString {
    below(cgroup, c"tasks")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_is_too_long_is_absent() {
        let cgroups = Cgroups::unified_at(Path::new("/tmp")).unwrap();
        let long = CString::new("a/".repeat(3000)).unwrap();
        assert!(cgroups.exists(c"") && !cgroups.exists(c"none") && !cgroups.exists(&long));
    }

    #[test]
    fn nothing_mounted() {
        let cgroups = Cgroups::open(Mounted::V1(Vec::new())).unwrap();
        let e = cgroups.make_directory(c"a/id", true).unwrap_err();
        assert_eq!(e.to_string(), "make cgroup a/id: no cgroup file system is mounted");
        assert!(cgroups.remove(&placement("a", "id").unwrap()).is_empty());
    }
}
