//! The identity of a process beyond its pid, read from `/proc`.

use std::ffi::CStr;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use rustix::fs::{AtFlags, CWD, StatxFlags, statx};

use super::Identity;
use crate::error::{IoContext, StepError};
use crate::sys::{self, Errno};

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The id of this boot of the node.
///
/// # Errors
/// The file cannot be read.
pub(crate) fn boot_id() -> Result<Arc<str>, StepError> {
    Ok(fs::read_to_string(BOOT_ID).step_at("read", BOOT_ID)?.trim().into())
}

/// The fields of `/proc/PID/stat` that matter here (proc_pid_stat(5)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stat {
    /// Field 3: `Z` and `X` have ended.
    pub(crate) state: u8,
    /// Field 9: flags of the kernel (`PF_`).
    pub(crate) flags: u64,
    /// Field 22, clock ticks after boot.
    pub(crate) start_time: u64,
    /// Field 52, as wait4(2) gives it; 0 for who may not know.
    pub(crate) exit_status: i32,
}

impl Stat {
    /// Reads it.
    ///
    /// # Errors
    /// NotFound or ESRCH: no such process.
    pub(crate) fn of_process(pid: u32) -> io::Result<Self> {
        // The kernel gives the whole line, some 300 bytes, to one read.
        let mut line = [0; 2048];
        let length = File::open(format!("/proc/{pid}/stat"))?.read(&mut line)?;
        Self::parse(line.get(..length).unwrap_or_default()).ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidData, "not the format of proc_pid_stat(5)")
        })
    }

    pub(crate) fn parse(content: &[u8]) -> Option<Self> {
        // Field 2, the name, may hold anything, also brackets and blanks.
        let end_of_name = content.iter().rposition(|byte| *byte == b')')?;
        let text = std::str::from_utf8(content.get(end_of_name + 1..)?).ok()?;
        let fields: Vec<&str> = text.split_ascii_whitespace().collect();
        let field = |number: usize| fields.get(number - 3).copied();
        Some(Self {
            state: *field(3)?.as_bytes().first()?,
            flags: field(9)?.parse().ok()?,
            start_time: field(22)?.parse().ok()?,
            exit_status: field(52)?.parse().ok()?,
        })
    }

    /// The process has ended and waits to be reaped.
    pub(crate) fn ended(&self) -> bool {
        matches!(self.state, b'Z' | b'X')
    }

    /// The process is ending, or has ended: the first process of a PID namespace is no zombie until
    /// all others of it are reaped by their parents.
    pub(crate) fn ending(&self) -> bool {
        const PF_EXITING: u64 = 0x4;
        self.ended() || self.flags & PF_EXITING != 0
    }

    /// How it ended.
    pub(crate) fn exit_status(&self) -> Option<sys::End> {
        self.ended().then(|| sys::End::from_status(self.exit_status))
    }
}

/// Inode of the process's PID namespace.
///
/// # Errors
/// NotFound or ESRCH: no such process.
pub(crate) fn pid_namespace(pid: u32) -> io::Result<u64> {
    Ok(fs::metadata(format!("/proc/{pid}/ns/pid"))?.ino())
}

/// Reads the identity of a process that cannot be reaped meanwhile.
///
/// # Errors
/// The failed step.
pub(crate) fn read_identity(pid: u32, boot_id: &Arc<str>) -> Result<Identity, StepError> {
    let start_time = Stat::of_process(pid)
        .map(|stat| stat.start_time)
        .step_at("read", format!("/proc/{pid}/stat"))?;
    let pid_namespace = pid_namespace(pid).step_at("stat", format!("/proc/{pid}/ns/pid"))?;
    Ok(Identity { pid, start_time, pid_namespace, boot_id: boot_id.clone() })
}

/// Whether the process that has the recorded pid now is the recorded one.
///
/// # Errors
/// The failed step.
pub(crate) fn matches(recorded: &Identity) -> Result<bool, StepError> {
    let now = read_identity(recorded.pid, &recorded.boot_id)?;
    Ok(now == *recorded)
}

/// Device and inode of the file that `path` leads to, as far as the kernel knows them without a
/// question to the server of a file system.
pub(crate) fn device_and_inode(path: &CStr) -> Result<(u64, u64), Errno> {
    let about = statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::INO)?;
    Ok((libc::makedev(about.stx_dev_major, about.stx_dev_minor), about.stx_ino))
}

/// The error means that the process is gone.
pub(crate) fn gone(e: &io::Error) -> bool {
    e.kind() == io::ErrorKind::NotFound || e.raw_os_error() == Some(libc::ESRCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_process_changes_no_field_of_stat() {
        let mut line = b"42 (a) R (b) Z 1 2 3".to_vec();
        for number in 7..=52 {
            line.extend(format!(" {}", number * 10).bytes());
        }
        let stat = Stat::parse(&line).unwrap();
        assert_eq!(stat, Stat { state: b'Z', flags: 90, start_time: 220, exit_status: 520 });
        assert!(stat.ended());
    }

    #[test]
    fn a_short_stat_is_refused() {
        assert_eq!(Stat::parse(b"42 (pause) S 1 2"), None);
        assert_eq!(Stat::parse(b""), None);
    }

    #[test]
    fn the_identity_of_this_process_is_read() {
        let boot = boot_id().unwrap();
        let me = read_identity(std::process::id(), &boot).unwrap();
        assert_eq!(me, read_identity(std::process::id(), &boot).unwrap());
        assert!(me.start_time > 0 && me.pid_namespace > 0);
    }
}
