//! A cgroup of the freezer of version 1: what is killed in it while it is frozen stays, with its
//! SIGKILL pending, as a process does that hangs in the kernel.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use super::cgroup;

/// The cgroup. Thawed and removed on drop.
#[derive(Debug)]
pub struct Freezer(PathBuf);

impl Freezer {
    /// Makes it; none where the node has version 2, which kills what is frozen.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn new(name: &str) -> Result<Option<Self>> {
        let root = cgroup::hierarchies()?.into_iter().find(|h| h.ends_with("freezer"));
        let Some(root) = root else { return Ok(None) };
        let cgroup = root.join(format!("{name}-{}", std::process::id()));
        fs::create_dir(&cgroup)?;
        Ok(Some(Self(cgroup)))
    }

    /// Freezes a process.
    ///
    /// # Errors
    /// It is not frozen.
    pub fn freeze(&self, pid: u32) -> Result<()> {
        fs::write(self.0.join("cgroup.procs"), pid.to_string())?;
        let state = self.0.join("freezer.state");
        fs::write(&state, "FROZEN")?;
        let begun = Instant::now();
        while fs::read_to_string(&state)? != "FROZEN\n" {
            ensure!(begun.elapsed() < Duration::from_secs(60), "process {pid} does not freeze");
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Thaws all.
    ///
    /// # Errors
    /// The kernel's.
    pub fn thaw(&self) -> Result<()> {
        Ok(fs::write(self.0.join("freezer.state"), "THAWED")?)
    }
}

impl Drop for Freezer {
    fn drop(&mut self) {
        let _ = self.thaw();
        let _ = fs::remove_dir(&self.0);
    }
}
