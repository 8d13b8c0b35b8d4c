//! The shim without the daemon: runtime handlers of containerd's built-in controller whose
//! `runtime_path` is the shim beside this program.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use base::config::Config;
use toml::{Table, Value};

use super::super::program::run;
use super::super::{Finding, Subject, kubelet};
use super::{CONFIG, Mode, NodeContainerd, all, find, proxy, runtimes, same_file, text};
use crate::trust::check_trusted;

const SUBJECT: &str = "shim";

/// The program's name.
const NAME: &str = "pause-sandboxer-runc-shim";

/// The shim beside this program.
///
/// # Errors
/// The kernel does not name this program.
pub(crate) fn program() -> io::Result<PathBuf> {
    Ok(std::env::current_exe()?.with_file_name(NAME))
}

/// The names of the handlers that have the shim, but for those of the sandboxer, `ours`.
pub(super) fn handlers(table: &Table, ours: &[String]) -> Vec<String> {
    let Ok(shim) = program() else { return Vec::new() };
    let has_shim = |handler: &Value| same_file(text(handler.get("runtime_path")).as_ref(), &shim);
    let named = runtimes(table).filter(|(name, handler)| !ours.contains(name) && has_shim(handler));
    named.map(|(name, _)| name.clone()).collect()
}

/// The node, if its containerd has such handlers and does not know the sandboxer: nothing of the
/// daemon is examined there. Without a daemon no setting says where containerd is. Of a config that
/// containerd cannot load, the drop-ins count.
pub(crate) async fn find_node(subject: &Subject) -> Option<Subject> {
    let mut found = subject.clone();
    let config = &mut found.config;
    if let Ok(Some(address)) = find::address(config, subject) {
        config.containerd_address = address;
    }
    let node = NodeContainerd::find(&found);
    let Ok(merged) = node.dump().await else {
        let is_shim_only = node.has_drop_in(Mode::ShimOnly) && !node.has_drop_in(Mode::Sandboxer);
        return is_shim_only.then_some(found);
    };
    let Config { containerd_root, containerd_state, .. } = &mut found.config;
    for (key, path) in [("root", containerd_root), ("state", containerd_state)] {
        let set = merged.get(key).and_then(Value::as_str).filter(|set| !set.is_empty());
        set.into_iter().for_each(|set| *path = set.into());
    }
    let has_only_shim =
        proxy(&merged, &found.config).is_err() && !all(&merged, &found.config).shim_only.is_empty();
    has_only_shim.then_some(found)
}

/// The version of the shim at `path`.
///
/// # Errors
/// Users other than root can change it, or it does not run.
pub(crate) async fn version(path: &Path) -> Result<String, String> {
    check_trusted(path).map_err(|step| step.to_string())?;
    let mut command = Command::new(path);
    command.arg("--version");
    let printed = run(command).await.map(|output| output.stdout.trim().to_owned());
    match printed {
        Ok(version) if version.starts_with(NAME) => Ok(version),
        Ok(other) => Err(format!("{} --version: prints {other:?}", path.display())),
        Err(reason) => Err(format!("{} --version: {reason}", path.display())),
    }
}

/// Examines the shim of these handlers.
pub(super) async fn examine(handlers: &kubelet::Handlers) -> Vec<Finding> {
    let names = handlers.shim_only.iter().map(|name| format!("{name:?}"));
    let names = names.collect::<Vec<_>>().join(", ");
    let path = match program() {
        Ok(path) if !names.is_empty() => path,
        _ => return Vec::new(),
    };
    let fact = format!("runtime handlers of the shim without the sandboxer: {names}");
    let shim = match version(&path).await {
        Ok(version) => Finding::ok(SUBJECT, format!("{}: {version}", path.display())),
        Err(reason) => Finding::fail(
            SUBJECT,
            format!("{reason}, so no pod of runtime handler {names} can start"),
            "install it again, so that only root can write it and its directories",
        ),
    };
    vec![Finding::ok(CONFIG, fact), shim]
}

#[cfg(test)]
mod tests {
    use super::super::super::Level;
    use super::*;

    #[test]
    fn a_handler_of_the_shim_names_its_path_and_no_sandboxer() {
        let shim = program().unwrap();
        let handler = |name: &str, settings: &str| {
            format!(
                "[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.{name}]\n{settings}"
            )
        };
        let text = handler("a", &format!("runtime_path = {shim:?}\n"))
            + &handler("b", "runtime_path = '/usr/bin/containerd-shim-runc-v2'\n")
            + &handler("c", "runtime_path = ''\n")
            + &handler("d", "")
            + &handler("e", &format!("runtime_path = {shim:?}\nsandboxer = 'mine'\n"));
        let table = text.parse().unwrap();
        assert_eq!(handlers(&table, &["e".to_owned()]), ["a"]);
    }

    /// Promise: only_files_of_root_count.
    #[tokio::test]
    async fn a_shim_that_others_can_change_is_not_executed() {
        use std::os::unix::fs::PermissionsExt as _;
        if kit::skip_without_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let (path, ran) = (dir.path().join(NAME), dir.path().join("ran"));
        let script = format!("#!/bin/sh\ntouch {}\necho {NAME} 1.2.3\n", ran.display());
        kit::write_program(&path, script.as_bytes()).unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
        let reason = version(&path).await.unwrap_err();
        assert!(reason.contains("users other than root") && !ran.exists(), "{reason}");
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(version(&path).await.unwrap(), format!("{NAME} 1.2.3"));
        assert!(ran.exists());
    }

    /// No shim is beside this test.
    #[tokio::test]
    async fn a_missing_shim_is_a_failure_of_its_handlers() {
        let handlers = |names: &[&str]| kubelet::Handlers {
            shim_only: names.iter().map(ToString::to_string).collect(),
            ..Default::default()
        };
        assert_eq!(examine(&handlers(&[])).await, []);
        let findings = examine(&handlers(&["a", "b"])).await;
        let levels: Vec<Level> = findings.iter().map(|finding| finding.level).collect();
        assert_eq!(levels, [Level::Ok, Level::Fail]);
        assert!(findings[1].fact.ends_with("so no pod of runtime handler \"a\", \"b\" can start"));
    }
}
