//! The sandboxer's own settings that must equal containerd's.

use std::path::Path;

use toml::{Table, Value};

use super::toml_text;
use crate::check::containerd::{same_file, shared};
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
    let differences = shared::differences(merged, config).into_iter();
    let differences = differences.chain(shared::annotations(handler, config));
    found.extend(differences.map(|found| (found.key, found.theirs)));
    let missing = shared::missing_variables(merged, config);
    if !missing.is_empty() {
        let name = |variable: &str| variable.split('=').next().unwrap_or_default().to_owned();
        let mut variables: Vec<String> = config.shim_env.iter().map(ToString::to_string).collect();
        variables.retain(|set| !missing.iter().any(|new| name(new) == name(set)));
        variables.extend(missing);
        found.push(("shim_env", Value::from(variables)));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::config::Flags;

    fn adopted(text: &str, merged: &str, handler: &str) -> String {
        let config = Config::parse(Path::new("c.toml"), text, &Flags::default()).unwrap();
        let [merged, handler] = [merged, handler].map(|text| text.parse::<Table>().unwrap());
        let made = adopt(text, &config, &merged, &handler).unwrap();
        // It differs in nothing then.
        let config = Config::parse(Path::new("c.toml"), &made, &Flags::default()).unwrap();
        assert_eq!(adopt(&made, &config, &merged, &handler).unwrap(), made);
        made
    }

    #[test]
    fn only_what_differs_is_written() {
        let mine = "# mine\nlog_level = \"debug\"\nlog_format = \"json\"\n";
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
