//! One sandbox as the RPCs see it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use protobuf::well_known_types::any::Any;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::actor::{Actor, ActorHandle, Entry, Message, Published};
use super::environment::Environment;
use super::jobs::{Jobs, StartInput};
use super::machine::{Phase, Rpc};
use super::record::{Record, Stage};
use super::restore::FileRestorer;
use super::validate::{self, Validated};
use super::{
    CreateRequest, Error, Exit, Metric, SandboxInfo, StartResponse, StatusReport, metrics, status,
    summary,
};
use crate::error::StepError;
use crate::id::SandboxId;
use crate::log_context;
use crate::pool::{self, Class};
use crate::process::handle::{self, NamespaceHandle};
use crate::protos;
use crate::shim;

/// How long a caller of Stop or Shutdown waits for the end of a pause process and its cleanup
/// before it is answered that they continue without it.
pub const END_TIMEOUT: Duration = Duration::from_secs(60);

/// How long after the recovery Status waits while it is unknown whether the pause process lives.
/// containerd keeps an unknown state until its next start, and kubelet ends such a pod
/// (`restart.go` and `sandbox_status.go` of CRI). The time counts from the recovery, because
/// containerd asks for one sandbox after the other when it starts.
pub const UNKNOWN_TIMEOUT: Duration = Duration::from_secs(30);

/// How long after its start a sandbox is not looked at for files that containerd has deleted, which
/// it does when it comes up: CRI asks twice for the status before it answers RunPodSandbox, and no
/// containerd ends, comes up and asks in that time.
const NO_RESTORE_AFTER_START: Duration = Duration::from_millis(20);

/// `type_url` of the OCI runtime spec in Start's answer (containerd `typeurl` of `specs.Spec`).
const SPEC_TYPE: &str = "types.containerd.io/opencontainers/runtime-spec/1/Spec";

/// Key of the verbose information that says why the sandbox ended.
const REASON: &str = "reason";

/// The sandbox as its Task endpoint sees it.
struct PodOfEndpoint {
    jobs: Arc<Jobs>,
    actor: ActorHandle,
}

impl shim::Pod for PodOfEndpoint {
    fn namespaces(&self) -> Result<Vec<NamespaceHandle>, StepError> {
        let private = self.jobs.facts.private_namespaces;
        let private = [("net", private.net), ("ipc", private.ipc), ("uts", private.uts)];
        let kinds: Vec<&'static str> =
            private.into_iter().filter_map(|(kind, private)| private.then_some(kind)).collect();
        if self.actor.published().phase != Phase::Ready {
            return Ok(Vec::new());
        }
        // The namespaces of the process on record count, not those of another that has its pid now.
        match self.jobs.store.stage()? {
            Stage::Started { identity } => handle::namespaces(&identity, &kinds),
            Stage::Created | Stage::Exited { .. } => Ok(Vec::new()),
        }
    }

    fn cgroup_parent(&self) -> &str {
        &self.jobs.facts.cgroup_ref.cgroup_parent
    }

    fn lives(&self) -> bool {
        !matches!(self.actor.published().phase, Phase::NotReady | Phase::Gone)
    }

    fn on_shim_serving(&self) {
        if self.lives() {
            self.jobs.record_task();
        } else {
            // The cleanup after the exit of the pause process has found no shim.
            self.jobs.dismiss_shim();
        }
    }

    fn fail(&self) {
        // Without effect where the actor has ended.
        self.actor.send(Message::ShimDied);
    }
}

/// One sandbox.
#[derive(Debug)]
pub struct Sandbox {
    environment: Arc<Environment>,
    pub(super) jobs: Arc<Jobs>,
    actor: ActorHandle,
    /// Until then Status waits while the state is unknown.
    unknown_deadline: tokio::time::Instant,
    /// A caller has asked for status or exit, as CRI does right after Start.
    queried: AtomicBool,
    /// When this daemon started it.
    started: OnceLock<Instant>,
    restorer: Arc<FileRestorer>,
}

impl Sandbox {
    /// Checks a request and records the sandbox. `on_gone` is called with the id, to free it, when
    /// the sandbox is removed.
    ///
    /// # Errors
    /// [`Error::Invalid`], or the failed step; nothing is left then.
    pub async fn create(
        environment: Arc<Environment>,
        request: CreateRequest,
        on_gone: impl FnOnce(&str) + Send + 'static,
    ) -> Result<Self, Error> {
        let (shared, id) = (environment.clone(), request.id.clone());
        let failed =
            |step: StepError| Error::Failed { id: id.clone(), rpc: "create", steps: step.into() };
        let recorded = pool::run(Class::Start, move || Self::record(&shared, &request)).await;
        let jobs = recorded.map_err(failed)??;
        log::info!(sandbox = id.as_str(); "sandbox created");
        let sandbox = Self::enter(environment, jobs, Entry::Created, on_gone);
        sandbox.jobs.record_container();
        sandbox.jobs.shim.serve(sandbox.pod_of_endpoint());
        Ok(sandbox)
    }

