//! What the daemon that runs says of its sandboxes.

use super::Finding;
use crate::client::{Client, Error, Sandbox};
use crate::config::Config;

const SUBJECT: &str = "sandboxes";

/// Asks the daemon; silent where none runs, which is another look's finding.
pub(super) fn look(config: &Config) -> Vec<Finding> {
    match Client::connect(config).and_then(|client| client.list(false)) {
        Ok(all) => judge(&all),
        Err(Error::Down { .. }) => Vec::new(),
        Err(e) => vec![Finding::warn(
            SUBJECT,
            format!("the daemon does not tell: {e}"),
            "systemctl restart pause-sandboxer; pods go on",
        )],
    }
}

fn judge(all: &[Sandbox]) -> Vec<Finding> {
    let of = |wanted: fn(&Sandbox) -> bool| {
        all.iter().filter(|of| wanted(of)).map(|of| of.id.as_str()).collect::<Vec<_>>()
    };
    let mut findings = Vec::new();
    let aside = of(|of| of.state == "quarantined");
    if !aside.is_empty() {
        findings.push(Finding::warn(
            SUBJECT,
            format!(
                "{} records could not be read, and nobody can end their pods: {}",
                aside.len(),
                aside.join(", ")
            ),
            format!("pause-sandboxer inspect {} tells why", aside[0]),
        ));
    }
    let unknown = of(|of| of.state == "unknown");
    if !unknown.is_empty() {
        findings.push(Finding::warn(
            SUBJECT,
            format!(
                "of {} nobody could tell whether they live: {}",
                unknown.len(),
                unknown.join(", ")
            ),
            "delete their pods, which makes the daemon look again",
        ));
    }
    let failing = of(|of| of.failed_cleanups > 0);
    if !failing.is_empty() {
        findings.push(Finding::warn(
            SUBJECT,
            format!(
                "{} cannot be cleaned up, and are tried again: {}",
                failing.len(),
                failing.join(", ")
            ),
            format!("journalctl -u pause-sandboxer | grep {} names the step", failing[0]),
        ));
    }
    if findings.is_empty() {
        let ready = of(|of| of.state == "ready").len();
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
        let of = |state: &str, failed_cleanups| Sandbox {
            id: format!("id-{state}"),
            state: state.to_owned(),
            failed_cleanups,
            ..Default::default()
        };
        assert_eq!(judge(&[of("ready", 0), of("not ready", 0)])[0].fact, "1 of 2 are ready");
        let findings =
            judge(&[of("quarantined", 0), of("unknown", 0), of("not ready", 3), of("ready", 0)]);
        assert_eq!(
            findings.iter().map(|finding| finding.level).collect::<Vec<_>>(),
            [Level::Warn; 3]
        );
        assert!(findings[2].fact.contains("id-not ready"), "{findings:?}");
    }
}
