//! The types of settings: what each takes from a file or a flag and how it is shown.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use log::LevelFilter;
use toml::de::DeValue;

use super::Pattern;

/// A value as it was given.
pub(super) enum Input<'a> {
    /// By a flag.
    Text(&'a str),
    /// In the config file.
    Toml(&'a DeValue<'a>),
}

impl Input<'_> {
    /// The value as plain text; `None` for TOML values that have no plain form.
    fn text(&self) -> Option<Cow<'_, str>> {
        match self {
            Self::Text(text) => Some(Cow::Borrowed(text)),
            Self::Toml(DeValue::String(text)) => Some(Cow::Borrowed(text)),
            Self::Toml(_) => None,
        }
    }

    /// As [`Input::text`], but of a bare TOML word or number; a quoted one is refused.
    fn bare(&self) -> Option<Cow<'_, str>> {
        match self {
            Self::Text(text) => Some(Cow::Borrowed(text)),
            Self::Toml(DeValue::Boolean(value)) => Some(value.to_string().into()),
            Self::Toml(DeValue::Integer(value)) if value.radix() == 10 => {
                Some(Cow::Borrowed(value.as_str()))
            }
            Self::Toml(_) => None,
        }
    }

    /// Says what the value is instead of what it must be.
    pub(super) fn refused(&self, must_be: &str) -> String {
        let is = match self {
            Self::Text(text) => format!("{text:?}"),
            Self::Toml(DeValue::String(text)) => format!("{text:?}"),
            Self::Toml(DeValue::Integer(value)) => value.to_string(),
            Self::Toml(DeValue::Boolean(value)) => value.to_string(),
            Self::Toml(other) => format!("of type {}", other.type_str()),
        };
        format!("must be {must_be}, is {is}")
    }
}

/// A type of settings.
pub(super) trait Value: Sized {
    /// What values it takes, to follow "must be".
    const KIND: &'static str;

    /// Takes a value.
    ///
    /// # Errors
    /// What the value must be, and what it is.
    fn read(input: Input<'_>) -> Result<Self, String>;

    /// The value as TOML.
    fn to_toml(&self) -> String;
}

/// A TOML basic string. JSON's escapes are a subset of TOML's, but JSON has DEL as it is.
pub(super) fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string().replace('\u{7f}', "\\u007F")
}

impl Value for PathBuf {
    const KIND: &'static str = "an absolute path";

    fn read(input: Input<'_>) -> Result<Self, String> {
        let Some(text) = input.text() else { return Err(input.refused(Self::KIND)) };
        let path = Path::new(text.as_ref());
        if !path.is_absolute() || text.contains(char::is_control) {
            return Err(input.refused(Self::KIND));
        }
        if path.components().any(|part| part == Component::ParentDir) {
            return Err(input.refused("an absolute path without \"..\""));
        }
        // Collected anew: no doubled, trailing or dotted parts, so that paths can be compared.
        Ok(path.components().collect())
    }

    fn to_toml(&self) -> String {
        quoted(&self.to_string_lossy())
    }
}

impl Value for String {
    const KIND: &'static str = "a string";

    fn read(input: Input<'_>) -> Result<Self, String> {
        input.text().map(Cow::into_owned).ok_or_else(|| input.refused(Self::KIND))
    }

    fn to_toml(&self) -> String {
        quoted(self)
    }
}

impl Value for Vec<Pattern> {
    const KIND: &'static str = "a list of patterns";

    fn read(input: Input<'_>) -> Result<Self, String> {
        let parsed;
        let value = match &input {
            Input::Toml(value) => *value,
            // A pattern may begin with a bracket too; a list has its strings quoted.
            Input::Text(text) => match DeValue::parse(text) {
                Ok(list) if matches!(list.get_ref(), DeValue::Array(_)) => {
                    parsed = list;
                    parsed.get_ref()
                }
                _ => return words(text),
            },
        };
        let DeValue::Array(array) = value else { return Err(input.refused(Self::KIND)) };
        let patterns = array.iter().map(|one| match one.get_ref() {
            DeValue::String(text) => text.parse().map_err(|()| format!("{text:?} is no pattern")),
            other => Err(Input::Toml(other).refused("a string")),
        });
        patterns.collect()
    }

    fn to_toml(&self) -> String {
        let texts: Vec<String> = self.iter().map(|pattern| quoted(pattern.as_str())).collect();
        format!("[{}]", texts.join(", "))
    }
}

/// Patterns as plain words with commas between them.
fn words(text: &str) -> Result<Vec<Pattern>, String> {
    let words = text.split(',').map(str::trim).filter(|word| !word.is_empty());
    words.map(|word| word.parse().map_err(|()| format!("{word:?} is no pattern"))).collect()
}

impl Value for bool {
    const KIND: &'static str = "true or false";

    fn read(input: Input<'_>) -> Result<Self, String> {
        input.bare().and_then(|text| text.parse().ok()).ok_or_else(|| input.refused(Self::KIND))
    }

    fn to_toml(&self) -> String {
        self.to_string()
    }
}

/// Shims by runtime name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shims(pub BTreeMap<String, PathBuf>);

impl Value for Shims {
    const KIND: &'static str = "a table of absolute paths by runtime name";

    fn read(input: Input<'_>) -> Result<Self, String> {
        table(input).map(Self)
    }

    fn to_toml(&self) -> String {
        table_to_toml(&self.0)
    }
}

/// A number of MCS categories.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Categories(u32);

impl Categories {
    /// As many as SELinux's policies have, and containerd's default.
    const MOST: u32 = 1024;

    /// How many; at least two.
    pub fn get(self) -> u32 {
        self.0
    }
}

