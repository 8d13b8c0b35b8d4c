//! The native driver on the real kernel. Needs root.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{LazyLock, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::thread;
use std::time::{Duration, Instant};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pause_sandboxer::error::StepError;
use pause_sandboxer::pause::native::{Native, is_network_namespace};
use pause_sandboxer::pause::{Driver, IdMapping, Namespace, Plan, UserNamespace};
use pause_sandboxer::process::{Adoption, Exit, Process};
use tokio::runtime::{Builder, Runtime};

static DRIVER: LazyLock<Native> = LazyLock::new(|| Native::new().unwrap());

/// Whoever counts descriptors or children is alone.
static COUNTED: RwLock<()> = RwLock::new(());

fn among_others() -> RwLockReadGuard<'static, ()> {
    COUNTED.read().unwrap_or_else(|e| e.into_inner())
}

fn alone() -> RwLockWriteGuard<'static, ()> {
    let guard = COUNTED.write().unwrap_or_else(|e| e.into_inner());
    // What is opened once is open before anything is counted.
    drop(Running::start(plan()));
    guard
}

/// A plan with host network and all else private.
fn plan() -> Plan {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    Plan {
        id: format!("test-{}-{number}", std::process::id()).into(),
        netns: None,
        pid: Namespace::Private,
        ipc: Namespace::Private,
        uts: Namespace::Node,
        hostname: String::new(),
        userns: None,
        sysctls: Vec::new(),
        cgroup_parent: String::new(),
        oom_score_adj: own_oom_score(),
        selinux_label: String::new(),
    }
}

/// One that the test may ask for without CAP_SYS_RESOURCE.
fn own_oom_score() -> i32 {
    fs::read_to_string("/proc/self/oom_score_adj").unwrap().trim().parse().unwrap()
}

/// A pause that is ended and cleaned up after with the test, also when it fails.
struct Running {
    plan: Plan,
    pause: Box<dyn Process>,
}

impl Running {
    fn start(plan: Plan) -> Self {
        let pause = DRIVER.start(&plan).unwrap_or_else(|e| panic!("{e}"));
        Self { plan, pause }
    }

    /// Waits until the kernel has finished its execve(2), which resumes the parent a moment
    /// before.
    fn settled(self) -> Self {
        eventually("the program is executed", || {
            !fs::read(self.proc("cmdline")).unwrap().is_empty()
        });
        self
    }

    fn pid(&self) -> u32 {
        self.pause.identity().pid
    }

    fn proc(&self, file: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/{file}", self.pid()))
    }

    fn status(&self, key: &str) -> String {
        let status = fs::read_to_string(self.proc("status")).unwrap();
        let line =
            status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':')).unwrap();
        line.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    fn namespace(&self, kind: &str) -> PathBuf {
        fs::read_link(self.proc("ns").join(kind)).unwrap()
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid().cast_signed()), signal).unwrap();
    }

    fn end(&self) -> Exit {
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
static RUNTIME: LazyLock<Runtime> =
    LazyLock::new(|| Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap());

fn exit_of(pause: &dyn Process) -> Exit {
    RUNTIME.block_on(async {
        tokio::time::timeout(Duration::from_secs(10), pause.exited()).await.unwrap()
    })
}

fn own_namespace(kind: &str) -> PathBuf {
    fs::read_link(format!("/proc/self/ns/{kind}")).unwrap()
}

/// What `condition` asks for comes about within 10 s.
fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(10);
    while !condition() {
        assert!(Instant::now() < end, "not within 10 s: {what}");
        thread::sleep(Duration::from_millis(2));
    }
}

/// A bind-mounted network namespace as CRI makes it; with `userns`, owned by a new user namespace.
struct Netns {
    path: PathBuf,
    _directory: tempfile::TempDir,
}

impl Netns {
    fn new() -> Self {
        Self::of(|| {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            PathBuf::from(format!(
                "/proc/{}/task/{}/ns/net",
                std::process::id(),
                nix::unistd::gettid()
            ))
        })
    }

