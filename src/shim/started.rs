//! The endpoint of a pod whose shim is started by the shim's own `start`.
//!
//! For shims that take no socket from who starts them, and for those that run the pause as well. Where the shim listens is known only when it
//! has been started, and containerd is told the address once: so it runs from the pod's Start to its Shutdown, and one that ended empty
//! is started again, at the same address.

use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use std::{fs, io};

use containerd_shim_protos::bootstrap_api::{BootstrapParams, Extension};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use protobuf::well_known_types::any::Any;
use protobuf::{Message as _, MessageField};
use tokio::sync::{Notify, watch};
use tokio::time::{sleep, timeout};

use super::bootstrap::Bootstrap;
use super::bundle::{Bundle, Recorded, gone};
use super::group::Group;
use super::task::{self, Failure, Tasks};
use super::{Pod, Settings, command, driver, fifo, on_demand};
use crate::containerd::Store;
use crate::error::{IoContext as _, Step};
use crate::pause::{Adoption, Exit, Pause, Plan, image, native};

/// How long a shim may take to answer, and one that is told to end until it has.
const WITHIN: Duration = Duration::from_secs(10);

/// Between two tries of what must work in the end.
const AGAIN: Duration = Duration::from_secs(1);

/// More than the kernel takes from the end of a vfork to the new program's arguments.
const EXECUTED: Duration = Duration::from_millis(20);

/// The first containerd that gives shims its parameters as a message of their own; before, the runtime's options alone.
const BOOTSTRAP_SINCE: (u32, u32) = (2, 3);

/// Name of the pause program in the root of a sandbox.
const PAUSE: &str = "pause";

/// Where the record of what `start` said is in the bundle.
const BOOTSTRAP: &str = "bootstrap.json";

/// An endpoint whose shim is started by its `start`.
#[derive(Debug)]
pub struct Started {
    pub(super) group: Arc<Group>,
    /// The pause is a task of the shim too.
    runs_pause: bool,
    now: Mutex<Now>,
    /// Something in `now` has changed that the serving task waits for.
    changed: Notify,
    /// What a shim that died has left is known, and the pause is needed no longer to find it.
    looked_around: watch::Sender<bool>,
    /// Held while a shim is started, and by the end.
    turn: Mutex<()>,
}

/// What is true now.
#[derive(Debug, Default)]
struct Now {
    /// There shall be a shim.
    open: bool,
    shim: Option<Arc<dyn Pause>>,
    bootstrap: Option<Bootstrap>,
    log: Option<fifo::Reader>,
    /// The shim ended while there was no daemon; how it ended.
    missed: Option<Exit>,
    /// The pause was there and is deleted.
    pause_deleted: bool,
    ended: bool,
}

/// What the serving task does next.
enum Next {
    Ended,
    Missed(Exit),
    Watch(Arc<dyn Pause>),
    Start,
    Wait,
}

impl Started {
    /// The endpoint of a pod. Nothing is made yet.
    pub(super) fn new(group: Group, runs_pause: bool) -> Self {
        Self {
            group: Arc::new(group),
            runs_pause,
            now: Mutex::default(),
            changed: Notify::new(),
            looked_around: watch::channel(false).0,
            turn: Mutex::default(),
        }
    }

    /// Where the shim listens; `None` before its start.
    pub fn bootstrap(&self) -> Option<Bootstrap> {
        self.now().bootstrap.clone()
    }

    /// The shim, while it lives.
    pub(super) fn shim(&self) -> Option<Arc<dyn Pause>> {
        self.now().shim.clone()
    }

    /// Why the shim died with containers in it, if it did.
    pub fn death(&self) -> Option<String> {
        self.group.bundle.death()
    }

