//! The config file: TOML, one key per setting.

use std::fmt::Write;
use std::path::Path;

use toml::de::DeTable;

use super::{Config, ConfigError, Gathered, SETTINGS};

/// Reads the settings of the file at `path` with the content `text`.
pub(super) fn gather(path: &Path, text: &str, gathered: &mut Gathered) -> Result<(), ConfigError> {
    let table = DeTable::parse(text).map_err(|e| ConfigError::Syntax {
        file: path.to_owned(),
        line: line_of(text, e.span().map_or(0, |span| span.start)),
        reason: e.message().to_owned(),
    })?;
    // In the order of the file, so that the first wrong line is reported.
    let mut entries: Vec<_> = table.get_ref().iter().collect();
    entries.sort_by_key(|(key, _)| key.span().start);
    for (key, value) in entries {
        let origin = format!("{}:{}", path.display(), line_of(text, key.span().start));
        let shown = text.get(value.span()).unwrap_or_default();
        gathered.set(key.get_ref(), shown, origin, |setting, config| {
            (setting.set)(config, value.clone())
        })?;
    }
    Ok(())
}

/// The settings of `config` as a file, each under its meaning.
pub(super) fn write(config: &Config) -> String {
    let mut text = String::from(
        "# Settings of pause-sandboxer. An option of `serve` with the same name overrides each.\n",
    );
    for setting in SETTINGS {
        text.push('\n');
        for line in setting.lines() {
            text.push_str(format!("# {line}").trim_end());
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
