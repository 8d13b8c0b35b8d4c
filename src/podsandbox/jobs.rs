//! The work of one sandbox: what its jobs do to the system, step by step.
//!
//! Jobs are tasks. What of them blocks runs as pieces, as few as can be: each change of threads
//! costs as much as a step.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use tokio::task::JoinHandle;

use super::files::SandboxFiles;
use super::oci_spec::{self, Description};
use super::record::{Record, Stage, Store};
use super::selinux::Level;
use crate::cgroup::CgroupRef;
use crate::config::Config;
use crate::error::{IoContext as _, StepError};
use crate::log_context::LogContext;
use crate::mounts::Mounts;
use crate::pause::{Driver, Namespace, Plan};
use crate::pool::{self, Class};
use crate::process::{Adoption, Exit, Identity, Process};
use crate::shim;
use crate::shim::driver::ShimDriver;
use crate::telemetry::Telemetry;

/// How long a killed pause may take to end before a start that has failed answers without it.
const ENDS_WITHIN: Duration = Duration::from_secs(10);

/// What the jobs of one sandbox work on. Its methods that are no tasks block.
#[derive(Debug)]
pub struct Work {
    /// Makes and cleans up the pause.
    pub driver: Maker,
    /// What the driver must know to look for the pause and to clean up after it.
    pub site: CgroupRef,
    /// The namespaces that the pod has for itself.
    pub own: Own,
    /// It has shared memory of its own.
    pub shm: bool,
    /// It is of the containerd namespace that is served.
    pub in_namespace: bool,
    /// SELinux label of its processes; empty where there is none.
    pub label: Box<str>,
    /// What is to be made; away as soon as it is made, as it is needed no longer then and is on
    /// disk.
    pub to_make: Mutex<Option<Arc<Record>>>,
    /// Settings, for the spec.
    pub config: Arc<Config>,
    /// What Start answers beside, from when the pause is made until it is given away.
    pub description: Mutex<Option<Description>>,
    /// Keeps other pods from the level of these.
    pub _level: Option<Box<Level>>,
    /// Where the files are.
    pub places: SandboxFiles,
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
    pub subject: LogContext,
    /// Counts what happens.
    pub telemetry: Arc<Telemetry>,
    /// What recovery has begun for this sandbox and could not wait for. No job begins before it has
    /// ended.
    pub late: Mutex<Option<JoinHandle<()>>>,
}

/// Who makes the pauses.
#[derive(Clone, Debug)]
pub enum Maker {
    /// This program; its calls block.
    Native(Arc<dyn Driver>),
    /// The pods' shims, which answer when they like.
    Shim(Arc<ShimDriver>),
}

impl Maker {
    /// The driver's name in config, record and metrics.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Native(driver) => driver.name(),
            Self::Shim(_) => shim::driver::NAME,
        }
    }
}

/// A pause, and whether it is on record.
type Made = (Arc<dyn Process>, Result<(), StepError>);

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
    pub step: StepError,
    /// What could not be undone; empty when nothing is left of the sandbox.
    pub left: Vec<StepError>,
}

impl Work {
    /// Makes files and pause and records them.
    ///
    /// # Errors
    /// The failed step. All is undone then, the record included.
    pub async fn start(self: &Arc<Self>) -> Result<Arc<dyn Process>, StartFailure> {
        match self.try_start().await {
            Ok(pause) => Ok(pause),
            Err(step) => {
                Err(StartFailure { step, left: self.remove().await.err().unwrap_or_default() })
            }
        }
    }

    async fn try_start(self: &Arc<Self>) -> Result<Arc<dyn Process>, StepError> {
        let (pause, recorded) = match &self.driver {
            Maker::Native(driver) if self.shim.listens_only() => {
                let (_turn, driver) = (self.shim.turn().await, driver.clone());
                let make = move |work: &Self| {
                    let record = work.make_files()?;
                    work.shim.bind()?;
                    work.describe(&record)?;
                    Ok(work.recorded(driver.start(&record.plan)?))
                };
                self.piece(Class::Start, make).await.flatten()?
            }
            driver => self.start_behind_shim(driver.clone()).await?,
        };
        if let Err(step) = recorded {
            // A pause without a record would outlive everybody who knows of it.
            self.end(&*pause).await;
            return Err(step);
        }
        *self.record() = None;
        Ok(pause)
    }