    /// Puts the spec that the shim is to run into its bundle, with a root that holds the pause program and belongs to the root of the pod's user
    /// namespace, and a pin of that. Blocks.
    ///
    /// # Errors
    /// The failed step; call [`Started::end`] then.
    pub fn describe(&self, spec: &[u8], plan: &Plan) -> Result<(), Step> {
        if !self.runs_pause {
            return Ok(());
        }
        let dir = self.group.bundle.dir();
        made(fs::DirBuilder::new().mode(0o700).create(dir)).step_at("make directory", dir)?;
        let config = dir.join("config.json");
        fs::write(&config, spec).step_at("write file", config)?;
        let root = self.root();
        made(fs::DirBuilder::new().mode(0o755).create(&root)).step_at("make directory", &root)?;
        // A file system of its own, for what is below /run may not be executed on many nodes.
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
        mount(Some("pause"), &root, Some("tmpfs"), flags, Some("mode=755,size=65536")).step_at("mount root", &root)?;
        let program = root.join(PAUSE);
        fs::write(&program, image::PROGRAM).step_at("write pause program", &program)?;
        let executable = fs::Permissions::from_mode(0o555);
        fs::set_permissions(&program, executable).step_at("write pause program", &program)?;
        let Some(userns) = plan.userns else { return Ok(()) };
        if let Some(netns) = &plan.netns {
            native::pin_owner(netns, &driver::user_namespace(dir))?;
        }
        let (uid, gid) = (userns.uid.host_id, userns.gid.host_id);
        // The root of a user namespace makes what is mounted on, and must get here first.
        chown(&root, Some(uid), Some(gid)).step_at("give root to the user namespace", &root)?;
        self.group.shims.settings.let_pass(dir)
    }

    fn root(&self) -> PathBuf {
        self.group.bundle.dir().join("rootfs")
    }

