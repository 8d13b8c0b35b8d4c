//! `google.protobuf.Any` in a record: its type, and its value as base64.

use std::collections::BTreeMap;

use protobuf::SpecialFields;
use protobuf::well_known_types::any::Any;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The form of an [`Any`] in a record.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Any")]
pub(super) struct RecordedAny {
    type_url: String,
    /// Standard base64 with padding.
    #[serde(with = "base64_bytes")]
    value: Vec<u8>,
    #[serde(skip)]
    special_fields: SpecialFields,
}

/// An [`Any`] inside of another type.
#[derive(Serialize, Deserialize)]
struct Nested(#[serde(with = "RecordedAny")] Any);

/// The form of an optional [`Any`].
pub(super) mod option {
    use super::*;

    pub(in super::super) fn serialize<S: Serializer>(
        any: &Option<Any>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        any.clone().map(Nested).serialize(to)
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<Any>, D::Error> {
        Ok(Option::<Nested>::deserialize(from)?.map(|nested| nested.0))
    }
}

/// The form of several [`Any`] by name.
pub(super) mod map {
    use super::*;

    pub(in super::super) fn serialize<S: Serializer>(
        all: &BTreeMap<String, Any>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.collect_map(all.iter().map(|(name, any)| (name, Nested(any.clone()))))
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<BTreeMap<String, Any>, D::Error> {
        let all = BTreeMap::<String, Nested>::deserialize(from)?;
        Ok(all.into_iter().map(|(name, nested)| (name, nested.0)).collect())
    }
}

mod base64_bytes {
    use base64::{Engine as _, engine::general_purpose::STANDARD};
    use serde::{Deserialize as _, Deserializer, Serializer, de};

    pub(super) fn serialize<S: Serializer>(bytes: &[u8], to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&STANDARD.encode(bytes))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u8>, D::Error> {
        STANDARD.decode(String::deserialize(from)?).map_err(de::Error::custom)
    }
}
