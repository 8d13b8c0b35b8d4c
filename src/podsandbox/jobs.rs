//! The jobs of one sandbox: what they do to the system, step by step.
//!
//! Jobs are tasks. What of them blocks runs on threads in as few pieces as possible: each change of
//! threads costs as much as a step.

use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use tokio::task::JoinHandle;

use super::container_record::ContainerRecord;
use super::drivers::PauseDriver;
use super::environment::Environment;
use super::files::SandboxFiles;
use super::oci_spec::{self, Description};
use super::record::{Record, RecordStore, Stage};
use super::selinux::HeldLevel;
use crate::cgroup::CgroupRef;
use crate::error::{IoContext as _, StepError, StepErrors};
use crate::id::SandboxId;
use crate::log_context::{LogContext, PodNames};
use crate::pause::{Namespace, Plan};
use crate::pool::{self, Class};
use crate::process::{Adoption, Exit, Identity, Process};
use crate::protos::cri::PodSandboxConfig;
use crate::shim;
use crate::telemetry::Telemetry;

/// How long a killed pause may take to end before a start that has failed answers without it.
const ENDS_WITHIN: Duration = Duration::from_secs(10);

/// What is known of one sandbox from its record and never changes.
#[derive(Debug)]
pub struct Facts {
    /// The sandbox id, and what the driver must know to find the pause and to clean up after it.
    pub site: CgroupRef,
    /// The namespaces that the pod has for itself.
    pub own: Own,
    /// It has shared memory of its own.
    pub shm: bool,
    /// It is of the containerd namespace that is served.
    pub in_namespace: bool,
    /// SELinux label of its processes; empty where there is none.
    pub label: Box<str>,
    /// When Create was called.
    pub created_at: SystemTime,
    /// The runtime of its shim.
    pub runtime: Arc<shim::Runtime>,
}

/// A sandbox that is created and not started yet.
#[derive(Debug)]
pub struct ToStart {
    /// Its record.
    pub record: Record,
    /// The CRI config of the record, decoded.
    pub pod: PodSandboxConfig,
}

/// What the jobs of one sandbox work on. Its methods that are not async block.
#[derive(Debug)]
pub struct Jobs {
    environment: Arc<Environment>,
    driver: PauseDriver,
    /// What never changes.
    pub facts: Facts,
    /// Where the files are.
    pub files: SandboxFiles,
    /// Where the record is.
    pub store: RecordStore,
    /// The Task endpoint of the pod's containers.
    pub shim: shim::Endpoint,
    /// The sandbox as a container in containerd.
    pub container: ContainerRecord,
    /// The context of log lines about the sandbox.
    pub log_context: LogContext,
    /// What Start makes; dropped once it is made, as it is on disk.
    to_start: Mutex<Option<Arc<ToStart>>>,
    /// What Start answers beside, from when the pause is made until it is given away.
    description: Mutex<Option<Description>>,
    /// Keeps other pods from the level of this one.
    _level: Option<Box<HeldLevel>>,
    /// What recovery has begun for this sandbox and could not wait for. No job begins before it has
    /// ended.
    late: Mutex<Option<JoinHandle<()>>>,
}

/// A pause, and whether it is on record.
type StartedPause = (Arc<dyn Process>, Result<(), StepError>);

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
    pub fn from_plan(plan: &Plan) -> Self {
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
    pub left: StepErrors,
}