    /// Starts the shim. Blocks; to be called on a thread of the runtime.
    ///
    /// # Errors
    /// The failed step; nothing of the shim is left then.
    pub(super) fn start(self: &Arc<Self>) -> Result<(), Step> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        if self.now().ended {
            return Ok(());
        }
        let group = &self.group;
        let binary = group.shims.settings.binary(&group.runtime.name)?;
        group.bundle.make(&group.id, !self.runs_pause)?;
        let log = fifo::read(&group.bundle.log(), &group.id)?;
        group.bundle.record(Some(&Recorded::Launching))?;
        let runtime = tokio::runtime::Handle::current();
        match runtime.block_on(self.bring_up(&binary)) {
            Ok((bootstrap, shim)) => {
                let (pid, id) = (shim.identity().pid, group.id.as_str());
                log::debug!(sandbox = id, pid = pid; "its shim is started: {}", binary.display());
                let mut now = self.now();
                (now.open, now.shim, now.bootstrap, now.log) = (true, Some(shim), Some(bootstrap), Some(log));
                drop(now);
                self.changed.notify_one();
                Ok(())
            }
            Err(step) => {
                for left in runtime.block_on(self.end_cut_off(&binary)) {
                    log::warn!(sandbox = group.id.as_str(); "undo the start of its shim: {left}");
                }
                Err(step)
            }
        }
    }

    /// From the call of `start` to a shim that is known.
    async fn bring_up(&self, binary: &Path) -> Result<(Bootstrap, Arc<dyn Pause>), Step> {
        let Group { shims, bundle, id, .. } = &*self.group;
        let given = self.given().await?;
        let said = command::start(&shims.settings, binary, id, bundle.dir(), given).await?;
        let bootstrap = Bootstrap::parse(&said).step_at("read what the shim's start said", binary)?;
        let told = self.bootstrap();
        if let Some(told) = told.filter(|told| told.socket() != bootstrap.socket()) {
            // containerd knows the pod by the first.
            let moved = format!("it listens at {}, not at {} as before", bootstrap.address, told.address);
            return Err(Step::at("start shim", binary, io::Error::other(moved)));
        }
        self.now().bootstrap = Some(bootstrap.clone());
        let text = serde_json::to_vec(&bootstrap).map_err(io::Error::other).step("encode address of shim")?;
        let file = bundle.dir().join(BOOTSTRAP);
        fs::write(&file, text).step_at("write file", file)?;
        let tasks = Tasks::connect(&bootstrap, WITHIN).await.map_err(Failure::step)?;
        let pid = tasks.shim_pid(id, WITHIN).await.map_err(Failure::step)?;
        let nobody = || io::Error::other(format!("it says that it is process {pid}, which does not live"));
        let shim = shims.launcher.open(pid)?.ok_or_else(nobody).step_at("find shim", binary)?;
        bundle.record(Some(&Recorded::Running { identity: shim.identity().clone() }))?;
        Ok((bootstrap, shim))
    }

    /// What `start` is given on standard input: what the node's containerd gives to shims of its own.
    async fn given(&self) -> Result<Vec<u8>, Step> {
        let Group { shims, id, runtime, .. } = &*self.group;
        let settings = &shims.settings;
        let options = runtime.options.as_ref().map(|(type_url, value)| Any {
            type_url: type_url.clone(),
            value: value.clone(),
            ..Default::default()
        });
        let containerd =
            Store { address: settings.containerd_address.clone(), namespace: settings.containerd_namespace.clone() };
        let version = containerd.version().await?;
        let encoded = if since(&version) < BOOTSTRAP_SINCE {
            options.map_or(Ok(Vec::new()), |options| options.write_to_bytes())
        } else {
            let extension = |options| Extension { value: MessageField::some(options), ..Default::default() };
            let parameters = BootstrapParams {
                instance_id: id.clone(),
                namespace: settings.containerd_namespace.clone(),
                containerd_version: version,
                containerd_ttrpc_address: settings.containerd_ttrpc(),
                containerd_grpc_address: settings.containerd_address.display().to_string(),
                containerd_binary: "containerd".to_owned(),
                extensions: options.map(extension).into_iter().collect(),
                ..Default::default()
            };
            parameters.write_to_bytes()
        };
        encoded.map_err(io::Error::other).step("encode what the shim is given")
    }

    /// Finds the shim that an earlier daemon has started.
    pub(super) fn recover(&self) {
        if let Err(step) = self.try_recover() {
            log::error!(sandbox = self.group.id.as_str(); "recovery: its shim: {step}");
        }
    }

    fn try_recover(&self) -> Result<(), Step> {
        let Group { shims, bundle, id, .. } = &*self.group;
        let bootstrap = self.recorded_bootstrap()?;
        let found = match bundle.recorded()? {
            None => None,
            Some(Recorded::Running { identity }) => match shims.launcher.adopt(&identity) {
                Adoption::Alive(shim) => Some(Arc::from(shim)),
                Adoption::Dead(exit) => {
                    self.now().missed = Some(exit);
                    None
                }
                Adoption::Unknown(step) => return Err(step),
            },
            Some(Recorded::Launching) => self.find()?,
        };
        let log = match &found {
            Some(shim) => {
                log::info!(sandbox = id.as_str(), pid = shim.identity().pid; "its shim is taken over");
                Some(fifo::read(&bundle.log(), id)?)
            }
            None => None,
        };
        let mut now = self.now();
        (now.open, now.shim, now.bootstrap, now.log) = (bootstrap.is_some(), found, bootstrap, log);
        Ok(())
    }

    fn recorded_bootstrap(&self) -> Result<Option<Bootstrap>, Step> {
        let path = self.group.bundle.dir().join(BOOTSTRAP);
        match fs::read(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(Step::at("read address of shim", path, e)),
            Ok(text) => {
                serde_json::from_slice(&text).map(Some).map_err(io::Error::other).step_at("read address of shim", path)
            }
        }
    }

    /// The server of a `start` of which no more is known: it works in the bundle, with the arguments that containerd's shims have.
    fn find(&self) -> Result<Option<Arc<dyn Pause>>, Step> {
        let Group { shims, bundle, id, .. } = &*self.group;
        let arguments = command::server_arguments(&shims.settings, id);
        let found = shims.launcher.find(bundle.dir(), &arguments)?;
        if found.is_some() {
            return Ok(found);
        }
        // One that has just been executed shows its arguments an instant later.
        std::thread::sleep(EXECUTED);
        shims.launcher.find(bundle.dir(), &arguments)
    }

    /// Serves the endpoint until its end.
    pub(super) async fn serve(self: Arc<Self>, pod: Arc<dyn Pod>) {
        let of = self.clone();
        if tokio::task::spawn_blocking(move || of.death()).await.ok().flatten().is_some() {
            // The daemon may have been killed between the record of it and what follows from it.
            pod.bereaved();
        }
        loop {
            match self.next() {
                Next::Ended => return,
                Next::Missed(exit) => self.after(exit, &pod).await,
                Next::Watch(shim) => {
                    let exit = shim.exited().await;
                    self.forget();
                    self.after(exit, &pod).await;
                }
                Next::Start => {
                    let of = self.clone();
                    if let Ok(Err(step)) = tokio::task::spawn_blocking(move || of.start()).await {
                        log::error!(sandbox = self.group.id.as_str(); "its shim: {step}");
                        sleep(AGAIN).await;
                    }
                }
                Next::Wait => self.changed.notified().await,
            }
        }
    }

    /// The shim has ended.
    fn forget(&self) {
        let mut now = self.now();
        (now.shim, now.log) = (None, None);
    }

    fn next(&self) -> Next {
        let mut now = self.now();
        if now.ended {
            return Next::Ended;
        }
        if let Some(exit) = now.missed.take() {
            return Next::Missed(exit);
        }
        match &now.shim {
            Some(shim) => Next::Watch(shim.clone()),
            // A shim that ran the pause has taken the sandbox with it.
            None if now.open && !self.runs_pause => Next::Start,
            None => Next::Wait,
        }
    }

    async fn after(&self, exit: Exit, pod: &Arc<dyn Pod>) {
        if self.now().ended {
            return;
        }
        if self.runs_pause {
            let left = self.group.look_around(pod).await;
            self.looked_around.send_replace(true);
            self.group.bereave_with_pause(left, exit, pod).await;
        } else {
            self.group.bereave(exit, pod).await;
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
        let Group { shims, bundle, id, runtime } = &*self.group;
        let binary = shims.settings.binary(&runtime.name)?;
        Bundle::write_runtime(bundle.dir(), runtime.runc_options()?.as_ref())?;
        command::delete(&shims.settings, &binary, id, bundle.dir()).await?;
        self.pause_is_deleted();
        Ok(())
    }

    /// The same, as soon as the pause is no longer needed to find the containers that its shim has left.
    ///
    /// # Errors
    /// The failed step.
    pub(super) async fn delete_bereaved_pause(&self) -> Result<(), Step> {
        let mut looked = self.looked_around.subscribe();
        // Nobody looks any more where the endpoint is being ended.
        let _ = timeout(AGAIN, looked.wait_for(|looked| *looked)).await;
        self.delete_pause().await
    }

    /// The same, unless the pause is known to be deleted, or never was.
    ///
    /// # Errors
    /// The failed step.
    pub(super) async fn delete_orphan(&self) -> Result<(), Step> {
        if !self.runs_pause || self.now().pause_deleted || self.group.bundle.recorded()?.is_none() {
            return Ok(());
        }
        self.delete_pause().await
    }

    /// The runtime has nothing of the pause any more.
    pub(super) fn pause_is_deleted(&self) {
        self.now().pause_deleted = true;
    }

    /// Ends shim, socket and bundle. Gone already is success.
    ///
    /// # Errors
    /// Every step that failed.
    pub(super) fn end(self: &Arc<Self>) -> Result<(), Vec<Step>> {
        self.now().ended = true;
        self.changed.notify_one();
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let runtime = tokio::runtime::Handle::current();
        let bundle = &self.group.bundle;
        let known = self.shim();
        if known.is_none() && matches!(bundle.recorded(), Ok(Some(Recorded::Launching))) {
            let binary = self.group.shims.settings.binary(&self.group.runtime.name).map_err(|step| vec![step])?;
            let failed = runtime.block_on(self.end_cut_off(&binary));
            if !failed.is_empty() {
                return Err(failed);
            }
        }
        if let Some(shim) = known {
            runtime.block_on(self.end_shim(&shim)).map_err(|step| vec![step])?;
            self.forget();
        }
        // One that was told to end in the middle of making the pause has left what it had made.
        runtime.block_on(self.delete_orphan()).map_err(|step| vec![step])?;
        let mut failed = Vec::new();
        for socket in self.sockets() {
            failed.extend(gone(fs::remove_file(&socket)).step_at("remove socket", socket).err());
        }
        // The first the shim takes off itself when it deletes the pause.
        for mounted in [self.root(), driver::user_namespace(bundle.dir())] {
            failed.extend(unmount(&mounted).err());
        }
        if failed.is_empty() {
            failed.extend(bundle.remove().err());
        }
        if failed.is_empty() { Ok(()) } else { Err(failed) }
    }

    /// Where its shim may have listened: what it said, and what containerd's own shims make of the sandbox id, should nobody have heard it.
    fn sockets(&self) -> Vec<PathBuf> {
        let Group { shims, id, .. } = &*self.group;
        let Settings { containerd_address, containerd_namespace, .. } = &shims.settings;
        let usual = on_demand::Socket::new(containerd_address, containerd_namespace, id).path().to_owned();
        let said = self.bootstrap().or_else(|| self.recorded_bootstrap().ok().flatten());
        let said = said.map(|shim| shim.socket()).filter(|socket| *socket != usual);
        said.into_iter().chain([usual]).collect()
    }

    /// An empty shim ends when it is told to; one that does not is killed, as are its containers.
    async fn end_shim(&self, shim: &Arc<dyn Pause>) -> Result<(), Step> {
        let Some(socket) = self.bootstrap().map(|shim| shim.socket()) else { return self.kill(shim).await };
        let told = tokio::select! {
            _ = shim.exited() => return Ok(()),
            told = task::shut_down(&socket, &self.group.id, WITHIN) => told,
        };
        if told.is_ok() && timeout(WITHIN / 2, shim.exited()).await.is_ok() {
            return Ok(());
        }
        let why = told.err().map_or_else(|| "it was told to end and goes on".to_owned(), |step| step.to_string());
        log::warn!(sandbox = self.group.id.as_str(); "its shim is killed: {why}");
        self.kill(shim).await
    }

    async fn kill(&self, shim: &Arc<dyn Pause>) -> Result<(), Step> {
        shim.kill()?;
        timeout(WITHIN, shim.exited()).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut)).step("kill shim")?;
        self.delete_orphan().await?;
        self.group.clean_up_all().await
    }

    /// Ends what a start that was cut off, or has failed, may have left: the server, and what it holds.
    async fn end_cut_off(&self, binary: &Path) -> Vec<Step> {
        let Group { shims, bundle, id, .. } = &*self.group;
        let mut failed = Vec::new();
        match self.find() {
            Ok(None) => {}
            Ok(Some(shim)) => failed.extend(self.kill(&shim).await.err()),
            Err(step) => failed.push(step),
        }
        // Also a shim that is nothing like containerd's own knows how to clean up after itself, if it works at all.
        if let Err(step) = command::delete(&shims.settings, binary, id, bundle.dir()).await {
            log::warn!(sandbox = id.as_str(); "its shim: {step}");
        }
        for socket in self.sockets() {
            failed.extend(gone(fs::remove_file(&socket)).step_at("remove socket", socket).err());
        }
        self.now().bootstrap = None;
        failed.extend(bundle.record(None).err());
        failed
    }

    fn now(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Settings {
    /// Lets everybody through to `bundle`, as the root of a user namespace must get to the root below it; nobody may look around.
    fn let_pass(&self, bundle: &Path) -> Result<(), Step> {
        for dir in bundle.ancestors().take_while(|dir| dir.starts_with(&self.state_dir)) {
            let mode = fs::metadata(dir).step_at("look at directory", dir)?.permissions().mode();
            let passed = fs::set_permissions(dir, fs::Permissions::from_mode(mode & 0o7777 | 0o011));
            passed.step_at("let the user namespace pass", dir)?;
        }
        Ok(())
    }
}

/// The release of a version such as `v2.3.4`; an unknown one is new.
fn since(version: &str) -> (u32, u32) {
    let mut numbers = version.trim_start_matches('v').split(['.', '-', '+', '~']).map(|part| part.parse().ok());
    numbers.next().flatten().zip(numbers.next().flatten()).unwrap_or((u32::MAX, 0))
}

/// "Gone already" is success.
fn unmount(path: &Path) -> Result<(), Step> {
    match umount2(path, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
        Ok(()) | Err(nix::Error::EINVAL | nix::Error::ENOENT) => Ok(()),
        Err(e) => Err(Step::at("unmount", path, e.into())),
    }
}

/// "There already" is success.
fn made(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases() {
        assert_eq!(since("v2.3.4"), (2, 3));
        assert_eq!(since("2.1.9~ds1"), (2, 1));
        assert_eq!(since("v2.4.0-beta.0"), (2, 4));
        assert!(since("unknown") > BOOTSTRAP_SINCE);
    }
}
