//! Root file systems of FUSE programs: a mount of the type `fuse.NAME` or `fuse3.NAME` is made by
//! the program `mount.fuse` or `mount.fuse3` of the node, which runs the file system `NAME`, as in
//! containerd's shim (`mountWithHelper` in containerd's `core/mount`).

use std::fs::File;
use std::io::Read as _;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use containerd_shim_protos::api::Mount;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, WaitOptions, waitpid};

use crate::error::{Context as _, Error};
use crate::runtime;
use crate::runtime::command;
use crate::sys;

/// Prefixes of mount types, and the program that makes such a mount.
const PROGRAMS: [(&str, &str); 2] = [("fuse.", "mount.fuse"), ("fuse3.", "mount.fuse3")];

/// How much of the output of a program is read, bytes: what a pipe takes.
const MAX_OUTPUT: usize = 64 << 10;

/// The exit status of a program whose status is not known.
const UNKNOWN: i32 = 255;

/// A program that mounts, and the file system that it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FuseProgram<'a> {
    program: &'static str,
    file_system: &'a str,
}

impl<'a> FuseProgram<'a> {
    /// The program that makes mounts of this type; `None`: the kernel makes them.
    pub fn of_type(mount_type: &'a str) -> Option<Self> {
        PROGRAMS.iter().find_map(|(prefix, program)| {
            mount_type.strip_prefix(prefix).map(|file_system| Self { program, file_system })
        })
    }

    /// Runs the program until it has mounted or failed. The file system's own process, which the
    /// program leaves behind, exits when it is unmounted. To be called in a helper process.
    ///
    /// # Errors
    /// The program is not installed, or has failed; with its output.
    pub fn mount(self, mount: &Mount, target: &Path) -> Result<(), Error> {
        let Self { program, file_system } = self;
        let target = target.display().to_string();
        let mut words = vec![program, &mount.source, &target];
        for option in &mount.options {
            words.extend(["-o", option]);
        }
        words.extend(["-t", file_system]);
        let words = words.into_iter().map(runtime::string).collect::<Result<Vec<_>, _>>()?;
        let path = runtime::find_program(program)
            .context("the mount needs this program in the PATH of containerd")?;
        let null = runtime::null()?;
        let mut output = output_pipe().context("open pipe for the output of a command")?;
        let spawned = sys::spawn(&sys::Spawn {
            program: &path,
            arguments: &words,
            environment: &runtime::environment(),
            directory: None,
            descriptors: &[(null.as_fd(), 0), (output.as_fd(), 1), (output.as_fd(), 2)],
            dies_with_parent: true,
        });
        let pid = spawned.context(format_args!("exec {program}"))?;
        // The shim kills it at the deadline.
        let exited = waitpid(Pid::from_raw(pid), WaitOptions::empty());
        let exited = exited.context(format_args!("wait for {program}"))?.map(|(_, status)| status);
        let status =
            exited.and_then(|it| it.exit_status().or(it.terminating_signal().map(|it| 128 + it)));
        let status = status.unwrap_or(UNKNOWN);
        if status == 0 {
            return Ok(());
        }
        let mut text = vec![0; MAX_OUTPUT];
        let count = output.read(&mut text).unwrap_or(0);
        let output = command::last_text(text.get(..count).unwrap_or_default());
        let separator = if output.is_empty() { "" } else { ": " };
        Err(Error::unknown(format!("{program} failed: exit status {status}{separator}{output}")))
    }
}

/// A pipe that is open for reading and writing, and does not block: the file system's process,
/// which may keep it, neither waits in a write nor gets a SIGPIPE when this process has ended.
fn output_pipe() -> std::io::Result<File> {
    let (_reader, writer) = pipe_with(PipeFlags::CLOEXEC)?;
    let path = format!("/proc/self/fd/{}", writer.as_raw_fd());
    File::options().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_type_selects_program_and_file_system() {
        let found = |mount_type| {
            FuseProgram::of_type(mount_type).map(|found| (found.program, found.file_system))
        };
        assert_eq!(found("fuse.sshfs"), Some(("mount.fuse", "sshfs")));
        assert_eq!(found("fuse3.fuse-overlayfs"), Some(("mount.fuse3", "fuse-overlayfs")));
        for kernel in ["fuse", "fuseblk", "overlay", "", "xfuse.a"] {
            assert_eq!(found(kernel), None, "{kernel}");
        }
    }
}
