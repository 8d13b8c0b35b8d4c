//! The pause program as an open file that is executed by descriptor and that no process can change
//! or read.
//!
//! Mode 0511: the kernel makes a process undumpable that executes what it may not read, and keeps
//! root of the pod's user namespace from tracing it.

use std::fs::{self, File, Permissions};
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::mount::MountAttrFlags;

use super::rootfs::new_tmpfs;
use crate::error::{IoContext, StepError};
use crate::sys::{self, Errno};

/// The pause program, an ELF executable without dependencies.
pub static PROGRAM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/pause"));

/// The program of the containers of `pause-sandboxer selftest`.
pub static SELFTEST: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/selftest"));

/// Owner (root) reads, all execute.
const MODE: u32 = 0o511;

/// How the program is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kept {
    /// In a memfd.
    Memfd,
    /// In a tmpfs of its own.
    Tmpfs,
}

impl Kept {
    /// How it is kept, by the name that a process which executes it shows for it. Other programs
    /// may have that name too.
    pub(super) fn from_exe(exe: &Path) -> Option<Self> {
        match exe.as_os_str().as_bytes() {
            b"/memfd:pause (deleted)" => Some(Self::Memfd),
            b"/pause" => Some(Self::Tmpfs),
            _ => None,
        }
    }
}

/// Opens the program: a sealed memfd, or where those may not be executed (`vm.memfd_noexec`) a file
/// on a tmpfs that is mounted nowhere. (Not a file in the state directory: /run is mounted noexec
/// on many nodes.)
///
/// # Errors
/// The failed step of the second way, if both fail.
pub(super) fn open() -> Result<OwnedFd, StepError> {
    sealed().or_else(|e| {
        log::info!("storing pause program in a tmpfs (vm.memfd_noexec): {e}");
        unlinked()
    })
}

pub(super) fn sealed() -> Result<OwnedFd, StepError> {
    // Without MFD_EXEC: kernels before 6.3.
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let memfd = match memfd_create(c"pause", flags | MemfdFlags::EXEC) {
        Err(Errno::INVAL) => memfd_create(c"pause", flags),
        other => other,
    }
    .step("make a memfd")?;
    let mut file = File::from(memfd);
    file.write_all(PROGRAM).step("write the pause program to a memfd")?;
    file.set_permissions(Permissions::from_mode(MODE)).step("set the mode of the pause program")?;
    let seals = SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE;
    match fcntl_add_seals(&file, seals | SealFlags::EXEC) {
        Err(Errno::INVAL) => fcntl_add_seals(&file, seals),
        other => other,
    }
    .step("seal the pause program")?;
    if file.metadata().step("stat the pause program")?.permissions().mode() & 0o777 != MODE {
        return Err(StepError::new(
            "set the mode of the pause program",
            io::ErrorKind::PermissionDenied.into(),
        ));
    }
    // A file that is open for writing cannot be executed.
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    fs::File::open(&path).step_at("open the pause program", path).map(Into::into)
}

pub(super) fn unlinked() -> Result<OwnedFd, StepError> {
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    let options = [(c"size", c"64k"), (c"mode", c"700"), (c"source", c"pause")];
    let tmpfs = new_tmpfs(&options, attributes).step("make a tmpfs for the pause program")?;
    let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL;
    let file = sys::open(Some(tmpfs.as_fd()), c"pause", flags, MODE)
        .step("make a file for the pause program")?;
    let mut file = File::from(file);
    file.write_all(PROGRAM).step("write the pause program to a file")?;
    file.set_permissions(Permissions::from_mode(MODE)).step("set the mode of the pause program")?;
    drop(file);
    sys::open(Some(tmpfs.as_fd()), c"pause", libc::O_RDONLY, 0).step("open the pause program")
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    /// A field of a little-endian structure.
    fn field(bytes: &[u8], at: usize, length: usize) -> u64 {
        bytes[at..at + length].iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
    }

    #[test]
    fn the_program_is_small_and_has_no_writable_segment() {
        assert!(PROGRAM.len() <= 2048, "{} bytes", PROGRAM.len());
        let (offset, size, count) =
            (field(PROGRAM, 32, 8), field(PROGRAM, 54, 2), field(PROGRAM, 56, 2));
        let mut loaded = 0;
        for index in 0..count {
            let header = &PROGRAM[usize::try_from(offset + index * size).unwrap()..];
            let (kind, flags) = (field(header, 0, 4), field(header, 4, 4));
            const PT_LOAD: u64 = 1;
            const PT_GNU_STACK: u64 = 0x6474_e551;
            match kind {
                PT_LOAD => {
                    loaded += 1;
                    assert_eq!(flags & 2, 0, "segment {index} is writable");
                    assert!(field(header, 40, 8) <= 4096, "segment {index} is larger than a page");
                }
                PT_GNU_STACK => assert_eq!(flags & 1, 0, "the stack is executable"),
                _ => {}
            }
        }
        assert_eq!(loaded, 1);
    }

    #[test]
    fn the_program_cannot_be_changed() {
        if kit::skip_without_root() {
            return;
        }
        for file in [sealed().unwrap(), unlinked().unwrap()] {
            let path = format!("/proc/self/fd/{}", file.as_raw_fd());
            assert_eq!(fs::read(&path).unwrap(), PROGRAM);
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, MODE);
        }
        let sealed = sealed().unwrap();
        let path = format!("/proc/self/fd/{}", sealed.as_raw_fd());
        if let Ok(file) = File::options().write(true).open(&path) {
            assert_eq!(file.write_at(b"x", 0).unwrap_err().raw_os_error(), Some(libc::EPERM));
            assert_eq!(file.set_len(0).unwrap_err().raw_os_error(), Some(libc::EPERM));
        }
        assert!(
            fs::set_permissions(&path, Permissions::from_mode(0o600)).is_err(),
            "sealed as executable"
        );
    }
}
