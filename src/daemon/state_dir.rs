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

/// All threads that are left of a process, by its directory in `/proc`, have SIGKILL pending: they
/// hang in the kernel and never run another instruction of the program.
fn is_killed(process: &Path) -> bool {
    const SIGKILL_PENDING: u64 = 1 << (libc::SIGKILL - 1);
    let Ok(threads) = std::fs::read_dir(process.join("task")) else { return false };
    let mut hanging = 0;
    for thread in threads.flatten() {
        // A thread that has gone meanwhile has ended.
        let Ok(status) = std::fs::read_to_string(thread.path().join("status")) else { continue };
        let field = |name: &str| {
            status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().trim()
        };
        if field("State:").starts_with(['Z', 'X']) {
            continue;
        }
        let pending = u64::from_str_radix(field("SigPnd:"), 16).unwrap_or(0);
        if pending & SIGKILL_PENDING == 0 {
            return false;
        }
        hanging += 1;
    }
    hanging > 0
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
    use std::path::PathBuf;
    use std::process::{Child, Command};

    use kit::machine::cgroup;

    use super::*;

    /// A cgroup of the freezer of version 1: what is killed in it while it is frozen stays, with
    /// its SIGKILL pending, as a process does that hangs in the kernel.
    struct Freezer(PathBuf);

    impl Freezer {
        /// None where the node has version 2, which kills what is frozen.
        fn new() -> Option<Self> {
            let root =
                cgroup::hierarchies().unwrap().into_iter().find(|h| h.ends_with("freezer"))?;
            let cgroup = root.join(format!("state-dir-test-{}", std::process::id()));
            std::fs::create_dir(&cgroup).unwrap();
            Some(Self(cgroup))
        }

        fn write(&self, file: &str, text: &str) {
            std::fs::write(self.0.join(file), text).unwrap();
        }

        fn freeze(&self, child: &Child) {
            self.write("cgroup.procs", &child.id().to_string());
            self.write("freezer.state", "FROZEN");
            let state = self.0.join("freezer.state");
            eventually(|| std::fs::read_to_string(&state).unwrap() == "FROZEN\n");
        }
    }

    fn eventually(condition: impl Fn() -> bool) {
        let begun = Instant::now();
        while !condition() {
            assert!(begun.elapsed() < Duration::from_secs(60), "it does not come");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    impl Drop for Freezer {
        fn drop(&mut self) {
            let _ = std::fs::write(self.0.join("freezer.state"), "THAWED");
            let _ = std::fs::remove_dir(&self.0);
        }
    }

    /// As when two daemons wait for the child of a killed one, and another has replaced its lock.
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

    #[test]
    fn the_lock_of_a_killed_daemon_that_hangs_is_replaced() {
        let Some(freezer) = Freezer::new() else {
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
        freezer.freeze(&daemon);
        assert!(refused(dir.path()).ends_with(&used), "one that is only frozen lives");
        daemon.kill().unwrap();
        let lock = lock(dir.path()).unwrap();
        assert!(refused(dir.path()).ends_with(&format!("process {}", std::process::id())));
        // Another daemon that has waited as well.
        let old = File::open(format!("/proc/{}/fd/9", daemon.id())).unwrap();
        assert!(replace(&old, &dir.path().join("lock")).is_err());
        freezer.write("freezer.state", "THAWED");
        daemon.wait().unwrap();
        drop(lock);
        assert!(super::lock(dir.path()).is_ok());
    }
}
