//! The endpoint of a pod whose shim is ours.
//!
//! ```text
//!           listen                called, or prepare            answers
//!   (none) --------> idle: socket --------------------> launched ------> serving
//!                       ^                                  | silent, ended   | ended
//!                       +----------------------------------+-----------------+
//! ```
//!
//! The socket outlives the shims: a caller waits in its queue until a shim takes it over, also
//! while one ends and the next is launched. Nobody but a shim accepts there. At most one task
//! serves an endpoint, so that no two shims are launched; [`Handover::end`] and a launch take turns,
//! so that no shim is launched behind the end. An idle endpoint rests: it has no task, and whoever
//! changes what is true begins one.

use std::fmt;
use std::fs;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::DirBuilderExt as _;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Wake, Waker};

use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

use super::bundle::{NEW, Recorded};
use super::pod_shim::{AGAIN, DISMISSALS, Found, PodShim, WITHIN};
use super::{Pod, command, log as shim_log, placement, task};
use crate::error::{IoContext as _, Step, gone};
use crate::pool::{self, Class};
use crate::process::spawn::Launch;
use crate::process::{Exit, Process, epoll::Watched, held};

/// An endpoint whose shim is ours.
#[derive(Debug)]
pub struct Handover {
    shim: Arc<PodShim>,
    now: Mutex<Now>,
    /// The end has begun, for a serving task that waits until it looks for a shim again.
    changed: Notify,
    /// Held while a socket is made, a shim is looked for or launched, and by the end. A wait for it
    /// takes no thread.
    turn: tokio::sync::Mutex<()>,
}

/// What is true now.
#[derive(Debug, Default)]
struct Now {
    /// There shall be a socket.
    open: bool,
    /// What an earlier daemon has left is not known yet: a shim may live.
    unsure: bool,
    /// The socket; `None` also while a shim serves that an earlier daemon has launched, and that it
    /// cannot be taken from.
    listener: Option<Arc<OwnedFd>>,
    shim: Option<Arc<dyn Process>>,
    log: Option<shim_log::Reader>,
    /// A shim ended while there was no daemon; how it ended.
    missed: Option<Exit>,
    /// A shim shall be launched: somebody has called or is about to.
    wanted: bool,
    /// A shim died with containers in it, and the daemon may have been killed before the sandbox
    /// ended.
    bereaved: bool,
    ended: bool,
    /// Nobody serves, as there is nothing to do.
    rest: Option<Rest>,
}

/// An endpoint at rest.
struct Rest {
    /// Whose it is.
    pod: Arc<dyn Pod>,
    /// Ends the rest when somebody calls; `None` where nobody can.
    called: Option<Watched>,
}

/// The pod holds the endpoint in turn.
impl fmt::Debug for Rest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Rest")
    }
}

/// What the serving task does next.
enum Next {
    /// Nothing: it has ended, or rests.
    Nothing,
    Recover,
    Bereaved,
    Missed(Exit),
    Watch(Arc<dyn Process>),
    Launch,
    Listen,
    /// It cannot rest: the socket cannot be watched.
    Unwatched(io::Error),
}

impl Handover {
    /// The endpoint of a pod. Nothing is made yet.
    pub(super) fn new(shim: PodShim) -> Self {
        Self {
            shim: Arc::new(shim),
            now: Mutex::default(),
            changed: Notify::new(),
            turn: Default::default(),
        }
    }

    /// The socket's path.
    pub fn socket(&self) -> PathBuf {
        self.shim.shims.settings.socket(&self.shim.id)
    }

    /// There is a shim now.
    pub fn has_shim(&self) -> bool {
        self.now().shim.is_some()
    }

    /// Why a shim died with containers in it, if one did.
    pub fn death(&self) -> Option<String> {
        self.shim.bundle().death()
    }

    /// The name under which a socket waits until it listens.
    fn new_socket(&self) -> PathBuf {
        let mut new = self.socket().into_os_string();
        new.push(NEW);
        new.into()
    }

    /// Begins to listen, or listens again at the same path; not after the end.
    pub(super) async fn listen(self: &Arc<Self>) -> Result<(), Step> {
        let _turn = self.turn.lock().await;
        self.blocking(Self::bind).await.flatten()
    }

    /// Waits for the turn.
    pub(super) async fn turn(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.turn.lock().await
    }

