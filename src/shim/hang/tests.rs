//! Processes that hang, and those that only look so.

use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command};
use std::time::Instant;

use super::*;
use crate::process::Identity;
use crate::shim::bundle::{Bundle, Recorded};
use crate::shim::endpoint::tests::settings;
use crate::shim::own::OwnShim;
use crate::shim::{Runtime, Shims};

/// A child that is killed with its own children when it is dropped.
struct Running(Child);

impl Running {
    fn start(program: &str, arguments: &[&str]) -> Self {
        Self(Command::new(program).args(arguments).process_group(0).spawn().unwrap())
    }

    fn perl(script: &str, arguments: &[i64]) -> Self {
        let arguments: Vec<String> = arguments.iter().map(i64::to_string).collect();
        let all: Vec<&str> =
            ["-e", script].into_iter().chain(arguments.iter().map(String::as_str)).collect();
        Self::start("perl", &all)
    }

    fn pid(&self) -> u32 {
        self.0.id()
    }

    fn signal(&self, signal: nix::sys::signal::Signal) {
        let pid = nix::unistd::Pid::from_raw(i32::try_from(self.pid()).unwrap());
        nix::sys::signal::kill(pid, signal).unwrap();
    }

    fn state(&self) -> u8 {
        process_identity::Stat::of_process(self.pid()).map_or(0, |stat| stat.state)
    }

    fn lives(&self) -> bool {
        ![0, b'Z', b'X'].contains(&self.state())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let group = nix::unistd::Pid::from_raw(i32::try_from(self.pid()).unwrap());
        let _ = nix::sys::signal::killpg(group, nix::sys::signal::Signal::SIGKILL);
        let _ = self.0.wait();
    }
}

