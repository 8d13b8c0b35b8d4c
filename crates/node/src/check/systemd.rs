//! Whether systemd starts the sandboxer at boot, before containerd.

use std::process::Command;

use super::containerd::{Mode, NodeContainerd};
use super::program::run;
use super::{Finding, Level};
use base::platform::systemd_runs;

const SUBJECT: &str = "systemd";

/// The daemon's unit.
pub(crate) const SERVICE: &str = "pause-sandboxer.service";

/// The units of the sandboxer. The socket first: clients need it at boot.
pub(crate) const UNITS: [&str; 2] = ["pause-sandboxer.socket", SERVICE];

/// The name of a unit that is a word of the shell, as [`NodeContainerd::unit`] is.
pub(crate) fn unquoted(unit: &str) -> &str {
    unit.trim_matches('\'')
}

/// Queries systemd, if it runs. `containerd` is the one that runs.
pub(super) async fn examine(containerd: Option<&NodeContainerd>) -> Vec<Finding> {
    if !systemd_runs() {
        return Vec::new();
    }
    let mut command = Command::new("systemctl");
    command.args(["show", "--property=LoadState,UnitFileState,ActiveState,Before"]).args(UNITS);
    match run(command).await {
        Ok(output) => {
            let command = |node: &NodeContainerd| node.enable_command(Mode::Sandboxer);
            let running = containerd.map(|node| (node.unit.as_str(), command(node)));
            let running = running.as_ref().map(|(unit, command)| (*unit, command.as_str()));
            findings(&output.stdout, running)
        }
        Err(reason) => {
            let advice = "see journalctl --boot --priority err";
            vec![Finding::warn(SUBJECT, format!("systemctl show: {reason}"), advice)]
        }
    }
}

/// `shown` is the output of `systemctl show`: lines of properties, and a blank line between units.
/// `containerd` is the unit that runs it, and the command that repeats the last `enable`.
fn findings(shown: &str, containerd: Option<(&str, &str)>) -> Vec<Finding> {
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
                .and_then(|(name, enable)| order_finding(unit, &property("Before"), name, enable))
                .unwrap_or(finding)
        } else {
            finding
        }
    })
    .collect()
}

/// The finding about a unit that systemd may start after containerd. `before` are the units that it
/// is ordered before; `containerd` is a word of the shell; `enable` repeats the last `enable`.
fn order_finding(unit: &str, before: &str, containerd: &str, enable: &str) -> Option<Finding> {
    let name = unquoted(containerd);
    if before.split_whitespace().any(|later| later == name) {
        return None;
    }
    let fact = format!(
        "{unit} is not ordered before {name}, which runs containerd: after a reboot CRI can list \
         pods as NotReady"
    );
    Some(Finding::warn(SUBJECT, fact, format!("{enable} orders it")))
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
    use super::super::ENABLE;
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
        let all = |shown: &str, containerd: Option<&str>| {
            findings(shown, containerd.map(|containerd| (containerd, ENABLE)))
        };
        let levels = |shown: &str, containerd| {
            all(shown, containerd).iter().map(|finding| finding.level).collect::<Vec<_>>()
        };
        assert_eq!(levels(&shown, None), [Level::Ok; 2]);
        assert_eq!(levels(&shown, Some("containerd.service")), [Level::Ok, Level::Warn]);
        assert_eq!(levels(&shown, Some("k3s.service")), [Level::Warn, Level::Ok]);
        let finding = &all(&shown, Some("k3s.service"))[0];
        assert!(
            finding.fact.starts_with("pause-sandboxer.socket is not ordered before k3s.service")
        );
        assert_eq!(finding.advice, "pause-sandboxer enable --restart orders it");
        let escaped = unit("a\\x2db.service");
        assert_eq!(
            levels(&format!("{escaped}\n{escaped}"), Some("'a\\x2db.service'")),
            [Level::Ok; 2]
        );
        // A unit that is not installed, and no answer at all.
        let missing = "LoadState=not-found\nActiveState=inactive\nBefore=\n";
        assert!(all(missing, None)[0].fact.contains("is not installed"));
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