    fn of(make: impl FnOnce() -> PathBuf + Send) -> Self {
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

    fn link(&self) -> String {
        format!("net:[{}]", fs::metadata(&self.path).unwrap().ino())
    }
}

impl Drop for Netns {
    fn drop(&mut self) {
        let _ = umount2(&self.path, MntFlags::MNT_DETACH);
    }
}

/// Parent cgroup of a test, removed after it.
struct Parent(String);

impl Parent {
    fn new() -> Self {
        Self(format!("/pause-sandboxer-test/{}", plan().id))
    }

    /// The directory in each hierarchy that the driver uses.
    fn everywhere(&self, below: &str) -> Vec<PathBuf> {
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let of = |kind: &str| -> Vec<PathBuf> {
            let lines = mounts.lines().filter(|line| line.contains(&format!(" - {kind} ")));
            let mounts = lines.map(|line| line.split(' ').nth(4).unwrap());
            mounts.map(|mount| PathBuf::from(format!("{mount}{}/{below}", self.0))).collect()
        };
        let v1 = of("cgroup");
        if v1.is_empty() { of("cgroup2") } else { v1 }
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

#[test]
fn the_pause_is_confined() {
    let _among = among_others();
    let running = Running::start(plan()).settled();
    for key in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(running.status(key), "0000000000000000", "{key}");
    }
    let ids = ["65535"; 4].join(" ");
    assert_eq!(running.status("Uid"), ids);
    assert_eq!(running.status("Gid"), ids);
    assert_eq!(running.status("Groups"), "");
    assert_eq!(running.status("NoNewPrivs"), "1");
    assert_eq!(running.status("Seccomp"), "2");
    // The kernel gives the files of an undumpable process to root.
    assert_eq!(fs::metadata(running.proc("status")).unwrap().uid(), 0);
    assert_eq!(fs::read_dir(running.proc("fd")).unwrap().count(), 0);
    assert_eq!(fs::read(running.proc("environ")).unwrap(), b"");
    let arguments = format!("/pause\0{}\0", running.plan.id);
    assert_eq!(fs::read_to_string(running.proc("cmdline")).unwrap(), arguments);
    assert_eq!(running.status("NSsid"), running.status("NSpid"));
    eventually("the program names itself", || {
        fs::read_to_string(running.proc("comm")).unwrap() == "pause\n"
    });
}

#[test]
fn its_root_is_empty_and_read_only() {
    let _among = among_others();
    let (one, other) = (Running::start(plan()), Running::start(plan()));
    for running in [&one, &other] {
        assert_eq!(fs::read_dir(running.proc("root")).unwrap().count(), 0);
        let e = fs::write(running.proc("root").join("x"), "").unwrap_err();
        assert_eq!(e.raw_os_error(), Some(libc::EROFS));
        let mounts = fs::read_to_string(running.proc("mountinfo")).unwrap();
        assert_eq!(mounts.lines().count(), 1, "{mounts}");
        assert!(mounts.contains(" / / ro,nosuid,nodev,noexec"), "{mounts}");
        assert_eq!(fs::read_link(running.proc("cwd")).unwrap(), Path::new("/"));
    }
    assert_eq!(one.namespace("mnt"), other.namespace("mnt"));
    assert_ne!(one.namespace("mnt"), own_namespace("mnt"));
}

#[test]
fn namespaces_are_as_planned() {
    let _among = among_others();
    let netns = Netns::new();
    let private =
        Running::start(Plan { netns: Some(netns.path.clone()), uts: Namespace::Private, ..plan() });
    for kind in ["pid", "ipc", "uts", "net"] {
        assert_ne!(private.namespace(kind), own_namespace(kind), "{kind}");
    }
    assert_eq!(private.namespace("net"), Path::new(&netns.link()));
    assert_eq!(private.status("NSpid").split(' ').next_back(), Some("1"));
    let node = Running::start(Plan { pid: Namespace::Node, ipc: Namespace::Node, ..plan() });
    for kind in ["pid", "ipc", "uts", "net", "user", "cgroup"] {
        assert_eq!(node.namespace(kind), own_namespace(kind), "{kind}");
    }
}

#[test]
fn hostname_and_sysctls_are_set_in_the_pod_alone() {
    let _among = among_others();
    let netns = Netns::new();
    let sysctl = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    let node = [
        "kernel/hostname",
        "kernel/shmmni",
        "net/ipv4/ip_unprivileged_port_start",
        "fs/mqueue/msg_max",
    ];
    let values = || node.map(|name| fs::read_to_string(Path::new("/proc/sys").join(name)).unwrap());
    let before = values();
    let running = Running::start(Plan {
        netns: Some(netns.path.clone()),
        uts: Namespace::Private,
        hostname: "h".repeat(64),
        sysctls: vec![
            sysctl("kernel.shmmni", "1234"),
            sysctl("net.ipv4.ip_unprivileged_port_start", "77"),
            sysctl("fs.mqueue.msg_max", "55"),
        ],
        ..plan()
    });
    assert_eq!(values(), before);
    let inside = Command::new("nsenter")
        .args(["-t", &running.pid().to_string(), "-u", "-i", "-n", "cat"])
        .args(node.map(|name| format!("/proc/sys/{name}")))
        .output()
        .unwrap();
    assert_eq!(
        String::from_utf8_lossy(&inside.stdout),
        format!("{}\n1234\n77\n55\n", "h".repeat(64))
    );
}

#[test]
fn the_oom_score_applies_to_the_pause_only() {
    let _among = among_others();
    let score = own_oom_score();
    let running = Running::start(Plan { oom_score_adj: score + 7, ..plan() });
    assert_eq!(
        fs::read_to_string(running.proc("oom_score_adj")).unwrap(),
        format!("{}\n", score + 7)
    );
    assert_eq!(own_oom_score(), score);
}

#[test]
fn it_is_in_its_cgroup_everywhere_and_leaves_it() {
    let _among = among_others();
    let parent = Parent::new();
    let running = Running::start(Plan { cgroup_parent: parent.0.clone(), ..plan() });
    let leaves = parent.everywhere(&running.plan.id);
    assert!(!leaves.is_empty());
    for leaf in &leaves {
        let members = fs::read_to_string(leaf.join("cgroup.procs")).unwrap();
        assert_eq!(members, format!("{}\n", running.pid()), "{leaf:?}");
    }
    running.end();
    DRIVER.cleanup(&running.plan.cgroup_ref()).unwrap();
    for leaf in leaves {
        assert!(!leaf.exists() && leaf.parent().unwrap().exists(), "{leaf:?}");
    }
    DRIVER.cleanup(&running.plan.cgroup_ref()).unwrap();
}

#[test]
fn cleanup_removes_what_an_interrupted_start_left() {
    let _among = among_others();
    let parent = Parent::new();
    let running = Running::start(Plan { cgroup_parent: parent.0.clone(), ..plan() });
    DRIVER.cleanup(&running.plan.cgroup_ref()).unwrap();
    assert_eq!(exit_of(&*running.pause).status, 137);
    assert!(parent.everywhere(&running.plan.id).iter().all(|leaf| !leaf.exists()));
}

#[test]
fn each_signal_ends_the_pause_or_is_ignored() {
    let _among = among_others();
    for pid in [Namespace::Private, Namespace::Node] {
        for (signal, status) in [(Signal::SIGTERM, 0), (Signal::SIGINT, 0), (Signal::SIGKILL, 137)]
        {
            let running = Running::start(Plan { pid, ..plan() });
            for ignored in
                [Signal::SIGHUP, Signal::SIGUSR1, Signal::SIGQUIT, Signal::SIGALRM, Signal::SIGPIPE]
            {
                running.signal(ignored);
            }
            running.signal(signal);
            assert_eq!(exit_of(&*running.pause).status, status, "{signal} {pid:?}");
            assert_eq!(exit_of(&*running.pause), running.end(), "the same any number of times");
        }
    }
}

#[test]
fn all_waiters_receive_the_exit() {
    let _among = among_others();
    let running = Running::start(plan());
    RUNTIME.block_on(async {
        // Dropped in the middle, as when a caller gives up.
        tokio::time::timeout(Duration::from_millis(20), running.pause.exited()).await.unwrap_err();
        let waiting = futures::future::join_all((0..10).map(|_| running.pause.exited()));
        let (exits, ()) =
            futures::future::join(waiting, async { running.signal(Signal::SIGTERM) }).await;
        assert_eq!(exits, vec![exits[0]; 10]);
        assert_eq!(exits[0].status, 0);
    });
}

#[test]
fn it_reaps_the_orphans_of_its_pid_namespace() {
    let _among = among_others();
    let running = Running::start(plan());
    let namespace = running.namespace("pid");
    let members = || -> BTreeSet<u32> {
        let pids = fs::read_dir("/proc")
            .unwrap()
            .filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok());
        pids.filter(|pid| {
            fs::read_link(format!("/proc/{pid}/ns/pid")).is_ok_and(|link| link == namespace)
        })
        .collect()
    };
    // The shell leaves a child behind that ends after it.
    let left = "sleep 100 >&- 2>&- <&- & echo $!";
    let shell = Command::new("nsenter")
        .args(["-t", &running.pid().to_string(), "-p", "sh", "-c", left])
        .output()
        .unwrap();
    assert!(shell.status.success(), "{shell:?}");
    let orphan: Vec<u32> = members().into_iter().filter(|pid| *pid != running.pid()).collect();
    assert_eq!(orphan.len(), 1);
    kill(Pid::from_raw(orphan[0].cast_signed()), Signal::SIGKILL).unwrap();
    eventually("the orphan is reaped", || !Path::new(&format!("/proc/{}", orphan[0])).exists());
    assert_eq!(members(), BTreeSet::from([running.pid()]));
}

/// Descriptors of this process.
fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Children of this process, zombies too.
fn children() -> usize {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let lists = tasks
        .map(|task| fs::read_to_string(task.unwrap().path().join("children")).unwrap_or_default());
    lists.map(|list| list.split_whitespace().count()).sum()
}

#[test]
fn a_failed_start_names_the_step_and_leaves_nothing() {
    let _alone = alone();
    LazyLock::force(&DRIVER);
    let directory = tempfile::tempdir().unwrap();
    let plain = directory.path().join("plain");
    fs::write(&plain, "").unwrap();
    let fifo = directory.path().join("fifo");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let parent = Parent::new();
    let good = Plan { cgroup_parent: parent.0.clone(), uts: Namespace::Private, ..plan() };
    let sysctl = |name: &str, value: &str| vec![(name.to_owned(), value.to_owned())];
    let mappings = |length| {
        let mapping = IdMapping { container_id: 0, host_id: 100_000, length };
        Some(UserNamespace { uid: mapping, gid: mapping })
    };
    let (descriptors_before, children_before) = (descriptors(), children());
    let cases: Vec<(Plan, String, i32)> = vec![
        (
            Plan { netns: Some(plain.clone()), ..good.clone() },
            format!("join network namespace {}", plain.display()),
            libc::EINVAL,
        ),
        (
            Plan { netns: Some(fifo.clone()), ..good.clone() },
            format!("join network namespace {}", fifo.display()),
            libc::EINVAL,
        ),
        (
            Plan { netns: Some("/nowhere/netns".into()), ..good.clone() },
            "open network namespace /nowhere/netns".to_owned(),
            libc::ENOENT,
        ),
        (
            Plan { hostname: "h".repeat(65), ..good.clone() },
            format!("set hostname {}", "h".repeat(65)),
            libc::EINVAL,
        ),
        (
            Plan { sysctls: sysctl("kernel.no_such", "1"), ..good.clone() },
            "write sysctl /proc/sys/kernel/no_such".to_owned(),
            libc::ENOENT,
        ),
        (
            Plan { sysctls: sysctl("kernel.shmmni", "words"), ..good.clone() },
            "write sysctl /proc/sys/kernel/shmmni".to_owned(),
            libc::EINVAL,
        ),
        (
            Plan { oom_score_adj: 1001, ..good.clone() },
            "write oom score /proc/self/oom_score_adj".to_owned(),
            libc::EINVAL,
        ),
        (Plan { userns: mappings(0), ..good.clone() }, "write /proc/".to_owned(), libc::EINVAL),
        (
            Plan { userns: mappings(65536), hostname: "h".repeat(65), ..good.clone() },
            format!("set hostname {}", "h".repeat(65)),
            libc::EINVAL,
        ),
    ];
    for (plan, message, errno) in cases {
        let e: StepError = DRIVER.start(&plan).unwrap_err();
        assert!(e.to_string().starts_with(&message), "{e}, not {message}");
        assert_eq!(e.io().raw_os_error(), Some(errno), "{e}");
        assert_eq!(children(), children_before, "{e}");
        assert_eq!(descriptors(), descriptors_before, "{e}");
        assert!(parent.everywhere("").iter().all(|path| !path.exists()), "{e}: cgroup left");
    }
}

#[test]
fn cgroup_that_cannot_be_made() {
    let _among = among_others();
    for (parent, errno) in
        [("/cgroup.procs", Some(libc::ENOTDIR)), ("/a/../b", None), ("kubepods-.slice", None)]
    {
        let e = DRIVER.start(&Plan { cgroup_parent: parent.to_owned(), ..plan() }).unwrap_err();
        assert!(e.path().unwrap().to_string_lossy().contains(parent), "{e}");
        assert_eq!(e.io().raw_os_error(), errno, "{e}");
    }
}

#[test]
fn many_starts_leak_nothing() {
    let _alone = alone();
    LazyLock::force(&DRIVER);
    let netns = Netns::new();
    let parent = Parent::new();
    let (descriptors_before, children_before) = (descriptors(), children());
    for _ in 0..200 {
        let plan =
            Plan { netns: Some(netns.path.clone()), cgroup_parent: parent.0.clone(), ..plan() };
        Running::start(plan);
    }
    assert_eq!(children(), children_before);
    assert_eq!(descriptors(), descriptors_before);
    assert!(
        parent
            .everywhere("")
            .iter()
            .all(|path| fs::read_dir(path).unwrap().all(|e| !e.unwrap().path().is_dir()))
    );
}

#[test]
fn a_dropped_pause_leaves_no_zombie() {
    let _alone = alone();
    LazyLock::force(&DRIVER);
    let (before, descriptors_before) = (children(), descriptors());
    for _ in 0..20 {
        let pause = DRIVER.start(&plan()).unwrap();
        pause.kill().unwrap();
    }
    eventually("the killed are reaped", || children() == before);
    let pause = DRIVER.start(&plan()).unwrap();
    let pid = Pid::from_raw(pause.identity().pid.cast_signed());
    drop(pause);
    kill(pid, Signal::SIGTERM).unwrap();
    eventually("it is reaped when the driver is next used", || {
        DRIVER.cleanup(&plan().cgroup_ref()).unwrap();
        children() == before
    });
    eventually("the descriptors are closed", || descriptors() == descriptors_before);
}

#[test]
fn starts_from_many_threads_at_once() {
    let _among = among_others();
    let parent = Parent::new();
    let hostname = nix::unistd::gethostname().unwrap();
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..25 {
                    let plan =
                        Plan { cgroup_parent: parent.0.clone(), uts: Namespace::Private, ..plan() };
                    let running = Running::start(Plan { hostname: plan.id.to_string(), ..plan });
                    assert_eq!(running.status("NSpid").split(' ').next_back(), Some("1"));
                    assert_eq!(running.end().status, 137);
                }
            });
        }
    });
    assert_eq!(nix::unistd::gethostname().unwrap(), hostname);
    assert!(nix::unistd::geteuid().is_root());
}

