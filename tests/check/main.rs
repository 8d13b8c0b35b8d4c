//! `check` on nodes that are broken, each with a real containerd: the one problem that it prints,
//! the remedy, the exit status, and that no pod starts where it says so. `selftest` on such nodes.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod bench;
mod containerd;
mod daemon;
mod machine;
mod programs;
mod selftest;

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Result, ensure};
use libtest_mimic::{Arguments, Failed, Trial};
use tokio::runtime::Runtime;

use bench::Bench;

/// What a pod of the sandboxer does on a broken node.
#[derive(Clone, Copy)]
enum PodTry {
    /// RunPodSandbox fails, or does not answer.
    NoSandbox,
    /// The sandbox runs, and its container does not.
    NoContainer,
    /// Its container runs.
    Runs,
    /// It is not tried: the problem does not concern new pods, or only some of them.
    NotTried,
}

/// A node that an operator has broken.
struct BrokenNode {
    name: &'static str,
    /// Breaks it.
    breaks: for<'a> fn(&'a mut Bench) -> bench::Work<'a>,
    /// The beginning of the problem's line. `{top}` is the node's directory, `{daemon}` the
    /// daemon's process id.
    line: &'static str,
    /// The beginning of the remedy.
    remedy: &'static str,
    /// The exit status of `check --strict`.
    exit: i32,
    pod: PodTry,
}

/// A row of the table: name and step, line, remedy, exit status, and the pod.
macro_rules! broken {
    ($($name:ident: $line:expr, $remedy:expr, $exit:expr, $pod:ident;)*) => {
        vec![$(crate::BrokenNode {
            name: stringify!($name),
            breaks: |bench| Box::pin($name(bench)),
            line: $line,
            remedy: $remedy,
            exit: $exit,
            pod: crate::PodTry::$pod,
        }),*]
    };
}
use broken;

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // One machine, one node at a time.
    arguments.test_threads = Some(1);
    let runtime = Arc::new(Runtime::new().expect("a runtime"));
    let broken = [containerd::all(), daemon::all(), machine::all(), programs::all()];
    let mut trials: Vec<Trial> = Vec::new();
    for node in broken.into_iter().flatten() {
        let runtime = runtime.clone();
        trials.push(Trial::test(node.name, move || {
            runtime.block_on(is_found(&node)).map_err(|e| Failed::from(format!("{e:#}")))
        }));
    }
    for (name, case) in selftest::all() {
        let runtime = runtime.clone();
        trials.push(Trial::test(name, move || {
            let run = async { case(Bench::start().await?).await };
            runtime.block_on(run).map_err(|e| Failed::from(format!("{e:#}")))
        }));
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// `check` finds the problem, which is the only one, and prints the remedy.
///
/// Promise: check_names_the_remedy.
async fn is_found(node: &BrokenNode) -> Result<()> {
    let mut bench = Bench::start().await?;
    let good = bench.check().await?;
    ensure!(good.status == 0 && good.problems.is_empty(), "before: {}", good.text);
    let daemon = bench.node.sandboxer_pid()?.to_string();
    (node.breaks)(&mut bench).await?;
    let top = bench.node.layout().top.display().to_string();
    let filled = |text: &str| text.replace("{top}", &top).replace("{daemon}", &daemon);
    if bench.skips {
        return Ok(());
    }
    let found = bench.check().await?;
    let [problem] = found.problems.as_slice() else {
        anyhow::bail!("not one problem: {:#?}\n{}", found.problems, found.text);
    };
    let (line, remedy) = (filled(node.line), filled(node.remedy));
    ensure!(problem.line.starts_with(&line), "{}\nis not\n{line}", problem.line);
    ensure!(problem.remedy.starts_with(&remedy), "{}\nis not\n{remedy}", problem.remedy);
    ensure!(found.status == node.exit, "exit status {}: {}", found.status, found.text);
    bench.tries(node.pod).await
}
