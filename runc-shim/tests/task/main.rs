//! The Task service with a real runtime. Needs root.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod containers;
mod counts;
mod crash;
mod ends;
mod events;
mod execs;
mod hostile;
mod pod;
mod rootfs;
mod streams;

// The one that kills the daemon.
#[path = "../../../tests/faults/tracer.rs"]
mod tracer;
