//! The driver that has the pod's shim run the pause process: for runtimes that must own the
//! sandbox, such as gVisor and Kata, and for operators who want the OCI runtime to run it.
//!
//! The shim's endpoint (`self_started.rs`) is there before the pause process and after it; here is
//! the pause process's own life as a task of it, by the same calls as of containerd's built-in
//! controller.

use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use containerd_shim_protos::api::{
    CreateTaskRequest, CreateTaskResponse, DeleteRequest, DeleteResponse, Empty, KillRequest,
    StartRequest, StartResponse, StateRequest, StateResponse, Status, WaitRequest, WaitResponse,
};
use protobuf::MessageField;
use protobuf::well_known_types::any::Any;
use protobuf::well_known_types::timestamp::Timestamp;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, timeout};

use super::Shims;
use super::self_started::SelfStarted;
use super::task::{TaskError, Tasks};
use crate::cgroup::CgroupRef;
use crate::error::{IoContext as _, StepError};
use crate::pause::Plan;
use crate::process::{Adoption, Exit, Identity, Process, UNKNOWN_EXIT};
use futures::future::BoxFuture;

/// The driver's name in settings, records and metrics.
pub const NAME: &str = "shim";

/// How long a call may take that the built-in controller bounds (`handleEventTimeout`,
/// `loadContainerTimeout`).
const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// How long recovery may look for a pause process: less than it gives a record in all.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(8);

/// How long the runtime may take to make or start the pause process: less than kubelet waits for a
/// pod.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// Delay between two tries of what must succeed in the end.
const RETRY_DELAY: Duration = Duration::from_millis(500);

/// Delays between the tries of a deletion that a shim refuses: Stop answers with what is left of
/// the sandbox, and is not repeated soon.
const DELETION_DELAYS: [Duration; 5] = [
    Duration::from_millis(100),
    Duration::from_millis(300),
    Duration::from_secs(1),
    Duration::from_secs(2),
    Duration::from_secs(4),
];

/// Maximum delay between two `Wait` calls after a lost connection.
const MAX_WAIT_RETRY_DELAY: Duration = Duration::from_secs(30);

/// How many calls to kill the pause process a shim may leave unanswered.
const MAX_UNANSWERED: u32 = 2;

/// How many calls to kill the pause process a shim may refuse: more, because it answers.
const MAX_REFUSED: u32 = 20;

/// Runtimes whose containers are plain processes of the node, by the part of the name that says
/// which: `io.containerd.NAME.VERSION`.
const HOST_PROCESSES: [&str; 3] = ["runc", "crun", "youki"];

/// Whether the runtime of that name, or the shim at that path, runs plain processes of the node, so
/// that the native driver's namespaces are of use to its containers.
pub fn is_of_host_processes(runtime: &str) -> bool {
    let file = runtime.rsplit('/').next().unwrap_or_default();
    let mut parts = match file.strip_prefix("containerd-shim-") {
        Some(name) => name.rsplit('-').skip(1).collect::<Vec<_>>(),
        None => file.rsplit('.').skip(1).collect(),
    };
    parts.truncate(1);
    parts.first().is_some_and(|kind| HOST_PROCESSES.contains(kind))
}

/// Runs pause processes as tasks of their pods' shims.
#[derive(Debug)]
pub struct ShimDriver {
    shims: Arc<Shims>,
}

impl ShimDriver {
    /// The driver of these endpoints.
    pub fn new(shims: Arc<Shims>) -> Self {
        Self { shims }
    }

    fn endpoint(&self, id: &str) -> Result<Arc<SelfStarted>, StepError> {
        let none = || io::Error::new(io::ErrorKind::NotFound, "it has no endpoint");
        self.shims.that_runs_pause(id).ok_or_else(none).step("find the shim of the sandbox")
    }

    async fn create(&self, endpoint: &Arc<SelfStarted>) -> Result<(Tasks, u32), StepError> {
        let shim = endpoint.shim();
        let tasks = endpoint.tasks().await.map_err(TaskError::step)?;
        let options = shim.runtime().options.as_ref().map(|(type_url, value)| Any {
            type_url: type_url.clone(),
            value: value.clone(),
            ..Default::default()
        });
        let request = CreateTaskRequest {
            id: shim.id().to_owned(),
            bundle: shim.bundle().dir().display().to_string(),
            options: MessageField(options.map(Box::new)),
            ..Default::default()
        };
        let created: CreateTaskResponse = tasks
            .call("create pause process", "Create", &request, Some(START_TIMEOUT))
            .await
            .map_err(TaskError::step)?;
        Ok((tasks, created.pid))
    }

