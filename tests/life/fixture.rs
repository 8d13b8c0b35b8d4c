//! A driver whose pauses live and die on order, and a node with it.

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use futures::future::BoxFuture;
use kit::controller::{CONFIG_TYPE, any};
use nix::mount::{MntFlags, umount2};
use pause_sandboxer::cgroup::CgroupRef;
use pause_sandboxer::config::Config;
use pause_sandboxer::controller::Controller;
use pause_sandboxer::error::{StepError, StepErrors};
use pause_sandboxer::pause::{Driver, Plan};
use pause_sandboxer::podsandbox::{CreateRequest, Environment, SandboxInfo};
use pause_sandboxer::process::inheritance::Inheritance;
use pause_sandboxer::process::{Adoption, Exit, Identity, Process};
use pause_sandboxer::protos::cri::{
    LinuxPodSandboxConfig, LinuxSandboxSecurityContext, NamespaceMode, NamespaceOption,
    PodSandboxConfig,
};
use protobuf::Message as _;
use tokio::sync::watch;

#[derive(Debug, Default)]
pub(crate) struct Orders {
    /// The next cleanup lasts until the other end is dropped.
    pub(crate) hold_cleanup: Option<Receiver<()>>,
    pub(crate) cannot_tell: bool,
    /// The next adoptions last until the other ends are dropped.
    pub(crate) hold_adoptions: Vec<Receiver<()>>,
}

/// The attributes that this process inherits.
pub fn own() -> Inheritance {
    Inheritance::read("self").unwrap()
}

/// The event after which a frozen pause can be thawed.
type HoldThaw = Arc<Mutex<Option<Receiver<()>>>>;

/// Makes pauses out of nothing. Lives longer than the controllers that use it, as the kernel does.
#[derive(Debug, Default)]
pub(crate) struct Fake {
    pub(crate) orders: Mutex<Orders>,
    pub(crate) pauses: Mutex<HashMap<u32, watch::Sender<Option<Exit>>>>,
    pub(crate) next: AtomicU32,
    pub(crate) cleanups: AtomicU32,
    pub(crate) panic_in_kill: Arc<AtomicBool>,
    pub(crate) hold_thaw: HoldThaw,
}

#[derive(Debug)]
pub(crate) struct FakePause {
    pub(crate) identity: Identity,
    pub(crate) end: watch::Sender<Option<Exit>>,
    pub(crate) panic_in_kill: Arc<AtomicBool>,
    pub(crate) hold_thaw: HoldThaw,
}

impl Fake {
    /// Makes a pause; its process id.
    fn make(&self) -> u32 {
        let pid = 1000 + self.next.fetch_add(1, Ordering::SeqCst);
        self.pauses.lock().unwrap().insert(pid, watch::channel(None).0);
        pid
    }

    pub(crate) fn pause(&self, pid: u32) -> Option<FakePause> {
        let end = self.pauses.lock().unwrap().get(&pid)?.clone();
        let panic_in_kill = self.panic_in_kill.clone();
        let hold_thaw = self.hold_thaw.clone();
        Some(FakePause { identity: identity(pid), end, panic_in_kill, hold_thaw })
    }

    pub(crate) fn alive(&self) -> usize {
        self.pauses.lock().unwrap().values().filter(|end| end.borrow().is_none()).count()
    }
}

pub(crate) fn identity(pid: u32) -> Identity {
    Identity {
        pid,
        start_time: u64::from(pid) * 7,
        pid_namespace: 4_026_531_836,
        boot_id: "boot".into(),
    }
}

impl Driver for Fake {
    fn start(&self, _plan: &Plan) -> Result<Box<dyn Process>, StepError> {
        Ok(Box::new(self.pause(self.make()).unwrap()))
    }

    fn adopt(&self, _site: &CgroupRef, identity: &Identity) -> Adoption {
        if self.orders.lock().unwrap().cannot_tell {
            return Adoption::Unknown(StepError::new(
                "look",
                std::io::Error::from_raw_os_error(libc::EMFILE),
            ));
        }
        let held = self.orders.lock().unwrap().hold_adoptions.pop();
        if let Some(held) = held {
            let _ = held.recv();
        }
        match self.pause(identity.pid) {
            Some(pause) => Adoption::Alive(Box::new(pause)),
            None => Adoption::Dead(Exit { status: 255, at: SystemTime::now() }),
        }
    }

