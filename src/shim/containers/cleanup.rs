//! The consequences of a shim's exit: an empty shim may exit; containers that it served are lost,
//! and the sandbox fails with them. Either way no process and no state of theirs is to stay.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use super::{Container, NamespaceMembers, UnknownProcess};
use crate::config::CONTAINERD_NAMESPACE;
use crate::error::{StepError, StepErrors};
use crate::process::{Exit, UNKNOWN_EXIT};
use crate::shim::bundle::Bundle;
use crate::shim::pod_shim::{PodShim, RETRY_DELAY};
use crate::shim::{Pod, command, containers};

/// First delays between attempts to find what an exited shim has left.
const SEARCH_DELAYS: [Duration; 5] =
    [RETRY_DELAY, RETRY_DELAY, RETRY_DELAY, RETRY_DELAY, Duration::from_secs(5)];

/// Delay between all further attempts.
const LAST_SEARCH_DELAY: Duration = Duration::from_secs(10);

/// Containers and processes that an exited shim left.
pub(in crate::shim) struct ShimLeftovers {
    /// Containers that are lost with it: the sandbox fails.
    lost: Vec<Container>,
    /// Containers of which only the runtime still has a state, or that were being created: those
    /// have not run, and their creation fails.
    forgotten: Vec<Container>,
    /// Processes in the pod's namespaces, and in a cgroup below its parent, whose containers are
    /// unknown: killed, and no reason to fail the sandbox. A pod without a parent has none.
    unknown: Vec<UnknownProcess>,
}

impl PodShim {
    /// Handles the exit of a shim that has served. Retries while the containers that the shim left
    /// cannot be determined: kubelet starts them again as soon as there is another shim. Returns
    /// early if `has_ended`: the endpoint then cleans up itself. No shim is launched before this
    /// returns.
    pub(in crate::shim) async fn handle_shim_exit(
        self: &Arc<Self>,
        exit: Exit,
        pod: &Arc<dyn Pod>,
        has_ended: impl Fn() -> bool,
    ) {
        let mut searches = SEARCH_DELAYS.into_iter();
        loop {
            let failed = {
                let _cleaning = self.cleaning().lock().await;
                if has_ended() {
                    return;
                }
                self.try_handle_shim_exit(exit, pod).await
            };
            let Err(step) = failed else { return };
            log::error!(sandbox = self.id();
                "shim exited; cannot determine remaining containers, retrying: {step}");
            sleep(searches.next().unwrap_or(LAST_SEARCH_DELAY)).await;
        }
    }

    /// # Errors
    /// The remaining containers cannot be determined. Nothing was done.
    async fn try_handle_shim_exit(
        self: &Arc<Self>,
        exit: Exit,
        pod: &Arc<dyn Pod>,
    ) -> Result<(), StepError> {
        let searched = pod.clone();
        let ShimLeftovers { lost, forgotten, unknown } =
            self.blocking(move |shim| shim.find_left(exit, &*searched)).await.flatten()?;
        if !lost.is_empty() {
            let left = [lost, forgotten].concat();
            let names: Vec<&str> = left.iter().map(|container| container.id.as_str()).collect();
            let (status, names) = (exit.status, names.join(", "));
            let reason =
                format!("the shim exited with status {status} and left containers: {names}");
            self.fail_sandbox(reason, pod).await;
            self.kill_unknown(&unknown);
            self.clean_up_and_log(left).await;
            return Ok(());
        }
        if exited_well(exit) {
            log::debug!(sandbox = self.id(), status = exit.status; "empty shim exited");
        } else {
            // It has no container that ran, or containerd has ended its containers first, as it
            // does from 2.4 on.
            log::warn!(sandbox = self.id(), status = exit.status;
                "shim exited, and no container that ran is left: the pod stays");
            self.kill_unknown(&unknown);
        }
        self.clean_up_and_log(forgotten).await;
        Ok(())
    }

    /// Records the reason and fails the sandbox.
    async fn fail_sandbox(self: &Arc<Self>, reason: String, pod: &Arc<dyn Pod>) {
        log::error!(sandbox = self.id(); "sandbox failed: {reason}");
        let recorded = self.blocking(move |shim| shim.bundle().record_death(&reason)).await;
        if let Err(step) = recorded.flatten() {
            log::error!(sandbox = self.id(); "failed to record why the sandbox failed: {step}");
        }
        pod.fail();
    }

    /// Kills processes in the pod that the shim may have left: only them, as their containers may
    /// be another pod's or no pod's.
    fn kill_unknown(&self, unknown: &[UnknownProcess]) {
        for UnknownProcess { process, .. } in unknown {
            if let Err(step) = process.kill() {
                log::error!(sandbox = self.id(), pid = process.pid();
                    "failed to kill process in the pod after shim exit: {step}");
            }
        }
    }

    async fn clean_up_and_log(self: &Arc<Self>, left: Vec<Container>) {
        for step in self.clean_up(left).await {
            log::error!(sandbox = self.id();
                "failed to clean up container after shim exit: {step}");
        }
    }

    /// Finds the containers and processes that an exited shim left. Blocks.
    fn find_left(&self, exit: Exit, pod: &dyn Pod) -> Result<ShimLeftovers, StepError> {
        let NamespaceMembers { containers: mut lost, mut unknown } =
            self.find_namespace_members(pod)?;
        unknown.retain(|process| process.is_below(pod.cgroup_parent()));
        // In this order: a bundle that is removed between the two is forgotten.
        let mut bundles = self.find_begun()?;
        let mut forgotten = self.find_forgotten()?;
        let creating = self.find_creating()?;
        for found in [&mut lost, &mut bundles, &mut forgotten] {
            found.retain(|container| !creating.contains(container));
        }
        forgotten.retain(|container| !lost.contains(container) && !bundles.contains(container));
        // A shim that exited well may leave a bundle of a container that is being removed, or
        // created for the next shim. Where its status is unknown, the containers' processes must
        // tell.
        let without: Vec<Container> = bundles.iter().chain(&forgotten).cloned().collect();
        if !exited_well(exit) || containers::any_alive(&without)? {
            extend_with_new(&mut lost, bundles);
            lost.append(&mut forgotten);
        }
        forgotten.extend(creating);
        Ok(ShimLeftovers { lost, forgotten, unknown })
    }

