//! The options of an earlier `enable`, so that advice to repeat it does not undo them.

use std::path::Path;

use super::ENABLE;
use super::files::Main;

/// The first line of a file that `enable` has written.
pub(crate) const MARK: &str =
    "# Written by `pause-sandboxer enable`; `pause-sandboxer disable` removes it.\n";

/// The beginning of the line with the options of that `enable`.
const OPTIONS: &str = "# Options:";

/// The beginning of the line with the runtime handler whose settings were copied.
const BASE: &str = "# The handler has the settings of runtime handler ";

/// The option that makes the handler the node's default.
pub(crate) const DEFAULT: &str = "--default";

/// The option of [`Mode::ShimOnly`].
pub(crate) const SHIM_ONLY: &str = "--shim-only";

/// Who makes the pods of a runtime handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// This sandboxer.
    Sandboxer,
    /// containerd's built-in controller, with this project's shim.
    ShimOnly,
}

impl Mode {
    /// Both: each has a drop-in of its own.
    pub(crate) const ALL: [Self; 2] = [Self::Sandboxer, Self::ShimOnly];

    /// The handler's usual name.
    pub const fn handler(self) -> &'static str {
        match self {
            Self::Sandboxer => "runc-pause",
            Self::ShimOnly => "runc-small",
        }
    }

    /// The name of the drop-in.
    pub(super) fn drop_in(self) -> &'static str {
        match self {
            Self::Sandboxer => "pause-sandboxer.toml",
            Self::ShimOnly => "pause-sandboxer-runc-shim.toml",
        }
    }
}

/// The first lines of a drop-in.
pub(crate) fn head(options: &[String], base: &str) -> String {
    format!("{MARK}{OPTIONS}{}\n{BASE}{base}\n", words(options))
}

/// The options of the `enable` that has written a text, each with its value; `None`: another
/// program or user has written it.
pub(crate) fn options(text: &str) -> Option<Vec<String>> {
    let head = text.strip_prefix(MARK)?;
    let line = head.lines().find_map(|line| line.strip_prefix(OPTIONS)).unwrap_or_default();
    Some(line.split(" --").skip(1).map(|option| format!("--{option}")).collect())
}

/// The runtime handler whose settings a drop-in has copied.
pub(crate) fn base(text: &str) -> Option<&str> {
    text.lines().find_map(|line| line.strip_prefix(BASE))
}

/// The command with these options.
pub(crate) fn command(options: &[String]) -> String {
    format!("{ENABLE}{}", words(options))
}

/// The command that repeats the last `enable` of that mode, by its drop-in of a config file.
pub(super) fn last_command(file: &Path, mode: Mode) -> String {
    let drop_in = Main::read(file).map(|main| main.drop_in(mode));
    let text = drop_in.and_then(std::fs::read_to_string).ok();
    let first = || match mode {
        Mode::Sandboxer => Vec::new(),
        Mode::ShimOnly => vec![SHIM_ONLY.to_owned()],
    };
    command(&text.as_deref().and_then(options).unwrap_or_else(first))
}

fn words(options: &[String]) -> String {
    options.iter().map(|option| format!(" {option}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_advice_repeats_the_options_of_the_last_enable() {
        let dir = tempfile::tempdir().unwrap();
        let main = dir.path().join("config.toml");
        std::fs::write(&main, "imports = ['more/*.toml']\n").unwrap();
        std::fs::create_dir(dir.path().join("more")).unwrap();
        for (mode, name, first) in [
            (Mode::Sandboxer, "pause-sandboxer.toml", &[][..]),
            (Mode::ShimOnly, "pause-sandboxer-runc-shim.toml", &[SHIM_ONLY]),
        ] {
            let owned = |all: &[&str]| all.iter().map(ToString::to_string).collect::<Vec<_>>();
            // The drop-in of the other mode does not count.
            assert_eq!(last_command(&main, mode), command(&owned(first)));
            let path = dir.path().join("more").join(name);
            for more in
                [&[][..], &["--default"], &["--offline", "--handler a", "--options-of b--c"]]
            {
                let all = owned(&[first, more].concat());
                let text = head(&all, "nvidia") + "version = 3\n";
                assert_eq!((options(&text), base(&text)), (Some(all.clone()), Some("nvidia")));
                std::fs::write(&path, &text).unwrap();
                assert_eq!(last_command(&main, mode), command(&all));
                // The file of another.
                std::fs::write(&path, text.trim_start_matches(MARK)).unwrap();
                assert_eq!(last_command(&main, mode), command(&owned(first)));
                std::fs::write(&path, text).unwrap();
            }
        }
    }
}