fn adopted(running: &Running) -> Adoption {
    DRIVER.adopt(&running.plan.cgroup_ref(), running.pause.identity())
}

#[test]
fn an_adopted_pause_reports_its_exit() {
    let _among = among_others();
    let running = Running::start(plan());
    let Adoption::Alive(pause) = adopted(&running) else { panic!("not alive") };
    assert_eq!(pause.identity(), running.pause.identity());
    pause.kill().unwrap();
    assert_eq!(exit_of(&*pause).status, 137);
    assert_eq!(exit_of(&*running.pause).status, 137);
    assert!(matches!(adopted(&running), Adoption::Dead(exit) if exit.status == 255));
}

#[test]
fn what_is_not_the_recorded_process_is_dead_and_untouched() {
    let _among = among_others();
    let running = Running::start(plan());
    let own = running.pause.identity().clone();
    let mut others = vec![own.clone(); 3];
    others[0].start_time += 1;
    others[1].pid_namespace += 1;
    others[2].boot_id = "another".into();
    for pid in [0, 1 << 30, u32::MAX] {
        others.push(pause_sandboxer::process::Identity { pid, ..own.clone() });
    }
    for identity in others {
        let adoption = DRIVER.adopt(&running.plan.cgroup_ref(), &identity);
        assert!(
            matches!(adoption, Adoption::Dead(exit) if exit.status == 255),
            "{identity:?} {adoption:?}"
        );
    }
    // A child of ours that has ended is not reaped for a stranger's sake.
    let mut child = Command::new("sh").args(["-c", "exit 3"]).spawn().unwrap();
    eventually("the child is a zombie", || {
        fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap().contains(") Z ")
    });
    let stranger = pause_sandboxer::process::Identity { pid: child.id(), ..own };
    assert!(matches!(
        DRIVER.adopt(&running.plan.cgroup_ref(), &stranger),
        Adoption::Dead(exit) if exit.status == 255
    ));
    assert_eq!(child.wait().unwrap().code(), Some(3));
    eventually("the pause sleeps on", || running.status("State").starts_with('S'));
}

