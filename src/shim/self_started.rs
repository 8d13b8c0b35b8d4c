//! The endpoint of a pod whose shim is started by the shim's own `start`.
//!
//! For shims that take no socket from their parent, and for those that run the pause process as
//! well. Where such a shim listens is known only when it has started, and containerd learns the
//! address once: so it runs from the pod's Start to its Shutdown, and one that exited empty is
//! started again, at the same address.

use std::io;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, timeout};

use super::bootstrap::{self, Bootstrap};
use super::bundle::Recorded;
use super::pod_shim::{
    PodShim, RETRY_DELAY, RecordedShim, RunningShim, SHIM_TIMEOUT, SHUTDOWN_DELAYS,
};
use super::rootfs::Rootfs;
use super::task::{TaskError, Tasks};
use super::{Pod, command, log as shim_log, task};
use crate::error::{IoContext as _, StepError};
use crate::exit::SHIM;
use crate::pause::Plan;
use crate::pool::{self, Class};
use crate::process::{Exit, Process, handle};

mod removal;

/// How many shims of less than a second in a row are worth a warning.
const SHORT_LIVED_SHIMS_TO_WARN: u32 = 5;

/// An endpoint whose shim is started by its `start`.
#[derive(Debug)]
pub struct SelfStarted {
    shim: Arc<PodShim>,
    /// The pause process is a task of the shim too.
    runs_pause: bool,
    state: Mutex<SelfStartedState>,
    /// Wakes the serving task after a change of the state.
    changed: Notify,
    /// Wakes those who wait for a shim, after its start and at the end of the endpoint.
    started: Notify,
    /// containerd creates a container: the next start of a shim is not delayed.
    wanted: Notify,
    /// It is known what an exited shim has left, and the pause process is no longer needed to find
    /// it.
    searched: watch::Sender<bool>,
    /// Held while a shim is searched or started, and by the end. Waiting for it takes no thread.
    launch_lock: tokio::sync::Mutex<()>,
}

#[derive(Debug, Default)]
struct SelfStartedState {
    /// There is to be a shim.
    open: bool,
    /// It is not known yet what an earlier daemon has left: a shim may run.
    unrecovered: bool,
    running: Option<RunningShim>,
    bootstrap: Option<Bootstrap>,
    /// The exit of the shim while there was no daemon.
    missed: Option<Exit>,
    pause_deleted: bool,
    /// The pod was stopped, and its shim has been asked to exit.
    dismissed: bool,
    ended: bool,
}

/// What the serving task does next.
enum SelfStartedStep {
    Ended,
    Recover,
    HandleExit(Exit),
    Watch(Arc<dyn Process>),
    Start,
    Wait,
}

impl SelfStarted {
    /// The endpoint of a pod. Nothing is made yet.
    pub(super) fn new(shim: PodShim, runs_pause: bool) -> Self {
        Self {
            shim: Arc::new(shim),
            runs_pause,
            state: Mutex::default(),
            changed: Notify::new(),
            started: Notify::new(),
            wanted: Notify::new(),
            searched: watch::channel(false).0,
            launch_lock: Default::default(),
        }
    }

    /// Where the shim listens; `None` before its start.
    pub fn bootstrap(&self) -> Option<Bootstrap> {
        self.state().bootstrap.clone()
    }

    /// The sandbox id.
    pub(super) fn id(&self) -> &str {
        self.shim.id()
    }

    /// The pod's shim.
    pub(super) fn shim(&self) -> &Arc<PodShim> {
        &self.shim
    }

    /// The shim's process, while it runs.
    pub(super) fn process(&self) -> Option<Arc<dyn Process>> {
        self.state().running.as_ref().map(|running| running.process.clone())
    }

    /// Why the shim exited with containers in it, if it did.
    pub fn death(&self) -> Option<String> {
        self.shim.bundle().death()
    }

    /// Puts the spec that the shim is to run into its bundle, with a root that holds the pause
    /// program and belongs to the root of the pod's user namespace, and a pin of that. Blocks.
    ///
    /// # Errors
    /// The failed step; call [`SelfStarted::close`] then.
    pub fn describe(&self, spec: &[u8], plan: &Plan) -> Result<(), StepError> {
        if !self.runs_pause {
            return Ok(());
        }
        self.rootfs().make_rootfs(spec, plan, &self.shim.settings().state_dir)
    }

