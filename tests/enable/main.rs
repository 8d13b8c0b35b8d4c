//! `enable` and `disable` on a real containerd, with config files as nodes have them.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod cases;
mod distributions;
mod earlier;
mod etc;
mod others;
mod shim_only;

use std::pin::Pin;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Result;
use kit::{Node, Options};
use libtest_mimic::{Arguments, Failed, Trial};
use tokio::runtime::Runtime;

type Running = Pin<Box<dyn Future<Output = Result<()>>>>;

/// Runs a case on a node of its own.
fn run_on_node(
    runtime: &Runtime,
    case: impl AsyncFnOnce(Arc<Node>) -> Result<()>,
) -> Result<(), Failed> {
    let run = async {
        let sandboxer = Some(env!("CARGO_BIN_EXE_pause-sandboxer").into());
        let node = Node::start(Options { sandboxer, ..Options::default() }).await?;
        case(node).await
    };
    runtime.block_on(run).map_err(|e| Failed::from(format!("{e:#}")))
}

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // One machine, one case at a time.
    arguments.test_threads = Some(1);
    let runtime = Arc::new(Runtime::new().expect("a runtime"));
    let all =
        cases::all().into_iter().chain(earlier::all()).chain(others::all()).chain(shim_only::all());
    let trials = all.map(|(name, case)| {
        let runtime = runtime.clone();
        Trial::test(name, move || run_on_node(&runtime, case))
    });
    let trials = trials.chain(distributions::trials(&runtime)).collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}
