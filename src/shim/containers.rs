//! The containers that a shim serves, as containerd's task bundles tell them: what is left of them when the shim dies.
//!
//! When the connection to a shim closes, CRI takes the containers for exited, with status 255, and containerd removes their bundles within
//! milliseconds; but for a shim of version 3 in a sandbox nobody ends their processes. So a container is known by its bundle, while there is
//! one, and by its processes: they are in the pod's namespaces and in a cgroup that is named by the container's id.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use containerd_shim_protos::shim::oci::Options;

use crate::error::{IoContext as _, Step};
use crate::pause::Pause;
use crate::pause::launch::{Launcher, pids};

/// Names the sandbox in the bundle of a task that runs at the sandbox's endpoint (`ShimManager.Start`).
const SANDBOX: &str = "sandbox";

/// How often processes are looked for and killed, as what is killed may just have made another.
const ROUNDS: u32 = 20;

/// Between two rounds.
const PAUSE: Duration = Duration::from_millis(50);

/// One container: a task of containerd's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Container {
    /// Its id.
    pub id: String,
    /// Its bundle.
    pub bundle: PathBuf,
}

/// The containers of `sandbox` below `tasks`, containerd's directory of bundles of one namespace.
///
/// # Errors
/// The directory cannot be read; there is none: no containers.
pub fn of(tasks: &Path, sandbox: &str) -> Result<Vec<Container>, Step> {
    let entries = match fs::read_dir(tasks) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.step_at("read directory", tasks)?,
    };
    let mut containers = Vec::new();
    for entry in entries.flatten() {
        let bundle = entry.path();
        let Ok(id) = entry.file_name().into_string() else { continue };
        // Hidden ones are being deleted.
        if !id.starts_with('.') && fs::read(bundle.join(SANDBOX)).is_ok_and(|name| name == sandbox.as_bytes()) {
            containers.push(Container { id, bundle });
        }
    }
    Ok(containers)
}

/// Where runc's shim keeps the state of its containers unless its options say otherwise (`process.RuncRoot`).
const RUNC: &str = "/run/containerd/runc";

/// What names a container's sandbox in its state: CRI's annotation, which runtimes keep.
const ANNOTATION: &str = "io.kubernetes.cri.sandbox-id";

/// Where the annotations are in a container's state: of runc and youki, and of crun.
const STATES: [&str; 2] = ["state.json", "config.json"];

/// The directory in which runtimes with runc's options keep the states of the containers of a namespace.
pub fn root(options: Option<&Options>, namespace: &str) -> PathBuf {
    let root = options.map(|options| options.root.as_str()).filter(|root| !root.is_empty());
    Path::new(root.unwrap_or(RUNC)).join(namespace)
}

/// The containers of `sandbox` of which the runtime has a state below `root`, and `tasks` no bundle; `sandbox` itself is none. A container's bundle
/// is made before its state and removed after it, so these are known to nobody else: the call that was to delete them was cut off.
///
/// # Errors
/// The directory cannot be read; there is none: no containers.
pub fn forgotten(root: &Path, tasks: &Path, sandbox: &str) -> Result<Vec<Container>, Step> {
    let entries = match fs::read_dir(root) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.step_at("read directory", root)?,
    };
    let mut containers = Vec::new();
    for entry in entries.flatten() {
        let Ok(id) = entry.file_name().into_string() else { continue };
        let bundle = tasks.join(&id);
        if id == sandbox || bundle.symlink_metadata().is_ok() {
            continue;
        }
        let of_sandbox = |file| fs::read_to_string(entry.path().join(file)).is_ok_and(|text| names(&text, sandbox));
        if STATES.into_iter().any(of_sandbox) {
            containers.push(Container { id, bundle });
        }
    }
    Ok(containers)
}

/// A state says that its container is of `sandbox`: `"KEY":"ID"`, or `"KEY=ID"` of runc's.
fn names(state: &str, sandbox: &str) -> bool {
    let of = |rest: &str| {
        let id = rest.trim_start_matches(|c: char| c.is_whitespace() || "\":=".contains(c));
        id.strip_prefix(sandbox).is_some_and(|after| after.starts_with('"'))
    };
    state.match_indices(ANNOTATION).any(|(at, key)| state.get(at + key.len()..).is_some_and(of))
}

/// Where the kernel's flags of a process are in `/proc/PID/stat`, counted from the state (proc_pid_stat(5)), and the one that says that it is ending.
const FLAGS: usize = 6;
const PF_EXITING: u64 = 0x4;

