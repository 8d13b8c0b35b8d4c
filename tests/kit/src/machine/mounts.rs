//! Mounts, as one process sees them.

use std::path::PathBuf;

use anyhow::{Context, Result};

/// One line of `/proc/PID/mountinfo`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// The part of the file system that is mounted.
    pub root: String,
    /// Where.
    pub point: PathBuf,
    /// File system type.
    pub kind: String,
    /// Options of the file system.
    pub super_options: String,
}

/// The mounts of a process; `self` is one, too.
///
/// # Errors
/// There is no such process.
pub fn of(pid: &str) -> Result<Vec<Mount>> {
    let path = format!("/proc/{pid}/mountinfo");
    let text = std::fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
    Ok(text.lines().filter_map(parse).collect())
}

fn parse(line: &str) -> Option<Mount> {
    let (before, after) = line.split_once(" - ")?;
    let mut before = before.split(' ').skip(3);
    let (root, point) = (before.next()?, before.next()?);
    let mut after = after.split(' ');
    let kind = after.next()?;
    Some(Mount {
        root: unescape(root),
        point: unescape(point).into(),
        kind: kind.to_owned(),
        super_options: after.nth(1).unwrap_or_default().to_owned(),
    })
}

/// Undoes the octal escapes of space, tab, newline and backslash.
fn unescape(text: &str) -> String {
    text.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
}
