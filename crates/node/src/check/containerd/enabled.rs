//! The options of an earlier `enable`, so that advice to repeat it does not undo them.

use std::path::Path;

use toml::{Table, Value};

use super::files::Main;
use super::{CRI_OF_2, ENABLE, HANDLER, IMAGES, RUNTIME};

/// The first line of a file that `enable` has written.
pub(crate) const MARK: &str =
    "# Written by `pause-sandboxer enable`; `pause-sandboxer disable` removes it.\n";

/// The line of such a file that names the handler whose settings were copied: what is before the
/// name, what follows it if `--options-of` has named it, and the end. The package's `prerm` reads
/// it.
const BASE: (&str, &str, &str) =
    ("# The handler has the settings of runtime handler ", " (--options-of)", ".");

/// The handler whose settings `enable` has copied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BaseHandler {
    pub(crate) name: String,
    /// Whether `--options-of` has named it. Otherwise it follows the node's default handler.
    pub(crate) is_named: bool,
}

impl BaseHandler {
    /// Its line in the drop-in.
    pub(crate) fn line(&self) -> String {
        let named = if self.is_named { BASE.1 } else { "" };
        format!("{}{}{named}{}\n", BASE.0, Value::from(self.name.as_str()), BASE.2)
    }

    /// That of a drop-in.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let lines = text.lines();
        let line = lines.filter_map(|l| l.strip_prefix(BASE.0)?.strip_suffix(BASE.2)).next()?;
        let named = line.strip_suffix(BASE.1);
        let table = toml::from_str::<Table>(&format!("name = {}", named.unwrap_or(line))).ok()?;
        Some(Self { name: table.get("name")?.as_str()?.to_owned(), is_named: named.is_some() })
    }
}

/// The options of an `enable`, as its drop-in shows them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EnabledOptions {
    pub(crate) handler: String,
    pub(crate) default: bool,
    pub(crate) offline: bool,
    pub(crate) options_of: Option<String>,
}

impl Default for EnabledOptions {
    fn default() -> Self {
        Self { handler: HANDLER.to_owned(), default: false, offline: false, options_of: None }
    }
}

impl EnabledOptions {
    /// The options by which `enable` has written a text; `None`: it has not.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let table: Table = text.strip_prefix(MARK)?.parse().ok()?;
        let get = |path: &[&str]| -> Option<&Value> {
            let plugins = table.get("plugins")?;
            path.iter().try_fold(plugins, |value, key| value.get(key))
        };
        let cri = |key: &str| {
            [RUNTIME, CRI_OF_2].into_iter().find_map(|plugin| get(&[plugin, "containerd", key]))
        };
        let handler = cri("runtimes")?.as_table()?.keys().next()?.clone();
        let image = get(&[IMAGES, "pinned_images", "sandbox"]);
        Some(Self {
            handler,
            default: cri("default_runtime_name").is_some(),
            offline: image.or_else(|| get(&[CRI_OF_2, "sandbox_image"])).is_some(),
            options_of: BaseHandler::parse(text).filter(|base| base.is_named).map(|base| base.name),
        })
    }

    /// Those of the drop-in of a config file; without one those of an `enable` without options.
    pub(super) fn of_config(file: &Path) -> Self {
        let drop_ins = Main::read(file).map(|main| main.drop_ins()).unwrap_or_default();
        let texts = drop_ins.iter().filter_map(|path| std::fs::read_to_string(path).ok());
        texts.filter_map(|text| Self::parse(&text)).next().unwrap_or_default()
    }

    /// The command that keeps what they set.
    pub(crate) fn command(&self) -> String {
        let mut command = ENABLE.to_owned();
        for option in self.without(&Self::default()) {
            command += &format!(" {option}");
        }
        command
    }

    /// The options that `others` lack.
    pub(crate) fn without(&self, others: &Self) -> Vec<String> {
        let mut options = Vec::new();
        if self.default && !others.default {
            options.push("--default".to_owned());
        }
        if self.offline && !others.offline {
            options.push("--offline".to_owned());
        }
        if self.handler != others.handler {
            options.push(format!("--handler {}", self.handler));
        }
        if let Some(base) =
            self.options_of.as_ref().filter(|_| self.options_of != others.options_of)
        {
            options.push(format!("--options-of {base}"));
        }
        options
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_has_the_options_of_the_drop_in() {
        let dir = tempfile::tempdir().unwrap();
        let main = dir.path().join("config.toml");
        std::fs::write(&main, "imports = ['more/*.toml']\n").unwrap();
        std::fs::create_dir(dir.path().join("more")).unwrap();
        assert_eq!(EnabledOptions::of_config(&main).command(), ENABLE);
        let of_3 = "[plugins.'io.containerd.cri.v1.runtime'.containerd]\n\
            default_runtime_name = 'small'\n\
            [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.small]\n\
            [plugins.'io.containerd.cri.v1.images'.pinned_images]\nsandbox = 'x'\n";
        let of_2 = "[plugins.'io.containerd.grpc.v1.cri']\nsandbox_image = 'x'\n\
            [plugins.'io.containerd.grpc.v1.cri'.containerd]\ndefault_runtime_name = 'small'\n\
            [plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.small]\n";
        for text in [of_3, of_2] {
            let path = dir.path().join("more/pause-sandboxer.toml");
            // `enable` chooses a handler that `--options-of` has not named by itself again.
            for (is_named, more) in [(false, ""), (true, " --options-of nvidia")] {
                let base = BaseHandler { name: "nvidia".to_owned(), is_named };
                std::fs::write(&path, format!("{MARK}{}{text}", base.line())).unwrap();
                let command = EnabledOptions::of_config(&main).command();
                let expected = format!("{ENABLE} --default --offline --handler small{more}");
                assert_eq!(command, expected);
            }
            // The file of another.
            std::fs::write(&path, text).unwrap();
            assert_eq!(EnabledOptions::of_config(&main).command(), ENABLE);
        }
    }

    #[test]
    fn the_handler_whose_settings_are_copied_is_read_from_its_line() {
        for name in ["runc", "ru\"nc", "x\" (--options-of)", "a.b"] {
            for is_named in [false, true] {
                let base = BaseHandler { name: name.to_owned(), is_named };
                assert_eq!(BaseHandler::parse(&format!("{MARK}{}\n", base.line())), Some(base));
            }
        }
        assert_eq!(BaseHandler::parse(MARK), None);
    }
}
