//! The life of a sandbox on a fake driver: real files, real mounts, a pause that lives and dies on
//! order.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use futures::future::BoxFuture;
use nix::mount::{MntFlags, umount2};
use pause_sandboxer::cgroup::CgroupRef;
use pause_sandboxer::config::Config;
use pause_sandboxer::controller::Controller;
use pause_sandboxer::error::StepError;
use pause_sandboxer::pause::{Driver, Plan};
use pause_sandboxer::podsandbox::{CreateRequest, Environment, Error, Payload, SandboxInfo};
use pause_sandboxer::process::{Adoption, Exit, Identity, Process};
use pause_sandboxer::protos::cri::{
    LinuxPodSandboxConfig, LinuxSandboxSecurityContext, NamespaceMode, NamespaceOption,
    PodSandboxConfig,
};
use protobuf::Message as _;
use tokio::runtime::Builder;
use tokio::sync::watch;

#[derive(Debug, Default)]
struct Orders {
    fail_start: bool,
    start_takes: Duration,
    fail_cleanups: u32,
    panic_in_cleanup: bool,
    /// The next cleanup lasts until the other end is dropped.
    hold_cleanup: Option<std::sync::mpsc::Receiver<()>>,
    cannot_tell: bool,
}

/// Makes pauses out of nothing. Lives longer than the controllers that use it, as the kernel does.
#[derive(Debug, Default)]
struct Fake {
    orders: Mutex<Orders>,
    pauses: Mutex<HashMap<u32, watch::Sender<Option<Exit>>>>,
    /// Whose they are.
    ids: Mutex<HashMap<u32, String>>,
    next: AtomicU32,
    cleanups: AtomicU32,
    panic_in_kill: Arc<AtomicBool>,
}

#[derive(Debug)]
struct FakePause {
    identity: Identity,
    end: watch::Sender<Option<Exit>>,
    panic_in_kill: Arc<AtomicBool>,
}

impl Fake {
    /// Makes a pause; its process id.
    fn make(&self, id: &str) -> u32 {
        let pid = 1000 + self.next.fetch_add(1, Ordering::SeqCst);
        self.pauses.lock().unwrap().insert(pid, watch::channel(None).0);
        self.ids.lock().unwrap().insert(pid, id.to_owned());
        pid
    }

    fn pause(&self, pid: u32) -> Option<FakePause> {
        let end = self.pauses.lock().unwrap().get(&pid)?.clone();
        let panic_in_kill = self.panic_in_kill.clone();
        Some(FakePause { identity: identity(pid), end, panic_in_kill })
    }

    fn end(&self, pid: u32, status: u32) {
        let end = self.pauses.lock().unwrap().remove(&pid).unwrap();
        end.send_replace(Some(Exit { status, at: SystemTime::now() }));
    }

    fn alive(&self) -> usize {
        self.pauses.lock().unwrap().values().filter(|end| end.borrow().is_none()).count()
    }
}

fn identity(pid: u32) -> Identity {
    Identity {
        pid,
        start_time: u64::from(pid) * 7,
        pid_namespace: 4_026_531_836,
        boot_id: "boot".into(),
    }
}

