//! Threads for blocking tasks.
//!
//! Long work is an async task and waits without a thread. Only its blocking parts run on a thread,
//! by [`run`]. A blocking task is short. It never waits for another blocking task, nor for a lock
//! that is held across one. Each class has its own permits, so that tasks of one class that hang do
//! not block another class. A task of [`Class::Recovery`] or [`Class::Shim`] that hangs does not
//! block its own class either: after [`PERMIT_TIMEOUT`] it gives its permit back and occupies only
//! its thread. No other module calls tokio's `spawn_blocking` (`clippy.toml`).

use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Semaphore, SemaphorePermit, oneshot};
use tokio::time::Instant;

use crate::error::StepError;

/// The class of a blocking task; each has its own limit of threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Create and Start.
    Start,
    /// Stop and Shutdown, and what follows the end of a pause process.
    End,
    /// The pods' shims: search, launch, cleanup. They depend on file systems and
    /// processes of one pod, which may hang while those of the others do not.
    Shim,
    /// Status, and queries of operators.
    Query,
    /// The steps of recovery, which stops waiting for a task that takes too long. The task keeps
    /// its thread.
    Recovery,
}

/// How long a blocking task of recovery or of a shim may hold its permit. Equal to the time limit
/// of one record in recovery, and shorter than the watchdog timeout of the packaged unit.
pub const PERMIT_TIMEOUT: Duration = Duration::from_secs(10);

/// How many overdue tasks of one class may run without a permit. With more of them, recovery
/// quarantines further records (their pods run), tasks of shims wait, and the daemon logs that the
/// class is blocked. A node with so many tasks that hang in the kernel needs a reboot.
const OVERDUE: usize = 128;

static START: Permits = Permits::for_class(Class::Start);
static END: Permits = Permits::for_class(Class::End);
static SHIM: Permits = Permits::for_class(Class::Shim);
static QUERY: Permits = Permits::for_class(Class::Query);
static RECOVERY: Permits = Permits::for_class(Class::Recovery);

/// Threads for blocking work of libraries.
const OTHERS: usize = 8;

/// Threads that the runtime must have for this: all of all classes.
pub const THREADS: usize = Class::Start.threads()
    + Class::End.threads()
    + Class::Shim.threads()
    + Class::Query.threads()
    + Class::Recovery.threads()
    + 2 * OVERDUE
    + OTHERS;

impl Class {
    /// All classes.
    pub const ALL: [Self; 5] = [Self::Start, Self::End, Self::Shim, Self::Query, Self::Recovery];

    /// How many tasks run at once. Further ones wait for a permit in their order, without a thread.
    pub const fn threads(self) -> usize {
        match self {
            Self::Start | Self::Query => 16,
            Self::End | Self::Shim => 24,
            Self::Recovery => 32,
        }
    }

    /// Its name in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::End => "end",
            Self::Shim => "shim",
            Self::Query => "query",
            Self::Recovery => "recovery",
        }
    }

    /// Whether an overdue task gives its permit back.
    const fn releases_overdue(self) -> bool {
        matches!(self, Self::Shim | Self::Recovery)
    }

    /// The time for which tasks of the class have waited without one of them getting a thread; zero
    /// if none waits.
    ///
    /// This measures the threads, not the queue: each task that begins sets it back, however many
    /// are behind it. A task begins as soon as another one ends, so a class is stalled only while
    /// none of its tasks ends.
    pub fn stalled(self) -> Duration {
        self.permits().stalled()
    }

    fn permits(self) -> &'static Permits {
        match self {
            Self::Start => &START,
            Self::End => &END,
            Self::Shim => &SHIM,
            Self::Query => &QUERY,
            Self::Recovery => &RECOVERY,
        }
    }
}

/// The permits of a class.
struct Permits {
    /// One for each task that may run at once.
    free: Semaphore,
    /// Permits of overdue tasks, which gave theirs back; `None`: the class has no time limit.
    overdue: Option<Semaphore>,
    queue: Mutex<Queue>,
}

/// The tasks of a class that have not begun.
struct Queue {
    waiting: usize,
    /// When the last task began, or the first one that waits was queued. `None`: none waits.
    since: Option<Instant>,
}