    /// Makes and starts the pause process.
    async fn run(&self, endpoint: &Arc<SelfStarted>) -> Result<Task, StepError> {
        let (tasks, created) = self.create(endpoint).await?;
        let id = endpoint.id();
        let task = async {
            let launcher = &endpoint.shim().shims().launcher;
            let missing =
                || io::Error::other(format!("the shim reported pid {created}, which does not run"));
            let process = launcher.open(created)?.ok_or_else(missing).step("find pause process")?;
            if endpoint
                .process()
                .is_some_and(|shim| process.identity().start_time < shim.identity().start_time)
            {
                let older = format!("the shim reported pid {created}, which started before it");
                return Err(io::Error::other(older)).step("find pause process");
            }
            // The wait is armed before the start.
            let task = Task::watch(endpoint.clone(), process.identity().clone());
            let request = StartRequest { id: id.to_owned(), ..Default::default() };
            let started: StartResponse = tasks
                .call("start pause process", "Start", &request, Some(START_TIMEOUT))
                .await
                .map_err(TaskError::step)?;
            if started.pid != created {
                let other = io::Error::other(format!(
                    "Create returned pid {created}, but Start returned {}",
                    started.pid
                ));
                return Err(other).step("start pause process");
            }
            Ok(task)
        };
        match task.await {
            Ok(task) => Ok(task),
            Err(step) => {
                if let Err(left) = delete(endpoint, &tasks).await {
                    log::warn!(sandbox = id; "failed to undo start of pause process: {left}");
                }
                Err(step)
            }
        }
    }

    /// Adopts the task as containerd does after its restart (`RecoverContainer`).
    async fn recover_pause(
        &self,
        endpoint: &Arc<SelfStarted>,
        identity: &Identity,
    ) -> Result<Adoption, StepError> {
        let dead = |status| Adoption::Dead(Exit { status, at: SystemTime::now() });
        endpoint.try_recover().await?;
        if endpoint.process().is_none() {
            // Of the task of a dead shim only its runtime's leftovers are there.
            return endpoint.delete_pause().await.map(|()| dead(UNKNOWN_EXIT));
        }
        let tasks = endpoint.tasks().await.map_err(TaskError::step)?;
        let request = StateRequest { id: endpoint.id().to_owned(), ..Default::default() };
        let state: StateResponse = match tasks
            .call("query state of pause process", "State", &request, Some(CALL_TIMEOUT))
            .await
        {
            Ok(state) => state,
            Err(TaskError::NotFound(_)) => return Ok(dead(UNKNOWN_EXIT)),
            Err(failure) => return Err(failure.step()),
        };
        match state.status.enum_value() {
            Ok(Status::RUNNING) => {
                Ok(Adoption::Alive(Box::new(Task::watch(endpoint.clone(), identity.clone()))))
            }
            Ok(Status::STOPPED | Status::CREATED) => {
                let deleted = delete(endpoint, &tasks).await?;
                Ok(Adoption::Dead(
                    deleted.unwrap_or(Exit { status: UNKNOWN_EXIT, at: SystemTime::now() }),
                ))
            }
            _ => {
                let other = io::Error::other(format!("it is in state {}", state.status.value()));
                Err(other).step("query state of pause process")
            }
        }
    }
}

/// The methods of [`crate::pause::Driver`], async: a wait for a shim takes no thread.
impl ShimDriver {
    /// The driver's name in config, record and metrics.
    pub fn name(&self) -> &'static str {
        NAME
    }

    /// Makes the pause process of a sandbox.
    ///
    /// # Errors
    /// The failed step; what was made has been undone then.
    pub async fn start(&self, plan: &Plan) -> Result<Box<dyn Process>, StepError> {
        let endpoint = self.endpoint(&plan.id)?;
        Ok(Box::new(self.run(&endpoint).await?))
    }

    /// Finds a recorded pause process again after a restart of the daemon.
    pub async fn adopt(&self, cgroup_ref: &CgroupRef, identity: &Identity) -> Adoption {
        let recovered = async {
            let endpoint = self.endpoint(&cgroup_ref.id)?;
            let late = |_| {
                Err(io::Error::from(io::ErrorKind::TimedOut)).step("query state of pause process")
            };
            timeout(RECOVERY_TIMEOUT, self.recover_pause(&endpoint, identity))
                .await
                .unwrap_or_else(late)
        };
        recovered.await.unwrap_or_else(Adoption::Unknown)
    }

    /// Ends and deletes the pause process. Gone already is success.
    ///
    /// # Errors
    /// The failed step.
    pub async fn cleanup(&self, cgroup_ref: &CgroupRef) -> Result<(), Vec<StepError>> {
        let Ok(endpoint) = self.endpoint(&cgroup_ref.id) else { return Ok(()) };
        let deleted = async {
            // Its shim may be ending, or have ended.
            if endpoint.pause_deleted() {
                return Ok(());
            }
            endpoint.try_recover().await?;
            if endpoint.process().is_none() {
                return endpoint.delete_orphaned_pause().await;
            }
            if delete_in_the_end(&endpoint).await?.is_some() {
                endpoint.set_pause_deleted();
            }
            Ok(())
        };
        deleted.await.map_err(|step| vec![step])
    }
}