    fn cleanup(&self, _site: &CgroupRef) -> Result<(), StepErrors> {
        self.cleanups.fetch_add(1, Ordering::SeqCst);
        let held = self.orders.lock().unwrap().hold_cleanup.take();
        if let Some(held) = held {
            let _ = held.recv();
        }
        Ok(())
    }

    fn kill_orphans(&self, _recorded: &dyn Fn(&str) -> bool) -> Result<(), StepErrors> {
        Ok(())
    }
}

impl Process for FakePause {
    fn identity(&self) -> &Identity {
        &self.identity
    }

    fn kill(&self) -> Result<(), StepError> {
        assert!(!self.panic_in_kill.swap(false, Ordering::SeqCst), "on order");
        if !self.may_be_frozen() {
            self.end.send_replace(Some(Exit { status: 137, at: SystemTime::now() }));
        }
        Ok(())
    }

    fn may_be_frozen(&self) -> bool {
        self.hold_thaw.lock().unwrap().is_some()
    }

    fn thaw(&self) -> Result<(), StepError> {
        let held = self.hold_thaw.lock().unwrap().take().unwrap();
        if held.recv_timeout(Duration::from_secs(30)) == Err(RecvTimeoutError::Timeout) {
            return Err(StepError::new("thaw", std::io::ErrorKind::TimedOut.into()));
        }
        self.end.send_replace(Some(Exit { status: 137, at: SystemTime::now() }));
        Ok(())
    }

    fn exited(&self) -> BoxFuture<'_, Exit> {
        let mut ends = self.end.subscribe();
        Box::pin(async move { ends.wait_for(Option::is_some).await.unwrap().unwrap() })
    }
}

pub(crate) struct Node {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) fake: Arc<Fake>,
}

impl Node {
    pub(crate) fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap(), fake: Arc::default() }
    }

    pub(crate) fn config(&self) -> Config {
        let dir = self.dir.path();
        Config {
            state_dir: dir.join("state"),
            containerd_root: dir.join("root"),
            containerd_state: dir.join("run"),
            containerd_address: dir.join("containerd.sock"),
            ..Config::default()
        }
    }

    pub(crate) async fn controller(&self) -> Arc<Controller> {
        let environment = Environment::new(self.config(), self.fake.clone(), own(), None).unwrap();
        Controller::open(Arc::new(environment)).await.unwrap()
    }

    /// Everything that a sandbox may leave, by path.
    pub(crate) fn leftovers(&self) -> Vec<String> {
        let cri = "io.containerd.grpc.v1.cri/sandboxes";
        let dirs = ["state/sandboxes".to_owned(), format!("root/{cri}"), format!("run/{cri}")];
        let mut left: Vec<String> = Vec::new();
        for dir in dirs {
            let Ok(entries) = std::fs::read_dir(self.dir.path().join(dir)) else { continue };
            left.extend(entries.map(|e| e.unwrap().path().display().to_string()));
        }
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let shm = |line: &&str| {
            line.contains(&*self.dir.path().to_string_lossy()) && line.contains("tmpfs shm")
        };
        left.extend(mounts.lines().filter(shm).map(str::to_owned));
        left
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let at = |line: &str| line.split(' ').nth(4).unwrap().to_owned();
        let dir = self.dir.path().to_path_buf();
        for path in mounts
            .lines()
            .map(at)
            .filter(|p| Path::new(p).starts_with(&dir))
            .collect::<Vec<_>>()
            .iter()
            .rev()
        {
            let _ = umount2(path.as_str(), MntFlags::MNT_DETACH);
        }
    }
}

pub(crate) fn request(id: &str) -> CreateRequest {
    let namespaces = NamespaceOption { network: NamespaceMode::NODE.into(), ..Default::default() };
    let security = LinuxSandboxSecurityContext {
        namespace_options: Some(namespaces).into(),
        ..Default::default()
    };
    let linux =
        LinuxPodSandboxConfig { security_context: Some(security).into(), ..Default::default() };
    let config = PodSandboxConfig { linux: Some(linux).into(), ..Default::default() };
    CreateRequest {
        id: id.into(),
        options: Some(any(CONFIG_TYPE, config.write_to_bytes().unwrap())),
        netns_path: String::new(),
        sandbox: Some(SandboxInfo {
            runtime_name: "io.containerd.runc.v2".to_owned(),
            ..Default::default()
        }),
    }
}

pub(crate) async fn soon<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    for _ in 0..400 {
        if let Some(found) = look().await {
            return found;
        }
        tokio::time::sleep(Duration::from_millis(25)).await;
    }
    panic!("never came: {what}");
}
