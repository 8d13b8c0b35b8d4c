//! The variables that containerd gives the shims that it starts, and the sandboxer does not.

use toml::{Table, Value};

use super::super::Finding;
use super::{CONFIG, version_of};
use crate::config::Config;

/// What containerd's config of version 2 has for one of them, which containerd reads as that one.
const SCHED_CORE: &str = "SCHED_CORE=1";

/// Examines containerd's merged config.
pub(super) fn judge(table: &Table, config: &Config) -> Option<Finding> {
    let plugin = |name: &str, key: &str| table.get("plugins")?.get(name)?.get(key);
    let listed = plugin("io.containerd.shim.v1.manager", "env")
        .and_then(Value::as_array)
        .into_iter()
        .flatten();
    let mut theirs: Vec<&str> = listed.filter_map(Value::as_str).collect();
    let sched_core = plugin("io.containerd.runtime.v2.task", "sched_core").and_then(Value::as_bool);
    if version_of(table) < 3 && sched_core == Some(true) {
        theirs.push(SCHED_CORE);
    }
    let ours: Vec<String> = config.shim_env.lines().collect();
    theirs.retain(|variable| !ours.iter().any(|set| set == variable));
    (!theirs.is_empty()).then(|| {
        Finding::warn(
            CONFIG,
            format!("its shims get {theirs:?}, but those of this sandboxer do not"),
            format!("set shim_env = {theirs:?} in this sandboxer's config, beside what is there"),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fact_of(text: &str, ours: &str) -> Option<String> {
        let file = std::path::Path::new("c.toml");
        let config = Config::parse(file, &format!("shim_env = {ours}"), &[]).unwrap();
        judge(&toml::from_str(text).unwrap(), &config).map(|finding| finding.to_string())
    }

    #[test]
    fn variables_that_are_missing_are_told() {
        let manager = "[plugins.'io.containerd.shim.v1.manager']\nenv = ['SCHED_CORE=1', 'A=b']";
        let sched_core = "[plugins.'io.containerd.runtime.v2.task']\nsched_core = true";
        assert_eq!(fact_of("", "[]"), None);
        assert_eq!(fact_of(manager, "['A=b', 'SCHED_CORE=1', 'C=d']"), None);
        let one = fact_of(manager, "['A=b', 'SCHED_CORE=2']").unwrap();
        assert!(one.contains("its shims get [\"SCHED_CORE=1\"], but"), "{one}");
        let both = fact_of(manager, "[]").unwrap();
        assert!(both.contains("set shim_env = [\"SCHED_CORE=1\", \"A=b\"] in"), "{both}");
        assert!(
            fact_of(&format!("version = 2\n{sched_core}"), "[]").unwrap().contains("SCHED_CORE=1")
        );
        assert_eq!(
            fact_of(&format!("version = 3\n{sched_core}"), "[]"),
            None,
            "containerd does not read it"
        );
    }
}