/// A task that has not begun: it waits for a permit or for a thread.
struct Waiting(&'static Permits);

impl Waiting {
    fn new(permits: &'static Permits) -> Self {
        let mut queue = permits.queue.lock();
        queue.waiting += 1;
        queue.since.get_or_insert_with(Instant::now);
        drop(queue);
        Self(permits)
    }

    /// The task has a thread.
    fn begin(self) {
        self.0.queue.lock().since = Some(Instant::now());
    }
}

impl Drop for Waiting {
    /// A task whose caller gives up is no progress of the others.
    fn drop(&mut self) {
        let mut queue = self.0.queue.lock();
        queue.waiting -= 1;
        if queue.waiting == 0 {
            queue.since = None;
        }
    }
}

/// The permit that a task holds while it runs.
type Permit = Arc<Mutex<Option<SemaphorePermit<'static>>>>;

/// Runs a blocking task on a thread, within the permits of its class. If the future is dropped, a
/// task that has begun runs to its end, and one that has not is dropped.
///
/// # Errors
/// The task panicked, no thread can be started, or the runtime is shutting down.
pub async fn run<T: Send + 'static>(
    class: Class,
    task: impl FnOnce() -> T + Send + 'static,
) -> Result<T, StepError> {
    class.permits().run(task).await
}

impl Permits {
    const fn for_class(class: Class) -> Self {
        let overdue =
            if class.releases_overdue() { Some(Semaphore::const_new(OVERDUE)) } else { None };
        let queue = Mutex::new(Queue { waiting: 0, since: None });
        Self { free: Semaphore::const_new(class.threads()), overdue, queue }
    }

