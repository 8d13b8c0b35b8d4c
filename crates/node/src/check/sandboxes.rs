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
    const LOG: &str = "see journalctl -u pause-sandboxer | grep ID for the failed step";
    type Condition = fn(&Sandbox) -> bool;
    // The condition, its fact, and the advice for the first sandbox of it, `ID`.
    let problems: [(Condition, &str, String); 3] = [
        (
            |one| one.state == "quarantined",
            "records are quarantined, so their pods cannot be removed",
            "pause-sandboxer inspect ID shows the reason".to_owned(),
        ),
        (
            |one| one.state == "unknown",
            "have an unknown state",
            format!("{LOG}; pods keep running"),
        ),
        (|one| one.failed_cleanups > 0, "have a failed cleanup, which is retried", LOG.to_owned()),
    ];
    let mut findings = Vec::new();
    for (has_problem, fact, advice) in problems {
        let ids: Vec<&str> =
            all.iter().filter(|one| has_problem(one)).map(|one| one.id.as_str()).collect();
        if let Some(first) = ids.first() {
            let fact = format!("{} {fact}: {}", ids.len(), ids.join(", "));
            findings.push(Finding::warn(SUBJECT, fact, advice.replace("ID", first)));
        }
    }
    if findings.is_empty() {
        let ready = all.iter().filter(|one| one.state == "ready").count();
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