impl Default for Categories {
    fn default() -> Self {
        Self(Self::MOST)
    }
}

impl Value for Categories {
    const KIND: &'static str = "a number from 2 to 1024";

    fn read(input: Input<'_>) -> Result<Self, String> {
        let number = input
            .bare()
            .and_then(|text| text.parse().ok())
            .filter(|number| (2..=Self::MOST).contains(number));
        number.map(Self).ok_or_else(|| input.refused(Self::KIND))
    }

    fn to_toml(&self) -> String {
        self.0.to_string()
    }
}

/// Where the daemon's metrics are.
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

impl Value for Metrics {
    const KIND: &'static str = "off, unix:///PATH or a loopback address with its port";

    fn read(input: Input<'_>) -> Result<Self, String> {
        let Some(text) = input.text() else { return Err(input.refused(Self::KIND)) };
        if text == "off" {
            return Ok(Self::Off);
        }
        if let Some(path) = text.strip_prefix("unix://") {
            return PathBuf::read(Input::Text(path))
                .map(Self::Unix)
                .map_err(|_| input.refused(Self::KIND));
        }
        match text.parse::<SocketAddr>() {
            Ok(address) if address.ip().is_loopback() && address.port() != 0 => {
                Ok(Self::Tcp(address))
            }
            _ => Err(input.refused(Self::KIND)),
        }
    }

    fn to_toml(&self) -> String {
        quoted(&self.to_string())
    }
}

/// Drivers by runtime name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Drivers(pub BTreeMap<String, DriverName>);

impl Value for Drivers {
    const KIND: &'static str = "a table of `native` or `shim` by runtime name";

    fn read(input: Input<'_>) -> Result<Self, String> {
        table(input).map(Self)
    }

    fn to_toml(&self) -> String {
        table_to_toml(&self.0)
    }
}

/// A table of values by name.
fn table<T: Value>(input: Input<'_>) -> Result<BTreeMap<String, T>, String> {
    let parsed;
    let value = match &input {
        Input::Toml(value) => *value,
        Input::Text(text) => {
            parsed =
                DeValue::parse(text).map_err(|e| format!("must be a table: {}", e.message()))?;
            parsed.get_ref()
        }
    };
    let DeValue::Table(table) = value else { return Err(input.refused("a table")) };
    let entries = table.iter().map(|(name, value)| {
        let value = T::read(Input::Toml(value.get_ref()))
            .map_err(|e| format!("{}: {e}", name.get_ref()))?;
        Ok((name.get_ref().to_string(), value))
    });
    entries.collect()
}

fn table_to_toml<T: Value>(table: &BTreeMap<String, T>) -> String {
    let entries: Vec<String> = table
        .iter()
        .map(|(name, value)| format!("{} = {}", quoted(name), value.to_toml()))
        .collect();
    if entries.is_empty() { "{}".to_owned() } else { format!("{{ {} }}", entries.join(", ")) }
}

impl Value for Duration {
    const KIND: &'static str = "a whole number of seconds, at least 1";

    fn read(input: Input<'_>) -> Result<Self, String> {
        let seconds: Option<u32> =
            input.bare().and_then(|text| text.parse().ok()).filter(|seconds| *seconds > 0);
        seconds
            .map(|seconds| Self::from_secs(seconds.into()))
            .ok_or_else(|| input.refused(Self::KIND))
    }

    fn to_toml(&self) -> String {
        self.as_secs().to_string()
    }
}

impl Value for LevelFilter {
    const KIND: &'static str = "one of off, error, warn, info, debug, trace";

    fn read(input: Input<'_>) -> Result<Self, String> {
        input.text().and_then(|text| text.parse().ok()).ok_or_else(|| input.refused(Self::KIND))
    }

    fn to_toml(&self) -> String {
        quoted(&self.as_str().to_ascii_lowercase())
    }
}

/// An enum of settings: its variants and their names.
macro_rules! choice {
    ($(#[$attr:meta])* $type:ident { $($(#[doc = $doc:literal])+ $variant:ident = $name:literal,)+ } kind $kind:literal) => {
        $(#[$attr])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $type {
            $($(#[doc = $doc])+ $variant,)+
        }

        impl Value for $type {
            const KIND: &'static str = $kind;

            fn read(input: Input<'_>) -> Result<Self, String> {
                match input.text().as_deref() {
                    $(Some($name) => Ok(Self::$variant),)+
                    _ => Err(input.refused(Self::KIND)),
                }
            }

            fn to_toml(&self) -> String {
                quoted(match self { $(Self::$variant => $name,)+ })
            }
        }
    };
}

choice! {
    /// How the pods' cgroups are made.
    CgroupDriver {
        /// By the form of `cgroup_parent`: a name that ends in `.slice` means systemd.
        Auto = "auto",
        /// Directories of the cgroup file system.
        Cgroupfs = "cgroupfs",
        /// Transient scopes, asked of systemd over D-Bus.
        Systemd = "systemd",
    }
    kind "one of auto, cgroupfs, systemd"
}

choice! {
    /// Form of a logged line.
    LogFormat {
        /// Time, level, message and `key=value` fields.
        Text = "text",
        /// One JSON object per line.
        Json = "json",
    }
    kind "one of text, json"
}

choice! {
    /// Who runs a pod's pause.
    DriverName {
        /// This program.
        Native = "native",
        /// The runtime.
        Shim = "shim",
    } kind "`native` or `shim`"
}

choice! {
    /// Who starts a pod's shim.
    ShimOwner {
        /// The sandboxer.
        Sandboxer = "sandboxer",
        /// The sandboxer, with the pod, by the shim's `start`.
        Started = "started",
        /// containerd.
        Containerd = "containerd",
    } kind "one of sandboxer, started, containerd"
}
