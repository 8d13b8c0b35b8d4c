//! File systems that do not answer: only what is in them waits.

use std::time::{Duration, Instant};

use crate::fuse::Fuse;
use crate::pod::{self, Container, Pod, eventually, mount, script};

/// How long the calls of another container may take meanwhile.
const PROMPT: Duration = Duration::from_secs(15);

/// A runtime that needs no root file system: what it starts is a process of the node.
fn plain_runtime(pod: &Pod) -> Container {
    let path = pod.path("plain");
    let text = "case \" $* \" in *\" create \"*)\n\
                while test $# -gt 1; do test $1 = --pid-file && file=$2; shift; done\n\
                sleep 1000 </dev/null >/dev/null 2>&1 & echo $! >$file;; esac";
    script(&path, text);
    let mut with = Container::default();
    with.options.binary_name = path;
    with
}

/// A file system in the pod's directory.
fn fuse(pod: &Pod) -> (Fuse, String) {
    let path = pod.path("fuse");
    std::fs::create_dir(&path).unwrap();
    (Fuse::mount(path.as_ref()), path)
}

/// Another container of the pod is created, has its exec and its exit, and is deleted.
fn others_are_prompt(pod: &Pod) {
    let begun = Instant::now();
    pod.run("other", "exec sleep 1000", &Container::default());
    pod.exec("other", "e", "exit 4", &Container::default()).unwrap();
    pod.start("other", "e").unwrap();
    assert_eq!(pod.wait("other", "e").unwrap(), 4);
    pod.end("other");
    assert!(begun.elapsed() < PROMPT, "{:?}", begun.elapsed());
}

/// Mounts of a bundle.
fn mounts(pod: &Pod, id: &str) -> Vec<String> {
    let bundle = pod.bundle(id).display().to_string();
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    mounts.lines().filter(|line| line.contains(&bundle)).map(str::to_owned).collect()
}

/// Mounts of a bundle, and processes that have the container's id as an argument.
fn traces(pod: &Pod, id: &str) -> Vec<String> {
    let mut traces = mounts(pod, id);
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).into_owned();
        if line.split('\0').any(|word| word == pod.id(id)) {
            traces.push(line);
        }
    }
    traces
}

fn nothing_is_left(pod: &Pod, id: &str) {
    let left = || Some(traces(pod, id)).filter(|traces| traces.is_empty());
    eventually(&format!("{:#?} is gone", traces(pod, id)), left);
}

/// A root file system whose mount waits for an answer.
fn hanging_mount(pod: &Pod, fuse: &str) -> Container {
    let lower = format!("lowerdir={fuse}/layer:{}", pod.path("root"));
    let rootfs = vec![mount("overlay", "overlay", &[&lower])];
    Container { rootfs, ..Default::default() }
}

/// Promise: container_delays_no_other.
#[test]
fn a_mount_that_hangs_keeps_no_other_container_waiting() {
    let mut pod = Pod::new();
    let (fuse, path) = fuse(&pod);
    fuse.fall_silent();
    let with = hanging_mount(&pod, &path);
    std::thread::scope(|scope| {
        let created = scope.spawn(|| pod.try_create("hangs", "true", &with));
        fuse.keeps_waiting();
        others_are_prompt(&pod);
        assert!(!created.is_finished());
        drop(fuse);
        let error = created.join().unwrap().unwrap_err().to_string();
        assert!(error.contains("failed to mount rootfs component: mount source"), "{error}");
    });
    nothing_is_left(&pod, "hangs");
    pod.shut_down();
}

#[test]
fn a_shim_that_is_killed_while_a_mount_hangs_leaves_nothing() {
    let mut pod = Pod::new();
    let (fuse, path) = fuse(&pod);
    fuse.fall_silent();
    let with = hanging_mount(&pod, &path);
    std::thread::scope(|scope| {
        scope.spawn(|| pod.try_create("hangs", "true", &with).unwrap_err());
        fuse.keeps_waiting();
        pod::signal(&pod.shim, libc::SIGKILL);
    });
    pod.shim.wait().unwrap();
    pod.delete_after_shim("hangs");
    assert_eq!(mounts(&pod, "hangs"), Vec::<String>::new());
    drop(fuse);
    nothing_is_left(&pod, "hangs");
}

/// Detaching it needs no answer.
#[test]
fn a_container_on_a_silent_file_system_is_deleted_by_its_shim_and_after_it() {
    for by_shim in [true, false] {
        let mut pod = Pod::new();
        let (fuse, path) = fuse(&pod);
        let rootfs = vec![mount("bind", &path, &["rbind"])];
        pod.run("hangs", "", &Container { rootfs, ..plain_runtime(&pod) });
        pod.kill("hangs", "", 9).unwrap();
        assert_eq!(pod.wait("hangs", "").unwrap(), 137);
        fuse.fall_silent();
        if by_shim {
            pod.delete("hangs", "").unwrap();
            pod.shut_down();
        } else {
            pod::signal(&pod.shim, libc::SIGKILL);
            pod.shim.wait().unwrap();
            pod.delete_after_shim("hangs");
        }
        // The file system is still silent.
        nothing_is_left(&pod, "hangs");
        drop(fuse);
    }
}
