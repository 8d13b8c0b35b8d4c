//! Tests that need root, where there is none.

use std::fs::OpenOptions;
use std::io::Write as _;

/// The variable by which `make test-unprivileged` names the file that lists skipped tests.
const SKIPPED: &str = "SKIPPED_TESTS";

/// Whether the calling test must return at once, as it needs root; it is listed as skipped then.
///
/// # Panics
/// There is no root and no list: a test must not pass without having run, unless it is counted.
pub fn skip_without_root() -> bool {
    if nix::unistd::geteuid().is_root() {
        return false;
    }
    let list = std::env::var_os(SKIPPED)
        .unwrap_or_else(|| panic!("needs root; `make test-unprivileged` skips this test"));
    let thread = std::thread::current();
    OpenOptions::new()
        .create(true)
        .append(true)
        .open(&list)
        .and_then(|mut file| writeln!(file, "{}", thread.name().unwrap_or("unnamed")))
        .unwrap_or_else(|e| panic!("{}: {e}", list.display()));
    true
}
