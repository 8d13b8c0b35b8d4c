//! The containers that a shim serves, as containerd's task bundles tell them: what is left of them
//! when the shim dies.
//!
//! When the connection to a shim closes, CRI takes the containers for exited, with status 255, and
//! containerd removes their bundles within milliseconds; but before 2.4 it does not kill their
//! processes, if the shim is one of version 3 in a sandbox. So a container is known by its bundle,
//! while there is one, and by its processes: they are in the pod's namespaces and in a cgroup that
//! is named by the container's id.

pub mod cgroup;
mod cleanup;
mod origin;

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use containerd_shim_protos::shim::oci::Options;
use process_identity::Stat;

use crate::cgroup::mounts::ROOT;
use crate::error::{IoContext as _, StepError};
use crate::process::handle::{NamespaceHandle, ProcessHandle};
use crate::process::spawn::pids;
use origin::{ContainerOwner, SANDBOX};

/// How often processes are looked for and killed, as what is killed may just have made another.
const ROUNDS: u32 = 20;

/// Delay between two rounds.
const ROUND_DELAY: Duration = Duration::from_millis(50);

/// One container: a task of containerd's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Container {
    /// Its id.
    pub id: String,
    /// Its bundle.
    pub bundle: PathBuf,
}

/// The ids in a directory of bundles or states: without `sandbox` itself, and without hidden names,
/// which are being deleted. None if there is no such directory.
fn ids(dir: &Path, sandbox: &str) -> Result<impl Iterator<Item = String>, StepError> {
    let entries = match fs::read_dir(dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => None,
        other => Some(other.step_at("read directory", dir)?),
    };
    let names = entries.into_iter().flatten().flatten().map(|entry| entry.file_name());
    let ids = names.filter_map(|name| name.into_string().ok());
    Ok(ids.filter(move |id| id != sandbox && !id.starts_with('.')))
}

/// The containers of `sandbox` below `tasks`, containerd's directory of bundles of one namespace.
///
/// # Errors
/// The directory cannot be read; there is none: no containers.
pub fn of_sandbox(tasks: &Path, sandbox: &str) -> Result<Vec<Container>, StepError> {
    let all = ids(tasks, sandbox)?.map(|id| Container { bundle: tasks.join(&id), id });
    let names_it =
        |bundle: &Path| fs::read(bundle.join(SANDBOX)).is_ok_and(|name| name == sandbox.as_bytes());
    Ok(all.filter(|container| names_it(&container.bundle)).collect())
}

/// `sandbox` has no container below `tasks`, whatever the version of its shim.
///
/// # Errors
/// The directory cannot be read.
pub fn none(tasks: &Path, sandbox: &str) -> Result<bool, StepError> {
    let is_own = |id: String| origin::of_bundle(&tasks.join(id), sandbox) == ContainerOwner::Own;
    Ok(!ids(tasks, sandbox)?.any(is_own))
}

/// Where runc's shim keeps the state of its containers unless its options say otherwise
/// (`process.RuncRoot`).
const RUNC: &str = "/run/containerd/runc";

/// The directory in which runtimes with runc's options keep the states of the containers of a
/// namespace.
pub fn runtime_root(options: Option<&Options>, namespace: &str) -> PathBuf {
    let root = options.map(|options| options.root.as_str()).filter(|root| !root.is_empty());
    Path::new(root.unwrap_or(RUNC)).join(namespace)
}

/// The containers of `sandbox` of which the runtime has a state below `root`, and `tasks` no
/// bundle; `sandbox` itself is none. A container's bundle is made before its state and removed
/// after it, so only the runtime knows these: the call that was to delete them was interrupted.
///
/// # Errors
/// The directory cannot be read; there is none: no containers.
pub fn forgotten(root: &Path, tasks: &Path, sandbox: &str) -> Result<Vec<Container>, StepError> {
    let all = ids(root, sandbox)?.map(|id| Container { bundle: tasks.join(&id), id });
    let is_forgotten = |container: &Container| {
        container.bundle.symlink_metadata().is_err()
            && origin::state_names(&root.join(&container.id), sandbox)
    };
    Ok(all.filter(is_forgotten).collect())
}

/// The process is ending, or has ended and waits for its parent, which may be slow to look. One
/// whose first thread has ended, and another has not, lives.
fn is_ending(pid: u32) -> bool {
    let ended = Stat::of_process(pid).is_ok_and(|stat| stat.ending());
    ended && fs::read_dir(format!("/proc/{pid}/task")).is_ok_and(|threads| threads.count() <= 1)
}