    /// [`Handover::listen`] on this thread. To be called with the turn held.
    pub(super) fn bind(self: &Arc<Self>) -> Result<(), Step> {
        if self.now().ended {
            return Ok(());
        }
        let socket = self.socket();
        if let Some(dir) = socket.parent() {
            let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(dir);
            made.step_at("make directory", dir)?;
        }
        // Whoever calls finds the old socket or the new one.
        let new = self.new_socket();
        gone(fs::remove_file(&new)).step_at("remove socket", &new)?;
        let listener = UnixListener::bind(&new).step_at("bind socket", &new)?;
        listener.set_nonblocking(true).step_at("bind socket", &new)?;
        if let Err(e) = fs::rename(&new, &socket) {
            let _ = fs::remove_file(&new);
            return Err(Step::at("name socket", socket, e));
        }
        let mut now = self.now();
        now.open = true;
        now.listener = Some(Arc::new(listener.into()));
        self.stir(now);
        Ok(())
    }

    /// Finds the shim that an earlier daemon has launched; without one, listens again. The serving
    /// task does again what fails.
    pub(super) async fn recover(self: &Arc<Self>) {
        let bereaved = matches!(self.blocking(|owned| owned.death()).await, Ok(Some(_)));
        {
            let mut now = self.now();
            (now.unsure, now.bereaved) = (true, bereaved);
        }
        if let Err(step) = self.try_recover().await {
            // Not listening: should a shim live, containerd still reaches it, and its containers.
            log::error!(sandbox = self.shim.id.as_str(); "recovery: its shim: {step}; tried again");
        }
    }

    async fn try_recover(self: &Arc<Self>) -> Result<(), Step> {
        let _turn = self.turn.lock().await;
        self.blocking(Self::look_again).await.flatten()
    }

    /// To be called with the turn held.
    fn look_again(self: &Arc<Self>) -> Result<(), Step> {
        let now = self.now();
        if now.ended || !now.unsure {
            return Ok(());
        }
        drop(now);
        match self.shim.recorded_shim()? {
            Some(Found::Alive { shim, cut_off }) => {
                if cut_off {
                    self.finish_launch(&shim);
                }
                let log = self.shim.read_again(&shim);
                let listener = self.take_listener(&shim);
                let mut now = self.now();
                (now.open, now.unsure, now.shim, now.log) = (true, false, Some(shim), log);
                now.listener = listener;
                self.stir(now);
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
                self.stir(now);
                Ok(())
            }
        }
    }

    /// The endpoint's socket, from the shim that holds it: callers then wait in its queue while one
    /// shim ends and the next is launched, as they do with the daemon that has made it. Without it
    /// the endpoint gets a new socket at the same path when the shim has exited.
    fn take_listener(&self, shim: &Arc<dyn Process>) -> Option<Arc<OwnedFd>> {
        // A socket that nobody can find by its path is of no use.
        if !self.socket().exists() {
            return None;
        }
        match held::listening_socket(shim.identity(), &self.new_socket()) {
            Ok(listener) => listener.map(Arc::new),
            Err(step) => {
                log::info!(sandbox = self.shim.id.as_str(); "failed to take task socket from shim; \
                    it is rebound after the shim's exit: {step}");
                None
            }
        }
    }

    /// Does what a launch that was cut off has not done. The shim has served since: it is kept,
    /// whatever fails.
    fn finish_launch(&self, shim: &Arc<dyn Process>) {
        let identity = shim.identity().clone();
        let settled = self.settle_in(identity.pid);
        let recorded = self.shim.bundle().record(Some(&Recorded::Running { identity }));
        for step in [settled, recorded].into_iter().filter_map(Result::err) {
            log::error!(sandbox = self.shim.id.as_str(); "recovery: its shim: {step}");
        }
    }

    /// A container is coming.
    pub(super) fn prepare(self: &Arc<Self>) {
        let mut now = self.now();
        if now.listener.is_some() && now.shim.is_none() && !now.ended {
            now.wanted = true;
            self.stir(now);
        }
    }

    /// To be called when something is true that was not before: ends the rest, if there is
    /// something to do now.
    fn stir(self: &Arc<Self>, mut now: MutexGuard<'_, Now>) {
        let rest = now.rest.take();
        drop(now);
        match rest {
            Some(Rest { pod, called }) => {
                drop(called);
                self.serve(pod);
            }
            None => self.changed.notify_one(),
        }
    }

    /// Serves the endpoint until its end: in a task, unless there is nothing to do.
    pub(super) fn serve(self: &Arc<Self>, pod: Arc<dyn Pod>) {
        match self.next(&pod) {
            Next::Nothing => {}
            next => drop(tokio::spawn(self.clone().work(next, pod))),
        }
    }

