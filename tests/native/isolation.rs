//! The pause process's view of the node, and the node's view of it.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::Command;

use pause_sandboxer::pause::Driver as _;
use pause_sandboxer::pause::native::is_network_namespace;
use pause_sandboxer::pause::{Namespace, Plan};

use crate::fixture::{
    DRIVER, Netns, Parent, Running, among_others, eventually, own_namespace, own_oom_score, plan,
};

/// Promise: pause_is_confined.
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

/// Promise: pause_is_confined.
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

/// Promise: pods_equal_the_builtins.
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

/// Promise: removal_leaves_nothing.
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

/// Promise: invalid_request_names_the_field.
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
