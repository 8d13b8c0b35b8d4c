//! Root file systems.

use std::sync::atomic::{AtomicBool, Ordering};

use containerd_shim_protos::api::*;
use containerd_shim_protos::ttrpc::Code;
use rustix::mount::MountFlags;

use crate::pod::{self, Container, Pod, code, exists};

#[test]
fn root_file_systems_are_mounted_and_unmounted() {
    let mut pod = Pod::new();
    let lower = pod.path("root");
    let layers: Vec<String> =
        (0..110).map(|number| pod.path(&format!("layers/{number:0>20}"))).collect();
    for dir in layers.iter().chain([&pod.path("upper"), &pod.path("work")]) {
        std::fs::create_dir_all(dir).unwrap();
    }
    let overlay = |dirs: &[String], more: &[&str]| {
        let mut mount = Mount::new();
        (mount.type_, mount.source) = ("overlay".to_owned(), "overlay".to_owned());
        mount.options = vec![format!("lowerdir={}", dirs.join(":"))];
        mount.options.extend(more.iter().map(|option| (*option).to_owned()));
        mount
    };
    let mounts = || std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    // Longer than the kernel takes at once.
    let mut dirs = layers.clone();
    dirs.push(lower.clone());
    assert!(dirs.join(":").len() > 4096);
    let with = Container { rootfs: vec![overlay(&dirs, &["ro"])], ..Default::default() };
    let rootfs = pod.bundle("a").join("rootfs").display().to_string();
    pod.run("a", "exit 3", &with);
    assert!(mounts().contains(&rootfs));
    assert_eq!(pod.wait("a", "").unwrap(), 3);
    pod.delete("a", "").unwrap();
    assert!(!mounts().contains(&rootfs));

    let with = Container {
        rootfs: vec![overlay(
            &[lower.clone(), layers[0].clone()],
            &["uidmap=0:70000:65536", "gidmap=0:70000:65536"],
        )],
        ..Default::default()
    };
    pod.create("b", "true", &with);
    use std::os::unix::fs::MetadataExt as _;
    let rootfs = pod.bundle("b").join("rootfs");
    assert_eq!(std::fs::metadata(rootfs.join("bin/busybox")).unwrap().uid(), 70000);
    assert!(!exists(pod.bundle("b").join("idmapped")));
    pod.kill("b", "", 9).unwrap();
    pod.wait("b", "").unwrap();
    pod.delete("b", "").unwrap();

    let mut refused = overlay(&dirs, &["X-containerd.mkdir.path=/a"]);
    let with = Container { rootfs: vec![refused.clone()], ..Default::default() };
    let error = pod.try_create("c", "true", &with).unwrap_err();
    assert_eq!(code(&error), Code::INVALID_ARGUMENT);
    // The mounts before the one that fails are undone.
    refused.options = vec!["lowerdir=/no/such".to_owned()];
    let with = Container { rootfs: vec![overlay(&dirs, &["ro"]), refused], ..Default::default() };
    pod.try_create("c", "true", &with).unwrap_err();
    assert!(!mounts().contains(&pod.bundle("c").display().to_string()));
    pod.shut_down();
}

/// The loop devices of a file, and whether they refuse writes.
fn loop_devices_of(image: &str) -> Vec<bool> {
    let devices = std::fs::read_dir("/sys/block").unwrap().flatten();
    let is_read_only = |device: std::fs::DirEntry| {
        let file = std::fs::read_to_string(device.path().join("loop/backing_file")).ok()?;
        let read_only = std::fs::read_to_string(device.path().join("ro")).ok()?;
        (file.trim() == image).then(|| read_only.trim() == "1")
    };
    devices.filter_map(is_read_only).collect()
}

