//! pause-sandboxer: an external sandboxer for containerd 2.x.
//!
//! `ARCHITECTURE.md` shows the path of a request through these modules and their dependencies.

pub mod cgroup;
pub mod check;
pub mod cli;
pub mod controller;
pub mod cri_view;
pub mod exit;
pub mod gc;
pub mod log_context;
pub mod logging;
pub mod metrics_http;
pub mod mounts;
pub mod pause;
pub mod podsandbox;
pub mod pool;
pub mod process;
pub mod shim;
mod sys;
pub mod telemetry;
pub mod wire;

pub use base::{config, error, id, replace_file, time};
pub use containerd_api as containerd;
pub use containerd_api::protos;
pub use node::{client, enable, oci_image, selftest};
