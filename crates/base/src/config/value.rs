//! The types of settings that check their values.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Component, Path, PathBuf};
use std::str::FromStr;

use clap::ValueEnum;
use log::LevelFilter;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::Pattern;
use crate::sysctl::{is_name, namespace_of};

/// Variables of the runtime-v2 protocol, which describe the node to a shim: the sandboxer alone
/// sets them.
const PROTOCOL: [&str; 4] = ["TTRPC_ADDRESS", "GRPC_ADDRESS", "NAMESPACE", "MAX_SHIM_VERSION"];

/// Parses an absolute path.
///
/// # Errors
/// The reason.
pub fn absolute_path(text: &str) -> Result<PathBuf, String> {
    let path = Path::new(text);
    let above = path.components().any(|part| part == Component::ParentDir);
    if !path.is_absolute() || above || text.contains(char::is_control) {
        return Err("must be an absolute path without \"..\" or control characters".to_owned());
    }
    // Without doubled, trailing or dotted parts, so that paths can be compared.
    Ok(path.components().collect())
}

/// Reads an absolute path.
pub(super) fn path<'de, D: Deserializer<'de>>(deserializer: D) -> Result<PathBuf, D::Error> {
    absolute_path(&String::deserialize(deserializer)?).map_err(D::Error::custom)
}

/// Writes a level as the settings name it.
pub(super) fn lower_case<S: Serializer>(level: &LevelFilter, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&level.as_str().to_ascii_lowercase())
}

/// serde reads and writes these types as their text.
macro_rules! as_text {
    ($($type:ty),+) => {$(
        impl TryFrom<String> for $type {
            type Error = String;

            fn try_from(text: String) -> Result<Self, String> {
                text.parse()
            }
        }

        impl From<$type> for String {
            fn from(value: $type) -> Self {
                value.to_string()
            }
        }
    )+};
}

as_text!(ContainerLimit, Metrics, Pattern, Size, Sysctl, Variable);

/// A variable of the environment.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(try_from = "String", into = "String")]
pub struct Variable {
    /// Its name.
    pub name: String,
    /// Its value.
    pub value: String,
}

impl fmt::Display for Variable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.name, self.value)
    }
}

impl FromStr for Variable {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let is_name =
            |name: &str| name.chars().all(word) && name.starts_with(|c: char| !c.is_ascii_digit());
        let Some((name, value)) = text.split_once('=').filter(|(name, _)| is_name(name)) else {
            return Err(format!("{text:?} is not NAME=value"));
        };
        if value.contains(char::is_control) {
            return Err(format!("{text:?} has a control character"));
        }
        if PROTOCOL.contains(&name) {
            return Err(format!("{name} is set by the sandboxer"));
        }
        Ok(Self { name: name.to_owned(), value: value.to_owned() })
    }
}

/// A resource limit of containers; `None`: unlimited.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(try_from = "String", into = "String")]
pub struct ContainerLimit {
    /// The resource, as in `LIMITS`.
    pub name: String,
    /// The soft limit.
    pub soft: Option<u64>,
    /// The hard limit.
    pub hard: Option<u64>,
}

/// The resources whose limits can be set. A shim and a runtime have the same limits as containers,
/// and need those of the others.
const LIMITS: [&str; 7] =
    ["core", "memlock", "msgqueue", "nofile", "nproc", "rtprio", "sigpending"];

/// Open files that a runtime and a shim with some containers need.
const LEAST_OPEN_FILES: u64 = 1024;

impl ContainerLimit {
    /// Neither its soft nor its hard limit is above that of `most`.
    pub fn is_within(&self, most: &Self) -> bool {
        let order = |limit: Option<u64>| limit.unwrap_or(u64::MAX);
        order(self.soft) <= order(most.soft) && order(self.hard) <= order(most.hard)
    }
}

impl fmt::Display for ContainerLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |limit: Option<u64>| limit.map_or("unlimited".to_owned(), |n| n.to_string());
        write!(f, "{}={}:{}", self.name, text(self.soft), text(self.hard))
    }
}