/// As containerd's blockfile snapshotter has them.
#[test]
fn a_root_file_system_in_an_image_gets_a_loop_device_as_long_as_it_is_mounted() {
    let mut pod = Pod::new();
    let image = pod.path("image");
    std::fs::File::create(&image).unwrap().set_len(32 << 20).unwrap();
    let mut command = std::process::Command::new("mkfs.ext4");
    let made = command.args(["-q", "-d", &pod.path("root"), &image]).status();
    if !exists("/dev/loop-control") || !made.is_ok_and(|status| status.success()) {
        kit::skip("no loop devices, or no mkfs.ext4");
        return;
    }
    let with = |options: &[&str]| {
        let mut mount = Mount::new();
        (mount.type_, mount.source) = ("ext4".to_owned(), image.clone());
        mount.options = options.iter().map(|option| (*option).to_owned()).collect();
        Container { rootfs: vec![mount], ..Default::default() }
    };
    pod.run("a", "exit 3", &with(&["rw", "loop", "direct-io"]));
    assert_eq!(loop_devices_of(&image), [false]);
    std::fs::write(pod.bundle("a").join("rootfs/written"), "").unwrap();
    assert_eq!(pod.wait("a", "").unwrap(), 3);
    pod.delete("a", "").unwrap();
    pod::eventually("its end", || loop_devices_of(&image).is_empty().then_some(()));
    // They compete for the free devices.
    let names: Vec<String> = (0..8).map(|number| format!("b{number}")).collect();
    std::thread::scope(|scope| {
        for name in &names {
            scope.spawn(|| pod.create(name, "true", &with(&["ro", "loop"])));
        }
    });
    assert_eq!(loop_devices_of(&image), [true; 8]);
    for name in &names {
        assert!(exists(pod.bundle(name).join("rootfs/written")));
        pod.delete(name, "").unwrap();
    }
    pod::eventually("their end", || loop_devices_of(&image).is_empty().then_some(()));
    // The device of a mount that fails is free again.
    let error = pod.try_create("c", "true", &with(&["loop", "no-such"])).unwrap_err().to_string();
    assert!(error.contains("Invalid argument"), "{error}");
    let mut missing = with(&["loop"]);
    missing.rootfs[0].source = pod.path("missing");
    let error = pod.try_create("c", "true", &missing).unwrap_err().to_string();
    assert!(error.contains("missing: No such file"), "{error}");
    pod::eventually("their end", || loop_devices_of(&image).is_empty().then_some(()));
    pod.shut_down();
}

#[test]
fn a_mount_does_not_leave_the_root_by_a_link_of_the_image() {
    let mut pod = Pod::new();
    let (image, outside) = (pod.path("image"), pod.path("outside"));
    for dir in [&pod.path("layer"), &image, &outside, &format!("{image}{outside}")] {
        std::fs::create_dir_all(dir).unwrap();
    }
    std::os::unix::fs::symlink(&outside, format!("{image}/link")).unwrap();
    let mut overlay = Mount::new();
    (overlay.type_, overlay.source) = ("overlay".to_owned(), "overlay".to_owned());
    overlay.options = vec![format!("lowerdir={image}:{}:{}", pod.path("root"), pod.path("layer"))];
    let mut inner = Mount::new();
    (inner.type_, inner.source) = ("tmpfs".to_owned(), "tmpfs".to_owned());
    inner.target = "link".to_owned();
    let with = Container { rootfs: vec![overlay, inner], ..Default::default() };
    pod.create("a", "true", &with);
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let points: Vec<&str> = mounts.lines().filter_map(|line| line.split(' ').nth(4)).collect();
    let inside = format!("{}/rootfs{outside}", pod.bundle("a").display());
    assert!(points.contains(&inside.as_str()) && !points.contains(&outside.as_str()));
    pod.end("a");
    assert!(!std::fs::read_to_string("/proc/self/mountinfo").unwrap().contains(&inside));
    pod.shut_down();
}

