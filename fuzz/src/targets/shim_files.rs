//! Files and strings of requests that the pods' own shim reads: the first byte selects the kind.

use std::path::{Component, Path};

use runc_shim::fuzzing::{
    cgroup, cgroup_in_hierarchy, config, id_map, last_error, logging_program, mount_options,
    shorten,
};

use super::{Seeds, assert_told};

pub fn run(input: &[u8]) {
    let Some((kind, content)) = input.split_first() else { return };
    let Ok(text) = std::str::from_utf8(content) else { return };
    match kind {
        1 => of_log(text),
        2 => of_mount_options(text),
        3 => of_lower_directories(text),
        4 => of_id_map(text),
        5 => of_cgroup(text),
        6 => of_cgroups_path(text),
        7 => drop(config(content)),
        8 => of_uri(text),
        _ => {}
    }
}

fn of_log(text: &str) {
    if let Some(error) = last_error(text) {
        assert_eq!(error, error.trim());
        assert!(error.len() <= text.len());
    }
}

/// An option is a flag or data; one for containerd's mount manager is refused.
fn of_mount_options(text: &str) {
    let options: Vec<String> = text.split('\n').map(str::to_owned).collect();
    let internal = options.iter().any(|option| option.starts_with("X-containerd."));
    match mount_options(&options) {
        Ok((_, data)) => {
            assert!(!internal);
            assert!(data.iter().all(|one| options.contains(one)));
        }
        Err(e) => {
            assert!(internal);
            assert!(!e.is_empty());
        }
    }
}

/// The directories are the same, relative to the one in which they are.
fn of_lower_directories(text: &str) {
    let before = vec![format!("lowerdir={text}")];
    let mut after = before.clone();
    match shorten(&mut after) {
        Some(common) => {
            let relative = after[0].strip_prefix("lowerdir=").expect("it stays the option");
            let common = common.to_str().expect("it is text");
            let back: Vec<String> =
                relative.split(':').map(|dir| format!("{common}/{dir}")).collect();
            assert_eq!(back.join(":"), text);
        }
        None => assert_eq!(before, after),
    }
}

fn of_id_map(text: &str) {
    match id_map(text) {
        Ok(lines) => {
            assert_eq!(lines.lines().count(), text.split(',').count());
            for line in lines.lines() {
                let numbers: Vec<u32> =
                    line.split(' ').map(|word| word.parse().expect("a number")).collect();
                assert_eq!(numbers.len(), 3);
            }
        }
        Err(e) => assert_told(&e),
    }
}

/// Wherever a process says that it is, it is in the hierarchies.
fn of_cgroup(text: &str) {
    let root = Path::new("/sys/fs/cgroup");
    for unified in [true, false] {
        for path in cgroup(text, root, unified) {
            let inside = path.strip_prefix(root).expect("it is below the root");
            assert!(inside.components().all(|part| part != Component::ParentDir), "{path:?}");
        }
    }
}

/// A cgroup that is removed with a container has its name.
fn of_cgroups_path(text: &str) {
    if let Some(path) = cgroup_in_hierarchy(text, "id0") {
        assert!(path.is_relative());
        assert!(path.components().all(|part| matches!(part, Component::Normal(_))), "{path:?}");
        let name = path.file_name().and_then(|name| name.to_str()).expect("it has a name");
        assert!(name == "id0" || name.ends_with("-id0.scope"), "{name}");
    }
}

fn of_uri(text: &str) {
    match logging_program(text) {
        Ok(arguments) => {
            assert!(arguments[0].starts_with(b"/") || arguments[0].is_empty());
            assert!(arguments.iter().all(|argument| !argument.contains(&0)));
        }
        Err(e) => assert_told(&e),
    }
}

pub fn seeds() -> Seeds {
    let input = |kind: u8, content: &str| [&[kind], content.as_bytes()].concat();
    let log = "{\"level\":\"error\",\"msg\":\" one \",\"time\":\"t\"}\n{\"level\":\"warning\"}\n";
    let spec = r#"{"linux":{"namespaces":[{"type":"pid"},{"type":"ipc","path":"/proc/1/ns/ipc"}],
"cgroupsPath":"/a/id0"},"process":{"args":["a"]}}"#;
    vec![
        ("log".into(), input(1, log)),
        ("options".into(), input(2, "rbind\nro\nuidmap=0:1:2\nlowerdir=/a:/b\nloop")),
        ("options-internal".into(), input(2, "X-containerd.mkdir.path=/a")),
        ("lower".into(), input(3, "/var/s/12/fs:/var/s/1/fs:/var/s/13/fs")),
        ("lower-apart".into(), input(3, "/a/b:/c/d")),
        ("id-map".into(), input(4, "0:65536:1000,1000:0:1")),
        ("cgroup-v1".into(), input(5, "5:cpu,cpuacct:/a/b\n4:memory:/a/b\n1:name=systemd:/s\n")),
        ("cgroup-v2".into(), input(5, "0::/a/b\n")),
        ("cgroup-outside".into(), input(5, "0::/../a\n4:memory:/../b\n")),
        ("cgroups-path".into(), input(6, "/kubepods/pod1/id0")),
        ("cgroups-path-systemd".into(), input(6, "kubepods-pod1.slice:cri-containerd:id0")),
        ("config".into(), input(7, spec)),
        ("uri".into(), input(8, "/usr/bin/log%20ger?--id=a%2Fb+c&-v")),
    ]
}
