//! Files of `/proc`: the first byte selects the file, the rest is its content.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use pause_sandboxer::cgroup::mounts::{self, Hierarchy};
use pause_sandboxer::process::fuzzing::stat;
use pause_sandboxer::shim::fuzzing::{below, containers, is_outermost};

use super::Seeds;

pub fn run(input: &[u8]) {
    match input.split_first() {
        Some((0, content)) => of_stat(content),
        Some((1, content)) => of_mountinfo(content),
        Some((2, content)) => of_cgroup(content),
        _ => {}
    }
}

/// Whatever the process calls itself, the fields are those behind its name.
fn of_stat(content: &[u8]) {
    let Some((state, start_time, exit_status)) = stat(content) else { return };
    let mut named = b"42 (a) Z 0 0) ".to_vec();
    let name = content.iter().rposition(|byte| *byte == b')').expect("there is a name");
    named.extend_from_slice(&content[name..]);
    assert_eq!(stat(&named), Some((state, start_time, exit_status)));
    let fields: Vec<&str> = std::str::from_utf8(&content[name + 1..])
        .expect("it is text")
        .split_ascii_whitespace()
        .collect();
    assert_eq!(fields.first().map(|field| field.as_bytes()[0]), Some(state));
    assert_eq!(fields.get(19).and_then(|field| field.parse().ok()), Some(start_time));
    assert_eq!(fields.get(49).and_then(|field| field.parse().ok()), Some(exit_status));
}

/// Each hierarchy is one of a line, once, and there is one that has a controller if there is any.
fn of_mountinfo(content: &[u8]) {
    let hierarchies = mounts::parse(content, Path::new("/sys/fs/cgroup"));
    let lines = content.split(|byte| *byte == b'\n').count();
    assert!(hierarchies.len() <= lines);
    assert!(
        hierarchies.is_empty()
            || hierarchies.iter().any(|hierarchy| !hierarchy.controllers.is_empty())
    );
    for Hierarchy { point, controllers } in hierarchies {
        assert!(point.as_os_str().as_bytes().len() <= content.len());
        assert!(
            !controllers.iter().any(|name| name.contains([',', '=', ' ', '\n'])),
            "{controllers:?}"
        );
    }
}

/// Only the cgroup of a container and those below it end with the container, whatever cgroups a
/// process claims to be in.
fn of_cgroup(content: &[u8]) {
    let Ok(text) = std::str::from_utf8(content) else { return };
    let mount = Path::new("/sys/fs/cgroup");
    for id in containers(text) {
        assert_eq!(id.len(), 64);
        assert!(id.bytes().all(|byte| byte.is_ascii_hexdigit()), "{id}");
        let paths = || text.lines().map(|line| line.splitn(3, ':').nth(2).unwrap_or_default());
        // With a node that is in all of them.
        let is_own = paths().any(|path| is_outermost(path, id, text));
        assert!(is_own || text.contains('\u{fffd}'), "{id} names a cgroup that is not its own");
        for path in paths() {
            for cgroup in below(mount, path, id) {
                let inside = cgroup.strip_prefix(mount).expect("it is below the mount point");
                assert!(inside.components().all(|part| part.as_os_str() != ".."), "{cgroup:?}");
                assert!(cgroup.to_string_lossy().contains(id), "{cgroup:?} is not of {id}");
            }
        }
    }
}

pub fn seeds() -> Seeds {
    let input = |kind: u8, content: &str| [&[kind], content.as_bytes()].concat();
    let stat = "4711 (a) R (b) S 1 4711 4711 0 -1 4194560 96 0 0 0 0 0 0 0 20 0 1 0 123456 1048576 \
        12 \
        18446744073709551615 1 1 0 0 0 0 0 0 65536 0 0 0 17 0 0 0 0 0 0 0 0 0 0 0 0 0 9\n";
    let v1 = "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
        33 31 0:31 / /sys/fs/cgroup/cpuset rw shared:9 - cgroup cgroup rw,cpuset\n\
        34 31 0:31 / /mnt/again rw - cgroup cgroup rw,cpuset\n\
        35 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd\n\
        36 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
    let v2 =
        "36 31 0:38 / /sys/fs/c\\040group rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
    let id = "0123456789abcdef".repeat(4);
    vec![
        ("stat".into(), input(0, stat)),
        ("stat-zombie".into(), input(0, &stat.replace(") S", ") Z"))),
        ("stat-short".into(), input(0, "42 (pause) S 1 2")),
        ("mountinfo-hybrid".into(), input(1, v1)),
        ("mountinfo-unified".into(), input(1, v2)),
        ("cgroup-v1".into(), input(2, &format!("2:cpu:/\n1:name=systemd:/kubepods/pod1/{id}/b\n"))),
        (
            "cgroup-systemd".into(),
            input(2, &format!("0::/kubepods.slice/cri-containerd-{id}.scope\n")),
        ),
        ("cgroup-session".into(), input(2, "0::/user.slice/user-0.slice/session-3.scope\n")),
    ]
}