    /// Checks a request and records the sandbox. Blocks.
    fn record(environment: &Arc<Environment>, request: &CreateRequest) -> Result<Arc<Jobs>, Error> {
        let failed = |step: StepError| Error::Failed {
            id: request.id.clone(),
            rpc: "create",
            steps: step.into(),
        };
        environment.mounts.admit().map_err(failed)?;
        let Validated { record, pod, level } = validate::check(
            request,
            &environment.config,
            &environment.selinux,
            environment.shims.has_own(),
        )?;
        let jobs = Jobs::new(environment, &record, summary::pod_names(&pod), level);
        jobs.container.set_new();
        jobs.store.create(&record).map_err(failed)?;
        jobs.keep_start_input(StartInput { record, pod });
        Ok(Arc::new(jobs))
    }

    /// A sandbox whose actor runs. Its endpoint is not served yet.
    pub(super) fn enter(
        environment: Arc<Environment>,
        jobs: Arc<Jobs>,
        entry: Entry,
        on_gone: impl FnOnce(&str) + Send + 'static,
    ) -> Self {
        let actor = Actor::spawn(jobs.clone(), entry, on_gone);
        Self {
            environment,
            restorer: Arc::new(FileRestorer::new(jobs.clone(), actor.clone())),
            jobs,
            actor,
            unknown_deadline: tokio::time::Instant::now() + UNKNOWN_TIMEOUT,
            queried: AtomicBool::new(false),
            started: OnceLock::new(),
        }
    }

    /// Serves the endpoint of a sandbox of an earlier daemon, as soon as its shim is found.
    /// `shim_died`: it is on record that the shim did with containers in it, and that daemon may
    /// have been killed before the sandbox failed.
    pub(super) fn serve_recovered(&self, recovery: Option<JoinHandle<()>>, shim_died: bool) {
        let pod = self.pod_of_endpoint();
        if shim_died {
            pod.fail();
        }
        let Some(recovery) = recovery else { return self.jobs.shim.serve(pod) };
        let jobs = self.jobs.clone();
        drop(tokio::spawn(async move {
            let _ = recovery.await;
            jobs.shim.serve(pod);
        }));
    }

    fn pod_of_endpoint(&self) -> Arc<dyn shim::Pod> {
        Arc::new(PodOfEndpoint { jobs: self.jobs.clone(), actor: self.actor.clone() })
    }

    /// Waits until the sandbox is removed.
    pub(super) async fn gone(&self) {
        self.actor.gone().await;
    }

    /// Waits until a new sandbox is recorded in containerd, or an attempt has failed: cAdvisor
    /// looks for that record once, when the pod's cgroup appears in Start.
    pub async fn container_recorded(&self) {
        self.jobs.container_recorded().await;
    }

    /// The sandbox id.
    pub fn id(&self) -> &str {
        self.shared_id()
    }

    /// The sandbox id as a shared string, for callers that store it.
    pub fn shared_id(&self) -> &SandboxId {
        self.jobs.id()
    }

    /// Its phase.
    pub fn phase(&self) -> Phase {
        self.published().phase
    }

    /// Creates files and the pause process. Runs to completion if the future is dropped; the
    /// sandbox is removed then, since its caller considers it failed.
    ///
    /// # Errors
    /// [`Error::State`] unless it was just created; else the failed step.
    pub async fn start(self: &Arc<Self>) -> Result<StartResponse, Error> {
        self.request(Rpc::Start, None).await?;
        let _ = self.started.set(Instant::now());
        let published = self.published();
        let (spec, mut labels) =
            self.jobs.give_description().map(|made| (made.spec, made.labels)).unzip();
        // Ours, whatever labels the pod has: containerd gives the second to the pod's containers.
        labels.get_or_insert_default().extend([
            ("oci_runtime_type".to_owned(), self.jobs.facts.runtime.name.clone()),
            ("selinux_label".to_owned(), self.jobs.facts.label.to_string()),
        ]);
        Ok(StartResponse {
            pid: published.pid,
            created_at: self.jobs.facts.created_at,
            labels: labels.unwrap_or_default(),
            address: self.jobs.shim.address(),
            version: shim::TASK_VERSION,
            spec: spec.map(|spec| Any {
                type_url: SPEC_TYPE.to_owned(),
                value: spec.into(),
                ..Default::default()
            }),
        })
    }

