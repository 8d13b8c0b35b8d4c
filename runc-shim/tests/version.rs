//! The program says its version, for operators.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::process::Command;

#[test]
fn the_program_says_its_version() {
    for flag in ["-v", "--version"] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pause-sandboxer-runc-shim"));
        let said = command.arg(flag).output().unwrap();
        let expected = format!("pause-sandboxer-runc-shim {}\n", env!("CARGO_PKG_VERSION"));
        assert_eq!(String::from_utf8(said.stdout).unwrap(), expected);
        assert!(said.status.success());
    }
}
