//! Keep-alives for the service manager's watchdog, and the daemon's own look at its threads.
//!
//! A keep-alive shows that the runtime runs: a daemon that is stopped, or whose tasks block each
//! other, sends none. Threads for blocking work without progress are another matter: usually a disk
//! does not answer. A restart does not end a thread that is in an uninterruptible system call, and
//! it fails the calls that would succeed after the disk has recovered. So the daemon exits only
//! after [`MAX_STALLED`], and by itself: it can close its connections, which a killed process with
//! such a thread cannot.

use std::time::Duration;

use pause_sandboxer::pool::{self, Class};
use sd_notify::NotifyState;
use tokio::time::{Interval, MissedTickBehavior};

use super::notify;

/// The classes that a restart is for. A removal or a shim can hang in the kernel; a restart does
/// not end it, and would interrupt starts and queries.
const RESTARTED: [Class; 2] = [Class::Start, Class::Query];

/// Timeouts of the watchdog for which no waiting task of a class may get a thread. Two
/// minutes with the packaged unit: kubelet's default `runtimeRequestTimeout`.
const MAX_STALLED: u32 = 8;

/// Sends the keep-alives.
pub(super) struct Watchdog {
    ticks: Interval,
    timeout: Duration,
}

impl Watchdog {
    /// A watchdog with the service manager's timeout.
    pub(super) fn new(timeout: Duration) -> Self {
        let mut ticks = tokio::time::interval((timeout / 4).max(Duration::from_millis(1)));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { ticks, timeout }
    }

    /// Waits for the next tick and sends a keep-alive. Returns whether the daemon needs a restart,
    /// because a class of threads has stalled for too long.
    pub(super) async fn tick(&mut self) -> bool {
        self.ticks.tick().await;
        notify(&[NotifyState::Watchdog]);
        // The empty task keeps one thread alive: if pods use up all process ids, no other can be
        // started.
        if Class::Query.stalled().is_zero() {
            drop(tokio::spawn(pool::run(Class::Query, || ())));
        }
        let stalled = |class: &Class, longest| class.stalled() >= longest;
        let blocked: Vec<Class> =
            Class::ALL.into_iter().filter(|class| stalled(class, self.timeout)).collect();
        if !blocked.is_empty() {
            let names: Vec<&str> = blocked.iter().map(|class| class.name()).collect();
            log::error!(threads = names.join(", "); "all threads of a class are blocked");
        }
        RESTARTED.iter().any(|class| stalled(class, self.timeout * MAX_STALLED))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use tokio::time::Instant;

    use super::*;

    #[tokio::test]
    async fn the_daemon_needs_a_restart_when_all_starts_hang_for_long() {
        const TIMEOUT: Duration = Duration::from_millis(100);
        let mut watchdog = Watchdog::new(TIMEOUT);
        let mut ends = Vec::new();
        let tasks: Vec<_> = (0..=Class::Start.threads())
            .map(|_| {
                let (end, ended) = mpsc::channel::<()>();
                ends.push(end);
                tokio::spawn(pool::run(Class::Start, move || assert!(ended.recv().is_err())))
            })
            .collect();
        let begun = Instant::now();
        while !watchdog.tick().await {
            assert!(begun.elapsed() < Duration::from_secs(30), "it needs none");
        }
        assert!(begun.elapsed() >= TIMEOUT * MAX_STALLED);
        drop(ends);
        for task in tasks {
            task.await.unwrap().unwrap();
        }
        assert!(!watchdog.tick().await);
    }
}
