//! The objects that all sandboxes of a daemon share.

use std::path::Path;
use std::sync::Arc;

use super::files::SandboxFiles;
use super::layout::Layout;
use super::selinux::Selinux;
use crate::config::{CONTAINERD_NAMESPACE, Config};
use crate::containerd::GrpcEndpoint;
use crate::containerd::containers::Containers;
use crate::error::StepError;
use crate::id::SandboxId;
use crate::mounts::Mounts;
use crate::pause::Driver;
use crate::process::inheritance::Inheritance;
use crate::shim::own::OwnShim;
use crate::shim::{self, Shims};
use crate::telemetry::Telemetry;

const _: () = assert!(
    crate::config::SHIM_SOCKET_SUFFIX == shim::SOCKET_SUFFIX,
    "the state directory's length is checked by it"
);

/// The settings of a daemon, and what it has once.
#[derive(Debug)]
pub struct Environment {
    /// Settings.
    pub config: Arc<Config>,
    /// Creates the pause processes.
    pub(super) driver: Arc<dyn Driver>,
    /// containerd's containers, of which each sandbox can be one.
    pub containers: Containers,
    /// Makes the pods' Task endpoints.
    pub shims: Arc<Shims>,
    /// Where the sandboxes' files are.
    pub(super) layout: Arc<Layout>,
    /// Whether containerd sees what is mounted here.
    pub mounts: Arc<Mounts>,
    /// Gives the pods their labels.
    pub selinux: Selinux,
    /// Counts what happens.
    pub telemetry: Arc<Telemetry>,
}

impl Environment {
    /// Directory of all records.
    pub fn sandboxes(&self) -> &Path {
        &self.layout.records
    }

    /// The files of a sandbox.
    pub fn files(&self, id: &SandboxId) -> SandboxFiles {
        SandboxFiles::new(&self.layout, id)
    }

    /// Settings and driver with the endpoints that go with them. `own` is what the
    /// daemon was started with, `own_shim` this project's own shim, if it can be used.
    ///
    /// # Errors
    /// The boot id cannot be read.
    pub fn new(
        config: Config,
        driver: Arc<dyn Driver>,
        own: Inheritance,
        own_shim: Option<OwnShim>,
    ) -> Result<Self, StepError> {
        let layout = Arc::new(Layout::new(&config));
        let config = Arc::new(config);
        let settings = shim::ShimSettings { config: Arc::clone(&config), own, own_shim };
        let shims = Arc::new(Shims::new(settings)?);
        let mounts = Arc::new(Mounts::new(
            config.containerd_address.clone(),
            config.containerd_state.clone(),
        ));
        let containerd = GrpcEndpoint::new(&config.containerd_address, CONTAINERD_NAMESPACE);
        let containers = Containers::new(containerd, &config.state_dir);
        let (selinux, telemetry) = (Selinux::default(), Arc::default());
        Ok(Self { config, driver, containers, shims, layout, mounts, selinux, telemetry })
    }
}
