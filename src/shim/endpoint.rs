//! The Task endpoint of a pod's containers.
//!
//! ```text
//!           listen                called, or prepare            answers
//!   (none) --------> idle: socket --------------------> launched ------> serving
//!                       ^                                  | silent, exited  | exited
//!                       +----------------------------------+-----------------+
//! ```
//!
//! The socket outlives the shims: a caller waits in its queue until a shim accepts, also while one
//! shim exits and the next is launched. Only shims accept there. At most one task serves an
//! endpoint, so that no two shims are launched; [`Endpoint::close`] and a launch exclude each
//! other, so that no shim is launched after the end. An idle endpoint has no task: whatever changes
//! its state starts one.

mod callers;
mod end;
mod launch;

use std::fmt;
use std::fs;
use std::io;
use std::ops::ControlFlow;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::DirBuilderExt as _;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::task::{Wake, Waker};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;
use tokio::task::{AbortHandle, JoinHandle};

use super::bundle::NEW;
use super::pod_shim::{PodShim, RETRY_DELAY, RecordedShim, RunningShim, SHIM_TIMEOUT};
use super::task::{self, PauseRefused};
use super::{Pod, Runtime, Shims};
use crate::error::{IoContext as _, StepError, gone};
use crate::exit::{Backoff, SHIM, retry};
use crate::id::SandboxId;
use crate::pool::{self, Class};
use crate::process::handle::{self, Watched};
use crate::process::memory::private_memory;
use crate::process::{Exit, Identity, Process};

pub(super) use callers::SpareDescriptor;

/// Delay between attempts to find the shim of an earlier daemon, which may run unseen.
const RECOVERY: Backoff = Backoff::constant(RETRY_DELAY);

/// The Task endpoint of a pod's containers.
#[derive(Debug)]
pub struct Endpoint {
    shims: Arc<Shims>,
    shim: Arc<PodShim>,
    state: Mutex<State>,
    /// Wakes the serving task while it waits to retry what has failed.
    changed: Notify,
    /// Held while a socket is made, a shim is searched or launched, by the end, and by Start until
    /// the pause process is recorded. Waiting for it takes no thread.
    launch_lock: tokio::sync::Mutex<()>,
}

#[derive(Debug, Default)]
struct State {
    /// There is to be a socket.
    open: bool,
    /// The socket; `None` also while a shim of an earlier daemon serves that it cannot be taken
    /// from.
    listener: Option<Arc<OwnedFd>>,
    running: Option<RunningShim>,
    /// The exit of a shim while there was no daemon.
    missed: Option<Exit>,
    /// A shim is to be launched: a caller waits, or is about to come.
    wanted: bool,
    /// Why the last launch failed; `None` after a shim has answered.
    failure: Option<Arc<StepError>>,
    ended: bool,
    /// Asks the shim of a stopped pod to exit.
    dismissal: Option<AbortHandle>,
    /// No task serves, as there is nothing to do.
    idle: Option<Idle>,
}

/// An idle endpoint.
struct Idle {
    pod: Arc<dyn Pod>,
    /// Ends the idleness on a call; `None` where no call can come.
    _called: Option<Watched>,
}

/// The pod holds the endpoint in turn.
impl fmt::Debug for Idle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Idle")
    }
}

/// The next action of the serving task.
enum Step {
    /// It has ended, or is idle.
    Nothing,
    HandleExit(Exit),
    Watch(Arc<dyn Process>),
    Launch,
    Listen,
    /// It cannot be idle: the socket cannot be watched.
    Unwatched(io::Error),
}

impl Endpoint {
    /// The endpoint of sandbox `id`, which keeps its files in the sandbox's own directory. Nothing
    /// is made yet.
    pub fn new(shims: &Arc<Shims>, id: &SandboxId, runtime: &Arc<Runtime>) -> Arc<Self> {
        Arc::new(Self {
            shims: shims.clone(),
            shim: Arc::new(PodShim::new(shims.clone(), id.clone(), runtime.clone())),
            state: Mutex::default(),
            changed: Notify::new(),
            launch_lock: Default::default(),
        })
    }