/// Containers whose processes are searched by their cgroups: CRI names a container's cgroup by the
/// container's id.
struct CgroupSearch<'a> {
    containers: &'a [Container],
    /// The daemon's own cgroups.
    node: String,
}

impl<'a> CgroupSearch<'a> {
    fn new(containers: &'a [Container]) -> Result<Self, StepError> {
        Ok(Self { containers, node: cgroup::of_process("self")?.unwrap_or_default() })
    }

    /// The containers that a process is in, with the content of its `/proc/PID/cgroup`; none if it
    /// does not live.
    fn living_in(&self, pid: u32) -> Result<Vec<(&'a Container, String)>, StepError> {
        let Some(cgroups) = cgroup::of_process(&pid.to_string())? else { return Ok(Vec::new()) };
        let holds = |container: &&Container| {
            cgroup::holds(Path::new(ROOT), &cgroups, &container.id, &self.node)
        };
        let mut holders: Vec<_> = self.containers.iter().filter(holds).collect();
        if is_ending(pid) {
            holders.clear();
        }
        Ok(holders.into_iter().map(|container| (container, cgroups.clone())).collect())
    }

    /// Kills a process if it is in one of the containers. Returns their ids, each with the content
    /// of the process's `/proc/PID/cgroup`.
    fn kill(&self, pid: u32) -> Result<Vec<(String, String)>, StepError> {
        // First, so that the process that is looked at is the one that is killed.
        let Some(process) = ProcessHandle::open(pid)? else { return Ok(Vec::new()) };
        let holders = self.living_in(pid)?;
        if !holders.is_empty() {
            process.kill()?;
        }
        Ok(holders
            .into_iter()
            .map(|(container, cgroups)| (container.id.clone(), cgroups))
            .collect())
    }
}