impl Jobs {
    /// The jobs of the sandbox of `record`; `pod` is its config, and `level` the one that it holds.
    pub fn new(
        environment: &Arc<Environment>,
        record: &Record,
        pod: PodNames,
        level: Option<HeldLevel>,
    ) -> Self {
        let Environment { layout, shims, config, .. } = &**environment;
        let runtime = shims.runtime(record.runtime());
        Self {
            driver: environment.drivers.of_record(&record.driver),
            files: SandboxFiles::new(layout, &record.id),
            store: RecordStore::new(layout, &record.id),
            shim: shims.endpoint(record.shim, &record.id, &runtime),
            facts: Facts {
                // The id of the record, which all that is here shares, not its equal in the plan.
                site: CgroupRef { id: record.id.clone(), ..record.plan.cgroup_ref() },
                own: Own::from_plan(&record.plan),
                shm: record.files.shm,
                in_namespace: record.is_in(&config.containerd_namespace),
                label: record.labels.process.as_str().into(),
                created_at: record.created_at,
                runtime,
            },
            container: ContainerRecord::default(),
            log_context: LogContext::new(record.id.clone(), pod),
            to_start: Mutex::default(),
            description: Mutex::default(),
            _level: level.map(Box::new),
            late: Mutex::default(),
            environment: environment.clone(),
        }
    }

    /// The sandbox id.
    pub fn id(&self) -> &SandboxId {
        &self.facts.site.id
    }

