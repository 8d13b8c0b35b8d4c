//! Restores deleted files of a living sandbox, and retries where that fails.
//!
//! A failure is for the log and the metrics: CRI takes any error of Status for a pod whose state it
//! cannot know, and keeps that until containerd is restarted.

use std::future::pending;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

use super::actor::ActorHandle;
use super::jobs::Jobs;
use super::machine::Phase;
use crate::error::StepErrors;
use crate::exit::{CLEANUP, retry};
use crate::pool::{self, Class};

/// Restores the files of one sandbox.
#[derive(Debug)]
pub struct FileRestorer {
    jobs: Arc<Jobs>,
    actor: ActorHandle,
    /// Failed attempts. While it is not zero, one task retries, and only that task sets it to zero.
    failed: AtomicU32,
}

impl FileRestorer {
    pub fn new(jobs: Arc<Jobs>, actor: ActorHandle) -> Self {
        Self { jobs, actor, failed: AtomicU32::new(0) }
    }

    /// Restores deleted files if the sandbox is ready. Blocks. A failure is retried, and logged
    /// once until a retry succeeds.
    pub fn restore(self: &Arc<Self>) {
        match self.attempt() {
            Ok(true) => self.log_restored(),
            Ok(false) => {}
            Err(steps) => {
                if self.failed.fetch_add(1, SeqCst) == 0 {
                    for step in steps {
                        log::error!(
                            sandbox = self.jobs.id().as_str();
                            "failed to restore deleted pod files: {step}"
                        );
                    }
                    self.retry_later();
                }
            }
        }
    }

    /// True if it has restored a file.
    fn attempt(&self) -> Result<bool, StepErrors> {
        if !self.is_ready() {
            return Ok(false);
        }
        let telemetry = self.jobs.telemetry();
        let result = self.jobs.restore();
        let counter = match &result {
            Ok(true) => &telemetry.restored_files,
            Ok(false) => return result,
            Err(_) => &telemetry.restore_failures,
        };
        counter.inc();
        result
    }

    fn is_ready(&self) -> bool {
        self.actor.published().phase == Phase::Ready
    }

    fn log_restored(&self) {
        log::info!(sandbox = self.jobs.id().as_str(); "restored deleted pod files");
    }

    /// Retries with a growing delay, as long as the sandbox is ready.
    fn retry_later(self: &Arc<Self>) {
        let restorer = Arc::downgrade(self);
        tokio::spawn(retry(CLEANUP, pending, move |failures| {
            let restorer = restorer.upgrade();
            async move {
                let Some(restorer) = restorer else { return ControlFlow::Break(()) };
                if failures == 0 {
                    return ControlFlow::Continue(());
                }
                let tried = pool::run(Class::Query, move || restorer.try_again());
                tried.await.unwrap_or(ControlFlow::Continue(()))
            }
        }));
    }

    /// Breaks when there is nothing left to retry.
    fn try_again(&self) -> ControlFlow<()> {
        let failed = self.failed.load(SeqCst);
        if self.attempt().is_err() {
            return ControlFlow::Continue(());
        }
        // After an attempt of Status that failed meanwhile, the files may be deleted again.
        if self.failed.compare_exchange(failed, 0, SeqCst, SeqCst).is_err() {
            return ControlFlow::Continue(());
        }
        if self.is_ready() {
            self.log_restored();
        }
        ControlFlow::Break(())
    }
}