    /// The containers with a bundle whose creation has begun. The others are not lost: the own shim
    /// writes the options into the bundle first, and containerd, which makes the bundle before it
    /// calls the shim, removes it when the call fails, or calls the next shim.
    fn find_begun(&self) -> Result<Vec<Container>, StepError> {
        let mut all = containers::of_sandbox(&self.settings().tasks(), self.id())?;
        if self.own_shim().is_some() {
            all.retain(|container| Bundle::has_options(&container.bundle));
        }
        Ok(all)
    }

    /// Finds the containers and processes in the pod's own namespaces.
    fn find_namespace_members(&self, pod: &dyn Pod) -> Result<NamespaceMembers, StepError> {
        let tasks = self.settings().tasks();
        containers::find_in_namespaces(
            &pod.namespaces()?,
            &tasks,
            &self.runtime_states()?,
            self.id(),
        )
    }

    /// Where the runtime keeps the states of its containers.
    fn runtime_states(&self) -> Result<PathBuf, StepError> {
        let options = self.runtime().runc_options()?;
        Ok(containers::runtime_root(options.as_ref(), CONTAINERD_NAMESPACE))
    }

    /// Containers of which the runtime has a state, and containerd no bundle: their deletion was
    /// interrupted.
    fn find_forgotten(&self) -> Result<Vec<Container>, StepError> {
        containers::forgotten(&self.runtime_states()?, &self.settings().tasks(), self.id())
    }

    /// Containers that the shim was creating when it died: they may have no bundle any more, and no
    /// state of the runtime's yet.
    fn find_creating(&self) -> Result<Vec<Container>, StepError> {
        let tasks = self.settings().tasks();
        let ids = self.bundle().creating()?.into_iter();
        Ok(ids.map(|id| Container { bundle: tasks.join(&id), id }).collect())
    }

    /// The containers that have a bundle, only a state of the runtime's, or not even that yet.
    fn find_known(&self) -> Result<Vec<Container>, StepError> {
        // In this order: a bundle that is removed between the two is forgotten.
        let mut known = containers::of_sandbox(&self.settings().tasks(), self.id())?;
        extend_with_new(&mut known, self.find_forgotten()?);
        extend_with_new(&mut known, self.find_creating()?);
        Ok(known)
    }

    /// Neither containerd nor the runtime has a container of the pod. Blocks.
    ///
    /// # Errors
    /// It cannot be seen.
    pub(in crate::shim) fn is_empty(&self) -> Result<bool, StepError> {
        Ok(containers::none(&self.settings().tasks(), self.id())?
            && self.find_forgotten()?.is_empty())
    }

    /// Kills the containers that have a bundle, or only a state of the runtime's, and deletes none
    /// of them: their shim has not exited yet.
    ///
    /// # Errors
    /// They cannot be found, or what could not be killed.
    pub(in crate::shim) async fn kill_known(self: &Arc<Self>) -> Result<(), StepError> {
        self.blocking(|shim| containers::kill(&shim.find_known()?)).await.flatten()
    }

    /// Kills the containers of an exited shim and has the shim's program delete them.
    async fn clean_up(self: &Arc<Self>, left: Vec<Container>) -> StepErrors {
        if left.is_empty() {
            return StepErrors::default();
        }
        let all = left.clone();
        let begin = move |shim: &Self| {
            // First: containerd removes its bundles at any moment.
            let options = shim.runtime().runc_options().ok().flatten();
            let make = |Container { id, bundle }: &Container| {
                shim.bundle().make_deletion_bundle(id, options.as_ref(), bundle)
            };
            let bundles: Vec<_> = all.iter().map(make).collect();
            (bundles, containers::kill(&all))
        };
        let (bundles, killed) = match self.blocking(begin).await {
            Ok(begun) => begun,
            Err(step) => return step.into(),
        };
        let mut failed = StepErrors::default();
        failed.check(killed);
        for (container, bundle) in left.iter().zip(bundles) {
            failed.check(self.delete_container(&container.id, bundle).await);
        }
        failed
    }

    async fn delete_container(
        &self,
        id: &str,
        bundle: Result<PathBuf, StepError>,
    ) -> Result<(), StepError> {
        self.learn_inheritance().await;
        let program = self.cleaner()?;
        command::delete(self.settings(), (&program, &self.inheritance()), id, &bundle?).await?;
        self.bundle().clear_creating(id)
    }

    /// Cleans up all containers of the pod, whose shim has exited.
    ///
    /// # Errors
    /// Every step that failed.
    pub(in crate::shim) async fn clean_up_all(self: &Arc<Self>) -> Result<(), StepErrors> {
        let known = self.blocking(Self::find_known).await.flatten()?;
        self.clean_up(known).await.into_result()
    }
}

/// Its containers were gone, as far as its status says.
fn exited_well(exit: Exit) -> bool {
    matches!(exit.status, 0 | UNKNOWN_EXIT)
}

fn extend_with_new(all: &mut Vec<Container>, others: Vec<Container>) {
    for container in others {
        if !all.contains(&container) {
            all.push(container);
        }
    }
}
