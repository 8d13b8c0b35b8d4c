//! Threads for work that blocks.
//!
//! Long work is a task, which waits without a thread; only its blocking pieces get one, by [`run`].
//! A piece is short, and never waits for another piece, nor for a lock that is held across one.
//! Each class of pieces has threads of its own: pieces of one class that hang keep no other class
//! from its work. In recovery and in the work of shims, one that hangs keeps no other one of its
//! class from its work either: after [`TURN`] it gives its turn up, and keeps only its thread. This
//! is the only module that hands work to the runtime's blocking threads (`clippy.toml`).

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
    /// The pods' shims: looked for, launched, cleaned up after. They depend on file systems and
    /// processes of one pod, which may hang while those of the others do not.
    Shim,
    /// Status, and what operators ask.
    Query,
    /// What recovery looks at. It gives a piece up that takes too long, and the piece keeps its
    /// thread.
    Recovery,
}

/// How long a piece of recovery or of a shim keeps others waiting for its turn: as long as recovery
/// waits for it, and less than the watchdog of the packaged unit waits for a class.
pub const TURN: Duration = Duration::from_secs(10);

/// How many pieces of one class may run without a turn. A node on which more records or shims hang
/// in the kernel needs a reboot. The records beyond are quarantined, and their pods run; the shims
/// beyond wait, and the watchdog gets no keep-alive.
const OVERDUE: usize = 128;

static START: Turns = Turns::of(Class::Start);
static END: Turns = Turns::of(Class::End);
static SHIM: Turns = Turns::of(Class::Shim);
static QUERY: Turns = Turns::of(Class::Query);
static RECOVERY: Turns = Turns::of(Class::Recovery);

/// For what the libraries do on such threads.
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

    /// Whether a piece that has had its time gives its turn up.
    const fn gives_up(self) -> bool {
        matches!(self, Self::Shim | Self::Recovery)
    }

    fn turns(self) -> &'static Turns {
        match self {
            Self::Start => &START,
            Self::End => &END,
            Self::Shim => &SHIM,
            Self::Query => &QUERY,
            Self::Recovery => &RECOVERY,
        }
    }
}

/// The turns of a class.
struct Turns {
    /// As many as pieces run at once.
    free: Semaphore,
    /// Of pieces that gave their turn up; `None` where they keep it.
    overdue: Option<Semaphore>,
}

/// What a piece holds while it runs.
type Turn = Arc<Mutex<Option<SemaphorePermit<'static>>>>;

/// Runs a piece on a thread of its class. When the future is dropped, a piece that has begun runs
/// to its end, and one that has not is dropped.
///
/// # Errors
/// The piece has panicked, no thread can be started, or the runtime is going down.
pub async fn run<T: Send + 'static>(
    class: Class,
    piece: impl FnOnce() -> T + Send + 'static,
) -> Result<T, StepError> {
    class.turns().run(piece).await
}

impl Turns {
    const fn of(class: Class) -> Self {
        let overdue = if class.gives_up() { Some(Semaphore::const_new(OVERDUE)) } else { None };
        Self { free: Semaphore::const_new(class.threads()), overdue }
    }

    /// As [`run`].
    #[expect(clippy::disallowed_methods, reason = "the one place that does")]
    async fn run<T: Send + 'static>(
        &'static self,
        piece: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, StepError> {
        let ending = || StepError::new("run job", io::Error::other("the runtime is going down"));
        let turn = self.free.acquire().await.map_err(|_| ending())?;
        let turn: Turn = Arc::new(Mutex::new(Some(turn)));
        let ((sender, receiver), (end, ended)) = (oneshot::channel(), oneshot::channel::<()>());
        let job = Arc::new(Mutex::new(Some((Arc::clone(&turn), piece, sender, end))));
        let queued = Arc::clone(&job);
        let work = move || {
            let Some((turn, piece, sender, end)) = take_slot(&queued) else { return };
            let done = catch_unwind(AssertUnwindSafe(piece)).map_err(|panic| panicked(&*panic));
            // Held for as long as the thread is, also when the future is dropped.
            drop(take_slot(&turn));
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
            // Also of a piece for which no caller waits any longer.
            tokio::spawn(give_up(turn, overdue, ended));
        }
        receiver.await.unwrap_or_else(|_| Err(ending()))
    }
}

