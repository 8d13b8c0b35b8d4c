//! Root file systems.

use containerd_shim_protos::api::*;
use containerd_shim_protos::ttrpc::Code;

use crate::pod::{Container, Pod, code, exists};

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
    // What was mounted before the one that fails is undone.
    refused.options = vec!["lowerdir=/no/such".to_owned()];
    let with = Container { rootfs: vec![overlay(&dirs, &["ro"]), refused], ..Default::default() };
    pod.try_create("c", "true", &with).unwrap_err();
    assert!(!mounts().contains(&pod.bundle("c").display().to_string()));
    pod.shut_down();
}
