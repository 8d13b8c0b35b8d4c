//! The end of a pause process: signals, waiters, orphans of its PID namespace.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pause_sandboxer::pause::{Namespace, Plan};

use crate::fixture::{RUNTIME, Running, among_others, eventually, exit_of, plan};

/// Promise: pause_is_confined.
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