    /// Does what there is to do. It is the only one to do so: it was begun when a rest ended, or at
    /// the beginning, and ends with the next rest.
    async fn work(self: Arc<Self>, mut next: Next, pod: Arc<dyn Pod>) {
        loop {
            match next {
                Next::Nothing => return,
                Next::Recover => {
                    // The end need not wait for it.
                    let _ = timeout(AGAIN, self.changed.notified()).await;
                    if let Err(step) = Box::pin(self.try_recover()).await {
                        log::debug!(sandbox = self.shim.id.as_str(); "recovery: its shim: {step}; tried again");
                    }
                }
                Next::Bereaved => pod.bereaved(),
                Next::Missed(exit) => self.after(exit, &pod).await,
                // Such a pod has containers, and as many of these futures as there are shims: what
                // is not awaited now is boxed.
                Next::Watch(shim) => {
                    let exit = shim.exited().await;
                    self.gone();
                    Box::pin(self.after(exit, &pod)).await;
                }
                Next::Launch => Box::pin(self.launch_and_attend(&pod)).await,
                Next::Listen => {
                    if let Err(step) = Box::pin(self.listen()).await {
                        log::error!(sandbox = self.shim.id.as_str(); "its endpoint: {step}");
                        sleep(AGAIN).await;
                    }
                }
                Next::Unwatched(e) => {
                    log::error!(sandbox = self.shim.id.as_str(); "watch its endpoint: {e}");
                    sleep(AGAIN).await;
                }
            }
            next = self.next(&pod);
        }
    }

    async fn launch_and_attend(self: &Arc<Self>, pod: &Arc<dyn Pod>) {
        let launched = {
            let _turn = self.turn.lock().await;
            self.blocking(Self::launch).await.flatten()
        };
        match launched {
            Ok(Some(shim)) => self.attend(shim, pod).await,
            Ok(None) => {}
            Err(step) => self.refuse(&step.to_string()).await,
        }
    }