/// [`delete`], repeated where the shim refuses; not where it does not answer.
async fn delete_in_the_end(endpoint: &Arc<SelfStarted>) -> Result<Option<Exit>, StepError> {
    let mut delays = DELETION_DELAYS.into_iter();
    loop {
        let begun = Instant::now();
        let tasks = endpoint.tasks().await.map_err(TaskError::step)?;
        let step = match delete(endpoint, &tasks).await {
            Err(step) if begun.elapsed() < CALL_TIMEOUT => step,
            done => return done,
        };
        let Some(delay) = delays.next() else { return Err(step) };
        log::debug!(sandbox = endpoint.id(); "failed to delete pause process; retrying: {step}");
        sleep(delay).await;
    }
}

/// Ends the task, if it runs, and deletes it; how it ended, unless it was gone already.
async fn delete(endpoint: &Arc<SelfStarted>, tasks: &Tasks) -> Result<Option<Exit>, StepError> {
    let id = endpoint.id();
    let request = KillRequest {
        id: id.to_owned(),
        signal: libc::SIGKILL.unsigned_abs(),
        all: true,
        ..Default::default()
    };
    match tasks.call::<_, Empty>("kill pause process", "Kill", &request, Some(CALL_TIMEOUT)).await {
        Ok(_) => {
            let request = WaitRequest { id: id.to_owned(), ..Default::default() };
            let waited = tasks
                .call::<_, WaitResponse>(
                    "wait for pause process",
                    "Wait",
                    &request,
                    Some(CALL_TIMEOUT),
                )
                .await;
            if let Err(TaskError::Lost(step)) = waited {
                return Err(step);
            }
        }
        Err(TaskError::NotFound(_)) => {}
        // One that was never started may not be killed, only deleted.
        Err(TaskError::Refused(step)) => {
            log::debug!(sandbox = id; "shim refused to kill pause process: {step}")
        }
        Err(TaskError::Lost(step)) => return Err(step),
    }
    let request = DeleteRequest { id: id.to_owned(), ..Default::default() };
    match tasks
        .call::<_, DeleteResponse>("delete pause process", "Delete", &request, Some(CALL_TIMEOUT))
        .await
    {
        Ok(deleted) => Ok(Some(exit(deleted.exit_status, deleted.exited_at.as_ref()))),
        Err(TaskError::NotFound(_)) => Ok(None),
        Err(failure) => Err(failure.step()),
    }
}

fn exit(status: u32, at: Option<&Timestamp>) -> Exit {
    let reported = at.and_then(|at| {
        let since = Duration::new(u64::try_from(at.seconds).ok()?, u32::try_from(at.nanos).ok()?);
        (!since.is_zero()).then(|| SystemTime::UNIX_EPOCH.checked_add(since)).flatten()
    });
    Exit { status, at: reported.unwrap_or_else(SystemTime::now) }
}

/// A pause process that a shim runs.
#[derive(Debug)]
struct Task {
    identity: Identity,
    exit: watch::Receiver<Option<Exit>>,
    /// Tells the task that watches it to kill it.
    kill: Arc<Notify>,
}

impl Task {
    /// Begins to wait for its end, in a task that ends with it.
    fn watch(endpoint: Arc<SelfStarted>, identity: Identity) -> Self {
        let (tell, exit) = watch::channel(None);
        let kill = Arc::new(Notify::new());
        let killed = kill.clone();
        tokio::spawn(async move {
            let ended = tokio::select! {
                ended = wait(&endpoint) => ended,
                ended = kill_on_request(&endpoint, &killed) => ended,
            };
            // The receiver is gone only if the sandbox is.
            let _ = tell.send(Some(ended));
        });
        Self { identity, exit, kill }
    }
}

