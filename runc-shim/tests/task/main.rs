//! The Task service with a real runtime. Needs root.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod bounds;
mod containers;
mod counts;
mod crash;
mod deadlines;
mod ends;
mod events;
mod execs;
mod frozen;
mod fuse;
mod fuse_programs;
mod hangs;
mod hostile;
mod joins;
mod locks;
mod pod;
mod readers;
mod rights;
mod rootfs;
mod sandbox;
mod streams;
mod terminals;

// The one that kills the daemon.
#[path = "../../../tests/faults/tracer.rs"]
mod tracer;
