//! The sandbox as a container with a task in containerd, as the built-in controller's are: cAdvisor
//! finds the pod's network by them, and `ctr` lists them.
//!
//! ```text
//!   Create        the pod's shim serves      the pause has exited       removed
//!     |                    |                          |                    |
//!  container ------> container, task ------------> container ----------> nothing
//! ```
//!
//! The container is recorded before the pause has its cgroup: cAdvisor looks for it once, when the
//! cgroup appears. A task needs a server, which is the pod's own shim; a pod without containers has
//! none and gets no task. All of it is done by a task of its own, one at a time per sandbox, and is
//! tried again: containerd may be down or refuse, and the pod runs all the same.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, Semaphore};
use tokio::time::timeout;

use super::jobs::Jobs;
use super::oci_spec;
use super::record::Stage;
use super::sandbox::Environment;
use crate::containerd::CallError;
use crate::containerd::containers::{Containers, RecordOwner, SandboxContainer, TaskState};
use crate::error::{IoContext as _, StepError};
use crate::exit::{self, Backoff};
use crate::pool::Class;
use crate::shim::PauseRefused;

/// How many sandboxes are worked on at once: containerd writes one record after another.
static TURNS: Semaphore = Semaphore::const_new(8);

/// Between two tries.
const AGAIN: Backoff = exit::CONTAINERD;

/// How often containerd may refuse before a record is given up; it is tried again with the next
/// change of the sandbox. While containerd is down no try counts.
const REFUSALS: u32 = 8;

/// How long Start waits for the container's record, which was begun by Create.
const BEFORE_START: Duration = Duration::from_millis(250);

/// How long the end of a pod's shim waits for the deletion of the sandbox's task.
const BEFORE_SHIM_ENDS: Duration = Duration::from_secs(2);

/// What containerd is to have of a sandbox.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Goal {
    /// Whatever it has.
    #[default]
    Any,
    /// The container.
    Container,
    /// The container and the task that the pod's shim serves.
    Task,
    /// No task.
    NoTask,
    /// Nothing.
    Nothing,
}

/// The progress towards a goal.
#[derive(Debug, Default)]
struct Progress {
    goal: Goal,
    /// What containerd has, as far as it is known; [`Goal::Any`]: unknown.
    done: Goal,
    /// Number of goals set so far.
    asked: u32,
    /// A task works on it.
    working: bool,
    /// Its last try has failed.
    failing: bool,
}

/// A sandbox's record in containerd. Of a sandbox of an earlier daemon it is not known.
#[derive(Debug, Default)]
pub struct ContainerRecord {
    progress: Mutex<Progress>,
    /// Wakes who waits for the goal, and the task that waits to try again.
    changed: Notify,
}

/// Why a step failed.
enum Failure {
    /// It is tried again, as often as [`REFUSALS`] unless containerd is not there.
    Again { step: StepError, unavailable: bool },
    /// It will not succeed.
    Final(StepError),
    /// The record of this id is another's, or the pod's shim cannot serve the task.
    Unfit(&'static str),
}

impl From<CallError> for Failure {
    fn from(e: CallError) -> Self {
        let unavailable = e.is_unavailable();
        if e.is_final() {
            Self::Final(e.step())
        } else {
            Self::Again { step: e.step(), unavailable }
        }
    }
}

impl From<StepError> for Failure {
    fn from(step: StepError) -> Self {
        Self::Again { step, unavailable: false }
    }
}

impl ContainerRecord {
    /// The sandbox is new: containerd has nothing of it.
    pub fn set_new(&self) {
        self.progress.lock().done = Goal::Nothing;
    }

    /// Changes the goal. True: a task is to be started that works on it.
    fn aim(&self, goal: Goal) -> bool {
        let mut progress = self.progress.lock();
        // Nothing is made for a sandbox that is being removed.
        let ends = |goal| matches!(goal, Goal::NoTask | Goal::Nothing);
        if progress.goal == Goal::Nothing || ends(progress.goal) && !ends(goal) {
            return false;
        }
        if progress.goal != goal || goal == Goal::Task {
            (progress.goal, progress.failing) = (goal, false);
            progress.asked = progress.asked.wrapping_add(1);
        }
        if goal == Goal::Task {
            // A shim that has come later serves no task of the one before.
            progress.done = Goal::Any;
        }
        self.changed.notify_waiters();
        let work = !progress.is_done() && !progress.working;
        progress.working |= work;
        work
    }

    /// The goal, and its number, unless it is reached or given up; nothing works on it
    /// then.
    fn next(&self) -> Option<(Goal, u32)> {
        let mut progress = self.progress.lock();
        if progress.is_done() {
            progress.working = false;
            self.changed.notify_waiters();
            return None;
        }
        // An answer may be lost.
        progress.done = Goal::Any;
        Some((progress.goal, progress.asked))
    }

