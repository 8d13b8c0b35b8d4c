//! This project's own shim, a program beside the daemon's. It is opened when the daemon starts and
//! executed by the descriptor, so that a daemon has one version of it, whatever an upgrade does to
//! the file.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::StatVfsMountFlags;

use super::resolve;
use crate::error::{IoContext as _, StepError};

/// Name of the program.
pub const NAME: &str = "pause-sandboxer-runc-shim";

/// The variable that has it mount root file systems with the option `volatile`.
pub const VOLATILE_ROOTFS: &str = "PAUSE_SANDBOXER_VOLATILE_ROOTFS";

/// The shim that it replaces, by the file's name.
const REPLACED: &str = "containerd-shim-runc-v2";

/// The lowest number of its descriptor: launched processes have their own below.
const LOWEST: i32 = 10;

/// Members of the group of the file, or any other user, can write it.
const WRITABLE: u32 = 0o022;

/// The open program.
#[derive(Debug)]
pub struct OwnShim {
    path: PathBuf,
    file: OwnedFd,
}

impl OwnShim {
    /// Opens the program beside this process's own.
    ///
    /// # Errors
    /// There is none, or another user than root can change it.
    pub fn open_beside() -> Result<Self, StepError> {
        let own = std::env::current_exe().step("find shim beside the own program")?;
        Self::open(own.with_file_name(NAME))
    }

    /// Opens the program at `path`.
    ///
    /// # Errors
    /// There is none, or another user than root can change it.
    pub fn open(path: PathBuf) -> Result<Self, StepError> {
        let file = open(&path).step_at("open shim", &path)?;
        Ok(Self { path, file })
    }

    /// Where the program was when it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A path of the open program, for as long as it is open.
    pub fn opened_path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd()).into()
    }

    /// A path by which children of this process execute it: until then they have its descriptor.
    pub(super) fn inherited_path(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.file.as_raw_fd()).into()
    }
}

impl AsFd for OwnShim {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

fn open(path: &Path) -> io::Result<OwnedFd> {
    let file = File::open(path)?;
    let about = file.metadata()?;
    let refuse = |reason: String| Err(io::Error::new(io::ErrorKind::PermissionDenied, reason));
    if !about.is_file() {
        return refuse("it is not a regular file".to_owned());
    }
    if about.uid() != 0 {
        return refuse(format!("it belongs to user {}, not to root", about.uid()));
    }
    let mode = about.mode() & 0o7777;
    if mode & WRITABLE != 0 {
        return refuse(format!("users other than its owner can write it (mode {mode:o})"));
    }
    if mode & 0o111 == 0 {
        return refuse(format!("it is not executable (mode {mode:o})"));
    }
    if rustix::fs::fstatvfs(&file)?.f_flag.contains(StatVfsMountFlags::NOEXEC) {
        return refuse("it is on a file system that is mounted noexec".to_owned());
    }
    Ok(rustix::io::fcntl_dupfd_cloexec(&file, LOWEST)?)
}

/// Whether the own shim serves pods of that runtime in place of the runtime's: containerd would
/// start `containerd-shim-runc-v2`.
pub fn serves(runtime: &str) -> bool {
    resolve::name(runtime).is_ok_and(|name| name == REPLACED)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt as _, chown};

    use super::*;

    /// Promise: only_files_of_root_count.
    #[test]
    fn a_program_that_others_can_change_is_refused() {
        if kit::skip_without_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(NAME);
        let refused = || OwnShim::open(path.clone()).unwrap_err().to_string();
        assert_eq!(
            refused(),
            format!("open shim {}: No such file or directory (os error 2)", path.display())
        );
        fs::write(&path, "").unwrap();
        for (mode, reason) in
            [(0o775, "can write it (mode 775)"), (0o757, "mode 757"), (0o644, "not executable")]
        {
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            let said = refused();
            assert!(said.contains(reason), "{mode:o}: {said}");
        }
        fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
        let opened = OwnShim::open(path.clone()).unwrap();
        assert!(opened.as_fd().as_raw_fd() >= LOWEST);
        let flags = rustix::io::fcntl_getfd(&opened).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC), "{flags:?}");
        chown(&path, Some(65534), None).unwrap();
        assert!(refused().contains("it belongs to user 65534"));
        let directory = OwnShim::open(dir.path().to_owned()).unwrap_err().to_string();
        assert!(directory.contains("not a regular file"), "{directory}");
    }

    #[test]
    fn it_replaces_containerd_s_shim_for_runc_and_no_other() {
        for (runtime, replaced) in [
            ("io.containerd.runc.v2", true),
            ("example.runc.v2", true),
            ("io.containerd.runc.v1", false),
            ("io.containerd.crun.v2", false),
            ("io.containerd.runsc.v1", false),
            ("/usr/bin/containerd-shim-runc-v2", false),
            ("", false),
        ] {
            assert_eq!(serves(runtime), replaced, "{runtime}");
        }
    }
}
