//! What `fuzz/` calls of the inside: everything that decodes what comes from elsewhere.

use std::path::{Path, PathBuf};

use protobuf::well_known_types::any::Any;

use crate::cgroup::{self, Cgroup};
use crate::error::Error;
use crate::frame::{Decoder, Incoming};
use crate::io::logger::Program;
use crate::{container, exec, idmap, mounts, options, runtime, task};

/// Frames: stream, type and message; a length without them for one that is too long. The input is
/// cut into parts of `cut` bytes.
pub fn frames(input: &[u8], cut: usize) -> Vec<(u32, Option<(u8, Vec<u8>)>)> {
    let mut decoder = Decoder::default();
    let frames = input.chunks(cut).flat_map(|part| decoder.feed(part));
    let frames = frames.map(|frame| match frame {
        Incoming::Message { stream, kind, payload } => (stream, Some((kind, payload))),
        Incoming::TooLong { stream, .. } => (stream, None),
    });
    frames.collect()
}

/// Whether this is a call; why not.
///
/// # Errors
/// The refusal.
pub fn call(service: &str, method: &str, payload: &[u8]) -> Result<(), String> {
    task::decode(service, method, payload).map(drop).map_err(|e| e.message)
}

/// Whether an id is accepted.
pub fn is_id(id: &str) -> bool {
    task::check_id(id).is_ok()
}

/// The `options.json` of a Create's options.
///
/// # Errors
/// The refusal.
pub fn options_json(kind: &str, value: &[u8]) -> Result<String, String> {
    let mut any = Any::new();
    (any.type_url, any.value) = (kind.to_owned(), value.to_owned());
    // Of the other call too.
    let _ = options::parse_checkpoint(Some(&any));
    options::parse(Some(&any)).map(|options| options::json(&options).to_string()).map_err(said)
}

/// The `process.json` of an exec.
///
/// # Errors
/// The refusal.
pub fn process_json(spec: &[u8], terminal: bool) -> Result<Vec<u8>, String> {
    exec::process_json(spec, terminal).map_err(said)
}

/// Whether a `config.json` gives a PID namespace of its own; its cgroup.
pub fn config(text: &[u8]) -> (bool, String) {
    container::fuzzed_config(text)
}

/// The last error of the runtime's log.
pub fn last_error(log: &str) -> Option<String> {
    runtime::last_error(log)
}

/// Flags and data of mount options.
///
/// # Errors
/// The refusal.
pub fn mount_options(options: &[String]) -> Result<(u32, Vec<String>), String> {
    mounts::Options::parse(options).map(|parsed| (parsed.flags.bits(), parsed.data)).map_err(said)
}

/// The directory that lower directories of an overlay are made relative to.
pub fn shorten(data: &mut [String]) -> Option<PathBuf> {
    mounts::shorten(data)
}

/// The mount points below a root.
pub fn points_below(table: &[u8], root: &Path) -> Vec<PathBuf> {
    mounts::points_below(table, root)
}

/// A map of users in the kernel's form.
///
/// # Errors
/// The refusal.
pub fn id_map(map: &str) -> Result<String, String> {
    idmap::id_map(map).map_err(said)
}

/// The paths of a process's cgroup.
pub fn cgroup(text: &str, root: &Path, unified: bool) -> Vec<PathBuf> {
    match Cgroup::parse(text, root, unified) {
        Some(Cgroup::V1(paths)) => paths.into_iter().map(|(_, path)| path).collect(),
        Some(Cgroup::V2(path)) => vec![path],
        None => Vec::new(),
    }
}

/// The path in a hierarchy of an OCI config's cgroup.
pub fn cgroup_in_hierarchy(path: &str, id: &str) -> Option<PathBuf> {
    cgroup::in_hierarchy(path, id)
}

/// The arguments of a logging program.
///
/// # Errors
/// The refusal.
pub fn logging_program(uri: &str) -> Result<Vec<Vec<u8>>, String> {
    let program = Program::parse(uri, true).map_err(said)?;
    Ok(program.arguments.into_iter().map(|argument| argument.into_bytes()).collect())
}

fn said(e: Error) -> String {
    e.message
}
