//! Whether systemd starts the sandboxer at boot, before containerd.

use std::path::Path;
use std::process::Command;

use super::program::run;
use super::{Finding, Level};

const SUBJECT: &str = "systemd";

/// The socket first: clients need it at boot.
const UNITS: [&str; 2] = ["pause-sandboxer.socket", "pause-sandboxer.service"];

/// Queries systemd, if it runs. `containerd` is the unit of the containerd that runs.
pub(super) async fn examine(containerd: Option<&str>) -> Vec<Finding> {
    if !Path::new("/run/systemd/system").exists() {
        return Vec::new();
    }
    let mut command = Command::new("systemctl");
    command.args(["show", "--property=LoadState,UnitFileState,ActiveState,Before"]).args(UNITS);
    match run(command).await {
        Ok(output) => findings(&output.stdout, containerd),
        Err(reason) => {
            let advice = "see journalctl --boot --priority err";
            vec![Finding::warn(SUBJECT, format!("systemctl show: {reason}"), advice)]
        }
    }
}

/// `shown` is the output of `systemctl show`: lines of properties, and a blank line between units.
fn findings(shown: &str, containerd: Option<&str>) -> Vec<Finding> {
    let all = UNITS.iter().zip(shown.split("\n\n").chain([""; UNITS.len()]));
    all.map(|(unit, text)| {
        let property = |name: &str| {
            let value = |line: &str| Some(line.strip_prefix(name)?.strip_prefix('=')?.to_owned());
            text.lines().find_map(value).unwrap_or_default()
        };
        let loaded = property("LoadState");
        let enabled = if loaded == "loaded" { property("UnitFileState") } else { loaded };
        let finding = unit_finding(unit, &enabled, &property("ActiveState"));
        if finding.level == Level::Ok {
            containerd
                .and_then(|containerd| order_finding(unit, &property("Before"), containerd))
                .unwrap_or(finding)
        } else {
            finding
        }
    })
    .collect()
}

/// The finding about a unit that systemd may start after containerd. `before` are the units that it
/// is ordered before; `containerd` is a word of the shell.
fn order_finding(unit: &str, before: &str, containerd: &str) -> Option<Finding> {
    let name = containerd.trim_matches('\'');
    if before.split_whitespace().any(|later| later == name) {
        return None;
    }
    let fact = format!(
        "{unit} is not ordered before {name}, which runs containerd: after a reboot CRI can list \
         pods as NotReady"
    );
    let advice = format!(
        "mkdir -p /etc/systemd/system/{unit}.d && printf '[Unit]\\nBefore=%s\\n' {containerd} \
         >/etc/systemd/system/{unit}.d/containerd.conf && systemctl daemon-reload"
    );
    Some(Finding::warn(SUBJECT, fact, advice))
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
    use super::*;

    #[test]
    fn a_unit_is_ordered_before_the_one_that_runs_containerd() {
        let unit = |before: &str| {
            format!(
                "LoadState=loaded\nUnitFileState=enabled\nActiveState=active\nBefore={before}\n"
            )
        };
        let shown =
            format!("{}\n{}", unit("containerd.service shutdown.target"), unit("k3s.service"));
        let levels = |shown: &str, containerd| {
            findings(shown, containerd).iter().map(|finding| finding.level).collect::<Vec<_>>()
        };
        assert_eq!(levels(&shown, None), [Level::Ok; 2]);
        assert_eq!(levels(&shown, Some("containerd.service")), [Level::Ok, Level::Warn]);
        assert_eq!(levels(&shown, Some("k3s.service")), [Level::Warn, Level::Ok]);
        let finding = &findings(&shown, Some("k3s.service"))[0];
        assert!(
            finding.fact.starts_with("pause-sandboxer.socket is not ordered before k3s.service")
        );
        assert!(finding.advice.contains("'[Unit]\\nBefore=%s\\n' k3s.service >"), "{finding}");
        let escaped = unit("a\\x2db.service");
        assert_eq!(
            levels(&format!("{escaped}\n{escaped}"), Some("'a\\x2db.service'")),
            [Level::Ok; 2]
        );
        // A unit that is not installed, and no answer at all.
        let missing = "LoadState=not-found\nActiveState=inactive\nBefore=\n";
        assert!(findings(missing, None)[0].fact.contains("is not installed"));
        assert_eq!(levels("", Some("k3s.service")), [Level::Warn; 2]);
        let masked = "LoadState=masked\nUnitFileState=masked\nActiveState=inactive\n";
        assert_eq!(levels(masked, None), [Level::Fail, Level::Warn]);
    }

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
