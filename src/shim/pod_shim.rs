//! The shim of one pod: how it is launched, found again, asked to exit and killed. What becomes of
//! its containers when it exits is in `containers/cleanup.rs`.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::time::timeout;

use super::bundle::{Bundle, Recorded};
use super::own::OwnShim;
use super::task::TaskError;
use super::{Runtime, ShimSettings, Shims, command, log as shim_log, placement, resolve, task};
use crate::error::{IoContext as _, StepError};
use crate::id::SandboxId;
use crate::pool::{self, Class};
use crate::process::inheritance::Inheritance;
use crate::process::spawn::{Launch, Program};
use crate::process::{Adoption, Exit, Process, handle};

/// How long a shim may take to answer, and to exit after it has been asked to.
pub(super) const SHIM_TIMEOUT: Duration = Duration::from_secs(10);

/// Delay between two attempts at what must succeed in the end.
pub(super) const RETRY_DELAY: Duration = Duration::from_secs(1);

/// When the shim of a stopped pod is asked to exit: containerd may still be deleting the last
/// container. The last delay is repeated, as containerd may be down for long.
pub(super) const SHUTDOWN_DELAYS: [Duration; 4] =
    [Duration::ZERO, Duration::from_secs(1), Duration::from_secs(10), Duration::from_secs(60)];

/// One pod's shim.
#[derive(Debug)]
pub(super) struct PodShim {
    shims: Arc<Shims>,
    id: SandboxId,
    runtime: Arc<Runtime>,
    /// Made with the first cleanup, which few pods ever need.
    cleaning: OnceLock<Box<tokio::sync::Mutex<()>>>,
}

/// A shim that runs.
#[derive(Debug)]
pub(super) struct RunningShim {
    /// Its process.
    pub(super) process: Arc<dyn Process>,
    /// Reads what it writes, until dropped.
    _log: Option<shim_log::Reader>,
}

/// The recorded shim, compared with the machine.
#[derive(Debug)]
pub(super) enum RecordedShim {
    /// There is none.
    None,
    /// It runs.
    Alive {
        /// The shim.
        process: Arc<dyn Process>,
        /// The cookie of the socket that it was handed, if that is on record.
        socket: Option<u64>,
        /// Its launch was interrupted before it was on record as running.
        interrupted: bool,
    },
    /// It has exited.
    Dead(Exit),
}

impl PodShim {
    /// The shim of sandbox `id`. Nothing is made yet.
    pub(super) fn new(shims: Arc<Shims>, id: SandboxId, runtime: Arc<Runtime>) -> Self {
        Self { shims, id, runtime, cleaning: OnceLock::new() }
    }

    /// The sandbox id.
    pub(super) fn id(&self) -> &str {
        &self.id
    }

    /// The settings of all shims.
    pub(super) fn settings(&self) -> &ShimSettings {
        &self.shims.settings
    }

    /// The pod's runtime handler.
    pub(super) fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    /// The program of the runtime's shim.
    ///
    /// # Errors
    /// There is none.
    pub(super) fn binary(&self) -> Result<PathBuf, StepError> {
        resolve::find_binary(&self.runtime.name, &self.inheritance())
    }

    /// This project's own shim, if the pod has it. A daemon that has none launches the runtime's
    /// and cleans up by it: both have the same bundles.
    pub(super) fn own_shim(&self) -> Option<&OwnShim> {
        self.settings().own_shim.as_ref().filter(|_| self.runtime.own_shim)
    }

    /// The program that cleans up after the shim.
    ///
    /// # Errors
    /// There is none.
    pub(super) fn cleaner(&self) -> Result<PathBuf, StepError> {
        self.own_shim().map_or_else(|| self.binary(), |own| Ok(own.inherited_path()))
    }

    /// The attributes that the shim and [`Self::cleaner`] inherit, as children of containerd would,
    /// with the limits that the pod has chosen.
    pub(super) fn inheritance(&self) -> Arc<Inheritance> {
        let inheritance = self.shims.containerd.inheritance();
        if self.runtime.limits.is_empty() {
            return inheritance;
        }
        Arc::new(Inheritance::clone(&inheritance).with(&self.runtime.limits))
    }

    /// Learns the attributes again if containerd is another process than before.
    pub(super) async fn learn_inheritance(&self) {
        self.shims.containerd.learn().await;
    }

    /// Held while containers of an exited shim are cleaned up, and by the end of the endpoint
    /// before it removes the bundle that the cleanup works in.
    pub(super) fn cleaning(&self) -> &tokio::sync::Mutex<()> {
        self.cleaning.get_or_init(Box::default)
    }