/// What a daemon sees that has not made the process: the maker is another process, which is this
/// program again.
#[test]
fn a_pause_of_another_process_reports_its_exit() {
    const MAKER: &str = "PAUSE_SANDBOXER_TEST_MAKER";
    if std::env::var_os(MAKER).is_some() {
        let running = DRIVER.start(&plan()).unwrap();
        println!("IDENTITY {}", serde_json::to_string(running.identity()).unwrap());
        exit_of(&*running);
        std::process::exit(0);
    }
    let _among = among_others();
    for (signal, status) in [(Signal::SIGTERM, 0), (Signal::SIGKILL, 137)] {
        let mut maker = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "a_pause_of_another_process_reports_its_exit", "--nocapture"])
            .env(MAKER, "1")
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let output = std::io::BufReader::new(maker.stdout.take().unwrap());
        let identity = std::io::BufRead::lines(output)
            .find_map(|line| Some(line.unwrap().split_once("IDENTITY ")?.1.to_owned()))
            .unwrap();
        let identity = serde_json::from_str(&identity).unwrap();
        let Adoption::Alive(pause) = DRIVER.adopt(&plan().cgroup_ref(), &identity) else {
            panic!("not alive")
        };
        kill(Pid::from_raw(identity.pid.cast_signed()), signal).unwrap();
        assert_eq!(exit_of(&*pause).status, status);
        maker.wait().unwrap();
        assert_eq!(exit_of(&*pause).status, status);
    }
}

