//! The containers of one pod, which share a shim: how the shim is found again and ended, and what
//! becomes of them when it dies.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::bundle::{Bundle, Recorded};
use super::containers::{self, Container, Inside};
use super::task::Failure;
use super::{Pod, Runtime, Shims, command, log as shim_log, task};
use crate::error::{IoContext as _, Step};
use crate::id::SandboxId;
use crate::pool::{self, Class};
use crate::process::held::Held;
use crate::process::{Adoption, Exit, Process, UNKNOWN_EXIT};

/// How long a shim may take until it answers, and one that is told to end until it has.
pub(super) const WITHIN: Duration = Duration::from_secs(10);

/// Between two tries of what must work in the end.
pub(super) const AGAIN: Duration = Duration::from_secs(1);

/// When an empty shim of a pod that was stopped gets Shutdown: containerd may still be deleting the
/// last container.
pub(super) const DISMISSALS: [Duration; 4] =
    [Duration::ZERO, Duration::from_secs(1), Duration::from_secs(10), Duration::from_secs(60)];

/// Between two looks at what a shim that has ended has left, if it cannot be seen.
pub(super) const LOOKS: [Duration; 6] =
    [AGAIN, AGAIN, AGAIN, AGAIN, Duration::from_secs(5), Duration::from_secs(10)];

/// More than the kernel takes from the end of a vfork to the new program's arguments.
const EXECUTED: Duration = Duration::from_millis(20);

/// The containers of one pod.
#[derive(Debug)]
pub(super) struct PodShim {
    /// What all shims share.
    pub(super) shims: Arc<Shims>,
    /// The sandbox id.
    pub(super) id: SandboxId,
    /// The shim is started by its own `start`.
    pub(super) started: bool,
    /// What the shim is of.
    pub(super) runtime: Arc<Runtime>,
    /// Made when somebody first cleans up, which hardly any idle pod sees.
    cleaning: OnceLock<Box<tokio::sync::Mutex<()>>>,
}

/// A shim that is on record.
#[derive(Debug)]
pub(super) enum Found {
    /// It lives.
    Alive {
        /// The shim.
        shim: Arc<dyn Process>,
        /// Its launch was cut off before it was on record as running.
        cut_off: bool,
    },
    /// It has ended.
    Dead(Exit),
}

/// What a shim that ended has left.
pub(super) struct Left {
    /// Containers that are lost with it: the sandbox ends.
    lost: Vec<Container>,
    /// What the runtime still has of containers that only the runtime knows.
    forgotten: Vec<Container>,
    /// Processes in the pod that are of unknown containers: ended with the sandbox, and no reason
    /// to end it.
    unknown: Vec<Held>,
}

impl PodShim {
    /// The containers of one pod. Nothing is made yet.
    pub(super) fn new(
        shims: Arc<Shims>,
        id: SandboxId,
        started: bool,
        runtime: Arc<Runtime>,
    ) -> Self {
        Self { shims, id, started, runtime, cleaning: OnceLock::new() }
    }

    /// Held by whoever cleans up after a shim that died, and by the end before it removes what that
    /// needs.
    pub(super) fn cleaning(&self) -> &tokio::sync::Mutex<()> {
        self.cleaning.get_or_init(Box::default)
    }

    /// The shim's own directory, in the sandbox's. Its path is made when it is needed: thousands of
    /// idle pods would keep it for nothing.
    pub(super) fn bundle(&self) -> Bundle {
        // The `delete` of a shim that is started looks for the bundle of a container by the
        // container's name beside its own.
        let name = if self.started { self.id.as_str() } else { "shim" };
        Bundle::new(self.shims.settings.sandboxes.join(self.id.as_str()).join(name))
    }

    /// The shim that is on record, looked for on the machine. Blocks.
    ///
    /// # Errors
    /// Nobody can tell whether it lives.
    pub(super) fn recorded_shim(&self) -> Result<Option<Found>, Step> {
        match self.bundle().recorded()? {
            None => Ok(None),
            Some(Recorded::Running { identity }) => match self.shims.launcher.adopt(&identity) {
                Adoption::Alive(shim) => {
                    Ok(Some(Found::Alive { shim: Arc::from(shim), cut_off: false }))
                }
                Adoption::Dead(exit) => Ok(Some(Found::Dead(exit))),
                Adoption::Unknown(step) => Err(step),
            },
            Some(Recorded::Launching) => {
                Ok(self.find()?.map(|shim| Found::Alive { shim, cut_off: true }))
            }
        }
    }

