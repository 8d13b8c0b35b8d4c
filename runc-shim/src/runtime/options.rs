//! Options of the runtime in a Create, and the files in the bundle that record them, so that a
//! later containerd can clean up.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use containerd_shim_protos::api;
use containerd_shim_protos::shim::oci::{CheckpointOptions, Options};
use protobuf::well_known_types::any::Any;
use protobuf::{Message as _, UnknownValueRef};
use serde::{Deserialize, Serialize};

use crate::error::{Code, Context as _, Error};
use crate::runtime::Runtime;

/// The default directory of runc's state.
const ROOT: &str = "/run/containerd/runc";

/// Decodes the options of a Create. Generic runtime options are ignored, because none is for runc.
pub fn parse(options: Option<&Any>) -> Result<Options, Error> {
    match options {
        None => Ok(Options::new()),
        Some(any) if any.value.is_empty() || is(any, "runtimeoptions.v1.Options") => {
            Ok(Options::new())
        }
        Some(any) if are_of_runc(any) => {
            Options::parse_from_bytes(&any.value).context("runtime options")
        }
        Some(any) => {
            let message = format!("runtime options of type {:?}", any.type_url);
            Err(Error::new(Code::INVALID_ARGUMENT, message))
        }
    }
}

/// Whether these are the options of runc.
pub fn are_of_runc(any: &Any) -> bool {
    is(any, "containerd.runc.v1.Options")
}

/// The options of a Checkpoint.
pub fn parse_checkpoint(options: Option<&Any>) -> Result<CheckpointOptions, Error> {
    let value = options.map(|any| any.value.as_slice()).unwrap_or_default();
    CheckpointOptions::parse_from_bytes(value).context("checkpoint options")
}

fn is(any: &Any, name: &str) -> bool {
    any.type_url.rsplit('/').next() == Some(name) || any.type_url.ends_with(name)
}

/// The parent image of a Checkpoint; empty: none. containerd has it from 2.4 on, as field 10 that
/// the message of the crate does not have.
pub fn checkpoint_parent(options: &CheckpointOptions) -> Result<String, Error> {
    let value = match options.special_fields.unknown_fields().get(10) {
        Some(UnknownValueRef::LengthDelimited(value)) => value,
        _ => &[],
    };
    let malformed = |_| Error::new(Code::INVALID_ARGUMENT, "the parent path is not UTF-8");
    String::from_utf8(value.to_vec()).map_err(malformed)
}

/// The options that a deletion needs, as `options.json` in a bundle has them.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct BundleOptions {
    binary_name: String,
    root: String,
    systemd_cgroup: bool,
}

impl BundleOptions {
    /// The part of the options of a Create.
    pub fn new(options: &Options) -> Self {
        Self {
            binary_name: options.binary_name.clone(),
            root: options.root.clone(),
            systemd_cgroup: options.systemd_cgroup,
        }
    }

    /// Reads them from a bundle; the default ones if they are not there.
    pub fn read(bundle: &Path) -> Self {
        let text = fs::read(bundle.join("options.json")).unwrap_or_default();
        let mut options: Self = serde_json::from_slice(&text).unwrap_or_default();
        let named = fs::read_to_string(bundle.join("runtime")).unwrap_or_default();
        if !named.is_empty() {
            options.binary_name = named;
        }
        options
    }

    /// Writes them into a bundle, where also containerd's shim finds them.
    pub fn write(&self, bundle: &Path) -> Result<(), Error> {
        write_file(&bundle.join("options.json"), self.json()?.as_bytes())?;
        write_file(&bundle.join("runtime"), self.binary_name.as_bytes())
    }

    /// The content of `options.json`.
    pub fn json(&self) -> Result<String, Error> {
        serde_json::to_string(self).map_err(|e| Error::unknown(format!("runtime options: {e}")))
    }

    /// The runtime of containers in a namespace.
    pub fn runtime(self, namespace: &str) -> Runtime {
        let root = if self.root.is_empty() { ROOT } else { self.root.trim_end_matches('/') };
        Runtime {
            root: format!("{root}/{namespace}"),
            binary: self.binary_name,
            systemd_cgroup: self.systemd_cgroup,
        }
    }
}

fn write_file(path: &Path, content: &[u8]) -> Result<(), Error> {
    let mut open = fs::OpenOptions::new();
    let file = open.write(true).create(true).truncate(true).mode(0o600).open(path);
    file.and_then(|mut file| file.write_all(content))
        .context(format_args!("write {}", path.display()))
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
    fn options_are_written_into_the_bundle_and_read_there() {
        let dir = tempfile::tempdir().unwrap();
        let mut options = Options::new();
        options.binary_name = "/usr/bin/crun".to_owned();
        options.root = "/run/r/".to_owned();
        options.systemd_cgroup = true;
        options.io_uid = 7;
        for options in [options, Options::new()] {
            BundleOptions::new(&options).write(dir.path()).unwrap();
            assert_eq!(BundleOptions::read(dir.path()), BundleOptions::new(&options));
            let runtime = fs::read_to_string(dir.path().join("runtime")).unwrap();
            assert_eq!(runtime, options.binary_name);
        }
        let none = BundleOptions::read(&dir.path().join("none")).runtime("n");
        assert_eq!((none.root.as_str(), none.binary.as_str()), ("/run/containerd/runc/n", ""));
        // The daemon, or a containerd that runs its own shim, may have written the name alone.
        fs::write(dir.path().join("runtime"), "crun").unwrap();
        assert_eq!(BundleOptions::read(dir.path()).runtime("n").binary, "crun");
    }
}
