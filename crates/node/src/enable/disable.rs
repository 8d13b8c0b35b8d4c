//! `pause-sandboxer disable`.

use std::time::Duration;

use base::config::{Config, adopted_file};
use base::error::StepError;
use containerd_api::cri::CriClient;
use toml::{Table, Value};

use super::changes::{Changes, FileChange};
use super::drop_in::{self, DropIn, default_of};
use super::main_config::BACKUP;
use super::node_state::{NodeState, loaded_handlers};
use super::pods::{self, Pods};
use super::{EnableError, Mode, NO_CHANGES, NodeChange, Say};
use super::{ordering, plan, refuse, restart, restart_yourself};
use crate::check::Subject;
use crate::check::containerd as merged_config;
use crate::check::containerd::{NodeContainerd, enabled};
use crate::oci_image;

/// Polling interval of the pods.
const INTERVAL: Duration = Duration::from_secs(1);

/// The task of `disable`.
#[derive(Clone, Debug)]
pub struct Disablement {
    /// The node, and how it is changed.
    pub change: NodeChange,
    /// Wait until no pod needs the handler.
    pub wait: bool,
    /// Remove only this runtime handler.
    pub handler: Option<String>,
}

/// The changes that `disable` makes, decided from what was read.
pub(super) struct Removal {
    pub(super) changes: Changes,
    /// Whose drop-ins are removed.
    modes: Vec<Mode>,
    /// The only handler to remove.
    only: Option<String>,
    /// The number of changes of files that containerd does not read, which are last.
    own: usize,
    /// The runtime handlers of the drop-ins, and those in other files that need this program's.
    pub(super) handlers: Vec<String>,
    /// Those that containerd has loaded, and that its files no longer have; `None` if it does not
    /// say which it has.
    pub(super) stale: Option<Vec<String>>,
    /// The handler that a drop-in makes the node's default.
    default: Option<String>,
    /// The options of the `enable` that has written that drop-in; empty for a file of another.
    options: Vec<String>,
}

impl Removal {
    /// Decides what to remove.
    ///
    /// # Errors
    /// A file cannot be read, or has handlers of others.
    pub(super) fn new(
        node: &NodeState,
        change: &NodeChange,
        only: Option<&String>,
    ) -> Result<Self, EnableError> {
        let config = &change.subject.config;
        let is_wanted = |name: &String| only.is_none_or(|only| only == name);
        let has = |one: &&DropIn| only.is_none() || one.handlers().iter().any(is_wanted);
        let drop_ins: Vec<&DropIn> = node.drop_ins.iter().filter(has).collect();
        let mut changes = Changes::default();
        // containerd's own file first: without the import the drop-ins have no effect.
        node.main.undo_import(&drop_in::paths(&drop_ins), &mut changes)?;
        for drop_in in &drop_ins {
            drop_in.has_only(drop_in.mode.handler())?;
            let Some(state) = &drop_in.state else { continue };
            if !drop_in.is_ours() {
                let backup = drop_in.path.with_added_extension(BACKUP);
                changes.add(FileChange::copy(backup, state)?);
            }
            changes.add(FileChange::new(drop_in.path.clone(), None)?);
        }
        let of_containerd = changes.len();
        let modes: Vec<Mode> = drop_ins.iter().map(|drop_in| drop_in.mode).collect();
        if modes.contains(&Mode::Sandboxer) {
            changes.add(FileChange::new(adopted_file(&change.settings), None)?);
            ordering::order(None, &mut changes)?;
        }
        let own = changes.len() - of_containerd;
        let known = node.merged.iter().map(|merged| merged_config::all(merged, config));
        let named = known.flat_map(|known| Mode::ALL.map(|mode| known.of(mode).to_vec()).concat());
        let mut handlers: Vec<String> =
            drop_ins.iter().flat_map(|drop_in| drop_in.handlers()).chain(named).collect();
        handlers.retain(is_wanted);
        handlers.sort();
        handlers.dedup();
        let mut stale = node.stale(config);
        stale.iter_mut().for_each(|stale| stale.retain(is_wanted));
        let mut texts = drop_ins.iter().filter_map(|drop_in| drop_in.text.as_deref());
        let text = texts.find(|text| default_of(text).is_some()).unwrap_or_default();
        let options = enabled::options(text).unwrap_or_default();
        let (default, only) = (default_of(text), only.cloned());
        Ok(Self { changes, modes, only, own, handlers, stale, default, options })
    }