/// The process is ending, or has ended and waits for its parent, which may be slow to look. One whose first thread has ended, and another has
/// not, lives.
fn is_ending(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name is in parentheses and may hold anything.
    let ended = stat.rsplit_once(") ").is_some_and(|(_, fields)| {
        // The first process of a PID namespace is no zombie until all others of it are reaped, by whoever has to.
        let flags: u64 = fields.split(' ').nth(FLAGS).and_then(|flags| flags.parse().ok()).unwrap_or(0);
        fields.starts_with(['Z', 'X']) || flags & PF_EXITING != 0
    });
    ended && fs::read_dir(format!("/proc/{pid}/task")).is_ok_and(|threads| threads.count() <= 1)
}

/// The living processes of the containers. CRI names a container's cgroup by the container's id.
///
/// # Errors
/// `/proc` cannot be read.
pub fn processes(launcher: &Launcher, containers: &[Container]) -> Result<Vec<Arc<dyn Pause>>, Step> {
    let belongs = |pid: u32| {
        let cgroups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        containers.iter().any(|container| in_cgroup_of(&cgroups, &container.id)) && !is_ending(pid)
    };
    let mut found = Vec::new();
    for pid in pids()?.into_iter().filter(|pid| belongs(*pid)) {
        // Asked again when the process is held: the pid may have gone to another.
        if let Some(process) = launcher.open(pid)?
            && belongs(pid)
        {
            found.push(process);
        }
    }
    Ok(found)
}

/// Kills all processes of the containers.
///
/// # Errors
/// What could not be killed.
pub fn kill(launcher: &Launcher, containers: &[Container]) -> Result<(), Step> {
    for _ in 0..ROUNDS {
        let alive = processes(launcher, containers)?;
        if alive.is_empty() {
            return Ok(());
        }
        for process in &alive {
            process.kill()?;
        }
        // They are not our children: their end cannot be waited for but by looking again.
        thread::sleep(PAUSE);
    }
    Err(Step::new("kill containers", io::Error::other("there are processes again and again")))
}

