//! The pods that need the sandboxer until they are gone.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use base::config::{CONTAINERD_NAMESPACE, Config};
use base::error::{IoContext as _, StepError};
use containerd_api::cri::CriClient;

use super::{EnableError, refuse};
use crate::check::containerd::{find, shim_only};
use crate::client::{self, ClientError, Sandbox};

/// Most pods that a message names.
const NAMED: usize = 10;

/// Pods by sandbox id, as `NAMESPACE/NAME`.
pub(super) type Pods = BTreeMap<String, String>;

/// The pods of a runtime handler that CRI knows.
///
/// # Errors
/// The call failed.
pub(super) async fn of_cri(cri: &CriClient, handler: &str) -> Result<Pods, StepError> {
    let mut all = cri.pods().await?;
    all.retain(|pod| pod.runtime_handler == handler);
    let named = all.into_iter().map(|pod| {
        let name = format!("{}/{}", pod.metadata.namespace, pod.metadata.name);
        (pod.id, name)
    });
    Ok(named.collect())
}

/// Succeeds if a daemon answers, whatever that is.
///
/// # Errors
/// No daemon answers, and why.
pub(super) async fn answering_daemon(config: &Config) -> Result<(), String> {
    match client::list(config).await {
        Ok(_) | Err(ClientError::Refused(_)) => Ok(()),
        Err(e) => Err(e.to_string()),
    }
}

/// The sandboxes of the daemon: also those of pods that the default handler got, and those that CRI
/// has lost. The records of a daemon that does not answer count: its pods may still run.
///
/// # Errors
/// The records cannot be read.
pub(super) async fn of_daemon(config: &Config) -> Result<Pods, StepError> {
    match client::list(config).await {
        Ok(all) => Ok(all.into_iter().map(|one| (one.id.clone(), name_of(&one))).collect()),
        Err(_) => recorded(config),
    }
}

fn name_of(sandbox: &Sandbox) -> String {
    if sandbox.pod.is_empty() {
        return "a sandbox without a pod".to_owned();
    }
    format!("{}/{}", sandbox.namespace, sandbox.pod)
}

/// The records in every directory that a daemon of this node may have used: that of the settings,
/// the default one, and those of the notes that daemons leave beside their sockets.
fn recorded(config: &Config) -> Result<Pods, StepError> {
    const NOTE: &str = "read note of a state directory";
    let default = Config::default();
    let mut directories = BTreeSet::from([config.state_dir.clone(), default.state_dir.clone()]);
    for socket in [&config.socket, &default.socket] {
        for file in entries(super::node_state::directory_of(socket), NOTE)? {
            if file.extension().is_some_and(|ending| ending == "state") {
                let note = std::fs::read_to_string(&file).step_at(NOTE, &file)?;
                directories.insert(note.trim().into());
            }
        }
    }
    let mut pods = Pods::new();
    for state_dir in directories {
        let records = Config { state_dir, ..Config::default() }.records();
        for record in entries(&records, "read records of sandboxes")? {
            let id = record.file_name().unwrap_or_default().to_string_lossy().into_owned();
            pods.insert(id, "a sandbox whose daemon does not answer".to_owned());
        }
    }
    Ok(pods)
}

/// The pods whose shim runs without the daemon, by the processes of the shim beside this program:
/// CRI lists no pod while containerd is stopped, and the handler may be gone from its config. They
/// are those of the containerd of the settings, or of any known one if these name none.
///
/// # Errors
/// The processes cannot be listed.
pub(super) fn of_shims(config: &Config) -> Result<Pods, StepError> {
    let program = shim_only::program().step("find the shim beside this program")?;
    let of_settings = &config.containerd_address;
    let is_named = *of_settings != Config::default().containerd_address;
    with_shim(&program, |address| address == of_settings || !is_named && find::is_known(address))
}

fn with_shim(program: &Path, of_node: impl Fn(&Path) -> bool) -> Result<Pods, StepError> {
    let processes = entries("/proc".as_ref(), "list processes")?;
    let ids = processes.iter().filter_map(|process| pod_of_shim(process, program, &of_node));
    Ok(ids.map(|id| (id, "a pod whose shim runs".to_owned())).collect())
}

/// The id of the pod whose shim a process is, by its directory in `/proc`. The name of its file is
/// as the process sees it: in a container, or in the namespaces of another user, it is another
/// file. The daemon's own shims have no option `-socket`.
fn pod_of_shim(process: &Path, program: &Path, of_node: &impl Fn(&Path) -> bool) -> Option<String> {
    let executed = std::fs::read_link(process.join("exe")).ok()?;
    if process_identity::program_file(&executed) != program {
        return None;
    }
    let root = |path: &Path| std::fs::metadata(path).ok().map(|root| (root.dev(), root.ino()));
    let is_root = std::fs::metadata(process).ok()?.uid() == 0;
    if !is_root || root(&process.join("root"))? != root("/".as_ref())? {
        return None;
    }
    let arguments = std::fs::read_to_string(process.join("cmdline")).ok()?;
    let arguments: Vec<&str> = arguments.split('\0').collect();
    let value = |option: &str| {
        let at = arguments.iter().position(|argument| *argument == option)?;
        arguments.get(at + 1).copied()
    };
    value("-socket")?;
    let is_pod = value("-namespace")? == CONTAINERD_NAMESPACE;
    (is_pod && of_node(value("-address")?.as_ref())).then(|| value("-id").map(str::to_owned))?
}

