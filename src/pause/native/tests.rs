use std::fs;

use nix::mount::{MntFlags, MsFlags, mount, umount2};

use super::*;

fn plan(id: &str, cgroup_parent: &str) -> Plan {
    let score = fs::read_to_string("/proc/self/oom_score_adj").unwrap();
    Plan {
        hostname: "pod".to_owned(),
        cgroup_parent: cgroup_parent.to_owned(),
        oom_score_adj: score.trim().parse().unwrap(),
        ..Plan::new(format!("{id}-{}", std::process::id()).try_into().unwrap())
    }
}

/// No mount of this namespace is passed on.
fn private_mounts() {
    let flags = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount(None::<&str>, "/", None::<&str>, flags, None::<&str>).unwrap();
}

/// The kernel resumes the parent a moment before execve(2) is finished.
fn await_program(process: &str) {
    while fs::read(format!("{process}/cmdline")).unwrap().is_empty() {
        std::thread::yield_now();
    }
}

#[test]
fn is_born_in_its_cgroup_of_version_2() {
    if kit::skip_without_root() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    mount(Some("none"), root, Some("cgroup2"), MsFlags::empty(), None::<&str>).unwrap();
    let driver = Native::with(Cgroups::unified_at(root).unwrap(), binary::open().unwrap()).unwrap();
    let parent = format!("pause-sandboxer-v2-{}", std::process::id());
    let plan = plan("v2", &format!("/{parent}/below"));
    let mapping = IdMapping { container_id: 0, host_id: 1_000_000, length: 65536 };
    let user = super::super::UserNamespace { uid: mapping, gid: mapping };
    for plan in [plan.clone(), Plan { userns: Some(user), ..plan.clone() }] {
        let pause = driver.start(&plan).unwrap();
        let path = format!("/{parent}/below/{}", plan.id);
        let cgroups = fs::read_to_string(format!("/proc/{}/cgroup", pause.identity().pid)).unwrap();
        assert!(cgroups.lines().any(|line| line == format!("0::{path}")), "{cgroups}");
        // The cleanup also ends the processes in it.
        driver.cleanup(&plan.cgroup_ref()).unwrap();
        assert!(!root.join(&path[1..]).exists());
    }
    let failing = Plan { hostname: "h".repeat(65), ..plan };
    assert_eq!(driver.start(&failing).unwrap_err().what(), "set hostname");
    let below = root.join(&parent).join("below");
    assert!(fs::read_dir(&below).unwrap().all(|entry| !entry.unwrap().path().is_dir()));
    fs::remove_dir(&below).unwrap();
    fs::remove_dir(root.join(&parent)).unwrap();
    assert_eq!(driver.start(&failing).unwrap_err().what(), "set hostname");
    assert!(!root.join(&parent).exists(), "parents that a failed start has made");
    umount2(root, MntFlags::MNT_DETACH).unwrap();
}

/// The error of a Start in a cgroup below `parent`, a directory of its own in the freezer's
/// hierarchy at `root`.
fn refused_below(driver: &Native, root: &Path, parent: &str) -> String {
    let plan = plan("frozen", &format!("/{parent}/below"));
    let refused = driver.start(&plan).unwrap_err().to_string();
    let below = root.join(parent);
    assert!(
        fs::read_dir(&below).unwrap().all(|entry| !entry.unwrap().path().is_dir()),
        "{refused}"
    );
    assert!(driver.cleanup(&plan.cgroup_ref()).is_ok());
    refused.replace(below.to_str().unwrap(), "")
}

#[test]
fn no_pause_is_put_into_a_frozen_cgroup_of_version_2() {
    if kit::skip_without_root() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    mount(Some("none"), root, Some("cgroup2"), MsFlags::empty(), None::<&str>).unwrap();
    let parent = format!("pause-sandboxer-frozen-v2-{}", std::process::id());
    fs::create_dir(root.join(&parent)).unwrap();
    fs::write(root.join(&parent).join("cgroup.freeze"), "1").unwrap();
    let driver = Native::with(Cgroups::unified_at(root).unwrap(), binary::open().unwrap()).unwrap();
    let refused = refused_below(&driver, root, &parent);
    let id = format!("frozen-{}", std::process::id());
    assert_eq!(
        refused,
        format!("place the pause process in cgroup /below/{id}: it or an ancestor is frozen")
    );
    fs::remove_dir(root.join(&parent)).unwrap();
    umount2(root, MntFlags::MNT_DETACH).unwrap();
}

