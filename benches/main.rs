//! The cost of pods with this sandboxer, with containerd's built-in one, with one that does
//! nothing, and what the kernel alone takes for them, side by side in one run: `make bench`, `make
//! bench-quick`. `docs/performance.md` says how to read it.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::disallowed_methods
)]

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

mod account;
mod binary;
mod budget;
mod chart;
mod concurrency;
mod containers;
mod controller;
mod daemon;
mod floor;
mod idle;
mod inside;
mod kernel;
mod netns;
mod pods;
mod report;
mod samples;
mod scale;
mod setup;
mod streams;
mod unmount;

use report::Report;
use setup::Setup;

/// How much is measured.
#[derive(Clone, Copy, Debug)]
struct Plan {
    /// Rounds of what takes a millisecond with a fast sandboxer and a tenth of a second with the
    /// built-in one.
    calls: usize,
    /// Rounds of whole pods.
    pods: usize,
    /// Rounds of what only this sandboxer and the kernel do.
    fast: usize,
    /// Live sandboxes at the end of the scale.
    most: usize,
    /// Pods with a container that live at once, for each of three targets.
    containers: usize,
    /// How long idle pods are watched.
    quiet: Duration,
    /// Rounds of the streams of containers.
    streams: usize,
}

const FULL: Plan = Plan {
    calls: 120,
    pods: 40,
    fast: 400,
    most: 2000,
    containers: 50,
    quiet: Duration::from_secs(60),
    streams: 11,
};
const QUICK: Plan = Plan {
    calls: 30,
    pods: 10,
    fast: 150,
    most: 2000,
    containers: 12,
    quiet: Duration::from_secs(5),
    streams: 5,
};

fn main() -> Result<()> {
    // cargo adds `--bench`.
    let words: Vec<OsString> =
        std::env::args_os().skip(1).filter(|word| word != "--bench").collect();
    let words: Vec<&str> = words.iter().filter_map(|word| word.to_str()).collect();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    match words.as_slice() {
        ["floor", socket] => runtime.block_on(floor::serve(PathBuf::from(socket))),
        ["budget", most] => runtime.block_on(budget::measure(most.parse()?)),
        [] => runtime.block_on(measure(FULL)),
        ["--quick"] => runtime.block_on(measure(QUICK)),
        // Some of the parts, for work on them; no report.
        ["--only", parts @ ..] => runtime.block_on(only(parts)),
        other => bail!("unknown words {other:?}: nothing, --quick, --only PART... or budget"),
    }
}

async fn measure(plan: Plan) -> Result<()> {
    let begun = Instant::now();
    let mut report = Report::new();
    let mut setup = Setup::new().await?;
    for part in PARTS {
        run_part(part, &mut setup, &plan, &mut report)
            .await
            .with_context(|| format!("measure {part}"))?;
        eprintln!("{:4} s: {part} is measured", begun.elapsed().as_secs());
    }
    drop(setup);
    report.finish(begun.elapsed())
}

async fn only(parts: &[&str]) -> Result<()> {
    let mut report = Report::new();
    let plan = QUICK;
    let mut setup = Setup::new().await?;
    for part in parts {
        run_part(part, &mut setup, &plan, &mut report).await?;
    }
    drop(setup);
    report.print();
    Ok(())
}

const PARTS: [&str; 10] = [
    "binary",
    "inside",
    "controller",
    "pods",
    "cycles",
    "containers",
    "streams",
    "concurrency",
    "idle",
    "scale",
];

async fn run_part(part: &str, setup: &mut Setup, plan: &Plan, report: &mut Report) -> Result<()> {
    match part {
        "binary" => binary::measure(setup, report).await,
        "inside" => inside::measure(setup, plan, report).await,
        "controller" => controller::measure(setup, plan, report).await,
        "pods" => pods::measure(setup, plan, report).await,
        "cycles" => pods::cycles(setup, plan, report).await,
        "containers" => containers::measure(setup, plan, report).await,
        "streams" => streams::measure(setup, plan, report).await,
        "concurrency" => concurrency::measure(setup, plan, report).await,
        "idle" => idle::measure(setup, plan, report).await,
        "scale" => scale::measure(setup, plan, report).await,
        // Only by its name.
        "unmount" => unmount::measure(setup, report).await,
        other => bail!("{other} is not one of {PARTS:?}"),
    }
}
