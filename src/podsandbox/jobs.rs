//! The jobs of one sandbox: what they do to the system, step by step.
//!
//! Jobs are async tasks. Their blocking parts run on threads, in as few blocking tasks as possible:
//! each change of threads costs as much as a step.

use std::io;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;

use super::container_record::ContainerRecord;
use super::end_reason::EndReason;
use super::environment::Environment;
use super::files::SandboxFiles;
use super::oci_spec::{self, Description};
use super::record::{Record, RecordStore, Stage};
use super::selinux::HeldLevel;
use crate::cgroup::CgroupRef;
use crate::error::{IoContext as _, StepError, StepErrors};
use crate::id::SandboxId;
use crate::log_context::{LogContext, PodNames};
use crate::pause::{Driver, Namespace, Plan};
use crate::pool::{self, Class};
use crate::process::{Adoption, Exit, Identity, Process};
use crate::protos::cri::PodSandboxConfig;
use crate::shim;
use crate::telemetry::Telemetry;

/// How long a failed Start waits for the exit of the pause process that it killed.
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);

/// The facts in the record of a sandbox that never change.
#[derive(Debug)]
pub struct Facts {
    /// The sandbox id and the pause process's cgroup, by which the driver finds and removes it.
    pub cgroup_ref: CgroupRef,
    /// The namespaces that only the pod uses.
    pub private_namespaces: PrivateNamespaces,
    /// It has shared memory of its own.
    pub shm: bool,
    /// SELinux label of its processes; empty where there is none.
    pub label: Box<str>,
    /// When Create was called.
    pub created_at: SystemTime,
    /// The runtime of its shim.
    pub runtime: Arc<shim::Runtime>,
}

/// The data of a created sandbox that Start needs.
#[derive(Debug)]
pub struct StartInput {
    /// Its record.
    pub record: Record,
    /// The CRI config of the record, decoded.
    pub pod: PodSandboxConfig,
}

/// The objects that the jobs of one sandbox work on. Methods that are not async block.
#[derive(Debug)]
pub struct Jobs {
    environment: Arc<Environment>,
    /// The facts that never change.
    pub facts: Facts,
    /// Where the files are.
    pub files: SandboxFiles,
    /// Where the record is.
    pub store: RecordStore,
    /// The Task endpoint of the pod's containers.
    pub shim: Arc<shim::Endpoint>,
    /// The sandbox as a container in containerd.
    pub container: ContainerRecord,
    /// The context of log lines about the sandbox.
    pub log_context: LogContext,
    /// The input of Start; dropped after Start, because it is also on disk.
    start_input: Mutex<Option<Arc<StartInput>>>,
    /// OCI spec and labels for the response of Start, until it is sent.
    description: Mutex<Option<Description>>,
    /// Why the pause process ended.
    pub(super) end: OnceLock<EndReason>,
    /// Reserves the level of this pod.
    _level: Option<Box<HeldLevel>>,
}

/// A pause process, and whether it is on record.
type StartedPause = (Arc<dyn Process>, Result<(), StepError>);

/// Which namespaces only the pod uses.
#[derive(Clone, Copy, Debug)]
pub struct PrivateNamespaces {
    /// Network namespace.
    pub net: bool,
    /// IPC namespace.
    pub ipc: bool,
    /// UTS namespace.
    pub uts: bool,
}

