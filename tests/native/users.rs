//! Pause processes in a user namespace.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::Command;

use nix::sys::signal::Signal;
use pause_sandboxer::pause::{IdMapping, Namespace, Plan, UserNamespace};

use crate::fixture::{
    Netns, Parent, Running, among_others, eventually, exit_of, own_namespace, own_oom_score, plan,
};

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

/// Promise: pods_equal_the_builtins.
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

/// Promise: pause_is_confined.
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
