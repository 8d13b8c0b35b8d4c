//! Restarts services, and waits until containerd serves pods again.

use std::time::Duration;

use tokio::process::Command;
use tokio::time::Instant;

use super::changes::Changes;
use super::node_state::loaded_handlers;
use super::{EnableError, NodeChange, Say};
use crate::check::Subject;
use crate::check::containerd::NodeContainerd;
use crate::check::systemd;
use crate::shell_command;
use crate::stop_signal;
use base::platform::systemd_runs;
use containerd_api::cri::CriClient;

/// Polling interval of CRI.
const INTERVAL: Duration = Duration::from_millis(200);

/// The method to restart containerd.
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
    /// The option to use instead.
    pub(super) fn check(&self) -> Result<(), String> {
        if *self == Self::Systemd && !systemd_runs() {
            return Err(
                "systemd is not running: use --restart-command COMMAND to restart containerd"
                    .to_owned(),
            );
        }
        Ok(())
    }
}

/// How containerd is restarted, and how long that may take.
#[derive(Clone, Copy)]
pub(super) struct Restart<'a> {
    pub(super) by: &'a RestartBy,
    /// The unit of systemd that runs it: a process that is gone does not show it.
    pub(super) unit: &'a str,
    pub(super) subject: &'a Subject,
    pub(super) within: Duration,
}

impl Restart<'_> {
    /// Restarts containerd, and waits until another process serves CRI whose handlers are as
    /// `wanted` has them.
    ///
    /// # Errors
    /// The command failed, or CRI did not answer in time.
    async fn run(&self, wanted: impl Fn(&[String]) -> bool) -> Result<(), String> {
        let before = NodeContainerd::find(self.subject).pid;
        let deadline = Instant::now() + self.within;
        let command = self.by.command(self.unit);
        let served = self.served(before, deadline, wanted);
        match self.by {
            // A unit can be ready long after CRI, as that of an RKE2 server with its API server.
            // systemd completes the restart without `systemctl`.
            RestartBy::Systemd => tokio::select! {
                Err(reason) = shell_command::run(&command, Duration::MAX) => Err(reason),
                done = served => done,
            },
            RestartBy::Command(_) => {
                shell_command::run(&command, self.within).await?;
                served.await
            }
        }
    }

    /// Waits until another process than `before` serves CRI whose handlers are as `wanted` has
    /// them.
    async fn served(
        &self,
        before: Option<i32>,
        deadline: Instant,
        wanted: impl Fn(&[String]) -> bool,
    ) -> Result<(), String> {
        let address = &self.subject.config.containerd_address;
        let cri = CriClient::new(address);
        loop {
            // The command comes first.
            tokio::time::sleep(INTERVAL).await;
            let now = NodeContainerd::find(self.subject);
            let reason = if now.pid.is_some() && now.pid == before {
                format!(
                    "process {} was not restarted and still listens at {}",
                    before.unwrap_or_default(),
                    address.display()
                )
            } else {
                match loaded_handlers(&cri).await {
                    Ok(handlers) if wanted(&handlers) => return Ok(()),
                    Ok(handlers) => format!("its runtime handlers are {handlers:?}"),
                    Err(reason) => reason,
                }
            };
            if Instant::now() >= deadline {
                let see = match self.by {
                    RestartBy::Systemd => format!("; see journalctl -u {}", self.unit),
                    RestartBy::Command(_) => String::new(),
                };
                return Err(format!(
                    "containerd does not serve CRI within {} s: {reason}{see}",
                    self.within.as_secs()
                ));
            }
        }
    }

    /// As [`Restart::run`], which reads `changes`. If it fails, the caller rolls them back: so a
    /// signal, as of a terminal that is lost, is a failure too, and a later one does not end the
    /// rollback. Without changes there is nothing to roll back.
    ///
    /// # Errors
    /// As [`Restart::run`], or a signal.
    pub(super) async fn load(
        &self,
        changes: &Changes,
        wanted: impl Fn(&[String]) -> bool,
    ) -> Result<(), String> {
        let restarted = self.run(wanted);
        if changes.is_empty() {
            return restarted.await;
        }
        let stopped = stop_signal::taken().map_err(|step| step.to_string())?;
        tokio::select! {
            done = restarted => done,
            signal = stopped => Err(format!("stopped by {signal}")),
        }
    }

    /// Rolls changes back because of `reason`, and restarts containerd with the resulting files.
    pub(super) async fn after_rollback(&self, changes: &Changes, reason: &str) -> EnableError {
        let undone = changes.undo();
        let files = if undone.is_ok() { "the restored files" } else { "the current files" };
        let error = EnableError::rolled_back(reason, &undone);
        error.and(&match self.run(|_| true).await {
            Ok(()) => format!("; containerd serves CRI with {files}"),
            Err(reason) => format!("; but containerd does not serve CRI with {files}: {reason}"),
        })
    }
}

/// Lets systemd read its units again, if it runs.
pub(super) async fn reload_units(within: Duration, say: Say<'_>) {
    if !systemd_runs() {
        return;
    }
    // systemd reads them at the next boot too, for which they are.
    if let Err(reason) = shell_command::run("systemctl daemon-reload", within).await {
        say(format!("systemd has not read the changed units: {reason}"));
    }
}

/// Lets the daemon read its settings, if systemd runs it; whether it does.
///
/// # Errors
/// The restart failed, and the changes are rolled back.
pub(super) async fn restart_daemon(
    change: &NodeChange,
    changes: &Changes,
    say: Say<'_>,
) -> Result<bool, EnableError> {
    let active = ["--quiet", "is-active", systemd::SERVICE];
    if change.restart.is_none()
        || !systemd_runs()
        || !Command::new("systemctl").args(active).status().await.is_ok_and(|it| it.success())
    {
        let said = "the settings of pause-sandboxer have changed: restart it; pods keep running";
        say(said.to_owned());
        return Ok(false);
    }
    if let Err(reason) = restart_daemon_again(change.within).await {
        let error = changes.roll_back(&reason);
        return Err(daemon_after_rollback(error, change.within).await);
    }
    say("restarted pause-sandboxer; pods keep running".to_owned());
    Ok(true)
}

async fn restart_daemon_again(within: Duration) -> Result<(), String> {
    shell_command::run(&format!("systemctl restart {}", systemd::SERVICE), within).await
}

/// Restarts the daemon, also if it has failed: it has read settings that are rolled back because of
/// `error`.
pub(super) async fn daemon_after_rollback(error: EnableError, within: Duration) -> EnableError {
    error.and(&match restart_daemon_again(within).await {
        Ok(()) => "; pause-sandboxer is restarted too".to_owned(),
        Err(reason) => {
            format!("; pause-sandboxer may still use the new settings, restart it: {reason}")
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_unit_is_the_one_that_runs_containerd() {
        assert_eq!(RestartBy::Systemd.command("k3s.service"), "systemctl restart k3s.service");
        assert_eq!(RestartBy::Command("x y".to_owned()).command("z"), "x y");
    }
}
