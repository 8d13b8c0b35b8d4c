//! The worker: brings containerd's container and task of a sandbox to the goal.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::Goal;
use crate::containerd::CallError;
use crate::containerd::containers::{Containers, RecordOwner, SandboxContainer, TaskState};
use crate::error::{IoContext as _, StepError};
use crate::exit::{self, Backoff};
use crate::podsandbox::environment::Environment;
use crate::podsandbox::jobs::Jobs;
use crate::podsandbox::oci_spec;
use crate::podsandbox::record::Stage;
use crate::pool::Class;
use crate::shim::PauseRefused;

/// How many containers are recorded at once: containerd writes one record after another.
static CONTAINER_PERMITS: Semaphore = Semaphore::const_new(8);

/// How many sandboxes are worked on at once for any other goal. These calls may reach a shim, which
/// may hang; the container of a new pod does not wait for them.
static TASK_PERMITS: Semaphore = Semaphore::const_new(8);

/// Each first try to remove a container has one. The end of the daemon waits for all.
static REMOVALS: Semaphore = Semaphore::const_new(MAX_REMOVALS as usize);
const MAX_REMOVALS: u32 = 1 << 16;

/// How long the end of the daemon waits for the removal of containers. What is left is removed by
/// the next daemon.
const BEFORE_STOP: Duration = Duration::from_secs(2);

/// Delay between two tries.
const RETRY_BACKOFF: Backoff = exit::CONTAINERD;

/// How often containerd may refuse before a record is given up; it is tried again with the next
/// change of the sandbox. While containerd is down no try counts.
const REFUSALS: u32 = 8;

/// How many refusals a try counts as in which containerd did not answer, though it answers now: the
/// shim behind the call hangs, and the try has held its permit for as long as a call may take.
const UNANSWERED: u32 = REFUSALS / 2;

/// How long Create waits for the container's record.
const BEFORE_CREATE_ANSWERS: Duration = Duration::from_millis(250);

/// How long after its cause a task is made, and a container removed: CRI's call that has caused it,
/// such as CreateContainer, still runs, and containerd writes its database for one call after
/// another.
const AFTER_CALL: Duration = Duration::from_millis(100);

/// How long the end of a pod's shim waits for the deletion of the sandbox's task.
const BEFORE_SHIM_ENDS: Duration = Duration::from_secs(2);

/// Why a step failed.
enum Failure {
    /// The step is retried, at most [`REFUSALS`] times if containerd refused it.
    Again { step: StepError, answer: ContainerdAnswer },
    /// The step cannot succeed and is not retried.
    Final(StepError),
    /// The record of this id is another's, or the pod's shim cannot serve the task.
    Unfit(&'static str),
}

/// The response of containerd to an attempt that failed.
enum ContainerdAnswer {
    /// An error, or the step failed before the call.
    Refused,
    /// `UNAVAILABLE`.
    Unavailable,
    /// No response: containerd does not run or hangs.
    None,
}

impl From<CallError> for Failure {
    fn from(e: CallError) -> Self {
        if e.is_final() {
            return Self::Final(e.step());
        }
        let answer = match &e {
            CallError::Lost(_) => ContainerdAnswer::None,
            _ if e.is_unavailable() => ContainerdAnswer::Unavailable,
            CallError::Refused { .. } => ContainerdAnswer::Refused,
        };
        Self::Again { step: e.step(), answer }
    }
}

impl From<StepError> for Failure {
    fn from(step: StepError) -> Self {
        Self::Again { step, answer: ContainerdAnswer::Refused }
    }
}

impl Jobs {
    /// The settings ask for it.
    fn records_containers(&self) -> bool {
        self.environment().config.container_record
    }

    /// containerd can have a record of the sandbox: it is of containerd's namespace, and this
    /// project's shim serves its task.
    fn can_be_recorded(&self) -> bool {
        self.facts.in_namespace && self.shim.serves_sandbox()
    }

    fn set_goal(self: &Arc<Self>, goal: Goal) {
        if self.can_be_recorded() && self.container.set_goal(goal) {
            drop(tokio::spawn(work(self.clone())));
        }
    }

