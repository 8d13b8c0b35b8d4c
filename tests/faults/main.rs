//! The fault suite: no restart, crash or fault of any part makes a live pod look dead, a dead one
//! look alive, or leaves anything behind.
//!
//! Faults come from outside the product: signals, a tracer that kills the daemon at a chosen system
//! call, `strace` that lets calls fail or wait, full and read-only file systems, limits. Most cases
//! ask a daemon directly ([`bare::Bare`]), which is fast; those named `node_…` run it under a real
//! containerd. One case runs after another.

mod bare;
mod endpoint;
mod harness;
mod pods;
mod strace;
mod tracer;

mod apart;
mod collected;
mod crowd;
mod directories;
mod killed;
mod limits;
mod outside;
mod recovery;
mod restarts;
mod soak;
mod strangers;

fn main() -> std::process::ExitCode {
    let cases = [
        recovery::cases(),
        collected::cases(),
        killed::cases(),
        strangers::cases(),
        outside::cases(),
        directories::cases(),
        limits::cases(),
        crowd::cases(),
        restarts::cases(),
        apart::cases(),
        soak::cases(),
    ];
    harness::run(cases.into_iter().flatten().collect())
}
