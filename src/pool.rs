//! Threads for work that blocks.
//!
//! Long work is a task, which waits without a thread; only its blocking pieces get one, by [`run`].
//! A piece is short, and never waits for another piece, nor for a lock that is held across one.
//! Each class of pieces has threads of its own: pieces of one class that hang keep no other class
//! from its work. A piece of recovery that hangs keeps no other piece of recovery from its work
//! either: after [`TURN`] it gives its turn up, and keeps only its thread. This is the only module
//! that hands work to the runtime's blocking threads (`clippy.toml`).

use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Semaphore, SemaphorePermit, oneshot};

use crate::error::StepError;

/// What a piece belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Create and Start.
    Start,
    /// Stop and Shutdown, and what follows the end of a pause.
    End,
    /// The pods' shims: looked for, launched, cleaned up after.
    Shim,
    /// Status, and what operators ask.
    Query,
    /// What recovery looks at. It gives a piece up that takes too long, and the piece keeps its
    /// thread.
    Recovery,
}

/// How long a piece of recovery keeps others waiting for its turn: as long as recovery waits for
/// it.
pub const TURN: Duration = Duration::from_secs(10);

/// How many pieces may run without a turn. A node on which more records hang in the kernel needs a
/// reboot; the records beyond are quarantined, and their pods run.
const OVERDUE: usize = 128;

static START: Semaphore = Semaphore::const_new(Class::Start.threads());
static END: Semaphore = Semaphore::const_new(Class::End.threads());
static SHIM: Semaphore = Semaphore::const_new(Class::Shim.threads());
static QUERY: Semaphore = Semaphore::const_new(Class::Query.threads());
static RECOVERY: Semaphore = Semaphore::const_new(Class::Recovery.threads());

/// Of pieces that gave up their turn.
static OVERDUE_TURNS: Semaphore = Semaphore::const_new(OVERDUE);

/// For what the libraries do on such threads.
const OTHERS: usize = 8;

/// Threads that the runtime must have for this: all of all classes.
pub const THREADS: usize = Class::Start.threads()
    + Class::End.threads()
    + Class::Shim.threads()
    + Class::Query.threads()
    + Class::Recovery.threads()
    + OVERDUE
    + OTHERS;

impl Class {
    /// The classes that living pods need.
    pub const VITAL: [Self; 4] = [Self::Start, Self::End, Self::Shim, Self::Query];

    /// How many pieces run at once; more wait for their turn, in their order, without a thread.
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

    fn turns(self) -> &'static Semaphore {
        match self {
            Self::Start => &START,
            Self::End => &END,
            Self::Shim => &SHIM,
            Self::Query => &QUERY,
            Self::Recovery => &RECOVERY,
        }
    }
}

/// Runs a piece on a thread of its class. When the future is dropped, a piece that has begun runs
/// to its end, and one that has not is dropped.
///
/// # Errors
/// The piece has panicked, no thread can be started, or the runtime is going down.
#[expect(clippy::disallowed_methods, reason = "the one place that does")]
pub async fn run<T: Send + 'static>(
    class: Class,
    piece: impl FnOnce() -> T + Send + 'static,
) -> Result<T, StepError> {
    let ending = || StepError::new("run job", io::Error::other("the runtime is going down"));
    let turn = class.turns().acquire().await.map_err(|_| ending())?;
    let (sender, mut receiver) = oneshot::channel();
    let turn = Arc::new(Mutex::new(Some(turn)));
    let job = Arc::new(Mutex::new(Some((Arc::clone(&turn), piece, sender))));
    let queued = Arc::clone(&job);
    let work = move || {
        let Some((turn, piece, sender)) = take_slot(&queued) else { return };
        let done = catch_unwind(AssertUnwindSafe(piece)).map_err(|panic| panicked(&*panic));
        // Held for as long as the thread is, also when the future is dropped.
        drop(take_slot(&turn));
        let _ = sender.send(done);
    };
    // The runtime panics where it has no thread and can start none, and keeps the job: a later
    // thread must find nothing in it.
    if catch_unwind(AssertUnwindSafe(|| drop(tokio::task::spawn_blocking(work)))).is_err()
        && take_slot(&job).is_some()
    {
        return Err(StepError::new("start a thread", io::Error::from_raw_os_error(libc::EAGAIN)));
    }
    if class == Class::Recovery {
        tokio::select! {
            biased;
            done = &mut receiver => return done.unwrap_or_else(|_| Err(ending())),
            overdue = overdue() => {
                // The piece may have ended meanwhile, and its turn with it.
                let mut turn = turn.lock();
                if turn.is_some() {
                    *turn = overdue;
                }
            }
        }
    }
    receiver.await.unwrap_or_else(|_| Err(ending()))
}

