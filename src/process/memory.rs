//! The private memory of a process.

use std::fs;
use std::io;

use process_identity::{Stat, is_no_such_process};

use super::Identity;
use crate::error::{IoContext as _, StepError};

/// The process's anonymous memory in RAM, bytes: `RssAnon` of proc_pid_status(5). Its program's
/// text is not in it, which all processes of the program share. The kernel answers from counters
/// and waits for no lock of the process. `None`: the process has ended.
///
/// # Errors
/// The failed step.
pub(crate) fn private_memory(identity: &Identity) -> Result<Option<u64>, StepError> {
    let path = format!("/proc/{}/status", identity.pid);
    let read = fs::read_to_string(&path)
        .and_then(|status| Ok((status, Stat::of_process(identity.pid)?.start_time)));
    match read {
        Err(e) if is_no_such_process(&e) => Ok(None),
        Err(e) => Err(StepError::at("read", path, e)),
        // Another process has the pid by now.
        Ok((_, start_time)) if start_time != identity.start_time => Ok(None),
        // A process that is exiting has no memory any more, and no such line.
        Ok((status, _)) => rss_anon(&status).transpose().step_at("read RssAnon of", path),
    }
}

/// `status` is the text of `/proc/PID/status`, whose first line, the name, escapes line feeds.
fn rss_anon(status: &str) -> Option<io::Result<u64>> {
    let value = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    let kilobytes = value.trim().strip_suffix(" kB").and_then(|number| number.trim().parse().ok());
    let bytes = kilobytes.and_then(|kilobytes: u64| kilobytes.checked_mul(1024));
    Some(bytes.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "not a number of kB")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::identity::{boot_id, read_identity};

    #[test]
    fn a_process_has_anonymous_memory_and_another_with_its_pid_is_not_asked() {
        let me = read_identity(std::process::id(), &boot_id().unwrap()).unwrap();
        assert!(private_memory(&me).unwrap().unwrap() > 0);
        let earlier = Identity { start_time: me.start_time - 1, ..me };
        assert_eq!(private_memory(&earlier).unwrap(), None);
    }

    #[test]
    fn a_process_that_has_ended_has_no_memory_and_that_is_no_error() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let ended = read_identity(child.id(), &boot_id().unwrap()).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(private_memory(&ended).unwrap(), None);
    }

    #[test]
    fn the_line_is_found_and_a_wrong_one_is_an_error() {
        let status = "Name:\tRssAnon: 5 kB\nVmRSS:\t 9 kB\nRssAnon:\t     132 kB\n";
        assert_eq!(rss_anon(status).unwrap().unwrap(), 132 << 10);
        assert!(rss_anon("Name:\tx\n").is_none());
        assert!(rss_anon("RssAnon:\tmuch\n").unwrap().is_err());
    }
}
