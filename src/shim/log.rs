//! Copies the lines of a shim into the daemon's log: reads the fifo `log` in its bundle, bounded.

use std::fs::File;
use std::fs::OpenOptions;
use std::io::{self, Read as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::Duration;

use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use tokio::io::AsyncReadExt as _;
use tokio::net::unix::pipe;
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::error::{IoContext as _, StepError};

/// Longer lines are cut; bytes.
const LONGEST: usize = 2048;

/// Lines that are logged per [`WINDOW`]; more are counted.
const MAX_LINES_PER_WINDOW: u32 = 100;
const WINDOW: Duration = Duration::from_secs(10);

/// Capacity of a pipe, bytes.
const PIPE_CAPACITY: u64 = 64 << 10;

/// Reads the fifo until dropped, and then what is still in it.
#[derive(Debug)]
pub struct Reader {
    /// Never sent: its end is the signal.
    _ended: oneshot::Sender<()>,
}

/// Makes the fifo unless there is one.
///
/// # Errors
/// The failed step.
pub fn make_fifo(fifo: &Path) -> Result<(), StepError> {
    match mkfifo(fifo, Mode::S_IRUSR | Mode::S_IWUSR) {
        Err(nix::Error::EEXIST) => Ok(()),
        other => other.step_at("make fifo", fifo),
    }
}

/// An end of the fifo to write to that neither waits nor breaks, with or without a reader.
///
/// # Errors
/// The failed step.
pub fn writer(fifo: &Path) -> Result<OwnedFd, StepError> {
    let opened =
        OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(fifo);
    opened.map(Into::into).step_at("open fifo", fifo)
}

/// Begins to read. To be called on the runtime.
///
/// # Errors
/// The failed step.
pub fn read_log(fifo: &Path, sandbox: &str) -> Result<Reader, StepError> {
    // Read and write: no end of file comes when the shim's end closes, and the shim need not wait
    // for us to open it.
    let receiver =
        pipe::OpenOptions::new().read_write(true).open_receiver(fifo).step_at("open fifo", fifo)?;
    let (ended, end) = oneshot::channel();
    let sandbox = sandbox.to_owned();
    tokio::spawn(async move {
        if let Err(e) = drain(receiver, end, |line| log_line(&sandbox, line)).await {
            log::warn!(sandbox = sandbox.as_str(); "failed to read log of shim: {e}");
        }
    });
    Ok(Reader { _ended: ended })
}

async fn drain(
    mut from: pipe::Receiver,
    mut end: oneshot::Receiver<()>,
    mut tell: impl FnMut(&str),
) -> io::Result<()> {
    let mut lines = Lines::new();
    let mut buffer = [0; LONGEST];
    loop {
        let read = tokio::select! {
            read = from.read(&mut buffer) => read?,
            _ = &mut end => break,
        };
        if read == 0 {
            return Ok(());
        }
        lines.add_bytes(buffer.get(..read).unwrap_or_default(), &mut tell);
    }
    // The shim's last words, such as a panic, come with its end. Read past the runtime, which may
    // not have noticed them yet.
    let mut last = Vec::new();
    match File::from(from.into_nonblocking_fd()?).take(PIPE_CAPACITY).read_to_end(&mut last) {
        Err(e) if e.kind() != io::ErrorKind::WouldBlock => return Err(e),
        _ => {}
    }
    lines.add_bytes(&last, &mut tell);
    lines.rest(tell);
    Ok(())
}

/// Cuts a stream into lines, and their number to what a log may take.
#[derive(Debug)]
struct Lines {
    line: Vec<u8>,
    since: Instant,
    reported: u32,
    dropped: u32,
}

impl Lines {
    fn new() -> Self {
        Self { line: Vec::new(), since: Instant::now(), reported: 0, dropped: 0 }
    }

    /// A line that has no end.
    fn rest(&mut self, tell: impl FnMut(&str)) {
        if !self.line.is_empty() {
            self.add_bytes(b"\n", tell);
        }
    }

    fn add_bytes(&mut self, bytes: &[u8], mut tell: impl FnMut(&str)) {
        for byte in bytes {
            if *byte != b'\n' {
                if self.line.len() < LONGEST {
                    self.line.push(*byte);
                }
                continue;
            }
            if self.since.elapsed() >= WINDOW {
                if self.dropped > 0 {
                    tell(&format!(
                        "level=warning msg=\"{} more lines were dropped\"",
                        self.dropped
                    ));
                }
                (self.since, self.reported, self.dropped) = (Instant::now(), 0, 0);
            }
            let line = std::mem::take(&mut self.line);
            if self.reported < MAX_LINES_PER_WINDOW {
                self.reported += 1;
                tell(&String::from_utf8_lossy(&line));
            } else {
                if self.dropped == 0 {
                    tell("level=warning msg=\"too many lines: the next are dropped\"");
                }
                self.dropped = self.dropped.saturating_add(1);
            }
        }
    }
}

/// containerd's shims write logrus lines, with their level in them; all else, such as a panic, is
/// worth a warning.
fn log_line(sandbox: &str, line: &str) {
    let line = line.trim_end();
    if line.is_empty() {
        return;
    }
    if ["level=debug", "level=info", "level=trace"].iter().any(|level| line.contains(level)) {
        log::debug!(sandbox = sandbox; "shim: {line}");
    } else {
        log::warn!(sandbox = sandbox; "shim: {line}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Promise: log_lines_cannot_be_forged.
    #[tokio::test(start_paused = true)]
    async fn lines_are_cut_and_counted() {
        let mut lines = Lines::new();
        let mut reported = Vec::new();
        lines.add_bytes(b"one\ntw", |line| reported.push(line.to_owned()));
        lines.add_bytes(b"o\n", |line| reported.push(line.to_owned()));
        assert_eq!(reported, ["one", "two"]);
        lines.add_bytes(&[b'x'; 5000], |line| reported.push(line.to_owned()));
        lines.add_bytes(b"\n", |line| reported.push(line.to_owned()));
        assert_eq!(reported.pop().map(|line| line.len()), Some(LONGEST));
        for _ in 0..200 {
            lines.add_bytes(b"y\n", |line| reported.push(line.to_owned()));
        }
        assert_eq!(reported.len(), MAX_LINES_PER_WINDOW as usize);
        tokio::time::advance(WINDOW).await;
        lines.add_bytes(b"z\n", |line| reported.push(line.to_owned()));
        assert!(reported.iter().any(|line| line.contains("103 more lines")), "{reported:?}");
        assert_eq!(reported.last().map(String::as_str), Some("z"));
    }

    #[tokio::test]
    async fn the_last_lines_of_a_shim_are_read() {
        use std::io::Write as _;
        let dir = tempfile::tempdir().unwrap();
        let fifo = dir.path().join("log");
        make_fifo(&fifo).unwrap();
        let (ended, end) = oneshot::channel();
        let receiver = pipe::OpenOptions::new().read_write(true).open_receiver(&fifo).unwrap();
        let mut writer = File::from(writer(&fifo).unwrap());
        writer.write_all(b"panic: no such thing\ngoroutine 1").unwrap();
        drop(ended);
        let mut reported = Vec::new();
        drain(receiver, end, |line| reported.push(line.to_owned())).await.unwrap();
        assert_eq!(reported, ["panic: no such thing", "goroutine 1"]);
    }

    #[tokio::test]
    async fn a_writer_neither_waits_nor_breaks() {
        use std::io::Write as _;
        let dir = tempfile::tempdir().unwrap();
        let fifo = dir.path().join("log");
        make_fifo(&fifo).unwrap();
        make_fifo(&fifo).unwrap();
        let mut writer = std::fs::File::from(writer(&fifo).unwrap());
        let reader = read_log(&fifo, "a").unwrap();
        writer.write_all(b"level=info\n").unwrap();
        drop(reader);
        // No reader: full, but neither blocked nor EPIPE.
        let full = loop {
            if let Err(e) = writer.write(&[b'x'; 4096]) {
                break e;
            }
        };
        assert_eq!(full.kind(), io::ErrorKind::WouldBlock);
    }
}
