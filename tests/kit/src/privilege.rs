//! Tests that cannot run because they need root, or something that this machine does not have.

use std::fs::OpenOptions;
use std::io::Write as _;

/// The variable that names the file which lists skipped tests.
const SKIPPED: &str = "SKIPPED_TESTS";

/// Whether the calling test must return at once, as it needs root; it is listed as skipped then.
///
/// # Panics
/// There is no root and no list: a test must not pass without having run, unless it is counted.
pub fn skip_without_root() -> bool {
    if nix::unistd::geteuid().is_root() {
        return false;
    }
    assert!(
        std::env::var_os(SKIPPED).is_some(),
        "needs root; `make test-unprivileged` skips this test"
    );
    skip("needs root");
    true
}

/// Lists the calling test, or a part of it, as skipped, and why. Without a list it only prints it.
///
/// # Panics
/// The list cannot be written.
pub fn skip(reason: &str) {
    let thread = std::thread::current();
    let line = format!("{}: {reason}", thread.name().unwrap_or("unnamed"));
    eprintln!("skipped: {line}");
    let Some(list) = std::env::var_os(SKIPPED) else { return };
    OpenOptions::new()
        .create(true)
        .append(true)
        .open(&list)
        .and_then(|mut file| file.write_all(format!("{line}\n").as_bytes()))
        .unwrap_or_else(|e| panic!("{}: {e}", list.display()));
}