/// Some process of the containers lives.
///
/// # Errors
/// `/proc` cannot be read.
pub fn any_alive(containers: &[Container]) -> Result<bool, StepError> {
    if containers.is_empty() {
        return Ok(false);
    }
    let search = CgroupSearch::new(containers)?;
    for pid in pids()? {
        if !search.living_in(pid)?.is_empty() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Kills all processes of the containers. They are not our children, and one that hangs in the
/// kernel may never exit: their exits are detected by repeated searches.
///
/// # Errors
/// A process could not be killed. The others are killed nevertheless.
pub fn kill(containers: &[Container]) -> Result<(), StepError> {
    let search = CgroupSearch::new(containers)?;
    let mut left = 0;
    for _ in 0..ROUNDS {
        left = 0;
        let mut failed = None;
        let mut cgroups: BTreeSet<(String, String)> = BTreeSet::new();
        for pid in pids()? {
            match search.kill(pid) {
                Ok(killed) => {
                    left += usize::from(!killed.is_empty());
                    cgroups.extend(killed);
                }
                Err(step) => drop(failed.get_or_insert(step)),
            }
        }
        if left == 0 {
            return failed.map_or(Ok(()), Err);
        }
        for (id, cgroups) in &cgroups {
            cgroup::kill_or_thaw(Path::new(ROOT), cgroups, id)?;
        }
        thread::sleep(ROUND_DELAY);
    }
    let reason = format!("{left} processes keep running or appearing after repeated SIGKILL");
    Err(StepError::new("kill containers", io::Error::other(reason)))
}

/// A process in a pod's namespaces whose container is not known.
#[derive(Debug)]
pub struct UnknownProcess {
    /// The process.
    pub process: ProcessHandle,
    /// Content of its `/proc/PID/cgroup`.
    cgroups: String,
}

impl UnknownProcess {
    /// It is in a cgroup below the pod's `cgroup_parent`, where only root puts processes: it is of
    /// the pod, unlike a debugger that has entered the pod's namespaces.
    pub fn is_below(&self, cgroup_parent: &str) -> bool {
        cgroup::is_below(&self.cgroups, cgroup_parent)
    }
}

/// The containers and processes in the namespaces of a pod.
#[derive(Debug, Default)]
pub struct NamespaceMembers {
    /// The pod's containers that have processes there. Without a bundle where there is none.
    pub containers: Vec<Container>,
    /// Processes of containers whose pod is not known: perhaps this one, with a runtime that keeps
    /// its state elsewhere, perhaps none, such as a debugger's container that has entered the pod's
    /// namespaces.
    pub unknown: Vec<UnknownProcess>,
}

/// Finds the processes in these namespaces, which are the pod's own, and their containers.
/// Containers of other pods that have entered them are left out, and so is `sandbox` itself.
/// `tasks` is containerd's directory of bundles, `root` the runtime's of states.
///
/// # Errors
/// `/proc` cannot be read.
pub fn find_in_namespaces(
    namespaces: &[NamespaceHandle],
    tasks: &Path,
    root: &Path,
    sandbox: &str,
) -> Result<NamespaceMembers, StepError> {
    let mut found = NamespaceMembers::default();
    let own: Vec<(&str, u64)> =
        namespaces.iter().filter_map(inode).filter(|(kind, own)| !is_nodes(kind, *own)).collect();
    if own.is_empty() {
        return Ok(found);
    }
    let is_inside =
        |pid: u32| own.iter().any(|(kind, own)| namespace(&pid.to_string(), kind) == Some(*own));
    for pid in pids()?.into_iter().filter(|pid| is_inside(*pid)) {
        let Some(process) = ProcessHandle::open(pid)? else { continue };
        let Some(cgroups) = cgroup::of_process(&pid.to_string())? else { continue };
        // Checked again after the pidfd is open: the pid may have been reused before.
        if !is_inside(pid) {
            continue;
        }
        // The owner of a process that is nested too deep cannot be seen.
        let owner = match cgroups.as_str() {
            "" => ProcessOwner::Unknown,
            cgroups => classify(cgroups, tasks, root, sandbox),
        };
        match owner {
            ProcessOwner::Own(container) if !found.containers.contains(&container) => {
                found.containers.push(container)
            }
            ProcessOwner::Own(_) | ProcessOwner::Other => {}
            ProcessOwner::Unknown => found.unknown.push(UnknownProcess { process, cgroups }),
        }
    }
    Ok(found)
}

/// To whom a process in a pod's namespaces belongs.
#[derive(Debug, PartialEq, Eq)]
enum ProcessOwner {
    /// To a container of the pod.
    Own(Container),
    /// To a container of another pod, or to none; or it is the pause process.
    Other,
    /// To a container whose pod is not known.
    Unknown,
}

/// To whom a process in pod `sandbox` belongs, by the content of its `/proc/PID/cgroup`.
fn classify(cgroups: &str, tasks: &Path, root: &Path, sandbox: &str) -> ProcessOwner {
    let ids: Vec<&str> = cgroup::containers(cgroups).collect();
    if ids.is_empty() || ids.contains(&sandbox) {
        return ProcessOwner::Other;
    }
    // The outermost that is known: what is below a container's cgroup, it may have named itself.
    for id in ids {
        match origin::of_container(tasks, root, id, sandbox) {
            ContainerOwner::Own => {
                return ProcessOwner::Own(Container { bundle: tasks.join(id), id: id.to_owned() });
            }
            ContainerOwner::Foreign => return ProcessOwner::Other,
            ContainerOwner::Unknown => {}
        }
    }
    ProcessOwner::Unknown
}

fn inode((kind, file): &NamespaceHandle) -> Option<(&'static str, u64)> {
    Some((kind, file.metadata().ok()?.ino()))
}

/// The inode of a namespace of a process; `process` is its pid, or `self`.
fn namespace(process: &str, kind: &str) -> Option<u64> {
    fs::metadata(format!("/proc/{process}/ns/{kind}")).map(|meta| meta.ino()).ok()
}

/// The namespace is no pod's own: the daemon is in it, or the node's first process.
fn is_nodes(kind: &str, inode: u64) -> bool {
    ["self", "1"].into_iter().any(|process| namespace(process, kind) == Some(inode))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::process::Command;

    use super::origin::ANNOTATION;
    use super::*;

    #[test]
    fn an_exited_process_is_a_zombie_until_it_is_reaped() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        assert!(!is_ending(child.id()));
        child.kill().unwrap();
        while !is_ending(child.id()) {
            thread::sleep(Duration::from_millis(1));
        }
        child.wait().unwrap();
        assert!(!is_ending(child.id()));
    }

    /// Promise: dead_shim_ends_its_pod_alone.
    #[test]
    fn processes_belong_to_the_sandbox_only_if_files_of_root_say_so() {
        let dir = tempfile::tempdir().unwrap();
        let (tasks, root) = (dir.path().join("tasks"), dir.path().join("runc"));
        let [own, foreign, unknown, pod] = ["a", "b", "c", "d"].map(|digit| digit.repeat(64));
        for (id, sandbox) in [(&own, &pod), (&foreign, &"e".repeat(64))] {
            fs::create_dir_all(tasks.join(id)).unwrap();
            fs::write(tasks.join(id).join(SANDBOX), sandbox).unwrap();
        }
        let class = |cgroups: String| classify(&cgroups, &tasks, &root, &pod);
        let container = Container { bundle: tasks.join(&own), id: own.clone() };
        assert_eq!(class(format!("0::/kubepods/pod1/{own}")), ProcessOwner::Own(container.clone()));
        // A container may make cgroups inside its own, and name them as it likes.
        assert_eq!(
            class(format!("0::/kubepods/pod1/{own}/{unknown}")),
            ProcessOwner::Own(container)
        );
        assert_eq!(class(format!("0::/kubepods/pod1/{foreign}")), ProcessOwner::Other);
        assert_eq!(class(format!("0::/kubepods/pod1/{foreign}/{unknown}")), ProcessOwner::Other);
        assert_eq!(class(format!("0::/kubepods/pod1/{foreign}/{own}")), ProcessOwner::Other);
        assert_eq!(class(format!("0::/docker/{unknown}")), ProcessOwner::Unknown);
        // The pause process itself, and who is in no container.
        assert_eq!(class(format!("0::/kubepods/pod1/{pod}")), ProcessOwner::Other);
        assert_eq!(class("0::/user.slice/session-3.scope".to_owned()), ProcessOwner::Other);
    }

    /// Promise: dead_shim_ends_its_pod_alone.
    #[test]
    fn the_nodes_own_namespaces_are_no_pods() {
        assert!(is_nodes("net", namespace("self", "net").unwrap()));
        assert!(!is_nodes("net", 1));
        let own = vec![("net", File::open("/proc/self/ns/net").unwrap())];
        let found =
            find_in_namespaces(&own, Path::new("/none"), Path::new("/none"), "pod").unwrap();
        assert!(found.containers.is_empty() && found.unknown.is_empty());
    }

    #[test]
    fn containers_are_those_whose_bundle_names_the_sandbox() {
        let tasks = tempfile::tempdir().unwrap();
        for (id, sandbox) in [("a", "pod"), ("b", "pod2"), (".c", "pod")] {
            fs::create_dir(tasks.path().join(id)).unwrap();
            fs::write(tasks.path().join(id).join(SANDBOX), sandbox).unwrap();
        }
        fs::create_dir(tasks.path().join("d")).unwrap();
        fs::create_dir(tasks.path().join("pod")).unwrap();
        fs::write(tasks.path().join("pod").join(SANDBOX), "pod").unwrap();
        let found = of_sandbox(tasks.path(), "pod").unwrap();
        assert_eq!(found, [Container { id: "a".to_owned(), bundle: tasks.path().join("a") }]);
        assert_eq!(of_sandbox(&tasks.path().join("none"), "pod").unwrap(), []);
    }

    #[test]
    fn containers_with_a_state_and_no_bundle_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let (root, tasks) = (dir.path().join("runc"), dir.path().join("tasks"));
        let runc = |sandbox: &str| {
            format!(r#"{{"config":{{"labels":["a=b","{ANNOTATION}={sandbox}","bundle=/x"]}}}}"#)
        };
        let crun =
            |sandbox: &str| format!(r#"{{ "annotations": {{ "{ANNOTATION}": "{sandbox}" }} }}"#);
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
        let expected =
            ["crun", "runc"].map(|id| Container { id: id.to_owned(), bundle: tasks.join(id) });
        assert_eq!(found, expected);
        assert_eq!(forgotten(&dir.path().join("none"), &tasks, "pod").unwrap(), []);
    }

    #[test]
    fn the_root_is_that_of_the_options_or_the_shims_own() {
        let options = Options { root: "/r".to_owned(), ..Default::default() };
        assert_eq!(runtime_root(Some(&options), "k8s.io"), Path::new("/r/k8s.io"));
        assert_eq!(
            runtime_root(Some(&Options::default()), "k8s.io"),
            Path::new("/run/containerd/runc/k8s.io")
        );
        assert_eq!(runtime_root(None, "k8s.io"), Path::new("/run/containerd/runc/k8s.io"));
    }
}
