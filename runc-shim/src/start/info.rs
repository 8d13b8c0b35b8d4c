//! The option `-info`: what containerd asks a shim about itself and its runtime.

use std::io::Write as _;
use std::process::{Command, Stdio};

use containerd_shim_protos::types::introspection::{RuntimeInfo, RuntimeVersion};
use protobuf::Message as _;
use protobuf::well_known_types::any::Any;
use serde_json::value::RawValue;

use crate::error::{Context as _, Error};
use crate::runtime::{self, options};

/// The type of the runtime's features in containerd, whose value is JSON.
const FEATURES: &str = "types.containerd.io/opencontainers/runtime-spec/1/features/Features";

/// Prints a `RuntimeInfo` for the options on standard input, an `Any` or nothing.
///
/// # Errors
/// The input is malformed, or the runtime is not installed.
pub fn print() -> Result<(), Error> {
    let given = Any::parse_from_bytes(&super::input()?).context("standard input")?;
    let binary = options::parse(Some(&given))?.binary_name;
    let mut info = RuntimeInfo::new();
    info.name = env!("CARGO_PKG_NAME").to_owned();
    let mut version = RuntimeVersion::new();
    version.version = env!("CARGO_PKG_VERSION").to_owned();
    info.version = Some(version).into();
    info.features = features(if binary.is_empty() { "runc" } else { &binary })?.into();
    info.options = (!given.type_url.is_empty()).then_some(given).into();
    std::io::stdout().write_all(&info.write_to_bytes()?).context("write to standard output")
}

/// The runtime's features; `None`: it does not print them.
fn features(binary: &str) -> Result<Option<Any>, Error> {
    runtime::find_program(binary)?;
    let mut command = Command::new(binary);
    let output = command.arg("features").stdin(Stdio::null()).output();
    let output = output.context(format_args!("run {binary} features"))?;
    if !output.status.success() || serde_json::from_slice::<&RawValue>(&output.stdout).is_err() {
        return Ok(None);
    }
    let mut any = Any::new();
    (any.type_url, any.value) = (FEATURES.to_owned(), output.stdout);
    Ok(Some(any))
}