impl FromStr for ContainerLimit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let limit = |text: &str| match text {
            "unlimited" => Some(None),
            // The kernel's number for an unlimited resource is no limit, and a sign is no digit.
            _ if text.bytes().all(|byte| byte.is_ascii_digit()) => {
                text.parse().ok().filter(|limit| *limit < u64::MAX).map(Some)
            }
            _ => None,
        };
        let parsed = text.split_once('=').and_then(|(name, limits)| {
            let (soft, hard) = limits.split_once(':').unwrap_or((limits, limits));
            Some((name.to_owned(), limit(soft)?, limit(hard)?))
        });
        let Some((name, soft, hard)) = parsed else {
            return Err(format!("{text:?} is not NAME=LIMIT or NAME=SOFT:HARD"));
        };
        if !LIMITS.contains(&name.as_str()) {
            return Err(format!("{name:?} is none of {}", LIMITS.join(", ")));
        }
        let order = |limit: Option<u64>| limit.unwrap_or(u64::MAX);
        if order(soft) > order(hard) {
            return Err(format!("{text:?} has a soft limit above the hard limit"));
        }
        if name == "nofile" && order(soft) < LEAST_OPEN_FILES {
            return Err(format!("{text:?} is below {LEAST_OPEN_FILES}, which shims need"));
        }
        Ok(Self { name, soft, hard })
    }
}

/// A sysctl of a pod's own namespaces, with its value.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(try_from = "String", into = "String")]
pub struct Sysctl {
    /// Its name, with dots.
    pub name: String,
    /// Its value.
    pub value: String,
}

impl fmt::Display for Sysctl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.name, self.value)
    }
}

impl FromStr for Sysctl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let Some((name, value)) = text.split_once('=').filter(|(name, _)| is_name(name)) else {
            return Err(format!("{text:?} is not NAME=value, with dots in the name"));
        };
        if value.is_empty() || text.contains(char::is_control) {
            return Err(format!("{text:?} has no value, or a control character"));
        }
        if namespace_of(name).is_none() {
            return Err(format!("{name} is not namespaced, it would change the node"));
        }
        Ok(Self { name: name.to_owned(), value: value.to_owned() })
    }
}

/// A size in bytes, as a whole number that may have a binary suffix of Kubernetes' quantities.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(try_from = "String", into = "String")]
pub struct Size(u64);

/// The suffixes of sizes, with their exponents of 2.
const UNITS: [(&str, u32); 4] = [("Ti", 40), ("Gi", 30), ("Mi", 20), ("Ki", 10)];

impl Size {
    /// The size of a /dev/shm where no one sets one, as containerd's built-in controller makes it
    /// (`defaultShmSize`).
    pub const SHM: Self = Self(64 << 20);

    /// The largest quantity of Kubernetes. The kernel rounds sizes up to pages.
    const LARGEST: u64 = i64::MAX.unsigned_abs();

    /// The number of bytes.
    pub fn bytes(self) -> u64 {
        self.0
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match UNITS.iter().find(|(_, exponent)| self.0.trailing_zeros() >= *exponent) {
            Some((suffix, exponent)) => write!(f, "{}{suffix}", self.0 >> exponent),
            None => write!(f, "{}", self.0),
        }
    }
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let unit = |(suffix, exponent): &(&str, u32)| Some((text.strip_suffix(suffix)?, *exponent));
        let (number, exponent) = UNITS.iter().find_map(unit).unwrap_or((text, 0));
        // A sign is no digit, and 0 has no bytes: a tmpfs of that size would have no limit.
        let digits = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
        let bytes = || number.parse::<u64>().ok()?.checked_mul(1 << exponent);
        match digits.then(bytes).flatten() {
            Some(bytes) if (1..=Self::LARGEST).contains(&bytes) => Ok(Self(bytes)),
            _ => Err(format!(
                "must be a number of bytes from 1 to {}, or one with the suffix Ki, Mi, Gi or Ti, \
                 such as 64Mi",
                Self::LARGEST
            )),
        }
    }
}

/// Where the daemon serves its metrics.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(try_from = "String", into = "String")]
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

impl FromStr for Metrics {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "off" {
            return Ok(Self::Off);
        }
        if let Some(path) = text.strip_prefix("unix://") {
            return absolute_path(path).map(Self::Unix);
        }
        match text.parse::<SocketAddr>() {
            Ok(address) if address.ip().is_loopback() && address.port() != 0 => {
                Ok(Self::Tcp(address))
            }
            _ => Err("must be off, unix:///PATH or a loopback address with its port".to_owned()),
        }
    }
}

/// Form of a logged line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Time, level, message and `key=value` fields.
    Text,
    /// One JSON object per line.
    Json,
}

/// Which shim serves a pod's containers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum ShimOwner {
    /// The sandboxer's own shim where that fits.
    Own,
    /// The runtime's shim.
    Runtime,
}
