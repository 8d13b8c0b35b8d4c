//! The same pod by both: for each field that CRI hands to a sandboxer a pod is run by containerd's
//! built-in controller and by this sandboxer, on one real containerd, and all that can be observed
//! from outside is compared.
//!
//! Prints a table, one line per field. An unexplained difference fails, and so does an explanation
//! of what is none any more. `cargo test --test parity -- WORD...` runs the plain pod and the cases
//! whose names have one of the words. `--part N/M` adds of all others the N-th, and every M-th
//! behind it: two nodes share the work.
#![allow(clippy::print_stdout, reason = "the table is the product")]

mod cases;
mod coverage;
mod fact;
mod known;
mod metrics;
mod observe;
mod run;
mod table;

use std::process::ExitCode;

use anyhow::{Context, Result, ensure};

fn main() -> ExitCode {
    let wanted = match Wanted::asked(std::env::args().skip(1)) {
        Ok(wanted) => wanted,
        Err(e) => {
            eprintln!("parity: {e:#}");
            return ExitCode::FAILURE;
        }
    };
    let runtime = match tokio::runtime::Runtime::new() {
        Ok(runtime) => runtime,
        Err(e) => {
            eprintln!("no runtime: {e}");
            return ExitCode::FAILURE;
        }
    };
    match runtime.block_on(run::all(&wanted)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("parity: {e:#}");
            ExitCode::FAILURE
        }
    }
}

/// Which cases are run.
struct Wanted {
    words: Vec<String>,
    /// The first of the others, from 0, and every which behind it.
    part: Option<(usize, usize)>,
}

impl Wanted {
    fn asked(mut arguments: impl Iterator<Item = String>) -> Result<Self> {
        let (mut words, mut part) = (Vec::new(), None);
        while let Some(argument) = arguments.next() {
            if argument == "--part" {
                let value = arguments.next().context("--part N/M")?;
                let (first, every) = value.split_once('/').context("--part N/M")?;
                let (first, every): (usize, usize) = (first.parse()?, every.parse()?);
                ensure!(
                    (1..=every).contains(&first),
                    "--part {value}: the first is 1, the last {every}"
                );
                part = Some((first - 1, every));
            } else if !argument.starts_with('-') {
                words.push(argument);
            }
        }
        Ok(Self { words, part })
    }

    /// All, where nothing else is asked for.
    fn has(&self, index: usize, name: &str) -> bool {
        let in_part =
            self.part.map_or(self.words.is_empty(), |(first, every)| index % every == first);
        in_part || self.words.iter().any(|word| name.contains(word))
    }
}