    /// Makes files and pause where a shim is started first.
    async fn start_behind_shim(self: &Arc<Self>, driver: Maker) -> Result<Made, StepError> {
        let record = self.piece(Class::Start, Self::make_files).await.flatten()?;
        self.shim.listen().await?;
        let of = record.clone();
        self.piece(Class::Start, move |work| work.describe(&of)).await.flatten()?;
        let pause = match driver {
            Maker::Native(driver) => {
                self.piece(Class::Start, move |_| driver.start(&record.plan)).await.flatten()?
            }
            Maker::Shim(driver) => driver.start(&record.plan).await?,
        };
        self.piece(Class::Start, move |work| work.recorded(pause)).await
    }

    /// Makes the files, and a sign of that before them; what is to be made.
    fn make_files(&self) -> Result<Arc<Record>, StepError> {
        self.mounts.admit()?;
        self.places.begin()?;
        let record = self.to_make()?;
        self.places.make(&record.files, &record.labels.mount)?;
        Ok(record)
    }

    /// Records a pause.
    fn recorded(&self, pause: Box<dyn Process>) -> Made {
        let recorded = self.store.set_stage(&Stage::Started { identity: pause.identity().clone() });
        (Arc::from(pause), recorded)
    }

    /// Runs what blocks on a thread for it.
    async fn piece<T: Send + 'static>(
        self: &Arc<Self>,
        class: Class,
        piece: impl FnOnce(&Self) -> T + Send + 'static,
    ) -> Result<T, StepError> {
        let work = self.clone();
        pool::run(class, move || piece(&work)).await
    }

    /// The same, of steps that can fail each.
    async fn steps(
        self: &Arc<Self>,
        class: Class,
        piece: impl FnOnce(&Self) -> Vec<StepError> + Send + 'static,
    ) -> Vec<StepError> {
        self.piece(class, piece).await.unwrap_or_else(|panicked| vec![panicked])
    }

    /// Makes the spec, unless it is there.
    fn describe(&self, record: &Record) -> Result<(), StepError> {
        let mut description = self.description();
        if description.is_none() {
            let made = oci_spec::description(record, &self.config)
                .map_err(io::Error::other)
                .step("make the spec")?;
            *description = Some(made);
        }
        Ok(())
    }

    /// Tells a shim that will run the pause what it is. Of others nothing is told.
    ///
    /// # Errors
    /// The failed step.
    pub fn describe_to_shim(&self, record: &Record) -> Result<(), StepError> {
        if self.shim.listens_only() {
            return Ok(());
        }
        self.describe(record)?;
        self.shim.describe(self.description().as_ref().map_or(&[], |made| &made.spec), &record.plan)
    }

    /// Lets the next job wait for what is still under way.
    pub fn wait_for(&self, late: Option<JoinHandle<()>>) {
        *self.late.lock().unwrap_or_else(PoisonError::into_inner) = late;
    }

    /// Waits for that.
    pub async fn begin(&self) {
        let late = self.late.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(late) = late {
            let _ = late.await;
            log::info!(sandbox = self.site.id.as_str(); "a late step of recovery has ended");
        }
    }

    /// Spec and labels, once, after a start.
    pub fn give_description(&self) -> Option<Description> {
        self.description().take()
    }

    fn description(&self) -> MutexGuard<'_, Option<Description>> {
        self.description.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is to be made: what was created, or where that is away already the record.
    fn to_make(&self) -> Result<Arc<Record>, StepError> {
        let created = self.record().clone();
        created.map_or_else(|| Ok(Arc::new(self.store.read()?)), Ok)
    }

    fn record(&self) -> MutexGuard<'_, Option<Arc<Record>>> {
        self.to_make.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Kills a pause that nobody has heard of and waits for its end.
    async fn end(&self, pause: &dyn Process) {
        let ended = match pause.kill() {
            Ok(()) => {
                let late = |_| io::Error::from(io::ErrorKind::TimedOut);
                tokio::time::timeout(ENDS_WITHIN, pause.exited())
                    .await
                    .map_err(late)
                    .step("wait for its end")
            }
            Err(kill) => Err(kill),
        };
        if let Err(step) = ended {
            log::error!(sandbox = self.site.id.as_str(); "start: undo: {step}");
        }
    }

    /// Removes what an older daemon has made ahead of a Start that never came. The sandbox stays
    /// created.
    ///
    /// # Errors
    /// Every step that failed; the removal of the sandbox does them again.
    pub async fn clear(self: &Arc<Self>) -> Result<(), Vec<StepError>> {
        let release = |work: &Self| work.places.remove().err().unwrap_or_default();
        result(self.driver_cleanup_and(|_| Vec::new(), release).await)
    }

    /// What `before` does, what the driver cleans up, and what `after` does: in one piece, if that
    /// waits for nothing.
    async fn driver_cleanup_and(
        self: &Arc<Self>,
        before: impl FnOnce(&Self) -> Vec<StepError> + Send + 'static,
        after: impl FnOnce(&Self) -> Vec<StepError> + Send + 'static,
    ) -> Vec<StepError> {
        match self.driver.clone() {
            Maker::Native(driver) => {
                let all = move |work: &Self| {
                    let mut errors = before(work);
                    errors.extend(driver.cleanup(&work.site).err().unwrap_or_default());
                    errors.extend(after(work));
                    errors
                };
                self.steps(Class::End, all).await
            }
            Maker::Shim(driver) => {
                let mut errors = self.steps(Class::End, before).await;
                errors.extend(driver.cleanup(&self.site).await.err().unwrap_or_default());
                errors.extend(self.steps(Class::End, after).await);
                errors
            }
        }
    }

    /// Puts files back that are gone; true when some were.
    ///
    /// # Errors
    /// Every step that failed.
    pub fn restore(&self) -> Result<bool, Vec<StepError>> {
        self.places.restore(self.shm, || Ok(self.store.read()?.files))
    }

    /// Asks the driver for the process that the record names.
    pub async fn adopt(self: &Arc<Self>) -> Adoption {
        match self.piece(Class::Recovery, |work| work.store.stage()).await {
            Ok(Ok(Stage::Started { identity })) => self.find(identity).await,
            Ok(Ok(Stage::Exited { exit, .. })) => Adoption::Dead(exit),
            Ok(Ok(Stage::Created)) => {
                Adoption::Dead(Exit { status: crate::process::UNKNOWN_EXIT, at: SystemTime::now() })
            }
            Ok(Err(e)) => Adoption::Unknown(e.into()),
            Err(panicked) => Adoption::Unknown(panicked),
        }
    }

    /// Asks the driver for a process.
    pub async fn find(self: &Arc<Self>, identity: Identity) -> Adoption {
        match self.driver.clone() {
            Maker::Native(driver) => {
                let found = self
                    .piece(Class::Recovery, move |work| driver.adopt(&work.site, &identity))
                    .await;
                found.unwrap_or_else(Adoption::Unknown)
            }
            Maker::Shim(driver) => driver.adopt(&self.site, &identity).await,
        }
    }

    /// After the exit: records it, removes the cgroup, unmounts the shared memory. An exit that
    /// cannot be recorded keeps nothing from being removed: a later daemon finds no such pause, and
    /// says that it has ended.
    ///
    /// # Errors
    /// Every step that failed.
    pub async fn cleanup(
        self: &Arc<Self>,
        pid: u32,
        exit: Option<Exit>,
    ) -> Result<(), Vec<StepError>> {
        let record = move |work: &Self| {
            let recorded = exit.map(|exit| work.store.set_stage(&Stage::Exited { pid, exit }));
            if let Some(Err(step)) = recorded {
                log::warn!(sandbox = work.site.id.as_str(); "its exit is not recorded: {step}");
            }
            Vec::new()
        };
        let release = |work: &Self| work.places.release_shm().err().unwrap_or_default();
        result(self.driver_cleanup_and(record, release).await)
    }

    /// Removes all that is left: the pod's shim, cgroup, files and, when nothing else is left, the
    /// record.
    ///
    /// # Errors
    /// Every step that failed.
    pub async fn remove(self: &Arc<Self>) -> Result<(), Vec<StepError>> {
        // A shim that runs the pause as well must be rid of it before it ends.
        let mut errors = self.driver_cleanup_and(|_| Vec::new(), |_| Vec::new()).await;
        errors.extend(self.shim.end().await.err().unwrap_or_default());
        let rest = move |work: &Self| {
            errors.extend(work.places.remove().err().unwrap_or_default());
            if errors.is_empty() {
                errors.extend(work.store.remove().err());
            }
            errors
        };
        result(self.steps(Class::End, rest).await)
    }
}

fn result(errors: Vec<StepError>) -> Result<(), Vec<StepError>> {
    if errors.is_empty() { Ok(()) } else { Err(errors) }
}