    /// What there is to do. Without anything the endpoint rests from now on, and whoever has asked
    /// no longer serves.
    fn next(self: &Arc<Self>, pod: &Arc<dyn Pod>) -> Next {
        let mut now = self.now();
        if now.ended {
            return Next::Nothing;
        }
        // Known whatever becomes of the shim.
        if std::mem::take(&mut now.bereaved) {
            return Next::Bereaved;
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
        let called = match &now.listener {
            Some(_) if now.wanted => return Next::Launch,
            None if now.open => return Next::Listen,
            None => None,
            Some(listener) => {
                match self.shim.shims.launcher.called(listener.clone(), Waker::from(self.clone())) {
                    Ok(called) => Some(called),
                    Err(e) => return Next::Unwatched(e),
                }
            }
        };
        now.rest = Some(Rest { pod: pod.clone(), called });
        Next::Nothing
    }

    /// Launches the shim. `None`: the endpoint has been ended. To be called with the turn held.
    fn launch(self: &Arc<Self>) -> Result<Option<Arc<dyn Process>>, Step> {
        let listener = {
            let mut now = self.now();
            now.wanted = false;
            match &now.listener {
                Some(listener) if !now.ended => listener.clone(),
                _ => return Ok(None),
            }
        };
        let settings = &self.shim.shims.settings;
        let binary = settings.binary(&self.shim.runtime.name)?;
        self.shim.bundle().make(&self.shim.id, true)?;
        let log = shim_log::read(&self.shim.bundle().log(), &self.shim.id)?;
        let errors = shim_log::writer(&self.shim.bundle().log())?;
        self.shim.bundle().record(Some(&Recorded::Launching))?;
        let environment = command::server_environment(settings, &self.shim.id);
        let launched = self.shim.shims.launcher.launch(&Launch {
            program: &binary,
            arguments: &command::server_arguments(settings, &self.shim.id),
            environment: &environment,
            core_domain: command::has_core_domain(&environment),
            directory: self.shim.bundle().dir(),
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
        // Recorded last: what a killed daemon has not done is done for a shim that is still on
        // record as being launched.
        let settled = self
            .settle_in(pid)
            .and_then(|()| self.shim.bundle().record(Some(&Recorded::Running { identity })));
        if let Err(step) = settled {
            shim.kill().map_err(undo)?;
            return Err(undo(step));
        }
        log::debug!(sandbox = self.shim.id.as_str(), pid = pid; "its shim is launched: {}", binary.display());
        let mut now = self.now();
        // It is there for whoever has asked meanwhile too.
        (now.shim, now.log, now.wanted) = (Some(shim.clone()), Some(log), false);
        Ok(Some(shim))
    }

    /// What containerd's own shims do for themselves in their `start`.
    fn settle_in(&self, pid: u32) -> Result<(), Step> {
        placement::raise_oom_score(pid)?;
        placement::join_cgroup(pid, &self.shim.runtime)
    }

    /// From the launch of a shim to its end.
    async fn attend(self: &Arc<Self>, shim: Arc<dyn Process>, pod: &Arc<dyn Pod>) {
        let socket = self.socket();
        let answered = tokio::select! {
            exit = shim.exited() => Err(exit),
            answer = task::answers(&socket, &self.shim.id, WITHIN) => Ok(answer),
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
                    log::error!(sandbox = self.shim.id.as_str(); "its shim: {step}");
                }
                shim.exited().await;
                self.gone();
                self.refuse(&format!("it was launched and did not answer: {step}")).await;
            }
            Err(exit) => {
                self.gone();
                let reason = format!(
                    "it was launched and ended with status {} before it answered",
                    exit.status
                );
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
        if let Err(step) = self.shim.bundle().record(None) {
            log::warn!(sandbox = self.shim.id.as_str(); "its shim: {step}");
        }
    }

    /// No shim comes: those who have called are hung up on, as containerd would wait for ever.
    async fn refuse(&self, reason: &str) {
        log::error!(sandbox = self.shim.id.as_str(), runtime = self.shim.runtime.name.as_str(); "its shim: {reason}");
        let listener = self.now().listener.clone();
        if let Some(listener) =
            listener.and_then(|listener| listener.try_clone().ok()).map(UnixListener::from)
        {
            while listener.accept().is_ok() {}
        }
        sleep(AGAIN / 10).await;
    }

    /// After the end of a shim that has served.
    async fn after(&self, exit: Exit, pod: &Arc<dyn Pod>) {
        self.shim.bereave_in_the_end(exit, pod, || self.now().ended).await;
    }

    /// The pod was stopped: its shim ends when it is empty. The endpoint stays, for calls about
    /// containers that have exited.
    pub(super) async fn dismiss(self: Arc<Self>) {
        for pause in DISMISSALS {
            sleep(pause).await;
            let shim = self.now().shim.clone();
            let Some(shim) = shim.filter(|_| !self.now().ended) else { return };
            match self.shim.dismiss(&shim, &self.socket()).await {
                Ok(true) => return,
                Ok(false) => {}
                Err(step) => log::debug!(sandbox = self.shim.id.as_str(); "its shim: {step}"),
            }
        }
    }

    /// Ends shim, socket and bundle.
    pub(super) async fn end(self: &Arc<Self>) -> Result<(), Vec<Step>> {
        self.finish();
        let _turn = self.turn.lock().await;
        let known = self.now().shim.clone();
        let shim = match known {
            Some(shim) => Some(shim),
            None => self
                .blocking(|owned| owned.shim.living_shim())
                .await
                .flatten()
                .map_err(|step| vec![step])?,
        };
        if let Some(shim) = shim {
            self.shim.end_shim(&shim, Some(&self.socket())).await.map_err(|step| vec![step])?;
            self.forget();
        }
        // Whoever cleans up works in the bundle.
        let _cleaning = self.shim.cleaning().lock().await;
        if self.blocking(|owned| owned.shim.had_shim()).await.map_err(|step| vec![step])? {
            self.shim.clean_up_all().await.map_err(|step| vec![step])?;
        }
        self.blocking(|owned| owned.remove()).await.unwrap_or_else(|step| Err(vec![step]))
    }

    /// Nothing is launched any more, and the serving task looks again.
    fn finish(self: &Arc<Self>) {
        let mut now = self.now();
        now.ended = true;
        self.stir(now);
    }

    /// There is no shim.
    fn forget(&self) {
        let mut now = self.now();
        (now.shim, now.log) = (None, None);
    }

    /// Removes socket and bundle.
    fn remove(&self) -> Result<(), Vec<Step>> {
        let mut failed = Vec::new();
        // The second is there when a daemon was killed in the middle of making the first.
        for socket in [self.socket(), self.new_socket()] {
            failed.extend(gone(fs::remove_file(&socket)).step_at("remove socket", socket).err());
        }
        failed.extend(self.shim.bundle().remove().err());
        self.now().listener = None;
        if failed.is_empty() { Ok(()) } else { Err(failed) }
    }

    /// Runs what blocks on a thread for it.
    async fn blocking<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Arc<Self>) -> T + Send + 'static,
    ) -> Result<T, Step> {
        let owned = self.clone();
        pool::run(Class::Shim, move || work(&owned)).await
    }

    fn now(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Somebody calls.
impl Wake for Handover {
    fn wake(self: Arc<Self>) {
        let mut now = self.now();
        // Else somebody serves already, and finds the caller.
        if now.rest.is_some() {
            now.wanted = true;
            self.stir(now);
        }
    }
}

#[cfg(test)]
mod tests;
