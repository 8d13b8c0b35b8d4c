//! The standard streams of a process: those that containerd names, and those that the process gets.
//!
//! containerd's FIFOs are held open for reading as well as for writing, so that a restart of
//! containerd neither loses a byte nor kills a writer. The process gets its own pipes: the runtime
//! writes its own errors to the standard error of a process that it cannot start, and these must
//! not reach containerd's FIFO; and a security profile of the container would apply to a FIFO of
//! the node.

pub mod console;
pub mod copier;
pub mod copiers;
pub mod logger;
pub mod stream;

use std::fs::{self, File, OpenOptions};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::Path;

use rustix::fs::{Gid, Uid};
use rustix::pipe::PipeFlags;

use self::stream::Stream;
use crate::error::{Code, Context as _, Error};

/// The standard streams that containerd names.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stdio {
    /// Standard input: a FIFO, or empty.
    pub stdin: String,
    /// Standard output: a FIFO, an URI, or empty.
    pub stdout: String,
    /// Standard error: a FIFO, or empty.
    pub stderr: String,
    /// The process gets a terminal; there is no standard error then.
    pub terminal: bool,
}

impl Stdio {
    /// Whether the process shares no stream with the shim.
    pub fn is_none(&self) -> bool {
        let names = [&self.stdin, &self.stdout, &self.stderr];
        !self.terminal && names.iter().all(|name| name.is_empty())
    }
}

/// The owner of the pipes of a process (`IoUid`, `IoGid`).
#[derive(Debug, Clone, Copy)]
pub struct Owner {
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
}

/// The streams that were prepared for a process.
#[derive(Debug, Default)]
pub struct Prepared {
    /// Descriptors 0, 1 and 2 of the process.
    pub child: [Option<OwnedFd>; 3],
    /// The streams that are copied once the process is created.
    pub streams: Vec<Stream>,
    /// Keeps standard input open until CloseIO.
    pub stdin: Option<OwnedFd>,
    /// The logging program that receives the output, and must be ready before the start.
    pub logger: Option<logger::Logger>,
}

impl Prepared {
    /// All descriptors, of a process whose start has failed.
    pub fn into_ends(self) -> impl Iterator<Item = OwnedFd> {
        let streams = self.streams.into_iter().flat_map(Stream::into_ends);
        self.child.into_iter().flatten().chain(streams).chain(self.stdin)
    }
}

/// The destination of the output.
enum Output {
    Paths,
    File(String),
    Program(logger::Program),
}

fn output(stdio: &Stdio) -> Result<Output, Error> {
    match stdio.stdout.split_once("://") {
        None | Some(("fifo", _)) => Ok(Output::Paths),
        Some(("file", rest)) => Ok(Output::File(file_path(rest)?)),
        Some(("binary", rest)) => Ok(Output::Program(logger::Program::parse(rest, false)?)),
        Some(("binary-v2", rest)) => Ok(Output::Program(logger::Program::parse(rest, true)?)),
        Some((scheme, _)) => {
            let message = format!("unknown STDIO scheme {scheme}");
            Err(Error::new(Code::INVALID_ARGUMENT, message))
        }
    }
}

/// The path of a `file://` URI, decoded as in containerd (`url.Parse`).
fn file_path(rest: &str) -> Result<String, Error> {
    let (path, _) = logger::path_and_query(rest)?;
    String::from_utf8(path)
        .map_err(|_| Error::new(Code::INVALID_ARGUMENT, "log URI: the path is not UTF-8"))
}

/// Prepares the streams of process `id` in a namespace; those of a terminal by [`terminal`].
pub fn prepare(stdio: &Stdio, owner: Owner, id: &str, namespace: &str) -> Result<Prepared, Error> {
    let mut prepared = Prepared::default();
    if stdio.is_none() {
        return Ok(prepared);
    }
    let file;
    let (mut out, mut err) = (stdio.stdout.as_str(), stdio.stderr.as_str());
    match output(stdio)? {
        Output::Paths => out = out.strip_prefix("fifo://").unwrap_or(out),
        Output::File(path) => {
            make_file(&path)?;
            file = path;
            (out, err) = (&file, if err.is_empty() { "" } else { &file });
        }
        Output::Program(program) => {
            let (stdout, stderr) = (pipe(owner)?, pipe(owner)?);
            let started = program.start(id, namespace, stdout.0.as_fd(), stderr.0.as_fd())?;
            prepared.logger = Some(started);
            prepared.child = [None, Some(stdout.1), Some(stderr.1)];
            return Ok(prepared);
        }
    }
    let [input, output, errors] = &mut prepared.child;
    for (name, child) in [(out, output), (err, errors)] {
        if !name.is_empty() {
            let (read, write) = pipe(owner)?;
            prepared.streams.push(sink(name, read)?);
            *child = Some(write);
        }
    }
    if !stdio.stdin.is_empty() {
        let (read, write) = pipe(owner)?;
        let (from, hold) = fifo(&stdio.stdin)?;
        prepared.stdin = Some(hold);
        prepared.streams.push(Stream::input(from, write)?);
        *input = Some(read);
    }
    Ok(prepared)
}

