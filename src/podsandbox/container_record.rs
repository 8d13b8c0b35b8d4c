//! The sandbox as a container with a task in containerd, as the built-in controller's are: cAdvisor
//! finds the pod's network by them, and `ctr` lists them.
//!
//! ```text
//!   Create        the pod's shim serves      the pause has exited       removed
//!     |                    |                          |                    |
//!  container ------> container, task ------------> container ----------> nothing
//! ```
//!
//! Create waits a moment until the container is recorded: cAdvisor looks for it once, when the
//! pod's cgroup appears in Start. A task needs a server, which is the pod's own shim; a pod without
//! containers has none and gets no task. The task, and the removal at the end, follow the calls
//! that cause them, so that containerd's database does not delay these. All of it is done by a
//! worker, one at a time per sandbox, and is tried again: containerd may be down or refuse, and the
//! pod runs all the same.

use std::pin::pin;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::timeout;

mod worker;

pub use worker::removals_done;

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

impl Goal {
    /// The call of containerd that has caused the goal still runs, and does not need it.
    fn follows_a_call(self) -> bool {
        matches!(self, Self::Task | Self::Nothing)
    }
}

/// The progress towards a goal.
#[derive(Debug, Default)]
struct Progress {
    goal: Goal,
    /// What containerd has, as far as it is known; [`Goal::Any`]: unknown.
    done: Goal,
    /// Number of goals set so far.
    goal_number: u32,
    /// A worker is running.
    working: bool,
    /// Its last try has failed.
    failing: bool,
}

/// A sandbox's record in containerd. Of a sandbox of an earlier daemon it is not known.
#[derive(Debug, Default)]
pub struct ContainerRecord {
    progress: Mutex<Progress>,
    /// Wakes who waits for the goal, and the worker that waits to try again.
    changed: Notify,
}

impl ContainerRecord {
    /// The sandbox is new: containerd has nothing of it.
    pub fn set_new(&self) {
        self.progress.lock().done = Goal::Nothing;
    }

