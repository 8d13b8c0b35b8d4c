//! Root file systems of FUSE programs: a mount of the type `fuse.NAME` or `fuse3.NAME` is made by
//! the program `mount.fuse` or `mount.fuse3` of the node, which runs the file system `NAME`, as in
//! containerd's shim (`mountWithHelper` in containerd's `core/mount`).

use std::fs::File;
use std::os::fd::AsFd as _;
use std::path::Path;

use containerd_shim_protos::api::Mount;
use rustix::io::Errno;
use rustix::process::{Pid, WaitOptions, WaitStatus, waitpid};

use crate::error::{Context as _, Error};
use crate::output_file::OutputFile;
use crate::{output_file, runtime, sys};

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
        let target = target.display().to_string();
        let mut words = vec![program, &mount.source, &target];
        for option in &mount.options {
            words.extend(["-o", option]);
        }
        words.extend(["-t", file_system]);
        let words = words.into_iter().map(runtime::string).collect::<Result<Vec<_>, _>>()?;
        let path = runtime::find_program(program)?;
        let null = File::options().read(true).write(true).open("/dev/null").context("/dev/null")?;
        // Not a pipe: the file system's process may keep it open, and may write to it later.
        let mut output = OutputFile::new()?;
        let spawned = sys::spawn(&sys::Spawn {
            program: &path,
            arguments: &words,
            environment: &runtime::environment(),
            directory: None,
            descriptors: &[(null.as_fd(), 0), (output.as_fd(), 1), (output.as_fd(), 2)],
            dies_with_parent: true,
        });
        let pid = spawned.context(format_args!("exec {program}"))?;
        let status = wait(pid).context(format_args!("wait for {program}"))?;
        if status.exit_status() == Some(0) {
            return Ok(());
        }
        let how = match (status.exit_status(), status.terminating_signal()) {
            (Some(status), _) => format!("exit status {status}"),
            (None, Some(signal)) => format!("killed by signal {signal}"),
            (None, None) => "unknown exit".to_owned(),
        };
        let output = output_file::text(&output.content());
        Err(Error::unknown(format!("{program} failed: {how}: {output}")))
    }
}

/// Waits for a child.
fn wait(pid: i32) -> rustix::io::Result<WaitStatus> {
    loop {
        match waitpid(Pid::from_raw(pid), WaitOptions::empty()) {
            Ok(Some((_, status))) => return Ok(status),
            Ok(None) | Err(Errno::INTR) => {}
            Err(e) => return Err(e),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_type_selects_program_and_file_system() {
        let of = |mount_type| {
            FuseProgram::of_type(mount_type).map(|found| (found.program, found.file_system))
        };
        assert_eq!(of("fuse.sshfs"), Some(("mount.fuse", "sshfs")));
        assert_eq!(of("fuse3.fuse-overlayfs"), Some(("mount.fuse3", "fuse-overlayfs")));
        for kernel in ["fuse", "fuseblk", "overlay", "", "xfuse.a"] {
            assert_eq!(of(kernel), None, "{kernel}");
        }
    }
}
