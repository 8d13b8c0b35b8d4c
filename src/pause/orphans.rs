//! Pause processes without a record: a daemon was killed between their clone and the write of the
//! record.
//!
//! Any process can choose its name, its command line and its environment. So a pause process is
//! known by the program that it executes: that file has an attribute that only root of the node can
//! set (`trusted.`, xattr(7)), and the attribute names the state directory by device and inode,
//! which no two daemons of a machine share, whatever root they see it from.
//!
//! Nothing is read from the memory of a process before that is certain, and no file system of
//! another user is asked: its server could let the daemon wait.

use std::ffi::{CStr, CString};
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Component, Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use process_identity::{device_and_inode, has_ended};
use rustix::fs::{MemfdFlags, XattrFlags, fsetxattr, memfd_create};

use super::binary::Kept;
use crate::error::{IoContext, StepError};
use crate::process::deadline::poll_until;
use crate::sys;

/// The attribute of the pause program.
const ATTRIBUTE: &CStr = c"trusted.pause-sandboxer";

/// How long the search may take.
const SEARCH_TIMEOUT: Duration = Duration::from_secs(4);

/// How long it may take to find out which pause processes have no record, the search included. What
/// follows is done within recovery's time.
pub(super) const DECISION_TIMEOUT: Duration = Duration::from_secs(5);

/// How long processes may be in the middle of their execve(2), all together.
const EXEC_TIMEOUT: Duration = Duration::from_secs(1);

/// How long killed pause processes may take to end, all together.
pub(super) const EXIT_TIMEOUT: Duration = Duration::from_secs(4);

/// How long their cgroups may stay busy then, all together.
pub(super) const CGROUP_TIMEOUT: Duration = Duration::from_millis(500);

/// How many bytes of a command line are read: a pause process's is its name and an id.
const COMMAND_LINE: u64 = 4096;

/// The mark that distinguishes the pause processes of a state directory from all other processes.
#[derive(Clone, Debug)]
pub(super) struct Mark {
    value: Vec<u8>,
    /// Device of all memfds.
    memfds: Option<u64>,
}

impl Mark {
    /// Marks the pause program.
    ///
    /// # Errors
    /// The failed step: the directory cannot be looked at, or the kernel keeps no such attributes.
    pub(super) fn set(program: BorrowedFd<'_>, state_dir: &Path) -> Result<Self, StepError> {
        let about = fs::metadata(state_dir).step_at("stat state directory", state_dir)?;
        let value = CString::new(format!("{}:{}", about.dev(), about.ino()))
            .step("mark the pause program")?;
        fsetxattr(program, ATTRIBUTE, value.as_bytes_with_nul(), XattrFlags::empty())
            .step("mark the pause program")?;
        // Without memfds no process executes one.
        let memfds = memfd_create(c"device", MemfdFlags::CLOEXEC)
            .ok()
            .and_then(|memfd| File::from(memfd).metadata().ok());
        Ok(Self { value: value.into_bytes_with_nul(), memfds: memfds.map(|about| about.dev()) })
    }

    /// Whether the process executes a program with this mark.
    fn is_on(&self, pid: u32) -> bool {
        let path = PathBuf::from(format!("/proc/{pid}/exe"));
        let Some(kept) = fs::read_link(&path).ok().and_then(|name| Kept::from_exe(&name)) else {
            return false;
        };
        // Any process can choose the name, also on a file system that answers when it likes.
        let known = match kept {
            Kept::Memfd => {
                device_and_inode(&path).is_ok_and(|(device, _)| Some(device) == self.memfds)
            }
            Kept::Tmpfs => is_confined(pid),
        };
        let mut value = [0; 64];
        let length =
            if known { rustix::fs::getxattr(&path, ATTRIBUTE, &mut value).unwrap_or(0) } else { 0 };
        value.get(..length) == Some(self.value.as_slice())
    }
}

/// Whether the process has no more rights than a pause process. A container that executes a program
/// of that name has more, unless it gives them up on purpose.
fn is_confined(pid: u32) -> bool {
    let Ok(status) = fs::read_to_string(format!("/proc/{pid}/status")) else { return false };
    let has = |key: &str, value: &str| {
        status.lines().any(|line| line.strip_prefix(key).is_some_and(|rest| rest.trim() == value))
    };
    has("CapBnd:", "0000000000000000") && has("NoNewPrivs:", "1") && has("Seccomp:", "2")
}

/// A pause process that bears our mark.
#[derive(Debug)]
pub(super) struct MarkedProcess {
    /// The sandbox id in its command line, which is not checked.
    pub(super) id: String,
    pid: u32,
    pidfd: OwnedFd,
}