#[test]
fn mounts_of_a_bundle_behind_a_link_are_undone() {
    let mut pod = Pod::new();
    let real = pod.path("real");
    for dir in [&real, &pod.path("layer")] {
        std::fs::create_dir(dir).unwrap();
    }
    std::os::unix::fs::symlink(&real, pod.bundle("a")).unwrap();
    let mut overlay = Mount::new();
    (overlay.type_, overlay.source) = ("overlay".to_owned(), "overlay".to_owned());
    overlay.options = vec![format!("lowerdir={}:{}", pod.path("root"), pod.path("layer"))];
    let with = Container { rootfs: vec![overlay], ..Default::default() };
    let mounted = || std::fs::read_to_string("/proc/self/mountinfo").unwrap().contains(&real);
    pod.run("a", "exit 3", &with);
    assert!(mounted());
    assert_eq!(pod.wait("a", "").unwrap(), 3);
    pod.delete("a", "").unwrap();
    assert!(!mounted());
    pod.shut_down();
}

/// The root file system, a volume and the standard streams of a container whose root is another
/// user of the node.
#[test]
fn a_user_namespace_has_mapped_mounts_and_its_own_streams() {
    if !pod::is_runc() {
        kit::skip("only runc maps users of mounts here");
        return;
    }
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt};
    let mut pod = Pod::new();
    std::fs::set_permissions(pod.dir.path(), PermissionsExt::from_mode(0o711)).unwrap();
    for dir in ["layer", "data", "upper", "work"] {
        std::fs::create_dir(pod.path(dir)).unwrap();
    }
    let mut overlay = Mount::new();
    (overlay.type_, overlay.source) = ("overlay".to_owned(), "overlay".to_owned());
    overlay.options = vec![
        format!("lowerdir={}:{}", pod.path("root"), pod.path("layer")),
        "uidmap=0:70000:65536".to_owned(),
        "gidmap=0:70000:65536".to_owned(),
    ];
    let (out, err) = (pod.fifo("out"), pod.fifo("err"));
    let stdout = pod::reader(&out);
    let mut with = Container { stdout: out, stderr: err, ..Default::default() };
    (with.rootfs, with.root_is) = (vec![overlay], Some(70000));
    (with.options.io_uid, with.options.io_gid) = (70000, 70000);
    let script = "id -u >/dev/stdout; ls -n /bin/busybox | { read a b user rest; echo $user; }; \
                  echo x >/tmp/file; ls -n /tmp/file | { read a b user rest; echo $user; }; \
                  exec sleep 1000";
    let pid = pod.run("a", script, &with);
    let map = std::fs::read_to_string(format!("/proc/{pid}/uid_map")).unwrap();
    assert_eq!(map.split_whitespace().collect::<Vec<_>>(), ["0", "70000", "65536"]);
    let written = pod.path("data/file");
    pod::eventually("a file", || std::fs::metadata(&written).ok().filter(|file| file.uid() == 0));
    pod.exec("a", "e", "exit $(id -u)", &Container::default()).unwrap();
    pod.start("a", "e").unwrap();
    assert_eq!(pod.wait("a", "e").unwrap(), 0);
    pod.end("a");
    assert_eq!(String::from_utf8(stdout.join().unwrap()).unwrap(), "0\n0\n0\n");
    let rootfs = pod.bundle("a").join("rootfs").display().to_string();
    assert!(!std::fs::read_to_string("/proc/self/mountinfo").unwrap().contains(&rootfs));
    pod.shut_down();
}

/// As systemd has them on every node: a mount shows in each copy of the mount that it is in, and
/// goes with each.
#[test]
fn a_mapped_root_file_system_stays_where_mounts_are_shared() {
    use rustix::mount::{MountPropagationFlags, UnmountFlags, mount_bind, mount_change, unmount};
    let mut pod = Pod::new();
    let dir = pod.dir.path().to_owned();
    mount_bind(&dir, &dir).unwrap();
    mount_change(&dir, MountPropagationFlags::SHARED).unwrap();
    std::fs::create_dir(pod.path("layer")).unwrap();
    let mut overlay = Mount::new();
    (overlay.type_, overlay.source) = ("overlay".to_owned(), "overlay".to_owned());
    overlay.options = vec![
        format!("lowerdir={}:{}", pod.path("root"), pod.path("layer")),
        "uidmap=0:70000:65536".to_owned(),
        "gidmap=0:70000:65536".to_owned(),
    ];
    pod.run("a", "exit 3", &Container { rootfs: vec![overlay], ..Default::default() });
    assert_eq!(pod.wait("a", "").unwrap(), 3);
    pod.delete("a", "").unwrap();
    pod.shut_down();
    unmount(&dir, UnmountFlags::empty()).unwrap();
}