    fn rootfs(&self) -> Rootfs {
        Rootfs::new(self.shim.bundle())
    }

    /// Starts the shim.
    ///
    /// # Errors
    /// The failed step; nothing of the shim is left then.
    pub(super) async fn start(self: &Arc<Self>) -> Result<(), StepError> {
        let _guard = self.launch_lock.lock().await;
        if self.state().ended {
            return Ok(());
        }
        let (binary, log) = self.blocking(|endpoint| endpoint.prepare()).await.flatten()?;
        let known = self.bootstrap();
        match self.bring_up(&binary).await {
            Ok((bootstrap, process)) => {
                log::debug!(sandbox = self.id(), pid = process.identity().pid;
                    "shim started: {}", binary.display());
                let mut state = self.state();
                state.open = true;
                state.running = Some(RunningShim::new(process, log));
                state.bootstrap = Some(bootstrap);
                drop(state);
                self.changed.notify_one();
                self.started.notify_waiters();
                Ok(())
            }
            Err(step) => {
                for left in self.end_interrupted(&binary).await {
                    log::warn!(sandbox = self.id(); "failed to undo the start of the shim: {left}");
                }
                // containerd knows the pod by it, also while there is no shim.
                self.state().bootstrap = known;
                Err(step)
            }
        }
    }

    /// Prepares the bundle: the shim's binary, and the reader of its log.
    fn prepare(&self) -> Result<(PathBuf, shim_log::Reader), StepError> {
        let binary = self.shim.binary()?;
        let bundle = self.shim.bundle();
        bundle.make_bundle(self.id(), !self.runs_pause)?;
        let log = shim_log::read_log(&bundle.log(), self.id())?;
        bundle.record(Some(&Recorded::Launching))?;
        Ok((binary, log))
    }

    /// From the call of `start` to a shim that is known.
    async fn bring_up(&self, binary: &Path) -> Result<(Bootstrap, Arc<dyn Process>), StepError> {
        let (settings, id, bundle) = (self.shim.settings(), self.id(), self.shim.bundle());
        let input = bootstrap::input(settings, id, self.shim.runtime()).await?;
        let started = command::start(settings, binary, id, bundle.dir(), input).await?;
        let bootstrap = Bootstrap::parse(&started.output)
            .step_at("read what the shim's start wrote", binary)?;
        // containerd knows the pod by the first address.
        if let Some(known) = self.bootstrap()
            && known.socket() != bootstrap.socket()
        {
            let (new, old) = (bootstrap.address, known.address);
            let moved = io::Error::other(format!("it listens at {new}, not at {old} as before"));
            return Err(StepError::at("start shim", binary, moved));
        }
        self.state().bootstrap = Some(bootstrap.clone());
        bundle.record_bootstrap(&bootstrap)?;
        let tasks = Tasks::connect(&bootstrap, SHIM_TIMEOUT).await.map_err(TaskError::step)?;
        let pid = tasks.shim_pid(id, SHIM_TIMEOUT).await.map_err(TaskError::step)?;
        let missing = || io::Error::other(format!("its pid is {pid}, which does not run"));
        let process = self.shim.shims().launcher.open(pid)?;
        let process = process.ok_or_else(missing).step_at("find shim", binary)?;
        // From here on it may be killed.
        handle::check_started_since(process.identity(), started.since)?;
        let identity = process.identity().clone();
        bundle.record(Some(&Recorded::Running { identity, socket: None }))?;
        Ok((bootstrap, process))
    }

    /// containerd creates a container: waits until the shim answers. containerd from 2.4 on ends an
    /// empty shim after each container, and fails the next one while there is no socket. What is
    /// missing after [`SHIM_TIMEOUT`] is for containerd to report.
    pub(super) async fn await_shim(&self) {
        // With the pause process in it, it is never empty.
        if !self.runs_pause && timeout(SHIM_TIMEOUT, self.answers()).await.is_err() {
            log::warn!(sandbox = self.id();
                "shim not ready after {} s; container creation may fail", SHIM_TIMEOUT.as_secs());
        }
    }

