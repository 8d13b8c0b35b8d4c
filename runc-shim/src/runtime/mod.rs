//! The OCI runtime's command line. A command runs as a child while the main loop continues.

pub mod command;
pub mod options;

use std::env;
use std::ffi::{CString, OsString};
use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::MemfdFlags;

use crate::error::{Code, Context as _, Error};
use crate::runtime::command::Command;
use crate::sys;

/// The descriptors of a command's log and of its input file.
const LOG_FD: i32 = 3;
pub const INPUT_FD: i32 = 4;

const NULL: &str = "/dev/null";

/// The variable by which the daemon asks for root file systems with the option `volatile`.
pub const VOLATILE_ROOTFS: &str = "PAUSE_SANDBOXER_VOLATILE_ROOTFS";

/// Environment variables of the shim that the runtime does not get.
const OWN: [&str; 7] = [
    VOLATILE_ROOTFS,
    "TTRPC_ADDRESS",
    "GRPC_ADDRESS",
    "NAMESPACE",
    "MAX_SHIM_VERSION",
    "NOTIFY_SOCKET",
    "GOMAXPROCS",
];

/// The runtime of a container, and its global options.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Runtime {
    /// Name or path of the program; empty: runc.
    pub binary: String,
    /// The directory of its state.
    pub root: String,
    /// The runtime has systemd create cgroups.
    pub systemd_cgroup: bool,
}

/// The descriptors of a command: standard streams, working directory and input file.
#[derive(Debug, Default, Clone, Copy)]
pub struct Place<'a> {
    /// Descriptors 0 to 2, which a process that the command creates inherits. `None`: the output of
    /// the command is kept for an error message.
    pub stdio: Option<[Option<BorrowedFd<'a>>; 3]>,
    /// The working directory.
    pub directory: Option<BorrowedFd<'a>>,
    /// The input file, which the command opens by [`input_path`].
    pub input_file: Option<BorrowedFd<'a>>,
}

/// The path by which a command opens its input file.
pub fn input_path() -> String {
    format!("/proc/self/fd/{INPUT_FD}")
}

impl Runtime {
    /// Whether the runtime keeps state of a container.
    pub fn knows(&self, id: &str) -> bool {
        self.state_of(id).exists()
    }

    /// The directory of the runtime's state of a container.
    fn state_of(&self, id: &str) -> PathBuf {
        Path::new(&self.root).join(id)
    }

    /// Checks that the container is not that of another shim.
    ///
    /// # Errors
    /// The runtime keeps state of it.
    pub fn check_unknown(&self, id: &str) -> Result<(), Error> {
        if !self.knows(id) {
            return Ok(());
        }
        let message = format!(
            "the runtime already has the container: {} exists: it belongs to another shim, or it \
             is left of a shim that has died: then `delete --force` of the runtime removes it",
            self.state_of(id).display()
        );
        Err(Error::new(Code::ALREADY_EXISTS, message))
    }

    /// Starts a command.
    pub fn start(&self, arguments: &[&str], place: &Place<'_>) -> Result<Command, Error> {
        let name = if self.binary.is_empty() { "runc" } else { &self.binary };
        let program = find_program(name)?;
        let log_path = format!("/proc/self/fd/{LOG_FD}");
        let mut words =
            vec![name, "--root", &self.root, "--log", &log_path, "--log-format", "json"];
        if self.systemd_cgroup {
            words.push("--systemd-cgroup");
        }
        words.extend(arguments);
        let words = words.into_iter().map(string).collect::<Result<Vec<_>, _>>()?;
        let null = null()?;
        // A process without standard input must not write to it.
        let no_input = File::open(NULL).context(NULL)?;
        let log = memory_file_of(b"")?;
        let output = place.stdio.is_none().then(|| memory_file_of(b"")).transpose()?;
        let [input, out, err] = place.stdio.unwrap_or_default();
        let kept = output.as_ref().unwrap_or(&null);
        let mut descriptors = vec![
            (input.unwrap_or(no_input.as_fd()), 0),
            (out.unwrap_or(kept.as_fd()), 1),
            (err.unwrap_or(kept.as_fd()), 2),
            (log.as_fd(), LOG_FD),
        ];
        descriptors.extend(place.input_file.map(|input_file| (input_file, INPUT_FD)));
        let spawned = sys::spawn(&sys::Spawn {
            program: &program,
            arguments: &words,
            environment: &environment(),
            directory: place.directory,
            descriptors: &descriptors,
            dies_with_parent: true,
        });
        let pid = spawned.context(format_args!("exec {name}"))?;
        Ok(Command::new(pid, log, output))
    }
}

