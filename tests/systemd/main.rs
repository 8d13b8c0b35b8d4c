//! Scopes and units with a real systemd: the native driver below slices, and the daemon as the
//! packaged units run it.
//!
//! For a node that may be messed up: it needs root, systemd, D-Bus and cgroups, puts the packaged
//! units into `/etc/systemd/system` and the daemon into `/usr/local/bin`. `tests/systemd/run-in-vm`
//! runs it on the machine of `tests/vm`.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod node;
mod order;
mod scope;
mod unit;
