//! Puts the files of a living sandbox back, and keeps trying where that fails.
//!
//! A failure is for the log and the metrics: CRI takes any error of Status for a pod whose state it
//! cannot know, and keeps that until containerd is restarted.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use super::machine::Phase;
use super::sandbox::Sandbox;
use crate::exit::CLEANUP;
use crate::pool::{self, Class};

/// Where the restore_state of one sandbox stands.
#[derive(Debug, Default)]
pub struct RestoreState {
    /// The last try has failed.
    failing: AtomicBool,
    /// A task tries again until a try does not fail.
    retrying: AtomicBool,
}

impl Sandbox {
    /// Puts back files that are gone. Blocks. What fails is logged once until a try does not fail,
    /// and tried again.
    pub(super) fn heal(self: &Arc<Self>) {
        match self.work.restore() {
            Ok(restored) => {
                let failed = self.restore_state.failing.swap(false, SeqCst);
                if restored {
                    self.work.telemetry.healed_files.inc();
                }
                if restored || failed {
                    log::info!(sandbox = self.id(); "files that were gone are back");
                }
            }
            Err(steps) => {
                self.work.telemetry.healing_failures.inc();
                if !self.restore_state.failing.swap(true, SeqCst) {
                    for step in steps {
                        log::error!(sandbox = self.id(); "put back files that are gone: {step}");
                    }
                }
                self.heal_later();
            }
        }
    }

    /// Tries again with a growing delay, as long as the sandbox is ready.
    fn heal_later(self: &Arc<Self>) {
        if self.restore_state.retrying.swap(true, SeqCst) {
            return;
        }
        let sandbox = Arc::downgrade(self);
        tokio::spawn(async move {
            for failures in 1.. {
                tokio::time::sleep(CLEANUP.delay(failures)).await;
                let Some(sandbox) = sandbox.upgrade() else { return };
                let tried = pool::run(Class::Query, move || sandbox.heal_again());
                if tried.await.unwrap_or(true) {
                    return;
                }
            }
        });
    }

    /// True when there is no more to try.
    fn heal_again(self: &Arc<Self>) -> bool {
        if self.phase() == Phase::Ready {
            self.heal();
            if self.restore_state.failing.load(SeqCst) {
                return false;
            }
        }
        self.restore_state.retrying.store(false, SeqCst);
        // A try that failed meanwhile saw this task and began none: this one continues, unless a
        // later try has begun a new one.
        !(self.phase() == Phase::Ready && self.restore_state.failing.load(SeqCst))
            || self.restore_state.retrying.swap(true, SeqCst)
    }
}
