//! The options that print a text: the version and the usage.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::process::Command;

/// The standard output of the program.
fn printed(flag: &str) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pause-sandboxer-runc-shim"));
    let output = command.arg(flag).output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{flag}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn version_is_printed() {
    for flag in ["-v", "--version"] {
        let expected = format!("pause-sandboxer-runc-shim {}\n", env!("CARGO_PKG_VERSION"));
        assert_eq!(printed(flag), expected);
    }
}

#[test]
fn help_prints_the_usage() {
    for flag in ["-h", "-help", "--help"] {
        let help = printed(flag);
        assert!(help.contains("do not run it by hand") && help.contains("usage: "), "{help}");
    }
}
