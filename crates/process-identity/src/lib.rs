//! Identifies a process beyond its pid, which the kernel reuses. The daemon compares it before
//! it signals a process that an earlier daemon started; `runc-shim` compares it for the pause
//! process, its children and commands of the runtime.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};

/// The fields of `/proc/PID/stat` that matter here (proc_pid_stat(5)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    /// Field 3; `Z` (zombie) and `X` (dead): the process has exited.
    pub state: u8,
    /// Field 4: pid of the parent.
    pub parent: u32,
    /// Field 9: flags of the kernel (`PF_`).
    pub flags: u64,
    /// Field 22: clock ticks after boot at which the process started.
    pub start_time: u64,
    /// Field 52: the exit status as wait4(2) gives it; 0 for a reader without permission.
    pub exit_status: i32,
}

impl Stat {
    /// Reads the fields of a process.
    ///
    /// # Errors
    /// NotFound or ESRCH: no such process.
    pub fn of_process(pid: u32) -> io::Result<Self> {
        // The kernel gives the whole line, some 300 bytes, to one read.
        let mut line = [0; 2048];
        let length = File::open(format!("/proc/{pid}/stat"))?.read(&mut line)?;
        Self::parse(line.get(..length).unwrap_or_default()).ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidData, "not the format of proc_pid_stat(5)")
        })
    }

    /// Parses the content of the file. `None`: it does not have the format.
    #[must_use]
    pub fn parse(content: &[u8]) -> Option<Self> {
        // Field 2, the name, may hold anything, also brackets and blanks.
        let end_of_name = content.iter().rposition(|byte| *byte == b')')?;
        let text = std::str::from_utf8(content.get(end_of_name + 1..)?).ok()?;
        let fields: Vec<&str> = text.split_ascii_whitespace().collect();
        let field = |number: usize| fields.get(number - 3).copied();
        Some(Self {
            state: *field(3)?.as_bytes().first()?,
            parent: field(4)?.parse().ok()?,
            flags: field(9)?.parse().ok()?,
            start_time: field(22)?.parse().ok()?,
            exit_status: field(52)?.parse().ok()?,
        })
    }

    /// The process has ended and waits to be reaped.
    #[must_use]
    pub fn ended(&self) -> bool {
        matches!(self.state, b'Z' | b'X')
    }

    /// The process is ending, or has ended: the first process of a PID namespace is no zombie until
    /// all others of it are reaped by their parents.
    #[must_use]
    pub fn ending(&self) -> bool {
        const PF_EXITING: u64 = 0x4;
        self.ended() || self.flags & PF_EXITING != 0
    }
}

/// Inode of the process's PID namespace.
///
/// # Errors
/// NotFound or ESRCH: no such process.
pub fn pid_namespace(pid: u32) -> io::Result<u64> {
    let metadata = fs::metadata(format!("/proc/{pid}/ns/pid"));
    metadata.map(|it| it.ino()).map_err(|e| namespace_error(pid, e))
}

/// The error of an access to `/proc/PID/ns`: the kernel reports EACCES also if the process is
/// reaped at this moment (`proc_ns_get_link` in Linux `fs/proc/namespaces.c`).
#[must_use]
pub fn namespace_error(pid: u32, e: io::Error) -> io::Error {
    match Stat::of_process(pid) {
        Err(gone) if e.kind() == io::ErrorKind::PermissionDenied && is_no_such_process(&gone) => {
            gone
        }
        _ => e,
    }
}

/// The file of a running program by its link in `/proc`, also if another file has replaced it
/// (proc_pid_exe(5)).
pub fn program_file(link: &Path) -> PathBuf {
    let name = link.as_os_str().as_bytes();
    OsStr::from_bytes(name.strip_suffix(b" (deleted)").unwrap_or(name)).into()
}

/// Device and inode of the file at `path`, following links. Uses what the kernel has cached
/// (`AT_STATX_DONT_SYNC`), so that a file system that does not respond does not block the call.
///
/// # Errors
/// The errno of statx(2).
pub fn device_and_inode(path: &Path) -> io::Result<(u64, u64)> {
    let about = statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::INO)?;
    Ok((libc::makedev(about.stx_dev_major, about.stx_dev_minor), about.stx_ino))
}

/// Whether the process works in the directory, which has this device and inode: its path may lead
/// through links. A process that has exited does not.
#[must_use]
pub fn works_in(pid: u32, directory: &Path, place: (u64, u64)) -> bool {
    let link = format!("/proc/{pid}/cwd");
    // The name is compared first, because the kernel knows it: an access to the directory itself
    // may block on the file system of an unrelated process.
    fs::read_link(&link).is_ok_and(|works| works.file_name() == directory.file_name())
        && device_and_inode(Path::new(&link)).is_ok_and(|works| works == place)
}

/// Whether the process of a pidfd has exited, reaped or not, also one that is no child.
#[must_use]
pub fn has_ended(process: impl AsFd) -> bool {
    let mut polled = [PollFd::new(&process, PollFlags::IN)];
    // An error does not mean that the process has exited.
    poll(&mut polled, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}

/// The error means that the process does not exist any more.
#[must_use]
pub fn is_no_such_process(e: &io::Error) -> bool {
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
        let expected =
            Stat { state: b'Z', parent: 1, flags: 90, start_time: 220, exit_status: 520 };
        assert_eq!(stat, expected);
        assert!(stat.ended());
    }

    #[test]
    fn a_short_stat_is_refused() {
        assert_eq!(Stat::parse(b"42 (pause) S 1 2"), None);
        assert_eq!(Stat::parse(b""), None);
    }

    #[test]
    fn the_fields_of_this_process_are_read() {
        let stat = Stat::of_process(std::process::id()).unwrap();
        assert_eq!(stat.parent, std::os::unix::process::parent_id());
        assert!(stat.start_time > 0 && !stat.ended());
        assert!(pid_namespace(std::process::id()).unwrap() > 0);
    }

    #[test]
    fn a_process_that_does_not_exist_has_its_error() {
        assert!(is_no_such_process(&Stat::of_process(u32::MAX).unwrap_err()));
    }

    #[test]
    fn a_process_that_is_reaped_at_this_moment_does_not_exist() {
        for _ in 0..300 {
            let mut child = std::process::Command::new("true").spawn().unwrap();
            let pid = child.id();
            let looks = std::thread::spawn(move || {
                loop {
                    if let Err(e) = pid_namespace(pid) {
                        return e;
                    }
                }
            });
            child.wait().unwrap();
            let e = looks.join().unwrap();
            assert!(is_no_such_process(&e), "{e}");
        }
    }

    #[test]
    fn a_program_that_was_replaced_has_a_file() {
        for path in ["/a b/pause-sandboxer", "/a b/pause-sandboxer (deleted)"] {
            assert_eq!(program_file(Path::new(path)), Path::new("/a b/pause-sandboxer"));
        }
    }

    #[test]
    fn a_file_and_a_link_to_it_are_the_same() {
        let me = device_and_inode(Path::new("/proc/self/exe")).unwrap();
        assert_eq!(me, device_and_inode(&std::env::current_exe().unwrap()).unwrap());
    }
}
