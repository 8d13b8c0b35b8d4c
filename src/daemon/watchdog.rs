//! Keep-alives for the service manager's watchdog.

use std::time::Duration;

use pause_sandboxer::pool;
use sd_notify::NotifyState;
use tokio::time::{Interval, MissedTickBehavior};

use super::notify;

/// Classes of threads that must work for a keep-alive. A task of another class can hang in the
/// kernel; a restart does not end it, and would interrupt starts and queries.
const KEEP_ALIVE: [pool::Class; 2] = [pool::Class::Start, pool::Class::Query];

/// How many keep-alives are withheld before the daemon stops by itself. The first is missing after
/// at most half of the service manager's timeout, the next a quarter later: it stops before it is
/// killed.
const MAX_WITHHELD: u32 = 2;

/// Sends keep-alives while threads make progress; that tasks run is not enough, as threads do the
/// blocking work.
pub(super) struct Watchdog {
    ticks: Interval,
    /// How long a class of threads may be blocked. With the wait for the next tick it is less than
    /// the service manager's timeout.
    max_blocked: Duration,
    /// Keep-alives that were withheld in sequence.
    withheld: u32,
}

impl Watchdog {
    /// A watchdog with this timeout.
    pub(super) fn new(within: Duration) -> Self {
        let max_blocked = within / 4;
        let mut ticks = tokio::time::interval(max_blocked.max(Duration::from_millis(1)));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { ticks, max_blocked, withheld: 0 }
    }

    /// Waits for the next tick; the classes of threads that are blocked.
    pub(super) async fn blocked(&mut self) -> Vec<pool::Class> {
        self.ticks.tick().await;
        pool::stuck(self.max_blocked).await
    }

    /// Whether threads that pods need are blocked for another sixth of the timeout: the last look
    /// before the service manager kills the daemon.
    pub(super) async fn is_still_blocked(&self) -> bool {
        let blocked = pool::stuck(self.max_blocked * 2 / 3).await;
        blocked.iter().any(|class| KEEP_ALIVE.contains(class))
    }

    /// Sends a keep-alive, unless threads are blocked that pods need. True if so many were withheld
    /// in sequence that the service manager is about to kill the daemon.
    pub(super) fn report(&mut self, blocked: &[pool::Class]) -> bool {
        let withheld = blocked.iter().any(|class| KEEP_ALIVE.contains(class));
        if !blocked.is_empty() {
            let names: Vec<&str> = blocked.iter().map(|class| class.name()).collect();
            log::error!(
                threads = names.join(", "), keep_alive = !withheld;
                "all threads of a class are blocked"
            );
        }
        self.withheld = if withheld { self.withheld + 1 } else { 0 };
        if !withheld {
            notify(&[NotifyState::Watchdog]);
        }
        self.withheld >= MAX_WITHHELD
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_daemon_stops_before_it_is_killed() {
        let mut watchdog = Watchdog::new(Duration::from_secs(60));
        let mut report = |class| watchdog.report(&[class]);
        assert!(!report(pool::Class::Start));
        assert!(!report(pool::Class::Recovery), "a keep-alive starts the count again");
        assert!(!report(pool::Class::Start));
        assert!(report(pool::Class::Query));
    }
}
