//! The blocking work of one sandbox: what its jobs do to the system, step by step.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use super::files::Places;
use super::record::{Record, Stage, Store};
use super::selinux::Level;
use super::spec;
use crate::config::Config;
use crate::error::{IoContext as _, Step};
use crate::mounts::Mounts;
use crate::pause::{Adoption, Driver, Exit, Namespace, Pause, Plan, Site};
use crate::shim;
use crate::telemetry::Telemetry;
use crate::trace::Subject;

/// What the jobs of one sandbox work on. Its methods block.
#[derive(Debug)]
pub struct Work {
    /// Makes and cleans up the pause.
    pub driver: Arc<dyn Driver>,
    /// What the driver must know to look for the pause and to clean up after it.
    pub site: Site,
    /// The namespaces that the pod has for itself.
    pub own: Own,
    /// It has shared memory of its own.
    pub shm: bool,
    /// It is of the containerd namespace that is served.
    pub in_namespace: bool,
    /// SELinux label of its processes; empty where there is none.
    pub label: Box<str>,
    /// What is to be made; away as soon as it is made, as it is needed no longer then and is on disk.
    pub to_make: Mutex<Option<Arc<Record>>>,
    /// Settings, for the spec.
    pub config: Arc<Config>,
    /// The OCI spec that Start answers, from when the pause is made until it is given away.
    pub spec: Mutex<Option<Box<[u8]>>>,
    /// Keeps other pods from the level of these.
    pub _level: Option<Box<Level>>,
    /// Where the files are.
    pub places: Places,
    /// Whether containerd sees what is mounted there.
    pub mounts: Arc<Mounts>,
    /// Where the record is.
    pub store: Store,
    /// The Task endpoint of the pod's containers.
    pub shim: shim::Endpoint,
    /// When Create was called.
    pub created_at: SystemTime,
    /// What its shim is of.
    pub runtime: Arc<shim::Runtime>,
    /// What lines of the log say of the sandbox.
    pub subject: Subject,
    /// Counts what happens.
    pub telemetry: Arc<Telemetry>,
}

/// Which namespaces a pod has for itself.
#[derive(Clone, Copy, Debug)]
pub struct Own {
    /// Network namespace.
    pub net: bool,
    /// IPC namespace.
    pub ipc: bool,
    /// UTS namespace.
    pub uts: bool,
}

impl Own {
    /// Those of a plan.
    pub fn of(plan: &Plan) -> Self {
        let private = |namespace| namespace == Namespace::Private;
        Self { net: plan.netns.is_some(), ipc: private(plan.ipc), uts: private(plan.uts) }
    }
}

/// A start that failed.
#[derive(Debug)]
pub struct StartFailure {
    /// The step that failed.
    pub step: Step,
    /// What could not be undone; empty when nothing is left of the sandbox.
    pub left: Vec<Step>,
}

impl Work {
    /// Makes files and pause and records them.
    ///
    /// # Errors
    /// The failed step. All is undone then, the record included.
    pub fn start(&self) -> Result<Arc<dyn Pause>, StartFailure> {
        self.try_start().map_err(|step| StartFailure { step, left: self.remove().err().unwrap_or_default() })
    }

    fn try_start(&self) -> Result<Arc<dyn Pause>, Step> {
        self.mounts.admit()?;
        self.places.begin()?;
        let record = self.to_make()?;
        self.places.make(&record.files, &record.labels.mount)?;
        self.shim.listen()?;
        self.describe(&record)?;
        let pause: Arc<dyn Pause> = Arc::from(self.driver.start(&record.plan)?);
        if let Err(step) = self.store.set_stage(&Stage::Started { identity: pause.identity().clone() }) {
            // A pause without a record would outlive everybody who knows of it.
            self.end(&*pause);
            return Err(step);
        }
        *self.record() = None;
        Ok(pause)
    }

    /// Makes the spec, unless it is there.
    fn describe(&self, record: &Record) -> Result<(), Step> {
        let mut spec = self.spec();
        if spec.is_none() {
            *spec = Some(spec::describe(record, &self.config).map_err(io::Error::other).step("make the spec")?.into());
        }
        Ok(())
    }

