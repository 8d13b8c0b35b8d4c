//! The endpoint of a pod whose shim is ours.
//!
//! ```text
//!           listen                called, or prepare            answers
//!   (none) --------> idle: socket --------------------> launched ------> serving
//!                       ^                                  | silent, ended   | ended
//!                       +----------------------------------+-----------------+
//! ```
//!
//! The socket outlives the shims: a caller waits in its queue until a shim takes it over, also while one ends and the next is
//! launched. Nobody but a shim accepts there. One task serves an endpoint, so that no two shims are launched; [`Owned::end`] and a
//! launch take turns, so that no shim is launched behind the end.

use std::fs;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::DirBuilderExt as _;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

use super::bundle::{NEW, Recorded, gone};
use super::group::{AGAIN, Found, Group, WITHIN};
use super::{Pod, command, fifo, placement, task};
use crate::error::{IoContext as _, Step};
use crate::pause::launch::{self, Launch};
use crate::pause::{Exit, Pause};

/// An endpoint whose shim is ours.
#[derive(Debug)]
pub struct Owned {
    group: Arc<Group>,
    socket: PathBuf,
    now: Mutex<Now>,
    /// Something in `now` has changed that the serving task waits for.
    changed: Notify,
    /// Held while a socket is made, a shim is looked for or launched, and by the end.
    turn: Mutex<()>,
}

/// What is true now.
#[derive(Debug, Default)]
struct Now {
    /// There shall be a socket.
    open: bool,
    /// What an earlier daemon has left is not known yet: a shim may live.
    unsure: bool,
    /// The socket; `None` also while a shim serves that an earlier daemon has launched.
    listener: Option<Arc<OwnedFd>>,
    shim: Option<Arc<dyn Pause>>,
    log: Option<fifo::Reader>,
    /// A shim ended while there was no daemon; how it ended.
    missed: Option<Exit>,
    /// A shim shall be launched though nobody has called.
    wanted: bool,
    ended: bool,
}

/// What the serving task does next.
enum Next {
    Ended,
    Recover,
    Missed(Exit),
    Watch(Arc<dyn Pause>),
    Launch,
    Listen,
    Wait(Option<Arc<OwnedFd>>),
}

impl Owned {
    /// The endpoint of a pod. Nothing is made yet.
    pub(super) fn new(group: Group) -> Self {
        let socket = group.shims.settings.socket(&group.id);
        Self { group: Arc::new(group), socket, now: Mutex::default(), changed: Notify::new(), turn: Mutex::default() }
    }

    /// The socket's path.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// There is a shim now.
    pub fn has_shim(&self) -> bool {
        self.now().shim.is_some()
    }

    /// Why a shim died with containers in it, if one did.
    pub fn death(&self) -> Option<String> {
        self.group.bundle.death()
    }

    /// The name under which a socket waits until it listens.
    fn new_socket(&self) -> PathBuf {
        let mut new = self.socket.clone().into_os_string();
        new.push(NEW);
        new.into()
    }

