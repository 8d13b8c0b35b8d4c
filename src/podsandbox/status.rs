//! The report of Status about a sandbox.

mod go_json;
mod runtime_options;

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::{RawValue, to_raw_value};

use super::actor::Published;
use super::layout::Layout;
use super::machine::Phase;
use super::record::Record;
use super::{Error, oci_spec};
use crate::config::Config;
use crate::pause::native;
use crate::protos::cri::PodSandboxConfig;

/// Extension with CRI's own view of the sandbox (containerd `podsandbox.MetadataKey`).
const METADATA: &str = "metadata";

/// Extension with the resources of a resized pod (containerd `podsandbox.UpdatedResourcesKey`, from
/// 2.3 on).
const UPDATED_RESOURCES: &str = "updated-resources";

/// The state's name as CRI reads it.
pub fn state(phase: Phase) -> &'static str {
    match phase {
        Phase::Ready => "SANDBOX_READY",
        Phase::Unknown => "SANDBOX_UNKNOWN",
        Phase::Created | Phase::Starting | Phase::NotReady | Phase::Gone => "SANDBOX_NOTREADY",
    }
}

/// The verbose information: the one key `info`, whose value CRI parses as its `SandboxInfo`.
///
/// From containerd 2.3 on a value of a wrong JSON type fails the whole `PodSandboxStatus`, so
/// whatever is malformed becomes null here, with a line in the log. Blocks: the netns path is
/// looked at.
///
/// # Errors
/// [`Error::Fault`] where the information cannot be written as JSON.
pub fn info(
    record: &Record,
    published: &Published,
    layout: &Arc<Layout>,
    config: &Config,
) -> Result<BTreeMap<String, String>, Error> {
    let id = record.id.as_str();
    let extension = |name: &str| record.info.extensions.get(name).map(|blob| blob.value.as_slice());
    let metadata =
        extension(METADATA).and_then(|json| or_null(id, "sandboxMetadata", Metadata::parse(json)));
    let updated = extension(UPDATED_RESOURCES)
        .and_then(|json| or_null(id, "resources", Updated::parse(json)));
    let options = record.info.runtime_options.as_ref();
    let pod = record.decode_config().map_err(|e| e.to_string());
    let spec = pod.as_ref().map_err(Clone::clone).and_then(|pod| {
        let described = oci_spec::describe(record, pod, layout, config);
        described.map_err(|e| e.to_string()).and_then(|described| raw_json(described.spec.into()))
    });
    let config = match metadata.as_ref().and_then(|metadata| metadata.config) {
        // CRI's own encoding loses nothing, whatever fields a newer CRI has.
        Some(config) => Some(config.to_owned()),
        None => or_null(id, "config", pod.and_then(|pod| encode_config(&pod))),
    };

    let info = CriSandboxInfo {
        pid: if published.phase == Phase::Ready { published.pid } else { 0 },
        process_status: process_status(published.phase),
        net_namespace_closed: record
            .plan
            .netns
            .as_deref()
            .is_some_and(|netns| is_closed(id, netns)),
        image: "",
        snapshot_key: "",
        snapshotter: "",
        runtime_type: &record.info.runtime_name,
        runtime_options: options
            .and_then(|options| or_null(id, "runtimeOptions", runtime_options::decode(options)))
            .flatten(),
        config,
        runtime_spec: or_null(id, "runtimeSpec", spec),
        cni_result: metadata.as_ref().and_then(|metadata| metadata.cni_result),
        sandbox_metadata: metadata.as_ref().map(|metadata| metadata.whole),
        overhead: updated
            .as_ref()
            .and_then(|updated| updated.overhead)
            .map(|linux| Resources { linux }),
        resources: updated
            .as_ref()
            .and_then(|updated| updated.resources)
            .map(|linux| Resources { linux }),
    };
    let fault = |e: serde_json::Error| Error::Fault {
        id: id.to_owned(),
        rpc: "status",
        reason: e.to_string(),
    };
    Ok([("info".to_owned(), serde_json::to_string(&info).map_err(fault)?)].into())
}

fn or_null<T>(id: &str, what: &str, result: Result<T, String>) -> Option<T> {
    result.inspect_err(|e| log::debug!(sandbox = id; "status: reporting {what} as null: {e}")).ok()
}

