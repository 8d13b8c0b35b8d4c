//! The containerd suite: real pods of a real containerd, each case run by its built-in controller
//! (`CASE::builtin`) and by this sandboxer (`CASE::ours`). What the two do differently is said in
//! the case, with the reason, checked, and listed at the end.
//!
//! All cases share one node and run one after another, so that after each the machine can be
//! compared with what it was before. `cargo test --test containerd -- builtin` runs the half that
//! needs no sandboxer.

mod harness;

mod concurrency;
mod container;
mod controller;
mod failing;
mod files;
mod life;
mod namespaces;
mod network;
mod nri;
mod pause;

use harness::Case;

fn main() -> std::process::ExitCode {
    let cases: Vec<Case> = [
        life::cases(),
        network::cases(),
        nri::cases(),
        namespaces::cases(),
        files::cases(),
        container::cases(),
        pause::cases(),
        failing::cases(),
        concurrency::cases(),
        controller::cases(),
    ]
    .into_iter()
    .flatten()
    .collect();
    harness::run(cases)
}