#[test]
fn no_pause_is_put_into_a_frozen_cgroup_of_version_1() {
    if kit::skip_without_root() {
        return;
    }
    let root = Path::new("/sys/fs/cgroup/freezer");
    if !root.exists() {
        kit::skip("no freezer of version 1 on this machine");
        return;
    }
    let parent = format!("pause-sandboxer-frozen-v1-{}", std::process::id());
    let cgroup = root.join(&parent);
    fs::create_dir(&cgroup).unwrap();
    fs::write(cgroup.join("freezer.state"), "FROZEN").unwrap();
    let driver = Native::with(Cgroups::find().unwrap(), binary::open().unwrap()).unwrap();
    let refused = refused_below(&driver, root, &parent);
    assert!(refused.ends_with(": it or an ancestor is frozen"), "{refused}");
    // Parents that the failed start has made.
    for hierarchy in ["cpu", "memory", "pids"] {
        assert!(!root.with_file_name(hierarchy).join(&parent).exists(), "{hierarchy}");
    }
    fs::write(cgroup.join("freezer.state"), "THAWED").unwrap();
    let plan = plan("thawed", &format!("/{parent}"));
    driver.start(&plan).unwrap().kill().unwrap();
    // The cleanup fails until the process has ended.
    let begun = Instant::now();
    while let Err(left) = driver.cleanup(&plan.cgroup_ref()) {
        assert!(begun.elapsed().as_secs() < 30, "{left:?}");
    }
    for hierarchy in driver.cgroups.v1_roots() {
        let path = CString::new(parent.as_str()).unwrap();
        let _ = rustix::fs::unlinkat(hierarchy, &path, rustix::fs::AtFlags::REMOVEDIR);
    }
    assert!(!cgroup.exists());
}

#[tokio::test]
async fn a_kill_ends_a_pause_that_is_frozen() {
    if kit::skip_without_root() {
        return;
    }
    let root = Path::new("/sys/fs/cgroup/freezer");
    if !root.exists() {
        kit::skip("no freezer of version 1 on this machine");
        return;
    }
    let driver = Native::with(Cgroups::find().unwrap(), binary::open().unwrap()).unwrap();
    let plan = plan("frozen-kill", "/");
    let pause = driver.start(&plan).unwrap();
    // A process that an earlier daemon has started is adopted too.
    let Adoption::Alive(adopted) = driver.adopt(&plan.cgroup_ref(), pause.identity()) else {
        panic!("it is not adopted")
    };
    let state = root.join(&*plan.id).join("freezer.state");
    fs::write(&state, "FROZEN").unwrap();
    adopted.kill().and_then(|()| adopted.thaw()).unwrap();
    let exit = tokio::time::timeout(std::time::Duration::from_secs(30), pause.exited()).await;
    assert_eq!(exit.expect("it has not exited").status, 137);
    assert_eq!(fs::read_to_string(&state).unwrap().trim(), "FROZEN", "the cgroup is as it was");
    driver.cleanup(&plan.cgroup_ref()).unwrap();
}

#[test]
fn a_cleanup_ends_what_is_frozen() {
    if kit::skip_without_root() {
        return;
    }
    let root = Path::new("/sys/fs/cgroup/freezer");
    if !root.exists() {
        kit::skip("no freezer of version 1 on this machine");
        return;
    }
    let driver = Native::with(Cgroups::find().unwrap(), binary::open().unwrap()).unwrap();
    let plan = plan("held", "/");
    let pause = driver.start(&plan).unwrap();
    let cgroup = root.join(&*plan.id);
    fs::write(cgroup.join("freezer.state"), "FROZEN").unwrap();
    pause.kill().unwrap();
    // Tried again, as by a sandbox's owner: a pause process has the least CPU weight, and so ends
    // late on a busy machine.
    let begun = Instant::now();
    while let Err(left) = driver.cleanup(&plan.cgroup_ref()) {
        assert!(begun.elapsed().as_secs() < 30, "{left:?}");
    }
    assert!(!cgroup.exists());
}

#[test]
fn the_users_other_processes_count_for_nothing() {
    if kit::skip_without_root() {
        return;
    }
    use nix::sys::resource::{Resource, getrlimit, setrlimit};

    let driver = Native::with(Cgroups::find().unwrap(), binary::open().unwrap()).unwrap();
    let (soft, hard) = getrlimit(Resource::RLIMIT_NPROC).unwrap();
    // No limit for root, as which all else here runs.
    setrlimit(Resource::RLIMIT_NPROC, 1, hard).unwrap();
    let started = ["first", "second", "third"].map(|id| driver.start(&plan(id, "")));
    setrlimit(Resource::RLIMIT_NPROC, soft, hard).unwrap();
    for pause in started {
        pause.unwrap().kill().unwrap();
    }
}

#[test]
fn the_daemon_is_not_dumpable_after_a_start() {
    if kit::skip_without_root() {
        return;
    }
    const SETTING: &str = "/proc/sys/fs/suid_dumpable";
    let before = fs::read_to_string(SETTING).unwrap();
    let driver = Native::with(Cgroups::find().unwrap(), binary::open().unwrap()).unwrap();
    let mapping = IdMapping { container_id: 0, host_id: 1_000_000, length: 65536 };
    let plans = [None, Some(super::super::UserNamespace { uid: mapping, gid: mapping })]
        .map(|userns| Plan { userns, ..plan("dumpable", "") });
    fs::write(SETTING, "1").unwrap();
    let started = plans.map(|plan| (driver.start(&plan), nix::sys::prctl::get_dumpable().unwrap()));
    fs::write(SETTING, before).unwrap();
    for (pause, dumpable) in started {
        pause.unwrap().kill().unwrap();
        assert!(!dumpable);
    }
}