    /// The shim that is on record and lives, for the end of an endpoint that knows none. Blocks.
    ///
    /// # Errors
    /// Nobody can tell whether it lives.
    pub(super) fn living_shim(&self) -> Result<Option<Arc<dyn Process>>, Step> {
        match self.recorded_shim()? {
            Some(Found::Alive { shim, .. }) => Ok(Some(shim)),
            Some(Found::Dead(_)) | None => Ok(None),
        }
    }

    /// There has been a shim, which may have left containers.
    pub(super) fn had_shim(&self) -> bool {
        self.bundle().dir().exists()
    }

    /// The server of a launch of which no more is known: it works in the bundle, with the arguments
    /// that containerd's shims have. Blocks.
    ///
    /// # Errors
    /// `/proc` cannot be read.
    pub(super) fn find(&self) -> Result<Option<Arc<dyn Process>>, Step> {
        let arguments = command::server_arguments(&self.shims.settings, &self.id);
        let bundle = self.bundle();
        let found = self.shims.launcher.find(bundle.dir(), &arguments)?;
        if found.is_some() {
            return Ok(found);
        }
        // One that has just been executed shows its arguments an instant later.
        std::thread::sleep(EXECUTED);
        self.shims.launcher.find(bundle.dir(), &arguments)
    }

    /// Begins to read what a shim writes that an earlier daemon has launched. That it cannot be
    /// read is no reason to lose the shim.
    pub(super) fn read_again(&self, shim: &Arc<dyn Process>) -> Option<shim_log::Reader> {
        log::info!(sandbox = self.id.as_str(), pid = shim.identity().pid; "its shim is taken over");
        let read = shim_log::read(&self.bundle().log(), &self.id);
        read.map_err(|step| log::warn!(sandbox = self.id.as_str(); "its shim: {step}")).ok()
    }

    /// An empty shim ends when it is told to, at its socket; one that does not, or has none, is
    /// killed. What is left of its containers is for [`PodShim::clean_up_all`].
    ///
    /// # Errors
    /// It goes on.
    pub(super) async fn end_shim(
        &self,
        shim: &Arc<dyn Process>,
        socket: Option<&Path>,
    ) -> Result<(), Step> {
        let Some(socket) = socket else { return Self::kill(shim).await };
        let told = tokio::select! {
            _ = shim.exited() => return Ok(()),
            told = task::shut_down(socket, &self.id, WITHIN) => told,
        };
        let ends_within = match told {
            Ok(()) => WITHIN / 2,
            // One that hangs up is ending, and has not refused.
            Err(Failure::Lost(_)) => WITHIN / 10,
            Err(_) => Duration::ZERO,
        };
        if timeout(ends_within, shim.exited()).await.is_ok() {
            return Ok(());
        }
        let still_runs = || "it has answered Shutdown and still runs".to_owned();
        let why = told.err().map_or_else(still_runs, |failure| failure.step().to_string());
        log::warn!(sandbox = self.id.as_str(); "its shim is killed: {why}");
        Self::kill(shim).await
    }

    /// Shuts down the shim of a pod that was stopped, if neither bundle nor state names a container
    /// in it. True: it has ended.
    ///
    /// # Errors
    /// What is in it cannot be seen.
    pub(super) async fn dismiss(
        self: &Arc<Self>,
        shim: &Arc<dyn Process>,
        socket: &Path,
    ) -> Result<bool, Step> {
        if !self.piece(Self::is_empty).await.flatten()? {
            return Ok(false);
        }
        tokio::select! {
            _ = shim.exited() => return Ok(true),
            // Whether it has answered or not, it may end.
            _ = task::shut_down(socket, &self.id, WITHIN) => {}
        }
        Ok(timeout(WITHIN / 2, shim.exited()).await.is_ok())
    }

    /// Neither containerd nor the runtime has a container of the pod.
    fn is_empty(&self) -> Result<bool, Step> {
        Ok(containers::none(&self.shims.settings.tasks(), &self.id)?
            && self.forgotten()?.is_empty())
    }

    /// Kills a shim and waits for its end.
    ///
    /// # Errors
    /// It goes on.
    pub(super) async fn kill(shim: &Arc<dyn Process>) -> Result<(), Step> {
        shim.kill()?;
        let late = |_| io::Error::from(io::ErrorKind::TimedOut);
        timeout(WITHIN, shim.exited()).await.map_err(late).step("kill shim").map(drop)
    }

