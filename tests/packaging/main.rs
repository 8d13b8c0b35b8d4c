//! The files that are delivered beside the binary match it: metrics that are named exist, manifests
//! name files and handlers that there are.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod containerd;
mod debian;
mod installer;
mod kubernetes;
mod prometheus;
mod release;
mod rollout;
mod workflows;

/// The text of a file of the repository.
fn file(path: &str) -> String {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}
