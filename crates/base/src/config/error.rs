//! Errors of settings, with their place.

use std::path::{Path, PathBuf};

use toml::de::DeTable;

/// Maximum length of the reason in an error of the file, characters: it shows text of the file.
const SHOWN_MAX: usize = 1000;

/// Invalid settings: the place, the setting and the reason.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The config file could not be read.
    #[error("read config file {}: {reason}", .file.display())]
    Read {
        /// The config file.
        file: PathBuf,
        /// The system's answer.
        reason: String,
    },
    /// The config file is not TOML, or a setting in it is unknown or invalid.
    #[error("{}:{line}: {reason}", .file.display())]
    File {
        /// The config file.
        file: PathBuf,
        /// Its line, from 1.
        line: usize,
        /// The setting, unless the file is not TOML, and why it is invalid.
        reason: String,
    },
    /// An option does not fit the other settings.
    #[error("--{}: {reason}", .name.replace('_', "-"))]
    Flag {
        /// The setting.
        name: &'static str,
        /// Why it is invalid.
        reason: String,
    },
    /// A default does not fit the other settings.
    #[error("default of {name}: {reason}")]
    Default {
        /// The setting.
        name: &'static str,
        /// Why it is invalid.
        reason: String,
    },
    /// The options of the command line could not be read.
    #[error(transparent)]
    Options(#[from] clap::Error),
}

impl ConfigError {
    /// The error of the file's parser, with the setting at its place.
    pub(super) fn in_file(file: &Path, text: &str, error: &toml::de::Error) -> Self {
        let at = error.span().map_or(0, |span| span.start);
        let table = DeTable::parse(text).ok();
        let setting = table.as_ref().and_then(|table| {
            let mut entries = table.get_ref().iter();
            entries.find(|(key, value)| (key.span().start..value.span().end.max(1)).contains(&at))
        });
        let (at, name) = setting.map_or((at, String::new()), |(key, _)| {
            (key.span().start, format!("{}: ", key.get_ref()))
        });
        let reason = format!("{name}{}", error.message()).chars().take(SHOWN_MAX).collect();
        Self::File { file: file.to_owned(), line: line_of(text, at), reason }
    }
}

/// The line, from 1, of the byte at `offset`.
pub(super) fn line_of(text: &str, offset: usize) -> usize {
    1 + text.as_bytes().iter().take(offset).filter(|b| **b == b'\n').count()
}
