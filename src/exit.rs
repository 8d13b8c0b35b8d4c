//! The end of a sandbox's pause, which its owner waits for, and the back-off of cleanups that
//! failed.

use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;

use crate::process::{Exit, Process};

/// The end of `pause`, seen also when it is before the first look: a pidfd is level-triggered.
pub fn end_of(pause: Arc<dyn Process>) -> BoxFuture<'static, Exit> {
    Box::pin(async move {
        let exit = pause.exited().await;
        // The process is reaped; its descriptors go before its end is known, so that nobody counts
        // them.
        drop(pause);
        exit
    })
}

/// Delays between tries: `first`, doubling, at most `longest`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    first: Duration,
    longest: Duration,
}

/// Of cleanups after an exit, and of removals.
pub const CLEANUP: Backoff =
    Backoff { first: Duration::from_secs(1), longest: Duration::from_secs(300) };

impl Backoff {
    /// Delays from `first` to `longest`; `None` when `first` is zero or above `longest`.
    pub const fn new(first: Duration, longest: Duration) -> Option<Self> {
        if first.is_zero() || first.as_nanos() > longest.as_nanos() {
            None
        } else {
            Some(Self { first, longest })
        }
    }

    /// How long to wait after `failures` failures in a row; the first failure is 1.
    pub fn delay(&self, failures: u32) -> Duration {
        let factor = 1_u32.checked_shl(failures.saturating_sub(1)).unwrap_or(u32::MAX);
        self.first.saturating_mul(factor).min(self.longest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