/// What a piece that has had its time holds instead of its turn.
async fn overdue() -> Option<SemaphorePermit<'static>> {
    tokio::time::sleep(TURN).await;
    // Never closed.
    OVERDUE_TURNS.acquire().await.ok()
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

/// The classes that living pods need and that have no free thread in time; all of them where the
/// runtime runs no piece at all.
///
/// One empty piece answers for the threads of all classes, as there are as many as turns. One for
/// each class would keep that many threads from ending, on a node where nothing happens.
pub async fn stuck(within: Duration) -> Vec<Class> {
    let turns = Class::VITAL.map(|class| async move {
        let turn = tokio::time::timeout(within, class.turns().acquire()).await;
        (!matches!(turn, Ok(Ok(_)))).then_some(class)
    });
    let stuck: Vec<Class> = futures::future::join_all(turns).await.into_iter().flatten().collect();
    let Some(free) = Class::VITAL.into_iter().find(|class| !stuck.contains(class)) else {
        return stuck;
    };
    let ran = tokio::time::timeout(within, run(free, || ())).await;
    if matches!(ran, Ok(Ok(()))) { stuck } else { Class::VITAL.to_vec() }
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

    /// As on a node that has no process ids left: the runtime's threads are to have more stack than
    /// there is memory.
    #[test]
    fn where_no_thread_can_be_started_a_piece_fails_and_never_runs() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .thread_stack_size(1 << 60)
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let failed = run(Class::Recovery, || unreachable!()).await.unwrap_err();
            assert_eq!(
                failed.to_string(),
                "start a thread: Resource temporarily unavailable (os error 11)"
            );
            assert_eq!(stuck(Duration::from_secs(10)).await, Class::VITAL);
        });
    }

    /// Pieces of one class hang, more of it than there are threads: the others run, and the probe
    /// says which hangs.
    #[test]
    fn pieces_that_hang_keep_no_other_class_from_its_work() {
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
            while SHIM.available_permits() > 0 {
                tokio::task::yield_now().await;
            }
            assert_eq!(stuck(Duration::from_millis(200)).await, [Class::Shim]);
            drop(ends);
            for hung in hanging {
                hung.await.unwrap().unwrap();
            }
            assert_eq!(stuck(Duration::from_secs(10)).await, []);
        });
    }

    /// The clock does not advance by itself while pieces run.
    async fn pass(time: Duration) {
        async fn settle() {
            for _ in 0..1000 {
                tokio::task::yield_now().await;
            }
        }
        settle().await;
        tokio::time::advance(time).await;
        settle().await;
    }

    /// As records of a file system that does not answer, more than there are threads.
    #[test]
    fn pieces_of_recovery_that_hang_keep_no_other_one_from_its_work() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .max_blocking_threads(THREADS)
            .enable_all()
            .start_paused(true)
            .build()
            .unwrap();
        runtime.block_on(async {
            let mut ends = Vec::new();
            let mut hanging = Vec::new();
            let mut hang = |number| {
                for _ in 0..number {
                    let (end, ended) = mpsc::channel::<()>();
                    ends.push(end);
                    let piece = run(Class::Recovery, move || assert!(ended.recv().is_err()));
                    hanging.push(tokio::spawn(piece));
                }
            };
            hang(Class::Recovery.threads());
            let next = tokio::spawn(run(Class::Recovery, || ()));
            pass(TURN - Duration::from_secs(1)).await;
            assert!(!next.is_finished(), "more pieces run than there are turns");
            pass(Duration::from_secs(1)).await;
            next.await.unwrap().unwrap();
            // Their threads are bounded all the same.
            hang(OVERDUE);
            let last = tokio::spawn(run(Class::Recovery, || ()));
            for _ in 0..2 * OVERDUE / Class::Recovery.threads() {
                pass(TURN).await;
            }
            assert!(!last.is_finished(), "more threads hang than there may be");
            drop(ends);
            for piece in hanging {
                piece.await.unwrap().unwrap();
            }
            last.await.unwrap().unwrap();
            assert_eq!(OVERDUE_TURNS.available_permits(), OVERDUE);
        });
    }

    #[tokio::test]
    async fn a_piece_that_is_given_up_keeps_its_turn() {
        let (end, ended) = mpsc::channel::<()>();
        let given_up = tokio::time::timeout(
            Duration::from_millis(10),
            run(Class::Recovery, move || assert!(ended.recv().is_err())),
        );
        assert!(given_up.await.is_err());
        assert!(RECOVERY.available_permits() < Class::Recovery.threads());
        drop(end);
        while RECOVERY.available_permits() < Class::Recovery.threads() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}
