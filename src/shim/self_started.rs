//! The endpoint of a pod whose shim is started by the shim's own `start`.
//!
//! For shims that take no socket from who starts them, and for those that run the pause as well.
//! Where the shim listens is known only when it has been started, and containerd is told the
//! address once: so it runs from the pod's Start to its Shutdown, and one that ended empty is
//! started again, at the same address.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{fs, io};

use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, timeout};

use super::bootstrap::{self, Bootstrap};
use super::bundle::{Bundle, Recorded};
use super::pod_shim::{AGAIN, DISMISSALS, Found, PodShim, WITHIN};
use super::rootfs::Rootfs;
use super::task::{Failure, Tasks};
use super::{Pod, Settings, command, containerd_owned, log as shim_log};
use crate::error::{IoContext as _, Step, gone};
use crate::pause::Plan;
use crate::pool::{self, Class};
use crate::process::{Exit, Process, held};

/// An endpoint whose shim is started by its `start`.
#[derive(Debug)]
pub struct SelfStarted {
    pub(super) shim: Arc<PodShim>,
    /// The pause is a task of the shim too.
    runs_pause: bool,
    now: Mutex<Now>,
    /// Something in `now` has changed that the serving task waits for.
    changed: Notify,
    /// What a shim that died has left is known, and the pause is needed no longer to find it.
    looked_around: watch::Sender<bool>,
    /// Held while a shim is looked for or started, and by the end. A wait for it takes no thread.
    turn: tokio::sync::Mutex<()>,
}

/// What is true now.
#[derive(Debug, Default)]
struct Now {
    /// There shall be a shim.
    open: bool,
    /// What an earlier daemon has left is not known yet: a shim may live.
    unsure: bool,
    shim: Option<Arc<dyn Process>>,
    bootstrap: Option<Bootstrap>,
    log: Option<shim_log::Reader>,
    /// The shim ended while there was no daemon; how it ended.
    missed: Option<Exit>,
    /// The pause was there and is deleted.
    pause_deleted: bool,
    /// The pod was stopped, and its shim got Shutdown.
    dismissed: bool,
    ended: bool,
}

