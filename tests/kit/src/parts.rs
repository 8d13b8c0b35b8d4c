//! The programs that a node is made of.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// The CNI plugins of a node's pod network.
const CNI_PLUGINS: &str = "/usr/lib/cni";

/// Where the programs of a node are.
#[derive(Clone, Debug)]
pub struct Parts {
    bin: PathBuf,
}

impl Parts {
    /// The fetched parts, in `$PARTS_DIR` or the repository's `target/parts`; fetches what is
    /// missing.
    ///
    /// # Errors
    /// The script that fetches them failed.
    pub fn get() -> Result<Self> {
        let kit = Path::new(env!("CARGO_MANIFEST_DIR"));
        let directory = match std::env::var_os("PARTS_DIR") {
            Some(directory) => PathBuf::from(directory),
            None => kit.join("../../target/parts"),
        };
        let script = kit.join("fetch-parts");
        let status = Command::new(&script)
            .arg(&directory)
            .status()
            .with_context(|| format!("run {}", script.display()))?;
        ensure!(status.success(), "{} failed: {status}", script.display());
        let bin = directory
            .join("bin")
            .canonicalize()
            .with_context(|| format!("{}/bin", directory.display()))?;
        Ok(Self { bin })
    }

    /// Other builds of containerd, `ctr` and its runc shim, all in `bin`.
    pub fn at(bin: impl Into<PathBuf>) -> Self {
        Self { bin: bin.into() }
    }

    /// The directory that holds containerd, `ctr` and `containerd-shim-runc-v2`.
    pub fn bin(&self) -> &Path {
        &self.bin
    }

    /// A program of this directory.
    pub fn program(&self, name: &str) -> PathBuf {
        self.bin.join(name)
    }

    /// The version of containerd, without what a packager or builder has added to it; empty if it
    /// does not say.
    pub fn version(&self) -> String {
        let said = Command::new(self.program("containerd")).arg("--version").output();
        let said = said.map(|done| done.stdout).unwrap_or_default();
        let said = String::from_utf8_lossy(&said).into_owned();
        let version = said.split_whitespace().nth(2).unwrap_or_default();
        let version = version.trim_start_matches('v');
        version.split(['+', '~']).next().unwrap_or_default().to_owned()
    }

    /// A runc that containers with a user namespace need: the machine's own may be too old for
    /// idmapped mounts.
    pub fn runc(&self) -> PathBuf {
        self.bin.join("../runc/runc")
    }

    /// The directory of the CNI plugins.
    pub fn cni_plugins(&self) -> &Path {
        Path::new(CNI_PLUGINS)
    }
}
