//! Text that never changes and that many keep: in memory once, however many do. Thousands of
//! sandboxes would have each its id in many places.

use std::borrow::Borrow;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A shared text; its clones are the same text. As a key it is looked up by `str`, and a record has
/// it as a plain string.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SandboxId(Arc<str>);

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

impl Default for SandboxId {
    fn default() -> Self {
        Self::from("")
    }
}

impl Borrow<str> for SandboxId {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl AsRef<str> for SandboxId {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl From<&str> for SandboxId {
    fn from(text: &str) -> Self {
        Self(text.into())
    }
}

impl From<String> for SandboxId {
    fn from(text: String) -> Self {
        Self(text.into())
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
        String::deserialize(from).map(Self::from)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    #[test]
    fn a_record_has_it_as_a_plain_string() {
        let text = SandboxId::from("a\"ü");
        let json = serde_json::to_string(&text).unwrap();
        assert_eq!(json, serde_json::to_string("a\"ü").unwrap());
        assert_eq!(serde_json::from_str::<SandboxId>(&json).unwrap(), text);
        assert_eq!(format!("{text}{text:?}"), format!("{}{:?}", "a\"ü", "a\"ü"));
    }

    #[test]
    fn it_is_found_by_what_it_says() {
        let known = HashMap::from([(SandboxId::from("a"), 1)]);
        assert_eq!((known.get("a"), known.get("b")), (Some(&1), None));
    }
}