    /// The shim's directory, in the sandbox's. Its path is made when it is needed, as thousands of
    /// idle pods would keep it for nothing.
    pub(super) fn bundle(&self) -> Bundle {
        Bundle::new(self.settings().config.records().join(&*self.id).join("shim"))
    }

    /// Launches the shim with the socket to accept at. Blocks. The second result is the failed step
    /// of what follows the launch; the shim must be killed then. It may have served a caller.
    ///
    /// # Errors
    /// The failed step of the launch; nothing is left of the shim then.
    pub(super) fn launch(
        &self,
        socket: BorrowedFd<'_>,
    ) -> Result<(RunningShim, Result<(), StepError>), StepError> {
        let (settings, bundle) = (self.settings(), self.bundle());
        let found;
        let program = match self.own_shim() {
            Some(own) => Program::Open { path: own.path(), file: own.as_fd() },
            None => {
                found = self.binary()?;
                Program::Path(&found)
            }
        };
        bundle.make_bundle(&self.id)?;
        let log = shim_log::read_log(&bundle.log(), &self.id)?;
        let errors = shim_log::writer(&bundle.log())?;
        bundle.record(Some(&Recorded::Launching))?;
        let inheritance = self.inheritance();
        let environment =
            command::server_environment(settings, &inheritance, &self.id, self.own_shim());
        let launched = self.shims.launcher.launch(&Launch {
            program,
            arguments: &command::server_arguments(settings, &self.id),
            environment: &environment,
            inheritance: &inheritance,
            core_domain: command::has_core_domain(&environment),
            directory: bundle.dir(),
            socket,
            errors: Some(errors.as_fd()),
        });
        let process = launched.inspect_err(|_| self.clear_record())?;
        // Recorded last: what a killed daemon has not done is done for a shim that is still on
        // record as being launched.
        let cookie = handle::socket_cookie(socket);
        let recorded = self.place(&*process).and_then(|()| self.record_running(&*process, cookie));
        log::debug!(sandbox = self.id(), pid = process.identity().pid;
            "shim launched: {}", program.path().display());
        Ok((RunningShim { process, _log: Some(log) }, recorded))
    }

    /// Does what containerd's own shims do for themselves in their `start`.
    fn place(&self, process: &dyn Process) -> Result<(), StepError> {
        let pid = process.identity().pid;
        placement::raise_oom_score(pid, self.inheritance().oom_score_adj)?;
        placement::join_cgroup(pid, &self.runtime)
    }

    fn record_running(&self, process: &dyn Process, socket: Option<u64>) -> Result<(), StepError> {
        let identity = process.identity().clone();
        self.bundle().record(Some(&Recorded::Running { identity, socket }))
    }

    /// Records that there is no shim.
    pub(super) fn clear_record(&self) {
        if let Err(step) = self.bundle().record(None) {
            log::warn!(sandbox = self.id(); "failed to remove record of shim: {step}");
        }
    }

    /// Finds the recorded shim on the machine. Blocks.
    ///
    /// # Errors
    /// It is unknown whether it runs.
    pub(super) fn find_recorded(&self) -> Result<RecordedShim, StepError> {
        match self.bundle().recorded()? {
            None => Ok(RecordedShim::None),
            Some(Recorded::Launching) => Ok(match self.find_unrecorded()? {
                Some(process) => RecordedShim::Alive { process, socket: None, interrupted: true },
                None => RecordedShim::None,
            }),
            Some(Recorded::Running { identity, socket }) => {
                match self.shims.launcher.adopt(&identity) {
                    Adoption::Alive(process) => Ok(RecordedShim::Alive {
                        process: Arc::from(process),
                        socket,
                        interrupted: false,
                    }),
                    Adoption::Dead(exit) => Ok(RecordedShim::Dead(exit)),
                    Adoption::Unknown(step) => Err(step),
                }
            }
        }
    }

    /// The recorded shim, if it runs: for the end of an endpoint that knows of none. Blocks.
    ///
    /// # Errors
    /// It is unknown whether it runs.
    pub(super) fn find_running(&self) -> Result<Option<Arc<dyn Process>>, StepError> {
        match self.find_recorded()? {
            RecordedShim::Alive { process, .. } => Ok(Some(process)),
            RecordedShim::Dead(_) | RecordedShim::None => Ok(None),
        }
    }

