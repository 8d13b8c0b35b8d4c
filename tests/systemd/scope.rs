//! The native driver below slices.

use std::fs;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pause_sandboxer::pause::native::Native;
use pause_sandboxer::pause::{Driver, IdMapping, Plan, UserNamespace};
use pause_sandboxer::process::{Adoption, Exit, Process};
use tokio::runtime::{Builder, Runtime};

use super::node::{alone, cgroup, eventually, known, run, show, unified};

static DRIVER: LazyLock<Native> = LazyLock::new(|| Native::new().unwrap());

/// One for all threads, as in the daemon: the driver watches exits on the runtime that first waits
/// for one, and the waits of other runtimes hang when it ends.
static RUNTIME: LazyLock<Runtime> =
    LazyLock::new(|| Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap());

/// A plan below a slice of its own, and that is not there yet.
fn plan() -> Plan {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    Plan {
        hostname: "pod".to_owned(),
        cgroup_parent: format!("psbtest-pod{number}.slice"),
        ..Plan::new(format!("{}-{number}", std::process::id()).try_into().unwrap())
    }
}

fn unit(plan: &Plan) -> String {
    format!("cri-containerd-{}.scope", plan.id)
}

fn path(plan: &Plan) -> String {
    format!("psbtest.slice/{}/{}", plan.cgroup_parent, unit(plan))
}

fn start(plan: &Plan) -> Box<dyn Process> {
    DRIVER.start(plan).unwrap_or_else(|e| panic!("{e}"))
}

fn end(pause: &dyn Process) -> Exit {
    pause.kill().unwrap();
    RUNTIME.block_on(pause.exited())
}

/// The cgroups that the pause is in, but for those of hierarchies in which it is where its daemon
/// is.
fn cgroups(pause: &dyn Process) -> Vec<String> {
    let text = fs::read_to_string(format!("/proc/{}/cgroup", pause.identity().pid)).unwrap();
    text.lines()
        .map(|line| line.splitn(3, ':').nth(2).unwrap().trim_start_matches('/').to_owned())
        .collect()
}

fn in_scope(pause: &dyn Process, plan: &Plan) {
    assert_eq!(show(&unit(plan), "ActiveState"), "active");
    let cgroups = cgroups(pause);
    assert!(
        !cgroups.is_empty() && cgroups.iter().all(|cgroup| *cgroup == path(plan)),
        "{cgroups:?}"
    );
}

fn nothing_left(plan: &Plan) {
    assert_eq!(cgroup(&path(plan)), Vec::<std::path::PathBuf>::new());
    eventually("the scope is forgotten", || !known(&unit(plan)));
}

fn alive(pause: &dyn Process) -> bool {
    let stat =
        fs::read_to_string(format!("/proc/{}/stat", pause.identity().pid)).unwrap_or_default();
    stat.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with('Z'))
}

fn with_users(plan: Plan) -> Plan {
    let mapping = IdMapping { container_id: 0, host_id: 1_000_000, length: 65536 };
    Plan { userns: Some(UserNamespace { uid: mapping, gid: mapping }), ..plan }
}

#[test]
fn a_scope_lives_as_long_as_its_pause() {
    let _alone = alone();
    for plan in [plan(), with_users(plan())] {
        let pause = start(&plan);
        in_scope(&*pause, &plan);
        let unit = unit(&plan);
        for (property, value) in [
            ("Slice", plan.cgroup_parent.as_str()),
            ("Delegate", "yes"),
            ("DefaultDependencies", "no"),
            ("CPUAccounting", "yes"),
            ("MemoryAccounting", "yes"),
            ("TasksAccounting", "yes"),
            ("ControlGroup", &format!("/{}", path(&plan))),
        ] {
            assert_eq!(show(&unit, property), value, "{property}");
        }
        if unified() {
            // Pods inherit the attribute of the slice.
            let controllers =
                fs::read_to_string(format!("/sys/fs/cgroup/{}/cgroup.controllers", path(&plan)))
                    .unwrap();
            for controller in ["memory", "cpu"] {
                assert!(
                    controllers.split_whitespace().any(|name| name == controller),
                    "{controllers}"
                );
            }
        }
        // The least CPU time of all that want some.
        let (file, value) = if unified() { ("cpu.weight", "1\n") } else { ("cpu.shares", "2\n") };
        let weights: Vec<_> = cgroup(&path(&plan))
            .iter()
            .filter_map(|directory| fs::read_to_string(directory.join(file)).ok())
            .collect();
        assert_eq!(weights, [value], "{file}");
        assert_eq!(end(&*pause).status, 137);
        DRIVER.cleanup(&plan.cgroup_ref()).unwrap();
        nothing_left(&plan);
        DRIVER.cleanup(&plan.cgroup_ref()).unwrap();
    }
}

