//! Restores deleted files of a living sandbox, and retries where that fails.
//!
//! A failure is for the log and the metrics: CRI takes any error of Status for a pod whose state it
//! cannot know, and keeps that until containerd is restarted.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use super::actor::ActorHandle;
use super::jobs::Jobs;
use super::machine::Phase;
use crate::exit::CLEANUP;
use crate::pool::{self, Class};

/// Restores the files of one sandbox.
#[derive(Debug)]
pub struct FileRestorer {
    jobs: Arc<Jobs>,
    actor: ActorHandle,
    /// The last attempt has failed.
    failing: AtomicBool,
    /// A task retries until an attempt does not fail.
    retrying: AtomicBool,
}

impl FileRestorer {
    pub fn new(jobs: Arc<Jobs>, actor: ActorHandle) -> Self {
        Self { jobs, actor, failing: AtomicBool::new(false), retrying: AtomicBool::new(false) }
    }

    /// Restores deleted files if the sandbox is ready. Blocks. A failure is retried, and logged
    /// once until an attempt does not fail.
    pub fn restore(self: &Arc<Self>) {
        if !self.is_ready() {
            return;
        }
        match self.jobs.restore() {
            Ok(restored) => {
                let failed = self.failing.swap(false, SeqCst);
                if restored {
                    self.jobs.telemetry().restored_files.inc();
                }
                if restored || failed {
                    log::info!(sandbox = self.jobs.id().as_str(); "restored deleted pod files");
                }
            }
            Err(steps) => {
                self.jobs.telemetry().restore_failures.inc();
                if !self.failing.swap(true, SeqCst) {
                    for step in steps {
                        log::error!(
                            sandbox = self.jobs.id().as_str();
                            "failed to restore deleted pod files: {step}"
                        );
                    }
                }
                self.restore_later();
            }
        }
    }

    fn is_ready(&self) -> bool {
        self.actor.published().phase == Phase::Ready
    }

    /// Retries with a growing delay, as long as the sandbox is ready.
    fn restore_later(self: &Arc<Self>) {
        if self.retrying.swap(true, SeqCst) {
            return;
        }
        let restorer = Arc::downgrade(self);
        tokio::spawn(async move {
            for failures in 1.. {
                tokio::time::sleep(CLEANUP.delay(failures)).await;
                let Some(restorer) = restorer.upgrade() else { return };
                let tried = pool::run(Class::Query, move || restorer.retry());
                if tried.await.unwrap_or(true) {
                    return;
                }
            }
        });
    }

    /// True when there is nothing left to retry.
    fn retry(self: &Arc<Self>) -> bool {
        self.restore();
        if self.is_ready() && self.failing.load(SeqCst) {
            return false;
        }
        self.retrying.store(false, SeqCst);
        // An attempt that failed meanwhile saw this task and began none: this one continues, unless
        // a later attempt has begun a new one.
        !(self.is_ready() && self.failing.load(SeqCst)) || self.retrying.swap(true, SeqCst)
    }
}
