//! The settings that the sandboxer and containerd must share.

use std::collections::BTreeSet;

use base::config::{Config, Pattern};
use toml::{Table, Value};

use super::runtime;

/// The plugin with the variables that containerd gives shims.
const MANAGER: &str = "io.containerd.shim.v1.manager";

/// A setting that differs. `key` is its name in the sandboxer's config.
#[derive(Debug)]
pub(crate) struct Difference {
    pub(crate) key: &'static str,
    pub(crate) theirs: Value,
    pub(crate) ours: Value,
}

fn difference(key: &'static str, theirs: Value, ours: Value) -> Option<Difference> {
    (theirs != ours).then_some(Difference { key, theirs, ours })
}

/// The settings of CRI that differ in containerd's merged config. The defaults are containerd 2's
/// (internal/cri/config/config_unix.go).
pub(crate) fn differences(merged: &Table, config: &Config) -> Vec<Difference> {
    let set = |key: &str| runtime(merged)?.get(key);
    let switches = [
        ("restrict_oom_score_adj", false, config.restrict_oom_score_adj),
        ("enable_unprivileged_ports", true, config.enable_unprivileged_ports),
        ("enable_unprivileged_icmp", true, config.enable_unprivileged_icmp),
        ("enable_selinux", false, config.enable_selinux),
    ];
    let switches = switches.into_iter().filter_map(|(key, default, ours)| {
        let theirs = set(key).and_then(Value::as_bool).unwrap_or(default);
        difference(key, theirs.into(), ours.into())
    });
    // The levels of pods must be of one range, or pods of two sandboxers may get the same one. It
    // counts where pods get labels. containerd takes 0 and below for its library's own.
    const RANGE: &str = "selinux_category_range";
    let range = set(RANGE).and_then(Value::as_integer).filter(|range| *range > 0).unwrap_or(1024);
    let is_labelled =
        config.enable_selinux || set("enable_selinux").and_then(Value::as_bool).unwrap_or(false);
    let ours = i64::from(config.selinux_category_range);
    let range = difference(RANGE, range.into(), ours.into()).filter(|_| is_labelled);
    switches.chain(range).collect()
}

/// The annotations that the spec of a sandbox has are set here, those of its containers in
/// containerd's handler.
pub(crate) fn annotations(handler: &Table, config: &Config) -> Option<Difference> {
    const KEY: &str = "pod_annotations";
    let sorted = |names: BTreeSet<&str>| Value::from(names.into_iter().collect::<Vec<_>>());
    let theirs = handler.get(KEY).and_then(Value::as_array).into_iter().flatten();
    let theirs = sorted(theirs.filter_map(Value::as_str).collect());
    let ours = sorted(config.pod_annotations.iter().map(Pattern::as_str).collect());
    difference(KEY, theirs, ours)
}

/// The variables that containerd gives the shims that it starts, and the sandboxer does not.
pub(crate) fn missing_variables(merged: &Table, config: &Config) -> Vec<String> {
    let manager = merged.get("plugins").and_then(|plugins| plugins.get(MANAGER));
    let listed = manager.and_then(|manager| manager.get("env")).and_then(Value::as_array);
    let ours: Vec<String> = config.shim_env.iter().map(ToString::to_string).collect();
    let mut theirs: Vec<String> = listed
        .into_iter()
        .flatten()
        .filter_map(|variable| variable.as_str().map(str::to_owned))
        .collect();
    theirs.retain(|variable| !ours.contains(variable));
    theirs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_variables_are_reported() {
        let missing = |text: &str, ours: &str| {
            let file = std::path::Path::new("c.toml");
            let config =
                Config::parse(file, &format!("shim_env = {ours}"), &base::config::Flags::default())
                    .unwrap();
            missing_variables(&toml::from_str(text).unwrap(), &config)
        };
        let manager = "[plugins.'io.containerd.shim.v1.manager']\nenv = ['SCHED_CORE=1', 'A=b']";
        assert!(missing("", "[]").is_empty());
        assert!(missing(manager, "['A=b', 'SCHED_CORE=1', 'C=d']").is_empty());
        assert_eq!(missing(manager, "['A=b', 'SCHED_CORE=2']"), ["SCHED_CORE=1"]);
        assert_eq!(missing(manager, "[]"), ["SCHED_CORE=1", "A=b"]);
    }
}
