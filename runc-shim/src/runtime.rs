//! The OCI runtime's command line. A command runs beside the loop; its end is one of a child.

use std::env;
use std::ffi::{CString, OsString};
use std::fs::File;
use std::io::{Read as _, Seek as _, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::MemfdFlags;
use serde::Deserialize;

use crate::error::{Code, Context as _, Error};
use crate::{helper, sys};

/// What is read of a command's output; bytes.
const MOST: u64 = 64 << 10;

/// Where a command finds its log and what it is given as a file.
const LOG: i32 = 3;
pub const GIVEN: i32 = 4;

/// Variables that are the shim's own and not the runtime's.
const OWN: [&str; 6] = [
    "TTRPC_ADDRESS",
    "GRPC_ADDRESS",
    "NAMESPACE",
    "MAX_SHIM_VERSION",
    "NOTIFY_SOCKET",
    "GOMAXPROCS",
];

/// How the runtime of a container is called.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Runtime {
    /// Its name or path; empty: runc.
    pub binary: String,
    /// Where it keeps its state.
    pub root: String,
    /// It has systemd make cgroups.
    pub systemd_cgroup: bool,
}

/// A command that was started.
#[derive(Debug)]
pub struct Command {
    /// Its pid.
    pub pid: i32,
    /// `None`: a helper, which writes no log.
    log: Option<File>,
    output: Option<File>,
}

/// What a command gets as its standard streams and working directory.
#[derive(Debug, Default, Clone, Copy)]
pub struct Place<'a> {
    /// Descriptors 0 to 2; those of a process that it starts. `None`: its output is kept.
    pub stdio: Option<[Option<BorrowedFd<'a>>; 3]>,
    /// Its working directory.
    pub directory: Option<BorrowedFd<'a>>,
    /// A file for it: see [`given`].
    pub given: Option<BorrowedFd<'a>>,
}

/// The path by which a command finds what it is given.
pub fn given() -> String {
    format!("/proc/self/fd/{GIVEN}")
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
        let log_path = format!("/proc/self/fd/{LOG}");
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
        let mut descriptors = vec![(input, 0), (out, 1), (err, 2), (log.as_fd(), LOG)];
        descriptors.extend(place.given.map(|given| (given, GIVEN)));
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
    /// A helper, with its standard output.
    pub fn without_log(pid: i32, output: File) -> Self {
        Self { pid, log: None, output: Some(output) }
    }

    /// What the command has written to its standard streams, if they were kept.
    fn output(&mut self) -> Vec<u8> {
        self.output.as_mut().map(content).unwrap_or_default()
    }

    /// Why the command has failed: the last error of its log, or what it wrote, or its status. The
    /// log is added to the bundle's.
    pub fn failure(&mut self, what: &str, status: u32, bundle: &Path) -> Error {
        let output = self.output();
        let Some(log) = &mut self.log else {
            return helper::failure(&output, status).context(what);
        };
        let log = String::from_utf8_lossy(&content(log)).into_owned();
        if let Ok(mut file) =
            File::options().append(true).create(true).open(bundle.join("log.json"))
        {
            // For whoever looks for it; the answer has the error.
            let _ = file.write_all(log.as_bytes());
        }
        let output = String::from_utf8_lossy(&output);
        let reason = last_error(&log)
            .or_else(|| Some(output.trim().to_owned()).filter(|output| !output.is_empty()))
            .unwrap_or_else(|| format!("exit status {status}"));
        Error::unknown(format!("{what}: {reason}"))
    }
}

/// A file in memory with this content, for [`Place::given`].
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
    // What cannot be read is not there.
    let _ = file.rewind().and_then(|()| file.take(MOST).read_to_end(&mut bytes));
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

/// The error of a kill: that there is nothing to kill has a code of its own.
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

/// The pid that a command has written.
pub fn read_pid(path: &Path) -> Result<i32, Error> {
    let what = "failed to retrieve OCI runtime container pid";
    let text = std::fs::read_to_string(path).context(what)?;
    let pid = text.trim().parse().ok().filter(|pid| *pid > 0);
    pid.ok_or_else(|| Error::unknown(format!("{what}: {text:?}")))
}

/// The executable of a name, looked for as a shell does.
fn find(name: &str) -> Option<CString> {
    let path = if name.contains('/') {
        PathBuf::from(name)
    } else {
        let path = env::var_os("PATH")?;
        env::split_paths(&path).map(|dir| dir.join(name)).find(|path| path.is_file())?
    };
    CString::new(path.into_os_string().into_vec()).ok()
}

/// The environment of what is run: this process's without the variables that are its own.
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
