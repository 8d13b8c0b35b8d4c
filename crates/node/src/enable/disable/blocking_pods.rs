//! The pods that need a handler which `disable` removes.

use std::path::Path;

use base::config::Config;
use base::error::StepError;
use containerd_api::cri::CriClient;

use super::super::Mode;
use super::super::pods::{self, Pods};
use super::Removal;
use crate::check::Subject;
use crate::check::containerd::NodeContainerd;

/// The pods that prevent the removal.
#[derive(Debug, Default, PartialEq)]
pub(in crate::enable) struct BlockingPods {
    pub(in crate::enable) pods: Pods,
    /// The runtime handlers that they need, as far as CRI says so.
    handlers: Vec<String>,
    /// The handlers among them that others defined, in files that containerd's config no longer
    /// has.
    of_others: Vec<String>,
    /// Why CRI, which may know others, does not list them.
    pub(in crate::enable) unknown: Option<String>,
}

impl BlockingPods {
    /// Finds the sandboxes of the daemon, the pods whose shim runs without it, and the pods that
    /// CRI knows, such as those that a reboot has ended.
    ///
    /// # Errors
    /// The records of a daemon that does not answer, or the processes, cannot be read.
    pub(in crate::enable) async fn find(
        subject: &Subject,
        removal: &Removal,
    ) -> Result<Self, StepError> {
        let config = &subject.config;
        let mut ours = match removal.modes == [Mode::ShimOnly] {
            true => Pods::new(),
            false => pods::of_daemon(config).await?,
        };
        if removal.modes.contains(&Mode::ShimOnly) {
            ours.append(&mut pods::of_shims(config)?);
        }
        let mut found = Self { pods: ours.clone(), ..Self::default() };
        if let Err(step) = found.add_pods_of_cri(config, removal, &ours).await {
            // A containerd that starts lists them later. A stopped one cannot, and the
            // removal may be what lets it start.
            let runs = NodeContainerd::find(subject).pid.is_some();
            found.unknown = runs.then(|| step.to_string());
        }
        Ok(found)
    }

    /// Adds the pods of CRI to those of the daemon, `ours`. A containerd without CRI has none.
    async fn add_pods_of_cri(
        &mut self,
        config: &Config,
        removal: &Removal,
        ours: &Pods,
    ) -> Result<(), StepError> {
        let cri = CriClient::new(&config.containerd_address);
        if !cri.is_served().await? {
            return Ok(());
        }
        for name in removal.lost() {
            let left = pods::of_cri(&cri, &name).await?;
            if left.is_empty() {
                continue;
            }
            if !removal.handlers.contains(&name) && !left.keys().all(|id| ours.contains_key(id)) {
                self.of_others.push(name.clone());
            }
            self.handlers.push(name);
            self.pods.extend(left);
        }
        Ok(())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.pods.is_empty() && self.unknown.is_none()
    }

    /// The reason to roll back the changes; `None`: there are no pods. `when` says when the pods
    /// started, and what to do.
    pub(super) fn reason(&self, when: &str) -> Option<String> {
        match &self.unknown {
            Some(reason) if self.pods.is_empty() => Some(format!(
                "CRI does not list the pods, so it is unknown whether one needs the handler: \
                 {reason}. Run `disable` again when CRI answers"
            )),
            _ if self.pods.is_empty() => None,
            _ => Some(format!("{} started {when}", pods::shown(&self.pods))),
        }
    }

    /// Why the pods prevent the removal from containerd's config `file`, and what to do.
    pub(super) fn refusal(&self, removal: &Removal, file: &Path) -> String {
        if let (true, Some(reason)) = (self.pods.is_empty(), &self.unknown) {
            return format!(
                "containerd runs, but CRI does not list the pods that need the handler: {reason}. \
                 Run the command again when CRI answers. If CRI never answers, stop containerd, run \
                 `disable --containerd-config {}` without --restart, and start containerd",
                file.display()
            );
        }
        let known = if self.handlers.is_empty() { removal.lost() } else { self.handlers.clone() };
        let handlers = match known.as_slice() {
            [] => "of this sandboxer".to_owned(),
            known => known.join(", "),
        };
        let mut reason = format!(
            "{}: they need runtime handler {handlers}, and without it their containers cannot be \
             started again, and pods of the sandboxer can neither be stopped nor removed. Remove \
             them, and run the command again",
            pods::shown(&self.pods)
        );
        if let Some((fact, command)) = removal.default_handler() {
            reason += &format!(". {fact}: first run {command}");
        }
        if !self.of_others.is_empty() {
            reason += &format!(
                ". containerd's config no longer has {}: restore the config file that defines it",
                self.of_others.join(", ")
            );
        }
        reason
    }
}