    /// The drop-ins that are removed.
    fn drop_ins<'a>(&self, node: &'a NodeState) -> Vec<&'a DropIn> {
        self.modes.iter().map(|mode| node.drop_in(*mode)).collect()
    }

    /// The runtime handlers that containerd will not have after a restart.
    pub(super) fn lost(&self) -> Vec<String> {
        self.handlers.iter().chain(self.stale.iter().flatten()).cloned().collect()
    }

    /// If the drop-in makes the handler the node's default: that, and the command that undoes it.
    /// Until then pods that name no handler arrive.
    pub(super) fn default_handler(&self) -> Option<(String, String)> {
        let default = self.default.as_ref()?;
        let is_other = |option: &&String| *option != enabled::DEFAULT;
        let others: Vec<String> = self.options.iter().filter(is_other).cloned().collect();
        let command = format!("`{}`, which undoes that", enabled::command(&others));
        Some((format!("{default} is the node's default handler"), command))
    }

    /// Whether containerd may have handlers that no file gives back.
    fn has_stale(&self) -> bool {
        self.stale.as_ref().is_none_or(|stale| !stale.is_empty())
    }

    /// Whether files change that containerd reads.
    pub(super) fn changes_containerd(&self) -> bool {
        self.changes.len() > self.own
    }

    /// Whether no file needs a change.
    fn is_done(&self) -> bool {
        self.changes.is_empty() && self.handlers.is_empty()
    }

    /// Whether a containerd whose files do not name the sandboxer may have its handler.
    fn may_be_loaded(&self, node: &NodeState) -> bool {
        self.has_stale() && (self.stale.is_some() || node.containerd.has_unread_files())
    }

    /// The result of a dry run.
    fn shown(&self, node: &NodeState) -> String {
        let stale = self.stale.as_deref().unwrap_or_default();
        if !self.changes.is_empty() {
            return self.changes.diff().trim_end().to_owned();
        }
        if stale.is_empty() {
            return NO_CHANGES.to_owned();
        }
        format!(
            "containerd still has runtime handlers loaded that {} no longer defines: {}",
            node.containerd.file.display(),
            stale.join(", ")
        )
    }
}

/// Removes what `enable` has added. `say` gets a line for each thing done.
///
/// # Errors
/// Pods need the handler, or another file does; or a step failed. Nothing has changed then, unless
/// the error says so.
pub async fn disable(wanted: &Disablement, say: Say<'_>) -> Result<(), EnableError> {
    let change = wanted.change.located(&wanted.change.subject.config)?;
    let wanted = &Disablement { change, ..wanted.clone() };
    let (change, config) = (&wanted.change, &wanted.change.subject.config);
    let (_lock, mut node) = change.begin(false).await?;
    let removal = loop {
        // A config that containerd does not load is no obstacle: this may be what corrects it.
        let removal = Removal::new(&node, change, wanted.handler.as_ref())?;
        if change.dry_run {
            say(removal.shown(&node));
            return Ok(());
        }
        if change.restart.is_some() && removal.changes_containerd() {
            node.only_own_changes(&removal.drop_ins(&node))?;
        }
        let has_waited = (!removal.is_done() || removal.may_be_loaded(&node))
            && wait_for_pods(wanted, &removal, say).await?;
        if has_waited {
            // It may have been days: what others have written since stays, and containerd may have
            // been upgraded or restarted.
            let containerd_config = Some(node.containerd.file.clone());
            let subject = Subject { containerd_config, ..change.subject.clone() };
            node = NodeState::read(&subject).await?;
            if change.restart.is_some() {
                node.is_of_running()?;
            }
            continue;
        }
        if removal.is_done() {
            let file = node.containerd.file.display();
            say(format!("containerd's config {file} does not name this sandboxer"));
            break removal;
        }
        removal.changes.apply()?;
        if let Err(reason) = verify(&node, &removal, config).await {
            return Err(removal.changes.roll_back(&reason));
        }
        // A pod may have arrived meanwhile.
        let left = BlockingPods::find(&change.subject, &removal, wanted.wait).await;
        let left = left.map_err(|step| removal.changes.roll_back(&step.to_string()))?;
        let when = "during the removal: remove them, or use --wait";
        let Some(reason) = left.reason(when) else { break removal };
        if !wanted.wait {
            return Err(removal.changes.roll_back(&reason));
        }
        removal.changes.undo().map_err(|steps| steps.to_string())?;
    };
    removal.changes.paths().for_each(|path| say(format!("removed or restored {}", path.display())));
    if removal.own > 0 {
        restart::reload_units(change.within, say).await;
    }
    unload(wanted, &node, &removal, say).await?;
    ordering::remove_directories();
    Ok(())
}