    /// Ends when the shim answers, or there is to be none.
    async fn answers(&self) {
        loop {
            let mut started = pin!(self.started.notified());
            // From here on a start is not missed.
            started.as_mut().enable();
            let (ended, running) = {
                let state = self.state();
                (state.ended || !state.open, state.running.as_ref().map(|run| run.process.clone()))
            };
            if ended {
                return;
            }
            if let (Some(process), Some(known)) = (running, self.bootstrap()) {
                // One that is exiting does not accept any more.
                if task::probe(&known.socket(), self.id(), SHIM_TIMEOUT).await.is_ok() {
                    return;
                }
                process.exited().await;
            }
            self.wanted.notify_one();
            started.await;
        }
    }

    /// See [`super::Endpoint::expect_recovery`].
    pub(super) fn expect_recovery(&self) {
        self.state().unrecovered = true;
    }

    /// Adopts the shim of an earlier daemon. The serving task retries what fails.
    pub(super) async fn recover(self: &Arc<Self>) {
        if let Err(step) = self.try_recover().await {
            log::error!(sandbox = self.id(); "failed to recover shim; retrying: {step}");
        }
    }

    /// Adopts the shim of an earlier daemon, unless that is done.
    ///
    /// # Errors
    /// It is unknown whether a shim runs, or where it listens.
    pub(super) async fn try_recover(self: &Arc<Self>) -> Result<(), StepError> {
        if !self.state().unrecovered {
            return Ok(());
        }
        let _guard = self.launch_lock.lock().await;
        self.blocking(|endpoint| endpoint.recover_on_thread()).await.flatten()
    }

    /// To be called with the launch lock held.
    fn recover_on_thread(&self) -> Result<(), StepError> {
        {
            let state = self.state();
            if state.ended || !state.unrecovered {
                return Ok(());
            }
        }
        let bootstrap = self.shim.bundle().bootstrap()?;
        let (running, missed) = match self.shim.find_recorded()? {
            // Its own `start` has placed it.
            RecordedShim::Alive { process, .. } => {
                (Some(self.shim.adopt(process, false, None)), None)
            }
            RecordedShim::Dead(exit) => (None, Some(exit)),
            RecordedShim::None => (None, None),
        };
        let mut state = self.state();
        (state.open, state.unrecovered) = (bootstrap.is_some(), false);
        (state.running, state.bootstrap, state.missed) = (running, bootstrap, missed);
        drop(state);
        self.changed.notify_one();
        Ok(())
    }

    /// Serves the endpoint until its end.
    pub(super) async fn serve(self: Arc<Self>, pod: Arc<dyn Pod>) {
        if matches!(self.blocking(|endpoint| endpoint.death()).await, Ok(Some(_))) {
            // The daemon may have been killed between the record of it and what follows from it.
            pod.fail();
        }
        // Of shims one after the other that exited soon after their start.
        let mut short_lived = 0;
        // Starts one after the other that failed.
        let mut failures = 0;
        loop {
            match self.next(&*pod) {
                SelfStartedStep::Ended => return,
                SelfStartedStep::Recover => {
                    // The end need not wait for it.
                    let _ = timeout(RETRY_DELAY, self.changed.notified()).await;
                    if let Err(step) = self.try_recover().await {
                        log::debug!(sandbox = self.id();
                            "failed to recover shim; retrying: {step}");
                    }
                }
                SelfStartedStep::HandleExit(exit) => self.handle_exit(exit, &pod).await,
                SelfStartedStep::Watch(process) => {
                    let begun = Instant::now();
                    let exit = process.exited().await;
                    self.state().running = None;
                    self.handle_exit(exit, &pod).await;
                    short_lived = if begun.elapsed() < RETRY_DELAY { short_lived + 1 } else { 0 };
                    if short_lived > 1 && !self.runs_pause && pod.lives() {
                        self.throttle_restart(begun, short_lived).await;
                    }
                }
                SelfStartedStep::Start => match self.start().await {
                    Ok(()) => {
                        failures = 0;
                        // The pod was stopped meanwhile, and what ends its shim has found none.
                        if !pod.lives() {
                            tokio::spawn(self.clone().dismiss());
                        }
                    }
                    Err(step) => {
                        failures += 1;
                        self.restart_later(&step, failures).await;
                    }
                },
                SelfStartedStep::Wait => self.changed.notified().await,
            }
        }
    }

