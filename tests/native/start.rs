//! Starts: many, failed and interrupted.

use std::sync::LazyLock;
use std::{fs, thread};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pause_sandboxer::error::StepError;
use pause_sandboxer::pause::Driver as _;
use pause_sandboxer::pause::{IdMapping, Namespace, Plan, UserNamespace};

use crate::fixture::{
    DRIVER, Netns, Parent, Running, alone, among_others, eventually, exit_of, plan,
};

#[test]
fn cleanup_removes_what_an_interrupted_start_left() {
    let _among = among_others();
    let parent = Parent::new();
    let running = Running::start(Plan { cgroup_parent: parent.0.clone(), ..plan() });
    eventually("it is cleaned up", || DRIVER.cleanup(&running.plan.cgroup_ref()).is_ok());
    assert_eq!(exit_of(&*running.pause).status, 137);
    assert!(parent.everywhere(&running.plan.id).iter().all(|leaf| !leaf.exists()));
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

/// Promise: failed_start_leaves_nothing.
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