/// What the serving task does next.
enum Next {
    Ended,
    Recover,
    Missed(Exit),
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
            now: Mutex::default(),
            changed: Notify::new(),
            looked_around: watch::channel(false).0,
            turn: Default::default(),
        }
    }

    /// Where the shim listens; `None` before its start.
    pub fn bootstrap(&self) -> Option<Bootstrap> {
        self.now().bootstrap.clone()
    }

    /// The shim, while it lives.
    pub(super) fn shim(&self) -> Option<Arc<dyn Process>> {
        self.now().shim.clone()
    }

    /// Why the shim died with containers in it, if it did.
    pub fn death(&self) -> Option<String> {
        self.shim.bundle().death()
    }

    /// Puts the spec that the shim is to run into its bundle, with a root that holds the pause
    /// program and belongs to the root of the pod's user namespace, and a pin of that. Blocks.
    ///
    /// # Errors
    /// The failed step; call [`SelfStarted::end`] then.
    pub fn describe(&self, spec: &[u8], plan: &Plan) -> Result<(), Step> {
        if !self.runs_pause {
            return Ok(());
        }
        self.root().make(spec, plan, &self.shim.shims.settings.state_dir)
    }

    fn root(&self) -> Rootfs {
        Rootfs::new(self.shim.bundle())
    }

    /// Starts the shim.
    ///
    /// # Errors
    /// The failed step; nothing of the shim is left then.
    pub(super) async fn start(self: &Arc<Self>) -> Result<(), Step> {
        let _turn = self.turn.lock().await;
        if self.now().ended {
            return Ok(());
        }
        let group = &self.shim;
        let (binary, log) = self.blocking(|started| started.prepare()).await.flatten()?;
        let told = self.bootstrap();
        match self.bring_up(&binary).await {
            Ok((bootstrap, shim)) => {
                let (pid, id) = (shim.identity().pid, group.id.as_str());
                log::debug!(sandbox = id, pid = pid; "its shim is started: {}", binary.display());
                let mut now = self.now();
                (now.open, now.shim, now.bootstrap, now.log) =
                    (true, Some(shim), Some(bootstrap), Some(log));
                drop(now);
                self.changed.notify_one();
                Ok(())
            }
            Err(step) => {
                for left in self.end_cut_off(&binary).await {
                    log::warn!(sandbox = group.id.as_str(); "undo the start of its shim: {left}");
                }
                // containerd knows the pod by it, also while there is no shim.
                self.now().bootstrap = told;
                Err(step)
            }
        }
    }

    /// Makes what the shim needs: its binary, and who reads its log.
    fn prepare(&self) -> Result<(PathBuf, shim_log::Reader), Step> {
        let PodShim { shims, id, runtime, .. } = &*self.shim;
        let binary = shims.settings.binary(&runtime.name)?;
        let bundle = self.shim.bundle();
        bundle.make(id, !self.runs_pause)?;
        let log = shim_log::read(&bundle.log(), id)?;
        bundle.record(Some(&Recorded::Launching))?;
        Ok((binary, log))
    }

    /// From the call of `start` to a shim that is known.
    async fn bring_up(&self, binary: &Path) -> Result<(Bootstrap, Arc<dyn Process>), Step> {
        let PodShim { shims, id, .. } = &*self.shim;
        let bundle = self.shim.bundle();
        let given = bootstrap::given(&shims.settings, id, &self.shim.runtime).await?;
        let said = command::start(&shims.settings, binary, id, bundle.dir(), given).await?;
        let bootstrap =
            Bootstrap::parse(&said.output).step_at("read what the shim's start said", binary)?;
        let told = self.bootstrap();
        if let Some(told) = told.filter(|told| told.socket() != bootstrap.socket()) {
            // containerd knows the pod by the first.
            let moved =
                format!("it listens at {}, not at {} as before", bootstrap.address, told.address);
            return Err(Step::at("start shim", binary, io::Error::other(moved)));
        }
        self.now().bootstrap = Some(bootstrap.clone());
        bundle.record_bootstrap(&bootstrap)?;
        let tasks = Tasks::connect(&bootstrap, WITHIN).await.map_err(Failure::step)?;
        let pid = tasks.shim_pid(id, WITHIN).await.map_err(Failure::step)?;
        let nobody =
            || io::Error::other(format!("it says that it is process {pid}, which does not live"));
        let shim = shims.launcher.open(pid)?.ok_or_else(nobody).step_at("find shim", binary)?;
        // From here on it may be killed.
        held::vouch(shim.identity(), said.since)?;
        bundle.record(Some(&Recorded::Running { identity: shim.identity().clone() }))?;
        Ok((bootstrap, shim))
    }

    /// Finds the shim that an earlier daemon has started. The serving task does again what fails.
    pub(super) async fn recover(self: &Arc<Self>) {
        self.now().unsure = true;
        if let Err(step) = self.find_again().await {
            log::error!(sandbox = self.shim.id.as_str(); "recovery: its shim: {step}; tried again");
        }
    }

    /// Finds the shim that an earlier daemon has started, unless that is done.
    ///
    /// # Errors
    /// Nobody can tell whether a shim lives, or where it listens.
    pub(super) async fn find_again(self: &Arc<Self>) -> Result<(), Step> {
        if !self.now().unsure {
            return Ok(());
        }
        let _turn = self.turn.lock().await;
        self.blocking(|started| started.look_again()).await.flatten()
    }

    /// To be called with the turn held.
    fn look_again(&self) -> Result<(), Step> {
        let now = self.now();
        if now.ended || !now.unsure {
            return Ok(());
        }
        drop(now);
        let bootstrap = self.shim.bundle().bootstrap()?;
        let (shim, missed) = match self.shim.recorded_shim()? {
            Some(Found::Alive { shim, .. }) => (Some(shim), None),
            Some(Found::Dead(exit)) => (None, Some(exit)),
            None => (None, None),
        };
        let log = shim.as_ref().and_then(|shim| self.shim.read_again(shim));
        let mut now = self.now();
        (now.open, now.unsure, now.missed) = (bootstrap.is_some(), false, missed);
        (now.shim, now.bootstrap, now.log) = (shim, bootstrap, log);
        drop(now);
        self.changed.notify_one();
        Ok(())
    }

    /// Serves the endpoint until its end.
    pub(super) async fn serve(self: Arc<Self>, pod: Arc<dyn Pod>) {
        if matches!(self.blocking(|started| started.death()).await, Ok(Some(_))) {
            // The daemon may have been killed between the record of it and what follows from it.
            pod.bereaved();
        }
        loop {
            match self.next(&*pod) {
                Next::Ended => return,
                Next::Recover => {
                    // The end need not wait for it.
                    let _ = timeout(AGAIN, self.changed.notified()).await;
                    if let Err(step) = self.find_again().await {
                        log::debug!(sandbox = self.shim.id.as_str(); "recovery: its shim: {step}; tried again");
                    }
                }
                Next::Missed(exit) => self.after(exit, &pod).await,
                Next::Watch(shim) => {
                    let begun = Instant::now();
                    let exit = shim.exited().await;
                    self.forget();
                    self.after(exit, &pod).await;
                    self.spare(begun, &*pod).await;
                }
                Next::Start => {
                    if let Err(step) = self.start().await {
                        log::error!(sandbox = self.shim.id.as_str(); "its shim: {step}");
                        sleep(AGAIN).await;
                    }
                }
                Next::Wait => self.changed.notified().await,
            }
        }
    }

    /// A shim that ends as soon as it is started is not started again as soon as it has ended.
    async fn spare(&self, begun: Instant, pod: &dyn Pod) {
        let lived = begun.elapsed();
        if lived < AGAIN && !self.runs_pause && pod.lives() && !self.now().ended {
            log::warn!(sandbox = self.shim.id.as_str(); "its shim has ended too soon: {} ms after its start", lived.as_millis());
            sleep(AGAIN).await;
        }
    }

    /// The shim has ended.
    fn forget(&self) {
        let mut now = self.now();
        (now.shim, now.log) = (None, None);
    }

    fn next(&self, pod: &dyn Pod) -> Next {
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
        match &now.shim {
            Some(shim) => Next::Watch(shim.clone()),
            // A shim that ran the pause has taken the sandbox with it, and a pod that has ended
            // gets no container.
            None if now.open && !self.runs_pause && pod.lives() => Next::Start,
            None => Next::Wait,
        }
    }

    async fn after(self: &Arc<Self>, exit: Exit, pod: &Arc<dyn Pod>) {
        let dismissed = self.now().dismissed;
        if dismissed {
            // The next daemon must not take it for one that died either.
            if let Err(step) =
                self.blocking(|started| started.shim.bundle().record(None)).await.flatten()
            {
                log::warn!(sandbox = self.shim.id.as_str(); "its shim: {step}");
            }
        }
        if dismissed || !self.runs_pause {
            return self.shim.bereave_in_the_end(exit, pod, || self.now().ended).await;
        }
        let _cleaning = self.shim.cleaning().lock().await;
        // The end cleans up itself.
        if self.now().ended {
            return;
        }
        let left = self.shim.look_around(pod).await;
        self.looked_around.send_replace(true);
        self.shim.bereave_with_pause(left, exit, pod).await;
    }

    /// The pod was stopped: its shim ends when it is empty, and no other comes.
    pub(super) async fn dismiss(self: Arc<Self>) {
        for pause in DISMISSALS {
            sleep(pause).await;
            let (Some(shim), Some(said)) = (self.shim(), self.bootstrap()) else { return };
            {
                let mut now = self.now();
                if now.ended || self.runs_pause && !now.pause_deleted {
                    return;
                }
                now.dismissed = true;
            }
            match self.shim.dismiss(&shim, &said.socket()).await {
                Ok(true) => return,
                Ok(false) => {}
                Err(step) => log::debug!(sandbox = self.shim.id.as_str(); "its shim: {step}"),
            }
            self.now().dismissed = false;
        }
    }

    /// Connects to the shim.
    ///
    /// # Errors
    /// It was never started, or does not accept.
    pub(super) async fn tasks(&self) -> Result<Tasks, Failure> {
        let Some(bootstrap) = self.bootstrap() else {
            let never = io::Error::new(io::ErrorKind::NotFound, "it was never started");
            return Err(Failure::NotFound(Step::new("connect to shim", never)));
        };
        Tasks::connect(&bootstrap, WITHIN).await
    }

    /// Has the shim's binary clean up after the pause, whose server is dead.
    ///
    /// # Errors
    /// The failed step.
    pub(super) async fn delete_pause(&self) -> Result<(), Step> {
        let PodShim { shims, id, runtime, .. } = &*self.shim;
        let bundle = self.shim.bundle();
        let binary = shims.settings.binary(&runtime.name)?;
        Bundle::write_runtime(bundle.dir(), runtime.runc_options()?.as_ref())?;
        command::delete(&shims.settings, &binary, id, bundle.dir()).await?;
        self.pause_is_deleted();
        Ok(())
    }

    /// The same, as soon as the pause is no longer needed to find the containers that its shim has
    /// left.
    ///
    /// # Errors
    /// The failed step.
    pub(super) async fn delete_bereaved_pause(&self) -> Result<(), Step> {
        let mut looked = self.looked_around.subscribe();
        // Nobody looks any more where the endpoint is being ended.
        let _ = timeout(AGAIN, looked.wait_for(|looked| *looked)).await;
        if self.has_no_pause() {
            return Ok(());
        }
        let deleted = self.delete_pause().await;
        // What the end has removed meanwhile is not missed.
        if self.has_no_pause() { Ok(()) } else { deleted }
    }

    /// The same, unless the pause is known to be deleted, or never was.
    ///
    /// # Errors
    /// The failed step.
    pub(super) async fn delete_orphan(&self) -> Result<(), Step> {
        if !self.runs_pause || self.now().pause_deleted || self.shim.bundle().recorded()?.is_none()
        {
            return Ok(());
        }
        self.delete_pause().await
    }

    /// The pause is deleted, or is by the end of the endpoint.
    fn has_no_pause(&self) -> bool {
        let now = self.now();
        now.pause_deleted || now.ended
    }

    /// The pause is deleted.
    pub(super) fn pause_was_deleted(&self) -> bool {
        self.now().pause_deleted
    }

    /// The runtime has nothing of the pause any more.
    pub(super) fn pause_is_deleted(&self) {
        self.now().pause_deleted = true;
    }

    /// Ends shim, socket and bundle. Gone already is success.
    ///
    /// # Errors
    /// Every step that failed.
    pub(super) async fn end(self: &Arc<Self>) -> Result<(), Vec<Step>> {
        self.now().ended = true;
        self.changed.notify_one();
        let _turn = self.turn.lock().await;
        self.end_what_runs().await?;
        self.blocking(|started| started.remove()).await.unwrap_or_else(|step| Err(vec![step]))
    }

    /// Ends the shim, and what it has left. To be called with the turn held.
    async fn end_what_runs(self: &Arc<Self>) -> Result<(), Vec<Step>> {
        let one = |step| vec![step];
        let known = self.shim();
        if known.is_none() {
            let cut_off =
                self.blocking(|started| started.cut_off()).await.flatten().map_err(one)?;
            let failed = match cut_off {
                Some(binary) => self.end_cut_off(&binary).await,
                None => Vec::new(),
            };
            if !failed.is_empty() {
                return Err(failed);
            }
        }
        let shim = match known {
            Some(shim) => Some(shim),
            None => self.shim.piece(|shim| shim.living_shim()).await.flatten().map_err(one)?,
        };
        if let Some(shim) = shim {
            let socket = self.said().map(|said| said.socket());
            self.shim.end_shim(&shim, socket.as_deref()).await.map_err(one)?;
            self.forget();
        }
        // Whoever cleans up works in the bundle.
        let _cleaning = self.shim.cleaning().lock().await;
        // One that was told to end in the middle of making the pause has left what it had made.
        self.delete_orphan().await.map_err(one)?;
        if self.shim.piece(|shim| shim.had_shim()).await.map_err(one)? {
            self.shim.clean_up_all().await.map_err(one)?;
        }
        Ok(())
    }

    /// The shim's binary, where a start of it was cut off.
    fn cut_off(&self) -> Result<Option<PathBuf>, Step> {
        let PodShim { shims, runtime, .. } = &*self.shim;
        match self.shim.bundle().recorded()? {
            Some(Recorded::Launching) => shims.settings.binary(&runtime.name).map(Some),
            _ => Ok(None),
        }
    }

    /// Removes sockets, root and bundle.
    fn remove(&self) -> Result<(), Vec<Step>> {
        let mut failed = Vec::new();
        for socket in self.sockets() {
            failed.extend(gone(fs::remove_file(&socket)).step_at("remove socket", socket).err());
        }
        failed.extend(self.root().unmount().err().unwrap_or_default());
        if failed.is_empty() {
            failed.extend(self.shim.bundle().remove().err());
        }
        if failed.is_empty() { Ok(()) } else { Err(failed) }
    }

    /// Runs what blocks on a thread for it.
    async fn blocking<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Arc<Self>) -> T + Send + 'static,
    ) -> Result<T, Step> {
        let started = self.clone();
        pool::run(Class::Shim, move || work(&started)).await
    }

    /// Where its shim may have listened: what it said, and what containerd's own shims make of the
    /// sandbox id, should nobody have heard it.
    fn sockets(&self) -> Vec<PathBuf> {
        let PodShim { shims, id, .. } = &*self.shim;
        let Settings { containerd_address, containerd_namespace, .. } = &shims.settings;
        let usual = containerd_owned::Socket::new(containerd_address, containerd_namespace, id)
            .path()
            .to_owned();
        let said = self.said().map(|shim| shim.socket()).filter(|socket| *socket != usual);
        said.into_iter().chain([usual]).collect()
    }

    /// What its `start` said, to this daemon or an earlier one.
    fn said(&self) -> Option<Bootstrap> {
        self.bootstrap().or_else(|| self.shim.bundle().bootstrap().ok().flatten())
    }

    /// Ends what a start that was cut off, or has failed, may have left: the server, and what it
    /// holds.
    async fn end_cut_off(&self, binary: &Path) -> Vec<Step> {
        let PodShim { shims, id, .. } = &*self.shim;
        let bundle = self.shim.bundle();
        let mut failed = Vec::new();
        let killed = async {
            let Some(shim) = self.shim.piece(|shim| shim.find()).await.flatten()? else {
                return Ok(());
            };
            PodShim::kill(&shim).await?;
            self.delete_orphan().await?;
            self.shim.clean_up_all().await
        };
        failed.extend(killed.await.err());
        // Also a shim that is nothing like containerd's own knows how to clean up after itself, if
        // it works at all.
        if let Err(step) = command::delete(&shims.settings, binary, id, bundle.dir()).await {
            log::warn!(sandbox = id.as_str(); "its shim: {step}");
        }
        for socket in self.sockets() {
            failed.extend(gone(fs::remove_file(&socket)).step_at("remove socket", socket).err());
        }
        failed.extend(bundle.record(None).err());
        failed
    }

    fn now(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
