//! The sandboxer's own settings that must equal containerd's.

use std::path::Path;

use toml::{Table, Value};

use super::toml_text;
use crate::check::containerd::{runtime, same_file};
use base::config::Config;

/// The text of the sandboxer's config file with the settings of containerd's merged config that it
/// must share. `handler` is the table of the runtime handler. Settings that are equal, or are
/// defaults of both, are not written.
///
/// # Errors
/// The text is not TOML.
pub(super) fn adopt(
    text: &str,
    config: &Config,
    merged: &Table,
    handler: &Table,
) -> Result<String, String> {
    let mut text = text.to_owned();
    for (key, value) in differing(config, merged, handler) {
        text = toml_text::set(&text, key, &value.to_string())?;
    }
    Ok(text)
}

/// The settings that differ, with containerd's values.
fn differing(config: &Config, merged: &Table, handler: &Table) -> Vec<(&'static str, Value)> {
    let mut found = Vec::new();
    for (key, setting, ours) in [
        ("root", "containerd_root", &config.containerd_root),
        ("state", "containerd_state", &config.containerd_state),
    ] {
        let theirs = merged.get(key).and_then(Value::as_str).filter(|path| !path.is_empty());
        found.extend(
            theirs
                .filter(|theirs| !same_file(Path::new(theirs), ours))
                .map(|theirs| (setting, Value::from(theirs))),
        );
    }
    let set = |key: &str| runtime(merged)?.get(key);
    for (key, default, ours) in [
        // containerd 2's own defaults (internal/cri/config/config_unix.go).
        ("restrict_oom_score_adj", false, config.restrict_oom_score_adj),
        ("enable_unprivileged_ports", true, config.enable_unprivileged_ports),
        ("enable_unprivileged_icmp", true, config.enable_unprivileged_icmp),
        ("enable_selinux", false, config.enable_selinux),
    ] {
        let theirs = set(key).and_then(Value::as_bool).unwrap_or(default);
        if theirs != ours {
            found.push((key, Value::from(theirs)));
        }
    }
    const RANGE: &str = "selinux_category_range";
    let range = set(RANGE).and_then(Value::as_integer).filter(|range| *range > 0).unwrap_or(1024);
    if range != i64::from(config.selinux_category_range.get())
        && set("enable_selinux").and_then(Value::as_bool).unwrap_or(false)
    {
        found.push((RANGE, Value::from(range)));
    }
    let words = |value: Option<&Value>| -> Vec<String> {
        let words = value.and_then(Value::as_array).into_iter().flatten();
        words.filter_map(Value::as_str).map(str::to_owned).collect()
    };
    let (mut theirs, mut ours) = (
        words(handler.get("pod_annotations")),
        config.pod_annotations.iter().map(|p| p.as_str().to_owned()).collect::<Vec<_>>(),
    );
    theirs.sort();
    ours.sort();
    if theirs != ours {
        found.push(("pod_annotations", Value::from(theirs)));
    }
    let manager = merged.get("plugins").and_then(|plugins| plugins.get(MANAGER));
    let mut variables: Vec<String> = config.shim_env.lines().collect();
    let missing = words(manager.and_then(|manager| manager.get("env")));
    let missing: Vec<String> =
        missing.into_iter().filter(|variable| !variables.contains(variable)).collect();
    if !missing.is_empty() {
        let name = |variable: &str| variable.split('=').next().unwrap_or_default().to_owned();
        variables.retain(|set| !missing.iter().any(|new| name(new) == name(set)));
        variables.extend(missing);
        found.push(("shim_env", Value::from(variables)));
    }
    found
}

/// The plugin with the variables that containerd gives shims.
const MANAGER: &str = "io.containerd.shim.v1.manager";

#[cfg(test)]
mod tests {
    use super::*;

    fn adopted(text: &str, merged: &str, handler: &str) -> String {
        let config = Config::parse(Path::new("c.toml"), text, &[]).unwrap();
        let [merged, handler] = [merged, handler].map(|text| text.parse::<Table>().unwrap());
        let made = adopt(text, &config, &merged, &handler).unwrap();
        // It differs in nothing then.
        let config = Config::parse(Path::new("c.toml"), &made, &[]).unwrap();
        assert_eq!(adopt(&made, &config, &merged, &handler).unwrap(), made);
        made
    }

    #[test]
    fn only_what_differs_is_written() {
        let mine = "# mine\nlog_level = \"debug\"\n[shims]\n\"a.b.v1\" = \"/x\"\n";
        assert_eq!(adopted(mine, "root = '/var/lib/containerd'", ""), mine);
        let merged = "root = '/r'\nstate = ''\n[plugins.'io.containerd.cri.v1.runtime']\n\
            enable_selinux = true\nselinux_category_range = 512\n\
            [plugins.'io.containerd.shim.v1.manager']\nenv = ['A=2', 'B=1']\n";
        let made = adopted(
            &format!("shim_env = [\"A=1\", \"C=1\"]\n{mine}"),
            merged,
            "pod_annotations = ['io.b/*', 'io.a']",
        );
        for line in [
            "containerd_root = \"/r\"\n",
            "enable_selinux = true\n",
            "selinux_category_range = 512\n",
            "pod_annotations = [\"io.a\", \"io.b/*\"]\n",
            "shim_env = [\"C=1\", \"A=2\", \"B=1\"]\n",
        ] {
            assert!(made.contains(line), "{line} is not in\n{made}");
        }
        assert!(made.ends_with(mine), "{made}");
    }
}
