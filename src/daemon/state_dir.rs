//! The state directory: only root may write it, and one daemon at a time uses it.

use std::ffi::OsStr;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::fcntl::{Flock, FlockArg};
use pause_sandboxer::config::records_below;
use pause_sandboxer::error::{IoContext as _, StepError};
use pause_sandboxer::process::killed::is_killed;
use pause_sandboxer::replace_file::replace_file;

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

/// Where the daemon of a socket notes its state directory.
fn note_of(socket: &Path) -> PathBuf {
    socket.with_added_extension("state")
}

/// Refuses to start with another state directory than the daemon that had the socket before, if
/// that one has records: their pods would be unknown, and kubelet would start them a second time.
///
/// # Errors
/// It has records.
pub(super) fn refuse_moved(socket: &Path, state_dir: &Path) -> Result<(), StepError> {
    // A note that cannot be read must not prevent the start.
    let Ok(noted) = std::fs::read(note_of(socket)) else { return Ok(()) };
    let before = Path::new(OsStr::from_bytes(&noted));
    // A mount may give a directory another path, so the paths are not compared.
    let id = |path: &Path| std::fs::metadata(path).map(|about| (about.dev(), about.ino())).ok();
    let is_same = before == state_dir || id(before).is_some_and(|one| Some(one) == id(state_dir));
    let Ok(entries) = std::fs::read_dir(records_below(before)) else { return Ok(()) };
    let records = entries.flatten().filter(|entry| entry.path().is_dir()).count();
    if is_same || records == 0 {
        return Ok(());
    }
    let reason = format!(
        "{records} pods have records in another directory, which the daemon used before: set \
         state_dir back to {}, and change it only on a drained node",
        before.display()
    );
    Err(StepError::at("use state directory", state_dir, io::Error::other(reason)))
}

/// Notes the state directory for [`refuse_moved`].
pub(super) fn note(socket: &Path, state_dir: &Path) {
    let path = note_of(socket);
    let content = state_dir.as_os_str().as_bytes();
    if std::fs::read(&path).is_ok_and(|there| there == content) {
        return;
    }
    if let Err(e) = replace_file(&path, 0o600, content) {
        log::warn!("failed to note the state directory: {e}");
    }
}

const STEP: &str = "lock state directory";

/// Opens a lock file, and makes it if needed.
fn open_lock(path: &Path) -> Result<File, StepError> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    options.open(path).step_at(STEP, path)
}

/// The open file is the one at `path`.
fn is_at(file: &File, path: &Path) -> Result<bool, StepError> {
    let about = file.metadata().step_at(STEP, path)?;
    match std::fs::metadata(path) {
        Ok(now) => Ok((now.dev(), now.ino()) == (about.dev(), about.ino())),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(StepError::at(STEP, path, e)),
    }
}

