//! Whether every field of CRI's config is given by some case.

use std::collections::BTreeSet;

use kit::cri::api::PodSandboxConfig;
use protobuf::MessageFull;
use protobuf::reflect::{MessageDescriptor, RuntimeFieldType, RuntimeType};
use serde_json::Value;

use crate::fact::json;

/// Fields that no case gives, and why.
const NOT_GIVEN: [(&str, &str); 3] = [
    (
        "linux.security_context.namespace_options.userns_options.*.container_id",
        "it is 0 in every mapping of kubelet's, and a field that is 0 is not sent",
    ),
    ("log_directory", "the kit gives every pod one"),
    ("linux.cgroup_parent", "the kit gives every pod one"),
];

/// The fields that no config gives.
pub(crate) fn missing<'a>(configs: impl Iterator<Item = &'a PodSandboxConfig>) -> Vec<String> {
    let mut given = BTreeSet::new();
    for config in configs {
        collect("", &json(config), &mut given);
    }
    let mut all = Vec::new();
    describe("", &PodSandboxConfig::descriptor(), &mut all);
    all.retain(|field| {
        let excused = NOT_GIVEN.iter().any(|(pattern, _)| crate::table::like(pattern, field));
        !excused
            && !given.iter().any(|path| path == field || path.starts_with(&format!("{field}.")))
    });
    all
}

fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}

fn collect(path: &str, value: &Value, given: &mut BTreeSet<String>) {
    match value {
        Value::Object(object) => {
            object.iter().for_each(|(key, value)| collect(&join(path, key), value, given))
        }
        Value::Array(array) => array.iter().for_each(|value| collect(path, value, given)),
        _ => {}
    }
    given.insert(path.to_owned());
}

/// All leaves of a message. What is in a map is one.
fn describe(path: &str, message: &MessageDescriptor, all: &mut Vec<String>) {
    for field in message.fields() {
        let path = join(path, field.name());
        match field.runtime_field_type() {
            RuntimeFieldType::Singular(RuntimeType::Message(inner))
            | RuntimeFieldType::Repeated(RuntimeType::Message(inner)) => {
                describe(&path, &inner, all)
            }
            _ => all.push(path),
        }
    }
}