    /// The goal is reached that was set at that time.
    fn reached(&self, goal: Goal, asked: u32) {
        let mut progress = self.progress.lock();
        if progress.asked == asked {
            (progress.done, progress.failing) = (goal, false);
        }
        self.changed.notify_waiters();
    }

    fn failed(&self) {
        self.progress.lock().failing = true;
        self.changed.notify_waiters();
    }

    /// Waits until a goal is set after that time; at most that long.
    async fn asked_again(&self, asked: u32, within: Duration) {
        let other = async {
            loop {
                let mut changed = pin!(self.changed.notified());
                changed.as_mut().enable();
                if self.progress.lock().asked != asked {
                    return;
                }
                changed.await;
            }
        };
        // Then the next try is due.
        let _ = timeout(within, other).await;
    }

    /// Gives the goal up that was set at that time.
    fn give_up(&self, asked: u32) {
        let mut progress = self.progress.lock();
        match progress.goal {
            _ if progress.asked != asked => {}
            // Nothing is made after it.
            Goal::Nothing => progress.done = Goal::Nothing,
            _ => progress.goal = Goal::Any,
        }
    }

    /// Waits until the goal is reached or given up, or a try has failed; at most that long.
    async fn settled(&self, within: Duration) {
        let settled = async {
            loop {
                let mut changed = pin!(self.changed.notified());
                changed.as_mut().enable();
                {
                    let progress = self.progress.lock();
                    if progress.is_done() || progress.failing || !progress.working {
                        return;
                    }
                }
                changed.await;
            }
        };
        // Without it the sandbox continues.
        let _ = timeout(within, settled).await;
    }
}

impl Progress {
    fn is_done(&self) -> bool {
        match (self.goal, self.done) {
            (Goal::Any, _) => true,
            (Goal::Container, Goal::Container | Goal::Task) => true,
            (Goal::NoTask, Goal::Container | Goal::Nothing) => true,
            (goal, done) => goal == done,
        }
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

    fn aim(self: &Arc<Self>, goal: Goal) {
        if self.can_be_recorded() && self.container.aim(goal) {
            drop(tokio::spawn(work(self.clone())));
        }
    }

    /// The sandbox is created, or about to be started: it gets its container. Returns at once.
    pub fn record_container(self: &Arc<Self>) {
        if self.records_containers() {
            self.aim(Goal::Container);
        }
    }

    /// Waits a moment for that.
    pub async fn container_recorded(self: &Arc<Self>) {
        if self.records_containers() && self.can_be_recorded() {
            self.container.settled(BEFORE_START).await;
        }
    }

    /// The pod's shim serves: the sandbox gets its task. Returns at once.
    pub fn record_task(self: &Arc<Self>) {
        if self.records_containers() {
            self.aim(Goal::Task);
        }
    }

    /// The pause has exited: its task is deleted. Returns at once.
    pub fn delete_task(self: &Arc<Self>) {
        self.aim(Goal::NoTask);
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
        self.aim(Goal::Nothing);
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
        let described = self.piece(Class::Query, Self::describe_container).await;
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
        let created = self.created()?;
        let Environment { layout, config, .. } = &**self.environment();
        let made = oci_spec::describe(&created.record, &created.pod, layout, config);
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
        let stage = self.piece(Class::Query, |jobs| jobs.store.stage()).await?;
        let stage = stage.map_err(StepError::from)?;
        let Stage::Started { identity } = stage else { return Err(Failure::Unfit("no pause")) };
        // First, as a shim that cannot serve the task would take it for a container to run.
        match self.shim.set_pause(&identity).await {
            Ok(()) => {}
            Err(PauseRefused::Unsupported) => {
                return Err(Failure::Unfit("its shim cannot serve one"));
            }
            Err(PauseRefused::Failed(step)) => return Err(step.into()),
        }
        let id = self.id().as_str();
        // For a sandbox that it does not know, containerd starts a shim of its own, whatever
        // address the request has.
        if !containers.knows_sandbox(id).await? {
            return Err(Failure::Unfit("containerd does not know the sandbox"));
        }
        self.make_container(containers).await?;
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

/// Works until the goal is reached or given up.
async fn work(jobs: Arc<Jobs>) {
    let (mut failures, mut refusals, mut last) = (0, 0, None);
    while let Some((goal, asked)) = jobs.container.next() {
        if last != Some(asked) {
            (failures, refusals, last) = (0, 0, Some(asked));
        }
        let tried = {
            // Never closed.
            let _turn = TURNS.acquire().await;
            jobs.reach(goal).await
        };
        let id = jobs.id().as_str();
        match tried {
            Ok(()) => jobs.container.reached(goal, asked),
            Err(Failure::Unfit(reason)) => {
                log::info!(sandbox = id;
                    "sandbox has no container or task in containerd: {reason}");
                jobs.container.give_up(asked);
            }
            Err(Failure::Final(step)) => {
                log::warn!(sandbox = id;
                    "containerd refuses to record sandbox as a container; the pod runs: {step}");
                jobs.container.give_up(asked);
            }
            Err(Failure::Again { step, unavailable }) => {
                failures += 1;
                refusals += u32::from(!unavailable);
                if refusals >= REFUSALS {
                    log::warn!(sandbox = id;
                        "gave up recording sandbox as a container; the pod runs: {step}");
                    jobs.container.give_up(asked);
                    continue;
                }
                log::debug!(sandbox = id; "sandbox's container in containerd: {step}");
                jobs.container.failed();
                jobs.container.asked_again(asked, AGAIN.delay(failures)).await;
            }
        }
    }
}

/// Removes the records of sandboxes that are gone, of this daemon's state directory: of a daemon
/// that was killed, or that containerd refused to remove. At once and every `interval`, forever.
pub async fn remove_strays(
    containers: &Containers,
    interval: Duration,
    is_known: impl Fn(&str) -> bool,
) {
    let mut failures = 0;
    loop {
        let pause = match try_remove_strays(containers, &is_known).await {
            Ok(()) => {
                failures = 0;
                interval
            }
            Err(e) => {
                failures += 1;
                let step = e.step();
                log::debug!("failed to remove containers of removed sandboxes; retrying: {step}");
                AGAIN.delay(failures)
            }
        };
        tokio::time::sleep(pause).await;
    }
}

async fn try_remove_strays(
    containers: &Containers,
    is_known: impl Fn(&str) -> bool,
) -> Result<(), CallError> {
    let mut result = Ok(());
    for id in containers.own().await?.into_iter().filter(|id| !is_known(id)) {
        match containers.remove(&id).await {
            Ok(()) => log::info!(sandbox = id.as_str(); "removed container of removed sandbox"),
            // The others go all the same.
            Err(e) => result = Err(e),
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new() -> ContainerRecord {
        let record = ContainerRecord::default();
        record.set_new();
        record
    }

    /// What a task works on that begins with this goal.
    fn step(record: &ContainerRecord, goal: Goal) -> Option<(Goal, u32)> {
        record.aim(goal).then(|| record.next()).flatten()
    }

    fn begins(record: &ContainerRecord, goal: Goal) -> u32 {
        let (next, asked) = step(record, goal).unwrap();
        assert_eq!(next, goal);
        asked
    }

    fn does(record: &ContainerRecord, goal: Goal) {
        record.reached(goal, begins(record, goal));
        assert_eq!(record.next(), None);
    }

    #[test]
    fn a_sandbox_gets_a_container_then_a_task_and_loses_both() {
        let record = new();
        for goal in [Goal::Container, Goal::Task, Goal::NoTask, Goal::Nothing] {
            does(&record, goal);
        }
        assert_eq!(step(&record, Goal::Task), None, "a removed sandbox gets none");
    }

    #[test]
    fn what_was_never_made_is_not_removed() {
        let record = new();
        assert_eq!(step(&record, Goal::NoTask), None);
        assert_eq!(step(&record, Goal::Nothing), None);
        // An earlier daemon may have made it.
        does(&ContainerRecord::default(), Goal::NoTask);
    }

    #[test]
    fn the_next_shim_gets_a_task_again() {
        let record = ContainerRecord::default();
        does(&record, Goal::Task);
        assert_eq!(step(&record, Goal::Container), None, "it has one");
        let first = begins(&record, Goal::Task);
        assert!(!record.aim(Goal::Task), "one task works");
        // Of the shim before, whether it was made or not.
        record.reached(Goal::Task, first);
        record.give_up(first);
        let (goal, second) = record.next().unwrap();
        assert_eq!(goal, Goal::Task);
        record.reached(goal, second);
        assert_eq!(record.next(), None);
    }

    #[test]
    fn what_is_given_up_is_tried_with_the_next_change() {
        let record = new();
        record.give_up(begins(&record, Goal::Container));
        assert_eq!(record.next(), None);
        let asked = begins(&record, Goal::Task);
        // A later goal is not given up with the one before.
        assert!(!record.aim(Goal::Nothing));
        record.give_up(asked);
        assert_eq!(record.next().map(|(goal, _)| goal), Some(Goal::Nothing));
    }

    #[test]
    fn what_may_have_been_made_is_removed() {
        let record = new();
        // The answer was lost.
        begins(&record, Goal::Container);
        record.failed();
        record.aim(Goal::Nothing);
        assert_eq!(record.next().map(|(goal, _)| goal), Some(Goal::Nothing));
    }

    #[tokio::test(start_paused = true)]
    async fn waiting_for_the_record_is_bounded() {
        let record = new();
        record.settled(BEFORE_START).await;
        let asked = begins(&record, Goal::Container);
        let begun = tokio::time::Instant::now();
        record.settled(BEFORE_START).await;
        assert_eq!(begun.elapsed(), BEFORE_START);
        record.failed();
        record.settled(Duration::MAX).await;
        record.reached(Goal::Container, asked);
        record.settled(Duration::MAX).await;
    }
}
