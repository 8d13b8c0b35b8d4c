//! One pod sandbox: its checked config, its life, its files and its record.

use std::collections::BTreeMap;
use std::time::SystemTime;

use protobuf::well_known_types::any::Any;
use serde::{Deserialize, Serialize};

pub use crate::process::Exit;
pub use base::platform::Platform;

mod actor;
mod container_record;
mod end_reason;
mod environment;
mod error;
mod files;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
mod jobs;
mod layout;
mod machine;
mod metrics;
mod oci_spec;
mod record;
mod recorded_any;
pub mod recover;
mod restore;
mod sandbox;
pub mod selinux;
mod status;
mod summary;
mod validate;

pub use container_record::removals_done;
pub use end_reason::EndReason;
pub use environment::Environment;
pub use error::Error;
pub use machine::Phase;
pub use sandbox::{END_TIMEOUT, Sandbox, UNKNOWN_TIMEOUT};
pub use summary::quarantined;
pub use validate::check_id;

/// containerd's metadata of a sandbox (`containerd.types.Sandbox`), as a request carries it and the
/// record keeps it. The `type_url` of containerd's payloads is a bare name.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SandboxInfo {
    /// Runtime name, such as `io.containerd.runc.v2`.
    pub runtime_name: String,
    /// The runtime handler's options.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "recorded_any::option")]
    pub runtime_options: Option<Any>,
    /// Labels of the sandbox store.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// Extensions by name; `metadata` holds CRI's JSON.
    #[serde(default, with = "recorded_any::map")]
    pub extensions: BTreeMap<String, Any>,
}

/// The arguments of Create.
#[derive(Clone, Debug, Default)]
pub struct CreateRequest {
    /// The sandbox id, unchecked.
    pub id: String,
    /// The CRI `PodSandboxConfig`.
    pub options: Option<Any>,
    /// Bind-mounted network namespace; empty with host network.
    pub netns_path: String,
    /// containerd's metadata of the sandbox.
    pub sandbox: Option<SandboxInfo>,
}

/// The answer of Start.
#[derive(Clone, Debug, PartialEq)]
pub struct StartResponse {
    /// Process id of the pause process on the node.
    pub pid: u32,
    /// When the sandbox was created.
    pub created_at: SystemTime,
    /// Labels for the sandbox store.
    pub labels: BTreeMap<String, String>,
    /// Task endpoint of the pod's containers.
    pub address: String,
    /// Version of the Task API at `address`.
    pub version: u32,
    /// The OCI runtime spec that describes the pause process.
    pub spec: Option<Any>,
}

/// The answer of Status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatusReport {
    /// Process id of the pause process on the node; 0 when there is none.
    pub pid: u32,
    /// `SANDBOX_READY` or `SANDBOX_NOTREADY` (CRI `PodSandboxState`); `SANDBOX_UNKNOWN` if recovery
    /// could not determine the state. CRI treats that as not ready and may stop the sandbox.
    pub state: &'static str,
    /// Verbose information by key; empty unless asked for.
    pub info: BTreeMap<String, String>,
    /// When the sandbox was created.
    pub created_at: SystemTime,
    /// When the pause process ended; `None` while it lives.
    pub exited_at: Option<SystemTime>,
    /// Task endpoint of the pod's containers.
    pub address: String,
    /// Version of the Task API at `address`.
    pub version: u32,
}

/// The answer of Metrics (`containerd.types.Metric`).
#[derive(Clone, Debug, PartialEq)]
pub struct Metric {
    /// When it was read.
    pub timestamp: SystemTime,
    /// `io.containerd.cgroups.v1.Metrics` or `io.containerd.cgroups.v2.Metrics`.
    pub data: Any,
}