fn until(what: &str, is_so: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < Duration::from_secs(20), "not in time: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The parent of a child that shares its memory cannot be interrupted (state D).
const UNINTERRUPTIBLE: &str = "syscall($ARGV[0] + 0, $ARGV[1] + 0, 0, 0, 0, 0); sleep 1000";
const WAIT_FOR_EVENTS: &str = r#"
    my $epoll = syscall($ARGV[0] + 0, 0);
    my $events = "\0" x 12;
    syscall($ARGV[1] + 0, $epoll, $events, 1, -1, 0, 8);
"#;
const TRACE: &str = "syscall($ARGV[0] + 0, $ARGV[1] + 0, $ARGV[2] + 0, 0, 0); sleep 1000";

#[test]
fn a_process_is_still_if_it_sleeps_or_is_stopped() {
    let sleeps = Running::start("sleep", &["1000"]);
    let look = || Stillness::of_process(sleeps.pid());
    until("it sleeps", || look().is_some_and(|stillness| !stillness.is_stopped));
    assert_eq!(look(), look());
    sleeps.signal(nix::sys::signal::Signal::SIGSTOP);
    until("it is stopped", || look().is_some_and(|stillness| stillness.is_stopped));
    assert_eq!(look(), look());
}

#[test]
fn a_process_that_works_or_waits_or_is_held_is_not_still() {
    if kit::skip_without_root() {
        return;
    }
    let slow = Running::start("sh", &["-c", "while :; do sleep 0.02; done"]);
    let look = || Stillness::of_process(slow.pid());
    until("it sleeps again", || {
        let first = look();
        std::thread::sleep(Duration::from_millis(100));
        first.is_some() && first != look()
    });
    let computes = Running::start("sh", &["-c", "while :; do :; done"]);
    let flags = i64::from(libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD);
    let uninterruptible = Running::perl(UNINTERRUPTIBLE, &[libc::SYS_clone, flags]);
    let waits = Running::perl(WAIT_FOR_EVENTS, &[libc::SYS_epoll_create1, libc::SYS_epoll_pwait]);
    let traced = Running::start("sleep", &["1000"]);
    let pid = i64::from(traced.pid());
    let _tracer = Running::perl(TRACE, &[libc::SYS_ptrace, i64::from(libc::PTRACE_SEIZE), pid]);
    let status = || fs::read_to_string(format!("/proc/{}/status", traced.pid())).unwrap();
    until("it is traced", || !status().contains("TracerPid:\t0\n"));
    until("it cannot be interrupted", || uninterruptible.state() == b'D');
    until("it waits for events", || waits_for_events(waits.pid()) && waits.state() == b'S');
    for (name, process) in [
        ("computes", &computes),
        ("cannot be interrupted", &uninterruptible),
        ("waits for events", &waits),
        ("is traced", &traced),
    ] {
        assert_eq!(Stillness::of_process(process.pid()), None, "{name}");
    }
    traced.signal(nix::sys::signal::Signal::SIGSTOP);
    until("the tracer holds it", || traced.state() == b't');
    assert_eq!(Stillness::of_process(traced.pid()), None, "is stopped and traced");
}

/// The endpoint of a pod whose own shim is this process.
async fn endpoint_of(dir: &Path, shim: &Running) -> Arc<Endpoint> {
    let own = dir.join("own");
    kit::write_program(&own, b"#!/bin/true\n").unwrap();
    let own_shim = OwnShim::open(own).unwrap();
    let shims = Arc::new(Shims::new(settings(dir, Some(own_shim))).unwrap());
    let runtime = Runtime { own_shim: true, ..Runtime::default() };
    let endpoint = Endpoint::new(&shims, &"pod".try_into().unwrap(), &Arc::new(runtime));
    let bundle = Bundle::new(dir.join("sandboxes/pod/shim"));
    fs::create_dir_all(bundle.dir()).unwrap();
    let process = shims.launcher.open(shim.pid()).unwrap().unwrap();
    let identity: Identity = process.identity().clone();
    bundle.record(Some(&Recorded::Running { identity, socket: None })).unwrap();
    endpoint.recover().await.unwrap();
    assert!(endpoint.own_process().is_some());
    endpoint
}

#[tokio::test]
async fn a_shim_that_hangs_is_killed_and_a_slow_one_is_not() {
    if kit::skip_without_root() {
        return;
    }
    for (hangs, program, arguments) in [
        (true, "sleep", ["1000", "0"].as_slice()),
        (false, "sh", &["-c", "while :; do sleep 0.02; done"]),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let shim = Running::start(program, arguments);
        let endpoint = endpoint_of(dir.path(), &shim).await;
        until("it sleeps", || Stillness::of_process(shim.pid()).is_some());
        // It accepts no call.
        fs::create_dir_all(endpoint.socket().parent().unwrap()).unwrap();
        let listener = UnixListener::bind(endpoint.socket()).unwrap();
        let mut suspects = Suspects::default();
        for _ in 0..LOOKS {
            suspects.look(vec![endpoint.clone()]).await;
            std::thread::sleep(Duration::from_millis(100));
        }
        assert!(shim.lives(), "it was killed before its time");
        suspects.look(vec![endpoint.clone()]).await;
        let process = endpoint.own_process().unwrap();
        let exited = tokio::time::timeout(Duration::from_secs(2), process.exited()).await;
        assert_eq!(exited.is_ok(), hangs, "{program}");
        drop(listener);
    }
}

#[tokio::test]
async fn a_call_that_could_not_be_made_is_no_evidence() {
    if kit::skip_without_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let shim = Running::start("sleep", &["1000"]);
    // There is no socket.
    let endpoint = endpoint_of(dir.path(), &shim).await;
    until("it sleeps", || Stillness::of_process(shim.pid()).is_some());
    let mut suspects = Suspects::default();
    for _ in 0..2 * LOOKS + 2 {
        suspects.look(vec![endpoint.clone()]).await;
        // A call that still runs at the last look would be one without an answer.
        while suspects.0.values().any(|suspect| !suspect.call.is_finished()) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
    // A kill is done in the background.
    let process = endpoint.own_process().unwrap();
    let exited = tokio::time::timeout(Duration::from_secs(1), process.exited()).await;
    assert!(exited.is_err(), "it was killed");
}