    /// After the end of a shim that has served: an empty one may end, but with containers in it the
    /// sandbox ends with it.
    ///
    /// # Errors
    /// What it has left cannot be seen. Nothing was done.
    pub(super) async fn bereave(
        self: &Arc<Self>,
        exit: Exit,
        pod: &Arc<dyn Pod>,
    ) -> Result<(), Step> {
        let asked = pod.clone();
        let (left, unknown) = match self
            .piece(move |shim| shim.left(exit, &*asked))
            .await
            .flatten()?
        {
            Left { lost, forgotten, unknown } if lost.is_empty() => {
                if matches!(exit.status, 0 | UNKNOWN_EXIT) {
                    log::debug!(sandbox = self.id.as_str(), status = exit.status; "its shim has ended, empty");
                } else {
                    log::warn!(sandbox = self.id.as_str(), status = exit.status; "its shim has ended, empty");
                    self.end_unknown(&unknown);
                }
                self.clean_up_and_tell(forgotten).await;
                return Ok(());
            }
            Left { lost, forgotten, unknown } => ([lost, forgotten].concat(), unknown),
        };
        let names: Vec<&str> = left.iter().map(|container| container.id.as_str()).collect();
        let reason = format!(
            "the shim ended with status {} and left containers: {}",
            exit.status,
            names.join(", ")
        );
        self.mourn(reason, pod).await;
        self.end_unknown(&unknown);
        self.clean_up_and_tell(left).await;
        Ok(())
    }

    /// [`PodShim::bereave`], repeated if it fails, unless the endpoint `has_ended` meanwhile, which
    /// cleans up itself. No shim comes before it is known what the last has left, or all looks have
    /// failed.
    pub(super) async fn bereave_in_the_end(
        self: &Arc<Self>,
        exit: Exit,
        pod: &Arc<dyn Pod>,
        has_ended: impl Fn() -> bool,
    ) {
        let mut looks = LOOKS.into_iter();
        loop {
            let failed = {
                let _cleaning = self.cleaning().lock().await;
                if has_ended() {
                    return;
                }
                self.bereave(exit, pod).await
            };
            let Err(step) = failed else { return };
            let Some(pause) = looks.next() else {
                return log::error!(sandbox = self.id.as_str(); "its shim has ended, and its containers: {step}");
            };
            log::warn!(sandbox = self.id.as_str(); "its shim has ended, and its containers: {step}; tried again");
            sleep(pause).await;
        }
    }

    /// Ends processes in the pod that the shim may have left: them alone, as their containers may
    /// be of another pod or of none.
    fn end_unknown(&self, unknown: &[Held]) {
        for process in unknown {
            if let Err(step) = process.kill() {
                log::error!(sandbox = self.id.as_str(), pid = process.pid(); "its containers: {step}");
            }
        }
    }

    async fn clean_up_and_tell(self: &Arc<Self>, left: Vec<Container>) {
        for step in self.clean_up(left).await {
            log::error!(sandbox = self.id.as_str(); "its containers: {step}");
        }
    }

    /// The sandbox ends for that reason.
    pub(super) async fn mourn(self: &Arc<Self>, reason: String, pod: &Arc<dyn Pod>) {
        log::error!(sandbox = self.id.as_str(); "the sandbox ends: {reason}");
        if let Some(Err(step)) =
            self.blocking(move |shim| shim.bundle().record_death(&reason)).await
        {
            log::error!(sandbox = self.id.as_str(); "its shim: {step}");
        }
        pod.bereaved();
    }

    /// What the end of the shim has left.
    fn left(&self, exit: Exit, pod: &dyn Pod) -> Result<Left, Step> {
        let tasks = self.shims.settings.tasks();
        let Inside { containers: mut lost, unknown } = self.inside(pod)?;
        // A bundle that goes between the two is forgotten.
        let bundles = containers::of(&tasks, &self.id)?;
        let mut forgotten = self.forgotten()?;
        forgotten.retain(|container| !lost.contains(container) && !bundles.contains(container));
        // Of a shim that ended well a bundle may be left: of a container that is being removed, or
        // being made for the next shim. Where nobody can tell how it ended, the containers'
        // processes must.
        let well = matches!(exit.status, 0 | UNKNOWN_EXIT);
        let without: Vec<Container> = bundles.iter().chain(&forgotten).cloned().collect();
        if !well || containers::alive(&without)? {
            lost.extend(
                bundles.into_iter().filter(|bundle| !lost.contains(bundle)).collect::<Vec<_>>(),
            );
            lost.append(&mut forgotten);
        }
        Ok(Left { lost, forgotten, unknown })
    }