    /// The sandbox gets its container. Returns at once.
    pub fn record_container(self: &Arc<Self>) {
        if self.records_containers() {
            self.set_goal(Goal::Container);
        }
    }

    /// The sandbox gets its container. Waits until containerd has it or an attempt has failed, at
    /// most [`BEFORE_CREATE_ANSWERS`].
    pub async fn container_recorded(self: &Arc<Self>) {
        if !self.records_containers() || !self.can_be_recorded() {
            return;
        }
        self.record_container();
        if !self.container.recorded(BEFORE_CREATE_ANSWERS).await {
            log::warn!(
                sandbox = self.id().as_str();
                "containerd has not recorded sandbox as a container yet; \
                cAdvisor may show no network of the pod"
            );
        }
    }

    /// The pod's shim serves: the sandbox gets its task. Returns at once.
    pub fn record_task(self: &Arc<Self>) {
        if self.records_containers() {
            self.set_goal(Goal::Task);
        }
    }

    /// The pause process has exited: its task is deleted. Returns at once.
    pub fn delete_task(self: &Arc<Self>) {
        self.set_goal(Goal::NoTask);
    }

    /// Deletes the task before its server, the pod's shim, ends, if containerd answers in time.
    pub async fn task_deleted(self: &Arc<Self>) {
        if self.can_be_recorded() {
            self.delete_task();
            self.container.settled(BEFORE_SHIM_ENDS).await;
        }
    }

    /// The pod was stopped: its shim ends if it is empty, after the sandbox's task. Returns at
    /// once.
    pub fn dismiss_shim(self: &Arc<Self>) {
        if !self.can_be_recorded() || !self.shim.has_shim() {
            return self.shim.dismiss();
        }
        let jobs = self.clone();
        drop(tokio::spawn(async move {
            jobs.task_deleted().await;
            jobs.shim.dismiss();
        }));
    }

    /// The sandbox is removed: its container goes too. Returns at once.
    pub fn remove_container(self: &Arc<Self>) {
        self.set_goal(Goal::Nothing);
    }

    /// Whether containerd answers a call that reaches no shim.
    async fn containerd_answers(&self) -> bool {
        let owner = self.environment().containers.owner(self.id().as_str()).await;
        !owner.is_err_and(|e| e.is_unavailable())
    }

    /// One try to reach a goal.
    async fn reach(self: &Arc<Self>, goal: Goal) -> Result<(), Failure> {
        let (containers, id) = (&self.environment().containers, self.id().as_str());
        match goal {
            Goal::Any => Ok(()),
            Goal::Container => self.make_container(containers).await,
            Goal::Task => self.make_task(containers).await,
            Goal::NoTask => {
                if containers.owner(id).await? == RecordOwner::Own {
                    containers.delete_task(id).await?;
                }
                Ok(())
            }
            Goal::Nothing => Ok(containers.remove(id).await?),
        }
    }

    async fn make_container(self: &Arc<Self>, containers: &Containers) -> Result<(), Failure> {
        let described = self.run_blocking(Class::Query, Self::describe_container).await;
        match containers.create(&described.flatten()?).await? {
            RecordOwner::Own => Ok(()),
            RecordOwner::Foreign => {
                Err(Failure::Unfit("containerd has another container of its id"))
            }
            RecordOwner::Missing => {
                let gone = std::io::Error::other("its container has just been removed");
                Err(StepError::new("record the sandbox as a container", gone).into())
            }
        }
    }

    /// What containerd is to record: the same as Start answers, which does not stay in memory.
    fn describe_container(&self) -> Result<SandboxContainer, StepError> {
        let input = self.start_input()?;
        let Environment { layout, config, .. } = &**self.environment();
        let made = oci_spec::describe(&input.record, &input.pod, layout, config);
        let made = made.map_err(std::io::Error::other).step("make the spec")?;
        Ok(SandboxContainer {
            id: self.id().to_string(),
            labels: made.labels,
            runtime: self.facts.runtime.name.clone(),
            runtime_options: self.facts.runtime.options.clone(),
            spec: made.spec.into(),
        })
    }

