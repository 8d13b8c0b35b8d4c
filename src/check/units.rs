//! The units: whether systemd starts the sandboxer at the next boot, before containerd.

use std::path::Path;
use std::process::Command;

use super::Finding;

const SUBJECT: &str = "systemd";

/// Socket first: it is what callers find at boot.
const UNITS: [&str; 2] = ["pause-sandboxer.socket", "pause-sandboxer.service"];

/// Asks systemd, where it runs.
pub(super) fn look() -> Vec<Finding> {
    if !Path::new("/run/systemd/system").exists() {
        return Vec::new();
    }
    UNITS
        .iter()
        .flat_map(|unit| judge(unit, &ask("is-enabled", unit), &ask("is-active", unit)))
        .collect()
}

/// The one word that systemctl says.
fn ask(question: &str, unit: &str) -> String {
    let output = Command::new("systemctl").args([question, unit]).output();
    output
        .map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned())
        .unwrap_or_default()
}

fn judge(unit: &str, enabled: &str, active: &str) -> Vec<Finding> {
    let start = format!("systemctl enable --now {unit}");
    match (enabled, active) {
        ("" | "not-found", _) => vec![Finding::warn(
            SUBJECT,
            format!("{unit} is not installed, so nothing starts the daemon at boot"),
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
            format!("journalctl -u {unit} tells why; then systemctl restart {unit}"),
        )],
        ("enabled", "active") => {
            vec![Finding::ok(SUBJECT, format!("{unit} is enabled and active"))]
        }
        ("enabled", _) => vec![Finding::warn(SUBJECT, format!("{unit} is {active}"), start)],
        _ => vec![Finding::warn(
            SUBJECT,
            format!(
                "{unit} is {enabled}: after a reboot containerd finds no sandboxer, and leaves its pods unknown"
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
            ("enabled", "failed", Level::Fail),
            ("disabled", "active", Level::Warn),
            ("masked", "inactive", Level::Fail),
            ("not-found", "inactive", Level::Warn),
            ("", "", Level::Warn),
        ] {
            let findings = judge("x.service", enabled, active);
            assert_eq!((findings.len(), findings[0].level), (1, level), "{enabled} {active}");
            assert!(level == Level::Ok || !findings[0].advice.is_empty());
        }
    }
}
