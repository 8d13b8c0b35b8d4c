//! The fault suite: no restart, crash or fault of any part makes a live pod look dead, a dead one
//! look alive, or leaves anything behind.
//!
//! Faults come from outside the product: signals, a tracer that kills the daemon at a chosen system
//! call, `strace` that lets calls fail or wait, full and read-only file systems, limits. Most cases
//! ask a daemon directly ([`standalone::Standalone`]), which is fast; those named `node_…` run it
//! under a real containerd. One case runs after another.

mod endpoint;
mod harness;
mod pods;
mod standalone;
mod tracer;

mod concurrency;
mod directories;
mod garbage_collection;
mod injected_faults;
mod killed;
mod limits;
mod mount_namespace;
mod node_killed;
mod records;
mod recovery;
mod restarts;
mod soak;
mod untrusted;

fn main() -> std::process::ExitCode {
    let cases = [
        recovery::cases(),
        records::cases(),
        garbage_collection::cases(),
        killed::cases(),
        untrusted::cases(),
        injected_faults::cases(),
        directories::cases(),
        limits::cases(),
        concurrency::cases(),
        restarts::cases(),
        node_killed::cases(),
        mount_namespace::cases(),
        soak::cases(),
    ];
    harness::run(cases.into_iter().flatten().collect())
}
