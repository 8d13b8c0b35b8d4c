//! One attempt to bring containerd's record of a sandbox to the wanted state.

use std::io;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::Wanted;
use crate::containerd::CallError;
use crate::containerd::containers::{
    CREATE_TIMEOUT, Containers, RecordOwner, SandboxContainer, TaskState,
};
use crate::error::StepError;
use crate::podsandbox::jobs::Jobs;
use crate::podsandbox::record::Stage;
use crate::pool::Class;
use crate::shim::PauseRefused;

/// How many tasks are made at once: a daemon that starts makes those of all pods. Only tasks wait
/// for it, because a shim that hangs holds a permit for as long as an attempt may take.
static TASK_PERMITS: Semaphore = Semaphore::const_new(16);

/// The longest that an attempt takes which may reach a shim: the shim may hang.
const SHIM_ATTEMPT: Duration = Duration::from_secs(10);

/// Failures in a row before a warning: a shim or containerd may end during an attempt.
const FAILURES_TO_WARN: u32 = 3;

/// Why an attempt failed.
#[derive(Debug)]
enum Failure {
    /// The attempt is repeated.
    Again {
        /// The failed step.
        step: StepError,
        /// containerd does not run or does not answer.
        is_down: bool,
    },
    /// No attempt can succeed before the sandbox changes: the container of this id is another's, or
    /// there is no task to be served.
    Unfit(&'static str),
}

impl From<CallError> for Failure {
    fn from(e: CallError) -> Self {
        Self::Again { is_down: e.is_unavailable(), step: e.step() }
    }
}

impl From<StepError> for Failure {
    fn from(step: StepError) -> Self {
        Self::Again { step, is_down: false }
    }
}

impl Wanted {
    /// The longest that an attempt takes.
    fn attempt_timeout(self) -> Duration {
        if self == Self::Recorded { CREATE_TIMEOUT } else { SHIM_ATTEMPT }
    }

    /// Whether a failed attempt is worth a warning, after that many failures before it. `now` is
    /// the state that is wanted when the attempt ends: a sandbox that has moved on does not need
    /// what failed.
    fn warns(self, now: Self, failures: u32, is_down: bool) -> bool {
        self == now
            && match self {
                // cAdvisor looks for the container once, after this attempt.
                Self::Recorded => failures == 0,
                _ => failures + 1 == FAILURES_TO_WARN && !is_down,
            }
    }
}

impl Jobs {
    /// Makes one attempt, after `failures` failed ones. Breaks if `goal` is reached, or waits for
    /// the sandbox's next change.
    pub(super) async fn attempt(self: &Arc<Self>, goal: Wanted, failures: u32) -> ControlFlow<()> {
        let _permit = match goal {
            Wanted::WithTask => tokio::select! {
                // Never closed.
                permit = TASK_PERMITS.acquire() => permit.ok(),
                () = self.container.moved_on(goal) => return ControlFlow::Break(()),
            },
            _ => None,
        };
        let reached = timeout(goal.attempt_timeout(), self.reach(goal)).await;
        let late = |_| {
            let late = io::Error::from(io::ErrorKind::TimedOut);
            Err(StepError::new("change containerd's record of the sandbox", late).into())
        };
        match reached.unwrap_or_else(late) {
            Ok(()) => ControlFlow::Break(()),
            Err(Failure::Unfit(reason)) => {
                log::info!(sandbox = self.id().as_str();
                    "sandbox has no container or task in containerd: {reason}");
                ControlFlow::Break(())
            }
            Err(Failure::Again { step, is_down }) => {
                let now = *self.container.wanted.borrow();
                self.log_failure(goal, goal.warns(now, failures, is_down), &step);
                ControlFlow::Continue(())
            }
        }
    }

    fn log_failure(&self, goal: Wanted, warns: bool, step: &StepError) {
        let id = self.id().as_str();
        match goal {
            _ if !warns => {
                log::debug!(sandbox = id;
                    "failed to change sandbox's record in containerd; retrying: {step}");
            }
            Wanted::WithTask => log::warn!(sandbox = id;
                "failed to create sandbox's task in containerd; retrying; \
                cAdvisor shows no network of the pod: {step}"),
            Wanted::WithoutTask => log::warn!(sandbox = id;
                "failed to delete task of stopped sandbox in containerd; retrying: {step}"),
            Wanted::Absent => log::warn!(sandbox = id;
                "failed to remove container of removed sandbox in containerd; retrying: {step}"),
            _ => log::warn!(sandbox = id;
                "containerd has not recorded sandbox as a container yet; retrying; \
                cAdvisor may show no network of the pod: {step}"),
        }
    }

