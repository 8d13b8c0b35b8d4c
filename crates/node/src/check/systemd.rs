//! Whether systemd starts the sandboxer at boot, before containerd.

use std::path::Path;
use std::process::Command;

use super::Finding;

const SUBJECT: &str = "systemd";

/// The socket first: clients need it at boot.
const UNITS: [&str; 2] = ["pause-sandboxer.socket", "pause-sandboxer.service"];

/// Queries systemd, if it runs.
pub(super) fn examine() -> Vec<Finding> {
    if !Path::new("/run/systemd/system").exists() {
        return Vec::new();
    }
    UNITS
        .iter()
        .flat_map(|unit| unit_findings(unit, &query("is-enabled", unit), &query("is-active", unit)))
        .collect()
}

/// The one word that systemctl prints.
fn query(question: &str, unit: &str) -> String {
    let output = Command::new("systemctl").args([question, unit]).output();
    output
        .map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned())
        .unwrap_or_default()
}

fn unit_findings(unit: &str, enabled: &str, active: &str) -> Vec<Finding> {
    let start = format!("systemctl enable --now {unit}");
    match (enabled, active) {
        ("" | "not-found", _) => vec![Finding::warn(
            SUBJECT,
            format!("{unit} is not installed, so the daemon is not started at boot"),
            "install the package, or the units of packaging/systemd/",
        )],
        ("masked", _) => {
            vec![Finding::fail(
                SUBJECT,
                format!("{unit} is masked"),
                format!("systemctl unmask {unit} && {start}"),
            )]
        }
        (_, "failed") => vec![Finding::fail(
            SUBJECT,
            format!("{unit} has failed"),
            format!("see journalctl -u {unit}; then systemctl restart {unit}"),
        )],
        ("enabled", "active") => {
            vec![Finding::ok(SUBJECT, format!("{unit} is enabled and active"))]
        }
        ("enabled", "activating") => vec![Finding::warn(
            SUBJECT,
            format!("{unit} is starting, or restarts repeatedly"),
            format!("see journalctl -u {unit}"),
        )],
        ("enabled", _) => vec![Finding::warn(SUBJECT, format!("{unit} is {active}"), start)],
        _ => vec![Finding::warn(
            SUBJECT,
            format!(
                "{unit} is {enabled}: after a reboot containerd finds no sandboxer, so its pods \
                 can be neither started nor removed"
            ),
            start,
        )],
    }
}

#[cfg(test)]
mod tests {
    use super::super::Level;
    use super::*;

    #[test]
    fn states_of_units() {
        for (enabled, active, level) in [
            ("enabled", "active", Level::Ok),
            ("enabled", "inactive", Level::Warn),
            ("enabled", "activating", Level::Warn),
            ("enabled", "failed", Level::Fail),
            ("disabled", "active", Level::Warn),
            ("masked", "inactive", Level::Fail),
            ("not-found", "inactive", Level::Warn),
            ("", "", Level::Warn),
        ] {
            let findings = unit_findings("x.service", enabled, active);
            assert_eq!((findings.len(), findings[0].level), (1, level), "{enabled} {active}");
            assert!(level == Level::Ok || !findings[0].advice.is_empty());
        }
    }
}
