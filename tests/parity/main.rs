//! The same pod by both: for each field that CRI hands to a sandboxer a pod is run by containerd's
//! built-in controller and by this sandboxer, on one real containerd, and all that can be observed
//! from outside is compared.
//!
//! Prints a table, one line per field. An unexplained difference fails, and so does an explanation
//! of what is none any more. `cargo test --test parity -- WORD...` runs the plain pod and the cases
//! whose names have one of the words.
//!
//! Promise: pods_equal_the_builtins.
#![allow(clippy::print_stdout, reason = "the table is the product")]

mod cases;
mod container;
mod coverage;
mod fact;
mod known;
mod metrics;
mod nri;
mod observe;
mod run;
mod table;

use std::process::ExitCode;

fn main() -> ExitCode {
    let wanted = Wanted(std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect());
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

/// The words of the cases that are run; without words all are.
struct Wanted(Vec<String>);

impl Wanted {
    /// Fails for a word that no case has in its name: nothing would be compared.
    fn check(&self, cases: &[cases::Case]) -> anyhow::Result<()> {
        let unknown = |word: &&String| !cases.iter().any(|case| case.name.contains(word.as_str()));
        match self.0.iter().find(unknown) {
            Some(word) => anyhow::bail!("no case has {word:?} in its name"),
            None => Ok(()),
        }
    }

    fn has(&self, name: &str) -> bool {
        self.0.is_empty() || self.0.iter().any(|word| name.contains(word))
    }
}
