//! Unit tests that run alone. A process that another test starts has a copy of every descriptor of
//! this process between fork(2) and execve(2), also of those that are close-on-exec: a pipe whose
//! writer was dropped does not end until then.

use std::process::Command;

/// Set in the process of a test that runs alone.
const ALONE: &str = "RUNC_SHIM_TEST_ALONE";

/// Runs the calling test in a process without other tests, and fails if it fails there. False: this
/// is that process, and the test continues.
pub fn ran_alone() -> bool {
    if std::env::var_os(ALONE).is_some() {
        return false;
    }
    let thread = std::thread::current();
    let name = thread.name().unwrap();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name])
        .env(ALONE, "")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
    true
}