    /// Waits after that many failed starts in a row, unless containerd creates a container or the
    /// endpoint ends. Only the first of them is logged.
    async fn restart_later(&self, step: &StepError, failures: u32) {
        if failures == 1 {
            log::error!(sandbox = self.id(); "failed to start shim; retrying: {step}");
        }
        tokio::select! {
            () = sleep(SHIM.delay(failures)) => {}
            () = self.changed.notified() => {}
            () = self.wanted.notified() => {}
        }
    }

    /// Delays the next start of a shim that exited soon after its own, as the one before it did.
    /// With containerd from 2.4 on that is no fault of the shim where containers are short.
    async fn throttle_restart(&self, begun: Instant, in_a_row: u32) {
        if self.state().ended {
            return;
        }
        if in_a_row >= SHORT_LIVED_SHIMS_TO_WARN {
            log::warn!(sandbox = self.id();
                "shim exited too soon: {} ms after its start", begun.elapsed().as_millis());
        }
        let _ = timeout(RETRY_DELAY, self.wanted.notified()).await;
    }

    fn next(&self, pod: &dyn Pod) -> SelfStartedStep {
        let mut state = self.state();
        if state.ended {
            return SelfStartedStep::Ended;
        }
        if state.unrecovered {
            return SelfStartedStep::Recover;
        }
        if let Some(exit) = state.missed.take() {
            return SelfStartedStep::HandleExit(exit);
        }
        match &state.running {
            Some(running) => SelfStartedStep::Watch(running.process.clone()),
            // A shim that ran the pause process has taken the sandbox with it, and a pod that has
            // exited gets no container.
            None if state.open && !self.runs_pause && pod.lives() => SelfStartedStep::Start,
            None => SelfStartedStep::Wait,
        }
    }

    async fn handle_exit(self: &Arc<Self>, exit: Exit, pod: &Arc<dyn Pod>) {
        let dismissed = self.state().dismissed;
        if dismissed {
            // The next daemon must not take it for one that failed either.
            let _ = self.shim.blocking(PodShim::clear_record).await;
        }
        if dismissed || !self.runs_pause {
            return self.shim.handle_shim_exit(exit, pod, || self.state().ended).await;
        }
        let _cleaning = self.shim.cleaning().lock().await;
        // The end cleans up itself.
        if self.state().ended {
            return;
        }
        let left = self.shim.find_all(pod).await;
        self.searched.send_replace(true);
        self.shim.handle_shim_exit_with_pause(left, exit, pod).await;
    }

    /// The pod was stopped: shuts the shim down when it is empty, and starts no other.
    pub(super) async fn dismiss(self: Arc<Self>) {
        for delay in SHUTDOWN_DELAYS {
            sleep(delay).await;
            let (Some(process), Some(known)) = (self.process(), self.bootstrap()) else { return };
            {
                let mut state = self.state();
                if state.ended || self.runs_pause && !state.pause_deleted {
                    return;
                }
                state.dismissed = true;
            }
            match self.shim.shut_down_if_empty(&*process, &known.socket()).await {
                Ok(true) => return,
                Ok(false) => {}
                Err(step) => {
                    log::debug!(sandbox = self.id(); "failed to shut down empty shim: {step}");
                }
            }
            self.state().dismissed = false;
        }
    }

    /// Connects to the shim.
    ///
    /// # Errors
    /// It was never started, or does not accept.
    pub(super) async fn tasks(&self) -> Result<Tasks, TaskError> {
        let Some(bootstrap) = self.bootstrap() else {
            let never = io::Error::new(io::ErrorKind::NotFound, "it was never started");
            return Err(TaskError::NotFound(StepError::new("connect to shim", never)));
        };
        Tasks::connect(&bootstrap, SHIM_TIMEOUT).await
    }

    /// Runs blocking work on a thread of the pool.
    async fn blocking<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Arc<Self>) -> T + Send + 'static,
    ) -> Result<T, StepError> {
        let endpoint = self.clone();
        pool::run(Class::Shim, move || work(&endpoint)).await
    }

    fn state(&self) -> MutexGuard<'_, SelfStartedState> {
        self.state.lock()
    }
}
