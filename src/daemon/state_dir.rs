//! The state directory: only root may write it, and one daemon at a time uses it.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::fcntl::{Flock, FlockArg};
use pause_sandboxer::error::{IoContext as _, StepError};

/// How long the last child of a killed daemon may take to execute its program.
const LAST_CHILD: Duration = Duration::from_secs(10);

/// Makes the directory if needed and locks it. The lock is released when the process exits.
///
/// # Errors
/// Others than root can write it, or another daemon uses it.
pub(super) fn open(state_dir: &Path) -> Result<Flock<File>, StepError> {
    make_dir(state_dir)?;
    check_owner(state_dir)?;
    lock(state_dir)
}

/// Makes a directory that only root can enter.
pub(super) fn make_dir(path: &Path) -> Result<(), StepError> {
    DirBuilder::new().recursive(true).mode(0o700).create(path).step_at("make directory", path)
}

/// Checks that only root can write records: the daemon kills, mounts and removes what they name.
fn check_owner(state_dir: &Path) -> Result<(), StepError> {
    const STEP: &str = "use state directory";
    let about = std::fs::metadata(state_dir).step_at(STEP, state_dir)?;
    let (user, mode) = (about.uid(), about.mode() & 0o7777);
    if user == 0 && mode & 0o022 == 0 {
        return Ok(());
    }
    let path = state_dir.display();
    let reason = format!(
        "users other than root can write it (owner {user}, mode {mode:04o}); examine its content, \
         then: chown root:root {path} && chmod 0700 {path}"
    );
    Err(StepError::at(STEP, state_dir, io::Error::new(io::ErrorKind::PermissionDenied, reason)))
}

/// Locks the directory against other daemons.
fn lock(state_dir: &Path) -> Result<Flock<File>, StepError> {
    const STEP: &str = "lock state directory";
    let path = state_dir.join("lock");
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&path)
        .step_at(STEP, &path)?;
    let mut file = file;
    let begun = Instant::now();
    let mut lock = loop {
        let e = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => break lock,
            Err((back, e)) => {
                file = back;
                e
            }
        };
        let mut holder = String::new();
        if e != nix::Error::EWOULDBLOCK
            || file.rewind().and_then(|()| file.read_to_string(&mut holder)).is_err()
        {
            return Err(StepError::at(STEP, &path, e.into()));
        }
        // A child of a killed daemon holds the lock until it executes the pause program; from then
        // on recovery can find it.
        let ended = !Path::new("/proc").join(holder.trim()).join("exe").exists();
        if !ended || begun.elapsed() > LAST_CHILD {
            let reason = io::Error::other(format!("in use by process {}", holder.trim()));
            return Err(StepError::at(STEP, &path, reason));
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    lock.set_len(0)
        .and_then(|()| lock.rewind())
        .and_then(|()| writeln!(&mut *lock, "{}", std::process::id()))
        .step_at(STEP, &path)?;
    Ok(lock)
}