/// Locks the directory against other daemons.
fn lock(state_dir: &Path) -> Result<Flock<File>, StepError> {
    let path = state_dir.join("lock");
    let mut file = open_lock(&path)?;
    let begun = Instant::now();
    let mut lock = loop {
        let e = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) if is_at(&lock, &path)? => break lock,
            // Another daemon has replaced it meanwhile: what counts is the lock at its path.
            Ok(_) => {
                file = open_lock(&path)?;
                continue;
            }
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
        let holder = Path::new("/proc").join(holder.trim());
        // A child of a killed daemon holds the lock until it executes the pause program; from then
        // on recovery can find it.
        let (ended, killed) = (!holder.join("exe").exists(), is_killed(&holder));
        let waits = begun.elapsed() <= LAST_CHILD;
        if killed && !waits {
            break replace(&file, &path)?;
        }
        if !(ended || killed) || !waits {
            return Err(in_use(&holder, &path));
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    lock.set_len(0)
        .and_then(|()| lock.rewind())
        .and_then(|()| writeln!(&mut *lock, "{}", std::process::id()))
        .step_at(STEP, &path)?;
    Ok(lock)
}

fn in_use(holder: &Path, path: &Path) -> StepError {
    let pid = holder.file_name().unwrap_or_default().display();
    StepError::at(STEP, path, io::Error::other(format!("in use by process {pid}")))
}

/// Takes the place of a lock whose holder is killed and hangs in the kernel, so that it is never
/// released. `file` is that lock's, at `path`.
///
/// # Errors
/// Another daemon did so first, or the failed step.
fn replace(file: &File, path: &Path) -> Result<Flock<File>, StepError> {
    let new = path.with_extension("new");
    let taken = |e: nix::Error| StepError::at(STEP, &new, e.into());
    let lock = Flock::lock(open_lock(&new)?, FlockArg::LockExclusiveNonblock)
        .map_err(|(_, e)| taken(e))?;
    // Another daemon may have replaced it.
    if !is_at(file, path)? {
        return Err(taken(nix::Error::EWOULDBLOCK));
    }
    std::fs::rename(&new, path).step_at(STEP, &new)?;
    log::warn!(
        "replaced lock file {}: the daemon that holds it was killed and hangs in the kernel",
        path.display()
    );
    Ok(lock)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use kit::machine::freezer::Freezer;

    use super::*;

    fn eventually(condition: impl Fn() -> bool) {
        let begun = Instant::now();
        while !condition() {
            assert!(begun.elapsed() < Duration::from_secs(60), "it does not come");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn another_state_directory_is_refused_while_the_old_one_has_records() {
        let dir = tempfile::tempdir().unwrap();
        let (old, new) = (dir.path().join("old"), dir.path().join("new"));
        let socket = dir.path().join("s.sock");
        for state in [&old, &new] {
            std::fs::create_dir_all(records_below(state)).unwrap();
        }
        refuse_moved(&socket, &old).unwrap();
        note(&socket, &old);
        refuse_moved(&socket, &new).unwrap();
        std::fs::create_dir(records_below(&old).join("a")).unwrap();
        let refused = refuse_moved(&socket, &new).unwrap_err().to_string();
        assert!(refused.contains(&format!("set state_dir back to {}", old.display())), "{refused}");
        refuse_moved(&socket, &old).unwrap();
        refuse_moved(&socket, &dir.path().join("new/../old")).unwrap();
        std::fs::remove_dir(records_below(&old).join("a")).unwrap();
        note(&socket, &new);
        refuse_moved(&socket, &old).unwrap();
    }

    /// Two daemons wait for the child of a killed one, and a third has replaced its lock.
    #[test]
    fn a_lock_that_was_replaced_while_it_was_awaited_is_not_taken() {
        let dir = tempfile::tempdir().unwrap();
        let (path, new) = (dir.path().join("lock"), dir.path().join("lock.new"));
        let hold = |path: &Path, holder: u32| {
            std::fs::write(path, format!("{holder}\n")).unwrap();
            Flock::lock(File::open(path).unwrap(), FlockArg::LockExclusiveNonblock).unwrap()
        };
        // There is no process 0.
        let old = hold(&path, 0);
        let waits = {
            let dir = dir.path().to_owned();
            std::thread::spawn(move || lock(&dir).map(drop).map_err(|step| step.to_string()))
        };
        let links_here = |entry: io::Result<std::fs::DirEntry>| {
            entry.and_then(|fd| std::fs::read_link(fd.path())).is_ok_and(|link| link == path)
        };
        let open = || std::fs::read_dir("/proc/self/fd").unwrap().map(links_here);
        eventually(|| open().filter(|here| *here).count() == 2);
        let current = hold(&new, std::process::id());
        std::fs::rename(&new, &path).unwrap();
        drop(old);
        let refused = waits.join().unwrap().unwrap_err();
        assert!(refused.ends_with(&format!("in use by process {}", std::process::id())));
        drop(current);
        assert!(lock(dir.path()).is_ok());
    }

    /// Promise: state_has_one_daemon.
    #[test]
    fn the_lock_of_a_killed_daemon_that_hangs_is_replaced() {
        let Some(freezer) = Freezer::new("state-dir-test").unwrap() else {
            return kit::skip("no freezer of version 1 on this machine");
        };
        let dir = tempfile::tempdir().unwrap();
        let script = "exec 9>lock; flock 9; echo $$ >&9; exec sleep 1000";
        let mut daemon =
            Command::new("sh").args(["-c", script]).current_dir(dir.path()).spawn().unwrap();
        let used = format!("in use by process {}", daemon.id());
        let refused = |dir: &Path| lock(dir).unwrap_err().to_string();
        let command = format!("/proc/{}/cmdline", daemon.id());
        eventually(|| std::fs::read_to_string(&command).unwrap().starts_with("sleep"));
        assert!(refused(dir.path()).ends_with(&used));
        freezer.freeze(daemon.id()).unwrap();
        assert!(refused(dir.path()).ends_with(&used), "one that is only frozen lives");
        daemon.kill().unwrap();
        let lock = lock(dir.path()).unwrap();
        assert!(refused(dir.path()).ends_with(&format!("process {}", std::process::id())));
        // Another daemon that has waited as well.
        let old = File::open(format!("/proc/{}/fd/9", daemon.id())).unwrap();
        assert!(replace(&old, &dir.path().join("lock")).is_err());
        freezer.thaw().unwrap();
        daemon.wait().unwrap();
        drop(lock);
        assert!(super::lock(dir.path()).is_ok());
    }
}
