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

/// The command that repeats the last `enable`, by the drop-in of a config file.
pub(super) fn last_command(file: &Path) -> String {
    let drop_in = Main::read(file).map(|main| main.drop_in());
    let text = drop_in.and_then(std::fs::read_to_string).unwrap_or_default();
    command(&options(&text).unwrap_or_default())
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
        assert_eq!(last_command(&main), ENABLE);
        let path = dir.path().join("more/pause-sandboxer.toml");
        for all in [&[][..], &["--default"], &["--offline", "--handler a", "--options-of b--c"]] {
            let all: Vec<String> = all.iter().map(ToString::to_string).collect();
            let text = head(&all, "nvidia") + "version = 3\n";
            assert_eq!((options(&text), base(&text)), (Some(all.clone()), Some("nvidia")));
            std::fs::write(&path, &text).unwrap();
            assert_eq!(last_command(&main), command(&all));
            // The file of another.
            std::fs::write(&path, text.trim_start_matches(MARK)).unwrap();
            assert_eq!(last_command(&main), ENABLE);
        }
    }
}
