//! Options of the runtime in a Create, and the files in the bundle that record them, so that a
//! later containerd can clean up.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use containerd_shim_protos::api;
use containerd_shim_protos::shim::oci::{CheckpointOptions, Options};
use protobuf::Message as _;
use protobuf::well_known_types::any::Any;
use serde_json::{Map, Value};

use crate::error::{Code, Context as _, Error};

/// The default directory of runc's state.
const ROOT: &str = "/run/containerd/runc";

/// Decodes the options of a Create. Generic runtime options are ignored, because none is for runc.
pub fn parse(options: Option<&Any>) -> Result<Options, Error> {
    match options {
        None => Ok(Options::new()),
        Some(any) if any.value.is_empty() || is(any, "runtimeoptions.v1.Options") => {
            Ok(Options::new())
        }
        Some(any) if is(any, "containerd.runc.v1.Options") => {
            Options::parse_from_bytes(&any.value).context("runtime options")
        }
        Some(any) => {
            let message = format!("runtime options of type {:?}", any.type_url);
            Err(Error::new(Code::INVALID_ARGUMENT, message))
        }
    }
}

/// The options of a Checkpoint.
pub fn parse_checkpoint(options: Option<&Any>) -> Result<CheckpointOptions, Error> {
    let value = options.map(|any| any.value.as_slice()).unwrap_or_default();
    CheckpointOptions::parse_from_bytes(value).context("checkpoint options")
}

fn is(any: &Any, name: &str) -> bool {
    any.type_url.rsplit('/').next() == Some(name) || any.type_url.ends_with(name)
}

/// The directory in which the runtime keeps the state of a namespace's containers, for the value of
/// the option `root`.
pub fn root_of(root: &str, namespace: &str) -> String {
    let root = if root.is_empty() { ROOT } else { root };
    format!("{}/{namespace}", root.trim_end_matches('/'))
}

/// Writes the options into a bundle, as containerd's shim does.
pub fn write(bundle: &Path, options: &Options) -> Result<(), Error> {
    write_file(&bundle.join("options.json"), json(options).to_string().as_bytes())?;
    write_file(&bundle.join("runtime"), options.binary_name.as_bytes())
}

fn write_file(path: &Path, content: &[u8]) -> Result<(), Error> {
    let mut open = fs::OpenOptions::new();
    let file = open.write(true).create(true).truncate(true).mode(0o600).open(path);
    file.and_then(|mut file| file.write_all(content))
        .context(format_args!("write {}", path.display()))
}

/// The options that are set, as JSON.
pub fn json(options: &Options) -> Value {
    let mut fields = Map::new();
    let mut put = |name: &str, value: Value, set: bool| {
        if set {
            fields.insert(name.to_owned(), value);
        }
    };
    for (name, flag) in [
        ("no_pivot_root", options.no_pivot_root),
        ("no_new_keyring", options.no_new_keyring),
        ("systemd_cgroup", options.systemd_cgroup),
    ] {
        put(name, flag.into(), flag);
    }
    for (name, number) in [
        ("io_uid", options.io_uid),
        ("io_gid", options.io_gid),
        ("task_api_version", options.task_api_version),
    ] {
        put(name, number.into(), number != 0);
    }
    for (name, text) in [
        ("shim_cgroup", &options.shim_cgroup),
        ("binary_name", &options.binary_name),
        ("root", &options.root),
        ("criu_image_path", &options.criu_image_path),
        ("criu_work_path", &options.criu_work_path),
        ("task_api_address", &options.task_api_address),
    ] {
        put(name, text.as_str().into(), !text.is_empty());
    }
    Value::Object(fields)
}

/// The arguments that restore a container from a checkpoint; empty: the container is created.
pub fn restore_arguments(
    request: &api::CreateTaskRequest,
    options: &Options,
    bundle: &Path,
) -> Vec<String> {
    if request.checkpoint.is_empty() {
        return Vec::new();
    }
    let path = |name: &str| bundle.join(name).display().to_string();
    let work = match options.criu_work_path.as_str() {
        "" => path("work"),
        work => work.to_owned(),
    };
    let mut arguments = vec!["restore".to_owned()];
    let mut pair = |name: &str, value: String| arguments.extend([name.to_owned(), value]);
    pair("--image-path", request.checkpoint.clone());
    pair("--work-path", work);
    if !request.parent_checkpoint.is_empty() {
        pair("--parent-path", request.parent_checkpoint.clone());
    }
    pair("--pid-file", path("init.pid"));
    pair("--bundle", bundle.display().to_string());
    arguments.push("--detach".to_owned());
    arguments.extend(options.no_pivot_root.then(|| "--no-pivot".to_owned()));
    arguments.push("--no-subreaper".to_owned());
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;

    fn any(name: &str, options: &Options) -> Any {
        let mut any = Any::new();
        any.type_url = name.to_owned();
        any.value = options.write_to_bytes().unwrap();
        any
    }

    #[test]
    fn options_of_other_types_are_refused() {
        let mut options = Options::new();
        options.binary_name = "crun".to_owned();
        for name in ["containerd.runc.v1.Options", "types.containerd.io/containerd.runc.v1.Options"]
        {
            assert_eq!(parse(Some(&any(name, &options))).unwrap(), options);
        }
        assert_eq!(
            parse(Some(&any("runtimeoptions.v1.Options", &options))).unwrap(),
            Options::new()
        );
        assert_eq!(parse(None).unwrap(), Options::new());
        assert!(parse(Some(&any("other.Options", &options))).is_err());
    }

    #[test]
    fn options_are_written_into_the_bundle() {
        let dir = tempfile::tempdir().unwrap();
        let mut options = Options::new();
        options.binary_name = "/usr/bin/crun".to_owned();
        options.systemd_cgroup = true;
        options.io_uid = 7;
        write(dir.path(), &options).unwrap();
        let read = |name: &str| fs::read_to_string(dir.path().join(name)).unwrap();
        assert_eq!(read("runtime"), "/usr/bin/crun");
        let expected = r#"{"binary_name":"/usr/bin/crun","io_uid":7,"systemd_cgroup":true}"#;
        assert_eq!(read("options.json"), expected);
        write(dir.path(), &Options::new()).unwrap();
        assert_eq!((read("runtime"), read("options.json")), (String::new(), "{}".to_owned()));
    }
}
