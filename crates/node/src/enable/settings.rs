//! The sandboxer's own settings that must equal containerd's. `enable` writes them to a file of
//! their own, which no package owns: an edited config file would stop unattended upgrades.

use std::path::{Path, PathBuf};

use toml::{Table, Value};

use super::EnableError;
use super::changes::FileState;
use crate::check::containerd::{same_file, shared};
use base::config::{Config, Flags, adopted_file};

/// The first lines of the file.
const HEAD: &str = "# Written by `pause-sandboxer enable`, which writes it again; `pause-sandboxer \
                    disable` removes it.\n# These settings equal containerd's. ";

/// The config file alone, without the settings that an earlier `enable` has adopted.
#[derive(Debug)]
pub(super) struct OwnSettings {
    path: PathBuf,
    text: String,
    table: Table,
    /// Its settings.
    pub(super) config: Config,
}

impl OwnSettings {
    /// Reads the config file, which need not exist. `socket` is the daemon's, of the file or of the
    /// command line.
    ///
    /// # Errors
    /// It cannot be read, or is invalid.
    pub(super) fn read(path: &Path, socket: &Path) -> Result<Self, EnableError> {
        let state = FileState::read(path)?;
        let text = state.map(|state| String::from_utf8_lossy(&state.bytes).into_owned());
        let text = text.unwrap_or_default();
        let flags = Flags::Socket(Some(socket.to_owned()));
        let config = Config::parse(path, &text, &flags).map_err(|e| e.to_string())?;
        let table = text.parse().unwrap_or_default();
        Ok(Self { path: path.to_owned(), text, table, config })
    }

    /// The text of the file with the settings of containerd's merged config that must be equal;
    /// `None`: all are. `address` is containerd's, `handler` the table of the runtime handler.
    ///
    /// # Errors
    /// The config file, which overrides that file, has another value; or the daemon would not start
    /// with the settings.
    pub(super) fn adopted(
        &self,
        address: &Path,
        merged: &Table,
        handler: &Table,
    ) -> Result<Option<String>, EnableError> {
        let differing = differing(&self.config, address, merged, handler);
        if let Some((key, value)) = differing.iter().find(|(key, _)| self.table.contains_key(*key))
        {
            return Err(EnableError::from(format!(
                "{} sets {key}, but containerd needs {key} = {value}: remove the setting there, or \
                 set it to this value",
                self.path.display()
            )));
        }
        if differing.is_empty() {
            return Ok(None);
        }
        let mut text = format!("{HEAD}A setting of {} overrides them.\n", self.path.display());
        for (key, value) in differing {
            text.push_str(&format!("{key} = {value}\n"));
        }
        let file = adopted_file(&self.path);
        Config::parse_all(&[(&file, &text), (&self.path, &self.text)], &Flags::default()).map_err(
            |e| {
                format!(
                    "cannot copy a setting of containerd: correct it in containerd's config: {e}"
                )
            },
        )?;
        Ok(Some(text))
    }
}

/// The settings that differ, with containerd's values.
fn differing(
    config: &Config,
    address: &Path,
    merged: &Table,
    handler: &Table,
) -> Vec<(&'static str, Value)> {
    let path = |key| merged.get(key).and_then(Value::as_str).map(Path::new);
    let paths = [
        ("containerd_root", path("root"), &config.containerd_root),
        ("containerd_state", path("state"), &config.containerd_state),
        ("containerd_address", Some(address), &config.containerd_address),
    ];
    let is_other = |theirs: &Path, ours| !theirs.as_os_str().is_empty() && !same_file(theirs, ours);
    let paths = paths.into_iter().filter_map(|(key, theirs, ours)| {
        let theirs = theirs.filter(|theirs| is_other(theirs, ours))?;
        Some((key, Value::from(theirs.to_string_lossy().into_owned())))
    });
    let mut found: Vec<_> = paths.collect();
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

    const ADDRESS: &str = "/run/containerd/containerd.sock";

    /// The text that is adopted beside a config file with `own`, or why none is.
    fn adopted(own: &str, address: &str, merged: &str, handler: &str) -> Result<String, String> {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config.toml");
        std::fs::write(&file, own).unwrap();
        let default = Config::default();
        let settings = OwnSettings::read(&file, &default.socket).map_err(|e| e.to_string())?;
        let [merged, handler] = [merged, handler].map(|text| text.parse::<Table>().unwrap());
        let made = settings.adopted(Path::new(address), &merged, &handler);
        let made = made.map_err(|e| e.to_string())?.unwrap_or_default();
        // Nothing differs then.
        std::fs::write(adopted_file(&file), &made).unwrap();
        let config = Config::load(Some(&file), &Flags::default()).unwrap();
        assert_eq!(differing(&config, Path::new(address), &merged, &handler), []);
        Ok(made)
    }

    #[test]
    fn only_what_differs_is_written() {
        let own = "log_level = 'debug'\ncontainerd_state = '/s'\n";
        let merged = "root = '/var/lib/containerd'\nstate = '/s'";
        assert_eq!(adopted(own, ADDRESS, merged, "").unwrap(), "");
        let merged = "root = '/r'\nstate = ''\n[plugins.'io.containerd.cri.v1.runtime']\n\
            enable_selinux = true\nselinux_category_range = 512\n\
            [plugins.'io.containerd.shim.v1.manager']\nenv = ['A=2', 'B=1']\n";
        let handler = "pod_annotations = ['io.b/*', 'io.a']";
        let made = adopted("log_level = 'debug'\n", "/run/k0s/c.sock", merged, handler).unwrap();
        let lines: Vec<&str> = made.lines().filter(|line| !line.starts_with('#')).collect();
        let expected = [
            "containerd_root = \"/r\"",
            "containerd_address = \"/run/k0s/c.sock\"",
            "enable_selinux = true",
            "selinux_category_range = 512",
            "pod_annotations = [\"io.a\", \"io.b/*\"]",
            "shim_env = [\"A=2\", \"B=1\"]",
        ];
        assert_eq!(lines, expected);
    }

    #[test]
    fn a_setting_of_the_file_that_differs_is_refused() {
        let manager = "[plugins.'io.containerd.shim.v1.manager']\nenv = ['A=2', 'B=1']\n";
        for (own, merged, part) in [
            ("containerd_root = '/x'", "root = '/r'", "sets containerd_root, but containerd needs"),
            ("shim_env = ['A=1', 'C=1']", manager, "shim_env = [\"C=1\", \"A=2\", \"B=1\"]"),
        ] {
            let error = adopted(own, ADDRESS, merged, "").unwrap_err();
            assert!(error.contains("config.toml sets ") && error.contains(part), "{error}");
        }
    }

    /// A daemon does not start with such settings, and its pods then have none.
    #[test]
    fn settings_that_the_daemon_refuses_are_not_written() {
        let merged = |env: &str| format!("[plugins.'io.containerd.shim.v1.manager']\nenv = {env}");
        adopted("", ADDRESS, &merged("['A=1', 'B=1']"), "").unwrap();
        for env in ["['A=1', 'A=2']", "['NAMESPACE=x']", "['A']"] {
            let error = adopted("", ADDRESS, &merged(env), "").unwrap_err();
            assert!(error.contains("shim_env"), "{env}: {error}");
        }
    }
}