#[test]
fn a_scope_goes_with_its_pause() {
    let _alone = alone();
    let plan = plan();
    let pause = start(&plan);
    kill(Pid::from_raw(pause.identity().pid.cast_signed()), Signal::SIGTERM).unwrap();
    eventually("the scope is forgotten", || !known(&unit(&plan)));
    drop(pause);
    DRIVER.cleanup(&plan.cgroup_ref()).unwrap();
    nothing_left(&plan);
}

#[test]
fn stopping_a_scope_ends_its_pause() {
    let _alone = alone();
    let plan = plan();
    let pause = start(&plan);
    run("systemctl", &["stop", &unit(&plan)]);
    assert!(!alive(&*pause));
    DRIVER.cleanup(&plan.cgroup_ref()).unwrap();
    nothing_left(&plan);
}

#[test]
fn a_failed_start_leaves_nothing() {
    let _alone = alone();
    let mut plans = vec![(Plan { hostname: "h".repeat(65), ..plan() }, "set hostname ")];
    plans.push((Plan { hostname: "h".repeat(65), ..with_users(plan()) }, "set hostname "));
    // systemd refuses when the pause is there already: its slice is, but may not be used any more.
    let refused = plan();
    run("systemctl", &["start", &refused.cgroup_parent]);
    run("systemctl", &["mask", "--runtime", &refused.cgroup_parent]);
    let slice = refused.cgroup_parent.clone();
    plans.push((refused, "start scope "));
    for (plan, message) in plans {
        let e = DRIVER.start(&plan).unwrap_err();
        assert!(e.to_string().starts_with(message), "{e}");
        nothing_left(&plan);
        let processes = run("ps", &["-eo", "args"]);
        assert!(
            !processes.lines().any(|line| line == format!("/pause {}", plan.id)),
            "{processes}"
        );
    }
    run("systemctl", &["unmask", "--runtime", &slice]);
}

#[test]
fn a_slice_that_systemd_refuses() {
    let _alone = alone();
    let plan = plan();
    run("systemctl", &["mask", "--runtime", &plan.cgroup_parent]);
    let e = DRIVER.start(&plan).unwrap_err().to_string();
    assert!(e.contains(&plan.cgroup_parent) || e.contains(&unit(&plan)), "{e}");
    assert!(e.contains("masked"), "{e}");
    nothing_left(&plan);
    run("systemctl", &["unmask", "--runtime", &plan.cgroup_parent]);
}

#[test]
fn a_scope_that_was_left_over_gives_way() {
    let _alone = alone();
    let plan = plan();
    let old = start(&plan);
    let pause = start(&plan);
    assert!(!alive(&*old));
    assert!(alive(&*pause));
    in_scope(&*pause, &plan);
    end(&*pause);
    DRIVER.cleanup(&plan.cgroup_ref()).unwrap();
    nothing_left(&plan);
}

#[test]
fn cleanup_removes_what_an_interrupted_start_left() {
    let _alone = alone();
    let plan = plan();
    // Before systemd was asked: the directory and a process in it.
    let directories = if unified() {
        vec!["/sys/fs/cgroup"]
    } else {
        vec!["/sys/fs/cgroup/memory", "/sys/fs/cgroup/systemd"]
    };
    let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    for root in directories {
        let directory = format!("{root}/{}", path(&plan));
        fs::create_dir_all(&directory).unwrap();
        fs::write(format!("{directory}/cgroup.procs"), child.id().to_string()).unwrap();
    }
    // Collected meanwhile, as init would: a zombie stays in its cgroup.
    let reaper = thread::spawn(move || child.wait().unwrap());
    DRIVER.cleanup(&plan.cgroup_ref()).unwrap();
    assert!(!reaper.join().unwrap().success());
    nothing_left(&plan);
    // After.
    let pause = start(&plan);
    DRIVER.cleanup(&plan.cgroup_ref()).unwrap();
    assert!(!alive(&*pause));
    nothing_left(&plan);
}

