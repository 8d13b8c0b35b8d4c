//! The sandbox as a container with a task in containerd, as the built-in controller's are: cAdvisor
//! finds the pod's network by them, and `ctr` lists them.
//!
//! ```text
//!   Create        the pod's shim serves      the pause has exited       removed
//!     |                    |                          |                    |
//!  container ------> container, task ------------> container ----------> nothing
//! ```
//!
//! The sandbox's life sets a wanted state, and one task per sandbox brings containerd to it, with
//! attempts that are bounded in time and repeated until they succeed or another state is wanted:
//! containerd may be down or refuse, and the pod runs all the same.
//!
//! Create waits for the first attempt, because cAdvisor looks for the container once, when the
//! pod's cgroup appears in Start. A task needs a server, which is the pod's own shim; a pod without
//! containers has none and gets no task.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{RwLock, watch};
use tokio::time::timeout;

use super::jobs::Jobs;
use crate::exit::{self, retry};

mod attempt;

/// Each removal of a container holds it for reading. The end of the daemon waits for all of them.
static REMOVALS: RwLock<()> = RwLock::const_new(());

/// How long the end of the daemon waits for the removal of containers. The next daemon removes the
/// others.
const BEFORE_STOP: Duration = Duration::from_secs(2);

/// How long after its cause a task is made, and a container removed: CRI's call that has caused it,
/// such as CreateContainer, still runs, and containerd writes its database for one call after
/// another.
const AFTER_CALL: Duration = Duration::from_millis(100);

/// How long the end of a pod's shim waits for the deletion of the sandbox's task.
const BEFORE_SHIM_ENDS: Duration = Duration::from_secs(2);

/// The state that containerd's record of a sandbox is to have, in the order of the sandbox's life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Wanted {
    /// The state in which an earlier daemon has left it.
    #[default]
    AsFound,
    /// No container yet: the sandbox is new.
    New,
    /// A container.
    Recorded,
    /// A container, and a task that the pod's shim serves.
    WithTask,
    /// No task any more: the pause process has exited.
    WithoutTask,
    /// No container any more: the sandbox is removed.
    Absent,
}

/// containerd's record of a sandbox.
#[derive(Debug, Default)]
pub struct ContainerRecord {
    wanted: watch::Sender<Wanted>,
    /// The wanted state of the last attempt that has ended, with or without success.
    tried: watch::Sender<Wanted>,
}

impl ContainerRecord {
    /// The sandbox is new: containerd has no record of it.
    pub fn set_new(&self) {
        self.wanted.send_replace(Wanted::New);
    }

    /// Changes the wanted state, which only moves forward. Returns the state before the first
    /// change: the record's task is to be started.
    fn want(&self, next: Wanted) -> Option<Wanted> {
        let mut first = None;
        self.wanted.send_if_modified(|wanted| {
            // Each shim of a pod is given the task anew.
            let is_forward = next > *wanted || next == Wanted::WithTask && *wanted == next;
            let was_never_made = *wanted == Wanted::New && next > Wanted::WithTask;
            if !is_forward || was_never_made {
                return false;
            }
            first = (*wanted <= Wanted::New).then_some(*wanted);
            *wanted = next;
            true
        });
        first
    }

    /// Waits until another state than this one is wanted.
    async fn moved_on(&self, from: Wanted) {
        // The sender lives as long as this record.
        let _ = self.wanted.subscribe().wait_for(|wanted| *wanted != from).await;
    }

    /// Waits until an attempt at `goal` or a later state has ended. Returns at once if none of them
    /// is wanted.
    async fn tried(&self, goal: Wanted) {
        if *self.wanted.borrow() >= goal {
            // The sender lives as long as this record.
            let _ = self.tried.subscribe().wait_for(|tried| *tried >= goal).await;
        }
    }

    /// Brings containerd to each wanted state by `attempt`, which gets the state and the number of
    /// failures before it. Ends when the container is removed. `may_have_task`: an earlier daemon
    /// may have made the sandbox's task.
    async fn serve<A: Future<Output = ControlFlow<()>>>(
        &self,
        mut may_have_task: bool,
        attempt: impl Fn(Wanted, u32) -> A,
    ) {
        let mut wanted = self.wanted.subscribe();
        loop {
            let goal = *wanted.borrow_and_update();
            may_have_task |= goal == Wanted::WithTask;
            // A clone has seen what its original has seen.
            let newer = async || drop(wanted.clone().changed().await);
            let _removal = if goal == Wanted::Absent { Some(REMOVALS.read().await) } else { None };
            let is_settled = goal == Wanted::WithoutTask && !may_have_task;
            let follows_a_call = matches!(goal, Wanted::WithTask | Wanted::Absent);
            if is_settled {
                self.tried.send_replace(goal);
            } else if !follows_a_call || timeout(AFTER_CALL, newer()).await.is_err() {
                let step = async |failures| {
                    if wanted.has_changed().unwrap_or(true) {
                        return ControlFlow::Break(());
                    }
                    let result = attempt(goal, failures).await;
                    self.tried.send_replace(goal);
                    result
                };
                // Boxed, as the record of a running pod has nothing to do.
                Box::pin(retry(exit::CONTAINERD, newer, step)).await;
            }
            // The sender lives as long as this record.
            if goal == Wanted::Absent || wanted.changed().await.is_err() {
                return;
            }
        }
    }
}

/// Waits until the containers that are being removed are removed, if containerd answers in time.
pub async fn removals_done() {
    // The next daemon removes the others.
    let _ = timeout(BEFORE_STOP, REMOVALS.write()).await;
}

impl Jobs {
    /// The settings ask for it.
    fn records_containers(&self) -> bool {
        self.environment().config.container_record
    }

    /// containerd can have a record of the sandbox: this project's shim serves its task.
    fn can_be_recorded(&self) -> bool {
        self.shim.serves_sandbox()
    }

    fn want(self: &Arc<Self>, next: Wanted) {
        if !self.can_be_recorded() {
            return;
        }
        if let Some(before) = self.container.want(next) {
            let jobs = self.clone();
            drop(tokio::spawn(async move {
                let attempt = |goal, failures| jobs.attempt(goal, failures);
                jobs.container.serve(before == Wanted::AsFound, attempt).await;
            }));
        }
    }

    /// The sandbox gets its container. Returns at once.
    pub fn record_container(self: &Arc<Self>) {
        if self.records_containers() {
            self.want(Wanted::Recorded);
        }
    }

    /// Waits until containerd has recorded the sandbox, or an attempt has failed, or the sandbox is
    /// removed. A slow containerd is waited for: its own timeout bounds the attempt.
    pub async fn container_recorded(&self) {
        tokio::select! {
            () = self.container.tried(Wanted::Recorded) => {}
            () = self.container.moved_on(Wanted::Recorded) => {}
        }
    }

    /// The pod's shim serves: the sandbox gets its task. Returns at once.
    pub fn record_task(self: &Arc<Self>) {
        if self.records_containers() {
            self.want(Wanted::WithTask);
        }
    }

    /// The pause process has exited: its task is deleted. Returns at once.
    pub fn delete_task(self: &Arc<Self>) {
        self.want(Wanted::WithoutTask);
    }

    /// Deletes the task before its server, the pod's shim, ends, if containerd answers in time.
    pub async fn task_deleted(self: &Arc<Self>) {
        self.delete_task();
        // The shim ends all the same.
        let _ = timeout(BEFORE_SHIM_ENDS, self.container.tried(Wanted::WithoutTask)).await;
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
        self.want(Wanted::Absent);
    }
}

#[cfg(test)]
mod tests;
