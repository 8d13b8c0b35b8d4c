//! The variables that containerd gives the shims that it starts, and the sandboxer does not.

use toml::{Table, Value};

use super::super::Finding;
use super::CONFIG;
use base::config::Config;

/// Examines containerd's merged config.
pub(super) fn variable_finding(table: &Table, config: &Config) -> Option<Finding> {
    let listed = table.get("plugins")?.get("io.containerd.shim.v1.manager")?.get("env")?;
    let listed = listed.as_array().into_iter().flatten();
    let mut theirs: Vec<&str> = listed.filter_map(Value::as_str).collect();
    let ours: Vec<String> = config.shim_env.lines().collect();
    theirs.retain(|variable| !ours.iter().any(|set| set == variable));
    (!theirs.is_empty()).then(|| {
        Finding::warn(
            CONFIG,
            format!("containerd sets {theirs:?} for shims, this sandboxer does not"),
            format!("add {theirs:?} to shim_env in this sandboxer's config"),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fact_of(text: &str, ours: &str) -> Option<String> {
        let file = std::path::Path::new("c.toml");
        let config = Config::parse(file, &format!("shim_env = {ours}"), &[]).unwrap();
        variable_finding(&toml::from_str(text).unwrap(), &config).map(|finding| finding.to_string())
    }

    #[test]
    fn missing_variables_are_reported() {
        let manager = "[plugins.'io.containerd.shim.v1.manager']\nenv = ['SCHED_CORE=1', 'A=b']";
        assert_eq!(fact_of("", "[]"), None);
        assert_eq!(fact_of(manager, "['A=b', 'SCHED_CORE=1', 'C=d']"), None);
        let one = fact_of(manager, "['A=b', 'SCHED_CORE=2']").unwrap();
        assert!(one.contains("containerd sets [\"SCHED_CORE=1\"] for shims"), "{one}");
        let both = fact_of(manager, "[]").unwrap();
        assert!(both.contains("add [\"SCHED_CORE=1\", \"A=b\"] to shim_env"), "{both}");
    }
}
