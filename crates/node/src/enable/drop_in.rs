//! The file that adds this sandboxer and its runtime handler to containerd's config.

use std::path::{Path, PathBuf};

use base::error::StepError;

use toml::{Table, Value};

use super::changes::FileState;
use super::plan::HandlerPlan;
use super::{EnableError, Enablement, Mode, refuse};
use crate::check::containerd::{CRI_OF_2, IMAGES, RUNTIME, enabled, runtime_table};
use crate::oci_image;

/// The file at the drop-in's place, which need not exist.
#[derive(Debug)]
pub(super) struct DropIn {
    pub(super) mode: Mode,
    pub(super) path: PathBuf,
    pub(super) state: Option<FileState>,
    pub(super) text: Option<String>,
}

impl DropIn {
    /// Reads the file.
    ///
    /// # Errors
    /// It cannot be read.
    pub(super) fn read(mode: Mode, path: PathBuf) -> Result<Self, StepError> {
        let state = FileState::read(&path)?;
        let text = state.as_ref().map(|state| String::from_utf8_lossy(&state.bytes).into_owned());
        Ok(Self { mode, path, state, text })
    }

    /// Whether `enable` has written it.
    pub(super) fn is_ours(&self) -> bool {
        self.text.as_deref().is_some_and(|text| text.starts_with(enabled::MARK))
    }

    /// Fails if it has runtime handlers beside that of `enable` or of the packaged file, and beside
    /// `kept`: its removal or replacement would remove them.
    ///
    /// # Errors
    /// The handlers.
    pub(super) fn has_only(&self, kept: &str) -> Result<(), EnableError> {
        let options = self.text.as_deref().and_then(enabled::options).unwrap_or_default();
        let named = options.iter().find_map(|option| option.strip_prefix("--handler "));
        let mut added = self.handlers();
        added.retain(|name| name != kept && name != named.unwrap_or(self.mode.handler()));
        if added.is_empty() {
            return Ok(());
        }
        refuse(format!(
            "{} also defines runtime handler {}, which this command would remove: move it to \
             another file of containerd's config first",
            self.path.display(),
            added.join(", ")
        ))
    }

    /// The runtime handlers that it defines.
    pub(super) fn handlers(&self) -> Vec<String> {
        self.text.as_deref().map(handlers_of).unwrap_or_default()
    }
}

/// The paths of drop-ins.
pub(super) fn paths<'a>(drop_ins: &[&'a DropIn]) -> Vec<&'a Path> {
    drop_ins.iter().map(|drop_in| drop_in.path.as_path()).collect()
}

/// A line for each option of the command that has written the text and that `new` options undo. An
/// option with another value is no undone one.
pub(super) fn undone(text: &str, new: &[String]) -> Vec<String> {
    let name = |option: &str| option.split(' ').next().map(str::to_owned);
    let mut old = enabled::options(text).unwrap_or_default();
    old.retain(|old| !new.iter().any(|new| name(new) == name(old)));
    let line = |option: &String| {
        format!("this command undoes {option} of the earlier `enable`; add {option} to keep it")
    };
    old.iter().map(line).collect()
}

/// The runtime handlers that a drop-in defines.
pub(super) fn handlers_of(text: &str) -> Vec<String> {
    let table: Table = text.parse().unwrap_or_default();
    let all = [RUNTIME, CRI_OF_2].into_iter().filter_map(|plugin| runtime_table(&table, plugin));
    all.flat_map(|handlers| handlers.keys().cloned()).collect()
}

