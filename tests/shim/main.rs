//! The pods' shims under a real containerd: started, lost, found again and ended, with a shim that
//! misbehaves on order.
//!
//! Cases of a kind share one node and run one after another; after each the machine must be as it
//! was before. After one that fails the next gets another node.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod amid;
mod bench;
mod driver;
mod owned;
mod proxy;
mod started;
mod stopped;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use libtest_mimic::{Arguments, Failed, Trial};
use tokio::runtime::Runtime;
use tokio::sync::Mutex;

use bench::{Bench, Case, Kind};

/// The node of the last case's kind.
type Current = Mutex<Option<(Kind, Arc<Bench>)>>;

async fn node(current: &Current, kind: Kind) -> Result<Arc<Bench>> {
    let mut current = current.lock().await;
    if let Some((_, bench)) = current.as_ref().filter(|(of, _)| *of == kind) {
        return Ok(bench.clone());
    }
    drop(current.take());
    let bench = Arc::new(Bench::start(kind).await?);
    *current = Some((kind, bench.clone()));
    Ok(bench)
}

async fn one(current: &Current, case: &Case) -> Result<()> {
    let bench = node(current, case.kind).await?;
    bench.order("good")?;
    bench.behave()?;
    let before = bench.node.snapshot()?;
    let result = async {
        tokio::time::timeout(Duration::from_secs(120), (case.run)(bench.clone()))
            .await
            .context("hangs")??;
        bench.node.settles_to(&before).await
    };
    let failed = match result.await {
        Ok(()) => return Ok(()),
        Err(e) => e.context(bench.node.log_tails(60)),
    };
    // What it has left would be taken for the next one's.
    drop(current.lock().await.take());
    drop(bench);
    Err(failed)
}

fn main() -> ExitCode {
    // The shim that misbehaves is this program.
    if let Some(code) = proxy::main() {
        return code;
    }
    let mut arguments = Arguments::from_args();
    // One node, one case at a time.
    arguments.test_threads = Some(1);
    let runtime = Arc::new(Runtime::new().expect("a runtime"));
    let current = Arc::<Current>::default();
    let cases =
        [owned::cases(), amid::cases(), started::cases(), driver::cases(), stopped::cases()]
            .into_iter()
            .flatten();
    let trials = cases.map(|case| {
        let (runtime, current) = (runtime.clone(), current.clone());
        let name = format!("{:?}::{}", case.kind, case.name).to_lowercase();
        Trial::test(name, move || {
            runtime.block_on(one(&current, &case)).map_err(|e| Failed::from(format!("{e:#}")))
        })
    });
    let conclusion = libtest_mimic::run(&arguments, trials.collect());
    // Ends the node.
    drop(current.blocking_lock().take());
    conclusion.exit_code()
}
