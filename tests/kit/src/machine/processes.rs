//! Processes of the machine, read from /proc.

use std::ops::{AddAssign, Sub};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::Serialize;

use crate::until;

/// A process is stopped within this time.
const STOPPED: Duration = Duration::from_secs(60);

/// One process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proc {
    /// Process id.
    pub pid: u32,
    /// Parent's process id.
    pub parent: u32,
    /// State letter; `Z` is a zombie.
    pub state: char,
    /// Clock ticks after boot at which it started.
    pub start_time: u64,
    /// Name.
    pub comm: String,
    /// Command line, words separated by a space.
    pub command: String,
    /// `/proc/PID/cgroup`.
    pub cgroups: String,
}

/// All processes but the kernel's own.
///
/// # Errors
/// /proc cannot be read.
pub fn all() -> Result<Vec<Proc>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").context("read /proc")? {
        let name = entry?.file_name();
        // Processes that end meanwhile are skipped.
        if let Some(process) =
            name.to_str().and_then(|n| n.parse().ok()).and_then(|pid| one(pid).ok())
            && process.parent != 2
            && process.pid != 2
        {
            found.push(process);
        }
    }
    Ok(found)
}

/// Stops a process with SIGSTOP. The signal reaches its threads one after the other, and each may
/// answer until then.
///
/// # Errors
/// There is none with this id, or it is not stopped in time.
pub async fn stop(pid: u32) -> Result<()> {
    kill(Pid::from_raw(pid.cast_signed()), Signal::SIGSTOP).context("kill")?;
    until("all threads are stopped", STOPPED, async || {
        for thread in std::fs::read_dir(format!("/proc/{pid}/task"))? {
            let status = std::fs::read_to_string(thread?.path().join("status"))?;
            ensure!(status.contains("\nState:\tT"), "one runs: {status}");
        }
        Ok(())
    })
    .await
}

/// One process.
///
/// # Errors
/// There is none with this id.
pub fn one(pid: u32) -> Result<Proc> {
    let read = |file: &str| {
        let path = format!("/proc/{pid}/{file}");
        std::fs::read(&path)
            .with_context(|| format!("read {path}"))
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
    };
    let stat = read("stat")?;
    // The name stands in parentheses and may hold anything, parentheses too.
    let (comm, rest) = stat
        .split_once('(')
        .and_then(|(_, rest)| rest.rsplit_once(") "))
        .with_context(|| format!("/proc/{pid}/stat: {stat}"))?;
    let fields: Vec<&str> = rest.split(' ').collect();
    // Numbered as in proc_pid_stat(5), where the state is field 3.
    let field = |number: usize| fields.get(number - 3).copied().unwrap_or_default();
    Ok(Proc {
        pid,
        parent: field(4).parse()?,
        state: field(3).chars().next().unwrap_or('?'),
        start_time: field(22).parse()?,
        comm: comm.to_owned(),
        command: read("cmdline")?.trim_end_matches('\0').replace('\0', " "),
        cgroups: read("cgroup")?,
    })
}

/// Memory of processes, kilobytes (proc_pid_smaps(5)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Memory {
    /// Proportional set size: a page that processes share counts once.
    pub pss: f64,
    /// Resident set size: a page counts for each process that has it.
    pub rss: f64,
}

impl Memory {
    /// That of one process.
    ///
    /// # Errors
    /// There is none with this id.
    pub fn of(pid: u32) -> Result<Self> {
        let path = format!("/proc/{pid}/smaps_rollup");
        let text = std::fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
        let field = |name: &str| -> Result<f64> {
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            let line = line.with_context(|| format!("{path}: no {name}"))?;
            Ok(line.trim().trim_end_matches(" kB").trim().parse()?)
        };
        Ok(Self { pss: field("Pss:")?, rss: field("Rss:")? })
    }
}

impl AddAssign for Memory {
    fn add_assign(&mut self, other: Self) {
        *self = Self { pss: self.pss + other.pss, rss: self.rss + other.rss };
    }
}

impl Sub for Memory {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self { pss: self.pss - other.pss, rss: self.rss - other.rss }
    }
}

/// Proportional set size of a process, kilobytes.
///
/// # Errors
/// There is none with this id.
pub fn pss(pid: u32) -> Result<f64> {
    Memory::of(pid).map(|memory| memory.pss)
}

/// The namespace of one kind (`net`, `pid`, …) that a process is in, such as `net:[4026531840]`;
/// `self` is a process, too.
///
/// # Errors
/// There is no such process.
pub fn namespace(pid: &str, kind: &str) -> Result<String> {
    let link = format!("/proc/{pid}/ns/{kind}");
    let target = std::fs::read_link(&link).with_context(|| format!("read {link}"))?;
    Ok(target.to_string_lossy().into_owned())
}

/// Whether there is a process with this id, a zombie included.
pub fn exists(pid: u32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}