    /// What has processes in the pod's own namespaces.
    fn inside(&self, pod: &dyn Pod) -> Result<Inside, Step> {
        containers::inside(
            &pod.namespaces()?,
            &self.shims.settings.tasks(),
            &self.states()?,
            &self.id,
        )
    }

    /// Where the runtime keeps the states of its containers.
    fn states(&self) -> Result<PathBuf, Step> {
        let options = self.runtime.runc_options()?;
        Ok(containers::root(options.as_ref(), &self.shims.settings.containerd_namespace))
    }

    /// Containers of which the runtime has a state, and containerd no bundle: their deletion was
    /// cut off.
    fn forgotten(&self) -> Result<Vec<Container>, Step> {
        containers::forgotten(&self.states()?, &self.shims.settings.tasks(), &self.id)
    }

    /// Ends what is left of containers whose shim is dead.
    pub(super) async fn clean_up(self: &Arc<Self>, left: Vec<Container>) -> Vec<Step> {
        let mut failed = Vec::new();
        if left.is_empty() {
            return failed;
        }
        let containers = left.clone();
        let killed = self.blocking(move |_| containers::kill(&containers)).await;
        failed.extend(killed.and_then(Result::err));
        match self.shims.settings.binary(&self.runtime.name) {
            Ok(binary) => {
                let options = self.runtime.runc_options().ok().flatten();
                for Container { id, .. } in &left {
                    let ended = match self.bundle().last(id, options.as_ref()) {
                        Ok(bundle) => {
                            command::delete(&self.shims.settings, &binary, id, &bundle).await
                        }
                        Err(step) => Err(step),
                    };
                    failed.extend(ended.err());
                }
            }
            Err(step) => failed.push(step),
        }
        failed
    }

    /// All containers of the pod, to be asked while the pause still tells its namespaces:
    /// containerd removes the bundles of containers that it takes for dead. `None` after a panic.
    pub(super) async fn look_around(
        self: &Arc<Self>,
        pod: &Arc<dyn Pod>,
    ) -> Option<Result<Left, Step>> {
        let asked = pod.clone();
        self.blocking(move |shim| shim.all(&*asked)).await
    }

    /// After the end of a shim that ran the pause: the sandbox ends with it, and so do all
    /// containers.
    pub(super) async fn bereave_with_pause(
        self: &Arc<Self>,
        left: Option<Result<Left, Step>>,
        exit: Exit,
        pod: &Arc<dyn Pod>,
    ) {
        self.mourn(
            format!("the shim, which ran the pause, ended with status {}", exit.status),
            pod,
        )
        .await;
        let left = match left {
            Some(Ok(left)) => left,
            Some(Err(step)) => {
                return log::error!(sandbox = self.id.as_str(); "its containers: {step}");
            }
            None => return,
        };
        self.end_unknown(&left.unknown);
        self.clean_up_and_tell(left.lost).await;
    }

    /// All containers of the pod: those that have processes in its namespaces, a bundle, or a state
    /// of the runtime's.
    fn all(&self, pod: &dyn Pod) -> Result<Left, Step> {
        let Inside { containers: mut all, unknown } = self.inside(pod)?;
        for container in self.known()? {
            if !all.contains(&container) {
                all.push(container);
            }
        }
        Ok(Left { lost: all, forgotten: Vec::new(), unknown })
    }

    /// The containers that containerd has a bundle of, or only the runtime a state.
    fn known(&self) -> Result<Vec<Container>, Step> {
        // In this order: a bundle that goes between the two is forgotten.
        let mut known = containers::of(&self.shims.settings.tasks(), &self.id)?;
        let forgotten = self.forgotten()?;
        known.extend(
            forgotten
                .into_iter()
                .filter(|container| !known.contains(container))
                .collect::<Vec<_>>(),
        );
        Ok(known)
    }

    /// Ends what is left of all containers of the pod, whose shim is dead.
    ///
    /// # Errors
    /// The first step that failed.
    pub(super) async fn clean_up_all(self: &Arc<Self>) -> Result<(), Step> {
        let known = self.piece(|shim| shim.known()).await.flatten()?;
        match self.clean_up(known).await.into_iter().next() {
            Some(step) => Err(step),
            None => Ok(()),
        }
    }

    /// Runs what blocks on a thread for it; `None` after a panic in it.
    async fn blocking<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Self) -> T + Send + 'static,
    ) -> Option<T> {
        self.piece(work).await.ok()
    }

    /// The same, with the panic.
    pub(super) async fn piece<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Self) -> T + Send + 'static,
    ) -> Result<T, Step> {
        let group = self.clone();
        pool::run(Class::Shim, move || work(&group)).await
    }
}
