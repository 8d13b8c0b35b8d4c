//! The log: lines on standard error, in the form of containerd's own shims, which the daemon reads.

use std::fmt;
use std::io::Write as _;

use rustix::event::{PollFd, PollFlags, Timespec};

/// Something is wrong that the shim lives with.
pub fn warn(message: fmt::Arguments<'_>) {
    line("warning", message);
}

/// Something failed.
pub fn error(message: fmt::Arguments<'_>) {
    line("error", message);
}

/// What is kept of a message; bytes. A pipe that has room takes twice as much at once.
const LONGEST: usize = 2000;

fn line(level: &str, message: fmt::Arguments<'_>) {
    let mut message = format!("{:?}", message.to_string());
    if message.len() > LONGEST {
        let end = message.floor_char_boundary(LONGEST);
        message.truncate(end);
        message.push_str("...\"");
    }
    let stderr = std::io::stderr();
    // A log that takes no more is no reason to end, nor to wait.
    let mut fds = [PollFd::new(&stderr, PollFlags::OUT)];
    let polled = rustix::event::poll(&mut fds, Some(&Timespec::default()));
    if polled.is_ok_and(|ready| ready > 0) {
        let _ = stderr.lock().write_all(format!("level={level} msg={message}\n").as_bytes());
    }
}
