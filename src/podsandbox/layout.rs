//! Where the sandboxes are: their records, and their files as CRI looks for them.

use std::path::PathBuf;

use crate::config::{CRI_PLUGIN_DIR, Config};

/// Directory of the files of all sandboxes below CRI's directories (containerd `criservice`).
const SANDBOXES: &str = "sandboxes";

/// Where the files of all sandboxes are: directories of which each has one of its own, named by its
/// id.
#[derive(Debug)]
pub struct Layout {
    /// Directory of hostname, hosts, resolv.conf.
    pub root: PathBuf,
    /// Directory of the shared memory that CRI mounts.
    pub volatile: PathBuf,
    /// Directory of the records, and of the mounts that hold the shared memory.
    pub records: PathBuf,
}

impl Layout {
    /// The layout of a daemon with these settings.
    pub fn new(config: &Config) -> Self {
        Self {
            root: config.containerd_root.join(CRI_PLUGIN_DIR).join(SANDBOXES),
            volatile: config.containerd_state.join(CRI_PLUGIN_DIR).join(SANDBOXES),
            records: config.records(),
        }
    }

    /// A sandbox's own directory.
    pub fn sandbox(&self, id: &str) -> PathBuf {
        self.records.join(id)
    }
}
