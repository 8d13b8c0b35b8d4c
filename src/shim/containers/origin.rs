//! Which sandbox a container belongs to, by what containerd and the runtime have written of it:
//! files of root. The cgroup of a process and the namespaces that it is in are no proof: a
//! privileged process can enter any of them.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use serde::Deserialize;

/// Names the sandbox in the bundle of a task that runs at the sandbox's endpoint
/// (`ShimManager.Start`, containerd 2.0 and later, for shims of version 3).
pub const SANDBOX: &str = "sandbox";

/// The container's spec in its bundle (`NewBundle`).
const SPEC: &str = "config.json";

/// The name of a container's sandbox in its spec and its state: CRI's annotation, which runtimes
/// keep.
pub const ANNOTATION: &str = "io.kubernetes.cri.sandbox-id";

/// Where the annotations are in a container's state: of runc and youki, and of crun.
const STATES: [&str; 2] = ["state.json", "config.json"];

/// To which sandbox a container belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContainerOwner {
    /// To the sandbox in question.
    Own,
    /// To another sandbox, or to none.
    Foreign,
    /// Neither a bundle of containerd's nor a state of the runtime's names a sandbox.
    Unknown,
}

/// Whether container `id` belongs to `sandbox`: by its bundle below `tasks`, or else by the
/// runtime's state of it below `root`.
pub fn of_container(tasks: &Path, root: &Path, id: &str, sandbox: &str) -> ContainerOwner {
    match of_bundle(&tasks.join(id), sandbox) {
        ContainerOwner::Unknown => {
            let named = Named::of_state(&root.join(id));
            named.map_or(ContainerOwner::Unknown, |named| {
                ContainerOwner::by_name(named.sandbox(), sandbox)
            })
        }
        known => known,
    }
}

/// Whether the container of a bundle of containerd's belongs to `sandbox`.
pub fn of_bundle(bundle: &Path, sandbox: &str) -> ContainerOwner {
    if let Ok(named) = fs::read_to_string(bundle.join(SANDBOX)) {
        return ContainerOwner::by_name(Some(&named), sandbox);
    }
    // A task that has a shim of its own, or one that is older than the sandbox API.
    let named = Named::from_file(&bundle.join(SPEC));
    named.map_or(ContainerOwner::Unknown, |named| ContainerOwner::by_name(named.sandbox(), sandbox))
}

impl ContainerOwner {
    fn by_name(named: Option<&str>, sandbox: &str) -> Self {
        if named == Some(sandbox) { Self::Own } else { Self::Foreign }
    }
}

/// The runtime's state of a container says that it is of `sandbox`.
pub fn state_names(state: &Path, sandbox: &str) -> bool {
    Named::of_state(state).is_some_and(|named| named.sandbox() == Some(sandbox))
}

/// Annotations, as specs and states have them.
#[derive(Debug, Default, Deserialize)]
struct Named {
    /// In a spec, and in the state of most runtimes.
    #[serde(default)]
    annotations: Option<HashMap<String, serde_json::Value>>,
    /// In runc's state.
    #[serde(default)]
    config: Option<RuncConfig>,
}

#[derive(Debug, Default, Deserialize)]
struct RuncConfig {
    /// `KEY=VALUE`.
    #[serde(default)]
    labels: Option<Vec<String>>,
}

impl Named {
    /// `None`: there is no such file, or it makes no sense.
    fn from_file(path: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(path).ok()?).ok()
    }

    fn of_state(dir: &Path) -> Option<Self> {
        STATES.into_iter().find_map(|file| Self::from_file(&dir.join(file)))
    }

    fn sandbox(&self) -> Option<&str> {
        let annotated = self.annotations.as_ref().and_then(|all| all.get(ANNOTATION)?.as_str());
        annotated.or_else(|| {
            let labels = self.config.as_ref()?.labels.as_ref()?;
            labels
                .iter()
                .find_map(|label| label.split_once('=').filter(|(key, _)| *key == ANNOTATION))
                .map(|(_, id)| id)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Promise: only_files_of_root_count.
    #[test]
    fn a_container_belongs_to_the_sandbox_only_if_files_of_root_say_so() {
        let dir = tempfile::tempdir().unwrap();
        let (tasks, root) = (dir.path().join("tasks"), dir.path().join("runc"));
        let spec = |sandbox: &str| {
            format!(r#"{{"ociVersion":"1.2.0","annotations":{{"{ANNOTATION}":"{sandbox}"}}}}"#)
        };
        let runc = |sandbox: &str| {
            format!(r#"{{"config":{{"labels":["a=b","{ANNOTATION}={sandbox}"]}}}}"#)
        };
        for (path, content) in [
            ("tasks/own/sandbox", "pod".to_owned()),
            ("tasks/longer/sandbox", "pod2".to_owned()),
            // The name in the bundle counts, whatever the others say.
            ("tasks/foreign/sandbox", "other".to_owned()),
            ("tasks/foreign/config.json", spec("pod")),
            ("runc/foreign/state.json", runc("pod")),
            ("tasks/own-shim/config.json", spec("pod")),
            ("tasks/of-no-pod/config.json", "{}".to_owned()),
            ("runc/of-no-pod/state.json", runc("pod")),
            ("tasks/unfinished/config.json", "{".to_owned()),
            ("runc/forgotten/state.json", runc("pod")),
            ("runc/crun/config.json", spec("pod")),
            ("runc/others/state.json", runc("other")),
            ("runc/no-ones/state.json", r#"{"config":{"labels":null}}"#.to_owned()),
            // Text that holds the name says nothing.
            (
                "runc/mentions/state.json",
                r#"{"config":{"labels":["x=io.kubernetes.cri.sandbox-id=pod"]}}"#.to_owned(),
            ),
        ] {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        for (id, expected) in [
            ("own", ContainerOwner::Own),
            ("longer", ContainerOwner::Foreign),
            ("foreign", ContainerOwner::Foreign),
            ("own-shim", ContainerOwner::Own),
            ("of-no-pod", ContainerOwner::Foreign),
            ("unfinished", ContainerOwner::Unknown),
            ("forgotten", ContainerOwner::Own),
            ("crun", ContainerOwner::Own),
            ("others", ContainerOwner::Foreign),
            ("no-ones", ContainerOwner::Foreign),
            ("mentions", ContainerOwner::Foreign),
            ("none", ContainerOwner::Unknown),
        ] {
            assert_eq!(of_container(&tasks, &root, id, "pod"), expected, "{id}");
        }
        assert!(
            state_names(&root.join("crun"), "pod") && !state_names(&root.join("others"), "pod")
        );
    }
}