/// containerd's `SandboxInfo` (`internal/cri/types`; its last two fields from 2.3 on).
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct CriSandboxInfo<'a> {
    pid: u32,
    process_status: &'static str,
    net_namespace_closed: bool,
    /// Empty, as are the two that follow: a pause process of ours comes from no image.
    image: &'static str,
    snapshot_key: &'static str,
    snapshotter: &'static str,
    runtime_type: &'a str,
    runtime_options: Option<Value>,
    config: Option<Box<RawValue>>,
    runtime_spec: Option<Box<RawValue>>,
    cni_result: Option<&'a RawValue>,
    sandbox_metadata: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    overhead: Option<Resources<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    resources: Option<Resources<'a>>,
}

/// CRI `ContainerResources`.
#[derive(Debug, Serialize)]
struct Resources<'a> {
    linux: &'a RawValue,
}

/// A `containerd.ProcessStatus`, or "deleted" where there is no process any more, as with the
/// built-in.
fn process_status(phase: Phase) -> &'static str {
    match phase {
        Phase::Created | Phase::Starting => "created",
        Phase::Ready => "running",
        Phase::NotReady | Phase::Gone => "deleted",
        Phase::Unknown => "unknown",
    }
}

/// CRI's view of the sandbox: `{"Version": "v1", "Metadata": {…}}`, also inside `info`.
#[derive(Debug)]
struct Metadata<'a> {
    whole: &'a RawValue,
    config: Option<&'a RawValue>,
    cni_result: Option<&'a RawValue>,
}

impl<'a> Metadata<'a> {
    /// Takes only what CRI's own parser takes: another version or type would fail the whole status.
    fn parse(json: &'a [u8]) -> Result<Self, String> {
        #[derive(Deserialize)]
        #[serde(rename_all = "PascalCase")]
        struct Versioned<'a> {
            version: String,
            #[serde(borrow)]
            metadata: MetadataFields<'a>,
        }
        #[derive(Deserialize)]
        struct MetadataFields<'a> {
            #[serde(rename = "Config", default, borrow)]
            config: Option<&'a RawValue>,
            #[serde(rename = "CNIResult", default, borrow)]
            cni_result: Option<&'a RawValue>,
        }
        let whole: &RawValue = serde_json::from_slice(json).map_err(|e| e.to_string())?;
        let Versioned { version, metadata } =
            serde_json::from_str(whole.get()).map_err(|e| e.to_string())?;
        if version != "v1" {
            return Err(format!("version {version:?} is unknown"));
        }
        Ok(Self {
            whole,
            config: object(metadata.config)?,
            cni_result: object(metadata.cni_result)?,
        })
    }
}

/// The resources of a pod resize that CRI stores, each a CRI `LinuxContainerResources`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Updated<'a> {
    #[serde(default, borrow)]
    overhead: Option<&'a RawValue>,
    #[serde(default, borrow)]
    resources: Option<&'a RawValue>,
}

impl<'a> Updated<'a> {
    fn parse(json: &'a [u8]) -> Result<Self, String> {
        let Self { overhead, resources } =
            serde_json::from_slice(json).map_err(|e| e.to_string())?;
        Ok(Self { overhead: object(overhead)?, resources: object(resources)? })
    }
}

fn object(value: Option<&RawValue>) -> Result<Option<&RawValue>, String> {
    match value {
        Some(value) if !value.get().starts_with('{') => {
            Err("a field that must be an object is none".to_owned())
        }
        value => Ok(value),
    }
}

fn raw_json(json: Vec<u8>) -> Result<Box<RawValue>, String> {
    let text = String::from_utf8(json).map_err(|e| e.to_string())?;
    RawValue::from_string(text).map_err(|e| e.to_string())
}

/// The CRI config as CRI itself would write it.
fn encode_config(pod: &PodSandboxConfig) -> Result<Box<RawValue>, String> {
    to_raw_value(&go_json::encode(pod)).map_err(|e| e.to_string())
}

/// Whether the netns is gone: unmounted, so that its path is nothing or a plain file.
fn is_closed(id: &str, netns: &Path) -> bool {
    match native::is_network_namespace(netns) {
        Ok(is) => !is,
        Err(e) => {
            let gone = matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory);
            if !gone {
                log::debug!(sandbox = id; "status: {}: {e}", netns.display());
            }
            gone
        }
    }
}

#[cfg(test)]
mod tests;