    /// Ends the pause process; answers when its exit is recorded and the shared memory is
    /// unmounted.
    ///
    /// # Errors
    /// The failed step, or [`Error::Timeout`]; what is left continues in the background.
    pub async fn stop(&self) -> Result<(), Error> {
        self.request(Rpc::Stop, Some(END_TIMEOUT)).await?;
        // The pod may have had containers when its pause process ended.
        self.jobs.dismiss_shim();
        Ok(())
    }

    /// Ends and removes the sandbox.
    ///
    /// # Errors
    /// The steps that failed, or [`Error::Timeout`].
    pub async fn shutdown(&self) -> Result<(), Error> {
        self.request(Rpc::Shutdown, Some(END_TIMEOUT)).await
    }

    /// Answers when the pause process has exited, before or after this call.
    ///
    /// # Errors
    /// [`Error::NotFound`] when the sandbox was removed without ever having had a pause process.
    pub fn wait(self: Arc<Self>) -> impl Future<Output = Result<Exit, Error>> + Send {
        self.queried.store(true, Ordering::Relaxed);
        async move {
            self.actor.exit().await.ok_or_else(|| match self.phase() {
                Phase::Gone => Error::NotFound { id: self.id().to_owned() },
                // Its actor has ended before it did; any other code would be mistaken for its exit.
                _ => Error::Stopping { id: self.id().to_owned() },
            })
        }
    }

    /// The published state. Waits up to 30 s after the recovery while it is unknown whether the
    /// pause process lives. Restores files that containerd has deleted, because CRI calls Status
    /// before every container; if that fails, the answer is the same, and it is retried.
    ///
    /// # Errors
    /// Verbose: the record cannot be read.
    pub async fn status(self: &Arc<Self>, verbose: bool) -> Result<StatusReport, Error> {
        self.queried.store(true, Ordering::Relaxed);
        if self.phase() == Phase::Unknown {
            self.actor.known(self.unknown_deadline).await;
        }
        let mut published = self.published();
        let fresh = self.started.get().is_some_and(|at| at.elapsed() < NO_RESTORE_AFTER_START);
        if published.phase == Phase::Ready && !fresh || verbose {
            let sandbox = self.clone();
            let info = pool::run(Class::Query, move || sandbox.restore_and_describe(verbose)).await;
            let info = info.map_err(|e| self.fault("status", e.to_string()))??;
            // It may have ended meanwhile.
            published = self.published();
            return Ok(self.report(published, info));
        }
        Ok(self.report(published, Default::default()))
    }

    fn restore_and_describe(
        self: &Arc<Self>,
        verbose: bool,
    ) -> Result<BTreeMap<String, String>, Error> {
        self.restorer.restore();
        if !verbose {
            return Ok(Default::default());
        }
        let published = self.published();
        let mut info = status::info(
            &self.read_record("status")?,
            &published,
            &self.environment.layout,
            &self.environment.config,
        )?;
        let reason = self.jobs.end_reason(published.exit);
        info.extend(reason.map(|reason| (REASON.to_owned(), reason)));
        Ok(info)
    }

    fn report(&self, published: Published, info: BTreeMap<String, String>) -> StatusReport {
        StatusReport {
            // The built-in controller does the same: CRI makes containers in the namespaces of this
            // process. The pid of an unknown pause process may belong to another process by now.
            pid: match (published.phase, published.exit) {
                (Phase::Unknown, _) | (_, Some(_)) => 0,
                (_, None) => published.pid,
            },
            state: status::state(published.phase),
            info,
            created_at: self.jobs.facts.created_at,
            exited_at: published.exit.map(|exit| exit.at),
            address: self.jobs.shim.address(),
            version: shim::TASK_VERSION,
        }
    }

    /// Stores what containerd changed: of `fields` only `extensions` and `labels` exist here, or a
    /// single one of them as `extensions.KEY`; without fields, both.
    ///
    /// # Errors
    /// [`Error::Invalid`] for any other field, or the failed step.
    pub async fn update(
        self: &Arc<Self>,
        info: SandboxInfo,
        fields: Vec<String>,
    ) -> Result<(), Error> {
        for field in &fields {
            if !matches!(field.split('.').next(), Some("extensions" | "labels")) {
                let (id, reason) = (self.id().to_owned(), format!("{field:?} cannot be updated"));
                return Err(Error::Invalid { id, field: "fields".to_owned(), reason });
            }
        }
        let sandbox = self.clone();
        let fields = if fields.is_empty() {
            vec!["extensions".to_owned(), "labels".to_owned()]
        } else {
            fields
        };
        let change = move || {
            sandbox
                .jobs
                .store
                .change(|record| fields.iter().for_each(|field| record.info.update(&info, field)))
        };
        let changed = pool::run(Class::Query, change).await;
        changed
            .map_err(|e| self.fault("update", e.to_string()))?
            .map_err(|step| self.failed("update", step))
    }

