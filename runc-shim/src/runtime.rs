//! The OCI runtime's command line. A command runs as a child while the main loop continues.

use std::env;
use std::ffi::{CString, OsString};
use std::fs::File;
use std::io::{Read as _, Seek as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::MemfdFlags;
use serde::Deserialize;

use crate::error::{Code, Context as _, Error};
use crate::{helper, sys};

/// Maximum size that is read of a command's output and of its log, bytes.
const MAX_OUTPUT: u64 = 64 << 10;

/// The descriptors of a command's log and of its input file.
const LOG_FD: i32 = 3;
pub const INPUT_FD: i32 = 4;

/// Environment variables of the shim that the runtime does not get.
const OWN: [&str; 6] = [
    "TTRPC_ADDRESS",
    "GRPC_ADDRESS",
    "NAMESPACE",
    "MAX_SHIM_VERSION",
    "NOTIFY_SOCKET",
    "GOMAXPROCS",
];

/// The runtime of a container, and its global options.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Runtime {
    /// Name or path of the program; empty: runc.
    pub binary: String,
    /// The directory of its state.
    pub root: String,
    /// The runtime has systemd create cgroups.
    pub systemd_cgroup: bool,
}

/// A command that was started.
#[derive(Debug)]
pub struct Command {
    /// The pid.
    pub pid: i32,
    /// The log; `None` for a helper.
    log: Option<File>,
    output: Option<File>,
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
        Path::new(&self.root).join(id).exists()
    }

    /// Starts a command.
    pub fn start(&self, arguments: &[&str], place: &Place<'_>) -> Result<Command, Error> {
        let log = memory_file()?;
        let name = if self.binary.is_empty() { "runc" } else { &self.binary };
        let program = find(name)
            .ok_or_else(|| Error::unknown(format!("exec: {name:?}: not found in $PATH")))?;
        let log_path = format!("/proc/self/fd/{LOG_FD}");
        let mut words =
            vec![name, "--root", &self.root, "--log", &log_path, "--log-format", "json"];
        if self.systemd_cgroup {
            words.push("--systemd-cgroup");
        }
        words.extend(arguments);
        let words = words.into_iter().map(string).collect::<Result<Vec<_>, _>>()?;
        let null = File::options().read(true).write(true).open("/dev/null").context("/dev/null")?;
        let output = place.stdio.is_none().then(memory_file).transpose()?;
        let [input, out, err] = match (&place.stdio, &output) {
            (Some(stdio), _) => stdio.map(|fd| fd.unwrap_or(null.as_fd())),
            (None, Some(output)) => [null.as_fd(), output.as_fd(), output.as_fd()],
            (None, None) => [null.as_fd(); 3],
        };
        let mut descriptors = vec![(input, 0), (out, 1), (err, 2), (log.as_fd(), LOG_FD)];
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
        Ok(Command { pid, log: Some(log), output })
    }
}

impl Command {
    /// A helper and the file that receives its standard output.
    pub fn without_log(pid: i32, output: File) -> Self {
        Self { pid, log: None, output: Some(output) }
    }

    /// What the command has written to its standard streams, if they were kept.
    fn output(&mut self) -> Vec<u8> {
        self.output.as_mut().map(content).unwrap_or_default()
    }

    /// The error of a command that has failed: the last error of its log, or its output, or its
    /// exit status. Writes the log to `log.json` in the bundle, if that is known, in place of the
    /// log of an earlier command: the log of a probe that fails at every attempt would fill the
    /// bundle's file system.
    pub fn failure(&mut self, what: &str, status: u32, bundle: Option<&Path>) -> Error {
        let output = self.output();
        let Some(log) = &mut self.log else {
            return helper::failure(&output, status).context(what);
        };
        let log = content(log);
        if let Some(bundle) = bundle {
            // A failure is ignored, because the answer contains the error.
            let _ = std::fs::write(bundle.join("log.json"), &log);
        }
        let log = String::from_utf8_lossy(&log);
        let output = String::from_utf8_lossy(&output);
        let reason = last_error(&log)
            .or_else(|| Some(output.trim().to_owned()).filter(|output| !output.is_empty()))
            .unwrap_or_else(|| format!("exit status {status}"));
        Error::unknown(format!("{what}: {reason}"))
    }
}

/// A file in memory with this content, for [`Place::input_file`].
pub fn memory_file_of(content: &[u8]) -> Result<OwnedFd, Error> {
    let file = memory_file()?;
    file.write_all_at(content, 0).context("write memory file")?;
    Ok(file.into())
}

/// An empty file in memory.
pub fn memory_file() -> Result<File, Error> {
    let made = rustix::fs::memfd_create(c"runtime", MemfdFlags::CLOEXEC);
    made.map(File::from).context("make memory file")
}

fn content(file: &mut File) -> Vec<u8> {
    let mut bytes = Vec::new();
    // A read error yields what was read before.
    let _ = file.rewind().and_then(|()| file.take(MAX_OUTPUT).read_to_end(&mut bytes));
    bytes
}

/// The last error in a log of JSON lines.
pub fn last_error(log: &str) -> Option<String> {
    #[derive(Deserialize)]
    struct Line {
        level: String,
        msg: String,
    }
    let lines = log.lines().filter_map(|line| serde_json::from_str::<Line>(line).ok());
    lines.rev().find(|line| line.level == "error").map(|line| line.msg.trim().to_owned())
}

/// The error of a kill; [`Code::NotFound`] if there is no such process or container.
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
    CString::new(text).map_err(|_| Error::new(Code::InvalidArgument, "a zero byte in a request"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_error_of_a_log_is_found() {
        let log = "{\"level\":\"error\",\"msg\":\"first\"}\nrubbish\n\
                   {\"level\":\"error\",\"msg\":\" second \\n\",\"time\":\"t\"}\n\
                   {\"level\":\"warning\",\"msg\":\"third\"}\n{\"level\":\"err";
        assert_eq!(last_error(log).as_deref(), Some("second"));
        assert_eq!(last_error(""), None);
    }

    #[test]
    fn a_kill_of_what_has_ended_is_not_found() {
        let code = |message: &str| kill_error(Error::unknown(message)).code;
        assert_eq!(code("runc: container not running"), Code::NotFound);
        assert_eq!(code("container with given id: No such process"), Code::NotFound);
        assert_eq!(code("container does not exist"), Code::NotFound);
        assert_eq!(code("invalid signal"), Code::Unknown);
    }

    #[test]
    fn programs_are_found_as_a_shell_does() {
        assert_eq!(find("/any/path").as_deref(), Some(c"/any/path"));
        assert!(find("sh").unwrap().to_str().unwrap().ends_with("/sh"));
        assert_eq!(find("no-such-program"), None);
    }
}