    async fn reach(self: &Arc<Self>, goal: Wanted) -> Result<(), Failure> {
        let (containers, id) = (&self.environment().containers, self.id().as_str());
        match goal {
            Wanted::AsFound | Wanted::New => Ok(()),
            Wanted::Recorded => self.make_container(containers).await,
            Wanted::WithTask => self.make_task(containers).await,
            Wanted::WithoutTask => {
                if containers.owner(id).await? == RecordOwner::Own {
                    containers.delete_task(id).await?;
                }
                Ok(())
            }
            Wanted::Absent => Ok(containers.remove(id).await?),
        }
    }

    async fn make_container(self: &Arc<Self>, containers: &Containers) -> Result<(), Failure> {
        let described = self.run_blocking(Class::Query, Self::describe_container).await;
        is_own(containers.create(&described.flatten()?).await?)
    }

    /// The container that containerd is to record, with the spec and the labels that Start answers.
    fn describe_container(&self) -> Result<SandboxContainer, StepError> {
        let input = self.start_input()?;
        let made = self.description(&input)?;
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
        match containers.owner(id).await? {
            RecordOwner::Missing => self.make_container(containers).await?,
            other => is_own(other)?,
        }
        // For a sandbox that it does not know, containerd starts a shim of its own, whatever
        // address the request has.
        if !containers.knows_sandbox(id).await? {
            return Err(Failure::Unfit("containerd does not know the sandbox"));
        }
        if !self.shim.has_shim() {
            // A connection would start another, for the task alone. A shim that ends from here on
            // is followed by another, which stays until it ends with a container or the pod.
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
                // The task of a shim that has ended: the next attempt finds none.
                containers.delete_task(id).await?;
                let stale = io::Error::other(format!("containerd had an old task: {state:?}"));
                Err(StepError::new("create the sandbox's task", stale).into())
            }
        }
    }
}

/// Whether a container with the sandbox's id is the sandbox's.
fn is_own(owner: RecordOwner) -> Result<(), Failure> {
    match owner {
        RecordOwner::Own => Ok(()),
        RecordOwner::Foreign => Err(Failure::Unfit("containerd has another container of its id")),
        RecordOwner::Missing => {
            let gone = io::Error::other("its container has just been removed");
            Err(StepError::new("record the sandbox as a container", gone).into())
        }
    }
}

#[cfg(test)]
mod tests {
    use containerd_api::framing::Code;
    use protobuf::Enum as _;

    use super::*;

    fn refused(code: i32) -> CallError {
        let code = Code::from_i32(code).unwrap();
        let step = StepError::new("create the sandbox's task", io::Error::other("not set"));
        CallError::Refused { code, step }
    }

    /// containerd can end a shim after the pause process was named to it: the next shim answers
    /// FAILED_PRECONDITION.
    #[test]
    fn each_refusal_of_containerd_and_of_the_shim_is_followed_by_another_attempt() {
        for code in 1..=16 {
            let failure = Failure::from(refused(code));
            assert!(matches!(failure, Failure::Again { .. }), "{code}: {failure:?}");
        }
        assert!(matches!(Failure::from(refused(14)), Failure::Again { is_down: true, .. }));
    }

    #[test]
    fn a_sandbox_that_has_moved_on_is_not_warned_of() {
        use Wanted::{Absent, Recorded, WithTask, WithoutTask};
        for failures in 0..10 {
            assert!(!Recorded.warns(WithoutTask, failures, false));
            assert!(!WithTask.warns(WithoutTask, failures, false));
            assert!(!WithoutTask.warns(Absent, failures, false));
        }
    }

    #[test]
    fn a_failure_that_lasts_is_warned_of_once() {
        use Wanted::{Absent, Recorded, WithTask, WithoutTask};
        for goal in [Recorded, WithTask, WithoutTask, Absent] {
            let warned = (0..100).filter(|&failures| goal.warns(goal, failures, false));
            let first = if goal == Recorded { 0 } else { 2 };
            assert_eq!(warned.collect::<Vec<_>>(), [first], "{goal:?}");
        }
        assert!(!(0..100).any(|failures| WithTask.warns(WithTask, failures, true)), "down");
    }
}