    /// Metrics of the pod's parent cgroup.
    ///
    /// # Errors
    /// The failed step.
    pub async fn metrics(self: &Arc<Self>) -> Result<Metric, Error> {
        let sandbox = self.clone();
        let read = pool::run(Class::Query, move || {
            metrics::read_metrics(&sandbox.jobs.facts.cgroup_ref.cgroup_parent)
        })
        .await;
        read.map_err(|e| self.fault("metrics", e.to_string()))?
            .map_err(|step| self.failed("metrics", step))
    }

    /// Its line in the list of sandboxes. Blocks.
    pub fn summary(&self) -> protos::inspect::Sandbox {
        summary::summarize(&self.jobs, self.published())
    }

    /// Cleanups that have failed in a row.
    pub fn failed_cleanups(&self) -> u32 {
        self.published().failures
    }

    /// Memory that the pod's shim has for itself, bytes; `None`: it has none, or it cannot be read.
    /// Blocks.
    pub fn shim_memory(&self) -> Option<u64> {
        summary::shim_memory(&self.jobs)
    }

    /// Whether garbage collection asks containerd for the sandbox: it was never started, or no
    /// start or removal runs, its pod has no shim, and no Status or Wait call has reached this
    /// daemon.
    pub fn is_gc_candidate(&self) -> bool {
        match self.phase() {
            Phase::Created => true,
            Phase::Ready | Phase::NotReady => {
                !self.queried.load(Ordering::Relaxed) && !self.jobs.shim.has_shim()
            }
            Phase::Starting | Phase::Unknown | Phase::Gone => false,
        }
    }

    /// The time since Create; zero if the clock was set back.
    pub fn age(&self) -> Duration {
        self.jobs.facts.created_at.elapsed().unwrap_or_default()
    }

    /// Returns when nothing of the sandbox is in progress.
    pub async fn idle(&self) {
        let (reply, idle) = oneshot::channel();
        if self.actor.send(Message::WhenIdle(reply)) {
            // An actor that has ended drops the sender; it is idle as well.
            let _ = idle.await;
        }
    }

    /// The Task endpoint of the pod's containers.
    pub fn endpoint(&self) -> &Arc<shim::Endpoint> {
        &self.jobs.shim
    }

    /// containerd creates a container of the pod: launches its shim before the first call.
    ///
    /// # Errors
    /// No shim comes: the failed step.
    pub async fn prepare(&self) -> Result<(), Error> {
        if self.phase() != Phase::Ready {
            return Ok(());
        }
        self.jobs.shim.prepare().await.map_err(|step| self.failed("platform", step))
    }

    async fn request(&self, rpc: Rpc, within: Option<Duration>) -> Result<(), Error> {
        let (reply, answer) = oneshot::channel();
        // A call that arrives while the actor ends finds a sandbox that is gone.
        let gone = || match (self.phase(), rpc) {
            (Phase::Gone, Rpc::Start) => Err(Error::NotFound { id: self.id().to_owned() }),
            (Phase::Gone, Rpc::Stop | Rpc::Shutdown) => Ok(()),
            // It ended before its sandbox did: the pause process may live.
            _ => Err(self.fault(rpc.name(), "its actor has ended".to_owned())),
        };
        if !self.actor.send(Message::Ask(rpc, log_context::current(), reply)) {
            return gone();
        }
        let answered = match within {
            None => answer.await,
            Some(limit) => match tokio::time::timeout(limit, answer).await {
                Ok(answered) => answered,
                Err(_) => {
                    let (id, seconds) = (self.id().to_owned(), limit.as_secs());
                    return Err(Error::Timeout { id, rpc: rpc.name(), seconds });
                }
            },
        };
        answered.unwrap_or_else(|_| gone())
    }

    fn published(&self) -> Published {
        self.actor.published()
    }

    fn read_record(&self, rpc: &'static str) -> Result<Record, Error> {
        self.jobs.store.read_record().map_err(|e| self.failed(rpc, e.into()))
    }

    fn failed(&self, rpc: &'static str, step: StepError) -> Error {
        Error::Failed { id: self.id().to_owned(), rpc, steps: step.into() }
    }

    fn fault(&self, rpc: &'static str, reason: String) -> Error {
        Error::Fault { id: self.id().to_owned(), rpc, reason }
    }
}
