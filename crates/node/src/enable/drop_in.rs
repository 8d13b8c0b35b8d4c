//! The file that adds this sandboxer and its runtime handler to containerd's config.

use std::path::{Path, PathBuf};

use base::error::StepError;

use toml::{Table, Value};

use super::Enablement;
use super::changes::FileState;
use crate::check::containerd::{
    BaseHandler, CRI_OF_2, EnabledOptions, HANDLER, IMAGES, MARK, RUNTIME,
};
use crate::oci_image;

/// The settings of a drop-in.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct DropInSettings<'a> {
    /// The sandboxer's name in containerd.
    pub(super) sandboxer: &'a str,
    /// The sandboxer's socket.
    pub(super) socket: &'a Path,
    /// The runtime handler.
    pub(super) handler: &'a str,
    /// The handler whose settings it takes over.
    pub(super) base: &'a BaseHandler,
    /// The settings of that handler.
    pub(super) settings: &'a Table,
    /// Whether it is the default handler.
    pub(super) default: bool,
    /// Whether the pause image of the binary is containerd's.
    pub(super) offline: bool,
}

/// The file at the drop-in's place, which need not exist.
#[derive(Debug)]
pub(super) struct DropIn {
    pub(super) path: PathBuf,
    pub(super) state: Option<FileState>,
    pub(super) text: Option<String>,
}

impl DropIn {
    /// Reads the file.
    ///
    /// # Errors
    /// It cannot be read.
    pub(super) fn read(path: PathBuf) -> Result<Self, StepError> {
        let state = FileState::read(&path)?;
        let text = state.as_ref().map(|state| String::from_utf8_lossy(&state.bytes).into_owned());
        Ok(Self { path, state, text })
    }

    /// Whether `enable` has written it.
    pub(super) fn is_ours(&self) -> bool {
        self.text.as_deref().is_some_and(|text| text.starts_with(MARK))
    }

    /// The runtime handlers that it defines.
    pub(super) fn handlers(&self) -> Vec<String> {
        self.text.as_deref().map(handlers_of).unwrap_or_default()
    }
}

/// A line for each option of the command that has written the text and that `wanted` undoes, and
/// one if the handler now has the settings of another one, `base`. Another name is wanted if the
/// command names one.
pub(super) fn undone(text: &str, wanted: &Enablement, base: &BaseHandler) -> Vec<String> {
    let Some(old) = EnabledOptions::parse(text) else { return Vec::new() };
    let is_named = wanted.handler != HANDLER;
    let new = EnabledOptions {
        handler: if is_named { old.handler.clone() } else { wanted.handler.clone() },
        default: wanted.default,
        offline: wanted.offline,
        options_of: old.options_of.clone().filter(|_| base.is_named),
    };
    let undone = old.without(&new).into_iter().map(|option| {
        format!("this command undoes {option} of the earlier `enable`; add {option} to keep it")
    });
    let copied = BaseHandler::parse(text).filter(|old| !old.is_named && !base.is_named);
    let another = copied.filter(|old| old.name != base.name).map(|old| {
        format!(
            "this command copies the settings of runtime handler {}, the earlier `enable` copied \
             those of {1}; add --options-of {1} to keep them",
            base.name, old.name
        )
    });
    undone.chain(another).collect()
}

/// The runtime handlers that a drop-in defines.
pub(super) fn handlers_of(text: &str) -> Vec<String> {
    let table: Table = text.parse().unwrap_or_default();
    let runtimes = |plugin: &str| {
        let runtimes = table.get("plugins")?.get(plugin)?.get("containerd")?.get("runtimes")?;
        runtimes.as_table()
    };
    let all = [RUNTIME, CRI_OF_2].into_iter().filter_map(runtimes);
    all.flat_map(|runtimes| runtimes.keys().cloned()).collect()
}