impl Driver for Fake {
    fn name(&self) -> &'static str {
        "fake"
    }

    fn start(&self, plan: &Plan) -> Result<Box<dyn Process>, StepError> {
        let orders = self.orders.lock().unwrap();
        std::thread::sleep(orders.start_takes);
        if orders.fail_start {
            return Err(StepError::at(
                "clone",
                "/on/order",
                std::io::Error::from_raw_os_error(libc::EAGAIN),
            ));
        }
        drop(orders);
        Ok(Box::new(self.pause(self.make(&plan.id)).unwrap()))
    }

    fn adopt(&self, _site: &CgroupRef, identity: &Identity) -> Adoption {
        if self.orders.lock().unwrap().cannot_tell {
            return Adoption::Unknown(StepError::new(
                "look",
                std::io::Error::from_raw_os_error(libc::EMFILE),
            ));
        }
        match self.pause(identity.pid) {
            Some(pause) => Adoption::Alive(Box::new(pause)),
            None => Adoption::Dead(Exit { status: 255, at: SystemTime::now() }),
        }
    }

    fn cleanup(&self, _site: &CgroupRef) -> Result<(), Vec<StepError>> {
        self.cleanups.fetch_add(1, Ordering::SeqCst);
        let held = self.orders.lock().unwrap().hold_cleanup.take();
        if let Some(held) = held {
            let _ = held.recv();
        }
        let mut orders = self.orders.lock().unwrap();
        if orders.panic_in_cleanup {
            orders.panic_in_cleanup = false;
            drop(orders);
            panic!("on order");
        }
        if orders.fail_cleanups > 0 {
            orders.fail_cleanups -= 1;
            return Err(vec![StepError::at(
                "remove cgroup",
                "/a/b",
                std::io::Error::from_raw_os_error(libc::EBUSY),
            )]);
        }
        Ok(())
    }

    fn kill_orphans(&self, recorded: &dyn Fn(&str) -> bool) -> Result<(), Vec<StepError>> {
        let ids = self.ids.lock().unwrap();
        let strays: Vec<u32> =
            ids.iter().filter(|(_, id)| !recorded(id)).map(|(pid, _)| *pid).collect();
        strays.iter().filter_map(|pid| self.pause(*pid)).for_each(|pause| pause.kill().unwrap());
        Ok(())
    }
}

impl Process for FakePause {
    fn identity(&self) -> &Identity {
        &self.identity
    }

    fn kill(&self) -> Result<(), StepError> {
        assert!(!self.panic_in_kill.swap(false, Ordering::SeqCst), "on order");
        self.end.send_replace(Some(Exit { status: 137, at: SystemTime::now() }));
        Ok(())
    }

    fn exited(&self) -> BoxFuture<'_, Exit> {
        let mut ends = self.end.subscribe();
        Box::pin(async move { ends.wait_for(Option::is_some).await.unwrap().unwrap() })
    }
}

struct Node {
    dir: tempfile::TempDir,
    fake: Arc<Fake>,
}

impl Node {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap(), fake: Arc::default() }
    }

    fn config(&self) -> Config {
        let dir = self.dir.path();
        Config {
            state_dir: dir.join("state"),
            containerd_root: dir.join("root"),
            containerd_state: dir.join("run"),
            containerd_address: dir.join("containerd.sock"),
            ..Config::default()
        }
    }

    async fn controller(&self) -> Arc<Controller> {
        let environment = Environment::new(self.config(), self.fake.clone(), None, None).unwrap();
        Controller::open(Arc::new(environment)).await.unwrap()
    }

    /// Everything that a sandbox may leave, by path.
    fn leftovers(&self) -> Vec<String> {
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

fn request(id: &str) -> CreateRequest {
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
        options: Some(Payload {
            type_url: "runtime.v1.PodSandboxConfig".to_owned(),
            value: config.write_to_bytes().unwrap().into(),
        }),
        netns_path: String::new(),
        sandbox: Some(SandboxInfo {
            runtime_name: "io.containerd.runc.v2".to_owned(),
            ..Default::default()
        }),
    }
}

