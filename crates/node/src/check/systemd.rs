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
    let examine =
        |unit: &&str| unit_finding(unit, &query("is-enabled", unit), &query("is-active", unit));
    UNITS.iter().map(examine).collect()
}

/// The one word that systemctl prints.
fn query(question: &str, unit: &str) -> String {
    let output = Command::new("systemctl").args([question, unit]).output();
    output
        .map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned())
        .unwrap_or_default()
}

fn unit_finding(unit: &str, enabled: &str, active: &str) -> Finding {
    let start = format!("systemctl enable --now {unit}");
    let see = format!("see journalctl -u {unit}; then systemctl restart {unit}");
    match (enabled, active) {
        ("" | "not-found", _) => Finding::warn(
            SUBJECT,
            format!("{unit} is not installed, so the daemon is not started at boot"),
            "install the package, or the units of packaging/systemd/",
        ),
        ("masked", _) => Finding::fail(
            SUBJECT,
            format!("{unit} is masked"),
            format!("systemctl unmask {unit} && {start}"),
        ),
        (_, "failed") => Finding::fail(SUBJECT, format!("{unit} has failed"), see),
        ("enabled", "active") => Finding::ok(SUBJECT, format!("{unit} is enabled and active")),
        ("enabled", "activating") => {
            Finding::warn(SUBJECT, format!("{unit} is starting, or restarts repeatedly"), see)
        }
        ("enabled", _) => Finding::warn(SUBJECT, format!("{unit} is {active}"), start),
        _ => Finding::warn(
            SUBJECT,
            format!(
                "{unit} is {enabled}: after a reboot containerd finds no sandboxer, so its pods \
                 can be neither started nor removed"
            ),
            start,
        ),
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
            let finding = unit_finding("x.service", enabled, active);
            assert_eq!(finding.level, level, "{enabled} {active}");
            assert!(level == Level::Ok || !finding.advice.is_empty());
        }
    }
}