/// The handler that a drop-in makes the node's default.
pub(super) fn default_of(text: &str) -> Option<String> {
    let table: Table = text.parse().ok()?;
    let default = |plugin: &str| {
        table.get("plugins")?.get(plugin)?.get("containerd")?.get("default_runtime_name")?.as_str()
    };
    [RUNTIME, CRI_OF_2].into_iter().find_map(default).map(str::to_owned)
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

/// Sets a value in nested tables.
fn set(table: &mut Table, path: &[&str], value: impl Into<Value>) {
    let [key, rest @ ..] = path else { return };
    if rest.is_empty() {
        table.insert((*key).to_owned(), value.into());
    } else if let Value::Table(inner) =
        table.entry(*key).or_insert_with(|| Value::Table(Table::new()))
    {
        set(inner, rest, value);
    }
}

impl HandlerPlan {
    /// The handler's table.
    pub(super) fn handler_table(&self) -> Table {
        let mut handler = taken_over(&self.settings);
        handler.insert("sandboxer".to_owned(), self.sandboxer.as_str().into());
        let (key, value) = match &self.shim {
            Some(shim) => ("runtime_path", shim.as_str().into()),
            // From containerd 2.4 on; older versions ignore it.
            None => ("disable_pause_image_pull", true.into()),
        };
        handler.insert(key.to_owned(), value);
        handler
    }

    /// The drop-in, with the names of this version; `None` is a config file without one.
    ///
    /// # Errors
    /// It cannot be written as TOML.
    pub(super) fn drop_in(
        &self,
        wanted: &Enablement,
        version: Option<i64>,
    ) -> Result<String, EnableError> {
        // The file has no version, so that containerd up to 2.2 reads it as of the version of
        // another one. A handler of another version's name would hide that file's handlers there.
        let is_2 = version == Some(2);
        let runtime = if is_2 { CRI_OF_2 } else { RUNTIME };
        let mut table = Table::new();
        if self.shim.is_none() {
            let socket = wanted.change.subject.config.socket.display().to_string();
            set(&mut table, &["proxy_plugins", &self.sandboxer, "type"], "sandbox");
            set(&mut table, &["proxy_plugins", &self.sandboxer, "address"], socket);
        }
        let containerd = ["plugins", runtime, "containerd"];
        let handler = [&containerd[..], &["runtimes", &wanted.handler]].concat();
        set(&mut table, &handler, self.handler_table());
        if wanted.default {
            let default = [&containerd[..], &["default_runtime_name"]].concat();
            set(&mut table, &default, wanted.handler.as_str());
        }
        if wanted.offline {
            let image: &[&str] = if is_2 {
                &["plugins", CRI_OF_2, "sandbox_image"]
            } else {
                &["plugins", IMAGES, "pinned_images", "sandbox"]
            };
            set(&mut table, image, oci_image::NAME);
        }
        let written = toml::to_string(&table).map_err(|e| e.to_string())?;
        Ok(format!("{}\n{written}", enabled::head(&wanted.options(), &self.base)))
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
        let mut wanted = Enablement { default, offline, ..enablement() };
        wanted.change.subject.config.socket = "/run/s.sock".into();
        let plan = HandlerPlan {
            sandboxer: "pause-sandboxer".to_owned(),
            shim: None,
            base: "runc".to_owned(),
            settings: RUNC.parse().unwrap(),
            before: Table::new(),
            replaced: None,
        };
        plan.drop_in(&wanted, version).unwrap()
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
        assert_eq!(enabled::base(&made), Some("runc"));
        assert_eq!(enabled::options(&made).as_deref(), Some(&[][..]));
        assert_eq!(handlers_of(&made), ["runc-pause"]);
    }

    #[test]
    fn an_option_that_is_undone_is_named() {
        let all = |options: &[&str]| options.iter().map(ToString::to_string).collect::<Vec<_>>();
        let old = enabled::head(&all(&["--default", "--handler a"]), "runc");
        let lines = undone(&old, &all(&["--handler b"]));
        assert_eq!(lines.len(), 1);
        assert!(lines[0].starts_with("this command undoes --default of the earlier"), "{lines:?}");
        assert_eq!(undone(&old, &all(&["--default", "--handler a"])), Vec::<String>::new());
        assert_eq!(undone("# of another\n", &[]), Vec::<String>::new());
    }

    #[test]
    fn each_version_has_its_names() {
        let plugin_table = |version, plugin: &str| -> Table {
            let table: Table = text(version, true, true).parse().unwrap();
            table["plugins"][plugin].as_table().unwrap().clone()
        };
        for version in [None, Some(3), Some(4)] {
            let default = default_of(&text(version, true, true));
            assert_eq!(default.as_deref(), Some("runc-pause"));
            let image = plugin_table(version, IMAGES)["pinned_images"]["sandbox"].clone();
            assert_eq!(image.as_str(), Some(oci_image::NAME));
        }
        let cri = plugin_table(Some(2), CRI_OF_2);
        assert_eq!(cri["sandbox_image"].as_str(), Some(oci_image::NAME));
        assert_eq!(default_of(&text(Some(2), true, true)).as_deref(), Some("runc-pause"));
        assert_eq!(default_of(&text(Some(2), false, true)), None);
        assert_eq!(handlers_of(&text(Some(2), false, false)), ["runc-pause"]);
    }
}
