//! Wire messages and ttrpc services, generated from `protos/`, one module per file there.
//!
//! | module | package |
//! |---|---|
//! | [`controller`], [`controller_ttrpc`] | `containerd.services.sandbox.v1` |
//! | [`store`] | `containerd.services.sandbox.v1` |
//! | [`containers`] | `containerd.services.containers.v1` |
//! | [`tasks`] | `containerd.services.tasks.v1` |
//! | [`types`] | `containerd.types` |
//! | [`cri`] | `runtime.v1` |
//! | [`introspection`] | `containerd.services.introspection.v1` |
//! | [`inspect`], [`inspect_ttrpc`] | `pause_sandboxer.v1` |

#[allow(
    missing_docs,
    unreachable_pub,
    clippy::all,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic
)]
mod generated {
    include!(concat!(env!("OUT_DIR"), "/protos/mod.rs"));
}

pub use generated::*;
