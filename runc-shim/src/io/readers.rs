//! The readers of the FIFOs of a process that is not created yet.
//!
//! containerd opens each FIFO in a thread of its own, which may be later than its call. When a
//! process has exited it closes those that are not open yet (`Task.Delete` of its client calls
//! `io.Cancel`), and the output is lost; or it waits for them, without a limit for an exec of CRI.
//! So a process is created only when its output has readers.

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt as _;
use std::time::{Duration, Instant};

use super::stream::{has_reader, is_removed};
use super::{Stdio, fifo};

/// Delay between checks.
const CHECK_WAIT: Duration = Duration::from_millis(10);

/// How long the creation of a process waits for readers. Then it continues without.
const READERS_TIMEOUT: Duration = Duration::from_secs(10);

/// The FIFOs of the outputs of a process, open for writing: a reader that finds a writer must not
/// read the end of the file before the process is created.
#[derive(Debug)]
pub struct Readers {
    fifos: Vec<OwnedFd>,
    /// The time of the next check.
    check_at: Instant,
    /// When the creation continues without readers.
    until: Instant,
}

impl Readers {
    /// Opens the FIFOs. A FIFO that cannot be opened has no reader to wait for.
    pub fn of(stdio: &Stdio) -> Self {
        let stdout = stdio.stdout.strip_prefix("fifo://").unwrap_or(&stdio.stdout);
        // A terminal has no standard error.
        let stderr = if stdio.terminal { "" } else { &stdio.stderr };
        let is_fifo = |path: &&str| fs::metadata(path).is_ok_and(|it| it.file_type().is_fifo());
        let paths = [stdout, stderr].into_iter().filter(is_fifo);
        // The reading ends are closed.
        let fifos = paths.filter_map(|path| Some(fifo(path).ok()?.1)).collect();
        let now = Instant::now();
        Self { fifos, check_at: now + CHECK_WAIT, until: now + READERS_TIMEOUT }
    }

    /// Whether all FIFOs have readers, but those that were removed, which cannot get one.
    pub fn are_there(&self) -> bool {
        self.fifos.iter().all(|fifo| has_reader(fifo) || is_removed(fifo))
    }

    /// The time of the next [`Readers::check`].
    pub fn check_at(&self) -> Instant {
        self.check_at
    }

    /// Whether the creation continues: all FIFOs have readers, or the time is over.
    pub fn check(&mut self, now: Instant) -> bool {
        self.check_at = now + CHECK_WAIT;
        self.until <= now || self.are_there()
    }

    /// Has the creation continue at the next check.
    pub fn give_up(&mut self) {
        self.until = Instant::now();
    }
}
