//! The shim is killed at every system call that changes the system, and at moments in between. What
//! containerd runs then leaves no process, mount or cgroup of the container.

use std::path::Path;
use std::time::{Duration, Instant};

use containerd_shim_protos::api::CreateTaskRequest;
use containerd_shim_protos::protobuf::Message as _;

use crate::fuse::Fuse;
use crate::pod::{self, Container, MAPPED, Pod, exists};
use crate::tracer::Tracer;

/// The operation that is in progress when the shim is killed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Call {
    Create,
    CreateWithMounts,
    Start,
    Exec,
    Delete,
}

const CALLS: [Call; 5] =
    [Call::Create, Call::CreateWithMounts, Call::Start, Call::Exec, Call::Delete];

/// A container with streams, in some cases with a terminal, or with layers of a root file system,
/// whose users are mapped where the runtime knows.
fn container(pod: &Pod, call: Call) -> Container {
    let rootfs = match call {
        Call::CreateWithMounts => vec![pod.overlay(&MAPPED)],
        _ => Vec::new(),
    };
    let terminal = matches!(call, Call::Exec | Call::CreateWithMounts);
    let [stdin, stdout] = ["in", "out"].map(|name| match pod.path(name) {
        path if exists(&path) => path,
        _ => pod.fifo(name),
    });
    Container { rootfs, terminal, stdin, stdout, ..Default::default() }
}

fn prepare(pod: &Pod, call: Call) {
    let with = container(pod, call);
    // Until then it is the shell that starts it.
    pod::eventually("the shim", || {
        let name = std::fs::read_to_string(format!("/proc/{}/comm", pod.shim.id())).unwrap();
        (name == "runc-shim\n").then_some(())
    });
    match call {
        Call::Create | Call::CreateWithMounts => {}
        Call::Start => drop(pod.create("a", "exec sleep 1000", &with)),
        Call::Exec => {
            pod.run("a", "exec sleep 1000", &with);
            pod.exec("a", "e", "exec sleep 1000", &with).unwrap();
        }
        Call::Delete => {
            pod.run("a", "exec sleep 1000", &with);
            pod.kill("a", "", 9).unwrap();
            pod.wait("a", "").unwrap();
        }
    }
}

/// The call; what it answers when the shim is killed is of no interest.
fn act(pod: &Pod, call: Call) {
    match call {
        Call::Create | Call::CreateWithMounts => {
            let with = container(pod, call);
            let _reader = pod::open(&with.stdout);
            let _ = pod.try_create("a", "exec sleep 1000", &with);
        }
        Call::Start => drop(pod.start("a", "")),
        Call::Exec => drop(pod.start("a", "e")),
        Call::Delete => drop(pod.delete("a", "")),
    }
}

/// Processes in a cgroup of the container, its cgroups, and mounts of the pod.
pub fn traces(pod: &Pod) -> Vec<String> {
    let id = pod.id("a");
    let mut traces = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let cgroups = std::fs::read_to_string(entry.path().join("cgroup")).unwrap_or_default();
        if cgroups.lines().any(|line| line.ends_with(&format!("/{id}"))) {
            traces.push(format!("process {}", entry.path().display()));
        }
    }
    for entry in std::fs::read_dir("/sys/fs/cgroup").unwrap().flatten() {
        for path in [entry.path(), "/sys/fs/cgroup".into()] {
            let cgroup = path.join("runc-shim").join(&id);
            // Not a directory of the tmpfs above, where no hierarchy of version 2 is mounted.
            if is_cgroup(&cgroup) {
                traces.push(format!("cgroup {}", cgroup.display()));
            }
        }
    }
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let bundle = pod.bundle("a").display().to_string();
    traces.extend(mounts.lines().filter(|line| line.contains(&bundle)).map(str::to_owned));
    traces
}

fn is_cgroup(path: &Path) -> bool {
    const MAGIC: [i64; 2] = [libc::CGROUP_SUPER_MAGIC, libc::CGROUP2_SUPER_MAGIC];
    rustix::fs::statfs(path).is_ok_and(|stat| MAGIC.contains(&stat.f_type))
}

/// Who deletes the container of the dead shim.
#[derive(Clone, Copy, Debug)]
enum By {
    Containerd,
    Daemon,
}

