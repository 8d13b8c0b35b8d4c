//! The fields of a bundle's `config.json` that the shim uses.

use std::path::Path;

use serde::Deserialize;

use crate::cgroup::Cgroup;
use crate::exits;

/// The fields of `config.json` that the shim uses.
#[derive(Debug, Default)]
pub struct Config {
    /// The container gets its own PID namespace, so that the kernel kills all of its processes when
    /// the first one exits. False if `config.json` cannot be read: the runtime then kills all
    /// processes one by one.
    pub own_pid_namespace: bool,
    /// The `cgroupsPath`; empty if there is none.
    pub cgroups_path: String,
    /// The group of containers that one server serves, such as a pod.
    pub group: Option<String>,
}

#[derive(Debug, Deserialize)]
struct File {
    linux: Option<Linux>,
    annotations: Option<Annotations>,
}

#[derive(Debug, Deserialize)]
struct Annotations {
    #[serde(rename = "io.containerd.runc.v2.group")]
    group: Option<String>,
    #[serde(rename = "io.kubernetes.cri.sandbox-id")]
    sandbox: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Linux {
    #[serde(default)]
    namespaces: Vec<Namespace>,
    #[serde(default, rename = "cgroupsPath")]
    cgroups_path: String,
}

#[derive(Debug, Deserialize)]
struct Namespace {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    path: String,
}

impl Config {
    /// Reads the config of a bundle.
    pub fn read(bundle: &Path) -> Self {
        Self::parse(&std::fs::read(bundle.join("config.json")).unwrap_or_default())
    }

    /// Parses a config.
    pub fn parse(text: &[u8]) -> Self {
        let Ok(file) = serde_json::from_slice::<File>(text) else { return Self::default() };
        let group = file.annotations.and_then(|it| it.group.or(it.sandbox));
        let Some(linux) = file.linux else { return Self { group, ..Self::default() } };
        let is_own = |one: &Namespace| one.kind == "pid" && one.path.is_empty();
        Self {
            own_pid_namespace: linux.namespaces.iter().any(is_own),
            cgroups_path: linux.cgroups_path,
            group,
        }
    }

    /// The cgroup that the bundle asks for, if its last path element is the container's id, so that
    /// it cannot be the cgroup of another container.
    pub fn cgroup(&self, id: &str) -> Option<Cgroup> {
        Cgroup::named(&self.cgroups_path, id)
    }

    /// The cgroup of the container whose first process has this pid: as the kernel reports it, or
    /// else as the bundle asks for it. For a process that has exited, version 1 reports the root
    /// cgroup.
    pub fn cgroup_with(&self, id: &str, pid: i32) -> Option<Cgroup> {
        let seen = Cgroup::of_process(pid).filter(|_| exits::exit_of_child(pid).is_none());
        seen.or_else(|| self.cgroup(id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cgroup_of_an_exited_process_is_taken_from_the_bundle() {
        let dir = tempfile::tempdir().unwrap();
        let config = r#"{"linux":{"cgroupsPath":"/x/id"}}"#;
        std::fs::write(dir.path().join("config.json"), config).unwrap();
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        while exits::exit_of_child(pid).is_none() {
            std::thread::yield_now();
        }
        let wanted = Cgroup::named("/x/id", "id");
        assert!(wanted.is_some());
        assert_eq!(Config::read(dir.path()).cgroup_with("id", pid), wanted);
        child.wait().unwrap();
    }

    #[test]
    fn the_group_is_an_annotation() {
        let group = |config: &str| Config::parse(config.as_bytes()).group;
        let sandbox = r#""io.kubernetes.cri.sandbox-id":"s","other":"x""#;
        assert_eq!(group(&format!(r#"{{"annotations":{{{sandbox}}}}}"#)).as_deref(), Some("s"));
        let own = r#""io.containerd.runc.v2.group":"g""#;
        let both = format!(r#"{{"linux":{{}},"annotations":{{{sandbox},{own}}}}}"#);
        assert_eq!(group(&both).as_deref(), Some("g"));
        for without in [r#"{"annotations":{}}"#, r#"{"annotations":null}"#, "{}", ""] {
            assert_eq!(group(without), None, "{without}");
        }
    }

    #[test]
    fn only_a_new_pid_namespace_counts_as_own() {
        let dir = tempfile::tempdir().unwrap();
        let has = |config: &str| {
            std::fs::write(dir.path().join("config.json"), config).unwrap();
            Config::read(dir.path()).own_pid_namespace
        };
        assert!(has(r#"{"linux":{"namespaces":[{"type":"mount"},{"type":"pid"}]}}"#));
        assert!(!has(r#"{"linux":{"namespaces":[{"type":"pid","path":"/proc/1/ns/pid"}]}}"#));
        for without in [r#"{"linux":{"namespaces":[]}}"#, r#"{"linux":{}}"#, "{}", "rubbish"] {
            assert!(!has(without), "{without}");
        }
        assert!(!Config::read(&dir.path().join("none")).own_pid_namespace);
    }
}
