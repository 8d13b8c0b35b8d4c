//! The wanted state, and the task that follows it, with attempts of the tests' own.

use std::sync::Mutex;

use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::*;
use ControlFlow::{Break, Continue};
use Wanted::{Absent, Recorded, WithTask, WithoutTask};

/// The attempts that were made: state, number of failures before it.
type Attempts = Arc<Mutex<Vec<(Wanted, u32)>>>;

fn new() -> Arc<ContainerRecord> {
    let record = ContainerRecord::default();
    record.set_new();
    Arc::new(record)
}

/// Follows a record with attempts that wait for `goes_on`, if there is one, and end as `result`
/// says.
fn serve(
    record: &Arc<ContainerRecord>,
    may_have_task: bool,
    goes_on: Option<Arc<Notify>>,
    result: fn(Wanted, u32) -> ControlFlow<()>,
) -> (Attempts, JoinHandle<()>) {
    let (attempts, record) = (Attempts::default(), record.clone());
    let seen = attempts.clone();
    let task = tokio::spawn(async move {
        let attempt = |goal, failures| {
            seen.lock().unwrap().push((goal, failures));
            let goes_on = goes_on.clone();
            async move {
                if let Some(goes_on) = goes_on {
                    goes_on.notified().await;
                }
                result(goal, failures)
            }
        };
        record.serve(may_have_task, attempt).await;
    });
    (attempts, task)
}

/// Lets the task do all work that is due within a second.
async fn settle() {
    tokio::time::sleep(Duration::from_millis(999)).await;
}

fn made(attempts: &Attempts) -> Vec<Wanted> {
    attempts.lock().unwrap().drain(..).map(|(goal, _)| goal).collect()
}

#[tokio::test(start_paused = true)]
async fn a_sandbox_gets_a_container_then_a_task_and_loses_both() {
    let record = new();
    assert_eq!(record.want(Recorded), Some(Wanted::New), "the task is to be started");
    let (attempts, task) = serve(&record, false, None, |_, _| Break(()));
    for goal in [Recorded, WithTask, WithoutTask, Absent] {
        record.want(goal);
        settle().await;
        assert_eq!(made(&attempts), [goal]);
    }
    assert_eq!(record.want(WithTask), None, "a removed sandbox gets none");
    task.await.unwrap();
    assert_eq!(made(&attempts), []);
}

#[test]
fn what_was_never_made_is_not_removed() {
    let record = new();
    for goal in [WithoutTask, Absent] {
        assert_eq!(record.want(goal), None);
        assert_eq!(*record.wanted.borrow(), Wanted::New);
    }
    let found = ContainerRecord::default();
    assert_eq!(found.want(WithoutTask), Some(Wanted::AsFound), "by an earlier daemon");
}

#[tokio::test(start_paused = true)]
async fn a_task_that_was_never_made_is_not_deleted() {
    for (may_have_task, expected) in [(false, vec![Recorded]), (true, vec![Recorded, WithoutTask])]
    {
        let record = new();
        record.want(Recorded);
        let (attempts, _task) = serve(&record, may_have_task, None, |_, _| Break(()));
        settle().await;
        record.want(WithoutTask);
        record.tried(WithoutTask).await;
        assert_eq!(made(&attempts), expected);
    }
}

#[tokio::test(start_paused = true)]
async fn the_next_shim_gets_a_task_again() {
    let (record, goes_on) = (new(), Arc::new(Notify::new()));
    record.want(WithTask);
    let (attempts, _task) = serve(&record, false, Some(goes_on.clone()), |_, _| Break(()));
    settle().await;
    assert_eq!(record.want(Recorded), None, "it has one");
    assert_eq!(record.want(WithTask), None, "one task is running");
    // The attempt for the shim before ends now.
    goes_on.notify_one();
    settle().await;
    assert_eq!(made(&attempts), [WithTask, WithTask]);
    goes_on.notify_one();
    settle().await;
    assert_eq!(made(&attempts), [], "it is reached");
}

#[tokio::test(start_paused = true)]
async fn an_attempt_that_failed_is_repeated_until_another_state_is_wanted() {
    let record = new();
    record.want(WithTask);
    let (attempts, task) = serve(&record, false, None, |goal, failures| match (goal, failures) {
        (WithTask, _) | (_, 0) => Continue(()),
        _ => Break(()),
    });
    tokio::time::sleep(Duration::from_secs(600)).await;
    let seen = std::mem::take(&mut *attempts.lock().unwrap());
    assert!(seen.len() > 10, "{seen:?}");
    assert_eq!(seen[9], (WithTask, 9));
    // The delay is a minute by now.
    record.want(Absent);
    settle().await;
    settle().await;
    assert_eq!(made(&attempts), [Absent, Absent], "nothing in between, and tried again");
    task.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_late_failure_of_an_older_state_does_not_end_the_wait_for_a_newer_one() {
    let (record, goes_on) = (new(), Arc::new(Notify::new()));
    record.want(Recorded);
    let (attempts, _task) = serve(&record, true, Some(goes_on.clone()), |_, _| Continue(()));
    settle().await;
    record.want(WithoutTask);
    let waiting = record.clone();
    let waits = tokio::spawn(async move { waiting.tried(WithoutTask).await });
    settle().await;
    // The attempt to make the container fails.
    goes_on.notify_one();
    settle().await;
    assert!(!waits.is_finished(), "nothing is known of the task yet");
    goes_on.notify_one();
    waits.await.unwrap();
    assert_eq!(made(&attempts), [Recorded, WithoutTask]);
}

#[tokio::test(start_paused = true)]
async fn create_waits_for_one_attempt_however_long_it_takes() {
    let (record, goes_on) = (new(), Arc::new(Notify::new()));
    record.tried(Recorded).await;
    record.want(Recorded);
    let (_attempts, _task) = serve(&record, false, Some(goes_on.clone()), |_, _| Continue(()));
    let begun = Instant::now();
    let minute = Duration::from_secs(60);
    assert!(timeout(minute, record.tried(Recorded)).await.is_err(), "it waits");
    goes_on.notify_one();
    record.tried(Recorded).await;
    assert_eq!(begun.elapsed(), minute, "a failure ends the wait");
}