impl PrivateNamespaces {
    /// The private namespaces of a plan.
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
    /// The steps that could not be undone; empty when nothing is left of the sandbox.
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
        let Environment { layout, shims, .. } = &**environment;
        let runtime = shims.runtime(record.runtime());
        Self {
            files: SandboxFiles::new(layout, &record.id),
            store: RecordStore::new(layout, &record.id),
            shim: shim::Endpoint::new(shims, &record.id, &runtime),
            facts: Facts {
                // The id of the record, which all that is here shares, not its equal in the plan.
                cgroup_ref: CgroupRef { id: record.id.clone(), ..record.plan.cgroup_ref() },
                private_namespaces: PrivateNamespaces::from_plan(&record.plan),
                shm: record.files.shm,
                label: record.labels.process.as_str().into(),
                created_at: record.created_at,
                runtime,
            },
            container: ContainerRecord::default(),
            log_context: LogContext::new(record.id.clone(), pod),
            start_input: Mutex::default(),
            description: Mutex::default(),
            end: OnceLock::new(),
            _level: level.map(Box::new),
            environment: environment.clone(),
        }
    }

    /// The sandbox id.
    pub fn id(&self) -> &SandboxId {
        &self.facts.cgroup_ref.id
    }

    fn driver(&self) -> &dyn Driver {
        &*self.environment.driver
    }

    /// The objects that all sandboxes share.
    pub(super) fn environment(&self) -> &Arc<Environment> {
        &self.environment
    }

    /// Counts what happens.
    pub fn telemetry(&self) -> &Telemetry {
        &self.environment.telemetry
    }

    /// Keeps the input of Start, so that it need not be read from the disk.
    pub fn keep_start_input(&self, input: StartInput) {
        *self.start_input.lock() = Some(Arc::new(input));
    }

    /// Makes the files and the pause process and records both.
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
        // An earlier daemon may have ended before its record, or Create's may have been given up.
        self.record_container();
        let (pause, recorded) = {
            // Until the pause process is recorded no caller launches the shim.
            let _launch = self.shim.lock_launch().await;
            self.run_blocking(Class::Start, Self::make_pause).await.flatten()?
        };
        if let Err(step) = recorded {
            // No later daemon would find a pause process without a record.
            self.kill_unrecorded(&pause).await;
            return Err(step);
        }
        *self.start_input.lock() = None;
        Ok(pause)
    }

    /// Makes the files, the socket and the pause process, and records the process. To be called
    /// with the launch lock of the shim held. What it has made is undone by [`Jobs::remove`].
    fn make_pause(&self) -> Result<StartedPause, StepError> {
        self.environment.mounts.admit()?;
        self.files.begin()?;
        let input = self.start_input()?;
        self.files.make_all(&input.record.files, &input.record.labels.mount)?;
        self.shim.bind()?;
        self.describe(&input)?;
        let pause = self.driver().start(&input.record.plan)?;
        let recorded = self.store.set_stage(&Stage::Started { identity: pause.identity().clone() });
        Ok((Arc::from(pause), recorded))
    }

    /// Runs a blocking task in the pool.
    pub(super) async fn run_blocking<T: Send + 'static>(
        self: &Arc<Self>,
        class: Class,
        task: impl FnOnce(&Self) -> T + Send + 'static,
    ) -> Result<T, StepError> {
        let jobs = self.clone();
        pool::run(class, move || task(&jobs)).await
    }

    /// Makes the spec and the labels for the answer of Start, unless they are there.
    fn describe(&self, input: &StartInput) -> Result<(), StepError> {
        let mut description = self.description.lock();
        if description.is_none() {
            *description = Some(self.make_description(input)?);
        }
        Ok(())
    }

    /// Spec and labels, for containerd's record. Before Start they are kept for its response.
    pub(super) fn description(&self, input: &StartInput) -> Result<Description, StepError> {
        let mut kept = self.description.lock();
        if let Some(made) = &*kept {
            return Ok(made.clone());
        }
        let made = self.make_description(input)?;
        // Looked at under the lock, so that nothing is kept after the response.
        if self.start_input.lock().is_some() {
            *kept = Some(made.clone());
        }
        Ok(made)
    }

    fn make_description(&self, input: &StartInput) -> Result<Description, StepError> {
        let Environment { layout, config, .. } = &*self.environment;
        let made = oci_spec::describe(&input.record, &input.pod, layout, config);
        made.map_err(io::Error::other).step("make the spec")
    }

    /// Spec and labels, once, after a start.
    pub fn give_description(&self) -> Option<Description> {
        self.description.lock().take()
    }

    /// The input of Start: what Create kept, or the record on disk.
    pub(super) fn start_input(&self) -> Result<Arc<StartInput>, StepError> {
        if let Some(input) = self.start_input.lock().clone() {
            return Ok(input);
        }
        let record = self.store.read_record()?;
        let pod = record.decode_config().map_err(io::Error::other).step("read record")?;
        Ok(Arc::new(StartInput { record, pod }))
    }

    /// Kills a pause process whose stage could not be recorded, and waits for its exit.
    async fn kill_unrecorded(&self, pause: &Arc<dyn Process>) {
        let killed = match pause.kill() {
            Ok(()) if pause.may_be_frozen() => thaw(pause.clone()).await,
            other => other,
        };
        let ended = match killed {
            Ok(()) => {
                let late = |_| io::Error::from(io::ErrorKind::TimedOut);
                tokio::time::timeout(EXIT_TIMEOUT, pause.exited())
                    .await
                    .map_err(late)
                    .step("wait for its end")
            }
            Err(kill) => Err(kill),
        };
        if let Err(step) = ended {
            log::error!(sandbox = self.id().as_str();
                "failed to kill pause process of a start that could not be recorded: {step}");
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
        match self.run_blocking(Class::Recovery, |jobs| jobs.store.stage()).await {
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
        let find = move |jobs: &Self| jobs.driver().adopt(&jobs.facts.cgroup_ref, &identity);
        self.run_blocking(Class::Recovery, find).await.unwrap_or_else(Adoption::Unknown)
    }

    /// After the exit: records it, removes the cgroup, unmounts the shared memory. If the exit
    /// cannot be recorded, the cleanup continues: a later daemon finds no such process and reports
    /// it as exited.
    ///
    /// # Errors
    /// Every step that failed.
    pub async fn cleanup(
        self: &Arc<Self>,
        pid: u32,
        exit: Option<Exit>,
        cause: Option<EndReason>,
    ) -> Result<(), StepErrors> {
        self.delete_task();
        let all = move |jobs: &Self| {
            let recorded = exit.map(|exit| {
                let reason = Some(jobs.ended(exit, cause));
                jobs.store.set_stage(&Stage::Exited { pid, exit, reason })
            });
            if let Some(Err(step)) = recorded {
                log::warn!(sandbox = jobs.id().as_str(); "failed to record exit: {step}");
            }
            let mut errors = StepErrors::default();
            errors.check_all(jobs.clean_up_pause());
            errors.check_all(jobs.files.release_shm());
            errors.into_result()
        };
        self.run_blocking(Class::End, all).await?
    }

    /// Keeps and reports, once, why the pause process ended: for `cause`, if that is known. Blocks
    /// otherwise.
    pub fn ended(&self, exit: Exit, cause: Option<EndReason>) -> EndReason {
        let mut is_new = false;
        let reason = *self.end.get_or_init(|| {
            is_new = true;
            EndReason::new(exit, cause, || self.driver().oom_killed(&self.facts.cgroup_ref))
        });
        if is_new {
            log::info!(
                sandbox = self.id().as_str(), status = exit.status, reason = reason.name();
                "sandbox stopped"
            );
            self.telemetry().pause_exited(reason.name());
        }
        reason
    }

    /// Why the sandbox ended, in words. A death of the shim has a record of its own.
    pub fn end_reason(&self, exit: Option<Exit>) -> Option<String> {
        let known = self.end.get().zip(exit).map(|(end, exit)| (*end, end.text(exit.status)));
        match known {
            None => self.shim.death(),
            Some((EndReason::ShimDied | EndReason::Unknown, text)) => {
                Some(self.shim.death().unwrap_or(text))
            }
            Some((_, text)) => Some(text),
        }
    }

    /// Removes all that is left: the pause process's cgroup, the pod's shim, files and, when
    /// nothing else is left, the record.
    ///
    /// # Errors
    /// Every step that failed.
    pub async fn remove(self: &Arc<Self>) -> Result<(), StepErrors> {
        let mut errors = StepErrors::default();
        let cleaned = self.run_blocking(Class::End, Self::clean_up_pause).await;
        errors.check_all(cleaned.unwrap_or_else(|panic| Err(panic.into())));
        self.task_deleted().await;
        errors.check_all(self.shim.close().await);
        self.remove_container();
        let rest = move |jobs: &Self| {
            errors.check_all(jobs.files.remove());
            if errors.is_empty() {
                errors.check(jobs.store.remove());
            }
            errors.into_result()
        };
        self.run_blocking(Class::End, rest).await?
    }

    /// Removes what outlives the pause process.
    fn clean_up_pause(&self) -> Result<(), StepErrors> {
        self.driver().cleanup(&self.facts.cgroup_ref)
    }
}

/// Moves a killed pause process out of a cgroup that holds it frozen.
///
/// # Errors
/// The failed step.
pub async fn thaw(pause: Arc<dyn Process>) -> Result<(), StepError> {
    pool::run(Class::End, move || pause.thaw()).await.flatten()
}
