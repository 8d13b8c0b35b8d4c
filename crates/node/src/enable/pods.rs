//! The pods that need a runtime handler until they are gone.

use std::collections::BTreeMap;
use std::path::Path;

use crate::client::{Client, ClientError};
use base::config::Config;
use base::error::{IoContext as _, StepError};
use containerd_api::cri::CriClient;

/// Most pods that a message names.
const NAMED: usize = 10;

/// Pods by sandbox id, as `NAMESPACE/NAME`.
pub(super) type Pods = BTreeMap<String, String>;

/// The pods of runtime handlers that CRI knows.
///
/// # Errors
/// The call failed.
pub(super) async fn of_cri(cri: &CriClient, handlers: &[String]) -> Result<Pods, StepError> {
    let all = cri.pods().await?.into_iter();
    let theirs = all.filter(|pod| handlers.contains(&pod.runtime_handler));
    Ok(theirs
        .map(|pod| {
            let name = format!("{}/{}", pod.metadata.namespace, pod.metadata.name);
            (pod.id, name)
        })
        .collect())
}

/// The sandboxes of the daemon: also those of pods that the default handler got, and those that CRI
/// has lost. Without a daemon its records count. Not for a task: the client has a runtime of its
/// own.
///
/// # Errors
/// A local step failed, or the daemon's directory cannot be read.
pub(super) fn of_daemon(config: &Config) -> Result<Pods, StepError> {
    match listed(config)? {
        Some(pods) => Ok(pods),
        // It may only be down: its pods keep running.
        None => records(&config.records()),
    }
}

/// The recorded sandboxes of a daemon that does not answer; none where it does. Not for a task, as
/// [`of_daemon`].
///
/// # Errors
/// A local step failed, or the daemon's directory cannot be read.
pub(super) fn of_stopped_daemon(config: &Config) -> Result<Pods, StepError> {
    match listed(config)? {
        Some(_) => Ok(Pods::new()),
        None => records(&config.records()),
    }
}

/// Succeeds if a daemon answers, whatever that is. Not for a task, as [`of_daemon`].
///
/// # Errors
/// None answers, and why.
pub(super) fn answering_daemon(config: &Config) -> Result<(), String> {
    match Client::connect(config).and_then(|client| client.list(false)) {
        Ok(_) | Err(ClientError::Refused(_)) => Ok(()),
        Err(e) => Err(e.to_string()),
    }
}

/// The sandboxes that the daemon lists; `None` if it does not respond.
fn listed(config: &Config) -> Result<Option<Pods>, StepError> {
    let all = match Client::connect(config).and_then(|client| client.list(false)) {
        Ok(all) => all,
        Err(ClientError::Step(step)) => return Err(step),
        Err(_) => return Ok(None),
    };
    let named = |pod: &str, namespace: &str| match pod {
        "" => "a sandbox without a pod".to_owned(),
        pod => format!("{namespace}/{pod}"),
    };
    Ok(Some(all.into_iter().map(|of| (of.id, named(&of.pod, &of.namespace))).collect()))
}

fn records(directory: &Path) -> Result<Pods, StepError> {
    const STEP: &str = "read records of sandboxes";
    let entries = match std::fs::read_dir(directory) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Pods::new()),
        entries => entries.step_at(STEP, directory)?,
    };
    let mut pods = Pods::new();
    for entry in entries {
        let id = entry.step_at(STEP, directory)?.file_name().to_string_lossy().into_owned();
        pods.insert(id, "a sandbox whose daemon does not answer".to_owned());
    }
    Ok(pods)
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

    #[test]
    fn records_count_where_no_daemon_answers() {
        let dir = tempfile::tempdir().unwrap();
        let config = Config {
            socket: dir.path().join("s"),
            state_dir: dir.path().to_owned(),
            ..Config::default()
        };
        assert!(of_daemon(&config).unwrap().is_empty());
        let reason = answering_daemon(&config).unwrap_err();
        assert!(reason.starts_with("cannot reach the daemon at ") && reason.contains("start it"));
        std::fs::create_dir_all(dir.path().join("sandboxes/0123456789abcdef")).unwrap();
        let pods = of_daemon(&config).unwrap();
        assert_eq!(shown(&pods), "1 pod: a sandbox whose daemon does not answer (0123456789abc)");
        assert_eq!(of_stopped_daemon(&config).unwrap(), pods);
    }

    #[test]
    fn many_pods_are_counted() {
        let pods = (0..12).map(|n| (format!("{n:02}"), format!("default/web-{n}"))).collect();
        let shown = shown(&pods);
        assert!(shown.starts_with("12 pods: default/web-0 (00), default/web-1 (01), "), "{shown}");
        assert!(shown.ends_with("default/web-9 (09), …"), "{shown}");
    }
}
