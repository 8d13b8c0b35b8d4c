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
    // Locked before it is polled: threads that had all polled would write more than fits.
    let mut stderr = std::io::stderr().lock();
    // A line is dropped if the log takes no more, so that the shim neither fails nor waits.
    let mut fds = [PollFd::new(&stderr, PollFlags::OUT)];
    let polled = rustix::event::poll(&mut fds, Some(&Timespec::default()));
    if polled.is_ok_and(|ready| ready > 0) {
        let _ = stderr.write_all(format!("level={level} msg={message}\n").as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    use rustix::pipe::PipeFlags;

    /// Set in the process of this test that logs.
    const LOGS: &str = "LOGS_AT_ONCE";

    #[test]
    fn threads_that_log_at_once_do_not_wait_for_a_log_that_takes_no_more() {
        if std::env::var_os(LOGS).is_some() {
            return log_at_once();
        }
        let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).unwrap();
        rustix::io::ioctl_fionbio(&write, true).unwrap();
        while rustix::io::write(&write, &[0; 4096]).is_ok() {}
        rustix::io::ioctl_fionbio(&write, false).unwrap();
        // Room for two lines.
        assert_eq!(rustix::io::read(&read, &mut [0; 4096]).unwrap(), 4096);
        let name = "log::tests::threads_that_log_at_once_do_not_wait_for_a_log_that_takes_no_more";
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name])
            .env(LOGS, "")
            .stdout(Stdio::null())
            .stderr(write)
            .spawn()
            .unwrap();
        let end = Instant::now() + Duration::from_secs(20);
        let mut ended = None;
        while ended.is_none() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(10));
            ended = child.try_wait().unwrap();
        }
        let _ = child.kill();
        child.wait().unwrap();
        assert!(ended.expect("a thread waits").success());
    }

    fn log_at_once() {
        // Until then none writes.
        let held = std::io::stderr().lock();
        let threads: Vec<_> = (0..3)
            .map(|_| std::thread::spawn(|| super::warn(format_args!("{:3000}", ""))))
            .collect();
        std::thread::sleep(Duration::from_millis(300));
        drop(held);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    }
}
