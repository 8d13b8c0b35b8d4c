//! The types of settings: the serde form of each, and the check of its values.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use log::LevelFilter;
use serde::de::DeserializeOwned;
use serde::de::value::{Error as FormError, StrDeserializer};
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;
use toml::Spanned;
use toml::de::{DeValue, ValueDeserializer};

use super::Pattern;

/// A type of settings.
pub(super) trait SettingValue: Sized {
    /// The values that it takes, to follow "must be".
    const KIND: &'static str;

    /// The form that serde reads and writes.
    type Form: DeserializeOwned + Serialize;

    /// Checks a value.
    ///
    /// # Errors
    /// The reason; empty if [`SettingValue::KIND`] is the reason.
    fn check(form: Self::Form) -> Result<Self, String>;

    /// The value as serde writes it.
    fn form(&self) -> Self::Form;

    /// Reads a value.
    ///
    /// # Errors
    /// As [`SettingValue::check`].
    fn parse(value: Spanned<DeValue<'_>>) -> Result<Self, String> {
        let form = Self::Form::deserialize(ValueDeserializer::from(value));
        form.map_err(|_| String::new()).and_then(Self::check)
    }

    /// Reads what a flag says as plain text.
    ///
    /// # Errors
    /// As [`SettingValue::check`].
    fn from_flag(text: &str) -> Result<Self, String> {
        word(text).and_then(Self::check)
    }

    /// The value as TOML, on one line.
    fn to_toml(&self) -> String {
        serde_json::to_value(self.form()).as_ref().map_or_else(|_| String::new(), toml)
    }
}

/// Deserializes one word. serde also accepts a table with one key as an enum; that is no word.
fn word<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    T::deserialize(StrDeserializer::<FormError>::new(text)).map_err(|_| String::new())
}

/// The values of a table, each checked alone, so that an error names the wrong one.
///
/// # Errors
/// The first invalid entry, and the reason.
fn entries<T: SettingValue<Form = String>>(
    form: BTreeMap<String, Json>,
) -> Result<BTreeMap<String, T>, String> {
    let check = |(name, value): (String, Json)| {
        let checked = value.as_str().map_or_else(|| Err(String::new()), T::from_flag);
        match checked {
            Ok(checked) => Ok((name, checked)),
            Err(reason) if reason.is_empty() => {
                Err(format!("{name:?}: invalid value {}: must be {}", toml(&value), T::KIND))
            }
            Err(reason) => Err(format!("{name:?}: {reason}")),
        }
    };
    form.into_iter().map(check).collect()
}

/// JSON as TOML. All escapes of JSON are those of TOML; TOML escapes DEL too.
fn toml(value: &Json) -> String {
    match value {
        Json::Array(values) => {
            format!("[{}]", values.iter().map(toml).collect::<Vec<_>>().join(", "))
        }
        Json::Object(entries) if entries.is_empty() => "{}".to_owned(),
        Json::Object(entries) => {
            let entry = |(key, value): (&String, &Json)| {
                format!("{} = {}", toml(&key.as_str().into()), toml(value))
            };
            format!("{{ {} }}", entries.iter().map(entry).collect::<Vec<_>>().join(", "))
        }
        plain => plain.to_string().replace('\u{7f}', "\\u007F"),
    }
}

/// A type that serde reads and writes as it is.
macro_rules! plain {
    ($type:ty, $kind:literal) => {
        impl SettingValue for $type {
            const KIND: &'static str = $kind;
            type Form = Self;

            fn check(form: Self) -> Result<Self, String> {
                Ok(form)
            }

            fn form(&self) -> Self {
                self.clone()
            }
        }
    };
}

plain!(String, "a string");
plain!(bool, "true or false");

/// An enum that serde reads and writes as one word.
macro_rules! words {
    ($type:ty, $kind:literal) => {
        impl SettingValue for $type {
            const KIND: &'static str = $kind;
            type Form = String;

            fn check(text: String) -> Result<Self, String> {
                word(&text)
            }

            fn form(&self) -> String {
                let json = serde_json::to_value(self).unwrap_or_default();
                json.as_str().unwrap_or_default().to_owned()
            }
        }
    };
}

words!(CgroupDriver, "one of auto, cgroupfs, systemd");
words!(LogFormat, "one of text, json");
words!(ShimOwner, "own or runtime");

impl SettingValue for PathBuf {
    const KIND: &'static str = "an absolute path";
    type Form = String;

    fn check(text: String) -> Result<Self, String> {
        let path = Path::new(&text);
        if !path.is_absolute() || text.contains(char::is_control) {
            return Err(String::new());
        }
        if path.components().any(|part| part == Component::ParentDir) {
            return Err(format!("invalid value {text:?}: must be an absolute path without \"..\""));
        }
        // Without doubled, trailing or dotted parts, so that paths can be compared.
        Ok(path.components().collect())
    }

