//! Network namespaces, bind-mounted as CNI has them and empty.

use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

/// Makes `count` of them below `directory`. They go with the node.
pub(crate) fn make(directory: &Path, count: usize) -> Result<Vec<PathBuf>> {
    std::fs::create_dir_all(directory)?;
    (0..count).map(|number| one(directory.join(format!("netns-{number}")))).collect()
}

fn one(path: PathBuf) -> Result<PathBuf> {
    File::create(&path)?;
    let target = path.clone();
    // A thread that is thrown away: it never leaves the namespace.
    let made = std::thread::spawn(move || -> Result<()> {
        unshare(CloneFlags::CLONE_NEWNET).context("make a network namespace")?;
        let none = None::<&str>;
        mount(Some("/proc/thread-self/ns/net"), &target, none, MsFlags::MS_BIND, none)
            .context("bind it")
    });
    made.join().map_err(|_| anyhow::anyhow!("the thread panicked"))??;
    Ok(path)
}
