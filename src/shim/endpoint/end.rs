//! The end of a pod's shim, with the pod or before it, and of its endpoint.

use std::fs;
use std::sync::Arc;

use tokio::time::{sleep, timeout};

use super::Endpoint;
use crate::error::{IoContext as _, StepError, StepErrors, gone};
use crate::process::Process;
use crate::shim::pod_shim::{PodShim, SHIM_TIMEOUT, SHUTDOWN_DELAYS};

/// How often callers are looked for while the shim of a stopped pod exits.
const EXIT_LOOKS: u32 = 25;

impl Endpoint {
    /// Kills a shim that hangs. Its exit is handled as any other. Its callers are disconnected: one
    /// of them is this daemon, and another shim would be launched for it.
    pub(in crate::shim) async fn end_hung(self: Arc<Self>, process: Arc<dyn Process>) {
        if let Err(step) = self.blocking(Self::try_disconnect).await.flatten() {
            log::debug!(sandbox = self.shim.id();
                "failed to disconnect callers of shim that hangs: {step}");
        }
        if let Err(step) = self.shim.kill(&*process).await {
            log::error!(sandbox = self.shim.id(); "failed to kill shim that hangs: {step}");
        }
    }

    /// The pod was stopped: shuts the shim down when it is empty. The endpoint stays until the pod
    /// is removed, and disconnects callers. Returns at once. An earlier dismissal, whose delays may
    /// be long by now, ends.
    pub fn dismiss(self: &Arc<Self>) {
        let mut state = self.state();
        if state.running.is_some() {
            let dismissal = tokio::spawn(self.clone().shut_down_empty()).abort_handle();
            if let Some(earlier) = state.dismissal.replace(dismissal) {
                earlier.abort();
            }
        }
    }

    pub(super) async fn shut_down_empty(self: Arc<Self>) {
        let last = SHUTDOWN_DELAYS[SHUTDOWN_DELAYS.len() - 1];
        for delay in SHUTDOWN_DELAYS.into_iter().chain(std::iter::repeat(last)) {
            sleep(delay).await;
            let Some(process) = self.process().filter(|_| !self.state().ended) else { return };
            match self.shim.shut_down_if_empty(&*process, &self.socket()).await {
                Ok(true) if self.exits_soon(&*process).await => return,
                Ok(_) => {}
                Err(step) => {
                    log::debug!(sandbox = self.shim.id(); "failed to shut down empty shim: {step}");
                }
            }
        }
    }

    /// Waits for the exit of the shim of a stopped pod, which may take until containerd has
    /// received its last events. A containerd that starts receives them after it has called every
    /// shim: its calls are not to wait for the exit. They would get no shim after it either.
    async fn exits_soon(self: &Arc<Self>, process: &dyn Process) -> bool {
        let mut exited = process.exited();
        for _ in 0..EXIT_LOOKS {
            if timeout(SHIM_TIMEOUT / 2 / EXIT_LOOKS, &mut exited).await.is_ok() {
                return true;
            }
            self.disconnect_callers().await;
        }
        false
    }

    /// Ends shim, socket and bundle. Gone already is success.
    ///
    /// # Errors
    /// Every step that failed.
    pub async fn close(self: &Arc<Self>) -> Result<(), StepErrors> {
        self.set_ended();
        let _guard = self.launch_lock.lock().await;
        self.end_shim().await?;
        // Removed only when no cleanup works in the bundle.
        let _cleaning = self.shim.cleaning().lock().await;
        if self.shim.blocking(PodShim::had_shim).await? {
            self.shim.clean_up_all().await?;
        }
        self.blocking(|endpoint| endpoint.remove()).await?
    }

    /// Nothing is launched any more, and the serving task looks again.
    fn set_ended(self: &Arc<Self>) {
        let mut state = self.state();
        state.ended = true;
        self.notify(state);
    }

    pub(super) async fn end_shim(&self) -> Result<(), StepError> {
        let known = self.process();
        let process = match known {
            Some(process) => Some(process),
            None => self.shim.blocking(PodShim::find_running).await.flatten()?,
        };
        if let Some(process) = process {
            self.shim.end_process(&*process, &self.socket()).await?;
            self.state().running = None;
        }
        Ok(())
    }

    /// Removes socket and bundle.
    fn remove(&self) -> Result<(), StepErrors> {
        let mut failed = StepErrors::default();
        // The second is there when a daemon was killed between its bind and its rename.
        for socket in [self.socket(), self.new_socket()] {
            failed.check(gone(fs::remove_file(&socket)).step_at("remove socket", socket));
        }
        failed.check(self.shim.bundle().remove());
        self.state().listener = None;
        failed.into_result()
    }
}
