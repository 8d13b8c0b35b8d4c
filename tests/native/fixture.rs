//! A pause process of a test, and what it is made of.

use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{LazyLock, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};
use std::{fs, thread};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pause_sandboxer::pause::Driver as _;
use pause_sandboxer::pause::native::Native;
use pause_sandboxer::pause::{Namespace, Plan};
use pause_sandboxer::process::{Exit, Process};
use tokio::runtime::{Builder, Runtime};

pub(crate) static DRIVER: LazyLock<Native> = LazyLock::new(|| Native::new().unwrap());

/// A test that counts descriptors or children runs alone.
pub(crate) static COUNTED: RwLock<()> = RwLock::new(());

pub(crate) fn among_others() -> RwLockReadGuard<'static, ()> {
    COUNTED.read().unwrap_or_else(|e| e.into_inner())
}

pub(crate) fn alone() -> RwLockWriteGuard<'static, ()> {
    let guard = COUNTED.write().unwrap_or_else(|e| e.into_inner());
    // Descriptors that are opened once are open before the count.
    drop(Running::start(plan()));
    guard
}

/// A plan with host network and all else private.
pub(crate) fn plan() -> Plan {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    Plan {
        uts: Namespace::Node,
        oom_score_adj: own_oom_score(),
        ..Plan::new(format!("test-{}-{number}", std::process::id()).try_into().unwrap())
    }
}

/// A value that the test may set without CAP_SYS_RESOURCE.
pub(crate) fn own_oom_score() -> i32 {
    fs::read_to_string("/proc/self/oom_score_adj").unwrap().trim().parse().unwrap()
}

/// A pause that is ended and cleaned up after with the test, also when it fails.
pub(crate) struct Running {
    pub(crate) plan: Plan,
    pub(crate) pause: Box<dyn Process>,
}

impl Running {
    pub(crate) fn start(plan: Plan) -> Self {
        let pause = DRIVER.start(&plan).unwrap_or_else(|e| panic!("{e}"));
        Self { plan, pause }
    }

    /// Waits until the kernel has finished its execve(2), which resumes the parent a moment
    /// before, with the arguments of the parent still.
    pub(crate) fn settled(self) -> Self {
        eventually("the program is executed", || {
            fs::read(self.proc("cmdline")).unwrap().starts_with(b"/pause\0")
        });
        self
    }

    pub(crate) fn pid(&self) -> u32 {
        self.pause.identity().pid
    }

    pub(crate) fn proc(&self, file: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/{file}", self.pid()))
    }

    pub(crate) fn status(&self, key: &str) -> String {
        let status = fs::read_to_string(self.proc("status")).unwrap();
        let line =
            status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':')).unwrap();
        line.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    pub(crate) fn namespace(&self, kind: &str) -> PathBuf {
        fs::read_link(self.proc("ns").join(kind)).unwrap()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid().cast_signed()), signal).unwrap();
    }

    pub(crate) fn end(&self) -> Exit {
        self.pause.kill().unwrap();
        exit_of(&*self.pause)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.end();
        if let Err(e) = DRIVER.cleanup(&self.plan.cgroup_ref())
            && !thread::panicking()
        {
            panic!("{e:?}");
        }
    }
}

/// One for all tests, as a daemon has: the driver's watch is attended on the runtime that first
/// asks for it.
pub(crate) static RUNTIME: LazyLock<Runtime> =
    LazyLock::new(|| Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap());

pub(crate) fn exit_of(pause: &dyn Process) -> Exit {
    RUNTIME.block_on(async {
        tokio::time::timeout(Duration::from_secs(10), pause.exited()).await.unwrap()
    })
}

pub(crate) fn own_namespace(kind: &str) -> PathBuf {
    fs::read_link(format!("/proc/self/ns/{kind}")).unwrap()
}

/// Waits at most 10 s until `condition` is true.
pub(crate) fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(10);
    while !condition() {
        assert!(Instant::now() < end, "not within 10 s: {what}");
        thread::sleep(Duration::from_millis(2));
    }
}

/// A bind-mounted network namespace as CRI makes it; with `userns`, owned by a new user namespace.
pub(crate) struct Netns {
    pub(crate) path: PathBuf,
    pub(crate) _directory: tempfile::TempDir,
}

impl Netns {
    pub(crate) fn new() -> Self {
        Self::of(|| {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            PathBuf::from(format!(
                "/proc/{}/task/{}/ns/net",
                std::process::id(),
                nix::unistd::gettid()
            ))
        })
    }

    pub(crate) fn of(make: impl FnOnce() -> PathBuf + Send) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("netns");
        fs::write(&path, "").unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                let namespace = make();
                mount(Some(&namespace), &path, None::<&str>, MsFlags::MS_BIND, None::<&str>)
                    .unwrap();
            });
        });
        Self { path, _directory: directory }
    }

    pub(crate) fn link(&self) -> String {
        format!("net:[{}]", fs::metadata(&self.path).unwrap().ino())
    }
}

impl Drop for Netns {
    fn drop(&mut self) {
        let _ = umount2(&self.path, MntFlags::MNT_DETACH);
    }
}

/// Parent cgroup of a test, removed after it.
pub(crate) struct Parent(pub(crate) String);

impl Parent {
    pub(crate) fn new() -> Self {
        Self(format!("/pause-sandboxer-test/{}", plan().id))
    }

    /// The directory in each hierarchy that the driver uses.
    pub(crate) fn everywhere(&self, below: &str) -> Vec<PathBuf> {
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let mounted = |kind: &str| -> Vec<PathBuf> {
            let lines = mounts.lines().filter(|line| line.contains(&format!(" - {kind} ")));
            let mounts = lines.map(|line| line.split(' ').nth(4).unwrap());
            mounts.map(|mount| PathBuf::from(format!("{mount}{}/{below}", self.0))).collect()
        };
        let v1 = mounted("cgroup");
        if v1.is_empty() { mounted("cgroup2") } else { v1 }
    }
}

impl Drop for Parent {
    fn drop(&mut self) {
        for path in self.everywhere("") {
            let _ = fs::remove_dir(&path);
            let _ = fs::remove_dir(path.parent().unwrap());
        }
    }
}
