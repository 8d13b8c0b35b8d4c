//! Restarts services, and waits until containerd serves pods again.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use tokio::process::{Child, Command};
use tokio::time::Instant;

use crate::check::Subject;
use crate::check::containerd::NodeContainerd;
use crate::containerd::cri::CriClient;

/// Between two queries.
const INTERVAL: Duration = Duration::from_millis(200);

/// The unit of the daemon.
const DAEMON: &str = "pause-sandboxer.service";

/// How containerd is restarted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RestartBy {
    /// By systemd.
    Systemd,
    /// By a command of the shell.
    Command(String),
}

impl RestartBy {
    /// The command, for messages and for the shell.
    pub(super) fn command(&self, unit: &str) -> String {
        match self {
            Self::Systemd => format!("systemctl restart {unit}"),
            Self::Command(command) => command.clone(),
        }
    }

    /// Fails if there is no systemd where it is needed.
    ///
    /// # Errors
    /// What to do instead.
    pub(super) fn check(&self) -> Result<(), String> {
        if *self == Self::Systemd && !systemd_runs() {
            return Err("systemd does not run here: name the command that restarts containerd by \
                        --restart-command"
                .to_owned());
        }
        Ok(())
    }
}

fn systemd_runs() -> bool {
    Path::new("/run/systemd/system").exists()
}

/// Runs a command of the shell to its end.
async fn run(command: &str, within: Duration) -> Result<(), String> {
    let mut shell = Command::new("/bin/sh");
    // Its output is the operator's: a daemon that it starts would keep a pipe open.
    shell.args(["-c", command]).stdin(Stdio::null()).process_group(0).kill_on_drop(true);
    let mut shell = shell.spawn().map_err(|e| format!("`{command}`: {e}"))?;
    match tokio::time::timeout(within, shell.wait()).await {
        Ok(Ok(status)) if status.success() => Ok(()),
        Ok(Ok(status)) => Err(format!("`{command}` fails: {status}")),
        Ok(Err(e)) => Err(format!("`{command}`: {e}")),
        Err(_) => {
            let left = kill_group(&shell).err().map(|e| format!(", and is not killed: {e}"));
            let (within, left) = (within.as_secs(), left.unwrap_or_default());
            Err(format!("`{command}` does not end within {within} s{left}"))
        }
    }
}

/// Kills a shell that is not reaped, with what it has started: that must not restart containerd
/// when the files are taken back.
fn kill_group(shell: &Child) -> nix::Result<()> {
    let Some(group) = shell.id().and_then(|pid| i32::try_from(pid).ok()) else { return Ok(()) };
    killpg(Pid::from_raw(group), Signal::SIGKILL)
}

/// Restarts containerd, and waits until another process serves CRI whose handlers are as `wanted`
/// has them.
///
/// # Errors
/// The command failed, or CRI did not answer in time.
pub(super) async fn restart(
    by: &RestartBy,
    subject: &Subject,
    within: Duration,
    wanted: impl Fn(&[String]) -> bool,
) -> Result<(), String> {
    let before = NodeContainerd::find(subject);
    let deadline = Instant::now() + within;
    run(&by.command(&before.unit), within).await?;
    let cri = CriClient::new(&subject.config.containerd_address);
    loop {
        let now = NodeContainerd::find(subject);
        let reason = if now.pid.is_some() && now.pid == before.pid {
            format!(
                "process {}, which was to be restarted, still listens at {}",
                before.pid.unwrap_or_default(),
                subject.config.containerd_address.display()
            )
        } else {
            match handlers(&cri).await {
                Ok(handlers) if wanted(&handlers) => return Ok(()),
                Ok(handlers) => format!("its runtime handlers are {handlers:?}"),
                Err(reason) => reason,
            }
        };
        if Instant::now() >= deadline {
            let within = within.as_secs();
            let see = match by {
                RestartBy::Systemd => format!("; see journalctl -u {}", before.unit),
                RestartBy::Command(_) => String::new(),
            };
            return Err(format!("containerd does not serve CRI within {within} s: {reason}{see}"));
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

/// The runtime handlers of the containerd that runs; empty if it does not name them.
///
/// # Errors
/// CRI does not answer, or its runtime is not ready.
pub(super) async fn handlers(cri: &CriClient) -> Result<Vec<String>, String> {
    let status = cri.status().await.map_err(|step| step.to_string())?;
    let conditions = &status.status.conditions;
    // The network may be missing for reasons of the cluster.
    match conditions.iter().find(|condition| condition.type_ == "RuntimeReady") {
        Some(ready) if ready.status => {}
        _ => return Err("its runtime is not ready".to_owned()),
    }
    Ok(status.runtime_handlers.into_iter().map(|handler| handler.name).collect())
}

/// Restarts the daemon, if systemd runs it; whether it does.
///
/// # Errors
/// The command failed.
pub(super) async fn restart_daemon(within: Duration) -> Result<bool, String> {
    if !systemd_runs() {
        return Ok(false);
    }
    let asked = Command::new("systemctl").args(["--quiet", "is-active", DAEMON]).status().await;
    if !asked.is_ok_and(|status| status.success()) {
        return Ok(false);
    }
    restart_daemon_again(within).await.map(|()| true)
}

/// Restarts the daemon, which systemd runs, also if it has failed.
///
/// # Errors
/// The command failed.
pub(super) async fn restart_daemon_again(within: Duration) -> Result<(), String> {
    run(&format!("systemctl restart {DAEMON}"), within).await
}

#[cfg(test)]
mod tests {
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
        run(&command, Duration::from_secs(2)).await.unwrap_err();
        let pid = std::fs::read_to_string(file).unwrap();
        let stat = format!("/proc/{}/stat", pid.trim());
        let ends = Instant::now() + Duration::from_secs(20);
        // It is a zombie until init reaps it.
        while std::fs::read_to_string(&stat).is_ok_and(|stat| !stat.contains(") Z ")) {
            assert!(Instant::now() < ends, "{stat} is still there");
            tokio::time::sleep(INTERVAL).await;
        }
    }

    #[test]
    fn the_unit_is_the_one_that_runs_containerd() {
        assert_eq!(RestartBy::Systemd.command("k3s.service"), "systemctl restart k3s.service");
        assert_eq!(RestartBy::Command("x y".to_owned()).command("z"), "x y");
    }
}
