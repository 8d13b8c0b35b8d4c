//! Programs that tests write.

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};

/// Writes a program that can be executed at once. Another process writes it: a descriptor of this
/// one is shared by children that other threads are just starting, and what is open for writing is
/// not executed (`ETXTBSY` of execve(2)).
///
/// # Errors
/// It cannot be written.
pub fn write_program(path: impl AsRef<Path>, content: &[u8]) -> Result<()> {
    let path = path.as_ref();
    let mut writer = Command::new("/bin/sh")
        .args(["-c", "cat >\"$0\" && chmod 0755 \"$0\""])
        .arg(path)
        .stdin(Stdio::piped())
        .spawn()?;
    let written = writer.stdin.take().context("no standard input")?.write_all(content);
    ensure!(writer.wait()?.success(), "cannot write {}", path.display());
    Ok(written?)
}
