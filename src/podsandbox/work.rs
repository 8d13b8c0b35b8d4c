//! The blocking work of one sandbox: what its jobs do to the system, step by step.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use futures::FutureExt as _;

use super::beside::Beside;
use super::files::Places;
use super::record::{Record, Stage, Store};
use super::selinux::Level;
use super::spec;
use crate::config::Config;
use crate::error::{IoContext as _, Step};
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
    /// What was made ahead of Start. Held while it is made or taken back.
    pub ahead: Mutex<Ahead>,
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

/// What of a start was done ahead of it.
#[derive(Debug, Default)]
pub enum Ahead {
    /// Nothing yet.
    #[default]
    Open,
    /// Files and pause.
    Made(Arc<dyn Pause>),
    /// Nothing, and nothing will be.
    Closed,
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
    /// Makes files and pause ahead of Start, which containerd calls when it has taken Create's answer and looked for the pause image.
    /// Nobody sees them before. What fails is undone, and Start tries again and says what is wrong.
    pub fn go_ahead(self: &Arc<Self>) {
        let mut ahead = self.ahead();
        if !matches!(*ahead, Ahead::Open) || !self.shim.listens_only() || !self.driver.may_go_ahead(&self.site) {
            return;
        }
        *ahead = match self.places.begin_ahead().and_then(|()| self.make()) {
            Ok(pause) => Ahead::Made(pause),
            Err(step) => {
                log::debug!(sandbox = self.site.id.as_str(); "ahead of start: {step}");
                self.clear();
                Ahead::Closed
            }
        };
    }

    /// Takes back what was made ahead, where no Start has come: also an empty cgroup keeps its parent, the pod's, from being removed.
    pub fn take_back(&self) {
        let mut ahead = self.ahead();
        if let Ahead::Made(pause) = std::mem::replace(&mut *ahead, Ahead::Closed) {
            self.end(&*pause);
            self.clear();
        }
    }

    /// Makes files and pause, unless that was done ahead, and records them.
    ///
    /// # Errors
    /// The failed step. All is undone then, the record included.
    pub fn start(self: &Arc<Self>) -> Result<Arc<dyn Pause>, StartFailure> {
        self.try_start().map_err(|step| StartFailure { step, left: self.remove().err().unwrap_or_default() })
    }

    fn try_start(self: &Arc<Self>) -> Result<Arc<dyn Pause>, Step> {
        let mut ahead = self.ahead();
        let pause = match std::mem::replace(&mut *ahead, Ahead::Closed) {
            Ahead::Made(pause) if pause.exited().now_or_never().is_none() => pause,
            made => {
                // Somebody has killed it.
                if let Ahead::Made(_) = made {
                    self.clear();
                }
                self.places.begin()?;
                self.make()?
            }
        };
        drop(ahead);
        let stage = Stage::Started { identity: pause.identity().clone() };
        if let Err(step) = self.places.end_ahead().and_then(|()| self.store.set_stage(&stage)) {
            // A pause without a record would outlive everybody who knows of it.
            self.end(&*pause);
            return Err(step);
        }
        Ok(pause)
    }

    /// Makes files, Task endpoint, spec and pause. What is left of a failure is to be removed.
    fn make(self: &Arc<Self>) -> Result<Arc<dyn Pause>, Step> {
        let record = self.to_make()?;
        let (work, of) = (Arc::clone(self), Arc::clone(&record));
        let make = move || {
            work.places.make(&of.files, &of.labels.mount)?;
            work.shim.listen()?;
            work.describe(&of)
        };
        let (started, made) = if self.driver.stands_alone() {
            // On a disk the files take about as long as the pause.
            let files = Beside::offer(make);
            (self.driver.start(&record.plan), files.finish())
        } else {
            make()?;
            (self.driver.start(&record.plan), Ok(()))
        };
        let pause: Arc<dyn Pause> = Arc::from(started?);
        if let Err(step) = made {
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

    /// Removes what an earlier daemon has made ahead. A Start that comes meanwhile waits for it.
    pub fn recover_created(&self) {
        let _ahead = self.ahead();
        self.clear();
    }

    /// Removes the cgroup and the files of a sandbox that stays created. Its endpoint stays. Called with `ahead` locked.
    fn clear(&self) {
        let cgroup = self.driver.cleanup(&self.site).err().unwrap_or_default();
        let files = self.places.remove().err().unwrap_or_default();
        for left in cgroup.iter().chain(&files) {
            log::warn!(sandbox = self.site.id.as_str(); "undo what was made ahead: {left}");
        }
    }

    fn ahead(&self) -> MutexGuard<'_, Ahead> {
        self.ahead.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts files back that are gone; true when some were.
    ///
    /// # Errors
    /// The failed step.
    pub fn mend(&self) -> Result<bool, Step> {
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
        if let Ahead::Made(pause) = std::mem::replace(&mut *self.ahead(), Ahead::Closed) {
            self.end(&*pause);
        }
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
