//! The exit of a sandbox's pause process, which its actor waits for, and the retries of the work
//! that failed.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use tokio::time::timeout;

use crate::process::{Exit, Process};

/// Waits for the exit of one sandbox's pause process. Unarmed it waits for nothing and holds no
/// memory.
#[derive(Default)]
pub struct ExitWaiter(Option<BoxFuture<'static, Exit>>);

impl ExitWaiter {
    /// Waits for `pause`. An exit before this call is seen too: a pidfd is level-triggered.
    pub fn arm(&mut self, pause: Arc<dyn Process>) {
        self.0 = Some(Box::pin(async move {
            let exit = pause.exited().await;
            // The process is reaped; its descriptors close before its exit is published.
            drop(pause);
            exit
        }));
    }

    /// Waits for nothing any more.
    pub fn disarm(&mut self) {
        self.0 = None;
    }

    /// The exit, once; pending while the pause process lives, and while unarmed.
    pub fn poll_exit(&mut self, cx: &mut Context<'_>) -> Poll<Exit> {
        let Some(waiting) = &mut self.0 else { return Poll::Pending };
        let exit = std::task::ready!(waiting.poll_unpin(cx));
        self.disarm();
        Poll::Ready(exit)
    }
}

/// Delays between tries: `first`, doubling, at most `longest`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    first: Duration,
    longest: Duration,
}

/// The delays of the cleanup after an exit, of removals, and of restoring deleted files.
pub const CLEANUP: Backoff =
    Backoff { first: Duration::from_secs(1), longest: Duration::from_secs(300) };

/// The delays of changes in containerd that accompany a sandbox's life.
pub const CONTAINERD: Backoff =
    Backoff { first: Duration::from_secs(1), longest: Duration::from_secs(60) };

/// The delays of the socket and the start of a pod's shim, where containerd creates no container.
pub const SHIM: Backoff =
    Backoff { first: Duration::from_secs(1), longest: Duration::from_secs(60) };

impl Backoff {
    /// Delays from `first` to `longest`; `None` when `first` is zero or above `longest`.
    pub const fn new(first: Duration, longest: Duration) -> Option<Self> {
        if first.is_zero() || first.as_nanos() > longest.as_nanos() {
            None
        } else {
            Some(Self { first, longest })
        }
    }

    /// The same delay each time.
    pub const fn constant(delay: Duration) -> Self {
        Self { first: delay, longest: delay }
    }

    /// How long to wait after `failures` failures in a row; the first failure is 1.
    pub fn delay(&self, failures: u32) -> Duration {
        let factor = 1_u32.checked_shl(failures.saturating_sub(1)).unwrap_or(u32::MAX);
        self.first.saturating_mul(factor).min(self.longest)
    }
}

/// Calls `work` until it breaks, and returns its result. After each failure it waits for the delay
/// of `backoff`, or until the future of `wake` ends, which is made anew for each delay.
///
/// `work` gets the number of failures before it: with 0 it logs what later attempts need not
/// repeat, and where the first attempt was made elsewhere, it continues. It decides after a wake-up
/// whether there is still something to do. A wake-up during an attempt must not be lost:
/// `Notify::notify_one` and `watch` keep it, and `std::future::pending` is for work without one.
pub async fn retry<T, W, A>(
    backoff: Backoff,
    wake: impl Fn() -> W,
    mut work: impl FnMut(u32) -> A,
) -> T
where
    W: Future<Output = ()>,
    A: Future<Output = ControlFlow<T>>,
{
    let mut failures: u32 = 0;
    loop {
        if let ControlFlow::Break(result) = work(failures).await {
            return result;
        }
        failures = failures.saturating_add(1);
        // Both ends of the delay lead to the next attempt.
        let _ = timeout(backoff.delay(failures), wake()).await;
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use tokio::sync::{Notify, watch};
    use tokio::time::Instant;

    use super::*;
    use crate::error::StepError;
    use crate::process::Identity;

    /// A process that ends when the sender says so.
    #[derive(Debug)]
    struct Fake(watch::Receiver<Option<Exit>>);

    impl Process for Fake {
        fn identity(&self) -> &Identity {
            unreachable!()
        }

        fn kill(&self) -> Result<(), StepError> {
            unreachable!()
        }

        fn exited(&self) -> BoxFuture<'_, Exit> {
            let mut end = self.0.clone();
            Box::pin(async move { end.wait_for(Option::is_some).await.unwrap().unwrap() })
        }
    }

    #[test]
    fn an_exit_is_seen_once_and_the_process_is_no_longer_held() {
        let mut cx = Context::from_waker(std::task::Waker::noop());
        let exit = Exit { status: 137, at: std::time::SystemTime::UNIX_EPOCH };
        let (end, seen) = watch::channel(None);
        let process: Arc<dyn Process> = Arc::new(Fake(seen));
        let held = Arc::downgrade(&process);
        let mut waiter = ExitWaiter::default();
        assert_eq!(waiter.poll_exit(&mut cx), Poll::Pending, "unarmed");
        waiter.arm(process);
        assert_eq!(waiter.poll_exit(&mut cx), Poll::Pending, "alive");
        end.send_replace(Some(exit));
        waiter.disarm();
        assert_eq!((waiter.poll_exit(&mut cx), held.strong_count()), (Poll::Pending, 0));
        waiter.arm(Arc::new(Fake(end.subscribe())));
        assert_eq!(waiter.poll_exit(&mut cx), Poll::Ready(exit));
        assert_eq!(waiter.poll_exit(&mut cx), Poll::Pending, "once");
    }

    #[tokio::test(start_paused = true)]
    async fn retries_with_growing_delays_until_the_work_breaks() {
        let (begun, mut seen) = (Instant::now(), Vec::new());
        let result = retry(CLEANUP, pending, |failures| {
            seen.push((failures, begun.elapsed().as_secs()));
            let done = failures == 3;
            ready(if done { ControlFlow::Break("done") } else { ControlFlow::Continue(()) })
        });
        assert_eq!(result.await, "done");
        assert_eq!(seen, [(0, 0), (1, 1), (2, 3), (3, 7)]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_wake_up_ends_a_delay_also_one_that_came_during_the_attempt() {
        let (begun, woken) = (Instant::now(), Notify::new());
        let wake = || woken.notified();
        retry(CLEANUP, wake, |failures| {
            if failures == 0 {
                woken.notify_one();
            }
            let done = failures == 2;
            ready(if done { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        })
        .await;
        assert_eq!(begun.elapsed(), CLEANUP.delay(2), "only the second delay has passed");
    }

    #[tokio::test]
    async fn a_retry_can_be_a_task_of_its_own() {
        let woken = Arc::new(Notify::new());
        let task = tokio::spawn(async move {
            let work = async |_| ControlFlow::Break(());
            retry(CLEANUP, || woken.notified(), work).await;
        });
        assert!(task.await.is_ok());
    }

    #[test]
    fn doubles_from_one_second_to_five_minutes() {
        let seconds: Vec<u64> = (1..=11).map(|n| CLEANUP.delay(n).as_secs()).collect();
        assert_eq!(seconds, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]);
        assert_eq!(CLEANUP.delay(u32::MAX), Duration::from_secs(300));
    }

    #[test]
    fn refuses_a_backoff_that_does_not_grow() {
        assert_eq!(Backoff::new(Duration::ZERO, Duration::from_secs(1)), None);
        assert_eq!(Backoff::new(Duration::from_secs(2), Duration::from_secs(1)), None);
        assert!(Backoff::new(Duration::from_secs(1), Duration::from_secs(1)).is_some());
    }
}