    async fn make_task(self: &Arc<Self>, containers: &Containers) -> Result<(), Failure> {
        let stage = self.run_blocking(Class::Query, |jobs| jobs.store.stage()).await?;
        let stage = stage.map_err(StepError::from)?;
        let Stage::Started { identity } = stage else {
            return Err(Failure::Unfit("no pause process"));
        };
        let id = self.id().as_str();
        // For a sandbox that it does not know, containerd starts a shim of its own, whatever
        // address the request has.
        if !containers.knows_sandbox(id).await? {
            return Err(Failure::Unfit("containerd does not know the sandbox"));
        }
        self.make_container(containers).await?;
        if !self.shim.has_shim() {
            // A connection would start another, for the task alone. One that ends from here on is
            // followed by another, which stays until it ends with a container or the pod.
            return Err(Failure::Unfit("its shim has ended"));
        }
        // First, as a shim that cannot serve the task would mistake it for a container to run.
        match self.shim.set_pause(&identity).await {
            Ok(()) => {}
            Err(PauseRefused::Unsupported) => {
                return Err(Failure::Unfit("its shim cannot serve one"));
            }
            Err(PauseRefused::Failed(step)) => return Err(step.into()),
        }
        containers.create_task(id, &self.shim.address()).await?;
        match containers.task(id).await? {
            TaskState::Running(pid) if pid == identity.pid => Ok(()),
            TaskState::Created => Ok(containers.start_task(id).await?),
            state => {
                // Of a shim that has ended: the next try finds none.
                containers.delete_task(id).await?;
                let stale = std::io::Error::other(format!("containerd had an old task: {state:?}"));
                Err(StepError::new("create the sandbox's task", stale).into())
            }
        }
    }
}

/// Waits until containers that are being removed are removed, or their first try has failed, if
/// containerd answers in time.
pub async fn removals_done() {
    let _ = timeout(BEFORE_STOP, REMOVALS.acquire_many(MAX_REMOVALS)).await;
}

/// Works until the goal is reached or given up.
async fn work(jobs: Arc<Jobs>) {
    let (mut failures, mut refusals, mut last) = (0, 0, None);
    while let Some((goal, goal_number)) = jobs.container.next() {
        let mut removal = None;
        if last != Some(goal_number) {
            (failures, refusals, last) = (0, 0, Some(goal_number));
            if goal == Goal::Nothing {
                // Never closed.
                removal = REMOVALS.acquire().await.ok();
            }
            if goal.follows_a_call() {
                jobs.container.wait_for_newer_goal(goal_number, AFTER_CALL).await;
                if !jobs.container.is_current(goal_number) {
                    continue;
                }
            }
        }
        let tried = {
            let permits = if goal == Goal::Container { &CONTAINER_PERMITS } else { &TASK_PERMITS };
            // Never closed.
            let _permit = permits.acquire().await;
            jobs.reach(goal).await
        };
        drop(removal);
        let id = jobs.id().as_str();
        match tried {
            Ok(()) => jobs.container.reached(goal, goal_number),
            Err(Failure::Unfit(reason)) => {
                log::info!(sandbox = id;
                    "sandbox has no container or task in containerd: {reason}");
                jobs.container.give_up(goal_number);
            }
            Err(Failure::Final(step)) => {
                log::warn!(sandbox = id;
                    "containerd refuses to record sandbox as a container; the pod runs: {step}");
                jobs.container.give_up(goal_number);
            }
            Err(Failure::Again { step, answer }) => {
                failures += 1;
                refusals += match answer {
                    ContainerdAnswer::Refused => 1,
                    ContainerdAnswer::None if jobs.containerd_answers().await => UNANSWERED,
                    ContainerdAnswer::Unavailable | ContainerdAnswer::None => 0,
                };
                if refusals >= REFUSALS {
                    log::warn!(sandbox = id;
                        "gave up recording sandbox as a container; the pod runs: {step}");
                    jobs.container.give_up(goal_number);
                    continue;
                }
                log::debug!(sandbox = id; "sandbox's container in containerd: {step}");
                jobs.container.failed();
                jobs.container
                    .wait_for_newer_goal(goal_number, RETRY_BACKOFF.delay(failures))
                    .await;
            }
        }
    }
}