    /// The driver's name in config, record and metrics.
    pub fn driver_name(&self) -> &'static str {
        self.driver.name()
    }

    /// What all sandboxes share.
    pub(super) fn environment(&self) -> &Arc<Environment> {
        &self.environment
    }

    /// Counts what happens.
    pub fn telemetry(&self) -> &Telemetry {
        &self.environment.telemetry
    }

    /// Keeps what Start makes, so that it need not be read from the disk.
    pub fn keep(&self, created: ToStart) {
        *self.to_start.lock() = Some(Arc::new(created));
    }

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
        self.record_container();
        self.container_recorded().await;
        let (pause, recorded) = match &self.driver {
            PauseDriver::Native(driver) if self.shim.listens_only() => {
                let (_turn, driver) = (self.shim.turn().await, driver.clone());
                let make = move |jobs: &Self| {
                    let created = jobs.make_files()?;
                    jobs.shim.bind()?;
                    jobs.describe(&created)?;
                    Ok(jobs.recorded(driver.start(&created.record.plan)?))
                };
                self.piece(Class::Start, make).await.flatten()?
            }
            driver => self.start_behind_shim(driver.clone()).await?,
        };
        if let Err(step) = recorded {
            // No later daemon would find a pause without a record.
            self.kill_unheard(&pause).await;
            return Err(step);
        }
        *self.to_start.lock() = None;
        Ok(pause)
    }

    /// Makes files and pause where a shim is started first.
    async fn start_behind_shim(
        self: &Arc<Self>,
        driver: PauseDriver,
    ) -> Result<StartedPause, StepError> {
        let created = self.piece(Class::Start, Self::make_files).await.flatten()?;
        self.shim.listen().await?;
        let of = created.clone();
        self.piece(Class::Start, move |jobs| jobs.describe(&of)).await.flatten()?;
        let pause = match driver {
            PauseDriver::Native(driver) => self
                .piece(Class::Start, move |_| driver.start(&created.record.plan))
                .await
                .flatten()?,
            PauseDriver::Shim(driver) => driver.start(&created.record.plan).await?,
        };
        self.piece(Class::Start, move |jobs| jobs.recorded(pause)).await
    }

    /// Makes the files, and a sign of that before them; what is to be made.
    fn make_files(&self) -> Result<Arc<ToStart>, StepError> {
        self.environment.mounts.admit()?;
        self.files.begin()?;
        let created = self.created()?;
        self.files.make_all(&created.record.files, &created.record.labels.mount)?;
        Ok(created)
    }

    /// Records a pause.
    fn recorded(&self, pause: Box<dyn Process>) -> StartedPause {
        let recorded = self.store.set_stage(&Stage::Started { identity: pause.identity().clone() });
        (Arc::from(pause), recorded)
    }

    /// Runs what blocks on a thread for it.
    pub(super) async fn piece<T: Send + 'static>(
        self: &Arc<Self>,
        class: Class,
        piece: impl FnOnce(&Self) -> T + Send + 'static,
    ) -> Result<T, StepError> {
        let jobs = self.clone();
        pool::run(class, move || piece(&jobs)).await
    }

    /// The same, of steps that can fail each.
    async fn steps(
        self: &Arc<Self>,
        class: Class,
        piece: impl FnOnce(&Self) -> StepErrors + Send + 'static,
    ) -> StepErrors {
        self.piece(class, piece).await.unwrap_or_else(StepErrors::from)
    }

    /// Makes the spec, unless it is there.
    fn describe(&self, created: &ToStart) -> Result<(), StepError> {
        let mut description = self.description.lock();
        if description.is_none() {
            let Environment { layout, config, .. } = &*self.environment;
            let made = oci_spec::describe(&created.record, &created.pod, layout, config);
            *description = Some(made.map_err(io::Error::other).step("make the spec")?);
        }
        Ok(())
    }

    /// Describes the pause to a shim that will run it. Others need no description.
    ///
    /// # Errors
    /// The failed step.
    pub fn describe_to_shim(&self, created: &ToStart) -> Result<(), StepError> {
        if self.shim.listens_only() {
            return Ok(());
        }
        self.describe(created)?;
        let description = self.description.lock();
        let spec = description.as_ref().map_or(&[][..], |made| &made.spec);
        self.shim.describe(spec, &created.record.plan)
    }

    /// Lets the next job wait for what is still under way.
    pub fn wait_for(&self, late: Option<JoinHandle<()>>) {
        *self.late.lock() = late;
    }

    /// Waits for that.
    pub async fn begin(&self) {
        let late = self.late.lock().take();
        if let Some(late) = late {
            let _ = late.await;
            log::info!(sandbox = self.id().as_str(); "overdue recovery step finished");
        }
    }

    /// Spec and labels, once, after a start.
    pub fn give_description(&self) -> Option<Description> {
        self.description.lock().take()
    }

    /// What Start makes: what Create kept, or the record on disk.
    pub(super) fn created(&self) -> Result<Arc<ToStart>, StepError> {
        if let Some(created) = self.to_start.lock().clone() {
            return Ok(created);
        }
        let record = self.store.read_record()?;
        let pod = record.decode_config().map_err(io::Error::other).step("read record")?;
        Ok(Arc::new(ToStart { record, pod }))
    }

    /// Kills a pause that no caller knows of and waits for its exit.
    async fn kill_unheard(&self, pause: &Arc<dyn Process>) {
        let killed = match pause.kill() {
            Ok(()) if pause.may_be_frozen() => thaw(pause.clone()).await,
            other => other,
        };
        let ended = match killed {
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
            log::error!(sandbox = self.id().as_str();
                "failed to end the pause of a start that was given up: {step}");
        }
    }

    /// Removes what an older daemon has made ahead of a Start that never came. The sandbox stays
    /// created.
    ///
    /// # Errors
    /// Every step that failed; the removal of the sandbox repeats them.
    pub async fn clear(self: &Arc<Self>) -> Result<(), StepErrors> {
        let remove = |jobs: &Self, errors: &mut StepErrors| errors.check_all(jobs.files.remove());
        self.driver_cleanup_and(|_| {}, remove).await.into_result()
    }

    /// What `before` does, what the driver cleans up, and what `after` does: in one piece, if that
    /// waits for nothing.
    async fn driver_cleanup_and(
        self: &Arc<Self>,
        before: impl FnOnce(&Self) + Send + 'static,
        after: impl FnOnce(&Self, &mut StepErrors) + Send + 'static,
    ) -> StepErrors {
        match self.driver.clone() {
            PauseDriver::Native(driver) => {
                let all = move |jobs: &Self| {
                    let mut errors = StepErrors::default();
                    before(jobs);
                    errors.check_all(driver.cleanup(&jobs.facts.site));
                    after(jobs, &mut errors);
                    errors
                };
                self.steps(Class::End, all).await
            }
            PauseDriver::Shim(driver) => {
                let mut errors = StepErrors::default();
                errors.check(self.piece(Class::End, before).await);
                errors.check_all(driver.cleanup(&self.facts.site).await);
                let rest = move |jobs: &Self| {
                    after(jobs, &mut errors);
                    errors
                };
                self.steps(Class::End, rest).await
            }
        }
    }

    /// Restores deleted files; true when some were missing.
    ///
    /// # Errors
    /// Every step that failed.
    pub fn restore(&self) -> Result<bool, StepErrors> {
        self.files.restore(self.facts.shm, || Ok(self.store.read_record()?.files))
    }

    /// Asks the driver for the process that the record names.
    pub async fn adopt(self: &Arc<Self>) -> Adoption {
        match self.piece(Class::Recovery, |jobs| jobs.store.stage()).await {
            Ok(Ok(Stage::Started { identity })) => self.adopt_process(identity).await,
            Ok(Ok(Stage::Exited { exit, .. })) => Adoption::Dead(exit),
            Ok(Ok(Stage::Created)) => {
                Adoption::Dead(Exit { status: crate::process::UNKNOWN_EXIT, at: SystemTime::now() })
            }
            Ok(Err(e)) => Adoption::Unknown(e.into()),
            Err(panicked) => Adoption::Unknown(panicked),
        }
    }

    /// Asks the driver for a process.
    pub async fn adopt_process(self: &Arc<Self>, identity: Identity) -> Adoption {
        match self.driver.clone() {
            PauseDriver::Native(driver) => {
                let found = self
                    .piece(Class::Recovery, move |jobs| driver.adopt(&jobs.facts.site, &identity))
                    .await;
                found.unwrap_or_else(Adoption::Unknown)
            }
            PauseDriver::Shim(driver) => driver.adopt(&self.facts.site, &identity).await,
        }
    }

    /// After the exit: records it, removes the cgroup, unmounts the shared memory. An exit that
    /// cannot be recorded keeps nothing from being removed: a later daemon finds no such pause, and
    /// says that it has ended.
    ///
    /// # Errors
    /// Every step that failed.
    pub async fn cleanup(self: &Arc<Self>, pid: u32, exit: Option<Exit>) -> Result<(), StepErrors> {
        self.delete_task();
        let record = move |jobs: &Self| {
            let recorded = exit.map(|exit| jobs.store.set_stage(&Stage::Exited { pid, exit }));
            if let Some(Err(step)) = recorded {
                log::warn!(sandbox = jobs.id().as_str(); "failed to record exit: {step}");
            }
        };
        let release =
            |jobs: &Self, errors: &mut StepErrors| errors.check_all(jobs.files.release_shm());
        self.driver_cleanup_and(record, release).await.into_result()
    }

    /// Removes all that is left: the pod's shim, cgroup, files and, when nothing else is left, the
    /// record.
    ///
    /// # Errors
    /// Every step that failed.
    pub async fn remove(self: &Arc<Self>) -> Result<(), StepErrors> {
        // A shim that runs the pause as well must be rid of it before it ends.
        let mut errors = self.driver_cleanup_and(|_| {}, |_, _| {}).await;
        self.task_deleted().await;
        errors.check_all(self.shim.close().await);
        self.remove_container();
        let rest = move |jobs: &Self| {
            errors.check_all(jobs.files.remove());
            if errors.is_empty() {
                errors.check(jobs.store.remove());
            }
            errors
        };
        self.steps(Class::End, rest).await.into_result()
    }
}

/// Moves a killed pause out of a cgroup that holds it frozen.
///
/// # Errors
/// The failed step.
pub async fn thaw(pause: Arc<dyn Process>) -> Result<(), StepError> {
    pool::run(Class::End, move || pause.thaw()).await.flatten()
}
