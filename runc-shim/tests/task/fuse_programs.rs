//! Root file systems that a FUSE program of the node serves, which `mount.fuse` or `mount.fuse3`
//! starts.

use std::io::Read as _;
use std::time::Duration;

use containerd_shim_protos::api::Mount;
use containerd_shim_protos::ttrpc::Code;

use crate::pod::{Container, Pod, code, eventually, exists, script, signal};

/// A container whose root file system is of this type, and has an upper directory.
fn container(pod: &Pod, kind: &str) -> Container {
    let [upper, work] = ["upper", "work"].map(|name| pod.path(name));
    [&upper, &work].into_iter().for_each(|dir| std::fs::create_dir_all(dir).unwrap());
    let options = [&*format!("upperdir={upper}"), &*format!("workdir={work}")];
    let rootfs = Mount { type_: kind.to_owned(), ..pod.overlay(&options) };
    Container { rootfs: vec![rootfs], ..Default::default() }
}

/// File systems that are mounted in a bundle.
fn mounted(pod: &Pod, id: &str) -> Vec<String> {
    let bundle = pod.bundle(id).display().to_string();
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let kind = |line: &str| line.split(" - ").nth(1)?.split(' ').next().map(str::to_owned);
    mounts.lines().filter(|line| line.contains(&bundle)).filter_map(kind).collect()
}

/// Processes that have a place in the bundle of a container in an argument.
fn servers(pod: &Pod, id: &str) -> Vec<u32> {
    let place = pod.bundle(id).display().to_string();
    let pids = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let serves = |pid: &u32| {
        let mut line = Vec::new();
        let file = std::fs::File::open(format!("/proc/{pid}/cmdline"));
        file.is_ok_and(|mut file| file.read_to_end(&mut line).is_ok())
            && String::from_utf8_lossy(&line).contains(&place)
    };
    pids.filter(serves).collect()
}

/// The paths of the open files of a process.
fn open_files(pid: u32) -> Vec<String> {
    let links = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    let files = links.filter_map(|link| std::fs::read_link(link.path()).ok());
    files.map(|file| file.display().to_string()).collect()
}

fn nothing_is_left(pod: &Pod, id: &str) {
    assert_eq!(mounted(pod, id), Vec::<String>::new());
    eventually("the end of the file system", || servers(pod, id).is_empty().then_some(()));
}

fn is_installed(name: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap();
    std::env::split_paths(&path).any(|dir| exists(dir.join(name)))
}

/// Whether a test with fuse-overlayfs can run; else it is counted as skipped.
fn has_fuse_overlayfs() -> bool {
    let has_all = ["mount.fuse", "mount.fuse3", "fuse-overlayfs"].into_iter().all(is_installed);
    if !has_all || !exists("/dev/fuse") {
        kit::skip("no FUSE, or no fuse-overlayfs: tests/kit/fetch-programs fetches it");
        return false;
    }
    true
}

#[test]
fn a_file_system_of_a_fuse_program_lives_as_long_as_its_container() {
    if !has_fuse_overlayfs() {
        return;
    }
    let mut pod = Pod::new();
    for kind in ["fuse3.fuse-overlayfs", "fuse.fuse-overlayfs"] {
        let with = container(&pod, kind);
        pod.run("a", "exec sleep 1000", &with);
        assert_eq!(mounted(&pod, "a"), ["fuse.fuse-overlayfs"]);
        std::fs::write(pod.bundle("a").join("rootfs/written"), "").unwrap();
        assert!(exists(pod.path("upper/written")));
        // The program that has started it may be exiting.
        let server = eventually("one process that serves it", || match servers(&pod, "a")[..] {
            [server] => Some(server),
            _ => None,
        });
        // It shares with the shim no more than its standard input.
        let of_shim = open_files(pod.shim.id());
        let shared: Vec<String> =
            open_files(server).into_iter().filter(|file| of_shim.contains(file)).collect();
        assert!(shared.iter().all(|file| file == "/dev/null"), "{shared:?}");
        let is_input = |file: &String| file.starts_with("/memfd:");
        assert!(!open_files(server).iter().any(is_input), "the input of the helper");
        let environment = std::fs::read(format!("/proc/{server}/environ")).unwrap();
        assert!(!String::from_utf8_lossy(&environment).contains("TTRPC_ADDRESS"));
        pod.kill("a", "", 9).unwrap();
        assert_eq!(pod.wait("a", "").unwrap(), 137);
        pod.delete("a", "").unwrap();
        nothing_is_left(&pod, "a");
        std::fs::remove_file(pod.path("upper/written")).unwrap();
    }
    pod.shut_down();
}

