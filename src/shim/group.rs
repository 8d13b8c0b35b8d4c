//! The containers of one pod, which share a shim, and what becomes of them when it dies.

use std::sync::Arc;

use super::bundle::Bundle;
use super::containers::{self, Container};
use super::{Pod, Runtime, Shims, command};
use crate::error::Step;
use crate::pause::{Exit, UNKNOWN_EXIT};

/// The containers of one pod.
#[derive(Debug)]
pub(super) struct Group {
    /// What all shims share.
    pub(super) shims: Arc<Shims>,
    /// The shim's own directory.
    pub(super) bundle: Bundle,
    /// The sandbox id.
    pub(super) id: String,
    /// What the shim is of.
    pub(super) runtime: Runtime,
}

impl Group {
    /// After the end of a shim that has served: an empty one may end, but with containers in it the sandbox ends with it.
    pub(super) async fn bereave(self: &Arc<Self>, exit: Exit, pod: &Arc<dyn Pod>) {
        let asked = pod.clone();
        let Some(looked) = self.blocking(move |group| group.left(exit, &*asked)).await else { return };
        let left = match looked {
            Ok(left) if left.is_empty() => {
                log::debug!(sandbox = self.id.as_str(), status = exit.status; "its shim has ended, empty");
                return;
            }
            Ok(left) => left,
            Err(step) => {
                log::error!(sandbox = self.id.as_str(); "its shim has ended, and its containers: {step}");
                return;
            }
        };
        let names: Vec<&str> = left.iter().map(|container| container.id.as_str()).collect();
        let reason = format!("the shim ended with status {} and left containers: {}", exit.status, names.join(", "));
        self.mourn(reason, pod).await;
        for step in self.clean_up(left).await {
            log::error!(sandbox = self.id.as_str(); "its containers: {step}");
        }
    }

    /// The sandbox ends for that reason.
    pub(super) async fn mourn(self: &Arc<Self>, reason: String, pod: &Arc<dyn Pod>) {
        log::error!(sandbox = self.id.as_str(); "{reason}; the sandbox ends");
        if let Some(Err(step)) = self.blocking(move |group| group.bundle.record_death(&reason)).await {
            log::error!(sandbox = self.id.as_str(); "its shim: {step}");
        }
        pod.bereaved();
    }

    /// The containers that the end of the shim has left without one.
    fn left(&self, exit: Exit, pod: &dyn Pod) -> Result<Vec<Container>, Step> {
        let tasks = self.shims.settings.tasks();
        let mut left = containers::inside(&pod.namespaces(), &tasks, &self.id)?;
        let bundles = containers::of(&tasks, &self.id)?;
        // Of a shim that ended well a bundle may be left: of a container that is being removed, or being made for the next shim. Where
        // nobody can tell how it ended, the containers' processes must.
        let well = matches!(exit.status, 0 | UNKNOWN_EXIT);
        if !well || !containers::processes(&self.shims.launcher, &bundles)?.is_empty() {
            left.extend(bundles.into_iter().filter(|bundle| !left.contains(bundle)).collect::<Vec<_>>());
        }
        Ok(left)
    }

    /// Ends what is left of containers whose shim is dead.
    pub(super) async fn clean_up(self: &Arc<Self>, left: Vec<Container>) -> Vec<Step> {
        let mut failed = Vec::new();
        let containers = left.clone();
        let killed = self.blocking(move |group| containers::kill(&group.shims.launcher, &containers)).await;
        failed.extend(killed.and_then(Result::err));
        match self.shims.settings.binary(&self.runtime.name) {
            Ok(binary) => {
                let options = self.runtime.runc_options().ok().flatten();
                for Container { id, .. } in &left {
                    let ended = match self.bundle.last(id, options.as_ref()) {
                        Ok(bundle) => command::delete(&self.shims.settings, &binary, id, &bundle).await,
                        Err(step) => Err(step),
                    };
                    failed.extend(ended.err());
                }
            }
            Err(step) => failed.push(step),
        }
        failed
    }

    /// All containers of the pod, to be asked while the pause still tells its namespaces: containerd removes the bundles of containers that it
    /// takes for dead. `None` after a panic.
    pub(super) async fn look_around(self: &Arc<Self>, pod: &Arc<dyn Pod>) -> Option<Result<Vec<Container>, Step>> {
        let asked = pod.clone();
        self.blocking(move |group| group.all(&*asked)).await
    }

    /// After the end of a shim that ran the pause: the sandbox ends with it, and so do all containers.
    pub(super) async fn bereave_with_pause(
        self: &Arc<Self>,
        left: Option<Result<Vec<Container>, Step>>,
        exit: Exit,
        pod: &Arc<dyn Pod>,
    ) {
        self.mourn(format!("the shim, which ran the pause, ended with status {}", exit.status), pod).await;
        let left = match left {
            Some(Ok(left)) => left,
            Some(Err(step)) => return log::error!(sandbox = self.id.as_str(); "its containers: {step}"),
            None => return,
        };
        for step in self.clean_up(left).await {
            log::error!(sandbox = self.id.as_str(); "its containers: {step}");
        }
    }

    /// All containers of the pod: those that have processes in its namespaces, and those that have a bundle.
    fn all(&self, pod: &dyn Pod) -> Result<Vec<Container>, Step> {
        let tasks = self.shims.settings.tasks();
        let mut all = containers::inside(&pod.namespaces(), &tasks, &self.id)?;
        let bundles = containers::of(&tasks, &self.id)?;
        all.extend(bundles.into_iter().filter(|bundle| !all.contains(bundle)).collect::<Vec<_>>());
        Ok(all)
    }

    /// Ends what is left of all containers of the pod, whose shim is dead.
    pub(super) async fn clean_up_all(self: &Arc<Self>) -> Result<(), Step> {
        let left = containers::of(&self.shims.settings.tasks(), &self.id)?;
        match self.clean_up(left).await.into_iter().next() {
            Some(step) => Err(step),
            None => Ok(()),
        }
    }

    /// Runs what blocks off the runtime's workers; `None` after a panic in it.
    async fn blocking<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Self) -> T + Send + 'static,
    ) -> Option<T> {
        let group = self.clone();
        tokio::task::spawn_blocking(move || work(&group)).await.ok()
    }
}
