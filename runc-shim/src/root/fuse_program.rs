//! Root file systems of FUSE programs: a mount of the type `fuse.NAME` or `fuse3.NAME` is made by
//! the program `mount.fuse` or `mount.fuse3` of the node, which runs the file system `NAME`, as in
//! containerd's shim (`mountWithHelper` in containerd's `core/mount`).

use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::path::Path;

use containerd_shim_protos::api::Mount;
use rustix::fs::{Mode, OFlags};

use crate::error::{Code, Context as _, Error};
use crate::exits;
use crate::runtime;
use crate::runtime::command::Command;
use crate::runtime::output_pipe;
use crate::runtime::output_pipe::OutputPipe;
use crate::sys;

/// Prefixes of mount types, and the program that makes such a mount.
const PROGRAMS: [(&str, &str); 2] = [("fuse.", "mount.fuse"), ("fuse3.", "mount.fuse3")];

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
    /// program leaves behind, exits when it is unmounted. To be called in a helper process: its
    /// working directory and environment identify the program to `cleanup::delete`.
    ///
    /// # Errors
    /// The program is not installed, or has failed; with its output.
    pub fn mount(self, mount: &Mount, target: &Path) -> Result<(), Error> {
        let Self { program, file_system } = self;
        let not_text = || {
            let target = target.display();
            Error::new(Code::INVALID_ARGUMENT, format!("mount point {target} is not UTF-8"))
        };
        let mut words = vec![program, &mount.source, target.to_str().ok_or_else(not_text)?];
        for option in &mount.options {
            words.extend(["-o", option]);
        }
        words.extend(["-t", file_system]);
        let words = words.into_iter().map(runtime::string).collect::<Result<Vec<_>, _>>()?;
        let path = runtime::find_program(program)
            .context("the mount needs this program in the PATH of containerd")?;
        let null = runtime::null()?;
        let (output, writer) = OutputPipe::new()?;
        let writer = for_both_ends(&writer).context("open pipe for the output of a command")?;
        let spawned = sys::spawn(&sys::Spawn {
            program: &path,
            arguments: &words,
            environment: &runtime::environment(),
            directory: None,
            descriptors: &[(null.as_fd(), 0), (writer.as_fd(), 1), (writer.as_fd(), 2)],
            dies_with_parent: true,
            own_group: false,
        });
        let pid = spawned.context(format_args!("exec {program}"))?;
        let mut command = Command::without_log(pid, output);
        // The shim kills it at the deadline. The file system's process may keep the pipe open.
        let exit = command.wait(None).context(format_args!("wait for {program}"))?;
        let status = exit.map_or(exits::UNKNOWN, |exit| exit.status);
        if status == 0 {
            rustix::fs::fcntl_setfl(&writer, OFlags::RDWR | OFlags::NONBLOCK)
                .context("leave the output to the file system")?;
            return Ok(());
        }
        let output = output_pipe::last_text(&command.output());
        let separator = if output.is_empty() { "" } else { ": " };
        Err(Error::unknown(format!("{program} failed: exit status {status}{separator}{output}")))
    }
}

/// A pipe that is open for reading and writing: a write of the file system's process, after this
/// one has ended, causes no SIGPIPE.
fn for_both_ends(writer: &OwnedFd) -> rustix::io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", writer.as_raw_fd());
    rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
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