    /// Tells a shim that will run the pause what it is. Of others nothing is told.
    ///
    /// # Errors
    /// The failed step.
    pub fn describe_to_shim(&self, record: &Record) -> Result<(), Step> {
        if self.shim.listens_only() {
            return Ok(());
        }
        self.describe(record)?;
        self.shim.describe(self.spec().as_deref().unwrap_or_default(), &record.plan)
    }

    /// The spec, once, after a start.
    pub fn give_spec(&self) -> Option<Box<[u8]>> {
        self.spec().take()
    }

    fn spec(&self) -> MutexGuard<'_, Option<Box<[u8]>>> {
        self.spec.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is to be made: what was created, or where that is away already the record.
    fn to_make(&self) -> Result<Arc<Record>, Step> {
        let created = self.record().clone();
        created.map_or_else(|| Ok(Arc::new(self.store.read()?)), Ok)
    }

    fn record(&self) -> MutexGuard<'_, Option<Arc<Record>>> {
        self.to_make.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Kills a pause that nobody has heard of and waits for its end.
    fn end(&self, pause: &dyn Pause) {
        match pause.kill() {
            Ok(()) => drop(tokio::runtime::Handle::current().block_on(pause.exited())),
            Err(kill) => log::error!(sandbox = self.site.id.as_str(); "start: undo: {kill}"),
        }
    }

    /// Removes what an older daemon has made ahead of a Start that never came. The sandbox stays created.
    ///
    /// # Errors
    /// Every step that failed; the removal of the sandbox does them again.
    pub fn clear(&self) -> Result<(), Vec<Step>> {
        let mut errors = self.driver.cleanup(&self.site).err().unwrap_or_default();
        errors.extend(self.places.remove().err().unwrap_or_default());
        if errors.is_empty() { Ok(()) } else { Err(errors) }
    }

    /// Puts files back that are gone; true when some were.
    ///
    /// # Errors
    /// Every step that failed.
    pub fn mend(&self) -> Result<bool, Vec<Step>> {
        self.places.mend(self.shm, || Ok(self.store.read()?.files))
    }

    /// Asks the driver for the process that the record names.
    pub fn adopt(&self) -> Adoption {
        match self.store.stage() {
            Ok(Stage::Started { identity }) => self.driver.adopt(&self.site, &identity),
            Ok(Stage::Exited { exit, .. }) => Adoption::Dead(exit),
            Ok(Stage::Created) => Adoption::Dead(Exit { status: crate::pause::UNKNOWN_EXIT, at: SystemTime::now() }),
            Err(e) => Adoption::Unknown(e.into()),
        }
    }

    /// After the exit: records it, removes the cgroup, unmounts the shared memory.
    ///
    /// # Errors
    /// Every step that failed.
    pub fn cleanup(&self, pid: u32, exit: Option<Exit>) -> Result<(), Vec<Step>> {
        let mut errors = Vec::new();
        if let Some(exit) = exit {
            errors.extend(self.store.set_stage(&Stage::Exited { pid, exit }).err());
        }
        errors.extend(self.driver.cleanup(&self.site).err().unwrap_or_default());
        errors.extend(self.places.release_shm().err().unwrap_or_default());
        if errors.is_empty() { Ok(()) } else { Err(errors) }
    }

    /// Removes all that is left: the pod's shim, cgroup, files and, when nothing else is left, the record.
    ///
    /// # Errors
    /// Every step that failed.
    pub fn remove(&self) -> Result<(), Vec<Step>> {
        let mut errors = Vec::new();
        // A shim that runs the pause as well must be rid of it before it ends.
        errors.extend(self.driver.cleanup(&self.site).err().unwrap_or_default());
        errors.extend(self.shim.end().err().unwrap_or_default());
        errors.extend(self.places.remove().err().unwrap_or_default());
        if errors.is_empty() {
            errors.extend(self.store.remove().err());
        }
        if errors.is_empty() { Ok(()) } else { Err(errors) }
    }
}