/// Prepares the streams between a terminal and the FIFOs.
pub fn terminal(
    stdio: &Stdio,
    master: &OwnedFd,
    id: &str,
    namespace: &str,
) -> Result<Prepared, Error> {
    let mut prepared = Prepared::default();
    match output(stdio)? {
        Output::Paths if stdio.stdout.is_empty() => {}
        Output::Paths => {
            let path = stdio.stdout.strip_prefix("fifo://").unwrap_or(&stdio.stdout);
            prepared.streams.push(sink(path, master.try_clone()?)?.of_terminal());
        }
        Output::File(path) => {
            make_file(&path)?;
            prepared.streams.push(sink(&path, master.try_clone()?)?.of_terminal());
        }
        Output::Program(program) => {
            let owner = Owner { uid: 0, gid: 0 };
            let (stdout, stderr) = (pipe(owner)?, pipe(owner)?);
            let started = program.start(id, namespace, stdout.0.as_fd(), stderr.0.as_fd())?;
            prepared.logger = Some(started);
            let output = Stream::output(master.try_clone()?, stdout.1, None)?;
            prepared.streams.push(output.of_terminal());
        }
    }
    if !stdio.stdin.is_empty() {
        let (from, hold) = fifo(&stdio.stdin)?;
        prepared.stdin = Some(hold);
        prepared.streams.push(Stream::input(from, master.try_clone()?)?.of_terminal());
    }
    Ok(prepared)
}

/// A pipe that belongs to the process's user, so that the process can reopen its end by
/// `/proc/self/fd`.
fn pipe(owner: Owner) -> Result<(OwnedFd, OwnedFd), Error> {
    let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).context("make pipe")?;
    if (owner.uid, owner.gid) != (0, 0) {
        let (uid, gid) = (Uid::from_raw(owner.uid), Gid::from_raw(owner.gid));
        for end in [&read, &write] {
            rustix::fs::fchown(end, Some(uid), Some(gid)).context("change owner of pipe")?;
        }
    }
    Ok((read, write))
}

fn make_file(path: &str) -> Result<(), Error> {
    if let Some(dir) = Path::new(path).parent() {
        fs::create_dir_all(dir).context(format_args!("make directory {}", dir.display()))?;
    }
    let opened = OpenOptions::new().append(true).create(true).mode(0o644).open(path);
    opened.map(drop).context(format_args!("open {path}"))
}

/// An output stream from `from` to a path: a FIFO, which is also opened for reading, or a file.
fn sink(path: &str, from: OwnedFd) -> Result<Stream, Error> {
    let kind = fs::metadata(path).context(format_args!("open {path}"))?.file_type();
    if !kind.is_fifo() {
        let file = OpenOptions::new().append(true).open(path);
        let file = file.context(format_args!("open {path}"))?;
        return Ok(Stream::output(from, file.into(), None)?);
    }
    let (read, write) = fifo(path)?;
    Ok(Stream::output(from, write, Some(read))?)
}

/// Opens both ends of a FIFO, non-blocking.
fn fifo(path: &str) -> Result<(OwnedFd, OwnedFd), Error> {
    let open = |options: &mut OpenOptions| -> Result<File, Error> {
        options.custom_flags(libc::O_NONBLOCK).open(path).context(format_args!("open fifo {path}"))
    };
    let read = open(OpenOptions::new().read(true))?;
    let write = open(OpenOptions::new().write(true))?;
    Ok((read.into(), write.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_uri_is_decoded() {
        assert_eq!(file_path("/var/log/a%20b.log?x=1#y").unwrap(), "/var/log/a b.log");
        assert_eq!(file_path("/plain+name").unwrap(), "/plain+name");
        for malformed in ["", "host", "/a%ff"] {
            assert!(file_path(malformed).is_err(), "{malformed}");
        }
    }
}