    fn form(&self) -> String {
        self.to_string_lossy().into_owned()
    }
}

impl SettingValue for Vec<Pattern> {
    const KIND: &'static str = "a list of patterns";
    type Form = Vec<String>;

    fn check(texts: Vec<String>) -> Result<Self, String> {
        let pattern =
            |text: &String| text.parse().map_err(|()| format!("{text:?} is not a valid pattern"));
        texts.iter().map(pattern).collect()
    }

    fn form(&self) -> Vec<String> {
        self.iter().map(|pattern| pattern.as_str().to_owned()).collect()
    }

    /// Separated by commas.
    fn from_flag(text: &str) -> Result<Self, String> {
        let words = text.split(',').map(str::trim).filter(|word| !word.is_empty());
        Self::check(words.map(str::to_owned).collect())
    }
}

/// Shims by runtime name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShimBinaries(pub BTreeMap<String, PathBuf>);

impl SettingValue for ShimBinaries {
    const KIND: &'static str = "a table of absolute paths by runtime name";
    type Form = BTreeMap<String, Json>;

    fn check(form: Self::Form) -> Result<Self, String> {
        entries(form).map(Self)
    }

    fn form(&self) -> Self::Form {
        self.0.iter().map(|(name, path)| (name.clone(), path.form().into())).collect()
    }
}

/// A number of MCS categories.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Categories(u32);

impl Categories {
    /// The number of categories in SELinux's policies, and containerd's default.
    const MOST: u32 = 1024;

    /// The number; at least two.
    pub fn get(self) -> u32 {
        self.0
    }
}

impl Default for Categories {
    fn default() -> Self {
        Self(Self::MOST)
    }
}

impl SettingValue for Categories {
    const KIND: &'static str = "a number from 2 to 1024";
    type Form = u32;

    fn check(number: u32) -> Result<Self, String> {
        if (2..=Self::MOST).contains(&number) { Ok(Self(number)) } else { Err(String::new()) }
    }

    fn form(&self) -> u32 {
        self.0
    }
}

impl SettingValue for Duration {
    const KIND: &'static str = "an integer of at least 1, in seconds";
    type Form = u32;

    fn check(seconds: u32) -> Result<Self, String> {
        if seconds == 0 { Err(String::new()) } else { Ok(Self::from_secs(seconds.into())) }
    }

    fn form(&self) -> u32 {
        self.as_secs().try_into().unwrap_or(u32::MAX)
    }
}

impl SettingValue for LevelFilter {
    const KIND: &'static str = "one of off, error, warn, info, debug, trace";
    type Form = String;

    fn check(text: String) -> Result<Self, String> {
        text.parse().map_err(|_| String::new())
    }

    fn form(&self) -> String {
        self.as_str().to_ascii_lowercase()
    }
}

/// Where the daemon serves its metrics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Metrics {
    /// Nowhere.
    Off,
    /// On a unix socket.
    Unix(PathBuf),
    /// On a port of the loopback interface.
    Tcp(SocketAddr),
}

impl fmt::Display for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::Unix(path) => write!(f, "unix://{}", path.display()),
            Self::Tcp(address) => write!(f, "{address}"),
        }
    }
}

impl SettingValue for Metrics {
    const KIND: &'static str = "off, unix:///PATH or a loopback address with its port";
    type Form = String;

    fn check(text: String) -> Result<Self, String> {
        if text == "off" {
            return Ok(Self::Off);
        }
        if let Some(path) = text.strip_prefix("unix://") {
            return PathBuf::check(path.to_owned()).map(Self::Unix).map_err(|_| String::new());
        }
        match text.parse::<SocketAddr>() {
            Ok(address) if address.ip().is_loopback() && address.port() != 0 => {
                Ok(Self::Tcp(address))
            }
            _ => Err(String::new()),
        }
    }

    fn form(&self) -> String {
        self.to_string()
    }
}

/// The driver that creates the pods' cgroups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CgroupDriver {
    /// By the form of `cgroup_parent`: a name that ends in `.slice` means systemd.
    Auto,
    /// Directories of the cgroup file system.
    Cgroupfs,
    /// Transient scopes, requested from systemd over D-Bus.
    Systemd,
}

/// Form of a logged line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Time, level, message and `key=value` fields.
    Text,
    /// One JSON object per line.
    Json,
}

/// Which shim serves a pod's containers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ShimOwner {
    /// The sandboxer's own, where that fits.
    Own,
    /// The runtime's.
    Runtime,
}