    /// The address in the response to Start, where containerd finds the Task API, `PROTOCOL+URL`.
    pub fn address(&self) -> String {
        format!("ttrpc+unix://{}", self.socket().display())
    }

    /// The socket's path.
    pub(super) fn socket(&self) -> PathBuf {
        self.shim.settings().socket(self.shim.id())
    }

    /// The shim's process, while it runs.
    fn process(&self) -> Option<Arc<dyn Process>> {
        self.state().running.as_ref().map(|running| running.process.clone())
    }

    /// Whether there is a shim now.
    pub fn has_shim(&self) -> bool {
        self.state().running.is_some()
    }

    /// Memory that the pod's shim has for itself, bytes; `None`: there is none. Blocks.
    ///
    /// # Errors
    /// The failed step.
    pub fn private_memory(&self) -> Result<Option<u64>, StepError> {
        self.process().map_or(Ok(None), |process| private_memory(process.identity()))
    }

    /// Why a shim exited with containers in it, if one did.
    pub fn death(&self) -> Option<String> {
        self.shim.bundle().death()
    }

    /// Whether the pod's shim can serve a task of the sandbox itself: it is this project's own.
    pub fn serves_sandbox(&self) -> bool {
        self.shim.own_shim().is_some()
    }

    /// The sandbox id.
    pub(super) fn id(&self) -> &str {
        self.shim.id()
    }

    /// The process of the pod's shim, if that is this project's own and runs.
    pub(super) fn own_process(&self) -> Option<Arc<dyn Process>> {
        self.process().filter(|_| self.serves_sandbox())
    }

    /// Calls the pod's shim: returns when it answers.
    ///
    /// # Errors
    /// The shim does not answer.
    pub(super) async fn call(&self, within: Duration) -> Result<(), StepError> {
        task::probe(&self.socket(), self.shim.id(), within).await
    }

    /// Names the pause process to the pod's shim, for the sandbox's task.
    ///
    /// # Errors
    /// The shim cannot serve it, or the failed step.
    pub async fn set_pause(&self, pause: &Identity) -> Result<(), PauseRefused> {
        // No caller: a pod that gets no container gets no shim.
        if !self.has_shim() {
            return Err(PauseRefused::Unsupported);
        }
        task::set_pause(&self.socket(), self.shim.id(), pause, SHIM_TIMEOUT).await
    }

    /// The name to which a socket is bound, and which it has until it listens.
    fn new_socket(&self) -> PathBuf {
        let mut new = self.socket().into_os_string();
        new.push(NEW);
        new.into()
    }

    /// Begins to listen, or listens again at the same path; not after the end.
    pub(super) async fn listen(self: &Arc<Self>) -> Result<(), StepError> {
        let _guard = self.launch_lock.lock().await;
        self.blocking(Self::bind).await.flatten()
    }

    /// Takes the lock that [`Endpoint::bind`] needs.
    pub async fn lock_launch(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.launch_lock.lock().await
    }

    /// Listens as `Endpoint::listen` does, but on this thread, which saves a change of threads. To
    /// be called with the launch lock held. Blocks.
    ///
    /// # Errors
    /// The failed step.
    pub fn bind(self: &Arc<Self>) -> Result<(), StepError> {
        if self.state().ended {
            return Ok(());
        }
        let socket = self.socket();
        if let Some(dir) = socket.parent() {
            let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(dir);
            made.step_at("make directory", dir)?;
        }
        // A caller finds the old socket or the new one.
        let new = self.new_socket();
        gone(fs::remove_file(&new)).step_at("remove socket", &new)?;
        let listener = UnixListener::bind(&new).step_at("bind socket", &new)?;
        listener.set_nonblocking(true).step_at("bind socket", &new)?;
        if let Err(e) = fs::rename(&new, &socket) {
            let _ = fs::remove_file(&new);
            return Err(StepError::at("name socket", socket, e));
        }
        let mut state = self.state();
        state.open = true;
        state.listener = Some(Arc::new(listener.into()));
        self.notify(state);
        Ok(())
    }

