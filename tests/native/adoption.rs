//! Pause processes of an earlier daemon.

use std::fs;
use std::process::Command;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pause_sandboxer::pause::Driver as _;
use pause_sandboxer::process::{Adoption, Process};

use crate::fixture::{DRIVER, Running, among_others, eventually, exit_of, plan};

fn adopted(running: &Running) -> Adoption {
    DRIVER.adopt(&running.plan.cgroup_ref(), running.pause.identity())
}

/// Who has not reaped the process sees this exit status, or, before Linux 6.15, none (255), if it
/// was reaped first: that kernel lacks PIDFD_GET_INFO with PIDFD_INFO_EXIT.
fn assert_seen(pause: &dyn Process, status: u32) {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(['.', '-']).map(|number| number.parse::<u32>().unwrap_or(0));
    let may_miss = (numbers.next(), numbers.next()) < (Some(6), Some(15));
    let seen = exit_of(pause).status;
    assert!(seen == status || may_miss && seen == 255, "{seen}, not {status}");
}

#[test]
fn an_adopted_pause_reports_its_exit() {
    let _among = among_others();
    let running = Running::start(plan());
    let Adoption::Alive(pause) = adopted(&running) else { panic!("not alive") };
    assert_eq!(pause.identity(), running.pause.identity());
    pause.kill().unwrap();
    assert_seen(&*pause, 137);
    // Both are of this process: one of them reaps it.
    assert_seen(&*running.pause, 137);
    assert!(matches!(adopted(&running), Adoption::Dead(exit) if exit.status == 255));
}

/// Promise: foreign_process_survives.
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

/// The view of a daemon that has not made the process: the maker is another process, which is this
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
            .args([
                "--exact",
                "adoption::a_pause_of_another_process_reports_its_exit",
                "--nocapture",
            ])
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
        assert_seen(&*pause, status);
        maker.wait().unwrap();
        assert_seen(&*pause, status);
    }
}