#[test]
fn network_namespaces_are_distinguished_from_other_files() {
    let _among = among_others();
    let netns = Netns::new();
    assert!(is_network_namespace(&netns.path).unwrap());
    assert!(is_network_namespace(Path::new("/proc/self/ns/net")).unwrap());
    for other in ["/proc/self/ns/ipc", "/proc/self/status", "/etc/passwd", "/", "/dev/null"] {
        assert!(!is_network_namespace(Path::new(other)).unwrap(), "{other}");
    }
    assert!(is_network_namespace(Path::new("/nowhere")).is_err());
    assert!(is_network_namespace(Path::new("/a\0b")).is_err());
}

fn mapped() -> UserNamespace {
    let mapping = IdMapping { container_id: 0, host_id: 1_000_000, length: 65536 };
    UserNamespace { uid: mapping, gid: mapping }
}

fn check_user_namespace(running: &Running) {
    assert_ne!(running.namespace("user"), own_namespace("user"));
    let ids = ["1065535"; 4].join(" ");
    assert_eq!(running.status("Uid"), ids);
    assert_eq!(running.status("Gid"), ids);
    for key in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(running.status(key), "0000000000000000", "{key}");
    }
    assert_eq!(running.status("Seccomp"), "2");
    assert_eq!(running.status("NSpid").split(' ').next_back(), Some("1"));
    assert_eq!(fs::metadata(running.proc("status")).unwrap().uid(), 0);
    assert_eq!(fs::read_dir(running.proc("fd")).unwrap().count(), 0);
    assert_eq!(fs::read_dir(running.proc("root")).unwrap().count(), 0);
    assert!(
        fs::read_to_string(running.proc("uid_map"))
            .unwrap()
            .split_whitespace()
            .eq(["0", "1000000", "65536"])
    );
    // Root of the user namespace owns the pod's namespaces.
    let inside = Command::new("nsenter")
        .args([
            "-t",
            &running.pid().to_string(),
            "-U",
            "-u",
            "-i",
            "-p",
            "-S",
            "0",
            "-G",
            "0",
            "sh",
            "-c",
        ])
        .arg("hostname changed && hostname && id -u")
        .output()
        .unwrap();
    if running.plan.uts == Namespace::Private {
        assert_eq!(String::from_utf8_lossy(&inside.stdout), "changed\n0\n", "{inside:?}");
    }
}

