//! A command that an operator names, such as the one that restarts containerd.

use std::process::Stdio;
use std::time::Duration;

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use tokio::process::{Child, Command};

/// Runs a command of the shell to its end, and kills it with what it has started when it does not
/// end within `within`, or when the caller gives it up.
///
/// # Errors
/// The command with its exit status, or why it did not run.
pub async fn run(command: &str, within: Duration) -> Result<(), String> {
    let mut shell = Command::new("/bin/sh");
    // Its output is the operator's: a daemon that it starts would keep a pipe open.
    shell.args(["-c", command]).stdin(Stdio::null()).process_group(0).kill_on_drop(true);
    let mut shell = Shell(shell.spawn().map_err(|e| format!("`{command}`: {e}"))?);
    match tokio::time::timeout(within, shell.0.wait()).await {
        Ok(Ok(status)) if status.success() => Ok(()),
        Ok(Ok(status)) => Err(format!("`{command}` fails: {status}")),
        Ok(Err(e)) => Err(format!("`{command}`: {e}")),
        Err(_) => {
            let left = shell.kill_group().err().map(|e| format!(", and is not killed: {e}"));
            let (within, left) = (within.as_secs(), left.unwrap_or_default());
            Err(format!("`{command}` does not end within {within} s{left}"))
        }
    }
}

/// A shell with what it has started.
struct Shell(Child);

impl Shell {
    /// Kills a shell that is not reaped, with what it has started: that must not restart a service
    /// later.
    fn kill_group(&self) -> nix::Result<()> {
        let pid = self.0.id().and_then(|pid| i32::try_from(pid).ok());
        pid.map_or(Ok(()), |group| killpg(Pid::from_raw(group), Signal::SIGKILL))
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        // The caller that gives it up reports why.
        let _ = self.kill_group();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[tokio::test]
    async fn a_command_ends_well_in_time_or_fails() {
        let within = Duration::from_secs(10);
        run("exit 0", within).await.unwrap();
        let error = run("exit 3", within).await.unwrap_err();
        assert_eq!(error, "`exit 3` fails: exit status: 3");
        let error = run("exec sleep 60", Duration::ZERO).await.unwrap_err();
        assert_eq!(error, "`exec sleep 60` does not end within 0 s");
    }

    #[tokio::test]
    async fn a_command_that_does_not_end_is_killed_with_its_children() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("pid");
        let command = format!("sleep 600 & echo $! >{}; wait", file.display());
        run(&command, Duration::from_secs(5)).await.unwrap_err();
        ends(&file).await;
    }

    #[tokio::test]
    async fn a_command_that_the_caller_gives_up_is_killed_with_its_children() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("pid");
        let command = format!("sleep 600 & echo $! >{0}.new; mv {0}.new {0}; wait", file.display());
        let written = async {
            while !file.exists() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::select! {
            ended = run(&command, Duration::from_secs(60)) => panic!("{ended:?}"),
            () = written => {}
        }
        ends(&file).await;
    }

    /// Waits for the end of the process in a file.
    async fn ends(file: &std::path::Path) {
        let pid = std::fs::read_to_string(file).unwrap();
        let stat = format!("/proc/{}/stat", pid.trim());
        let ends = Instant::now() + Duration::from_secs(20);
        // It is a zombie until init reaps it.
        while std::fs::read_to_string(&stat).is_ok_and(|stat| !stat.contains(") Z ")) {
            assert!(Instant::now() < ends, "{stat} is still there");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}
