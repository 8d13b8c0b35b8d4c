//! Facts: what was observed of a pod, each under the name of a field.

use protobuf::MessageDyn;
use protobuf::reflect::{ReflectFieldRef, ReflectValueRef};
use serde_json::Value;

/// The value of a missing field.
pub(crate) const ABSENT: &str = "-";

/// Everything observed of one pod, by field.
#[derive(Clone, Debug, Default)]
pub(crate) struct Facts {
    facts: Vec<(String, String)>,
    /// Values that differ in every pod, and their replacements.
    names: Vec<(String, String)>,
}

impl Facts {
    /// From now on `name` replaces `found`.
    pub(crate) fn call(&mut self, found: impl Into<String>, name: &str) {
        let found = found.into();
        if !found.is_empty() {
            self.names.push((found, name.to_owned()));
            // The path of something in a directory before that of the directory.
            self.names.sort_by_key(|(found, _)| std::cmp::Reverse(found.len()));
        }
    }

    /// Adds one.
    pub(crate) fn add(&mut self, field: impl Into<String>, value: impl ToString) {
        let (field, value) = (self.plain(&field.into()), self.plain(&value.to_string()));
        self.facts.push((field, value));
    }

    /// Adds every leaf of a JSON value below `field`.
    pub(crate) fn add_json(&mut self, field: &str, value: &Value) {
        for (path, leaf) in leaves(field, value) {
            match leaf {
                // A set, in whatever order.
                Value::Array(set) if path.contains(".capabilities.") => {
                    let mut set: Vec<String> = set.iter().map(Value::to_string).collect();
                    set.sort();
                    self.add(path, format!("[{}]", set.join(",")));
                }
                // A text that looks like a number differs from the number.
                Value::String(text) if serde_json::from_str::<Value>(text).is_err() => {
                    self.add(path, text)
                }
                leaf => self.add(path, leaf),
            }
        }
    }

    /// Adds the name and the JSON type of every leaf below `field`.
    pub(crate) fn add_types(&mut self, field: &str, value: &Value) {
        for (path, leaf) in leaves(field, value) {
            let kind = match leaf {
                Value::Null => "null",
                Value::Bool(_) => "a boolean",
                Value::Number(_) => "a number",
                Value::Array(_) => "an array",
                Value::Object(_) => "an object",
                Value::String(_) => "a string",
            };
            self.add(path, kind);
        }
    }

    /// The value of a field.
    pub(crate) fn get(&self, field: &str) -> Option<&str> {
        self.facts.iter().find(|(name, _)| name == field).map(|(_, value)| value.as_str())
    }

    /// All, in the order in which they were added.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.facts.iter().map(|(field, value)| (field.as_str(), value.as_str()))
    }

    fn plain(&self, text: &str) -> String {
        self.names.iter().fold(text.to_owned(), |text, (found, name)| text.replace(found, name))
    }
}

/// Every leaf of a JSON value with its path. A list of plain values is one leaf; the elements of a
/// list of objects are identified by what names them in an OCI spec, else by their number.
fn leaves<'a>(path: &str, value: &'a Value) -> Vec<(String, &'a Value)> {
    match value {
        Value::Object(object) if !object.is_empty() => {
            object.iter().flat_map(|(key, value)| leaves(&format!("{path}.{key}"), value)).collect()
        }
        Value::Array(array) if array.iter().any(Value::is_object) => array
            .iter()
            .enumerate()
            .flat_map(|(index, value)| {
                let name = ["destination", "type"].iter().find_map(|key| value.get(key)?.as_str());
                leaves(&format!("{path}[{}]", name.map_or(index.to_string(), str::to_owned)), value)
            })
            .collect(),
        leaf => vec![(path.to_owned(), leaf)],
    }
}

/// A message as JSON: a field that was not sent is left out.
pub(crate) fn json(message: &dyn MessageDyn) -> Value {
    let mut object = serde_json::Map::new();
    for field in message.descriptor_dyn().fields() {
        let value = match field.get_reflect(message) {
            ReflectFieldRef::Optional(_) if !field.has_field(message) => continue,
            ReflectFieldRef::Optional(one) => one.value().map_or(Value::Null, scalar),
            ReflectFieldRef::Repeated(many) if many.is_empty() => continue,
            ReflectFieldRef::Repeated(many) => many.into_iter().map(scalar).collect(),
            ReflectFieldRef::Map(map) if map.is_empty() => continue,
            ReflectFieldRef::Map(map) => {
                (&map).into_iter().map(|(key, value)| (key.to_string(), scalar(value))).collect()
            }
        };
        object.insert(field.name().to_owned(), value);
    }
    Value::Object(object)
}

fn scalar(value: ReflectValueRef<'_>) -> Value {
    match value {
        ReflectValueRef::Message(message) => {
            let mut object = json(&*message);
            // A wrapped number that is 0 is there all the same.
            if message.descriptor_dyn().name() == "UInt64Value"
                && let Some(object) = object.as_object_mut()
            {
                object.entry("value").or_insert_with(|| 0.into());
            }
            object
        }
        ReflectValueRef::String(text) => text.into(),
        ReflectValueRef::Bool(yes) => yes.into(),
        ReflectValueRef::Enum(descriptor, number) => descriptor
            .value_by_number(number)
            .map_or_else(|| number.into(), |value| value.name().into()),
        ReflectValueRef::U32(number) => number.into(),
        ReflectValueRef::U64(number) => number.into(),
        ReflectValueRef::I32(number) => number.into(),
        ReflectValueRef::I64(number) => number.into(),
        ReflectValueRef::F32(number) => number.into(),
        ReflectValueRef::F64(number) => number.into(),
        ReflectValueRef::Bytes(bytes) => format!("{bytes:?}").into(),
    }
}