#[test]
fn a_dead_shim_leaves_no_file_system_of_a_fuse_program() {
    if !has_fuse_overlayfs() {
        return;
    }
    for by_daemon in [false, true] {
        let mut pod = Pod::new();
        pod.run("a", "exec sleep 1000", &container(&pod, "fuse3.fuse-overlayfs"));
        signal(&pod.shim, libc::SIGKILL);
        pod.shim.wait().unwrap();
        eventually("the process that serves it", || (servers(&pod, "a").len() == 1).then_some(()));
        match by_daemon {
            true => pod.delete_by_daemon("a"),
            false => pod.delete_after_shim("a"),
        };
        nothing_is_left(&pod, "a");
    }
}

/// A directory with a `mount.fuse3` that does this.
fn stand_in(text: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    script(&dir.path().join("mount.fuse3").display().to_string(), text);
    dir
}

#[test]
fn an_error_of_a_fuse_program_reaches_the_caller() {
    let programs = stand_in("echo \"called with $*\"; printf 'the reason\\0\\n' >&2; exit 3");
    let mut pod = Pod::with_programs(programs.path());
    let with = container(&pod, "fuse3.some-system");
    let error = pod.try_create("a", "true", &with).unwrap_err();
    assert_eq!(code(&error), Code::UNKNOWN);
    let (error, place) = (error.to_string(), pod.bundle("a").join("rootfs"));
    let options = with.rootfs[0].options.join(" -o ");
    for part in [
        "failed to mount rootfs component",
        "fstype fuse3.some-system",
        "mount.fuse3 failed: exit status 3",
        "the reason",
        &format!("called with overlay {} -o {options} -t some-system", place.display()),
    ] {
        assert!(error.contains(part), "{part}: {error}");
    }
    let mut refused = container(&pod, "fuse3.some-system");
    refused.rootfs[0].options.push("X-containerd.mkdir.path=/a".to_owned());
    let error = pod.try_create("b", "true", &refused).unwrap_err();
    assert_eq!(code(&error), Code::INVALID_ARGUMENT);
    std::fs::remove_file(programs.path().join("mount.fuse3")).unwrap();
    let error = pod.try_create("c", "true", &with).unwrap_err().to_string();
    // The node may have one.
    let has_own = is_installed("mount.fuse3");
    let reason = if has_own { "mount.fuse3 failed" } else { "not found in $PATH" };
    assert!(error.contains("mount.fuse3") && error.contains(reason), "{error}");
    pod.shut_down();
}

/// A program that hangs and has started another, whose pid is in the file that is its source.
const HANGS: &str =
    "sh -c 'sleep 1000 & echo $! >\"$0.new\"; mv \"$0.new\" \"$0\"; wait' \"$1\" & wait";

#[test]
fn a_fuse_program_that_hangs_is_killed_at_the_deadline_with_what_it_has_started() {
    let programs = stand_in(HANGS);
    let mut pod = Pod::with_programs(programs.path());
    let child = pod.path("child");
    let mut with = container(&pod, "fuse3.some-system");
    with.rootfs[0].source.clone_from(&child);
    // The caller waits as long.
    pod.try_create_within("a", "true", &with, Duration::from_secs(2)).unwrap_err();
    let child = format!("/proc/{}", std::fs::read_to_string(child).unwrap().trim());
    eventually("its end", || (!exists(&child)).then_some(()));
    eventually("the end of the creation", || match pod.delete("a", "") {
        Err(error) => (code(&error) == Code::NOT_FOUND).then_some(()),
        Ok(_) => None,
    });
    nothing_is_left(&pod, "a");
    pod.shut_down();
}

/// A wait for the end of the output would last forever; a signal of the pipe would end the file
/// system's process.
#[test]
fn a_file_system_that_keeps_its_streams_open_delays_nothing_and_can_write_to_them() {
    let text = "mount -t tmpfs tmpfs \"$2\" && cp -a \"$1\"/. \"$2\"; echo x >/dev/stderr\n\
                (while ! test -e \"$1.go\"; do sleep 0.1; done\n\
                 yes | head -c 200000; echo x; : >\"$1.end\") &";
    let programs = stand_in(text);
    let mut pod = Pod::with_programs(programs.path());
    let mut with = container(&pod, "fuse3.some-system");
    with.rootfs[0].source = pod.path("root");
    pod.run("a", "exit 3", &with);
    assert_eq!(pod.wait("a", "").unwrap(), 3);
    std::fs::write(pod.path("root.go"), "").unwrap();
    eventually("its end by itself", || exists(pod.path("root.end")).then_some(()));
    pod.delete("a", "").unwrap();
    nothing_is_left(&pod, "a");
    pod.shut_down();
}
