//! The platform of the node, and its service manager.

use std::path::Path;

/// A platform, in the names of OCI images.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Platform {
    /// `linux`.
    pub os: &'static str,
    /// `amd64` or `arm64`.
    pub architecture: &'static str,
    /// CPU variant such as `v8`; empty where there is none.
    pub variant: &'static str,
}

impl Platform {
    /// The platform that this program is compiled for.
    pub const fn node() -> Self {
        let (architecture, variant) =
            if cfg!(target_arch = "aarch64") { ("arm64", "v8") } else { ("amd64", "") };
        Self { os: "linux", architecture, variant }
    }
}

/// Whether systemd is the node's service manager (sd_booted(3)).
pub fn systemd_runs() -> bool {
    Path::new("/run/systemd/system").is_dir()
}