async fn soon<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    for _ in 0..400 {
        if let Some(found) = look().await {
            return found;
        }
        tokio::time::sleep(Duration::from_millis(25)).await;
    }
    panic!("never came: {what}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn run_stop_remove() {
    let node = Node::new();
    let controller = node.controller().await;
    controller.create(request("a")).await.unwrap();
    assert!(matches!(controller.create(request("a")).await, Err(Error::AlreadyExists { .. })));
    let status = controller.status("a", false).await.unwrap();
    assert_eq!((status.pid, status.state), (0, "SANDBOX_NOTREADY"));

    let started = controller.start("a").await.unwrap();
    assert_eq!(started.version, 3);
    assert!(started.spec.is_some());
    assert!(matches!(controller.start("a").await, Err(Error::State { .. })));
    let status = controller.status("a", true).await.unwrap();
    assert_eq!((status.pid, status.state), (started.pid, "SANDBOX_READY"));
    assert_eq!(status.created_at, started.created_at);

    let waiting = tokio::spawn({
        let controller = controller.clone();
        async move { controller.wait("a").await }
    });
    controller.stop("a").await.unwrap();
    assert_eq!(waiting.await.unwrap().unwrap().status, 137);
    assert_eq!(
        controller.wait("a").await.unwrap().status,
        137,
        "Wait after the exit answers as well"
    );
    let status = controller.status("a", false).await.unwrap();
    assert_eq!((status.state, status.exited_at.is_some()), ("SANDBOX_NOTREADY", true));
    controller.stop("a").await.unwrap();
    controller.shutdown("a").await.unwrap();
    controller.shutdown("a").await.unwrap();
    assert!(matches!(controller.stop("a").await, Err(Error::NotFound { .. })));
    assert_eq!(node.leftovers(), Vec::<String>::new());
    controller.create(request("a")).await.unwrap();
    controller.shutdown("a").await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_start_leaves_nothing() {
    let node = Node::new();
    let controller = node.controller().await;
    node.fake.orders.lock().unwrap().fail_start = true;
    controller.create(request("a")).await.unwrap();
    let error = controller.start("a").await.unwrap_err().to_string();
    for part in ["a", "start", "clone", "/on/order", "os error 11"] {
        assert!(error.contains(part), "{error}");
    }
    assert_eq!(node.leftovers(), Vec::<String>::new());
    assert!(matches!(controller.status("a", false).await, Err(Error::NotFound { .. })));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_whose_caller_gives_up_leaves_nothing() {
    let node = Node::new();
    let controller = node.controller().await;
    node.fake.orders.lock().unwrap().start_takes = Duration::from_millis(200);
    controller.create(request("a")).await.unwrap();
    assert!(tokio::time::timeout(Duration::from_millis(50), controller.start("a")).await.is_err());
    soon("the removal", async || controller.status("a", false).await.is_err().then_some(())).await;
    assert_eq!(node.leftovers(), Vec::<String>::new());
    assert_eq!(node.fake.alive(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_exit_is_published_before_a_cleanup_that_fails_and_is_retried() {
    let node = Node::new();
    let controller = node.controller().await;
    controller.create(request("a")).await.unwrap();
    let pid = controller.start("a").await.unwrap().pid;
    {
        let mut orders = node.fake.orders.lock().unwrap();
        orders.fail_cleanups = 1;
        orders.panic_in_cleanup = true;
    }
    node.fake.end(pid, 3);
    assert_eq!(controller.wait("a").await.unwrap().status, 3);
    // One panic, one EBUSY, then success: all by themselves.
    soon("three tries", async || (node.fake.cleanups.load(Ordering::SeqCst) >= 3).then_some(()))
        .await;
    controller.stop("a").await.unwrap();
    controller.shutdown("a").await.unwrap();
    assert_eq!(node.leftovers(), Vec::<String>::new());
}

/// The owner itself kills, so what panics there is the owner.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_panic_of_an_actor_loses_no_sandbox() {
    let node = Node::new();
    let controller = node.controller().await;
    controller.create(request("a")).await.unwrap();
    let pid = controller.start("a").await.unwrap().pid;
    let wait = tokio::spawn(controller.wait("a"));
    node.fake.panic_in_kill.store(true, Ordering::SeqCst);
    let stop = {
        let controller = controller.clone();
        tokio::spawn(async move { controller.stop("a").await })
    };
    soon("the fault", async || (!node.fake.panic_in_kill.load(Ordering::SeqCst)).then_some(()))
        .await;
    // Whatever comes while the owner is at fault, too.
    let shutdown = controller.shutdown("a").await;
    for answer in [stop.await.unwrap(), shutdown] {
        assert!(
            matches!(&answer, Err(Error::Fault { reason, .. }) if reason.contains("on order")),
            "{answer:?}"
        );
    }
    assert_eq!((node.fake.alive(), wait.is_finished()), (1, false));
    let status = controller.status("a", false).await.unwrap();
    assert_eq!((status.state, status.pid), ("SANDBOX_READY", pid));
    controller.stop("a").await.unwrap();
    assert_eq!(wait.await.unwrap().unwrap().status, 137);
    controller.shutdown("a").await.unwrap();
    assert_eq!((node.leftovers(), node.fake.alive()), (Vec::new(), 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stop_names_the_step_of_a_cleanup_that_fails() {
    let node = Node::new();
    let controller = node.controller().await;
    controller.create(request("a")).await.unwrap();
    controller.start("a").await.unwrap();
    node.fake.orders.lock().unwrap().fail_cleanups = 1;
    let error = controller.stop("a").await.unwrap_err().to_string();
    assert!(error.contains("remove cgroup /a/b") && error.contains("os error 16"), "{error}");
    controller.stop("a").await.unwrap();
    controller.shutdown("a").await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_come_back_with_the_same_shared_memory() {
    let node = Node::new();
    let controller = node.controller().await;
    controller.create(request("a")).await.unwrap();
    controller.start("a").await.unwrap();
    let cri = "io.containerd.grpc.v1.cri/sandboxes/a";
    let (root, run) =
        (node.dir.path().join("root").join(cri), node.dir.path().join("run").join(cri));
    std::fs::write(run.join("shm/word"), "kept").unwrap();
    // As containerd does at its start with what it does not know.
    umount2(&run.join("shm"), MntFlags::MNT_DETACH).unwrap();
    std::fs::remove_dir_all(&run).unwrap();
    std::fs::remove_dir_all(&root).unwrap();
    // Not right after Start, when it takes its own files for granted.
    let back = async || {
        controller.status("a", false).await.unwrap();
        std::fs::read_to_string(run.join("shm/word")).ok()
    };
    assert_eq!(soon("the files", back).await, "kept");
    let of_node = std::fs::read("/proc/sys/kernel/hostname").unwrap();
    assert_eq!(std::fs::read(root.join("hostname")).unwrap(), of_node);
    assert_eq!(std::fs::read(root.join("hosts")).unwrap(), std::fs::read("/etc/hosts").unwrap());
    assert!(root.join("resolv.conf").exists());
    controller.shutdown("a").await.unwrap();
    assert_eq!(node.leftovers(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_recovers_running_exited_and_unknown_sandboxes() {
    let node = Node::new();
    let controller = node.controller().await;
    for id in ["alive", "dead", "stopped", "created"] {
        controller.create(request(id)).await.unwrap();
    }
    let alive = controller.start("alive").await.unwrap();
    let dead = controller.start("dead").await.unwrap();
    controller.start("stopped").await.unwrap();
    controller.stop("stopped").await.unwrap();
    controller.drain().await;
    assert!(matches!(controller.status("alive", false).await, Err(Error::Stopping { .. })));
    drop(controller);
    // It dies unwatched.
    node.fake.pauses.lock().unwrap().remove(&dead.pid);

    // On a runtime of its own: it ends as a killed daemon does, and its owners do not race with
    // their successors.
    let daemon = tokio::runtime::Runtime::new().unwrap();
    let environment =
        Arc::new(Environment::new(node.config(), node.fake.clone(), None, None).unwrap());
    let controller = daemon.spawn(Controller::open(environment)).await.unwrap().unwrap();
    let status = controller.status("alive", false).await.unwrap();
    assert_eq!(
        (status.pid, status.state, status.created_at),
        (alive.pid, "SANDBOX_READY", alive.created_at)
    );
    assert_eq!(controller.wait("dead").await.unwrap().status, 255);
    assert_eq!(controller.wait("stopped").await.unwrap().status, 137, "the exit is on record");
    controller.start("created").await.unwrap();
    node.fake.end(alive.pid, 9);
    assert_eq!(controller.wait("alive").await.unwrap().status, 9, "its exit is watched again");
    drop(controller);
    daemon.shutdown_background();

    node.fake.orders.lock().unwrap().cannot_tell = true;
    let controller = node.controller().await;
    assert_eq!(controller.status("created", false).await.unwrap().state, "SANDBOX_UNKNOWN");
    assert!(controller.stop("created").await.unwrap_err().to_string().contains("os error 24"));
    node.fake.orders.lock().unwrap().cannot_tell = false;
    controller.stop("created").await.unwrap();
    assert_eq!(controller.wait("created").await.unwrap().status, 137);
    for id in ["alive", "dead", "stopped", "created"] {
        controller.shutdown(id).await.unwrap();
    }
    assert_eq!(node.leftovers(), Vec::<String>::new());
}

/// As on a node that has no process ids left: the threads of the first runtime are to have more
/// stack than there is memory.
#[test]
fn a_recovery_without_threads_quarantines_no_record() {
    let without_threads =
        Builder::new_current_thread().thread_stack_size(1 << 60).enable_all().build().unwrap();
    let with_threads = Builder::new_current_thread().enable_all().build().unwrap();
    let node = Node::new();
    with_threads
        .block_on(async { node.controller().await.create(request("created")).await.unwrap() });
    let environment =
        || Arc::new(Environment::new(node.config(), node.fake.clone(), None, None).unwrap());
    let failed = without_threads.block_on(Controller::open(environment())).unwrap_err();
    assert_eq!(
        failed.to_string(),
        "start a thread: Resource temporarily unavailable (os error 11)"
    );
    with_threads.block_on(async {
        let controller = node.controller().await;
        controller.start("created").await.unwrap();
        controller.shutdown("created").await.unwrap();
    });
    assert_eq!(node.leftovers(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_that_cannot_be_read_is_kept_and_its_id_stays_taken() {
    let node = Node::new();
    let controller = node.controller().await;
    controller.create(request("newer")).await.unwrap();
    drop(controller);
    let record = node.dir.path().join("state/sandboxes/newer/record.json");
    let text =
        std::fs::read_to_string(&record).unwrap().replacen("\"version\":1", "\"version\":99", 1);
    std::fs::write(&record, &text).unwrap();
    std::fs::create_dir(node.dir.path().join("state/sandboxes/broken")).unwrap();
    std::fs::write(node.dir.path().join("state/sandboxes/broken/record.json"), "{").unwrap();
    std::fs::create_dir(node.dir.path().join("state/sandboxes/empty")).unwrap();

    let controller = node.controller().await;
    assert!(matches!(controller.create(request("newer")).await, Err(Error::AlreadyExists { .. })));
    let error = controller.status("newer", false).await.unwrap_err().to_string();
    assert!(error.contains("version 99"), "{error}");
    assert!(
        matches!(controller.wait("newer").await, Err(Error::Stopping { .. })),
        "Wait must be asked again later"
    );
    assert!(controller.status("broken", false).await.is_err());
    assert!(matches!(controller.status("empty", false).await, Err(Error::NotFound { .. })));
    assert_eq!(std::fs::read_to_string(&record).unwrap(), text);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn recovery_undoes_an_interrupted_start() {
    let node = Node::new();
    let controller = node.controller().await;
    controller.create(request("cut")).await.unwrap();
    drop(controller);
    // The first thing that a start makes.
    std::fs::create_dir(node.dir.path().join("state/sandboxes/cut/shm")).unwrap();
    let controller = node.controller().await;
    assert!(matches!(controller.status("cut", false).await, Err(Error::NotFound { .. })));
    assert_eq!(node.leftovers(), Vec::<String>::new());
}

/// Recovery's removal of a cut-off start hangs beyond the record's time: the id stays taken until
/// it has ended, and nothing is done for the sandbox beside it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sandbox_waits_for_what_recovery_left_under_way() {
    let node = Node::new();
    let controller = node.controller().await;
    controller.create(request("cut")).await.unwrap();
    drop(controller);
    std::fs::create_dir(node.dir.path().join("state/sandboxes/cut/shm")).unwrap();
    let (release, held) = std::sync::mpsc::channel();
    node.fake.orders.lock().unwrap().hold_cleanup = Some(held);
    let controller = node.controller().await;
    let mut removal = Box::pin(controller.shutdown("cut"));
    assert!(
        tokio::time::timeout(Duration::from_secs(1), &mut removal).await.is_err(),
        "removed beside the first removal"
    );
    assert_eq!(node.fake.cleanups.load(Ordering::SeqCst), 1);
    assert!(matches!(controller.create(request("cut")).await, Err(Error::AlreadyExists { .. })));
    drop(release);
    removal.await.unwrap();
    controller.create(request("cut")).await.unwrap();
    controller.start("cut").await.unwrap();
    controller.shutdown("cut").await.unwrap();
    assert_eq!((node.leftovers(), node.fake.alive()), (Vec::new(), 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_an_older_daemon_made_ahead_is_removed_and_the_sandbox_can_be_started() {
    let node = Node::new();
    let killed = node.controller().await;
    killed.create(request("a")).await.unwrap();
    let record = node.dir.path().join("state/sandboxes/a");
    // As it left them: its sign, the held shared memory, a file and a pause.
    for dir in ["ahead", "shm"] {
        std::fs::create_dir(record.join(dir)).unwrap();
    }
    let files = node.dir.path().join("root/io.containerd.grpc.v1.cri/sandboxes/a");
    std::fs::create_dir_all(&files).unwrap();
    std::fs::write(files.join("hostname"), "old").unwrap();
    let made = node.fake.make("a");
    let controller = node.controller().await;
    assert!(!record.join("ahead").exists() && !record.join("shm").exists() && !files.exists());
    assert!(node.fake.cleanups.load(Ordering::SeqCst) > 0, "its cgroup");
    assert_eq!(node.fake.alive(), 0, "its pause");
    assert_ne!(controller.start("a").await.unwrap().pid, made);
    controller.shutdown("a").await.unwrap();
    assert_eq!((node.leftovers(), node.fake.alive()), (Vec::new(), 0));
    drop(killed);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sandbox_that_is_never_started_is_removed() {
    let node = Node::new();
    let mut config = node.config();
    config.abandoned_after = Duration::from_millis(300);
    let environment = Environment::new(config, node.fake.clone(), None, None).unwrap();
    let controller = Controller::open(Arc::new(environment)).await.unwrap();
    controller.create(request("a")).await.unwrap();
    assert!(controller.status("a", false).await.is_ok());
    soon("the removal", async || controller.status("a", false).await.is_err().then_some(())).await;
    assert_eq!(node.leftovers(), Vec::<String>::new());
}

/// containerd is asked in the namespace of the settings alone, and would say that it does not know
/// the sandbox.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sandbox_of_another_namespace_is_not_garbage_collected() {
    let node = Node::new();
    let controller = node.controller().await;
    controller.create(request("a")).await.unwrap();
    controller.start("a").await.unwrap();
    for (namespace, unasked) in [("other", false), ("k8s.io", true)] {
        let config = Config { containerd_namespace: namespace.to_owned(), ..node.config() };
        let environment = Environment::new(config, node.fake.clone(), None, None).unwrap();
        let controller = Controller::open(Arc::new(environment)).await.unwrap();
        let live = controller.live();
        assert_eq!(
            live.iter().map(|of| (of.id(), of.is_unasked())).collect::<Vec<_>>(),
            [("a", unasked)],
            "{namespace}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_requests_name_the_field_and_leave_nothing() {
    let node = Node::new();
    let controller = node.controller().await;
    let with = |change: fn(&mut CreateRequest)| {
        let mut request = request("a");
        change(&mut request);
        request
    };
    let cases: [(&str, CreateRequest); 6] = [
        ("sandbox_id", with(|r| r.id = "../a".into())),
        ("sandbox_id", with(|r| r.id = "x".repeat(4096).into())),
        ("options", with(|r| r.options = None)),
        (
            "options",
            with(|r| r.options.as_mut().unwrap().type_url = "google.protobuf.Empty".to_owned()),
        ),
        ("options", with(|r| r.options.as_mut().unwrap().value = vec![0xff, 0xff].into())),
        (
            "netns_path",
            with(|r| {
                r.options.as_mut().unwrap().value = Default::default();
                r.netns_path = "/etc/hosts".to_owned();
            }),
        ),
    ];
    for (field, request) in cases {
        let error = controller.create(request).await.unwrap_err();
        assert!(matches!(error, Error::Invalid { .. }), "{error}");
        assert!(error.to_string().contains(field), "{error}");
        assert!(error.to_string().len() < 300, "{error}");
    }
    assert_eq!(node.leftovers(), Vec::<String>::new());
}
