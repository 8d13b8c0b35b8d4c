//! The log: lines on standard error in the format of containerd's shims, which the daemon reads.

use std::fmt;
use std::io::Write as _;

use rustix::event::{PollFd, PollFlags, Timespec};

/// Logs a problem that the shim handles.
pub fn warn(message: fmt::Arguments<'_>) {
    line("warning", message);
}

/// Logs a failure.
pub fn error(message: fmt::Arguments<'_>) {
    line("error", message);
}

/// Maximum length of a message, bytes. A pipe that is writable takes twice as much at once.
const MAX_LINE: usize = 2000;

fn line(level: &str, message: fmt::Arguments<'_>) {
    let mut message = format!("{:?}", message.to_string());
    if message.len() > MAX_LINE {
        let end = message.floor_char_boundary(MAX_LINE);
        message.truncate(end);
        message.push_str("...\"");
    }
    let stderr = std::io::stderr();
    // A line is dropped if the log takes no more, so that the shim neither fails nor waits.
    let mut fds = [PollFd::new(&stderr, PollFlags::OUT)];
    let polled = rustix::event::poll(&mut fds, Some(&Timespec::default()));
    if polled.is_ok_and(|ready| ready > 0) {
        let _ = stderr.lock().write_all(format!("level={level} msg={message}\n").as_bytes());
    }
}
