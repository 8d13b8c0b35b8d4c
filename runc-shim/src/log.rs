//! The log: lines on standard error, in the form of containerd's own shims, which the daemon reads.

use std::fmt;
use std::io::Write as _;

/// Something is wrong that the shim lives with.
pub fn warn(message: fmt::Arguments<'_>) {
    line("warning", message);
}

/// Something failed.
pub fn error(message: fmt::Arguments<'_>) {
    line("error", message);
}

fn line(level: &str, message: fmt::Arguments<'_>) {
    let message = message.to_string();
    // A log that takes no more is no reason to end.
    let _ = std::io::stderr().write_all(format!("level={level} msg={message:?}\n").as_bytes());
}