/// All pause processes that bear `mark`, and why the search did not finish.
pub(super) fn find_orphans(mark: &Mark) -> (Vec<MarkedProcess>, Option<StepError>) {
    const STEP: &str = "search processes";
    let (sender, receiver) = mpsc::channel();
    let begun = Instant::now();
    let mark = mark.clone();
    // A thread of its own, which is left behind if a process blocks it.
    if let Err(e) =
        thread::Builder::new().name("orphans".to_owned()).spawn(move || search(&mark, &sender))
    {
        return (Vec::new(), Some(StepError::at(STEP, "/proc", e)));
    }
    let mut found = Vec::new();
    loop {
        match receiver.recv_timeout(SEARCH_TIMEOUT.saturating_sub(begun.elapsed())) {
            Ok(Ok(marked)) => found.push(marked),
            Ok(Err(e)) => return (found, Some(StepError::at(STEP, "/proc", e))),
            Err(RecvTimeoutError::Disconnected) => return (found, None),
            Err(RecvTimeoutError::Timeout) => {
                let late = io::Error::new(
                    io::ErrorKind::TimedOut,
                    format!("timed out after {} s", SEARCH_TIMEOUT.as_secs()),
                );
                return (found, Some(StepError::at(STEP, "/proc", late)));
            }
        }
    }
}

/// The receiver is gone when the search took too long.
fn search(mark: &Mark, sender: &Sender<io::Result<MarkedProcess>>) {
    let entries = match fs::read_dir("/proc") {
        Ok(entries) => entries,
        Err(e) => return drop(sender.send(Err(e))),
    };
    let mut remaining = EXEC_TIMEOUT;
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    for marked in pids.filter_map(|pid| open_if_marked(pid, mark, &mut remaining)) {
        if sender.send(Ok(marked)).is_err() {
            return;
        }
    }
}

/// A process that ends meanwhile is not returned.
fn open_if_marked(pid: u32, mark: &Mark, remaining: &mut Duration) -> Option<MarkedProcess> {
    if !mark.is_on(pid) {
        return None;
    }
    // Checked again after the pidfd is open: the pid may have been reused before.
    let pidfd = sys::pidfd_open(pid.cast_signed()).ok()?;
    if !mark.is_on(pid) {
        return None;
    }
    let id = id(pid, remaining)?;
    (!has_ended(&pidfd)).then_some(MarkedProcess { id, pid, pidfd })
}

/// The second word of the command line. Empty where there is none.
fn id(pid: u32, remaining: &mut Duration) -> Option<String> {
    const RETRY_DELAY: Duration = Duration::from_millis(1);
    loop {
        let mut line = Vec::new();
        File::open(format!("/proc/{pid}/cmdline"))
            .ok()?
            .take(COMMAND_LINE)
            .read_to_end(&mut line)
            .ok()?;
        // The program is there before its arguments are.
        if line.is_empty() && !remaining.is_zero() {
            *remaining = remaining.saturating_sub(RETRY_DELAY);
            thread::sleep(RETRY_DELAY);
            continue;
        }
        let id = line.split(|byte| *byte == 0).nth(1).unwrap_or_default();
        return Some(String::from_utf8_lossy(id).into_owned());
    }
}

impl MarkedProcess {
    /// Its cgroups, as paths below the root of each hierarchy, if they are its own.
    pub(super) fn cgroups(&self) -> Vec<CString> {
        let text = fs::read_to_string(format!("/proc/{}/cgroup", self.pid)).unwrap_or_default();
        let paths = text.lines().filter_map(|line| line.splitn(3, ':').nth(2)).map(PathBuf::from);
        let own =
            paths.filter(|path| path.file_name().is_some_and(|name| name == self.id.as_str()));
        let here = own.filter(|path| !path.components().any(|part| part == Component::ParentDir));
        let mut own: Vec<CString> = here
            .filter_map(|path| {
                CString::new(path.strip_prefix("/").unwrap_or(&path).as_os_str().as_bytes()).ok()
            })
            .collect();
        own.sort();
        own.dedup();
        own
    }

    /// Kills it.
    ///
    /// # Errors
    /// The failed step.
    pub(super) fn kill(&self) -> Result<(), StepError> {
        sys::kill(self.pidfd.as_fd())
            .step_at("kill pause process without a record", format!("/proc/{}", self.pid))
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// It does not end in time.
    pub(super) fn ended(&self, until: Instant) -> Result<(), StepError> {
        poll_until(until, || has_ended(&self.pidfd)).map_err(|e| {
            StepError::at(
                "wait for exit of pause process without a record",
                format!("/proc/{}", self.pid),
                e,
            )
        })
    }
}
