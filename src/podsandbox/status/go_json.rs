//! A protobuf message as Go's `encoding/json` writes its generated struct: the field's own name,
//! enums and 64-bit integers as numbers, and left out what is empty (`json:"name,omitempty"`). This
//! is not protobuf's JSON mapping.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use protobuf::MessageDyn;
use protobuf::reflect::{ReflectFieldRef, ReflectValueRef};
use serde_json::{Map, Value};

/// Encodes a message. A float that JSON cannot tell becomes null.
pub(super) fn encode(message: &dyn MessageDyn) -> Value {
    let mut object = Map::new();
    for field in message.descriptor_dyn().fields() {
        // In proto3 a scalar that has its zero value is not there; a message that was sent is, also
        // when empty.
        let encoded = match field.get_reflect(message) {
            ReflectFieldRef::Optional(_) if !field.has_field(message) => continue,
            ReflectFieldRef::Optional(one) => match one.value() {
                Some(one) => value(one),
                None => continue,
            },
            ReflectFieldRef::Repeated(many) if many.is_empty() => continue,
            ReflectFieldRef::Repeated(many) => many.into_iter().map(value).collect(),
            ReflectFieldRef::Map(map) if map.is_empty() => continue,
            ReflectFieldRef::Map(map) => {
                Value::Object((&map).into_iter().map(|(k, v)| (key(&k), value(v))).collect())
            }
        };
        object.insert(field.name().to_owned(), encoded);
    }
    Value::Object(object)
}

fn value(value: ReflectValueRef<'_>) -> Value {
    match value {
        ReflectValueRef::U32(n) => n.into(),
        ReflectValueRef::U64(n) => n.into(),
        ReflectValueRef::I32(n) | ReflectValueRef::Enum(_, n) => n.into(),
        ReflectValueRef::I64(n) => n.into(),
        ReflectValueRef::F32(n) => n.into(),
        ReflectValueRef::F64(n) => n.into(),
        ReflectValueRef::Bool(yes) => yes.into(),
        ReflectValueRef::String(text) => text.into(),
        ReflectValueRef::Bytes(bytes) => STANDARD.encode(bytes).into(),
        ReflectValueRef::Message(message) => encode(&*message),
    }
}

/// Go writes integer keys as strings, too.
fn key(key: &ReflectValueRef<'_>) -> String {
    key.to_str().map_or_else(|| key.to_string(), str::to_owned)
}
