//! The config file: TOML, one key per setting, no tables but that of the runtimes.

use std::fmt::Write;
use std::path::Path;

use toml::de::DeTable;

use super::value::Input;
use super::{Config, Error, Gathered, SETTINGS};

/// Takes the settings of the file at `path`, whose content is `text`.
pub(super) fn read(path: &Path, text: &str, gathered: &mut Gathered) -> Result<(), Error> {
    let table = DeTable::parse(text).map_err(|e| Error::Syntax {
        file: path.to_owned(),
        line: line_of(text, e.span().map_or(0, |span| span.start)),
        reason: e.message().to_owned(),
    })?;
    // In the order of the file, so that the first wrong line is the one that is told.
    let mut entries: Vec<_> = table.get_ref().iter().collect();
    entries.sort_by_key(|(key, _)| key.span().start);
    for (key, value) in entries {
        let origin = format!("{}:{}", path.display(), line_of(text, key.span().start));
        gathered.set(key.get_ref(), Input::Toml(value.get_ref()), origin)?;
    }
    Ok(())
}

/// The settings of `config` as a file, each under its meaning.
pub(super) fn write(config: &Config) -> String {
    let mut text = String::from(
        "# Settings of pause-sandboxer. Each has a flag of the same name for `serve`, which goes before the file.\n",
    );
    for setting in SETTINGS {
        text.push('\n');
        for line in setting.meaning {
            text.push('#');
            text.push_str(line);
            text.push('\n');
        }
        // Writing to a String cannot fail.
        let _ = write!(text, "# ({})\n{} = {}\n", setting.kind, setting.name, setting.show(config));
    }
    text
}

/// The line, from 1, of the byte at `offset`.
fn line_of(text: &str, offset: usize) -> usize {
    1 + text.as_bytes().iter().take(offset).filter(|b| **b == b'\n').count()
}
