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
pub mod readers;
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
#[derive(Debug, Default, Clone, Copy)]
pub struct Owner {
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
}

/// containerd's end of a stream.
#[derive(Debug)]
enum End {
    /// The reading end of a FIFO for standard input.
    Input(OwnedFd),
    /// The destination of an output, and the shim's own reading end if that is a FIFO.
    Output(OwnedFd, Option<OwnedFd>),
}

impl End {
    /// The stream between this end and the shim's end of what the process has.
    fn connect(self, process: OwnedFd) -> Result<Stream, Error> {
        Ok(match self {
            Self::Input(from) => Stream::input(from, process)?,
            Self::Output(to, reader) => Stream::output(process, to, reader)?,
        })
    }
}

/// The streams that were prepared for a process.
#[derive(Debug, Default)]
pub struct Prepared {
    /// Descriptors 0, 1 and 2 of a process without a terminal.
    pub child: [Option<OwnedFd>; 3],
    /// The streams that are copied once the process is created.
    pub streams: Vec<Stream>,
    /// The ends of the streams of a terminal, which the runtime sends when it has created the
    /// process.
    ends: Vec<End>,
    /// Keeps standard input open until CloseIO or the deletion.
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

    /// Makes the streams of a terminal.
    ///
    /// # Errors
    /// No descriptor is available.
    pub fn connect(&mut self, master: &OwnedFd) -> Result<(), Error> {
        for end in std::mem::take(&mut self.ends) {
            self.streams.push(end.connect(master.try_clone()?)?.of_terminal());
        }
        Ok(())
    }
}

/// The path of a `file://` URI, decoded as in containerd (`url.Parse`).
fn file_path(rest: &str) -> Result<String, Error> {
    let (path, _) = logger::path_and_query(rest)?;
    String::from_utf8(path)
        .map_err(|_| Error::new(Code::INVALID_ARGUMENT, "log URI: the path is not UTF-8"))
}

/// Prepares the streams of process `id` in a namespace.
pub fn prepare(stdio: &Stdio, owner: Owner, id: &str, namespace: &str) -> Result<Prepared, Error> {
    let mut prepared = Prepared::default();
    if stdio.is_none() {
        return Ok(prepared);
    }
    // A terminal has no standard error.
    let err = if stdio.terminal { "" } else { &stdio.stderr };
    let (scheme, rest) = stdio.stdout.split_once("://").unwrap_or(("fifo", &stdio.stdout));
    let (out, err) = match scheme {
        "fifo" => (sink(rest)?, sink(err)?),
        "file" => {
            let path = file_path(rest)?;
            make_file(&path)?;
            (sink(&path)?, if err.is_empty() { None } else { sink(&path)? })
        }
        "binary" | "binary-v2" => {
            let program = logger::Program::parse(rest, scheme == "binary-v2")?;
            let (stdout, stderr) = (pipe(owner)?, pipe(owner)?);
            let started = program.start(id, namespace, stdout.0.as_fd(), stderr.0.as_fd())?;
            prepared.logger = Some(started);
            if !stdio.terminal {
                prepared.child = [None, Some(stdout.1), Some(stderr.1)];
                return Ok(prepared);
            }
            (Some(End::Output(stdout.1, None)), None)
        }
        _ => {
            let message = format!("unknown STDIO scheme {scheme}");
            return Err(Error::new(Code::INVALID_ARGUMENT, message));
        }
    };
    let mut input = None;
    if !stdio.stdin.is_empty() {
        let (from, hold) = fifo(&stdio.stdin)?;
        (input, prepared.stdin) = (Some(End::Input(from)), Some(hold));
    }
    for (end, child) in [input, out, err].into_iter().zip(&mut prepared.child) {
        let Some(end) = end else { continue };
        if stdio.terminal {
            prepared.ends.push(end);
            continue;
        }
        let (read, write) = pipe(owner)?;
        let (own, of_process) = match end {
            End::Input(_) => (write, read),
            End::Output(..) => (read, write),
        };
        prepared.streams.push(end.connect(own)?);
        *child = Some(of_process);
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

/// The end of an output at a path: a FIFO, which is also opened for reading, or a file; `None`:
/// there is no path.
fn sink(path: &str) -> Result<Option<End>, Error> {
    if path.is_empty() {
        return Ok(None);
    }
    let kind = fs::metadata(path).context(format_args!("open {path}"))?.file_type();
    if !kind.is_fifo() {
        // The shim must not wait if it is a FIFO by now.
        let file = OpenOptions::new().append(true).custom_flags(libc::O_NONBLOCK).open(path);
        return Ok(Some(End::Output(file.context(format_args!("open {path}"))?.into(), None)));
    }
    let (read, write) = fifo(path)?;
    Ok(Some(End::Output(write, Some(read))))
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
