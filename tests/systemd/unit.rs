//! The daemon as the packaged units run it.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kit::controller::Controller;
use kit::cri::api::{
    LinuxPodSandboxConfig, LinuxSandboxSecurityContext, NamespaceMode, NamespaceOption,
    PodSandboxConfig,
};
use kit::grpc::{NOT_FOUND, UNAVAILABLE};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::node::{alone, cgroup, eventually, run, show};

pub(crate) const SERVICE: &str = "pause-sandboxer.service";
pub(crate) const SOCKET: &str = "pause-sandboxer.socket";
const PATH: &str = "/run/pause-sandboxer/pause-sandboxer.sock";
const UNITS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/packaging/systemd");

/// Puts program and units where a node has them.
fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        run(
            "install",
            &[
                "-m",
                "0755",
                env!("CARGO_BIN_EXE_pause-sandboxer"),
                "/usr/local/bin/pause-sandboxer",
            ],
        );
        let shim = Path::new(env!("CARGO_BIN_EXE_pause-sandboxer")).with_file_name(kit::shim::NAME);
        run("install", &["-m", "0755", &shim.display().to_string(), "/usr/local/bin/"]);
        for unit in [SERVICE, SOCKET] {
            run("install", &["-m", "0644", &format!("{UNITS}/{unit}"), "/etc/systemd/system/"]);
        }
        run("systemctl", &["daemon-reload"]);
    });
}

/// Sockets and daemon, running.
pub(crate) fn up() {
    install();
    run("systemctl", &["start", SOCKET, SERVICE]);
}

fn main_pid() -> u32 {
    show(SERVICE, "MainPID").parse().unwrap()
}

fn controller() -> Controller {
    Controller::new(PATH, "pause-sandboxer")
}

fn config(cgroup_parent: &str) -> PodSandboxConfig {
    let options = NamespaceOption { network: NamespaceMode::NODE.into(), ..Default::default() };
    let security = LinuxSandboxSecurityContext {
        namespace_options: Some(options).into(),
        ..Default::default()
    };
    let linux = LinuxPodSandboxConfig {
        cgroup_parent: cgroup_parent.to_owned(),
        security_context: Some(security).into(),
        ..Default::default()
    };
    PodSandboxConfig { linux: Some(linux).into(), ..Default::default() }
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

/// A pod of the daemon; its pause's pid.
async fn pod(id: &str, cgroup_parent: &str) -> u32 {
    let controller = controller();
    controller.create(id, &config(cgroup_parent), "").await.unwrap();
    controller.start(id).await.unwrap().pid
}

async fn ready(id: &str, pid: u32) {
    let status = controller().status(id, false).await.unwrap();
    assert_eq!((status.state.as_str(), status.pid), ("SANDBOX_READY", pid));
}

async fn removed(id: &str, pid: u32) {
    controller().stop(id).await.unwrap();
    controller().shutdown(id).await.unwrap();
    // After a restart it is systemd's child, and a zombie until systemd has reaped it.
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    assert!(stat.is_empty() || stat.contains(") Z "), "the pause runs: {stat}");
}

#[test]
fn systemd_finds_no_fault_with_the_units() {
    let _alone = alone();
    install();
    for unit in [SERVICE, SOCKET] {
        assert_eq!(run("systemd-analyze", &["verify", &format!("{UNITS}/{unit}")]), "");
    }
}

#[test]
fn comes_up_ready() {
    let _alone = alone();
    up();
    for (property, value) in [
        ("ActiveState", "active"),
        ("StatusText", "serving"),
        ("Type", "notify"),
        ("KillMode", "process"),
        ("WatchdogUSec", "15s"),
    ] {
        assert_eq!(show(SERVICE, property), value, "{property}");
    }
    for path in [PATH.to_owned(), format!("{PATH}.ttrpc")] {
        let metadata = fs::metadata(&path).unwrap();
        assert_eq!((metadata.permissions().mode() & 0o7777, metadata.uid()), (0o600, 0), "{path}");
        UnixStream::connect(&path).unwrap();
    }
    assert_eq!(fs::metadata("/run/pause-sandboxer").unwrap().permissions().mode() & 0o7777, 0o700);
    let process = format!("/proc/{}", main_pid());
    let mounts = |process: &str| fs::read_link(format!("{process}/ns/mnt")).unwrap();
    assert_eq!(mounts(&process), mounts("/proc/1"), "the pods' mounts would not be the node's");
    assert_eq!(fs::read_to_string(format!("{process}/oom_score_adj")).unwrap(), "-999\n");
    // A drop-in is read by a config.
    let config = "/run/unit-test-containerd.toml";
    fs::write(config, format!("version = 3\nimports = [\"{}\"]\n", drop_in())).unwrap();
    let checked = run("/usr/local/bin/pause-sandboxer", &["check", "--containerd-config", config]);
    fs::remove_file(config).unwrap();
    assert!(!checked.contains("FAIL"), "{checked}");
    assert!(checked.contains("runtime handlers of this sandboxer: \"runc-pause\""), "{checked}");
}

/// Set when it goes, also by a panic, so that no thread runs forever.
struct AtLast<'a>(&'a AtomicBool);