    /// Begins to listen, or listens again at the same path; not after the end.
    pub(super) fn listen(&self) -> Result<(), Step> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        if self.now().ended { Ok(()) } else { self.bind() }
    }

    /// To be called with the turn held.
    fn bind(&self) -> Result<(), Step> {
        if let Some(dir) = self.socket.parent() {
            let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(dir);
            made.step_at("make directory", dir)?;
        }
        // Whoever calls finds the old socket or the new one.
        let new = self.new_socket();
        gone(fs::remove_file(&new)).step_at("remove socket", &new)?;
        let listener = UnixListener::bind(&new).step_at("bind socket", &new)?;
        listener.set_nonblocking(true).step_at("bind socket", &new)?;
        if let Err(e) = fs::rename(&new, &self.socket) {
            let _ = fs::remove_file(&new);
            return Err(Step::at("name socket", &self.socket, e));
        }
        let mut now = self.now();
        now.open = true;
        now.listener = Some(Arc::new(listener.into()));
        drop(now);
        self.changed.notify_one();
        Ok(())
    }

    /// Finds the shim that an earlier daemon has launched; without one, listens again. The serving task does again what fails.
    pub(super) fn recover(&self) {
        self.now().unsure = true;
        if let Err(step) = self.try_recover() {
            // Not listening: should a shim live, containerd still reaches it, and its containers.
            log::error!(sandbox = self.group.id.as_str(); "recovery: its shim: {step}; tried again");
        }
    }

    fn try_recover(&self) -> Result<(), Step> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let now = self.now();
        if now.ended || !now.unsure {
            return Ok(());
        }
        drop(now);
        match self.group.recorded_shim()? {
            Some(Found::Alive { shim, cut_off }) => {
                if cut_off {
                    self.finish_launch(&shim);
                }
                let log = self.group.read_again(&shim);
                let mut now = self.now();
                (now.open, now.unsure, now.shim, now.log) = (true, false, Some(shim), log);
                drop(now);
                self.changed.notify_one();
                Ok(())
            }
            ended => {
                // Last, as all of it is done again if it fails.
                self.bind()?;
                let mut now = self.now();
                now.unsure = false;
                if let Some(Found::Dead(exit)) = ended {
                    now.missed = Some(exit);
                }
                drop(now);
                self.changed.notify_one();
                Ok(())
            }
        }
    }

    /// Does what a launch that was cut off has not done. The shim has served since: it is kept, whatever fails.
    fn finish_launch(&self, shim: &Arc<dyn Pause>) {
        let identity = shim.identity().clone();
        let settled = self.settle_in(identity.pid);
        let recorded = self.group.bundle.record(Some(&Recorded::Running { identity }));
        for step in [settled, recorded].into_iter().filter_map(Result::err) {
            log::error!(sandbox = self.group.id.as_str(); "recovery: its shim: {step}");
        }
    }

    /// A container is coming.
    pub(super) fn prepare(&self) {
        let mut now = self.now();
        if now.listener.is_some() && now.shim.is_none() && !now.ended {
            now.wanted = true;
            drop(now);
            self.changed.notify_one();
        }
    }

    /// Serves the endpoint until its end. What is done only for a pod with containers has futures of its own: an idle pod's is small.
    pub(super) async fn serve(self: Arc<Self>, pod: Arc<dyn Pod>) {
        if Box::pin(self.blocking(|owned| owned.death())).await.flatten().is_some() {
            // The daemon may have been killed between the record of it and what follows from it.
            pod.bereaved();
        }
        loop {
            match self.next() {
                Next::Ended => return,
                Next::Recover => {
                    // The end need not wait for it.
                    let _ = Box::pin(timeout(AGAIN, self.changed.notified())).await;
                    if let Some(Err(step)) = Box::pin(self.blocking(Self::try_recover)).await {
                        log::debug!(sandbox = self.group.id.as_str(); "recovery: its shim: {step}; tried again");
                    }
                }
                Next::Missed(exit) => Box::pin(self.after(exit, &pod)).await,
                Next::Watch(shim) => {
                    let exit = shim.exited().await;
                    self.gone();
                    Box::pin(self.after(exit, &pod)).await;
                }
                Next::Launch => Box::pin(self.launch_and_attend(&pod)).await,
                Next::Listen => {
                    if let Some(Err(step)) = Box::pin(self.blocking(Self::listen)).await {
                        log::error!(sandbox = self.group.id.as_str(); "its endpoint: {step}");
                        Box::pin(sleep(AGAIN)).await;
                    }
                }
                Next::Wait(None) => self.changed.notified().await,
                Next::Wait(Some(listener)) => {
                    let called = match launch::called(listener) {
                        Ok(called) => tokio::select! {
                            called = called => called,
                            () = self.changed.notified() => continue,
                        },
                        Err(e) => Err(e),
                    };
                    match called {
                        Ok(()) => self.now().wanted = true,
                        Err(e) => {
                            log::error!(sandbox = self.group.id.as_str(); "watch its endpoint: {e}");
                            Box::pin(sleep(AGAIN)).await;
                        }
                    }
                }
            }
        }
    }

    async fn launch_and_attend(self: &Arc<Self>, pod: &Arc<dyn Pod>) {
        match self.blocking(Self::launch).await {
            Some(Ok(Some(shim))) => self.attend(shim, pod).await,
            Some(Ok(None)) => {}
            Some(Err(step)) => self.refuse(&step.to_string()).await,
            None => sleep(AGAIN).await,
        }
    }

    fn next(&self) -> Next {
        let mut now = self.now();
        if now.ended {
            return Next::Ended;
        }
        if now.unsure {
            return Next::Recover;
        }
        if let Some(exit) = now.missed.take() {
            return Next::Missed(exit);
        }
        if let Some(shim) = &now.shim {
            return Next::Watch(shim.clone());
        }
        match (&now.listener, now.open, now.wanted) {
            (Some(_), _, true) => Next::Launch,
            (None, true, _) => Next::Listen,
            (listener, ..) => Next::Wait(listener.clone()),
        }
    }

    /// Launches the shim. `None`: the endpoint has been ended.
    fn launch(&self) -> Result<Option<Arc<dyn Pause>>, Step> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let listener = {
            let mut now = self.now();
            now.wanted = false;
            match &now.listener {
                Some(listener) if !now.ended => listener.clone(),
                _ => return Ok(None),
            }
        };
        let settings = &self.group.shims.settings;
        let binary = settings.binary(&self.group.runtime.name)?;
        self.group.bundle.make(&self.group.id, true)?;
        let log = fifo::read(&self.group.bundle.log(), &self.group.id)?;
        let errors = fifo::writer(&self.group.bundle.log())?;
        self.group.bundle.record(Some(&Recorded::Launching))?;
        let launched = self.group.shims.launcher.launch(&Launch {
            program: &binary,
            arguments: &command::server_arguments(settings, &self.group.id),
            environment: &command::server_environment(settings, &self.group.id),
            directory: self.group.bundle.dir(),
            socket: listener.as_fd(),
            errors: Some(errors.as_fd()),
        });
        let undo = |step| {
            self.unrecord();
            step
        };
        let shim = launched.map_err(undo)?;
        let identity = shim.identity().clone();
        let pid = identity.pid;
        // Recorded last: what a killed daemon has not done is done for a shim that is still on record as being launched.
        let settled =
            self.settle_in(pid).and_then(|()| self.group.bundle.record(Some(&Recorded::Running { identity })));
        if let Err(step) = settled {
            shim.kill().map_err(undo)?;
            return Err(undo(step));
        }
        log::debug!(sandbox = self.group.id.as_str(), pid = pid; "its shim is launched: {}", binary.display());
        let mut now = self.now();
        // It is there for whoever has asked meanwhile too.
        (now.shim, now.log, now.wanted) = (Some(shim.clone()), Some(log), false);
        Ok(Some(shim))
    }

    /// What containerd's own shims do for themselves in their `start`.
    fn settle_in(&self, pid: u32) -> Result<(), Step> {
        placement::raise_oom_score(pid)?;
        placement::join_cgroup(pid, &self.group.runtime)
    }

    /// From the launch of a shim to its end.
    async fn attend(self: &Arc<Self>, shim: Arc<dyn Pause>, pod: &Arc<dyn Pod>) {
        let answered = tokio::select! {
            exit = shim.exited() => Err(exit),
            answer = task::answers(&self.socket, &self.group.id, WITHIN) => Ok(answer),
        };
        match answered {
            Ok(Ok(())) => {
                let exit = shim.exited().await;
                self.gone();
                self.after(exit, pod).await;
            }
            // Whoever calls must not wait for ever.
            Ok(Err(step)) => {
                if let Err(step) = shim.kill() {
                    log::error!(sandbox = self.group.id.as_str(); "its shim: {step}");
                }
                shim.exited().await;
                self.gone();
                self.refuse(&format!("it was launched and did not answer: {step}")).await;
            }
            Err(exit) => {
                self.gone();
                let reason = format!("it was launched and ended with status {} before it answered", exit.status);
                self.refuse(&reason).await;
            }
        }
    }

    /// The shim has ended: what of it is forgotten.
    fn gone(&self) {
        let mut now = self.now();
        (now.shim, now.log) = (None, None);
        let ended = now.ended;
        drop(now);
        if !ended {
            self.unrecord();
        }
    }

    fn unrecord(&self) {
        if let Err(step) = self.group.bundle.record(None) {
            log::warn!(sandbox = self.group.id.as_str(); "its shim: {step}");
        }
    }

    /// No shim comes: those who have called are hung up on, as containerd would wait for ever.
    async fn refuse(&self, reason: &str) {
        log::error!(sandbox = self.group.id.as_str(), runtime = self.group.runtime.name.as_str(); "its shim: {reason}");
        let listener = self.now().listener.clone();
        if let Some(listener) = listener.and_then(|listener| listener.try_clone().ok()).map(UnixListener::from) {
            while listener.accept().is_ok() {}
        }
        sleep(AGAIN / 10).await;
    }

    /// After the end of a shim that has served.
    async fn after(&self, exit: Exit, pod: &Arc<dyn Pod>) {
        let _cleaning = self.group.cleaning.lock().await;
        // The end cleans up itself.
        if !self.now().ended {
            self.group.bereave(exit, pod).await;
        }
    }

    /// Ends shim, socket and bundle.
    pub(super) fn end(self: &Arc<Self>) -> Result<(), Vec<Step>> {
        self.now().ended = true;
        self.changed.notify_one();
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let runtime = tokio::runtime::Handle::current();
        let known = self.now().shim.clone();
        let shim = match known {
            Some(shim) => Some(shim),
            None => self.group.living_shim().map_err(|step| vec![step])?,
        };
        if let Some(shim) = shim {
            runtime.block_on(self.group.end_shim(&shim, Some(&self.socket))).map_err(|step| vec![step])?;
            let mut now = self.now();
            (now.shim, now.log) = (None, None);
        }
        // Whoever cleans up works in the bundle.
        let _cleaning = runtime.block_on(self.group.cleaning.lock());
        if self.group.had_shim() {
            runtime.block_on(self.group.clean_up_all()).map_err(|step| vec![step])?;
        }
        let mut failed = Vec::new();
        // The second is there when a daemon was killed in the middle of making the first.
        for socket in [self.socket.clone(), self.new_socket()] {
            failed.extend(gone(fs::remove_file(&socket)).step_at("remove socket", socket).err());
        }
        failed.extend(self.group.bundle.remove().err());
        self.now().listener = None;
        if failed.is_empty() { Ok(()) } else { Err(failed) }
    }

    /// Runs what blocks off the runtime's workers; `None` after a panic in it.
    async fn blocking<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Self) -> T + Send + 'static,
    ) -> Option<T> {
        let owned = self.clone();
        tokio::task::spawn_blocking(move || work(&owned)).await.ok()
    }

    fn now(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
