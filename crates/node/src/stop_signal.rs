//! The signals that stop a command which has something to undo: SIGHUP of a lost terminal, SIGINT,
//! SIGTERM.

use tokio::signal::unix::{SignalKind, signal};

use base::error::{IoContext as _, StepError};

/// Takes the signals: from this call on they do not end the process. Resolves with the name of the
/// first one.
///
/// # Errors
/// They cannot be taken.
pub fn taken() -> Result<impl Future<Output = &'static str>, StepError> {
    const STATUS: &str = "/proc/self/status";
    let step = "take signals";
    let status = std::fs::read_to_string(STATUS).step_at("read file", STATUS)?;
    // A handler would end the ignoring for the programs that are executed, too.
    let mut hangup =
        if ignores_hangup(&status) { None } else { Some(signal(SignalKind::hangup()).step(step)?) };
    let mut interrupt = signal(SignalKind::interrupt()).step(step)?;
    let mut terminate = signal(SignalKind::terminate()).step(step)?;
    Ok(async move {
        tokio::select! {
            Some(_) = async { hangup.as_mut()?.recv().await } => "SIGHUP",
            _ = interrupt.recv() => "SIGINT",
            _ = terminate.recv() => "SIGTERM",
        }
    })
}

/// Whether a process ignores SIGHUP, as below nohup(1). `status` is the text of its
/// `/proc/PID/status`.
fn ignores_hangup(status: &str) -> bool {
    let field = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = field.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok());
    // The lowest bit is of signal 1.
    mask.is_some_and(|mask| mask & 1 != 0)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_lost_terminal_stops_a_command_unless_it_ignores_that() {
        assert!(ignores_hangup("Name:\tx\nSigIgn:\t0000000000001001\nSigCgt:\t0\n"));
        assert!(!ignores_hangup("SigBlk:\t1\nSigIgn:\t0000000000001000\nSigCgt:\t1\n"));
        // The caller of the tests may ignore the signal itself.
        let is_ignored = ignores_hangup(&std::fs::read_to_string("/proc/self/status").unwrap());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let signal = runtime.block_on(async {
            let stopped = taken().unwrap();
            nix::sys::signal::raise(nix::sys::signal::Signal::SIGHUP).unwrap();
            tokio::time::timeout(Duration::from_secs(5), stopped).await.ok()
        });
        assert_eq!(signal, if is_ignored { None } else { Some("SIGHUP") });
    }
}