    /// Takes over what an earlier daemon left: its shim, or else its socket. Retries what fails
    /// until the end of the endpoint, which it must not be served before: a shim may run that is
    /// not found yet, and containerd still reaches it, and its containers.
    pub fn recover(self: &Arc<Self>) -> JoinHandle<()> {
        let endpoint = self.clone();
        tokio::spawn(async move {
            // A change, such as the end of the endpoint, interrupts the delay.
            let changed = || endpoint.changed.notified();
            retry(RECOVERY, changed, async |failures| match endpoint.try_recover().await {
                Ok(()) => ControlFlow::Break(()),
                Err(step) => {
                    if failures == 0 {
                        log::error!(sandbox = endpoint.shim.id();
                            "failed to recover shim; retrying: {step}");
                    }
                    ControlFlow::Continue(())
                }
            })
            .await;
        })
    }

    async fn try_recover(self: &Arc<Self>) -> Result<(), StepError> {
        let _guard = self.launch_lock.lock().await;
        self.blocking(Self::recover_on_thread).await.flatten()
    }

    /// To be called with the launch lock held.
    fn recover_on_thread(self: &Arc<Self>) -> Result<(), StepError> {
        if self.state().ended {
            return Ok(());
        }
        let found = self.shim.find_recorded()?;
        if let RecordedShim::Alive { process, socket, interrupted } = found {
            let listener = self.take_listener(&*process, socket);
            let taken =
                listener.as_ref().and_then(|listener| handle::socket_cookie(listener.as_fd()));
            let running = self.shim.adopt(process, interrupted, taken);
            let mut state = self.state();
            (state.open, state.listener) = (true, listener);
            state.running = Some(running);
            self.notify(state);
            return Ok(());
        }
        // Last, as all of it is repeated if it fails.
        self.bind()?;
        if let RecordedShim::Dead(exit) = found {
            self.state().missed = Some(exit);
        }
        Ok(())
    }

    /// The endpoint's socket, from the shim that holds it: callers then wait in its queue while one
    /// shim exits and the next is launched, as they do with the daemon that has made it. Without it
    /// the endpoint gets a new socket at the same path when the shim has exited.
    fn take_listener(&self, process: &dyn Process, cookie: Option<u64>) -> Option<Arc<OwnedFd>> {
        // A socket that cannot be found by its path is of no use.
        if !self.socket().exists() {
            return None;
        }
        match handle::listening_socket(process.identity(), &self.new_socket(), cookie) {
            Ok(listener) => listener.map(Arc::new),
            Err(step) => {
                log::info!(sandbox = self.shim.id();
                    "failed to take task socket from shim; rebinding after its exit: {step}");
                None
            }
        }
    }

    /// containerd creates a container: launches the shim before the first call. After a launch that
    /// failed the result of the next one is waited for: containerd shows the reason in the pod's
    /// events, where a call that is disconnected has none.
    ///
    /// # Errors
    /// Why no shim came.
    pub async fn prepare(self: &Arc<Self>) -> Result<(), StepError> {
        let last_failure = {
            let mut state = self.state();
            let last_failure = state.failure.clone();
            // After a failure the shim that runs has not answered yet, or is being killed.
            let serves = state.running.is_some() && last_failure.is_none();
            if !state.open || serves || state.ended {
                return Ok(());
            }
            state.wanted = true;
            self.notify(state);
            last_failure
        };
        match last_failure {
            None => Ok(()),
            Some(last) => Box::pin(self.next_launch(last)).await,
        }
    }

    /// To be called after a change of the state: an idle endpoint is served again, if there is
    /// something to do.
    fn notify(self: &Arc<Self>, mut state: MutexGuard<'_, State>) {
        let idle = state.idle.take();
        drop(state);
        match idle {
            Some(Idle { pod, _called: called }) => {
                drop(called);
                self.serve(pod);
            }
            None => self.changed.notify_one(),
        }
    }

