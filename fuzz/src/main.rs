//! One fuzzer of all that the daemon decodes: libFuzzer's loop around the target that `FUZZ_TARGET`
//! names.
//!
//! With `FUZZ_SEEDS` it writes the seeds of all targets to that directory instead, and prints the
//! targets' names.
//!
//! Promise: input_never_panics.
#![no_main]

mod memory;
mod service;
mod targets;

use std::path::Path;
use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;

use targets::{TARGETS, Target};

static TARGET: OnceLock<&'static Target> = OnceLock::new();

/// The memory that an input of any length may take, bytes. Most of it belongs to the `protobuf`
/// crate's: for a field whose length is a lie it reserves up to 10 MB, which are given back,
/// untouched, when the input ends before.
const BESIDE: usize = 12 << 20;

fuzz_target!(init: begin(), |input: &[u8]| {
    let target = TARGET.get().expect("begin() has set it");
    let most = memory::peak_of(|| (target.run)(input));
    let bound = BESIDE + target.frame + target.memory * input.len();
    let length = input.len();
    assert!(most <= bound, "{length} bytes of input took {most} bytes of memory, more than \
        {bound}");
});

fn begin() {
    if let Ok(directory) = std::env::var("FUZZ_SEEDS") {
        write_seeds(Path::new(&directory));
        std::process::exit(0);
    }
    let name = std::env::var("FUZZ_TARGET").expect("FUZZ_TARGET names a target");
    let target =
        TARGETS.iter().find(|target| target.name == name).expect("FUZZ_TARGET names a target");
    TARGET.set(target).ok().expect("it begins once");
}

fn write_seeds(directory: &Path) {
    for target in TARGETS {
        println!("{}", target.name);
        let directory = directory.join(target.name);
        std::fs::create_dir_all(&directory).expect("the seeds' directory");
        for (name, bytes) in (target.seeds)() {
            (target.run)(&bytes);
            std::fs::write(directory.join(&name), bytes).expect("a seed");
        }
    }
}
