//! Failures side by side: containerd's built-in controller and this sandboxer go through the
//! same events and the same churn, each with a containerd of its own.
//!
//! usage: compare                                     the test
//!        compare [--only WORD] [--pods N] OLDER PARTS  measure one release
//!        compare --page VERSION...                     write the page
//!
//! As a test it runs this sandboxer alone, which must lose nothing but what containerd itself
//! loses, with the containerd of the other tests. OLDER and PARTS are directories that
//! `tests/kit/fetch-release` prints: with them both handlers run, a loss is no failure, and the
//! tables go to `target/compare/VERSION.md`, of which `docs/compare.md` is made. `--only` runs and
//! prints the events that have WORD in their text, or `churn`. The environment variable
//! `SANDBOXER` names the program, one of a release; the test takes cargo's.
//!
//! Promise: removal_leaves_nothing.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::disallowed_methods
)]

mod cell;
mod churn;
mod containerd;
mod events;
mod page;
mod sandbox;
mod shims;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};
use futures::StreamExt as _;
use kit::{Handler, Parts};

use cell::Cell;
use events::{Event, LOST_IN_A_CHURN, Plan};
use page::Section;

/// Pods of the churn of the test.
const FEW: usize = 24;
/// Events of the test at a time: most of their time is waiting.
const AT_ONCE: usize = 3;

fn main() -> ExitCode {
    if kit::skip_without_root() {
        return ExitCode::SUCCESS;
    }
    let done = tokio::runtime::Runtime::new().map_err(Into::into).and_then(|r| r.block_on(run()));
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("compare: {e:#}");
            ExitCode::FAILURE
        }
    }
}

/// Where a run keeps files.
pub(crate) fn results() -> PathBuf {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/compare");
    std::fs::create_dir_all(&directory).expect("make target/compare");
    directory
}

/// The program of a release.
fn released() -> Result<PathBuf> {
    Ok(std::env::var_os("SANDBOXER").context("SANDBOXER is not set")?.into())
}

async fn run() -> Result<()> {
    let (mut only, mut pods, mut rest) = (None, 10_000, Vec::new());
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        match word.as_str() {
            "--page" => return page::write(&words.collect::<Vec<_>>()),
            "--only" => only = Some(words.next().context("--only needs a word")?),
            "--pods" => pods = words.next().context("--pods needs a number")?.parse()?,
            _ => rest.push(word),
        }
    }
    let mut events = events::all();
    if let Some(word) = &only {
        events.retain(|event| event.what.contains(word.as_str()));
        pods = if word == "churn" { pods } else { 0 };
    }
    let parts = |directory: &String| -> Result<Parts> {
        let bin = Path::new(directory).join("bin");
        Ok(Parts::at(bin.canonicalize().with_context(|| format!("{}", bin.display()))?))
    };
    match rest.as_slice() {
        [older, newer] => {
            let (parts, older) = (parts(newer)?, Some(parts(older)?));
            let plan = Plan { sandboxer: released()?, parts, older, short: false };
            compare(&plan, &events, pods).await?.write(only.is_some())
        }
        [] => {
            let sandboxer = env!("CARGO_BIN_EXE_pause-sandboxer").into();
            let plan = Plan { sandboxer, parts: Parts::get()?, older: None, short: true };
            test(&plan, events, pods > 0).await
        }
        other => bail!("{other:?}: neither nothing nor two directories"),
    }
}

/// An event that is not completed is a loss, too.
async fn cell(plan: &Plan, event: &Event, handler: Handler) -> Cell {
    plan.run(event, handler).await.unwrap_or_else(|e| {
        eprintln!("compare: {}: {e:#}", handler.name());
        let mut cell = Cell::default();
        cell.loss("not completed");
        cell
    })
}

/// Both handlers with one containerd.
async fn compare(plan: &Plan, events: &[Event], pods: usize) -> Result<Section> {
    let begun = Instant::now();
    let mut section = Section::begin(plan.parts.version())?;
    for event in events {
        let (builtin, ours) =
            tokio::join!(cell(plan, event, Handler::Builtin), cell(plan, event, Handler::Ours));
        eprintln!("{:5} s: {}", begun.elapsed().as_secs(), event.what);
        for (handler, cell) in [(Handler::Builtin, &builtin), (Handler::Ours, &ours)] {
            eprintln!("    {}: {cell}", handler.name());
            for line in cell.lines() {
                eprintln!("        {line}");
            }
        }
        section.rows.push((*event, builtin, ours));
    }
    if pods > 0 {
        let [builtin, ours] = Handler::ALL.map(|handler| churn::run(plan, handler, pods));
        let both = tokio::try_join!(builtin, ours).context("churn")?;
        eprintln!("{:5} s: {both:#?}", begun.elapsed().as_secs());
        section.churn = Some(both);
    }
    Ok(section)
}

/// This sandboxer alone, with few rounds.
async fn test(plan: &Plan, events: Vec<Event>, churns: bool) -> Result<()> {
    let short = events.into_iter().filter(|event| event.short);
    let (mut passed, mut failed) = (0, 0);
    let one = async |event: Event| (event, plan.run(&event, Handler::Ours).await);
    let mut done = std::pin::pin!(futures::stream::iter(short).map(one).buffer_unordered(AT_ONCE));
    while let Some((event, done)) = done.next().await {
        let what = event.what;
        match done {
            Ok(cell) if cell.is_clean_but_for(plan.excused(event.excused)) => {
                println!("test {what} ... ok: {cell}");
                passed += 1;
            }
            Ok(cell) => {
                println!("test {what} ... FAILED\n    {cell}\n    {}", cell.lines().join("\n    "));
                failed += 1;
            }
            Err(e) => {
                println!("test {what} ... FAILED\n    {e:#}");
                failed += 1;
            }
        }
    }
    if churns {
        let churn = churn::run(plan, Handler::Ours, FEW).await?;
        let clean = churn.left.is_empty_but_for(plan.excused(LOST_IN_A_CHURN))
            && [churn.stuck, churn.codes_lost, churn.not_run] == [0; 3]
            && churn.is_explained_by_its_kills();
        println!("test churn ... {}: {churn:?}", if clean { "ok" } else { "FAILED" });
        (passed, failed) = (passed + usize::from(clean), failed + usize::from(!clean));
    }
    let word = if failed == 0 { "ok" } else { "FAILED" };
    println!("test result: {word}. {passed} passed; {failed} failed");
    ensure!(failed == 0, "this sandboxer loses or leaves something");
    Ok(())
}