    /// Implements [`Class::stalled`].
    fn stalled(&self) -> Duration {
        self.queue.lock().since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Implements [`run`].
    #[expect(clippy::disallowed_methods, reason = "the one place that does")]
    async fn run<T: Send + 'static>(
        &'static self,
        task: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, StepError> {
        let ending = || StepError::new("run job", io::Error::other("the runtime is shutting down"));
        let waiting = Waiting::new(self);
        let permit = self.free.acquire().await.map_err(|_| ending())?;
        let permit: Permit = Arc::new(Mutex::new(Some(permit)));
        let ((sender, receiver), (end, ended)) = (oneshot::channel(), oneshot::channel::<()>());
        let job = Arc::new(Mutex::new(Some((Arc::clone(&permit), waiting, task, sender, end))));
        let queued = Arc::clone(&job);
        let work = move || {
            let Some((permit, waiting, task, sender, end)) = take_slot(&queued) else { return };
            waiting.begin();
            let done = catch_unwind(AssertUnwindSafe(task)).map_err(|panic| panicked(&*panic));
            // The task holds its permit until here, also when the future is dropped.
            drop(take_slot(&permit));
            drop(end);
            let _ = sender.send(done);
        };
        // The runtime panics where it has no thread and can start none, and keeps the job: a later
        // thread must find nothing in it.
        if catch_unwind(AssertUnwindSafe(|| drop(tokio::task::spawn_blocking(work)))).is_err()
            && take_slot(&job).is_some()
        {
            let error = io::Error::from_raw_os_error(libc::EAGAIN);
            return Err(StepError::new("start a thread", error));
        }
        if let Some(overdue) = &self.overdue {
            // This includes a task whose caller has stopped waiting.
            tokio::spawn(release_overdue(permit, overdue, ended));
        }
        receiver.await.unwrap_or_else(|_| Err(ending()))
    }
}

/// Replaces the permit of an overdue task by one of the overdue tasks.
async fn release_overdue(
    permit: Permit,
    overdue: &'static Semaphore,
    ended: oneshot::Receiver<()>,
) {
    if tokio::time::timeout(PERMIT_TIMEOUT, ended).await.is_ok() {
        return;
    }
    // Never closed.
    let Ok(overdue) = overdue.acquire().await else { return };
    let mut permit = permit.lock();
    // The task may have ended meanwhile and released its permit.
    if permit.is_some() {
        *permit = Some(overdue);
    }
}

/// A panic elsewhere leaves the value whole.
fn take_slot<T>(slot: &Mutex<Option<T>>) -> Option<T> {
    slot.lock().take()
}

/// A panic as a failed step.
pub fn panicked(panic: &(dyn Any + Send)) -> StepError {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
    StepError::new("run job", io::Error::other(format!("panicked: {text}")))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn a_panic_is_a_failed_step() {
        let failed = run::<()>(Class::Recovery, || panic!("on order")).await.unwrap_err();
        assert_eq!(failed.to_string(), "run job: panicked: on order");
    }

    /// The runtime cannot start a thread, as on a node without free process ids: its threads need
    /// more stack than there is memory.
    #[test]
    fn where_no_thread_can_be_started_a_task_fails_and_never_runs() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .thread_stack_size(1 << 60)
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let permits: &'static Permits = Box::leak(Box::new(Permits::for_class(Class::Query)));
            let failed = permits.run(|| unreachable!()).await.unwrap_err();
            assert_eq!(
                failed.to_string(),
                "start a thread: Resource temporarily unavailable (os error 11)"
            );
            // The next daemon would have no thread either.
            assert_eq!(permits.stalled(), Duration::ZERO);
        });
    }

    /// More tasks of one class hang than it has threads: the other classes run.
    #[test]
    fn tasks_that_hang_do_not_block_another_class() {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .max_blocking_threads(THREADS)
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let mut ends = Vec::new();
            let hanging: Vec<_> = (0..2 * Class::Shim.threads())
                .map(|_| {
                    let (end, ended) = mpsc::channel::<()>();
                    ends.push(end);
                    tokio::spawn(run(Class::Shim, move || assert!(ended.recv().is_err())))
                })
                .collect();
            while SHIM.stalled() < Duration::from_millis(10) {
                tokio::task::yield_now().await;
            }
            for class in [Class::Start, Class::End, Class::Query] {
                run(class, || ()).await.unwrap();
                assert_eq!(class.stalled(), Duration::ZERO, "{}", class.name());
            }
            drop(ends);
            for hung in hanging {
                hung.await.unwrap().unwrap();
            }
            assert_eq!(SHIM.stalled(), Duration::ZERO);
        });
    }

    /// A node with many pods and a slow disk boots: the last task waits for much longer
    /// than any task runs.
    #[tokio::test(start_paused = true)]
    async fn a_long_queue_is_not_a_stall_while_its_tasks_end() {
        const TASK: Duration = Duration::from_secs(8);
        let permits: &'static Permits = Box::leak(Box::new(Permits::for_class(Class::Start)));
        let mut ends = Vec::new();
        let tasks: Vec<_> = (0..10 * Class::Start.threads())
            .map(|_| {
                let (end, ended) = mpsc::channel::<()>();
                ends.push(end);
                tokio::spawn(permits.run(move || assert!(ended.recv().is_err())))
            })
            .collect();
        let mut waiting = ends.len() - Class::Start.threads();
        only_wait(permits, waiting).await;
        for (number, task) in tasks.into_iter().enumerate() {
            tokio::time::advance(TASK).await;
            let expected = if waiting > 0 { TASK } else { Duration::ZERO };
            assert_eq!(permits.stalled(), expected, "task {number}");
            // The end of this one is the beginning of the next.
            ends[number] = mpsc::channel().0;
            assert!(finishes(&task).await);
            waiting = waiting.saturating_sub(1);
            only_wait(permits, waiting).await;
            assert_eq!(permits.stalled(), Duration::ZERO, "task {number}");
        }
    }

    /// Callers that give up are replaced by others: that is no progress.
    #[tokio::test(start_paused = true)]
    async fn a_class_whose_tasks_all_hang_is_stalled() {
        const STEP: Duration = Duration::from_secs(10);
        let permits: &'static Permits = Box::leak(Box::new(Permits::for_class(Class::Start)));
        let mut ends = Vec::new();
        for _ in 0..Class::Start.threads() {
            let (end, ended) = mpsc::channel::<()>();
            ends.push(end);
            tokio::spawn(permits.run(move || assert!(ended.recv().is_err())));
        }
        only_wait(permits, 0).await;
        tokio::time::advance(STEP).await;
        assert_eq!(permits.stalled(), Duration::ZERO, "no task waits");
        let first = tokio::spawn(permits.run(|| ()));
        only_wait(permits, 1).await;
        tokio::time::advance(STEP).await;
        assert_eq!(permits.stalled(), STEP);
        let second = tokio::spawn(permits.run(|| ()));
        only_wait(permits, 2).await;
        first.abort();
        only_wait(permits, 1).await;
        tokio::time::advance(STEP).await;
        assert_eq!(permits.stalled(), 2 * STEP);
        ends.pop();
        assert!(finishes(&second).await);
        assert_eq!(permits.stalled(), Duration::ZERO);
    }

    /// The clock does not advance by itself while blocking tasks run.
    async fn pass(time: Duration) {
        async fn yield_often() {
            for _ in 0..1000 {
                tokio::task::yield_now().await;
            }
        }
        yield_often().await;
        tokio::time::advance(time).await;
        yield_often().await;
    }

    /// A blocking task that has begun runs on its own thread, which needs real time.
    async fn finishes<T>(task: &tokio::task::JoinHandle<T>) -> bool {
        let begun = std::time::Instant::now();
        while !task.is_finished() && begun.elapsed() < Duration::from_secs(30) {
            std::thread::sleep(Duration::from_millis(1));
            tokio::task::yield_now().await;
        }
        task.is_finished()
    }

    /// Waits until so many tasks are left without a thread, and all others have begun.
    async fn only_wait(permits: &Permits, tasks: usize) {
        // All of them are queued first.
        pass(Duration::ZERO).await;
        let begun = std::time::Instant::now();
        while permits.queue.lock().waiting != tasks {
            assert!(begun.elapsed() < Duration::from_secs(30), "{tasks} tasks do not wait");
            tokio::task::yield_now().await;
        }
    }

    /// More records or shims wait for a file system that does not answer than there are
    /// threads.
    #[test]
    fn tasks_that_hang_give_their_permits_back() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .max_blocking_threads(THREADS)
            .enable_all()
            .start_paused(true)
            .build()
            .unwrap();
        for class in [Class::Recovery, Class::Shim] {
            // Other tests use the permits of the classes themselves.
            let permits: &'static Permits = Box::leak(Box::new(Permits::for_class(class)));
            runtime.block_on(async {
                let mut ends = Vec::new();
                let mut hanging = Vec::new();
                let mut hang = |number| {
                    for _ in 0..number {
                        let (end, ended) = mpsc::channel::<()>();
                        ends.push(end);
                        let task = permits.run(move || assert!(ended.recv().is_err()));
                        hanging.push(tokio::spawn(task));
                    }
                };
                hang(class.threads());
                let next = tokio::spawn(permits.run(|| ()));
                pass(PERMIT_TIMEOUT - Duration::from_secs(1)).await;
                assert!(!next.is_finished(), "more tasks run than there are permits");
                pass(Duration::from_secs(1)).await;
                assert!(finishes(&next).await, "tasks that hang keep their permits");
                next.await.unwrap().unwrap();
                // Their threads are bounded all the same.
                hang(OVERDUE);
                let last = tokio::spawn(permits.run(|| ()));
                for _ in 0..2 * OVERDUE / class.threads() {
                    pass(PERMIT_TIMEOUT).await;
                }
                assert!(!last.is_finished(), "more threads hang than there may be");
                drop(ends);
                for task in hanging {
                    task.await.unwrap().unwrap();
                }
                last.await.unwrap().unwrap();
                pass(Duration::ZERO).await;
                let overdue = permits.overdue.as_ref().unwrap();
                assert_eq!(overdue.available_permits(), OVERDUE);
                assert_eq!(permits.free.available_permits(), class.threads());
            });
        }
    }

    /// A caller with its own time limit has its answer while the task still hangs.
    #[tokio::test(start_paused = true)]
    async fn a_task_that_hangs_gives_its_permit_back_without_a_caller() {
        let permits: &'static Permits = Box::leak(Box::new(Permits::for_class(Class::Shim)));
        let (end, ended) = mpsc::channel::<()>();
        let task = tokio::spawn(permits.run(move || assert!(ended.recv().is_err())));
        pass(Duration::ZERO).await;
        task.abort();
        pass(Duration::ZERO).await;
        assert_eq!(permits.free.available_permits(), Class::Shim.threads() - 1);
        pass(PERMIT_TIMEOUT).await;
        assert_eq!(permits.free.available_permits(), Class::Shim.threads());
        drop(end);
    }

    #[tokio::test]
    async fn a_task_whose_caller_gives_up_keeps_its_permit() {
        let (end, ended) = mpsc::channel::<()>();
        let given_up = tokio::time::timeout(
            Duration::from_millis(10),
            run(Class::Recovery, move || assert!(ended.recv().is_err())),
        );
        assert!(given_up.await.is_err());
        assert!(RECOVERY.free.available_permits() < Class::Recovery.threads());
        drop(end);
        while RECOVERY.free.available_permits() < Class::Recovery.threads() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}