    /// Serves the endpoint until its end: in a task, unless there is nothing to do.
    pub fn serve(self: &Arc<Self>, pod: Arc<dyn Pod>) {
        match self.next(&pod) {
            Step::Nothing => {}
            next => drop(tokio::spawn(self.clone().run(next, pod))),
        }
    }

    /// Does what there is to do. It is the only one to do so: it was started when the endpoint was
    /// no longer idle, and ends when it is idle again.
    async fn run(self: Arc<Self>, mut next: Step, pod: Arc<dyn Pod>) {
        loop {
            match next {
                Step::Nothing => return,
                // There are as many of these futures as there are shims: what is not awaited now is
                // boxed.
                Step::Listen | Step::Unwatched(_) => {
                    next = Box::pin(self.listen_and_watch(&pod)).await;
                    continue;
                }
                Step::HandleExit(exit) => self.end_running(exit, &pod).await,
                Step::Watch(process) => {
                    pod.on_shim_serving();
                    let exit = process.exited().await;
                    Box::pin(self.end_running(exit, &pod)).await;
                }
                Step::Launch => Box::pin(self.launch_and_watch(&pod)).await,
            }
            next = self.next(&pod);
        }
    }

    /// Makes the socket and has it watched. Returns what there is to do then. A change, such as a
    /// container that is created or the end of the endpoint, interrupts the delays. There may be
    /// thousands of pods that fail for one reason: each of them logs the first failure only.
    async fn listen_and_watch(self: &Arc<Self>, pod: &Arc<dyn Pod>) -> Step {
        retry(
            SHIM,
            || self.changed.notified(),
            async |failures| {
                match self.next(pod) {
                    Step::Listen => match self.listen().await {
                        Ok(()) => return ControlFlow::Break(self.next(pod)),
                        Err(step) if failures == 0 => {
                            log::error!(sandbox = self.shim.id();
                            "failed to rebind task socket; retrying: {step}");
                        }
                        Err(_) => {}
                    },
                    Step::Unwatched(e) if failures == 0 => {
                        log::error!(sandbox = self.shim.id();
                        "failed to watch task socket; retrying: {e}");
                    }
                    Step::Unwatched(_) => {}
                    next => return ControlFlow::Break(next),
                }
                ControlFlow::Continue(())
            },
        )
        .await
    }

    /// The next step. With nothing to do the endpoint is idle from now on, and the caller no
    /// longer serves it.
    fn next(self: &Arc<Self>, pod: &Arc<dyn Pod>) -> Step {
        let mut state = self.state();
        if state.ended {
            return Step::Nothing;
        }
        if let Some(exit) = state.missed.take() {
            return Step::HandleExit(exit);
        }
        if let Some(running) = &state.running {
            return Step::Watch(running.process.clone());
        }
        let called = match &state.listener {
            Some(_) if state.wanted => return Step::Launch,
            None if state.open => return Step::Listen,
            None => None,
            Some(listener) => {
                let waker = Waker::from(self.clone());
                match handle::watch_listener(listener.clone(), waker) {
                    Ok(called) => Some(called),
                    Err(e) => return Step::Unwatched(e),
                }
            }
        };
        state.idle = Some(Idle { pod: pod.clone(), _called: called });
        Step::Nothing
    }

    /// Runs blocking work on a thread of the pool.
    async fn blocking<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Arc<Self>) -> T + Send + 'static,
    ) -> Result<T, StepError> {
        let endpoint = self.clone();
        pool::run(Class::Shim, move || work(&endpoint)).await
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

/// A call has come.
impl Wake for Endpoint {
    fn wake(self: Arc<Self>) {
        let mut state = self.state();
        // An endpoint that is not idle has a task, which finds the caller.
        if state.idle.is_some() {
            state.wanted = true;
            self.notify(state);
        }
    }
}

#[cfg(test)]
pub(super) mod tests;
