//! The removal of an endpoint whose shim starts itself: the pause process that is a task of the
//! shim, the shim, what an interrupted start has left, the sockets and the bundle.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::time::timeout;

use super::SelfStarted;
use crate::error::{IoContext as _, StepError, gone};
use crate::shim::bootstrap::Bootstrap;
use crate::shim::bundle::{Bundle, Recorded};
use crate::shim::command::Inherited;
use crate::shim::pod_shim::{PodShim, RETRY_DELAY};
use crate::shim::{command, containerd_owned};

impl SelfStarted {
    /// Has the shim's program clean up after the pause process, whose shim has exited.
    ///
    /// # Errors
    /// The failed step.
    pub(in crate::shim) async fn delete_pause(&self) -> Result<(), StepError> {
        let bundle = self.shim.bundle();
        let binary = self.shim.binary()?;
        Bundle::write_runtime(bundle.dir(), self.shim.runtime().runc_options()?.as_ref())?;
        let program = (&*binary, Inherited::Daemon);
        command::delete(self.shim.settings(), program, self.id(), bundle.dir()).await?;
        self.set_pause_deleted();
        Ok(())
    }

    /// As [`Self::delete_pause`], as soon as the pause process is no longer needed to find the
    /// containers that its shim has left.
    ///
    /// # Errors
    /// The failed step.
    pub(in crate::shim) async fn delete_pause_of_exited_shim(&self) -> Result<(), StepError> {
        let mut searched = self.searched.subscribe();
        // Nothing searches any more where the endpoint is being ended.
        let _ = timeout(RETRY_DELAY, searched.wait_for(|searched| *searched)).await;
        if self.has_no_pause() {
            return Ok(());
        }
        let deleted = self.delete_pause().await;
        // What the end has removed meanwhile is not missed.
        if self.has_no_pause() { Ok(()) } else { deleted }
    }

    /// As [`Self::delete_pause`], unless the pause process is known to be deleted, or never
    /// existed.
    ///
    /// # Errors
    /// The failed step.
    pub(in crate::shim) async fn delete_orphaned_pause(&self) -> Result<(), StepError> {
        if !self.runs_pause || self.pause_deleted() || self.shim.bundle().recorded()?.is_none() {
            return Ok(());
        }
        self.delete_pause().await
    }

    /// The pause process is deleted, or is by the end of the endpoint.
    fn has_no_pause(&self) -> bool {
        let state = self.state();
        state.pause_deleted || state.ended
    }

    /// The runtime has nothing of the pause process any more.
    pub(in crate::shim) fn pause_deleted(&self) -> bool {
        self.state().pause_deleted
    }

    /// To be called when the pause process has been deleted.
    pub(in crate::shim) fn set_pause_deleted(&self) {
        self.state().pause_deleted = true;
    }

    /// Ends shim, socket and bundle. Gone already is success.
    ///
    /// # Errors
    /// Every step that failed.
    pub(in crate::shim) async fn close(self: &Arc<Self>) -> Result<(), Vec<StepError>> {
        self.state().ended = true;
        self.changed.notify_one();
        self.started.notify_waiters();
        let _guard = self.launch_lock.lock().await;
        self.end_shim().await?;
        self.blocking(|endpoint| endpoint.remove()).await.unwrap_or_else(|step| Err(vec![step]))
    }

    /// Ends the shim, and what it has left. To be called with the launch lock held.
    async fn end_shim(self: &Arc<Self>) -> Result<(), Vec<StepError>> {
        let one = |step| vec![step];
        let known = self.process();
        let process = match known {
            Some(process) => Some(process),
            None => {
                let interrupted_start = self
                    .blocking(|endpoint| endpoint.interrupted_start())
                    .await
                    .flatten()
                    .map_err(one)?;
                if let Some(binary) = interrupted_start {
                    let failed = self.end_interrupted(&binary).await;
                    if !failed.is_empty() {
                        return Err(failed);
                    }
                }
                self.shim.blocking(PodShim::find_running).await.flatten().map_err(one)?
            }
        };
        if let Some(process) = process {
            let socket = self.last_bootstrap().map(|known| known.socket());
            self.shim.end_process(&*process, socket.as_deref()).await.map_err(one)?;
            self.state().running = None;
        }
        // Removed only when no cleanup works in the bundle.
        let _cleaning = self.shim.cleaning().lock().await;
        // One that was asked to exit while it made the pause process has left what it had made.
        self.delete_orphaned_pause().await.map_err(one)?;
        if self.shim.blocking(PodShim::had_shim).await.map_err(one)? {
            self.shim.clean_up_all().await.map_err(one)?;
        }
        Ok(())
    }

    /// The shim's program, if a start of it was interrupted.
    fn interrupted_start(&self) -> Result<Option<PathBuf>, StepError> {
        match self.shim.bundle().recorded()? {
            Some(Recorded::Launching) => self.shim.binary().map(Some),
            _ => Ok(None),
        }
    }

    /// Removes sockets, root and bundle.
    fn remove(&self) -> Result<(), Vec<StepError>> {
        let mut failed = self.remove_sockets();
        failed.extend(self.rootfs().unmount().err().unwrap_or_default());
        if failed.is_empty() {
            failed.extend(self.shim.bundle().remove().err());
        }
        if failed.is_empty() { Ok(()) } else { Err(failed) }
    }

    /// Where its shim may have listened: at the recorded address, and where containerd's own shims
    /// listen for the sandbox id, should the address never have been recorded.
    fn sockets(&self) -> Vec<PathBuf> {
        let settings = self.shim.settings();
        let usual = containerd_owned::Socket::new(
            &settings.containerd_address,
            &settings.containerd_namespace,
            self.id(),
        );
        let usual = usual.path().to_owned();
        let known = self.last_bootstrap().map(|shim| shim.socket());
        known.into_iter().filter(|socket| *socket != usual).chain([usual.clone()]).collect()
    }

    /// What its `start` reported to this daemon or an earlier one.
    fn last_bootstrap(&self) -> Option<Bootstrap> {
        self.bootstrap().or_else(|| self.shim.bundle().bootstrap().ok().flatten())
    }

    fn remove_sockets(&self) -> Vec<StepError> {
        let removed = self
            .sockets()
            .into_iter()
            .map(|socket| gone(fs::remove_file(&socket)).step_at("remove socket", socket));
        removed.filter_map(Result::err).collect()
    }

    /// Ends what a start that was interrupted, or has failed, may have left: the shim, and what it
    /// holds.
    pub(in crate::shim) async fn end_interrupted(&self, binary: &Path) -> Vec<StepError> {
        let bundle = self.shim.bundle();
        let killed = async {
            let found = self.shim.blocking(PodShim::find_unrecorded).await.flatten()?;
            let Some(process) = found else { return Ok(()) };
            self.shim.kill(&*process).await?;
            self.delete_orphaned_pause().await?;
            self.shim.clean_up_all().await
        };
        let mut failed = Vec::from_iter(killed.await.err());
        // By its record the next attempt finds one that may still run.
        let has_ended = failed.is_empty();
        // Also a shim that is unlike containerd's own can clean up after itself, if it works at
        // all.
        let program = (binary, Inherited::Daemon);
        let deleted = command::delete(self.shim.settings(), program, self.id(), bundle.dir()).await;
        if let Err(step) = deleted {
            log::warn!(sandbox = self.id();
                "failed to delete leftovers of an interrupted start: {step}");
        }
        failed.append(&mut self.remove_sockets());
        if has_ended {
            failed.extend(bundle.record(None).err());
        }
        failed
    }
}
