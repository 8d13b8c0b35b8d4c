//! The lock of containerd's config: a second command of this program must not write at the same
//! time.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};

use super::EnableError;
use base::error::{IoContext as _, StepError};

/// Its name in the directory of containerd's config file.
const NAME: &str = ".pause-sandboxer.lock";

/// A process that can open the file can lock it.
const PRIVATE: u32 = 0o600;

/// A lock that is held. Its file is removed at the end; one of a killed process is taken over.
#[derive(Debug)]
pub(super) struct ConfigLock {
    path: PathBuf,
    file: Flock<File>,
}

impl ConfigLock {
    /// Takes the lock of a directory, which is made if it is missing.
    ///
    /// # Errors
    /// Another process holds it, or the step that failed.
    pub(super) fn take(directory: &Path) -> Result<Self, EnableError> {
        const STEP: &str = "lock file";
        fs::create_dir_all(directory).step_at("make directory", directory)?;
        let path = directory.join(NAME);
        loop {
            let mut options = File::options();
            options.write(true).create(true).truncate(false).mode(PRIVATE);
            let file = options.custom_flags(libc::O_NOFOLLOW).open(&path).step_at(STEP, &path)?;
            let file = Flock::lock(file, FlockArg::LockExclusiveNonblock);
            let file = file.map_err(|(_, e)| match e {
                nix::Error::EWOULDBLOCK => EnableError::from(format!(
                    "another `pause-sandboxer enable` or `disable` is running (lock file {})",
                    path.display()
                )),
                e => StepError::at(STEP, &path, e.into()).into(),
            })?;
            let lock = Self { path: path.clone(), file };
            // Its holder may have removed it since it was opened.
            if lock.is_in_place().step_at(STEP, &path)? {
                return Ok(lock);
            }
        }
    }

    fn is_in_place(&self) -> io::Result<bool> {
        let ours = self.file.metadata()?;
        match fs::symlink_metadata(&self.path) {
            Ok(there) => Ok((there.dev(), there.ino()) == (ours.dev(), ours.ino())),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(e) => Err(e),
        }
    }
}

impl Drop for ConfigLock {
    fn drop(&mut self) {
        // A remaining file has no effect; the file of another process is not removed.
        if self.is_in_place().unwrap_or(false) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_has_one_lock_that_others_cannot_open() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(NAME);
        // Any user can lock a directory that all can read.
        let opened = File::open(dir.path()).unwrap();
        let of_another = Flock::lock(opened, FlockArg::LockExclusiveNonblock).unwrap();
        let first = ConfigLock::take(dir.path()).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, PRIVATE);
        let error = ConfigLock::take(dir.path()).unwrap_err().to_string();
        assert!(
            error.starts_with("another `pause-sandboxer enable` or `disable` is running"),
            "{error}"
        );
        drop((first, of_another));
        assert!(!path.exists());
        // A killed process has left it.
        fs::write(&path, "").unwrap();
        drop(ConfigLock::take(dir.path()).unwrap());
        assert!(!path.exists());
        std::os::unix::fs::symlink(dir.path().join("other"), &path).unwrap();
        ConfigLock::take(dir.path()).unwrap_err();
        assert!(!dir.path().join("other").exists());
    }
}