/// The entries of a directory; none if it does not exist.
fn entries(directory: &Path, step: &'static str) -> Result<Vec<PathBuf>, StepError> {
    let entries = match std::fs::read_dir(directory) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.step_at(step, directory)?,
    };
    entries.map(|entry| Ok(entry.step_at(step, directory)?.path())).collect()
}

/// Fails if a pod needs one of the handlers that containerd loses. `own` are those of the drop-in.
///
/// # Errors
/// The pods, and what keeps their handler.
pub(super) async fn keep_handlers_in_use(
    config: &Config,
    lost: &[String],
    own: &[String],
) -> Result<(), EnableError> {
    let cri = CriClient::new(&config.containerd_address);
    for name in lost {
        let left = of_cri(&cri, name).await?;
        if left.is_empty() {
            continue;
        }
        let ours = of_daemon(config).await?;
        // Only the file that defines a handler restores it.
        let way = if own.contains(name) || left.keys().all(|id| ours.contains_key(id)) {
            format!("keep the handler with --handler {name}")
        } else {
            "restore the config file that defines it".to_owned()
        };
        return refuse(format!(
            "this change removes runtime handler {name}, which is used by {}: remove these pods, \
             or {way}",
            shown(&left)
        ));
    }
    Ok(())
}

/// The pods as words: how many, and the names of some.
pub(super) fn shown(pods: &Pods) -> String {
    let named = pods.iter().take(NAMED).map(|(id, name)| {
        let id: String = id.chars().take(13).collect();
        format!("{name} ({id})")
    });
    let more = if pods.len() > NAMED { ", …" } else { "" };
    let noun = if pods.len() == 1 { "pod" } else { "pods" };
    format!("{} {noun}: {}{more}", pods.len(), named.collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn records_count_where_no_daemon_answers() {
        let dir = tempfile::tempdir().unwrap();
        let config = Config {
            socket: dir.path().join("s"),
            state_dir: dir.path().to_owned(),
            ..Config::default()
        };
        let before = of_daemon(&config).await.unwrap();
        let reason = answering_daemon(&config).await.unwrap_err();
        assert!(reason.starts_with("cannot reach the daemon at ") && reason.contains("start it"));
        std::fs::create_dir_all(dir.path().join("sandboxes/0123456789abcdef")).unwrap();
        let mut pods = of_daemon(&config).await.unwrap();
        pods.retain(|id, _| !before.contains_key(id));
        assert_eq!(shown(&pods), "1 pod: a sandbox whose daemon does not answer (0123456789abc)");
        // The directory of a daemon with other settings, which its note names without a newline.
        std::fs::create_dir_all(dir.path().join("other/sandboxes/fedc")).unwrap();
        let other = dir.path().join("other");
        std::fs::write(dir.path().join("x.sock.state"), other.to_str().unwrap()).unwrap();
        assert!(of_daemon(&config).await.unwrap().contains_key("fedc"));
        // A directory that cannot be read is not one without records.
        std::fs::write(dir.path().join("file"), "").unwrap();
        let config = Config { state_dir: dir.path().join("file"), ..config };
        let step = of_daemon(&config).await.unwrap_err().to_string();
        assert!(step.starts_with("read records of sandboxes"), "{step}");
    }

    /// Promise: removal_waits_for_pods.
    #[test]
    fn a_shim_of_root_on_the_node_is_a_pod() {
        use std::os::unix::fs::PermissionsExt as _;
        use std::os::unix::process::CommandExt as _;
        use std::process::{Command, Stdio};
        if kit::skip_without_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let all = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(dir.path(), all).unwrap();
        let program = dir.path().canonicalize().unwrap().join("shim");
        let other = program.with_file_name("other");
        for path in [&program, &other] {
            kit::write_program(path, &std::fs::read("/bin/sh").unwrap()).unwrap();
        }
        let of_node = |address: &Path| address == Path::new("/n");
        let run = |command: &mut Command, words: &str| {
            command.args(["-c", "read line", "sh"]).args(words.split(' '));
            command.stdin(Stdio::piped()).spawn().unwrap()
        };
        let mut processes = vec![
            run(&mut Command::new(&program), "-namespace k8s.io -id a -address /n -socket /s"),
            run(&mut Command::new(&program), "-namespace moby -id b -address /n -socket /s"),
            run(&mut Command::new(&program), "-namespace k8s.io -id c -address /n"),
            run(&mut Command::new(&program), "-namespace k8s.io -id d -address /m -socket /s"),
            run(&mut Command::new(&other), "-namespace k8s.io -id e -address /n -socket /s"),
            run(
                Command::new(&program).uid(65534),
                "-namespace k8s.io -id f -address /n -socket /s",
            ),
        ];
        let mut ids: Vec<String> = with_shim(&program, of_node).unwrap().into_keys().collect();
        assert_eq!(ids, ["a"]);
        // A package replaces the file while it runs.
        std::fs::remove_file(&program).unwrap();
        ids = with_shim(&program, of_node).unwrap().into_keys().collect();
        assert_eq!(ids, ["a"]);
        for process in &mut processes {
            process.kill().unwrap();
            process.wait().unwrap();
        }
        assert!(with_shim(&program, of_node).unwrap().is_empty());
    }

    #[test]
    fn many_pods_are_counted() {
        let pods = (0..12).map(|n| (format!("{n:02}"), format!("default/web-{n}"))).collect();
        let shown = shown(&pods);
        assert!(shown.starts_with("12 pods: default/web-0 (00), default/web-1 (01), "), "{shown}");
        assert!(shown.ends_with("default/web-9 (09), …"), "{shown}");
    }
}