/// Fails unless containerd's merged config has all other handlers, and none of this sandboxer.
async fn verify(node: &NodeState, removal: &Removal, config: &Config) -> Result<(), String> {
    let after = node.containerd.dump().await?;
    // A missing import of another file is no fault of this command; one of a drop-in is.
    let removed = removal.drop_ins(node);
    if node.containerd.has_imports(&drop_in::paths(&removed)).is_ok() {
        node.containerd.has_imports(&[])?;
    }
    let left = merged_config::all(&after, config);
    if removal.handlers.contains(&left.default) && !left.all.contains_key(&left.default) {
        return Err(format!(
            "another file makes {:?} the default handler, without which containerd does not serve \
             CRI: remove default_runtime_name from it",
            left.default
        ));
    }
    // The drop-in, which is gone, may be what has named the sandboxer's socket.
    let before = node.merged.as_ref().ok();
    let proxy = before.and_then(|before| merged_config::proxy(before, config).ok());
    let named = left.all.iter().filter(|(_, handler)| {
        let sandboxer = handler.get("sandboxer").and_then(Value::as_str);
        sandboxer.is_some() && sandboxer == proxy.as_deref()
    });
    let mut named = named.map(|(name, _)| name).chain(&left.ours).chain(&left.shim_only);
    if let Some(name) = named.find(|name| removal.only.as_ref().is_none_or(|only| only == *name)) {
        return Err(format!(
            "another file of containerd's config sets this sandboxer or its shim in runtime \
             handler {name:?}: remove it there"
        ));
    }
    let Some(before) = before else { return Ok(()) };
    plan::unchanged(before, &after, &removal.handlers, false, config)
}

/// The pods that prevent the removal.
#[derive(Debug, Default, PartialEq)]
pub(super) struct BlockingPods {
    pub(super) pods: Pods,
    /// The runtime handlers that they need, as far as CRI says so.
    handlers: Vec<String>,
    /// The handlers among them that others defined, in files that containerd's config no longer
    /// has.
    of_others: Vec<String>,
    /// Why CRI, which may know others, does not list them.
    pub(super) unknown: Option<String>,
}