impl Drop for AtLast<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn drop_in() -> String {
    format!("{}/packaging/containerd/pause-sandboxer.toml", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn a_pod_below_a_slice_survives_restarts_that_refuse_no_call() {
    let _alone = alone();
    up();
    let slice = "psbtest-unit.slice";
    let (below, inside) = block_on(async {
        (pod("below", &format!("/psbtest.slice/{slice}")).await, pod("inside", "").await)
    });
    let path = format!("psbtest.slice/{slice}/cri-containerd-below.scope");
    assert_eq!(show("cri-containerd-below.scope", "ControlGroup"), format!("/{path}"));
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let last = AtLast(&done);
        // A client calls all the time, and is never refused. What is asked meanwhile waits, as
        // Status does below.
        let asking = scope.spawn(|| {
            let mut asked = 0;
            while !done.load(Ordering::Relaxed) {
                UnixStream::connect(PATH).unwrap();
                asked += 1;
                // Not to fill the queue of the socket.
                thread::sleep(Duration::from_millis(20));
            }
            asked
        });
        let waiting = scope.spawn(|| block_on(controller().wait("inside")));
        for restart in 0..3 {
            let before = main_pid();
            if restart == 2 {
                kill(Pid::from_raw(before.cast_signed()), Signal::SIGKILL).unwrap();
                eventually("systemd starts it again", || {
                    !["0".to_owned(), before.to_string()].contains(&show(SERVICE, "MainPID"))
                });
                run("systemctl", &["start", SERVICE]);
            } else {
                run("systemctl", &["restart", SERVICE]);
            }
            assert_ne!(main_pid(), before);
            block_on(async {
                ready("below", below).await;
                ready("inside", inside).await;
            });
        }
        drop(last);
        assert!(asking.join().unwrap() > 0);
        // The first restart ended it, and not as if the pod had ended.
        assert_eq!(waiting.join().unwrap().unwrap_err().code, UNAVAILABLE);
    });
    block_on(async {
        removed("below", below).await;
        removed("inside", inside).await;
    });
    assert!(cgroup(&path).is_empty());
}

#[test]
fn the_first_caller_starts_it() {
    let _alone = alone();
    up();
    run("systemctl", &["stop", SERVICE]);
    assert_eq!(show(SERVICE, "ActiveState"), "inactive");
    let status = block_on(controller().status("unknown", false)).unwrap_err();
    assert_eq!(status.code, NOT_FOUND);
    assert_eq!(show(SERVICE, "ActiveState"), "active");
}

#[test]
fn a_hung_daemon_is_restarted() {
    let _alone = alone();
    install();
    let drop_ins = format!("/run/systemd/system/{SERVICE}.d");
    fs::create_dir_all(&drop_ins).unwrap();
    fs::write(format!("{drop_ins}/impatient.conf"), "[Service]\nWatchdogSec=8\n").unwrap();
    run("systemctl", &["daemon-reload"]);
    run("systemctl", &["restart", SERVICE]);
    let pid = block_on(pod("patient", ""));
    // Twice the time, and it is notified in time.
    let before = main_pid();
    thread::sleep(Duration::from_secs(16));
    assert_eq!(main_pid(), before);
    kill(Pid::from_raw(before.cast_signed()), Signal::SIGSTOP).unwrap();
    let hung = Instant::now();
    eventually("the watchdog barks", || {
        !["0".to_owned(), before.to_string()].contains(&show(SERVICE, "MainPID"))
    });
    // A signal other than SIGKILL would take TimeoutStopSec=, 30 s, in addition.
    assert!(hung.elapsed() < Duration::from_secs(25), "{:?}", hung.elapsed());
    eventually("it is ready", || show(SERVICE, "ActiveState") == "active");
    let log = run("journalctl", &["--no-pager", "-u", SERVICE]);
    assert!(log.contains("Watchdog timeout"), "{log}");
    block_on(async {
        ready("patient", pid).await;
        removed("patient", pid).await;
    });
    fs::remove_dir_all(&drop_ins).unwrap();
    run("systemctl", &["daemon-reload"]);
}
