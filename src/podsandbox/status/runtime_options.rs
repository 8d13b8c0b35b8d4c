//! The runtime handler's options as the built-in controller shows them.

use containerd_shim_protos::shim::oci::Options;
use protobuf::well_known_types::any::Any;
use protobuf::well_known_types::empty::Empty;
use protobuf::{Message as _, UnknownValueRef};
use serde_json::{Map, Value};

use super::go_json;

/// Decodes the options of runc's shim (`containerd.runc.v1.Options`) and those that containerd's
/// config gives to every other shim (`runtimeoptions.v1.Options`). `None`: there are none.
///
/// # Errors
/// Why they cannot be shown.
pub(super) fn decode(options: &Any) -> Result<Option<Value>, String> {
    // The built-in controller does the same: options that are all default have no bytes.
    if options.value.is_empty() {
        return Ok(None);
    }
    let malformed = |e: protobuf::Error| e.to_string();
    match options.type_url.rsplit('/').next().unwrap_or_default() {
        "containerd.runc.v1.Options" => Options::parse_from_bytes(&options.value)
            .map(|options| Some(go_json::encode(&options)))
            .map_err(malformed),
        "runtimeoptions.v1.Options" => generic(&options.value).map(Some).map_err(malformed),
        other => Err(format!("unknown type {other:?}")),
    }
}

/// `runtimeoptions.v1.Options`: `string type_url = 1; string config_path = 2; bytes config_body =
/// 3`. A message without fields of its own keeps all of them as unknown ones.
fn generic(bytes: &[u8]) -> protobuf::Result<Value> {
    use base64::{Engine as _, engine::general_purpose::STANDARD};

    let message = Empty::parse_from_bytes(bytes)?;
    let mut object = Map::new();
    for (number, value) in message.special_fields.unknown_fields().iter() {
        let UnknownValueRef::LengthDelimited(bytes) = value else { continue };
        let (name, shown) = match number {
            1 => ("type_url", String::from_utf8_lossy(bytes).into_owned()),
            2 => ("config_path", String::from_utf8_lossy(bytes).into_owned()),
            3 => ("config_body", STANDARD.encode(bytes)),
            _ => continue,
        };
        object.insert(name.to_owned(), shown.into());
    }
    Ok(Value::Object(object))
}