/// The one `Wait` of a sandbox: ends with the pause process, or with its shim. A connection that is
/// lost is none of both.
async fn wait(endpoint: &Arc<SelfStarted>) -> Exit {
    let unknown = || Exit { status: UNKNOWN_EXIT, at: SystemTime::now() };
    let id = endpoint.id();
    // What fails of it is done again by the cleanup.
    let orphaned = async || {
        if let Err(step) = endpoint.delete_pause_of_exited_shim().await {
            log::error!(sandbox = id; "failed to delete pause process after shim exit: {step}");
        }
        unknown()
    };
    let mut delay = RETRY_DELAY;
    loop {
        let Some(shim) = endpoint.process() else { return orphaned().await };
        let ask = async {
            let request = WaitRequest { id: id.to_owned(), ..Default::default() };
            let tasks = endpoint.tasks().await?;
            tasks.call::<_, WaitResponse>("wait for pause process", "Wait", &request, None).await
        };
        let answer = tokio::select! {
            answer = ask => answer,
            _ = shim.exited() => return orphaned().await,
        };
        match answer {
            Ok(ended) => return exit(ended.exit_status, ended.exited_at.as_ref()),
            Err(TaskError::NotFound(_)) => return unknown(),
            Err(failure) => {
                log::warn!(sandbox = id;
                    "Wait for pause process failed; retrying: {}", failure.step());
                tokio::select! {
                    () = sleep(delay) => {}
                    _ = shim.exited() => {}
                }
                delay = (delay * 2).min(MAX_WAIT_RETRY_DELAY);
            }
        }
    }
}

/// Kills the pause process at each notification, until the shim has answered. One that does not, or
/// refuses again and again, is killed itself, and the pause process with it: who asks for the end
/// of a sandbox is not to wait for a shim that hangs.
async fn kill_on_request(endpoint: &Arc<SelfStarted>, requested: &Notify) -> Exit {
    let id = endpoint.id();
    let request = KillRequest {
        id: id.to_owned(),
        signal: libc::SIGKILL.unsigned_abs(),
        ..Default::default()
    };
    loop {
        requested.notified().await;
        let (mut unanswered, mut refused) = (0, 0);
        loop {
            // A task of its own, which waits for the answer: the pause process ends before the shim
            // has given it, and this call with the pause process.
            let (of, request) = (endpoint.clone(), request.clone());
            let killed = tokio::spawn(async move {
                of.tasks()
                    .await?
                    .call::<_, Empty>("kill pause process", "Kill", &request, Some(CALL_TIMEOUT))
                    .await
            });
            let panicked = |e: tokio::task::JoinError| {
                Err(TaskError::Lost(StepError::new("kill pause process", io::Error::other(e))))
            };
            match killed.await.unwrap_or_else(panicked) {
                // The wait reports its exit.
                Ok(_) | Err(TaskError::NotFound(_)) => break,
                Err(failure) => {
                    let lost = matches!(failure, TaskError::Lost(_));
                    *(if lost { &mut unanswered } else { &mut refused }) += 1;
                    log::warn!(sandbox = id;
                        "failed to kill pause process; retrying: {}", failure.step());
                    sleep(RETRY_DELAY).await;
                }
            }
            if (unanswered >= MAX_UNANSWERED || refused >= MAX_REFUSED)
                && let Some(shim) = endpoint.process()
            {
                let pid = shim.identity().pid;
                if unanswered >= MAX_UNANSWERED {
                    log::warn!(sandbox = id, pid = pid; "shim does not answer; killing it");
                } else {
                    log::warn!(sandbox = id, pid = pid;
                        "shim refuses to kill pause process; killing the shim");
                }
                (unanswered, refused) = (0, 0);
                // The exit of the pause process follows from the shim's.
                if let Err(step) = endpoint.shim().kill(&*shim).await {
                    log::error!(sandbox = id; "failed to kill shim: {step}");
                }
            }
        }
    }
}

impl Process for Task {
    fn identity(&self) -> &Identity {
        &self.identity
    }

    fn kill(&self) -> Result<(), StepError> {
        self.kill.notify_one();
        Ok(())
    }

    fn exited(&self) -> BoxFuture<'_, Exit> {
        let mut exit = self.exit.clone();
        Box::pin(async move {
            let known = exit.wait_for(Option::is_some).await.ok().and_then(|exit| *exit);
            known.unwrap_or_else(|| Exit { status: UNKNOWN_EXIT, at: SystemTime::now() })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runtimes_of_host_processes() {
        for native in [
            "io.containerd.runc.v2",
            "io.containerd.crun.v2",
            "/usr/bin/containerd-shim-runc-v2",
            "runc.v1",
        ] {
            assert!(is_of_host_processes(native), "{native}");
        }
        for other in [
            "io.containerd.runsc.v1",
            "io.containerd.kata.v2",
            "/opt/containerd-shim-kata-v2",
            "",
            "runc",
            "/opt/shim",
        ] {
            assert!(!is_of_host_processes(other), "{other}");
        }
    }

    #[test]
    fn exits_have_the_time_that_the_shim_reports() {
        let at = Timestamp { seconds: 1_000_000_000, nanos: 5, ..Default::default() };
        assert_eq!(
            exit(137, Some(&at)).at,
            SystemTime::UNIX_EPOCH + Duration::new(1_000_000_000, 5)
        );
        assert!(exit(1, None).at > SystemTime::UNIX_EPOCH + Duration::new(1_000_000_000, 5));
    }
}
