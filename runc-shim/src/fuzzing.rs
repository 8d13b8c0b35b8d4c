//! Entry points for `fuzz/`: all functions that decode external input.

use std::path::{Path, PathBuf};

use protobuf::well_known_types::any::Any;

use crate::cgroup::{self, Cgroup};
use crate::container::config::Config;
use crate::error::Error;
use crate::exec;
use crate::io::logger::Program;
use crate::process_key;
use crate::root::idmap;
use crate::root::mounts;
use crate::root::overlay;
use crate::runtime::command;
use crate::runtime::options::{self, BundleOptions};
use crate::start::Bootstrap;
use crate::ttrpc::frame::{Decoder, Incoming};
use crate::ttrpc::request;

/// Decodes frames: stream id, type and message; only the stream id of a message that is too long.
/// The input is cut into parts of `cut` bytes.
pub fn frames(input: &[u8], cut: usize) -> Vec<(u32, Option<(u8, Vec<u8>)>)> {
    let mut decoder = Decoder::default();
    let frames = input.chunks(cut).flat_map(|part| decoder.feed(part));
    let frames = frames.map(|frame| match frame {
        Incoming::Message { stream, kind, payload } => (stream, Some((kind, payload))),
        Incoming::TooLong { stream, .. } => (stream, None),
    });
    frames.collect()
}

/// Decodes a call.
///
/// # Errors
/// The refusal.
pub fn call(service: &str, method: &str, payload: &[u8]) -> Result<(), String> {
    request::decode(service, method, payload).map(drop).map_err(|e| e.message)
}

/// The directory of sockets of an input of `start`, and the answer for an address.
///
/// # Errors
/// The refusal.
pub fn bootstrap(input: &[u8], id: &str, namespace: &str) -> Result<(String, Vec<u8>), String> {
    let asked = Bootstrap::decode(input, id, namespace).map_err(message)?;
    let answer = asked.answer("unix:///x".to_owned()).map_err(message)?;
    Ok((asked.socket_dir, answer))
}

/// Whether an id is accepted.
pub fn is_id(id: &str) -> bool {
    process_key::check_id(id).is_ok()
}

/// The `options.json` of a Create's options.
///
/// # Errors
/// The refusal.
pub fn options_json(kind: &str, value: &[u8]) -> Result<String, String> {
    let mut any = Any::new();
    (any.type_url, any.value) = (kind.to_owned(), value.to_owned());
    // The options of a Checkpoint are decoded, too.
    let _ = options::parse_checkpoint(Some(&any)).map(|it| options::checkpoint_parent(&it));
    let parsed = options::parse(Some(&any));
    parsed.and_then(|options| BundleOptions::new(&options).json()).map_err(message)
}

/// The `process.json` of an exec.
///
/// # Errors
/// The refusal.
pub fn process_json(spec: &[u8], terminal: bool) -> Result<Vec<u8>, String> {
    exec::process_json(spec, terminal).map_err(message)
}

/// Whether a `config.json` asks for a new PID namespace, and its cgroup path.
pub fn config(text: &[u8]) -> (bool, String) {
    let config = Config::parse(text);
    (config.own_pid_namespace, config.cgroups_path)
}

/// The last error of the runtime's log.
pub fn last_error(log: &str) -> Option<String> {
    command::last_error(log)
}

/// Flags and data of mount options.
///
/// # Errors
/// The refusal.
pub fn mount_options(options: &[String]) -> Result<(u32, Vec<String>), String> {
    mounts::Options::parse(options)
        .map(|parsed| (parsed.flags.bits(), parsed.data))
        .map_err(message)
}

/// The directory to which the lower directories of an overlay are made relative.
pub fn shorten(data: &mut [String]) -> Option<PathBuf> {
    overlay::shorten(data)
}

/// An id map in the kernel's form.
///
/// # Errors
/// The refusal.
pub fn id_map(map: &str) -> Result<String, String> {
    idmap::id_map(map).map_err(message)
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
    let program = Program::parse(uri, true).map_err(message)?;
    Ok(program.arguments.into_iter().map(|argument| argument.into_bytes()).collect())
}

fn message(e: Error) -> String {
    e.message
}
