//! Whether the containerd that runs has the runtime handlers of its files: it reads them when it is
//! started, and pods of a handler that it does not have cannot start.

use super::super::Finding;
use super::{NodeContainerd, SUBJECT};
use base::config::Config;
use containerd_api::cri::CriClient;

/// Asks CRI for its runtime handlers. `ours` are those of the merged config that name this
/// sandboxer.
pub(super) async fn examine(
    node: &NodeContainerd,
    ours: &[String],
    config: &Config,
) -> Vec<Finding> {
    if !node.runs_with_file || ours.is_empty() {
        // The finding of the socket, or of the config, says so; or the file is not containerd's.
        return Vec::new();
    }
    match CriClient::new(&config.containerd_address).status().await {
        Ok(status) => loaded_findings(ours, &CriClient::handlers_of(status), &node.unit),
        Err(step) => vec![Finding::warn(
            SUBJECT,
            step.to_string(),
            format!("its runtime handlers are unknown: see journalctl -u {}", node.unit),
        )],
    }
}

fn loaded_findings(ours: &[String], known: &[String], unit: &str) -> Vec<Finding> {
    // A containerd that names none has not said which it has.
    let lacks = |name: &&String| !known.is_empty() && !known.contains(name);
    let finding = |name: &String| {
        let fact = format!("has not loaded runtime handler {name:?} of its config");
        let advice =
            format!("systemctl restart {unit}, while the daemon responds; pods keep running");
        Finding::fail(SUBJECT, fact, advice)
    };
    ours.iter().filter(lacks).map(finding).collect()
}

#[cfg(test)]
mod tests {
    use super::super::super::Level;
    use super::*;

    #[test]
    fn a_handler_that_is_only_in_the_files_is_a_failure() {
        let findings = |known: &[&str]| {
            let known: Vec<String> = known.iter().map(|name| (*name).to_owned()).collect();
            loaded_findings(&["runc-pause".to_owned()], &known, "k3s.service")
        };
        assert!(findings(&["", "runc", "runc-pause"]).is_empty());
        let lacks = &findings(&["", "runc"])[0];
        assert_eq!(lacks.level, Level::Fail);
        assert_eq!(lacks.fact, "has not loaded runtime handler \"runc-pause\" of its config");
        assert!(lacks.advice.starts_with("systemctl restart k3s.service"), "{lacks}");
        assert!(findings(&[]).is_empty());
    }
}
