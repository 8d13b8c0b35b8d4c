//! Restores deleted files of a living sandbox, and retries where that fails.
//!
//! A failure is for the log and the metrics: CRI takes any error of Status for a pod whose state it
//! cannot know, and keeps that until containerd is restarted.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use super::machine::Phase;
use super::sandbox::Sandbox;
use crate::exit::CLEANUP;
use crate::pool::{self, Class};

/// Whether restoring the deleted files of one sandbox failed and is being retried.
#[derive(Debug, Default)]
pub struct RestoreState {
    /// The last attempt has failed.
    failing: AtomicBool,
    /// A task retries until an attempt does not fail.
    retrying: AtomicBool,
}

impl Sandbox {
    /// Restores deleted files. Blocks. A failure is retried, and logged once until an attempt does
    /// not fail.
    pub(super) fn restore_files(self: &Arc<Self>) {
        match self.jobs.restore() {
            Ok(restored) => {
                let failed = self.restore_state.failing.swap(false, SeqCst);
                if restored {
                    self.jobs.telemetry().restored_files.inc();
                }
                if restored || failed {
                    log::info!(sandbox = self.id(); "restored deleted pod files");
                }
            }
            Err(steps) => {
                self.jobs.telemetry().restore_failures.inc();
                if !self.restore_state.failing.swap(true, SeqCst) {
                    for step in steps {
                        log::error!(
                            sandbox = self.id();
                            "failed to restore deleted pod files: {step}"
                        );
                    }
                }
                self.restore_later();
            }
        }
    }

    /// Retries with a growing delay, as long as the sandbox is ready.
    fn restore_later(self: &Arc<Self>) {
        if self.restore_state.retrying.swap(true, SeqCst) {
            return;
        }
        let sandbox = Arc::downgrade(self);
        tokio::spawn(async move {
            for failures in 1.. {
                tokio::time::sleep(CLEANUP.delay(failures)).await;
                let Some(sandbox) = sandbox.upgrade() else { return };
                let tried = pool::run(Class::Query, move || sandbox.retry_restore());
                if tried.await.unwrap_or(true) {
                    return;
                }
            }
        });
    }

    /// True when there is nothing left to retry.
    fn retry_restore(self: &Arc<Self>) -> bool {
        if self.phase() == Phase::Ready {
            self.restore_files();
            if self.restore_state.failing.load(SeqCst) {
                return false;
            }
        }
        self.restore_state.retrying.store(false, SeqCst);
        // An attempt that failed meanwhile saw this task and began none: this one continues, unless
        // a later attempt has begun a new one.
        !(self.phase() == Phase::Ready && self.restore_state.failing.load(SeqCst))
            || self.restore_state.retrying.swap(true, SeqCst)
    }
}