/// `/dev/null`, for reading and writing.
///
/// # Errors
/// It cannot be opened.
pub fn null() -> Result<OwnedFd, Error> {
    let opened = File::options().read(true).write(true).open(NULL);
    opened.map(Into::into).context(NULL)
}

/// A file in memory with this content.
pub fn memory_file_of(content: &[u8]) -> Result<OwnedFd, Error> {
    let file = rustix::fs::memfd_create(c"runtime", MemfdFlags::CLOEXEC).map(File::from);
    let file = file.context("make memory file")?;
    file.write_all_at(content, 0).context("write memory file")?;
    Ok(file.into())
}

/// The error of a kill; [`Code::NOT_FOUND`] if there is no such process or container.
pub fn kill_error(error: Error) -> Error {
    let says = |text: &str| error.message.to_lowercase().contains(text);
    if ["process already finished", "container not running", "no such process"]
        .into_iter()
        .any(says)
    {
        Error::not_found("process already finished")
    } else if says("does not exist") {
        Error::not_found("no such container")
    } else {
        error.context("unknown error after kill")
    }
}

/// Reads the pid file that a command has written.
pub fn read_pid(path: &Path) -> Result<i32, Error> {
    let what = "failed to retrieve OCI runtime container pid";
    let text = std::fs::read_to_string(path).context(what)?;
    let pid = text.trim().parse().ok().filter(|pid| *pid > 0);
    pid.ok_or_else(|| Error::unknown(format!("{what}: {text:?}")))
}

/// The path of an executable, searched in `PATH` as by a shell.
///
/// # Errors
/// There is no such program.
pub fn find_program(name: &str) -> Result<CString, Error> {
    find(name).ok_or_else(|| Error::unknown(format!("exec: {name:?}: not found in $PATH")))
}

fn find(name: &str) -> Option<CString> {
    let path = if name.contains('/') {
        PathBuf::from(name)
    } else {
        let path = env::var_os("PATH")?;
        env::split_paths(&path).map(|dir| dir.join(name)).find(|path| path.is_file())?
    };
    CString::new(path.into_os_string().into_vec()).ok()
}

/// The environment of commands and helpers: that of the shim without [`OWN`].
pub fn environment() -> Vec<CString> {
    let join = |(mut name, value): (OsString, OsString)| {
        name.push("=");
        name.push(value);
        CString::new(name.into_vec()).ok()
    };
    let kept = env::vars_os().filter(|(name, _)| OWN.iter().all(|own| name != own));
    kept.filter_map(join).collect()
}

/// An argument of a command.
pub fn string(text: &str) -> Result<CString, Error> {
    CString::new(text).map_err(|_| Error::new(Code::INVALID_ARGUMENT, "a zero byte in a request"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kill_of_what_has_ended_is_not_found() {
        let code = |message: &str| kill_error(Error::unknown(message)).code;
        assert_eq!(code("runc: container not running"), Code::NOT_FOUND);
        assert_eq!(code("container with given id: No such process"), Code::NOT_FOUND);
        assert_eq!(code("container does not exist"), Code::NOT_FOUND);
        assert_eq!(code("invalid signal"), Code::UNKNOWN);
    }

    #[test]
    fn programs_are_found_as_a_shell_does() {
        assert_eq!(find("/any/path").as_deref(), Some(c"/any/path"));
        assert!(find("sh").unwrap().to_str().unwrap().ends_with("/sh"));
        assert_eq!(find("no-such-program"), None);
    }
}