impl BlockingPods {
    /// Finds the sandboxes of the daemon, and the pods that CRI knows, such as those that a reboot
    /// has ended.
    ///
    /// # Errors
    /// The records of a daemon that does not answer cannot be read.
    pub(super) async fn find(
        subject: &Subject,
        removal: &Removal,
        has_time: bool,
    ) -> Result<Self, StepError> {
        let config = &subject.config;
        let ours = match removal.modes == [Mode::ShimOnly] {
            true => Pods::new(),
            false => pods::of_daemon(config).await?,
        };
        let mut found = Self { pods: ours.clone(), ..Self::default() };
        if let Err(step) = found.add_pods_of_cri(config, removal, &ours).await {
            // A containerd that starts lists them later. A stopped one cannot, and the
            // removal may be what lets it start; it may also be between two starts, if there is
            // time to wait.
            let runs = NodeContainerd::find(subject).pid.is_some();
            found.unknown = (runs || has_time).then(|| step.to_string());
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

    fn is_empty(&self) -> bool {
        self.pods.is_empty() && self.unknown.is_none()
    }

    /// The reason to roll back the changes; `None`: there are no pods. `when` says when the pods
    /// started, and what to do.
    fn reason(&self, when: &str) -> Option<String> {
        match &self.unknown {
            Some(reason) if self.pods.is_empty() => Some(format!(
                "CRI does not list the pods, so it is unknown whether one needs the handler: \
                 {reason}. Run `disable` again when CRI answers"
            )),
            _ if self.pods.is_empty() => None,
            _ => Some(format!("{} started {when}", pods::shown(&self.pods))),
        }
    }

    /// Why the pods prevent the removal, and what to do.
    fn refusal(&self, removal: &Removal) -> String {
        if let (true, Some(reason)) = (self.pods.is_empty(), &self.unknown) {
            return format!(
                "containerd runs, but CRI does not list the pods that need the handler: {reason}. \
                 Run the command again when CRI answers, or use --wait. If CRI never answers, stop \
                 containerd, run `disable` without --restart, and start containerd"
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
             them, or use --wait",
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

/// Returns when no pod needs the handlers; whether it has waited.
async fn wait_for_pods(
    wanted: &Disablement,
    removal: &Removal,
    say: Say<'_>,
) -> Result<bool, EnableError> {
    let mut last = BlockingPods::default();
    loop {
        let left = BlockingPods::find(&wanted.change.subject, removal, wanted.wait).await?;
        if left.is_empty() {
            return Ok(!last.is_empty());
        }
        if !wanted.wait {
            return refuse(left.refusal(removal));
        }
        if let (true, Some((fact, command))) = (last.is_empty(), removal.default_handler()) {
            // That command needs the lock which this one holds.
            say(format!(
                "{fact}: new pods use it, so this command may wait indefinitely. Interrupt it, run \
                 {command}, then run `disable` again"
            ));
        }
        if let (None, Some(reason)) = (&last.unknown, &left.unknown) {
            say(format!(
                "waiting for CRI, which lists the pods: {reason}. If containerd does not start, \
                 interrupt this command, and run `disable` without --wait and --restart"
            ));
        }
        if left.pods != last.pods && !left.pods.is_empty() {
            say(format!("waiting for {}", pods::shown(&left.pods)));
        }
        last = left;
        tokio::time::sleep(INTERVAL).await;
    }
}

/// Restarts containerd if it still has the handlers: not for what others have written.
async fn unload(
    wanted: &Disablement,
    node: &NodeState,
    removal: &Removal,
    say: Say<'_>,
) -> Result<(), EnableError> {
    let (subject, changes) = (&wanted.change.subject, &removal.changes);
    let cri = CriClient::new(&subject.config.containerd_address);
    let known = loaded_handlers(&cri).await.unwrap_or_default();
    let lost = removal.lost();
    let has_unread = node.containerd.has_unread_files();
    let is_loaded = lost.iter().any(|handler| known.contains(handler))
        || removal.changes_containerd()
        // A containerd that does not say which handlers it has may have them.
        || removal.stale.is_none() && has_unread;
    if !is_loaded {
        let may_need_pause = has_unread || node.containerd.file_of_running().is_some();
        if !may_need_pause {
            remove_pause(&node.containerd, &cri, say).await;
        }
        return Ok(());
    }
    let Some(restart) = wanted.change.restart() else {
        say(restart_yourself(&node.containerd));
        return Ok(());
    };
    if !removal.changes_containerd() {
        // With changes this was checked before they were made.
        node.only_own_changes(&removal.drop_ins(node))?;
    }
    let without = |known: &[String]| !lost.iter().any(|one| known.contains(one));
    if let Err(reason) = restart.load(changes, without).await {
        return Err(restart.after_rollback(changes, &reason).await);
    }
    if let Some(reason) = late_pods(wanted, removal).await {
        if changes.is_empty() {
            // No file gives the handler back.
            return refuse(format!(
                "{reason}. containerd no longer has the runtime handler: to add it for such pods, \
                 run `pause-sandboxer enable --restart` with the options that it had"
            ));
        }
        return Err(restart.after_rollback(changes, &reason).await);
    }
    say("restarted containerd: it no longer has the runtime handler".to_owned());
    remove_pause(&node.containerd, &cri, say).await;
    Ok(())
}

/// The pods that came before the restart, by which containerd has lost the handler that they need.
async fn late_pods(wanted: &Disablement, removal: &Removal) -> Option<String> {
    if !removal.changes_containerd() && !removal.has_stale() {
        // containerd no longer had the handler.
        return None;
    }
    match BlockingPods::find(&wanted.change.subject, removal, wanted.wait).await {
        Ok(left) => left.reason("before the restart"),
        Err(step) => Some(step.to_string()),
    }
}

/// Removes the image that `enable --offline` has imported, also if a later `enable` has undone the
/// option, unless another file of containerd's config names it. The handler is removed: an image
/// that stays is no failure.
async fn remove_pause(containerd: &NodeContainerd, cri: &CriClient, say: Say<'_>) {
    const IMAGE: &str = oci_image::NAME;
    let is_named = |merged: Table| merged.to_string().contains(IMAGE);
    // An image that was imported by hand is not pinned.
    let is_imported = matches!(cri.image(IMAGE).await, Ok(Some(true)));
    if !is_imported || containerd.dump().await.map_or(true, is_named) {
        return;
    }
    match cri.remove_image(IMAGE).await {
        Ok(_) => say(format!("removed image {IMAGE}")),
        Err(step) => {
            say(format!("image {IMAGE} stays: {step}. To remove it, run `crictl rmi {IMAGE}`"));
        }
    }
}
