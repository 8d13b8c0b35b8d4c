//! Root file systems.

use containerd_shim_protos::ttrpc::Code;

use crate::pod::{self, Container, MAPPED, Pod, code, exists, mount};

#[test]
fn root_file_systems_are_mounted_and_unmounted() {
    let mut pod = Pod::new();
    let lower = pod.path("root");
    let layers: Vec<String> =
        (0..110).map(|number| pod.path(&format!("layers/{number:0>20}"))).collect();
    for dir in layers.iter().chain([&pod.path("upper"), &pod.path("work")]) {
        std::fs::create_dir_all(dir).unwrap();
    }
    let overlay = |dirs: &[String], more: &str| {
        mount("overlay", "overlay", &[&format!("lowerdir={}", dirs.join(":")), more])
    };
    let mounts = || std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    // Longer than the kernel takes at once.
    let mut dirs = layers.clone();
    dirs.push(lower.clone());
    assert!(dirs.join(":").len() > 4096);
    let with = Container { rootfs: vec![overlay(&dirs, "ro")], ..Default::default() };
    let rootfs = pod.bundle("a").join("rootfs").display().to_string();
    pod.run("a", "exit 3", &with);
    assert!(mounts().contains(&rootfs));
    assert_eq!(pod.wait("a", "").unwrap(), 3);
    pod.delete("a", "").unwrap();
    assert!(!mounts().contains(&rootfs));

    let with = Container { rootfs: vec![pod.overlay(&MAPPED)], ..Default::default() };
    pod.create("b", "true", &with);
    use std::os::unix::fs::MetadataExt as _;
    let rootfs = pod.bundle("b").join("rootfs");
    assert_eq!(std::fs::metadata(rootfs.join("bin/busybox")).unwrap().uid(), 70000);
    assert!(!exists(pod.bundle("b").join("idmapped")));
    pod.kill("b", "", 9).unwrap();
    pod.wait("b", "").unwrap();
    pod.delete("b", "").unwrap();

    let mut refused = overlay(&dirs, "X-containerd.mkdir.path=/a");
    let with = Container { rootfs: vec![refused.clone()], ..Default::default() };
    let error = pod.try_create("c", "true", &with).unwrap_err();
    assert_eq!(code(&error), Code::INVALID_ARGUMENT);
    let mut below = overlay(&dirs, "ro");
    below.target = "tmp".to_owned();
    let with = Container { rootfs: vec![below], ..Default::default() };
    let error = pod.try_create("c", "true", &with).unwrap_err();
    assert_eq!(code(&error), Code::UNIMPLEMENTED);
    // The mounts before the one that fails are undone.
    refused.options = vec!["lowerdir=/no/such".to_owned()];
    let with = Container { rootfs: vec![overlay(&dirs, "ro"), refused], ..Default::default() };
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
    let with = |options: &[&str]| Container {
        rootfs: vec![mount("ext4", &image, options)],
        ..Default::default()
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
fn mounts_of_a_bundle_behind_a_link_are_undone() {
    let mut pod = Pod::new();
    let real = pod.path("real");
    std::fs::create_dir(&real).unwrap();
    std::os::unix::fs::symlink(&real, pod.bundle("a")).unwrap();
    let with = Container { rootfs: vec![pod.overlay(&[])], ..Default::default() };
    let mounted = || std::fs::read_to_string("/proc/self/mountinfo").unwrap().contains(&real);
    pod.run("a", "exit 3", &with);
    assert!(mounted());
    // Also one below, as of a hook, and one on another.
    for place in ["rootfs/tmp", "rootfs"] {
        let (place, flags) = (pod.bundle("a").join(place), rustix::mount::MountFlags::empty());
        rustix::mount::mount("tmpfs", place, "tmpfs", flags, None).unwrap();
    }
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
    std::fs::create_dir(pod.path("data")).unwrap();
    let (out, err) = (pod.fifo("out"), pod.fifo("err"));
    let stdout = pod::reader(&out);
    let mut with = Container { stdout: out, stderr: err, ..Default::default() };
    (with.rootfs, with.root_is) = (vec![pod.overlay(&MAPPED)], Some(70000));
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
    let with = Container { rootfs: vec![pod.overlay(&MAPPED)], ..Default::default() };
    pod.run("a", "exit 3", &with);
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
    let [upper, work] = ["upper", "work"].map(|dir| format!("{dir}dir={}", pod.path(dir)));
    let with =
        Container { rootfs: vec![pod.overlay(&[&upper, &work, "volatile"])], ..Default::default() };
    pod.run("a", "exit 3", &with);
    assert_eq!(pod.wait("a", "").unwrap(), 3);
    pod.delete("a", "").unwrap();
    let error = pod.try_create("b", "true", &with).unwrap_err().to_string();
    let reason = "option volatile needs Linux 5.10, and directories that have not been mounted";
    assert!(error.contains(reason), "{error}");
    pod.shut_down();
}
