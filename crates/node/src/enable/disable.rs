//! `pause-sandboxer disable`.

use std::collections::BTreeSet;

use base::config::{Config, adopted_file};
use containerd_api::cri::CriClient;
use toml::{Table, Value};

use super::changes::{Changes, FileChange};
use super::drop_in::{self, DropIn, default_of};
use super::main_config::BACKUP;
use super::node_state::{NodeState, loaded_handlers};
use super::{EnableError, Mode, NO_CHANGES, NodeChange, Say};
use super::{ordering, plan, pods, refuse, refuse_restart, restart, restart_yourself};
use crate::check::containerd as merged_config;
use crate::check::containerd::{NodeContainerd, enabled};
use crate::oci_image;

mod blocking_pods;

pub(super) use blocking_pods::BlockingPods;

/// The task of `disable`.
#[derive(Clone, Debug)]
pub struct Disablement {
    /// The node, and how it is changed.
    pub change: NodeChange,
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
    /// The other handlers of these kinds, which stay.
    kept: Vec<String>,
    /// Whether a handler of this sandboxer stays.
    keeps_sandboxer: bool,
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
        let known = node.merged.as_ref().map(|merged| merged_config::all(merged, config));
        let all_of = |mode| {
            let named = known.iter().flat_map(|known| known.of(mode).to_vec());
            node.drop_in(mode).handlers().into_iter().chain(named).collect::<BTreeSet<String>>()
        };
        let mut all = all_of(Mode::Sandboxer);
        let keeps_sandboxer = !all.iter().all(is_wanted);
        all.extend(all_of(Mode::ShimOnly));
        let (handlers, kept) = all.into_iter().partition(is_wanted);
        let mut stale = node.stale(config);
        stale.iter_mut().for_each(|stale| stale.retain(is_wanted));
        let mut texts = drop_ins.iter().filter_map(|drop_in| drop_in.text.as_deref());
        let text = texts.find(|text| default_of(text).is_some()).unwrap_or_default();
        let options = enabled::options(text).unwrap_or_default();
        let (default, only) = (default_of(text), only.cloned());
        Ok(Self {
            changes,
            modes,
            only,
            own,
            handlers,
            kept,
            keeps_sandboxer,
            stale,
            default,
            options,
        })
    }

    /// Fails if there is no handler of the name that alone is to be removed.
    ///
    /// # Errors
    /// The handlers that there are.
    fn has_named(&self, node: &NodeState) -> Result<(), EnableError> {
        let Some(only) = &self.only else { return Ok(()) };
        if !self.lost().is_empty() {
            return Ok(());
        }
        refuse(format!(
            "containerd's config {} has no runtime handler {only:?} of this sandboxer or its shim; \
             it has {:?}",
            node.containerd.file.display(),
            self.kept
        ))
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
    let config = &change.subject.config;
    let (_lock, node) = change.begin(false).await?;
    // A config that containerd does not load is no obstacle: this may be what corrects it.
    let removal = Removal::new(&node, &change, wanted.handler.as_ref())?;
    removal.has_named(&node)?;
    if change.dry_run {
        say(removal.shown(&node));
        return Ok(());
    }
    if change.restart.is_some()
        && removal.keeps_sandboxer
        && let Err(reason) = pods::answering_daemon(config).await
    {
        return refuse_restart(&reason);
    }
    if change.restart.is_some() && removal.changes_containerd() {
        node.only_own_changes(&removal.drop_ins(&node))?;
    }
    if !removal.is_done() || removal.may_be_loaded(&node) {
        let left = BlockingPods::find(&change.subject, &removal).await?;
        if !left.is_empty() {
            return refuse(left.refusal(&removal, &node.containerd.file));
        }
    }
    if removal.is_done() {
        let file = node.containerd.file.display();
        say(format!("containerd's config {file} does not name this sandboxer"));
    } else {
        apply(&change, &node, &removal).await?;
    }
    removal.changes.paths().for_each(|path| say(format!("removed or restored {}", path.display())));
    if removal.own > 0 {
        restart::reload_units(change.within, say).await;
    }
    unload(&change, &node, &removal, say).await?;
    ordering::remove_directories();
    Ok(())
}

/// Changes the files, unless containerd's config is wrong with the changes or a pod has come.
///
/// # Errors
/// All changes are rolled back, unless the error says that one is not.
async fn apply(
    change: &NodeChange,
    node: &NodeState,
    removal: &Removal,
) -> Result<(), EnableError> {
    removal.changes.apply()?;
    if let Err(reason) = verify(node, removal, &change.subject.config).await {
        return Err(removal.changes.roll_back(&reason));
    }
    // A pod may have arrived meanwhile.
    match BlockingPods::find(&change.subject, removal).await {
        Ok(left) => left
            .reason("during the removal: remove them")
            .map_or(Ok(()), |reason| Err(removal.changes.roll_back(&reason))),
        Err(step) => Err(removal.changes.roll_back(&step.to_string())),
    }
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
    plan::unchanged(before, &after, &removal.handlers, None, config)
}

/// Restarts containerd if it still has the handlers: not for what others have written.
async fn unload(
    change: &NodeChange,
    node: &NodeState,
    removal: &Removal,
    say: Say<'_>,
) -> Result<(), EnableError> {
    let changes = &removal.changes;
    let cri = CriClient::new(&change.subject.config.containerd_address);
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
    let Some(restart) = change.restart(&node.containerd.unit) else {
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
    if let Some(reason) = late_pods(change, removal).await {
        if changes.is_empty() {
            // No file gives the handler back.
            return refuse(format!(
                "{reason}. containerd no longer has the runtime handler: to add it for such pods, \
                 run `pause-sandboxer enable --restart` with the options that it had"
            ));
        }
        return Err(restart.after_rollback(changes, &reason).await);
    }
    say(match lost.join(", ") {
        lost if lost.is_empty() => "restarted containerd".to_owned(),
        lost => format!("restarted containerd: it no longer has runtime handler {lost}"),
    });
    remove_pause(&node.containerd, &cri, say).await;
    Ok(())
}

/// The pods that came before the restart, by which containerd has lost the handler that they need.
async fn late_pods(change: &NodeChange, removal: &Removal) -> Option<String> {
    if !removal.changes_containerd() && !removal.has_stale() {
        // containerd no longer had the handler.
        return None;
    }
    match BlockingPods::find(&change.subject, removal).await {
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
