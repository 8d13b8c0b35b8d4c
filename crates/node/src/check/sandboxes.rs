//! The sandboxes of the running daemon.

use super::Finding;
use crate::client::{Client, ClientError, Sandbox};
use base::config::Config;

const SUBJECT: &str = "sandboxes";

/// Queries the daemon. No finding if none runs, which others report.
pub(super) async fn examine(config: &Config) -> Vec<Finding> {
    let listed = async { Client::connect(config).await?.list(false).await };
    match listed.await {
        Ok(all) => sandbox_findings(&all),
        Err(ClientError::Down { .. }) => Vec::new(),
        Err(e) => vec![Finding::warn(
            SUBJECT,
            format!("cannot query the daemon: {e}"),
            "systemctl restart pause-sandboxer; pods keep running",
        )],
    }
}

fn sandbox_findings(all: &[Sandbox]) -> Vec<Finding> {
    let ids = |wanted: fn(&Sandbox) -> bool| {
        all.iter().filter(|one| wanted(one)).map(|one| one.id.as_str()).collect::<Vec<_>>()
    };
    let mut findings = Vec::new();
    let quarantined = ids(|one| one.state == "quarantined");
    if !quarantined.is_empty() {
        findings.push(Finding::warn(
            SUBJECT,
            format!(
                "{} records are quarantined, so their pods cannot be removed: {}",
                quarantined.len(),
                quarantined.join(", ")
            ),
            format!("pause-sandboxer inspect {} shows the reason", quarantined[0]),
        ));
    }
    let unknown = ids(|one| one.state == "unknown");
    if !unknown.is_empty() {
        findings.push(Finding::warn(
            SUBJECT,
            format!("{} have an unknown state: {}", unknown.len(), unknown.join(", ")),
            format!(
                "see journalctl -u pause-sandboxer | grep {} for the failed step; pods keep \
                 running",
                unknown[0]
            ),
        ));
    }
    let failing = ids(|one| one.failed_cleanups > 0);
    if !failing.is_empty() {
        findings.push(Finding::warn(
            SUBJECT,
            format!(
                "the cleanup of {} failed and is retried: {}",
                failing.len(),
                failing.join(", ")
            ),
            format!("see journalctl -u pause-sandboxer | grep {} for the failed step", failing[0]),
        ));
    }
    if findings.is_empty() {
        let ready = ids(|one| one.state == "ready").len();
        findings.push(Finding::ok(SUBJECT, format!("{ready} of {} are ready", all.len())));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::super::Level;
    use super::*;

    #[test]
    fn each_kind_of_trouble_is_one_finding() {
        let sandbox = |state: &str, failed_cleanups| Sandbox {
            id: format!("id-{state}"),
            state: state.to_owned(),
            failed_cleanups,
            ..Default::default()
        };
        assert_eq!(
            sandbox_findings(&[sandbox("ready", 0), sandbox("not ready", 0)])[0].fact,
            "1 of 2 are ready"
        );
        let findings = sandbox_findings(&[
            sandbox("quarantined", 0),
            sandbox("unknown", 0),
            sandbox("not ready", 3),
            sandbox("ready", 0),
        ]);
        assert_eq!(
            findings.iter().map(|finding| finding.level).collect::<Vec<_>>(),
            [Level::Warn; 3]
        );
        assert!(findings[2].fact.contains("id-not ready"), "{findings:?}");
    }
}
