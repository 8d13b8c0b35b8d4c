//! The pods' shims under a real containerd: started, lost, found again and ended, with a shim that
//! misbehaves on order.
//!
//! Cases of a kind share one node and run one after another; after each the machine must be as it
//! was before. After one that fails the next gets another node.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod container_record;
mod cores;
mod create;
mod frozen;
mod handover;
mod hanging;
mod harness;
mod interrupted_calls;
mod output;
mod own;
mod proxy;
mod refused;
mod stopped_pods;

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use libtest_mimic::{Arguments, Failed, Trial};
use tokio::runtime::Runtime;
use tokio::sync::Mutex;

use harness::{Case, Harness, Kind};

/// The node of the last case's kind.
type Current = Mutex<Option<(Kind, Arc<Harness>)>>;

async fn node(current: &Current, kind: Kind) -> Result<Arc<Harness>> {
    let mut current = current.lock().await;
    if let Some((_, harness)) = current.as_ref().filter(|(started, _)| *started == kind) {
        return Ok(harness.clone());
    }
    drop(current.take());
    let harness = Arc::new(Harness::start(kind).await?);
    *current = Some((kind, harness.clone()));
    Ok(harness)
}

async fn one(current: &Current, case: &Case) -> Result<()> {
    let harness = node(current, case.kind).await?;
    harness.order("good")?;
    harness.behave()?;
    let before = harness.node.snapshot()?;
    let result = async {
        let limit = kit::patient(case.limit);
        tokio::time::timeout(limit, (case.run)(harness.clone())).await.context("hangs")??;
        harness.node.settles_to(&before).await
    };
    let failed = match result.await {
        Ok(()) => return Ok(()),
        Err(e) => e.context(harness.node.log_tails(60)),
    };
    // Its leftovers would be mistaken for those of the next case.
    drop(current.lock().await.take());
    drop(harness);
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
    let mut cases: Vec<Case> = [
        handover::cases(),
        own::cases(),
        output::cases(),
        container_record::cases(),
        create::cases(),
        frozen::cases(),
        hanging::cases(),
        cores::cases(),
        interrupted_calls::cases(),
        refused::cases(),
        stopped_pods::cases(),
    ]
    .into_iter()
    .flatten()
    .collect();
    // Each kind has its node once.
    cases.sort_by_key(|case| case.kind);
    let trials = cases.into_iter().map(|case| {
        let (runtime, current) = (runtime.clone(), current.clone());
        let name = format!("{}::{}", case.kind.name(), case.name);
        Trial::test(name, move || {
            runtime.block_on(one(&current, &case)).map_err(|e| Failed::from(format!("{e:#}")))
        })
    });
    let conclusion = libtest_mimic::run(&arguments, trials.collect());
    // Ends the node.
    drop(current.blocking_lock().take());
    conclusion.exit_code()
}
