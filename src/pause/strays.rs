//! Pauses that no record names: a daemon was killed between their clone and the record's write.
//!
//! Such a pause tells of itself: its command line has the sandbox id, and its environment names the state directory by device and
//! inode, which no two daemons of a machine share, whatever root they see it from.

use std::ffi::CString;
use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use super::sys::{self, Errno};
use crate::error::{IoContext, Step};

/// First word of a pause's command line.
const NAME: &[u8] = b"/pause";

/// How long a process may be in the middle of its execve(2).
const EXECUTES: Duration = Duration::from_millis(200);

/// How long a killed pause may take to end.
const ENDS: Duration = Duration::from_secs(5);

/// The environment of the pauses that belong to a state directory.
///
/// # Errors
/// The directory cannot be looked at.
pub(super) fn mark(state_dir: &Path) -> Result<CString, Step> {
    let about = fs::metadata(state_dir).step_at("look at the state directory", state_dir)?;
    CString::new(format!("PAUSE_SANDBOXER_STATE={}:{}", about.dev(), about.ino()))
        .step_at("look at the state directory", state_dir)
}

/// A pause that bears our mark.
#[derive(Debug)]
pub(super) struct Marked {
    /// The sandbox id.
    pub(super) id: String,
    pid: u32,
    pidfd: OwnedFd,
}

/// All pauses that bear `mark`.
///
/// # Errors
/// `/proc` cannot be read.
pub(super) fn find(mark: &CString) -> Result<Vec<Marked>, Step> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").step_at("read directory", "/proc")? {
        let name = entry.step_at("read directory", "/proc")?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
        found.extend(look(pid, mark));
    }
    Ok(found)
}

/// One that ends meanwhile is none.
fn look(pid: u32, mark: &CString) -> Option<Marked> {
    if !is_pause(pid) {
        return None;
    }
    // Read again when the process is held: it may be another by now.
    let pidfd = sys::pidfd_open(pid.cast_signed()).ok()?;
    let command = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let id = command.split(|byte| *byte == 0).nth(1).map(|id| String::from_utf8_lossy(id).into_owned())?;
    let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
    let ours = is_pause(pid) && environment.split(|byte| *byte == 0).any(|word| word == mark.as_bytes());
    (ours && !sys::ended(pidfd.as_fd())).then_some(Marked { id, pid, pidfd })
}

fn is_pause(pid: u32) -> bool {
    let begun = Instant::now();
    loop {
        let Ok(command) = fs::read(format!("/proc/{pid}/cmdline")) else { return false };
        if !command.is_empty() {
            return command.strip_prefix(NAME).is_some_and(|rest| rest.first() == Some(&0));
        }
        // A thread of the kernel, a zombie, or the program is there and its arguments are not yet.
        let executes = fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|exe| names_the_program(&exe));
        if !executes || begun.elapsed() > EXECUTES {
            return false;
        }
        thread::sleep(Duration::from_millis(1));
    }
}

fn names_the_program(exe: &Path) -> bool {
    [Path::new("/memfd:pause (deleted)"), Path::new("/pause"), Path::new("/pause (deleted)")].contains(&exe)
}

impl Marked {
    /// Its cgroups, as paths below the root of each hierarchy, if they are its own.
    pub(super) fn cgroups(&self) -> Vec<CString> {
        let text = fs::read_to_string(format!("/proc/{}/cgroup", self.pid)).unwrap_or_default();
        let paths = text.lines().filter_map(|line| line.splitn(3, ':').nth(2)).map(PathBuf::from);
        let own = paths.filter(|path| path.file_name().is_some_and(|name| name == self.id.as_str()));
        let mut own: Vec<CString> =
            own.filter_map(|path| CString::new(path.to_string_lossy().trim_start_matches('/')).ok()).collect();
        own.sort();
        own.dedup();
        own
    }

    /// Kills it and waits for its end.
    ///
    /// # Errors
    /// It cannot be killed, or does not end.
    pub(super) fn end(&self) -> Result<(), Step> {
        let process = || format!("/proc/{}", self.pid);
        match sys::pidfd_send_signal(self.pidfd.as_fd(), libc::SIGKILL) {
            Ok(()) | Err(Errno(libc::ESRCH)) => {}
            Err(e) => return Err(e).step_at("kill a pause that no record names", process()),
        }
        let begun = Instant::now();
        while !sys::ended(self.pidfd.as_fd()) {
            if begun.elapsed() > ENDS {
                let late = std::io::ErrorKind::TimedOut.into();
                return Err(Step::at("wait for the end of a pause that no record names", process(), late));
            }
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }
}
