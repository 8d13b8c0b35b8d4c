//! The metrics of a cgroup, in containerd's form: for a pod's parent cgroup, of which the daemon is
//! asked, and for a container's, of which its shim is asked.

pub mod directory;
pub mod v1;
pub mod v2;

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// The step in errors.
pub const READ: &str = "read metrics of cgroup";

/// Name of the message of version 1 in an `Any`.
pub const V1: &str = "io.containerd.cgroups.v1.Metrics";
/// Name of the message of version 2 in an `Any`.
pub const V2: &str = "io.containerd.cgroups.v2.Metrics";

/// A file that cannot be read.
#[derive(Debug)]
pub struct Error {
    /// The file, or the cgroup.
    pub path: PathBuf,
    /// Why.
    pub source: io::Error,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{READ} {}: {}", self.path.display(), self.source)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
    }
}

impl Error {
    fn at(path: impl Into<PathBuf>, source: io::Error) -> Self {
        Self { path: path.into(), source }
    }
}

fn missing(cgroup: &Path) -> Error {
    Error::at(cgroup, io::Error::from_raw_os_error(rustix::io::Errno::NOENT.raw_os_error()))
}

/// Names of the node's huge page sizes in cgroup files, such as `2MB` (kernel
/// `mm/hugetlb_cgroup.c`).
fn huge_page_sizes() -> Vec<String> {
    let Ok(entries) = std::fs::read_dir("/sys/kernel/mm/hugepages") else { return Vec::new() };
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let mut sizes: Vec<u64> = names
        .filter_map(|name| name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok())
        .collect();
    sizes.sort_unstable();
    let name = |kib| match kib {
        kib if kib >= 1 << 20 => format!("{}GB", kib >> 20),
        kib if kib >= 1 << 10 => format!("{}MB", kib >> 10),
        kib => format!("{kib}KB"),
    };
    sizes.into_iter().map(name).collect()
}
