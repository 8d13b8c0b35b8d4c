//! From the launch of a shim to its exit.

use std::io;
use std::os::fd::AsFd as _;
use std::sync::Arc;

use tokio::time::{sleep, timeout};

use super::Endpoint;
use crate::error::StepError;
use crate::process::{Exit, Process, UNKNOWN_EXIT};
use crate::shim::Pod;
use crate::shim::pod_shim::{RETRY_DELAY, SHIM_TIMEOUT};
use crate::shim::task;

/// A shim that was launched, and the failed step of what follows the launch.
type Launched = (Arc<dyn Process>, Result<(), StepError>);

impl Endpoint {
    /// Launches a shim, and returns after its exit. The callers of a pod that has ended get none:
    /// containerd handles the containers that it still asks for as those of a shim that has exited,
    /// and the others are calls of this daemon that have timed out.
    pub(super) async fn launch_and_watch(self: &Arc<Self>, pod: &Arc<dyn Pod>) {
        self.state().wanted = false;
        if !pod.lives() {
            log::debug!(sandbox = self.shim.id(); "launching no shim: the pod has ended");
            self.launched(None);
            return self.disconnect_callers().await;
        }
        let launched = {
            self.shim.learn_inheritance().await;
            let _guard = self.launch_lock.lock().await;
            self.blocking(Self::launch).await.flatten()
        };
        let (process, settled) = match launched {
            Ok(Some(launched)) => launched,
            Ok(None) => return,
            Err(step) => return self.reject_callers(step).await,
        };
        let answered = match settled {
            Ok(()) => self.probe(&*process).await,
            failed => failed,
        };
        match answered {
            Ok(()) => {
                self.launched(None);
                pod.on_shim_serving();
                let exit = process.exited().await;
                self.end_running(exit, pod).await;
            }
            Err(step) => self.end_silent(process, step, pod).await,
        }
    }

    /// Ends a shim that does not answer. Its callers do not wait for its exit, which does not come
    /// while it hangs in the kernel.
    pub(super) async fn end_silent(
        self: &Arc<Self>,
        process: Arc<dyn Process>,
        reason: StepError,
        pod: &Arc<dyn Pod>,
    ) {
        if let Err(step) = process.kill() {
            log::error!(sandbox = self.shim.id(); "failed to kill shim: {step}");
        }
        self.reject_callers(reason).await;
        let mut exited = process.exited();
        let exit = loop {
            match timeout(RETRY_DELAY, &mut exited).await {
                Ok(exit) => break exit,
                // Others may have called meanwhile.
                Err(_) => self.disconnect_callers().await,
            }
        };
        // A caller's Create may have come before that. Only live processes show that: the bundles
        // may be of Creates that were rejected, or wait for the next shim.
        self.end_running(Exit { status: UNKNOWN_EXIT, ..exit }, pod).await;
    }

    /// Waits until a shim that was launched answers.
    ///
    /// # Errors
    /// Why it does not.
    async fn probe(&self, process: &dyn Process) -> Result<(), StepError> {
        let socket = self.socket();
        let reason = tokio::select! {
            exit = process.exited() => {
                format!("it exited with status {} before it answered", exit.status)
            }
            answer = task::probe(&socket, self.shim.id(), SHIM_TIMEOUT) => match answer {
                Ok(()) => return Ok(()),
                Err(step) => format!("it did not answer: {step}"),
            }
        };
        Err(StepError::new("probe shim", io::Error::other(reason)))
    }

    /// Launches the shim, as [`crate::shim::pod_shim::PodShim::launch`] does. `None`: the endpoint
    /// has ended. To be called with the launch lock held.
    fn launch(self: &Arc<Self>) -> Result<Option<Launched>, StepError> {
        let listener = {
            let state = self.state();
            match &state.listener {
                Some(listener) if !state.ended => listener.clone(),
                _ => return Ok(None),
            }
        };
        let (running, settled) = self.shim.launch(listener.as_fd())?;
        let process = running.process.clone();
        let mut state = self.state();
        // The shim also serves the callers that have come meanwhile.
        (state.running, state.wanted) = (Some(running), false);
        Ok(Some((process, settled)))
    }

    /// After the exit of a shim that has served. Its record is removed last: by it a later daemon
    /// finds what this one has left to do.
    pub(super) async fn end_running(&self, exit: Exit, pod: &Arc<dyn Pod>) {
        self.state().running = None;
        self.handle_exit(exit, pod).await;
        // The end of the endpoint removes the record with the bundle.
        if !self.state().ended {
            self.shim.clear_record();
        }
    }

    /// No shim comes: disconnects the callers, as containerd would wait forever.
    pub(super) async fn reject_callers(self: &Arc<Self>, reason: StepError) {
        let runtime = self.shim.runtime().name.as_str();
        log::error!(sandbox = self.shim.id(), runtime = runtime; "failed to launch shim: {reason}");
        self.launched(Some(reason));
        self.disconnect_callers().await;
        // A caller that connects again at once causes ten launches per second at most.
        sleep(RETRY_DELAY / 10).await;
    }

    /// A launch has ended, or failed for this reason.
    pub(super) fn launched(&self, failure: Option<StepError>) {
        let mut state = self.state();
        // The shim that has answered serves all who have called.
        state.wanted &= failure.is_some();
        state.failure = failure.map(Arc::new);
        drop(state);
        self.shims.launches.notify_waiters();
    }

    /// Waits for the end of the launch after the one that has failed for the reason `last`.
    ///
    /// # Errors
    /// Why it failed as well, or `last` if it does not end.
    pub(super) async fn next_launch(&self, last: Arc<StepError>) -> Result<(), StepError> {
        let ended = async {
            loop {
                let ended = self.shims.launches.notified();
                match self.state().failure.clone() {
                    Some(failure) if Arc::ptr_eq(&failure, &last) => {}
                    Some(failure) => return Err(StepError::clone(&failure)),
                    None => return Ok(()),
                }
                ended.await;
            }
        };
        timeout(2 * SHIM_TIMEOUT, ended).await.unwrap_or_else(|_| Err(StepError::clone(&last)))
    }

    /// Handles the containers of a shim that has exited.
    pub(super) async fn handle_exit(&self, exit: Exit, pod: &Arc<dyn Pod>) {
        self.shim.handle_shim_exit(exit, pod, || self.state().ended).await;
    }
}