/// In a mount namespace of its own, so that the node is of version 2 for this thread alone.
#[test]
fn a_controller_of_version_1_elsewhere_leaves_a_node_of_version_2_as_it_is() {
    if kit::skip_without_root() {
        return;
    }
    let placed = std::thread::spawn(|| {
        let (elsewhere, none) = (tempfile::tempdir().unwrap(), None::<&str>);
        sys::unshare(libc::CLONE_NEWNS).unwrap();
        private_mounts();
        mount(none, "/sys/fs/cgroup", Some("cgroup2"), MsFlags::empty(), none).unwrap();
        mount(none, elsewhere.path(), Some("cgroup"), MsFlags::empty(), Some("pids")).unwrap();
        let driver = Native::with(Cgroups::find().unwrap(), binary::open().unwrap()).unwrap();
        let parent = format!("pause-sandboxer-beside-{}", std::process::id());
        let plan = plan("beside", &format!("/{parent}"));
        let pause = driver.start(&plan).unwrap();
        let cgroups = fs::read_to_string(format!("/proc/{}/cgroup", pause.identity().pid)).unwrap();
        driver.cleanup(&plan.cgroup_ref()).unwrap();
        fs::remove_dir(Path::new("/sys/fs/cgroup").join(&parent)).unwrap();
        umount2(elsewhere.path(), MntFlags::MNT_DETACH).unwrap();
        (format!("/{parent}/{}", plan.id), cgroups)
    });
    let (path, cgroups) = placed.join().unwrap();
    let within: Vec<&str> = cgroups.lines().filter(|line| line.ends_with(&path)).collect();
    assert_eq!(within, [format!("0::{path}")], "{cgroups}");
}

#[test]
fn starts_from_a_file_where_memfds_cannot_be_executed() {
    if kit::skip_without_root() {
        return;
    }
    let driver = Native::with(Cgroups::find().unwrap(), binary::unlinked().unwrap()).unwrap();
    let pause = driver.start(&plan("file", "")).unwrap();
    let process = format!("/proc/{}", pause.identity().pid);
    await_program(&process);
    let status = fs::read_to_string(format!("{process}/status")).unwrap();
    assert!(
        status.contains("CapPrm:\t0000000000000000\n") && status.contains("Seccomp:\t2\n"),
        "{status}"
    );
    assert_eq!(fs::read_dir(format!("{process}/fd")).unwrap().count(), 0);
    let exe = fs::read_link(format!("{process}/exe")).unwrap();
    assert!(exe.ends_with("pause"), "{exe:?}");
    pause.kill().unwrap();
}

#[test]
fn starts_where_the_kernel_cannot_close_at_the_exec() {
    if kit::skip_without_root() {
        return;
    }
    let started = std::thread::spawn(|| {
        sys::filter::without_close_at_execute(libc::EINVAL);
        let driver = Native::with(Cgroups::find().unwrap(), binary::open().unwrap()).unwrap();
        driver.start(&plan("old", "")).unwrap()
    });
    let pause = started.join().unwrap();
    let process = format!("/proc/{}", pause.identity().pid);
    await_program(&process);
    assert_eq!(fs::read_dir(format!("{process}/fd")).unwrap().count(), 0);
    pause.kill().unwrap();
}

#[test]
fn orphans_are_killed_by_the_daemon_of_their_state_directory_alone() {
    if kit::skip_without_root() {
        return;
    }
    let (own, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for make in [binary::sealed, binary::unlinked] {
        let driver = || Native::with(Cgroups::find().unwrap(), make().unwrap()).unwrap();
        let plan = plan("stray", "");
        let pause = driver().for_state_dir(own.path()).start(&plan).unwrap();
        let lives = || fs::read_link(format!("/proc/{}/exe", pause.identity().pid)).is_ok();
        let stray = |id: &str| id != plan.id.as_str();
        driver().for_state_dir(other.path()).kill_orphans(&|_| false).unwrap();
        driver().for_state_dir(own.path()).kill_orphans(&|id| !stray(id)).unwrap();
        assert!(lives());
        driver().for_state_dir(own.path()).kill_orphans(&stray).unwrap();
        assert!(!lives());
    }
}

#[test]
fn the_pause_has_the_last_mapped_id_if_65535_is_not_mapped() {
    let mapping = |container_id, length| IdMapping { container_id, host_id: 1, length };
    assert_eq!(pause_id(mapping(0, 65536)), 65535);
    assert_eq!(pause_id(mapping(0, 1 << 20)), 65535);
    assert_eq!(pause_id(mapping(0, 1000)), 999);
    assert_eq!(pause_id(mapping(70_000, 10)), 70_009);
    assert_eq!(pause_id(mapping(0, 0)), 0);
}