/// Has a piece that has had its time hold something else instead of its turn.
async fn give_up(turn: Turn, overdue: &'static Semaphore, ended: oneshot::Receiver<()>) {
    if tokio::time::timeout(TURN, ended).await.is_ok() {
        return;
    }
    // Never closed.
    let Ok(overdue) = overdue.acquire().await else { return };
    let mut turn = turn.lock();
    // The piece may have ended meanwhile, and its turn with it.
    if turn.is_some() {
        *turn = Some(overdue);
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

/// The classes that living pods need and that have no free thread in time; all of them where the
/// runtime runs no piece at all.
///
/// One empty piece answers for the threads of all classes, as there are as many as turns. One for
/// each class would keep that many threads from ending, on a node where nothing happens.
pub async fn stuck(within: Duration) -> Vec<Class> {
    let turns = Class::VITAL.map(|class| async move {
        let turn = tokio::time::timeout(within, class.turns().free.acquire()).await;
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
            while SHIM.free.available_permits() > 0 {
                tokio::task::yield_now().await;
            }
            assert_eq!(stuck(Duration::from_secs(2)).await, [Class::Shim]);
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

    /// A piece that has begun runs on a thread of its own, which needs time of the machine.
    async fn finishes<T>(task: &tokio::task::JoinHandle<T>) -> bool {
        let begun = std::time::Instant::now();
        while !task.is_finished() && begun.elapsed() < Duration::from_secs(30) {
            std::thread::sleep(Duration::from_millis(1));
            tokio::task::yield_now().await;
        }
        task.is_finished()
    }

    /// As records or shims that wait for a file system that does not answer, more than there are
    /// threads.
    #[test]
    fn pieces_that_hang_give_their_turns_up() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .max_blocking_threads(THREADS)
            .enable_all()
            .start_paused(true)
            .build()
            .unwrap();
        for class in [Class::Recovery, Class::Shim] {
            // Not the turns of other tests.
            let turns: &'static Turns = Box::leak(Box::new(Turns::of(class)));
            runtime.block_on(async {
                let mut ends = Vec::new();
                let mut hanging = Vec::new();
                let mut hang = |number| {
                    for _ in 0..number {
                        let (end, ended) = mpsc::channel::<()>();
                        ends.push(end);
                        let piece = turns.run(move || assert!(ended.recv().is_err()));
                        hanging.push(tokio::spawn(piece));
                    }
                };
                hang(class.threads());
                let next = tokio::spawn(turns.run(|| ()));
                pass(TURN - Duration::from_secs(1)).await;
                assert!(!next.is_finished(), "more pieces run than there are turns");
                pass(Duration::from_secs(1)).await;
                assert!(finishes(&next).await, "pieces that hang keep their turns");
                next.await.unwrap().unwrap();
                // Their threads are bounded all the same.
                hang(OVERDUE);
                let last = tokio::spawn(turns.run(|| ()));
                for _ in 0..2 * OVERDUE / class.threads() {
                    pass(TURN).await;
                }
                assert!(!last.is_finished(), "more threads hang than there may be");
                drop(ends);
                for piece in hanging {
                    piece.await.unwrap().unwrap();
                }
                last.await.unwrap().unwrap();
                pass(Duration::ZERO).await;
                let overdue = turns.overdue.as_ref().unwrap();
                assert_eq!(overdue.available_permits(), OVERDUE);
                assert_eq!(turns.free.available_permits(), class.threads());
            });
        }
    }

    /// A caller with a time limit of its own has its answer, and the piece hangs on.
    #[tokio::test(start_paused = true)]
    async fn a_piece_that_hangs_gives_its_turn_up_without_a_caller() {
        let turns: &'static Turns = Box::leak(Box::new(Turns::of(Class::Shim)));
        let (end, ended) = mpsc::channel::<()>();
        let piece = tokio::spawn(turns.run(move || assert!(ended.recv().is_err())));
        pass(Duration::ZERO).await;
        piece.abort();
        pass(Duration::ZERO).await;
        assert_eq!(turns.free.available_permits(), Class::Shim.threads() - 1);
        pass(TURN).await;
        assert_eq!(turns.free.available_permits(), Class::Shim.threads());
        drop(end);
    }

    #[tokio::test]
    async fn a_piece_that_is_given_up_keeps_its_turn() {
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