/// A bus that does not answer, as during a long reload of systemd, fails no removal.
#[test]
fn cleanup_needs_no_answer_of_the_bus() {
    let _alone = alone();
    let plan = plan();
    let pause = start(&plan);
    // The scope stays when the pause ends.
    let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    for directory in cgroup(&path(&plan)) {
        fs::write(directory.join("cgroup.procs"), child.id().to_string()).unwrap();
    }
    let reaper = thread::spawn(move || child.wait().unwrap());
    end(&*pause);
    let bus = Pid::from_raw(show("dbus.service", "MainPID").parse().unwrap());
    assert!(bus.as_raw() > 1);
    kill(bus, Signal::SIGSTOP).unwrap();
    let cleaned = DRIVER.cleanup(&plan.cgroup_ref());
    kill(bus, Signal::SIGCONT).unwrap();
    assert!(!reaper.join().unwrap().success());
    cleaned.unwrap();
    nothing_left(&plan);
}

#[test]
fn another_daemon_adopts() {
    let _alone = alone();
    let plan = plan();
    let pause = start(&plan);
    let second = Native::new().unwrap();
    let Adoption::Alive(adopted) = second.adopt(&plan.cgroup_ref(), pause.identity()) else {
        panic!("not adopted")
    };
    in_scope(&*adopted, &plan);
    // Its own connection.
    end(&*adopted);
    second.cleanup(&plan.cgroup_ref()).unwrap();
    nothing_left(&plan);
}

#[test]
fn concurrent_scopes() {
    let _alone = alone();
    let mut took: Vec<_> = thread::scope(|scope| {
        let eight: Vec<_> = (0..8)
            .map(|_| scope.spawn(|| (0..4).map(|_| there_and_back(plan())).collect::<Vec<_>>()))
            .collect();
        eight.into_iter().flat_map(|one| one.join().unwrap()).collect()
    });
    took.sort_unstable();
    println!("start, kill and cleanup of 32 pauses in scopes, 8 at once: median {:?}", took[16]);
    let one_by_one = |parent: &str| {
        let mut took: Vec<_> = (0..15)
            .map(|_| {
                let begun = Instant::now();
                let plan = Plan { cgroup_parent: parent.to_owned(), ..plan() };
                end(&*start(&plan));
                DRIVER.cleanup(&plan.cgroup_ref()).unwrap();
                begun.elapsed()
            })
            .collect();
        took.sort_unstable();
        took[7]
    };
    println!(
        "one by one: scopes {:?}, directories {:?}",
        one_by_one("psbtest.slice"),
        one_by_one("/psbtest")
    );
}

fn there_and_back(plan: Plan) -> Duration {
    let begun = Instant::now();
    let pause = start(&plan);
    let started = begun.elapsed();
    in_scope(&*pause, &plan);
    let begun = Instant::now();
    end(&*pause);
    DRIVER.cleanup(&plan.cgroup_ref()).unwrap();
    let took = started + begun.elapsed();
    nothing_left(&plan);
    took
}

#[test]
fn the_bus_may_be_restarted() {
    let _alone = alone();
    let first = plan();
    end(&*start(&first));
    DRIVER.cleanup(&first.cgroup_ref()).unwrap();
    run("systemctl", &["restart", "dbus.service"]);
    let plan = plan();
    // systemd itself takes a moment to be back on the bus.
    let mut started = None;
    eventually("pods start again", || {
        started = DRIVER.start(&plan).ok();
        started.is_some()
    });
    let pause = started.unwrap();
    in_scope(&*pause, &plan);
    end(&*pause);
    DRIVER.cleanup(&plan.cgroup_ref()).unwrap();
    nothing_left(&plan);
}
