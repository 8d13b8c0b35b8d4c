//! The process of the daemon, and why it does not answer.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use nix::unistd::geteuid;
use process_identity::{Stat, program_file};

/// Name of the daemon's program.
const NAME: &str = "pause-sandboxer";

/// The process that holds the lock of a state directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DaemonProcess {
    /// Its process id.
    pub pid: u32,
    /// The path of its program, also if the file has been replaced since.
    pub program: PathBuf,
}

impl DaemonProcess {
    /// The daemon of a state directory. `None`: no daemon runs.
    pub fn find(state_dir: &Path) -> Option<Self> {
        let holder = std::fs::read_to_string(state_dir.join("lock")).ok()?;
        let pid: u32 = holder.trim().parse().ok()?;
        let program = program_file(&std::fs::read_link(format!("/proc/{pid}/exe")).ok()?);
        // The pid of a daemon that has ended may have been reused, also by another user, who can
        // choose the program's name and directory.
        let user = std::fs::metadata(format!("/proc/{pid}")).ok()?.uid();
        if user != 0 && user != geteuid().as_raw() {
            return None;
        }
        let own = std::env::current_exe().ok()?;
        let names = [own.file_name(), Some(NAME.as_ref())];
        names.contains(&program.file_name()).then_some(Self { pid, program })
    }

    /// The file that it executes.
    pub fn executable(&self) -> PathBuf {
        format!("/proc/{}/exe", self.pid).into()
    }

    fn is_stopped(&self) -> bool {
        Stat::of_process(self.pid).is_ok_and(|stat| matches!(stat.state, b'T' | b't'))
    }
}

/// Why a daemon does not answer whose socket accepts connections, and the remedy. systemd holds the
/// socket: it accepts connections also if no daemon runs.
pub(crate) fn silence(state_dir: &Path) -> (String, String) {
    match DaemonProcess::find(state_dir) {
        Some(daemon) if daemon.is_stopped() => (
            format!("process {} is stopped by a signal", daemon.pid),
            format!("continue it: kill -CONT {}", daemon.pid),
        ),
        Some(daemon) => (
            format!("process {} starts, or recovers its pods", daemon.pid),
            "wait for it; `systemctl status pause-sandboxer` shows its state".to_owned(),
        ),
        None => (
            "no daemon runs, and systemd holds its socket".to_owned(),
            "systemctl start pause-sandboxer.service; if it fails, see journalctl -u \
             pause-sandboxer"
                .to_owned(),
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt as _;
    use std::os::unix::process::CommandExt as _;
    use std::process::Command;

    use nix::sys::signal::{Signal, kill};
    use nix::unistd::Pid;

    use super::*;

    fn lock(state_dir: &Path, pid: u32) {
        std::fs::write(state_dir.join("lock"), format!("{pid}\n")).unwrap();
    }

    #[test]
    fn the_daemon_is_found_by_its_lock() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(DaemonProcess::find(dir.path()), None);
        lock(dir.path(), std::process::id());
        let own = std::env::current_exe().unwrap();
        let found = DaemonProcess::find(dir.path()).unwrap();
        assert_eq!(found, DaemonProcess { pid: std::process::id(), program: own });
        // Another program has the number of a daemon that has ended.
        let mut other = Command::new("sleep").arg("60").spawn().unwrap();
        lock(dir.path(), other.id());
        let found = DaemonProcess::find(dir.path());
        other.kill().unwrap();
        other.wait().unwrap();
        assert_eq!(found, None);
    }

    /// Promise: only_files_of_root_count.
    #[test]
    fn the_process_of_another_user_is_no_daemon() {
        if kit::skip_without_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join(NAME);
        kit::write_program(&program, &std::fs::read("/bin/sleep").unwrap()).unwrap();
        std::fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
        let found = |user| {
            let mut other = Command::new(&program).arg("60").uid(user).spawn().unwrap();
            lock(dir.path(), other.id());
            let found = DaemonProcess::find(dir.path());
            other.kill().unwrap();
            other.wait().unwrap();
            found.is_some()
        };
        assert_eq!([found(0), found(65534)], [true, false]);
    }

    #[test]
    fn the_reason_for_no_answer_is_the_state_of_the_process() {
        let dir = tempfile::tempdir().unwrap();
        let (reason, remedy) = silence(dir.path());
        assert!(reason.contains("no daemon runs") && remedy.contains("systemctl start"));
        let program = dir.path().join(NAME);
        kit::write_program(&program, &std::fs::read("/bin/sleep").unwrap()).unwrap();
        let mut daemon = Command::new(&program).arg("60").spawn().unwrap();
        let pid = daemon.id();
        lock(dir.path(), pid);
        let running = silence(dir.path()).0;
        kill(Pid::from_raw(pid.cast_signed()), Signal::SIGSTOP).unwrap();
        let begun = std::time::Instant::now();
        let mut stopped = silence(dir.path());
        while stopped.0 == running && begun.elapsed().as_secs() < 10 {
            stopped = silence(dir.path());
        }
        daemon.kill().unwrap();
        daemon.wait().unwrap();
        assert_eq!(running, format!("process {pid} starts, or recovers its pods"));
        assert_eq!(stopped.0, format!("process {pid} is stopped by a signal"));
        assert_eq!(stopped.1, format!("continue it: kill -CONT {pid}"));
    }
}