    /// Changes the goal. True: a worker is to be started.
    fn set_goal(&self, goal: Goal) -> bool {
        let mut progress = self.progress.lock();
        // Nothing is made for a sandbox that is being removed.
        let ends = |goal| matches!(goal, Goal::NoTask | Goal::Nothing);
        if progress.goal == Goal::Nothing || ends(progress.goal) && !ends(goal) {
            return false;
        }
        if progress.goal != goal || goal == Goal::Task {
            (progress.goal, progress.failing) = (goal, false);
            progress.goal_number = progress.goal_number.wrapping_add(1);
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

    /// The current goal and its number. `None` if the goal is reached or given up; the worker then
    /// stops.
    fn next(&self) -> Option<(Goal, u32)> {
        let mut progress = self.progress.lock();
        if progress.is_done() {
            progress.working = false;
            self.changed.notify_waiters();
            return None;
        }
        // An answer may be lost.
        progress.done = Goal::Any;
        Some((progress.goal, progress.goal_number))
    }

    /// No newer goal than this one is set.
    fn is_current(&self, goal_number: u32) -> bool {
        self.progress.lock().goal_number == goal_number
    }

    /// The goal of this number is reached.
    fn reached(&self, goal: Goal, goal_number: u32) {
        let mut progress = self.progress.lock();
        if progress.goal_number == goal_number {
            (progress.done, progress.failing) = (goal, false);
        }
        self.changed.notify_waiters();
    }

    fn failed(&self) {
        self.progress.lock().failing = true;
        self.changed.notify_waiters();
    }

    /// Waits until a newer goal than this one is set, at most `within`.
    async fn wait_for_newer_goal(&self, goal_number: u32, within: Duration) {
        let other = async {
            loop {
                let mut changed = pin!(self.changed.notified());
                changed.as_mut().enable();
                if self.progress.lock().goal_number != goal_number {
                    return;
                }
                changed.await;
            }
        };
        // Then the next try is due.
        let _ = timeout(within, other).await;
    }

    /// Gives up the goal of this number.
    fn give_up(&self, goal_number: u32) {
        let mut progress = self.progress.lock();
        match progress.goal {
            _ if progress.goal_number != goal_number => {}
            // Nothing is made after it.
            Goal::Nothing => progress.done = Goal::Nothing,
            _ => progress.goal = Goal::Any,
        }
    }

    /// Waits until the goal is reached or given up, or a try has failed; at most that long.
    async fn settled(&self, within: Duration) {
        self.wait(within, Progress::is_settled).await;
    }

    /// As [`Self::settled`], for the container alone: also until another goal is set. False: the
    /// container is the goal, and is not made.
    async fn recorded(&self, within: Duration) -> bool {
        let other = |progress: &Progress| progress.goal != Goal::Container;
        self.wait(within, |progress| other(progress) || progress.is_settled()).await;
        let progress = self.progress.lock();
        other(&progress) || progress.is_done()
    }

    /// Waits until the progress is `enough`, at most that long.
    async fn wait(&self, within: Duration, enough: impl Fn(&Progress) -> bool) {
        let waits = async {
            loop {
                let mut changed = pin!(self.changed.notified());
                changed.as_mut().enable();
                if enough(&self.progress.lock()) {
                    return;
                }
                changed.await;
            }
        };
        // Without it the sandbox continues.
        let _ = timeout(within, waits).await;
    }
}

impl Progress {
    /// Nothing is being tried.
    fn is_settled(&self) -> bool {
        self.is_done() || self.failing || !self.working
    }

    fn is_done(&self) -> bool {
        match (self.goal, self.done) {
            (Goal::Any, _) => true,
            (Goal::Container, Goal::Container | Goal::Task) => true,
            (Goal::NoTask, Goal::Container | Goal::Nothing) => true,
            (goal, done) => goal == done,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A_MOMENT: Duration = Duration::from_millis(250);

    fn new() -> ContainerRecord {
        let record = ContainerRecord::default();
        record.set_new();
        record
    }

    /// What a worker works on that begins with this goal.
    fn step(record: &ContainerRecord, goal: Goal) -> Option<(Goal, u32)> {
        record.set_goal(goal).then(|| record.next()).flatten()
    }

    fn begins(record: &ContainerRecord, goal: Goal) -> u32 {
        let (next, goal_number) = step(record, goal).unwrap();
        assert_eq!(next, goal);
        goal_number
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
        assert!(!record.set_goal(Goal::Task), "one worker is running");
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
        let goal_number = begins(&record, Goal::Task);
        // A later goal is not given up with the one before.
        assert!(!record.set_goal(Goal::Nothing));
        record.give_up(goal_number);
        assert_eq!(record.next().map(|(goal, _)| goal), Some(Goal::Nothing));
    }

    #[test]
    fn what_may_have_been_made_is_removed() {
        let record = new();
        // The answer was lost.
        begins(&record, Goal::Container);
        record.failed();
        record.set_goal(Goal::Nothing);
        assert_eq!(record.next().map(|(goal, _)| goal), Some(Goal::Nothing));
    }

    #[tokio::test(start_paused = true)]
    async fn waiting_for_the_record_is_bounded() {
        let record = new();
        record.settled(A_MOMENT).await;
        let goal_number = begins(&record, Goal::Container);
        let begun = tokio::time::Instant::now();
        record.settled(A_MOMENT).await;
        assert_eq!(begun.elapsed(), A_MOMENT);
        record.failed();
        record.settled(Duration::MAX).await;
        record.reached(Goal::Container, goal_number);
        record.settled(Duration::MAX).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_container_that_is_not_made_is_reported_while_it_is_wanted() {
        let record = new();
        begins(&record, Goal::Container);
        assert!(!record.recorded(A_MOMENT).await, "it takes longer");
        record.failed();
        assert!(!record.recorded(Duration::MAX).await, "a try has failed");
        // Shutdown, while the call to containerd hangs.
        record.set_goal(Goal::NoTask);
        assert!(record.recorded(Duration::MAX).await);
        record.failed();
        assert!(record.recorded(Duration::MAX).await);

        let made = new();
        does(&made, Goal::Container);
        assert!(made.recorded(Duration::MAX).await);
        let given_up = new();
        given_up.give_up(begins(&given_up, Goal::Container));
        assert!(given_up.recorded(Duration::MAX).await);
    }
}