/// A setting that is as if it were not set.
fn is_unset(value: &Value) -> bool {
    match value {
        Value::String(text) => text.is_empty(),
        Value::Integer(number) => *number == 0,
        Value::Boolean(set) => !set,
        Value::Array(list) => list.is_empty(),
        Value::Table(table) => table.is_empty(),
        Value::Float(_) | Value::Datetime(_) => false,
    }
}

/// The settings of a handler without those that are unset. What is merged has them all.
pub(super) fn taken_over(settings: &Table) -> Table {
    let set = settings.iter().filter_map(|(key, value)| {
        let value = match value {
            Value::Table(table) => Value::Table(taken_over(table)),
            other => other.clone(),
        };
        (!is_unset(&value)).then(|| (key.clone(), value))
    });
    set.collect()
}

/// A table of one key.
fn nested(path: &[&str], value: impl Into<Value>) -> Table {
    match path {
        [] => Table::new(),
        [key] => Table::from_iter([((*key).to_owned(), value.into())]),
        [key, rest @ ..] => {
            Table::from_iter([((*key).to_owned(), Value::Table(nested(rest, value)))])
        }
    }
}

fn merge(into: &mut Table, from: Table) {
    for (key, value) in from {
        match (into.get_mut(&key), value) {
            (Some(Value::Table(there)), Value::Table(more)) => merge(there, more),
            (_, value) => {
                into.insert(key, value);
            }
        }
    }
}

