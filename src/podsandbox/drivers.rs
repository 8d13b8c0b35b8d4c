//! The drivers of the daemon: which one runs the pause process of a pod. No other place compares
//! the names of drivers.

use std::sync::Arc;

use crate::config::{Config, DriverName};
use crate::error::StepError;
use crate::pause::Driver;
use crate::shim::Shims;
use crate::shim::driver::{self, ShimDriver};

/// A driver that creates pause processes.
#[derive(Clone, Debug)]
pub enum PauseDriver {
    /// This program; its calls block.
    Native(Arc<dyn Driver>),
    /// The pods' shims; its calls are async.
    Shim(Arc<ShimDriver>),
}

impl PauseDriver {
    /// The driver's name in config, record and metrics.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Native(driver) => driver.name(),
            Self::Shim(driver) => driver.name(),
        }
    }
}

/// All drivers.
#[derive(Debug)]
pub struct DriverRegistry {
    native: Arc<dyn Driver>,
    shim: Arc<ShimDriver>,
}

impl DriverRegistry {
    /// The native driver, and that of the pods' shims.
    pub fn new(native: Arc<dyn Driver>, shims: Arc<Shims>) -> Self {
        Self { native, shim: Arc::new(ShimDriver::new(shims)) }
    }

    /// The name of the driver that runs pause processes natively.
    pub fn native_name(&self) -> &'static str {
        self.native.name()
    }

    /// The driver that a record names, which makes and finds its pause process.
    pub fn of_record(&self, name: &str) -> PauseDriver {
        if name == self.shim.name() {
            PauseDriver::Shim(self.shim.clone())
        } else {
            PauseDriver::Native(self.native.clone())
        }
    }

    /// [`Driver::kill_orphans`] of all drivers. What a shim runs is found by the shim's own record.
    ///
    /// # Errors
    /// Every step that failed.
    pub fn kill_orphans(&self, recorded: &dyn Fn(&str) -> bool) -> Result<(), Vec<StepError>> {
        self.native.kill_orphans(recorded)
    }
}

/// The driver for pods of that runtime.
pub fn choose(runtime: &str, config: &Config) -> DriverName {
    match config.drivers.0.get(runtime) {
        Some(driver) => *driver,
        // Without a name there is nothing to run it.
        None if runtime.is_empty() || driver::is_of_host_processes(runtime) => DriverName::Native,
        None => DriverName::Shim,
    }
}
