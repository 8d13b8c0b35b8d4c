//! The id of a sandbox: checked when it is made, and in memory once, however many keep it.

use std::borrow::Borrow;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Longest containerd identifier (`pkg/identifiers`), bytes.
pub const IDENTIFIER_MAX: usize = 76;

/// A valid containerd identifier, so safe as a part of a path or a name. Its clones share the text.
/// As a key it is looked up by `str`, and a record has it as a plain string.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SandboxId(Arc<str>);

/// Why a text is no containerd identifier, to follow the name of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidId {
    /// It is empty.
    #[error("is empty")]
    Empty,
    /// It has that many bytes.
    #[error("has {0} bytes, more than {IDENTIFIER_MAX}")]
    TooLong(usize),
    /// It has other characters, or separators at the beginning, at the end or side by side.
    #[error("is not letters and digits, separated by single '.', '_' or '-'")]
    Characters,
}

/// Checks a text that becomes part of paths and names.
///
/// # Errors
/// It is no containerd identifier.
pub fn check_identifier(text: &str) -> Result<(), InvalidId> {
    if text.is_empty() {
        return Err(InvalidId::Empty);
    }
    if text.len() > IDENTIFIER_MAX {
        return Err(InvalidId::TooLong(text.len()));
    }
    let separated = text.split(['.', '_', '-']).all(|part| !part.is_empty());
    if !separated || !text.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b)) {
        return Err(InvalidId::Characters);
    }
    Ok(())
}

impl SandboxId {
    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Deref for SandboxId {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl Borrow<str> for SandboxId {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl TryFrom<&str> for SandboxId {
    type Error = InvalidId;

    fn try_from(text: &str) -> Result<Self, InvalidId> {
        check_identifier(text).map(|()| Self(text.into()))
    }
}

impl TryFrom<String> for SandboxId {
    type Error = InvalidId;

    fn try_from(text: String) -> Result<Self, InvalidId> {
        Self::try_from(text.as_str())
    }
}

impl PartialEq<str> for SandboxId {
    fn eq(&self, other: &str) -> bool {
        *self.0 == *other
    }
}

impl PartialEq<&str> for SandboxId {
    fn eq(&self, other: &&str) -> bool {
        *self.0 == **other
    }
}

impl fmt::Display for SandboxId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for SandboxId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Serialize for SandboxId {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for SandboxId {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        Self::try_from(text.as_str())
            .map_err(|e| serde::de::Error::custom(format!("id {text:?} {e}")))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    /// Promise: invalid_request_names_the_field.
    #[test]
    fn ids_are_containerd_identifiers() {
        for good in ["a", "abc-1.2_3", &"f".repeat(64), &"f".repeat(76)] {
            assert_eq!(SandboxId::try_from(good).unwrap(), good);
        }
        let characters = ["a/b", "..", ".", "../a", "a..b", "-a", "a-", "a b", "ä", "a\0", "a\n"];
        for bad in characters {
            assert_eq!(SandboxId::try_from(bad), Err(InvalidId::Characters), "{bad:?}");
        }
        assert_eq!(SandboxId::try_from(""), Err(InvalidId::Empty));
        for length in [77, 4096] {
            assert_eq!(SandboxId::try_from("f".repeat(length)), Err(InvalidId::TooLong(length)));
        }
    }

    #[test]
    fn a_record_has_it_as_a_plain_string_that_is_checked() {
        let id = SandboxId::try_from("a-1").unwrap();
        let json = serde_json::to_string(&id).unwrap();
        assert_eq!(json, "\"a-1\"");
        assert_eq!(serde_json::from_str::<SandboxId>(&json).unwrap(), id);
        assert_eq!(format!("{id}{id:?}"), "a-1\"a-1\"");
        let error = serde_json::from_str::<SandboxId>("\"../a\"").unwrap_err().to_string();
        assert!(error.starts_with("id \"../a\" is not letters and digits"), "{error}");
    }

    #[test]
    fn it_is_found_by_what_it_says() {
        let known = HashMap::from([(SandboxId::try_from("a").unwrap(), 1)]);
        assert_eq!((known.get("a"), known.get("b")), (Some(&1), None));
    }
}
