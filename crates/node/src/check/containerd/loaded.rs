//! Whether the containerd that runs has the runtime handlers of its files: it reads them when it is
//! started, and pods of a handler that it does not have cannot start.

use super::super::Finding;
use super::{NodeContainerd, SUBJECT};
use crate::client::TIMEOUT;
use containerd_api::cri::CriClient;

/// The answer of CRI.
pub(super) enum Answer {
    /// No containerd runs with the examined file.
    NotAsked,
    /// It does not answer.
    Silent(Finding),
    /// It answers; a finding if it has not loaded all handlers.
    Loaded(Option<Finding>),
}

/// Asks CRI for its runtime handlers. `ours` are those of the merged config that name this
/// sandboxer or its shim; `restart` is the remedy if it lacks one.
pub(super) async fn ask(
    node: &NodeContainerd,
    ours: &[String],
    cri: &CriClient,
    restart: &str,
) -> Answer {
    if !node.runs_with_file {
        // The finding of the socket says so; or the file is not containerd's.
        return Answer::NotAsked;
    }
    let reason = match tokio::time::timeout(TIMEOUT, cri.status()).await {
        Ok(Ok(status)) => {
            let known = CriClient::handlers_of(status);
            return Answer::Loaded(loaded_finding(ours, &known, restart));
        }
        Ok(Err(step)) => step.to_string(),
        Err(_) => format!("CRI does not respond within {} s", TIMEOUT.as_secs()),
    };
    let advice = format!("see journalctl -u {0}; then systemctl restart {0}", node.unit);
    Answer::Silent(Finding::fail(SUBJECT, format!("{reason}, so no pod can start"), advice))
}

fn loaded_finding(ours: &[String], known: &[String], restart: &str) -> Option<Finding> {
    // A containerd that names none has not said which it has.
    let lacks = |name: &&String| !known.is_empty() && !known.contains(name);
    let lacking: Vec<String> = ours.iter().filter(lacks).map(|name| format!("{name:?}")).collect();
    if lacking.is_empty() {
        return None;
    }
    let fact = format!("has not loaded runtime handler {} of its config", lacking.join(", "));
    Some(Finding::fail(SUBJECT, fact, restart))
}

#[cfg(test)]
mod tests {
    use super::super::super::Level;
    use super::*;

    #[test]
    fn a_handler_that_is_only_in_the_files_is_a_failure() {
        let finding = |known: &[&str]| {
            let known: Vec<String> = known.iter().map(|name| (*name).to_owned()).collect();
            loaded_finding(&["a", "b"].map(str::to_owned), &known, "restart it")
        };
        assert_eq!(finding(&["", "runc", "a", "b"]), None);
        let lacks = finding(&["", "runc"]).unwrap();
        assert_eq!(lacks.level, Level::Fail);
        assert_eq!(lacks.fact, "has not loaded runtime handler \"a\", \"b\" of its config");
        assert_eq!(lacks.advice, "restart it");
        assert_eq!(finding(&[]), None);
    }
}