#[test]
fn user_namespace_with_host_network() {
    let _among = among_others();
    let parent = Parent::new();
    let score = own_oom_score() + 3;
    let plan = Plan {
        userns: Some(mapped()),
        cgroup_parent: parent.0.clone(),
        oom_score_adj: score,
        ..plan()
    };
    let running = Running::start(plan).settled();
    check_user_namespace(&running);
    assert_eq!(fs::read_to_string(running.proc("oom_score_adj")).unwrap(), format!("{score}\n"));
    for leaf in parent.everywhere(&running.plan.id) {
        assert_eq!(
            fs::read_to_string(leaf.join("cgroup.procs")).unwrap(),
            format!("{}\n", running.pid())
        );
    }
    running.signal(Signal::SIGTERM);
    assert_eq!(exit_of(&*running.pause).status, 0);
}

#[test]
fn user_namespace_that_owns_the_network() {
    let _among = among_others();
    // CRI does it this way: a process in a new user and network namespace, whose network is
    // bind-mounted.
    let mut maker = Command::new("unshare").args(["-U", "-n", "sleep", "1000"]).spawn().unwrap();
    let file = |name: &str| format!("/proc/{}/{name}", maker.id());
    eventually("the user namespace is made", || {
        fs::read_link(file("ns/net")).unwrap() != own_namespace("net")
            && fs::read_link(file("ns/user")).unwrap() != own_namespace("user")
    });
    fs::write(file("uid_map"), "0 1000000 65536").unwrap();
    fs::write(file("gid_map"), "0 1000000 65536").unwrap();
    let owner = fs::read_link(file("ns/user")).unwrap();
    let netns = Netns::of(|| file("ns/net").into());
    maker.kill().unwrap();
    maker.wait().unwrap();
    let sysctl = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    let running = Running::start(Plan {
        netns: Some(netns.path.clone()),
        userns: Some(mapped()),
        uts: Namespace::Private,
        hostname: "pod".to_owned(),
        sysctls: vec![
            sysctl("net.ipv4.ip_unprivileged_port_start", "78"),
            sysctl("kernel.shmmni", "321"),
        ],
        ..plan()
    })
    .settled();
    assert_eq!(running.namespace("user"), owner);
    assert_eq!(running.namespace("net"), Path::new(&netns.link()));
    let inside = Command::new("nsenter")
        .args([
            "-t",
            &running.pid().to_string(),
            "-u",
            "-i",
            "-n",
            "cat",
            "/proc/sys/kernel/hostname",
        ])
        .args(["/proc/sys/net/ipv4/ip_unprivileged_port_start", "/proc/sys/kernel/shmmni"])
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&inside.stdout), "pod\n78\n321\n");
    check_user_namespace(&running);
}