    /// Takes over a shim of an earlier daemon. Completes its launch if that was `interrupted`, with
    /// the socket that it was handed, and reads its log again. It serves, so it is kept, whatever
    /// fails. Blocks.
    pub(super) fn adopt(
        &self,
        process: Arc<dyn Process>,
        interrupted: bool,
        socket: Option<u64>,
    ) -> RunningShim {
        log::info!(sandbox = self.id(), pid = process.identity().pid; "adopted shim");
        if interrupted {
            // It serves: without a record, its exit while no daemon runs would be missed.
            for step in [self.place(&*process), self.record_running(&*process, socket)] {
                if let Err(step) = step {
                    log::error!(sandbox = self.id(); "failed to complete launch of shim: {step}");
                }
            }
        }
        let log = shim_log::read_log(&self.bundle().log(), &self.id);
        let log = log.inspect_err(|step| {
            log::warn!(sandbox = self.id(); "failed to read log of shim: {step}");
        });
        RunningShim { process, _log: log.ok() }
    }

    /// There has been a shim, which may have left containers.
    pub(super) fn had_shim(&self) -> bool {
        self.bundle().dir().exists()
    }

    /// The shim of a launch that was interrupted: it works in the bundle, with the arguments that
    /// containerd's shims have. Blocks.
    ///
    /// # Errors
    /// `/proc` cannot be read.
    fn find_unrecorded(&self) -> Result<Option<Arc<dyn Process>>, StepError> {
        let arguments = command::server_arguments(self.settings(), &self.id);
        let bundle = self.bundle();
        self.shims.launcher.find_process(bundle.dir(), &arguments)
    }

    /// Asks the shim to exit, which it does when it is empty, and kills it if it does not. What is
    /// left of its containers is for [`PodShim::clean_up_all`].
    ///
    /// # Errors
    /// It still runs.
    pub(super) async fn end_process(
        self: &Arc<Self>,
        process: &dyn Process,
        socket: &Path,
    ) -> Result<(), StepError> {
        let answer = tokio::select! {
            _ = process.exited() => return Ok(()),
            answer = task::shut_down(socket, &self.id, SHIM_TIMEOUT) => answer,
        };
        let exits_within = match answer {
            Ok(()) => SHIM_TIMEOUT / 2,
            // One that hangs up is exiting, and has not refused.
            Err(TaskError::Lost(_)) => SHIM_TIMEOUT / 10,
            Err(_) => Duration::ZERO,
        };
        if timeout(exits_within, process.exited()).await.is_ok() {
            return Ok(());
        }
        let still_runs = || "it still runs after Shutdown".to_owned();
        let reason = answer.err().map_or_else(still_runs, |failure| failure.step().to_string());
        log::warn!(sandbox = self.id(); "killing shim: {reason}");
        self.kill(process).await
    }

    /// Asks the shim of a stopped pod to exit, unless bundles or the runtime's state name a
    /// container in it. True: it was asked, or has exited.
    ///
    /// # Errors
    /// It is unknown whether it has containers.
    pub(super) async fn shut_down_if_empty(
        self: &Arc<Self>,
        process: &dyn Process,
        socket: &Path,
    ) -> Result<bool, StepError> {
        if !self.blocking(Self::is_empty).await.flatten()? {
            return Ok(false);
        }
        tokio::select! {
            biased;
            _ = process.exited() => {}
            // It may exit, whatever it answers.
            _ = task::shut_down(socket, &self.id, SHIM_TIMEOUT) => {}
        }
        Ok(true)
    }

    /// Kills a shim whose containers are to end with it, and waits for its exit. Where that does
    /// not come, the shim may wait in the kernel for a lock that a container holds, such as that of
    /// the pipe which is the container's output, and no signal ends it before the container: then
    /// the containers are killed first. A killed shim makes no others.
    ///
    /// # Errors
    /// It still runs.
    pub(super) async fn kill(self: &Arc<Self>, process: &dyn Process) -> Result<(), StepError> {
        let late = |_| io::Error::from(io::ErrorKind::TimedOut);
        process.kill()?;
        if timeout(SHIM_TIMEOUT, process.exited()).await.is_ok() {
            return Ok(());
        }
        log::warn!(sandbox = self.id(), pid = process.identity().pid;
            "killed shim does not exit; killing its containers");
        let killed = timeout(SHIM_TIMEOUT, self.kill_known()).await;
        if let Err(step) = killed.map_err(late).step("kill containers").flatten() {
            log::warn!(sandbox = self.id();
                "failed to kill containers of shim that does not exit: {step}");
        }
        timeout(SHIM_TIMEOUT, process.exited()).await.map_err(late).step("kill shim").map(drop)
    }

    /// Runs blocking work on a thread of the pool.
    ///
    /// # Errors
    /// The work panicked, or there is no thread for it.
    pub(super) async fn blocking<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Self) -> T + Send + 'static,
    ) -> Result<T, StepError> {
        let shim = self.clone();
        pool::run(Class::Shim, move || work(&shim)).await
    }
}