/// A namespace: its name in `/proc/PID/ns` and its inode.
pub type Namespace = (&'static str, u64);

/// The containers that have processes in any of these namespaces, which are the pod's own; `sandbox` itself is none. Without a bundle where
/// `tasks` has none.
///
/// # Errors
/// `/proc` cannot be read.
pub fn inside(namespaces: &[Namespace], tasks: &Path, sandbox: &str) -> Result<Vec<Container>, Step> {
    let mut ids: BTreeSet<String> = BTreeSet::new();
    if namespaces.is_empty() {
        return Ok(Vec::new());
    }
    for pid in pids()? {
        let inode = |kind| fs::metadata(format!("/proc/{pid}/ns/{kind}")).map(|meta| meta.ino()).ok();
        if namespaces.iter().any(|(kind, own)| inode(kind) == Some(*own)) {
            let cgroups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
            ids.extend(container_of(&cgroups).map(str::to_owned));
        }
    }
    ids.remove(sandbox);
    Ok(ids.into_iter().map(|id| Container { bundle: tasks.join(&id), id }).collect())
}

/// The container whose cgroup a process is in, by the content of its `/proc/PID/cgroup`: ids of CRI are 64 hex digits.
fn container_of(cgroups: &str) -> Option<&str> {
    let id = |part| {
        let part: &str = str::strip_suffix(part, ".scope").unwrap_or(part);
        let id = part.rsplit('-').next().unwrap_or(part);
        (id.len() == 64 && id.bytes().all(|byte| byte.is_ascii_hexdigit())).then_some(id)
    };
    cgroups.lines().filter_map(|line| line.splitn(3, ':').nth(2)).flat_map(|path| path.split('/')).find_map(id)
}

/// Whether a process with this content of `/proc/PID/cgroup` is in the cgroup that is named by the container's id: `ID`, or
/// `PREFIX-ID.scope` with systemd.
fn in_cgroup_of(cgroups: &str, id: &str) -> bool {
    let named = |part: &str| {
        let part = part.strip_suffix(".scope").unwrap_or(part);
        part == id || part.strip_suffix(id).is_some_and(|prefix| prefix.ends_with('-'))
    };
    cgroups.lines().filter_map(|line| line.splitn(3, ':').nth(2)).any(|path| path.split('/').any(named))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_container_is_known_by_its_cgroup() {
        let id = "0123abcd";
        for yes in [
            "0::/kubepods/pod1/0123abcd",
            "3:memory:/kubepods/pod1/0123abcd/init.scope",
            "1:name=systemd:/\n0::/kubepods.slice/cri-containerd-0123abcd.scope",
        ] {
            assert!(in_cgroup_of(yes, id), "{yes}");
        }
        for no in ["0::/", "0::/kubepods/0123abcd1", "0::/kubepods/x0123abcd", "0::/a/cri-0123abcd.slice", ""] {
            assert!(!in_cgroup_of(no, id), "{no}");
        }
    }

    #[test]
    fn an_ended_process_is_a_zombie_until_its_parent_looks() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        assert!(!is_ending(child.id()));
        child.kill().unwrap();
        while !is_ending(child.id()) {
            thread::sleep(Duration::from_millis(1));
        }
        child.wait().unwrap();
        assert!(!is_ending(child.id()));
    }

    #[test]
    fn a_cgroup_tells_the_container() {
        let id = "0123456789abcdef".repeat(4);
        for yes in [format!("2:cpu:/\n1:name=systemd:/a/{id}/b"), format!("0::/a.slice/cri-containerd-{id}.scope")] {
            assert_eq!(container_of(&yes), Some(id.as_str()), "{yes}");
        }
        for no in ["0::/user.slice/session-3.scope".to_owned(), format!("0::/x{id}"), String::new()] {
            assert_eq!(container_of(&no), None, "{no}");
        }
    }

    #[test]
    fn containers_are_those_whose_bundle_names_the_sandbox() {
        let tasks = tempfile::tempdir().unwrap();
        for (id, sandbox) in [("a", "pod"), ("b", "pod2"), (".c", "pod")] {
            fs::create_dir(tasks.path().join(id)).unwrap();
            fs::write(tasks.path().join(id).join(SANDBOX), sandbox).unwrap();
        }
        fs::create_dir(tasks.path().join("d")).unwrap();
        let found = of(tasks.path(), "pod").unwrap();
        assert_eq!(found, [Container { id: "a".to_owned(), bundle: tasks.path().join("a") }]);
        assert_eq!(of(&tasks.path().join("none"), "pod").unwrap(), []);
    }

    #[test]
    fn forgotten_are_those_of_the_sandbox_that_have_a_state_and_no_bundle() {
        let dir = tempfile::tempdir().unwrap();
        let (root, tasks) = (dir.path().join("runc"), dir.path().join("tasks"));
        let runc = |of: &str| format!(r#"{{"config":{{"labels":["a=b","{ANNOTATION}={of}","bundle=/x"]}}}}"#);
        let crun = |of: &str| format!(r#"{{ "annotations": {{ "{ANNOTATION}": "{of}" }} }}"#);
        for (id, file, state) in [
            ("runc", "state.json", runc("pod")),
            ("crun", "config.json", crun("pod")),
            ("has-bundle", "state.json", runc("pod")),
            ("longer", "state.json", runc("pod2")),
            ("other", "config.json", crun("other")),
            ("mentions", "state.json", runc("other").replace("/x", "/sandboxes/pod")),
            ("pod", "state.json", runc("pod")),
            ("being-made", "state.jso", runc("pod")),
        ] {
            fs::create_dir_all(root.join(id)).unwrap();
            fs::write(root.join(id).join(file), state).unwrap();
        }
        fs::create_dir_all(tasks.join("has-bundle")).unwrap();
        let mut found = forgotten(&root, &tasks, "pod").unwrap();
        found.sort_by(|a, b| a.id.cmp(&b.id));
        let expected = ["crun", "runc"].map(|id| Container { id: id.to_owned(), bundle: tasks.join(id) });
        assert_eq!(found, expected);
        assert_eq!(forgotten(&dir.path().join("none"), &tasks, "pod").unwrap(), []);
    }

    #[test]
    fn the_root_is_that_of_the_options_or_the_shims_own() {
        let options = Options { root: "/r".to_owned(), ..Default::default() };
        assert_eq!(root(Some(&options), "k8s.io"), Path::new("/r/k8s.io"));
        assert_eq!(root(Some(&Options::default()), "k8s.io"), Path::new("/run/containerd/runc/k8s.io"));
        assert_eq!(root(None, "k8s.io"), Path::new("/run/containerd/runc/k8s.io"));
    }
}
