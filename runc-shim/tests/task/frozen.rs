//! Containers that are frozen although containerd has not paused them.

use crate::pod::{Container, Pod, eventually, exists};

/// Freezes the cgroup of a process, as a node agent does, or a privileged container itself.
fn freeze(pid: u32) {
    let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    let (controller, file, frozen) = if has_freezer() {
        ("freezer", "freezer.state", "FROZEN")
    } else {
        ("", "cgroup.freeze", "1")
    };
    let line = text.lines().find(|line| line.split(':').nth(1) == Some(controller)).unwrap();
    let path = line.splitn(3, ':').nth(2).unwrap().trim_start_matches('/');
    let root = std::path::Path::new("/sys/fs/cgroup").join(controller).join(path);
    std::fs::write(root.join(file), frozen).unwrap();
    if has_freezer() {
        let state = || std::fs::read_to_string(root.join(file)).unwrap();
        eventually("frozen", || (state().trim() == frozen).then_some(()));
    }
}

/// Whether the node has the freezer of version 1. Version 2 ends what is killed while it is frozen.
fn has_freezer() -> bool {
    std::fs::read_to_string("/proc/self/cgroup").unwrap().contains(":freezer:")
}

#[test]
fn a_container_that_was_frozen_by_another_program_is_killed() {
    if !has_freezer() {
        kit::skip("no freezer of version 1 on this machine; cgroup.freeze is tried all the same");
    }
    let mut pod = Pod::new();
    for host_pids in [false, true] {
        let with = Container { host_pids, ..Default::default() };
        let pid = pod.run("a", "sleep 1000 & exec sleep 1000", &with);
        // Version 1 never freezes a process of several threads, such as runc's, that executes a
        // program.
        eventually("its program", || {
            let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap();
            (name == "sleep\n").then_some(())
        });
        freeze(pid);
        pod.end("a");
        assert!(!exists(format!("/proc/{pid}")));
    }
    pod.shut_down();
}
