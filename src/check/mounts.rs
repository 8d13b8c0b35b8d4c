//! Whether the daemon's mounts are visible to containerd.

use std::io;
use std::path::Path;

use node::check::Finding;
use node::daemon_process::DaemonProcess;

use crate::config::Config;
use crate::mounts::{View, view};

const SUBJECT: &str = "mounts";

/// Compares the mount namespaces of the running daemon and of containerd. No finding if one of them
/// does not run, which others report.
pub(super) fn examine(config: &Config) -> Vec<Finding> {
    let Some(daemon) = DaemonProcess::find(&config.state_dir) else { return Vec::new() };
    mount_findings(
        view(&daemon.pid.to_string(), &config.containerd_address, &config.containerd_state),
        &config.containerd_state,
    )
}

fn mount_findings(seen: io::Result<View>, state: &Path) -> Vec<Finding> {
    let advice = "systemctl cat pause-sandboxer shows the drop-in that sets it: remove the option, \
                  then systemctl daemon-reload && systemctl restart pause-sandboxer";
    match seen {
        Ok(view) => vec![match (view.admit(state), view) {
            (Err(step), _) => Finding::fail(SUBJECT, step.to_string(), advice),
            (Ok(()), View::Propagated) => Finding::warn(
                SUBJECT,
                format!(
                    "the daemon and containerd are in different mount namespaces; mounts below {} \
                     propagate to both",
                    state.display()
                ),
                "run both in the same mount namespace: remove PrivateTmp= and similar options from \
                 their units",
            ),
            (Ok(()), _) => {
                Finding::ok(SUBJECT, "the daemon and containerd are in the same mount namespace")
            }
        }],
        Err(_) => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use node::check::Level;

    use super::*;

    #[test]
    fn each_view_is_a_finding() {
        let apart =
            View::Apart { pid: 1, theirs: "mnt:[1]".to_owned(), ours: "mnt:[2]".to_owned() };
        for (seen, level) in
            [(View::Same, Level::Ok), (View::Propagated, Level::Warn), (apart, Level::Fail)]
        {
            let findings = mount_findings(Ok(seen), Path::new("/run/containerd"));
            assert_eq!((findings.len(), findings[0].level), (1, level), "{findings:?}");
        }
        assert!(mount_findings(Err(io::ErrorKind::NotFound.into()), Path::new("/")).is_empty());
    }
}