fn leaves_nothing(pod: &mut Pod, by: By, what: &str) {
    pod.shim.wait().unwrap();
    if exists(pod.bundle("a").join("options.json")) {
        match by {
            By::Containerd => pod.delete_after_shim("a"),
            By::Daemon => pod.delete_by_daemon("a"),
        };
    }
    let mut last = Vec::new();
    let end = Instant::now() + Duration::from_secs(20);
    while Instant::now() < end {
        last = traces(pod);
        if last.is_empty() {
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    panic!("{what} leaves {last:#?}");
}

/// Promise: killed_shim_leaves_nothing.
#[test]
fn a_shim_that_is_killed_at_any_call_leaves_nothing() {
    let mut kills = 0;
    for call in CALLS {
        for nth in 1.. {
            let mut pod = Pod::new();
            prepare(&pod, call);
            let tracer = Tracer::attach(pod.shim.id(), nth).unwrap();
            act(&pod, call);
            let seen = tracer.finish().unwrap();
            if !seen.killed {
                assert!(nth > 2, "{call:?}: {:?}", seen.calls);
                pod::signal(&pod.shim, libc::SIGKILL);
                leaves_nothing(&mut pod, By::Containerd, &format!("{call:?}"));
                break;
            }
            kills += 1;
            let what = format!("{call:?}, killed at {:?}", seen.calls.last());
            leaves_nothing(&mut pod, By::Containerd, &what);
        }
    }
    eprintln!("the shim was killed at {kills} calls");
}

#[test]
fn a_shim_that_is_killed_while_the_runtime_works_leaves_nothing() {
    let step = Duration::from_millis(4);
    let ways = [By::Containerd, By::Daemon];
    let moments = kit::fewer("moments", 12);
    for (call, by) in CALLS.into_iter().flat_map(|call| ways.map(|by| (call, by))) {
        for steps in 0..moments {
            let mut pod = Pod::new();
            prepare(&pod, call);
            let pod_ref = &pod;
            std::thread::scope(|scope| {
                scope.spawn(|| act(pod_ref, call));
                std::thread::sleep(step * steps);
                pod::signal(&pod_ref.shim, libc::SIGKILL);
            });
            let what = format!("{call:?} after {:?}, deleted by {by:?}", step * steps);
            leaves_nothing(&mut pod, by, &what);
        }
    }
}

#[test]
fn containerd_s_own_shim_cleans_up_too() {
    if !pod::is_runc() {
        return;
    }
    for steps in 0..8 {
        let mut pod = Pod::new();
        let pod_ref = &pod;
        std::thread::scope(|scope| {
            scope.spawn(|| act(pod_ref, Call::CreateWithMounts));
            std::thread::sleep(Duration::from_millis(12) * steps);
            pod::signal(&pod_ref.shim, libc::SIGKILL);
        });
        pod.shim.wait().unwrap();
        let bundle = pod.bundle("a");
        if !exists(bundle.join("runtime")) {
            continue;
        }
        let shim = kit::Parts::get().unwrap().program("containerd-shim-runc-v2");
        let output = std::process::Command::new(shim)
            .args(["-namespace", "test", "-id", &pod.id("a"), "-bundle"])
            .arg(&bundle)
            .arg("delete")
            .current_dir(&bundle)
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        // It knows nothing of a cgroup that runc was killed in, nor of the mapped layers.
        let known = |trace: &String| !trace.starts_with("cgroup") && !trace.contains("/idmapped ");
        let end = Instant::now() + Duration::from_secs(20);
        while traces(&pod).iter().any(known) {
            assert!(Instant::now() < end, "{:#?}", traces(&pod));
            std::thread::sleep(Duration::from_millis(20));
        }
        let _ = rustix::mount::unmount(
            Path::new(&bundle).join("idmapped"),
            rustix::mount::UnmountFlags::DETACH,
        );
        pod::eventually("its cgroups are removed", || {
            let traces = traces(&pod);
            let left: Vec<_> = traces.iter().filter_map(|t| t.strip_prefix("cgroup ")).collect();
            // One may have two names, or a process that is still exiting.
            left.iter().for_each(|cgroup| drop(std::fs::remove_dir(cgroup)));
            left.is_empty().then_some(())
        });
    }
}

/// The helper that mounts root file systems is killed, as it is when its shim ends, at each of its
/// calls that change the system.
///
/// Promise: killed_shim_leaves_nothing.
#[test]
fn a_mount_that_is_killed_at_any_call_leaves_nothing() {
    let mut kills = 0;
    for nth in 1.. {
        let pod = Pod::new();
        std::fs::create_dir_all(pod.bundle("a").join("rootfs")).unwrap();
        // It waits for the end of what it is given.
        let (given, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let mut helper = pod.helper("a", "mount", given);
        let name = format!("/proc/{}/comm", helper.id());
        // Until then it is the shell that starts it.
        pod::eventually("the helper", || {
            std::fs::read_to_string(&name).unwrap().starts_with("pause").then_some(())
        });
        let tracer = Tracer::attach(helper.id(), nth).unwrap();
        let mut request = CreateTaskRequest::new();
        request.rootfs = vec![pod.overlay(&MAPPED)];
        let request = request.write_to_bytes().unwrap();
        assert_eq!(rustix::io::write(&write, &request), Ok(request.len()));
        drop(write);
        pod::eventually("its end", || tracer.is_finished().then_some(()));
        let seen = tracer.finish().unwrap();
        // The tracer may have reaped it.
        let _ = helper.wait();
        let made = traces(&pod);
        pod.delete_after_shim("a");
        let left = traces(&pod);
        assert!(left.is_empty(), "killed at {:?}: {left:#?}", seen.calls.last());
        if !seen.killed {
            assert!(made.len() == 1 && nth > 5, "{made:?} {:?}", seen.calls);
            break;
        }
        kills += 1;
    }
    eprintln!("the helper was killed at {kills} calls");
}

#[test]
fn a_root_file_system_in_use_is_detached() {
    for by in [By::Containerd, By::Daemon] {
        let mut pod = Pod::new();
        pod.run("a", "exec sleep 1000", &container(&pod, Call::CreateWithMounts));
        let used = std::fs::File::open(pod.bundle("a").join("rootfs/proc")).unwrap();
        pod::signal(&pod.shim, libc::SIGKILL);
        leaves_nothing(&mut pod, by, "a root file system in use");
        drop(used);
    }
}

#[test]
fn a_file_system_of_another_process_does_not_hold_up_the_cleanup() {
    let mut pod = Pod::new();
    pod.run("a", "sleep 1000", &Container::default());
    let dir = tempfile::tempdir().unwrap();
    // Named like the bundle.
    let silent = dir.path().join(pod.bundle("a").file_name().unwrap());
    std::fs::create_dir(&silent).unwrap();
    let fuse = Fuse::mount(&silent);
    let mut worker = std::process::Command::new("sleep");
    let mut worker = worker.arg("1000").current_dir(&silent).spawn().unwrap();
    fuse.fall_silent();
    pod::signal(&pod.shim, libc::SIGKILL);
    let begun = Instant::now();
    leaves_nothing(&mut pod, By::Containerd, "a cleanup beside a silent file system");
    let took = begun.elapsed();
    drop(fuse);
    worker.kill().unwrap();
    worker.wait().unwrap();
    assert!(took < Duration::from_secs(8), "{took:?}");
}

/// containerd removes the bundle of a container whose Create has failed while it has the shim
/// delete the container.
#[test]
fn a_deletion_removes_the_cgroup_although_the_bundle_is_gone_meanwhile() {
    let mut pod = Pod::new();
    let config = pod.bundle("a").join("config.json").display().to_string();
    let with = pod.with_commands_before("delete", &format!("rm {config}; exit"));
    pod.run("a", "exec sleep 1000", &with);
    pod::signal(&pod.shim, libc::SIGKILL);
    pod.shim.wait().unwrap();
    let deleted = pod.deletion("a").output().unwrap();
    assert!(deleted.status.success() && !exists(config), "{deleted:?}");
    assert_eq!(traces(&pod), [""; 0]);
}

#[test]
fn a_deletion_does_not_take_itself_for_a_mount() {
    for (namespace, id) in [("test", "mount"), ("mount", "test")] {
        let bundle = tempfile::tempdir().unwrap();
        let mut deletion = std::process::Command::new(pod::program());
        deletion.args(["-namespace", namespace, "-id", id, "-bundle"]).arg(bundle.path());
        let status = deletion.arg("delete").current_dir(bundle.path()).output().unwrap().status;
        assert!(status.success(), "{status}");
    }
}