/// The kernel refuses it, as it cannot know whether the files are whole.
#[test]
fn directories_of_a_volatile_overlay_are_not_mounted_again() {
    let mut pod = Pod::new();
    for dir in ["upper", "work"] {
        std::fs::create_dir(pod.path(dir)).unwrap();
    }
    let mut overlay = Mount::new();
    (overlay.type_, overlay.source) = ("overlay".to_owned(), "overlay".to_owned());
    overlay.options = ["lowerdir", "upperdir", "workdir"]
        .iter()
        .zip(["root", "upper", "work"])
        .map(|(option, dir)| format!("{option}={}", pod.path(dir)))
        .chain(["volatile".to_owned()])
        .collect();
    let with = Container { rootfs: vec![overlay], ..Default::default() };
    pod.run("a", "exit 3", &with);
    assert_eq!(pod.wait("a", "").unwrap(), 3);
    pod.delete("a", "").unwrap();
    let error = pod.try_create("b", "true", &with).unwrap_err().to_string();
    let reason = "option volatile needs Linux 5.10, and directories that have not been mounted";
    assert!(error.contains(reason), "{error}");
    pod.shut_down();
}

/// A pod whose shim was killed, and which has a container with a root file system.
fn pod_with_a_dead_shim() -> Pod {
    let mut pod = Pod::new();
    std::fs::create_dir(pod.path("layer")).unwrap();
    // So that a test can fill it.
    let bundle = pod.bundle("a");
    std::fs::create_dir_all(&bundle).unwrap();
    rustix::mount::mount("bundle", &bundle, "tmpfs", MountFlags::empty(), c"nr_inodes=64").unwrap();
    let mut overlay = Mount::new();
    (overlay.type_, overlay.source) = ("overlay".to_owned(), "overlay".to_owned());
    overlay.options = vec![format!("lowerdir={}:{}", pod.path("root"), pod.path("layer"))];
    pod.run("a", "sleep 1000", &Container { rootfs: vec![overlay], ..Default::default() });
    pod.shim.kill().unwrap();
    pod.shim.wait().unwrap();
    pod
}

/// The mount point is there, empty, and without what the deletion has made beside it.
fn has_its_mount_point_alone(pod: &Pod) {
    let rootfs = pod.bundle("a").join("rootfs");
    assert_eq!(std::fs::read_dir(&rootfs).unwrap().count(), 0, "it is empty");
    assert!(!exists(pod.bundle("a").join("rootfs.detached")));
    rustix::mount::unmount(pod.bundle("a"), rustix::mount::UnmountFlags::empty()).unwrap();
}

#[test]
fn a_full_disk_prevents_no_deletion_after_a_dead_shim() {
    let pod = pod_with_a_dead_shim();
    let bundle = pod.bundle("a");
    let full =
        (0..100).map(|n| std::fs::write(bundle.join(n.to_string()), "")).find(Result::is_err);
    assert!(full.is_some());
    pod.delete_after_shim("a");
    has_its_mount_point_alone(&pod);
}

#[test]
fn a_mount_point_exists_throughout_the_deletion_after_a_dead_shim() {
    let pod = pod_with_a_dead_shim();
    let rootfs = pod.bundle("a").join("rootfs");
    let deleted = AtomicBool::new(false);
    let missed = std::thread::scope(|scope| {
        // containerd unmounts until nothing is mounted, and takes ENOENT for a failure.
        let watched = scope.spawn(|| {
            let mut missed = 0;
            while !deleted.load(Ordering::Relaxed) {
                missed += u32::from(!exists(&rootfs));
            }
            missed
        });
        pod.delete_after_shim("a");
        deleted.store(true, Ordering::Relaxed);
        watched.join().unwrap()
    });
    assert_eq!(missed, 0);
    has_its_mount_point_alone(&pod);
}