impl DropInSettings<'_> {
    /// The handler's table.
    pub(super) fn handler_table(&self) -> Table {
        let mut handler = taken_over(self.settings);
        handler.insert("sandboxer".to_owned(), self.sandboxer.into());
        // From containerd 2.4 on; older versions ignore it.
        handler.insert("disable_pause_image_pull".to_owned(), true.into());
        handler
    }

    /// The file, for a config file of this version; `None` is a config file without one.
    ///
    /// # Errors
    /// It cannot be written as TOML.
    pub(super) fn text(&self, version: Option<i64>) -> Result<String, String> {
        // The file has no version, so containerd applies that of its own config file. A handler of
        // another version's name would hide that file's handlers up to 2.2.
        let is_2 = version == Some(2);
        let runtime = if is_2 { CRI_OF_2 } else { RUNTIME };
        let mut table = nested(&["proxy_plugins", self.sandboxer, "type"], "sandbox");
        let address = self.socket.display().to_string();
        merge(&mut table, nested(&["proxy_plugins", self.sandboxer, "address"], address));
        let path = ["plugins", runtime, "containerd", "runtimes", self.handler];
        merge(&mut table, nested(&path, self.handler_table()));
        if self.default {
            let path = ["plugins", runtime, "containerd", "default_runtime_name"];
            merge(&mut table, nested(&path, self.handler));
        }
        if self.offline {
            let path: &[&str] = if is_2 {
                &["plugins", CRI_OF_2, "sandbox_image"]
            } else {
                &["plugins", IMAGES, "pinned_images", "sandbox"]
            };
            merge(&mut table, nested(path, oci_image::NAME));
        }
        let written = toml::to_string(&table).map_err(|e| e.to_string())?;
        Ok(format!("{MARK}{}\n{written}", self.base.line()))
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::enablement;
    use super::*;

    const RUNC: &str = "runtime_type = 'io.containerd.runc.v2'\nruntime_path = ''\n\
        sandboxer = 'podsandbox'\ncni_max_conf_num = 0\npod_annotations = ['io.x.*']\n\
        container_annotations = []\nbase_runtime_spec = '/etc/spec.json'\n\
        privileged_without_host_devices = true\n\
        [options]\nSystemdCgroup = true\nBinaryName = '/opt/runc'\nRoot = ''\nIoUid = 0\n";

    fn text(version: Option<i64>, default: bool, offline: bool) -> String {
        let settings = RUNC.parse().unwrap();
        let set = DropInSettings {
            sandboxer: "pause-sandboxer",
            socket: Path::new("/run/s.sock"),
            handler: "runc-pause",
            base: &BaseHandler { name: "runc".to_owned(), is_named: false },
            settings: &settings,
            default,
            offline,
        };
        set.text(version).unwrap()
    }

    #[test]
    fn the_settings_of_the_other_handler_are_taken_over() {
        let made = text(Some(3), false, false);
        let table: Table = made.parse().unwrap();
        let expected: Table = "runtime_type = 'io.containerd.runc.v2'\n\
            sandboxer = 'pause-sandboxer'\npod_annotations = ['io.x.*']\n\
            base_runtime_spec = '/etc/spec.json'\nprivileged_without_host_devices = true\n\
            disable_pause_image_pull = true\n\
            [options]\nSystemdCgroup = true\nBinaryName = '/opt/runc'\n"
            .parse()
            .unwrap();
        let cri = &table["plugins"][RUNTIME]["containerd"];
        assert_eq!(cri["runtimes"]["runc-pause"].as_table(), Some(&expected));
        assert!(cri.get("default_runtime_name").is_none() && !table.contains_key("version"));
        assert_eq!(
            table["proxy_plugins"]["pause-sandboxer"]["address"].as_str(),
            Some("/run/s.sock")
        );
        assert_eq!(BaseHandler::parse(&made).map(|base| base.name).as_deref(), Some("runc"));
        assert!(made.starts_with(MARK));
        assert_eq!(handlers_of(&made), ["runc-pause"]);
    }

    #[test]
    fn settings_of_another_handler_are_announced() {
        let base = |name: &str, is_named| BaseHandler { name: name.to_owned(), is_named };
        let undone_by = |old: &BaseHandler, new: &BaseHandler| {
            let made = text(Some(3), false, false);
            let (runc, line) = (base("runc", false).line(), old.line());
            assert!(made.contains(&runc), "{made}");
            undone(&made.replace(&runc, &line), &enablement(), new).join("\n")
        };
        let (runc, nvidia) = (base("runc", false), base("nvidia", false));
        let (named_runc, named_nvidia) = (base("runc", true), base("nvidia", true));
        let option = "this command undoes --options-of nvidia of the earlier `enable`; add \
                      --options-of nvidia to keep it";
        assert_eq!(undone_by(&named_nvidia, &runc), option);
        // The next command may choose another one.
        assert_eq!(undone_by(&named_nvidia, &nvidia), option);
        let settings = "this command copies the settings of runtime handler runc, the earlier \
                        `enable` copied those of nvidia; add --options-of nvidia to keep them";
        assert_eq!(undone_by(&nvidia, &runc), settings);
        // The command says so itself.
        for old in [&nvidia, &named_nvidia] {
            assert_eq!(undone_by(old, &named_runc), "");
        }
        assert_eq!(undone_by(&nvidia, &nvidia), "");
    }

    #[test]
    fn each_version_has_its_names() {
        let plugin_table = |version, plugin: &str| -> Table {
            let table: Table = text(version, true, true).parse().unwrap();
            table["plugins"][plugin].as_table().unwrap().clone()
        };
        for version in [None, Some(3), Some(4)] {
            let runtime = plugin_table(version, RUNTIME);
            assert_eq!(runtime["containerd"]["default_runtime_name"].as_str(), Some("runc-pause"));
            let image = plugin_table(version, IMAGES)["pinned_images"]["sandbox"].clone();
            assert_eq!(image.as_str(), Some(oci_image::NAME));
        }
        let cri = plugin_table(Some(2), CRI_OF_2);
        assert_eq!(cri["sandbox_image"].as_str(), Some(oci_image::NAME));
        assert_eq!(cri["containerd"]["default_runtime_name"].as_str(), Some("runc-pause"));
        assert_eq!(handlers_of(&text(Some(2), false, false)), ["runc-pause"]);
    }
}
