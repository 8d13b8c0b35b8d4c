//! `pause-sandboxer disable`.

use std::path::{Path, PathBuf};
use std::slice;
use std::time::Duration;

use toml::{Table, Value};

use super::changes::{Changes, FileChange, FileState};
use super::main_config::{BACKUP, MainConfig};
use super::restart::{self, RestartBy};
use super::{
    EnableError, before_restart, begin, check_trusted, drop_in, is_of_running, loaded, plan, pods,
    refuse, removal_plan::RemovalPlan, restart_after_rollback, roll_back, runtime,
};
use crate::check::Subject;
use crate::check::containerd as merged_config;
use crate::check::containerd::{EnabledOptions, NodeContainerd};
use crate::oci_image;
use base::config::Config;
use base::error::StepError;
use containerd_api::cri::CriClient;

/// Polling interval of the pods.
const INTERVAL: Duration = Duration::from_secs(1);

/// The task of `disable`.
#[derive(Clone, Debug)]
pub struct Disablement {
    /// The node.
    pub subject: Subject,
    /// The sandboxer's config file.
    pub settings: PathBuf,
    /// Show the changes only.
    pub dry_run: bool,
    /// Show them as JSON.
    pub json: bool,
    /// Wait until no pod needs the handler.
    pub wait: bool,
    /// How to restart containerd; `None`: no restart.
    pub restart: Option<RestartBy>,
    /// Timeout of the restart, until CRI responds.
    pub within: Duration,
}

/// The drop-in and what is to happen to it.
struct Removal {
    changes: Changes,
    /// The runtime handlers that it defines.
    handlers: Vec<String>,
    /// Those that containerd has loaded, and that its files no longer have; `None` if it does not
    /// say which it has.
    stale: Option<Vec<String>>,
    /// The options of the `enable` that has written it.
    options: Option<EnabledOptions>,
}

impl Removal {
    /// The runtime handlers that containerd will not have after a restart.
    fn lost(&self) -> Vec<String> {
        self.handlers.iter().chain(self.stale.iter().flatten()).cloned().collect()
    }

    /// The result of a dry run.
    fn plan(&self, node: &NodeContainerd, main: &MainConfig) -> RemovalPlan {
        let shown = |path: &Path| path.display().to_string();
        RemovalPlan {
            containerd_config: shown(&node.file),
            drop_in: shown(&main.drop_in()),
            changes: self.changes.paths().map(shown).collect(),
            handlers: self.handlers.clone(),
            stale_handlers: self.stale.clone(),
            unread_files: node.unread_files().iter().map(|file| shown(file)).collect(),
            diff: self.changes.diff(),
        }
    }

    /// Where the handler is the node's default: that, and the command that undoes it. Until then
    /// pods that name no handler arrive.
    fn default_handler(&self) -> Option<(String, String)> {
        let options = self.options.as_ref().filter(|options| options.default)?;
        let without = EnabledOptions { default: false, ..options.clone() };
        let fact = format!("{} is the node's default handler", options.handler);
        Some((fact, format!("`{}`, which undoes that", without.command())))
    }

    /// Whether containerd may have handlers that no file gives back.
    fn has_stale(&self) -> bool {
        self.stale.as_ref().is_none_or(|stale| !stale.is_empty())
    }

    /// Whether no file needs a change.
    fn is_done(&self) -> bool {
        self.changes.is_empty() && self.handlers.is_empty()
    }

    /// Whether a containerd whose files do not name the sandboxer may have its handler.
    fn may_be_loaded(&self, node: &NodeContainerd) -> bool {
        self.has_stale() && (self.stale.is_some() || node.has_unread_files())
    }
}

/// Removes what `enable` has added. `say` gets a line for each thing done.
///
/// # Errors
/// Pods need the handler, or another file does; or a step failed. Nothing has changed then, unless
/// the error says so.
pub fn disable(wanted: &Disablement, say: &mut dyn FnMut(String)) -> Result<(), EnableError> {
    let subject = &wanted.subject;
    let (mut node, mut main, _lock) =
        begin(subject, &wanted.settings, wanted.restart.as_ref(), wanted.dry_run)?;
    let removal = loop {
        // A config that containerd does not load is no obstacle: this may be what corrects it.
        let before = node.dump().ok();
        let removal = find_removal(&main, before.as_ref(), subject)?;
        if wanted.dry_run {
            let plan = removal.plan(&node, &main);
            say(if wanted.json { plan.to_json() } else { plan.to_string() });
            return Ok(());
        }
        may_restart(wanted, &node, &main, &removal)?;
        let has_waited = (!removal.is_done() || removal.may_be_loaded(&node))
            && wait_for_pods(wanted, &removal, say)?;
        if has_waited {
            // It may have been days: what others have written since stays.
            (node, main) = found_again(&node, wanted)?;
            continue;
        }
        if removal.is_done() {
            let file = node.file.display();
            say(format!("containerd's config {file} does not name this sandboxer"));
            break removal;
        }
        removal.changes.apply()?;
        if let Err(reason) = verify(&node, &main, before.as_ref(), &removal, subject) {
            return Err(roll_back(&removal.changes, reason));
        }
        // A pod may have arrived meanwhile.
        let left = find_blocking_pods(wanted, &removal)
            .map_err(|step| roll_back(&removal.changes, step.to_string()))?;
        let when = "during the removal: remove them, or use --wait";
        let Some(reason) = left.reason(when) else { break removal };
        if !wanted.wait {
            return Err(roll_back(&removal.changes, reason));
        }
        removal.changes.undo()?;
    };
    removal.changes.paths().for_each(|path| say(format!("removed or restored {}", path.display())));
    unload(wanted, &node, &main, &removal, say)
}

/// Fails if the changes would be followed by a restart that is refused.
fn may_restart(
    wanted: &Disablement,
    node: &NodeContainerd,
    main: &MainConfig,
    removal: &Removal,
) -> Result<(), EnableError> {
    if wanted.restart.is_none() || removal.changes.is_empty() {
        return Ok(());
    }
    before_restart::only_own_changes(node, main)
}

/// The containerd of the same config file after a wait, during which it may have been upgraded or
/// restarted.
fn found_again(
    node: &NodeContainerd,
    wanted: &Disablement,
) -> Result<(NodeContainerd, MainConfig), EnableError> {
    let containerd_config = Some(node.file.clone());
    let node = NodeContainerd::find(&Subject { containerd_config, ..wanted.subject.clone() });
    if wanted.restart.is_some() {
        is_of_running(&node)?;
    }
    check_trusted(&node.file)?;
    let main = MainConfig::read(&node.file)?;
    check_trusted(&main.drop_in())?;
    Ok((node, main))
}

fn find_removal(
    main: &MainConfig,
    before: Option<&Table>,
    subject: &Subject,
) -> Result<Removal, EnableError> {
    let path = main.drop_in();
    let mut changes = Changes::default();
    // containerd's own file first: without the import the drop-in has no effect.
    main.undo_import(&path, &mut changes)?;
    let state = FileState::read(&path)?;
    let text = state.as_ref().map(|state| String::from_utf8_lossy(&state.bytes).into_owned());
    let mut handlers = text.as_deref().map(drop_in::handlers_of).unwrap_or_default();
    let options = text.as_deref().and_then(EnabledOptions::parse);
    if let Some((text, state)) = text.zip(state) {
        if !drop_in::is_ours(&text) {
            changes.add(FileChange::copy(path.with_added_extension(BACKUP), &state)?);
        }
        changes.add(FileChange::new(path, None)?);
    }
    let merged = before.map(|before| merged_config::ours(before, &subject.config));
    handlers.extend(merged.into_iter().flatten().map(|(name, _)| name));
    handlers.sort();
    handlers.dedup();
    let stale = loaded::stale(before, subject)?;
    Ok(Removal { changes, handlers, stale, options })
}

/// Fails unless containerd's merged config has all other handlers, and none of this sandboxer.
fn verify(
    node: &NodeContainerd,
    main: &MainConfig,
    before: Option<&Table>,
    removal: &Removal,
    subject: &Subject,
) -> Result<(), String> {
    let after = node.dump()?;
    // A missing import of another file is no fault of this command; one of the drop-in is.
    let drop_in = main.drop_in();
    if node.has_imports(&drop_in).is_ok() && node.has_imports(Path::new("")).is_err() {
        return Err(format!(
            "containerd's config {} imports {} by its name and does not start without it: remove \
             it from `imports`",
            node.file.display(),
            drop_in.display()
        ));
    }
    let left = merged_config::all(&after, &subject.config);
    if removal.handlers.contains(&left.default) && !left.all.contains_key(&left.default) {
        return Err(format!(
            "another file makes {:?} the default handler, without which containerd does not serve \
             CRI: remove default_runtime_name from it",
            left.default
        ));
    }
    // The drop-in, which is gone, may be what has named the sandboxer's socket.
    let proxy = before.and_then(|before| merged_config::proxy(before, &subject.config).ok());
    let named = left.all.iter().find(|(_, handler)| {
        let sandboxer = handler.get("sandboxer").and_then(Value::as_str);
        sandboxer.is_some() && sandboxer == proxy.as_deref()
    });
    if let Some(name) = named.map(|(name, _)| name).or(left.ours.first()) {
        return Err(format!(
            "another file of containerd's config sets this sandboxer in runtime handler {name:?}: \
             remove it there"
        ));
    }
    let Some(before) = before else { return Ok(()) };
    plan::unchanged(before, &after, &removal.handlers, false, &subject.config)
}

/// The pods that prevent the removal.
#[derive(Debug, Default, PartialEq)]
struct BlockingPods {
    pods: pods::Pods,
    /// The runtime handlers that they need, as far as CRI says so.
    handlers: Vec<String>,
    /// Those among them that others have defined, in files that containerd's config no longer has.
    of_others: Vec<String>,
    /// Why CRI, which may know others, does not list them.
    unknown: Option<String>,
}

impl BlockingPods {
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
}

/// The sandboxes of the daemon, and the pods that CRI knows, such as those that a reboot has ended.
fn find_blocking_pods(wanted: &Disablement, removal: &Removal) -> Result<BlockingPods, StepError> {
    let config = &wanted.subject.config;
    let ours = pods::of_daemon(config)?;
    let mut found = BlockingPods { pods: ours.clone(), ..BlockingPods::default() };
    let listed = runtime()?.block_on(add_pods_of_cri(config, removal, &ours, &mut found));
    if let Err(step) = listed {
        // A containerd that starts lists them later. One that does not run cannot, and the removal
        // may be what lets it start; it may also be between two starts, if there is time to wait.
        let runs = NodeContainerd::find(&wanted.subject).pid.is_some();
        found.unknown = (runs || wanted.wait).then(|| step.to_string());
    }
    Ok(found)
}

/// Adds the pods of CRI to those of the daemon, `ours`. A containerd without CRI has none.
async fn add_pods_of_cri(
    config: &Config,
    removal: &Removal,
    ours: &pods::Pods,
    found: &mut BlockingPods,
) -> Result<(), StepError> {
    let cri = CriClient::new(&config.containerd_address);
    if !cri.is_served().await? {
        return Ok(());
    }
    for name in removal.lost() {
        let left = pods::of_cri(&cri, slice::from_ref(&name)).await?;
        if left.is_empty() {
            continue;
        }
        if !removal.handlers.contains(&name) && !left.keys().all(|id| ours.contains_key(id)) {
            found.of_others.push(name.clone());
        }
        found.handlers.push(name);
        found.pods.extend(left);
    }
    Ok(())
}

/// Fails if a pod came before the restart, by which containerd has lost the handler that it needs.
fn still_unused(wanted: &Disablement, removal: &Removal) -> Result<(), String> {
    if removal.changes.is_empty() && !removal.has_stale() {
        // containerd no longer had the handler.
        return Ok(());
    }
    let left = find_blocking_pods(wanted, removal).map_err(|step| step.to_string())?;
    left.reason("before the restart").map_or(Ok(()), Err)
}

/// Returns when no pod needs the handlers; whether it has waited.
fn wait_for_pods(
    wanted: &Disablement,
    removal: &Removal,
    say: &mut dyn FnMut(String),
) -> Result<bool, EnableError> {
    let mut last = BlockingPods::default();
    loop {
        let left = find_blocking_pods(wanted, removal)?;
        if left.is_empty() {
            return Ok(!last.is_empty());
        }
        if !wanted.wait {
            return refuse(reason_of(&left, removal));
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
        std::thread::sleep(INTERVAL);
    }
}

/// Why the pods prevent the removal, and what to do.
fn reason_of(left: &BlockingPods, removal: &Removal) -> String {
    if let (true, Some(reason)) = (left.pods.is_empty(), &left.unknown) {
        return format!(
            "containerd runs, but CRI does not list the pods that need the handler: {reason}. Run \
             the command again when CRI answers, or use --wait. If CRI never answers, stop \
             containerd, run `disable` without --restart, and start containerd"
        );
    }
    let known = if left.handlers.is_empty() { removal.lost() } else { left.handlers.clone() };
    let handlers = match known.as_slice() {
        [] => "of this sandboxer".to_owned(),
        known => known.join(", "),
    };
    let mut reason = format!(
        "{}: they need runtime handler {handlers}, and without it they can neither be stopped nor \
         removed. Remove them, or use --wait",
        pods::shown(&left.pods)
    );
    if let Some((fact, command)) = removal.default_handler() {
        reason += &format!(". {fact}: first run {command}");
    }
    if !left.of_others.is_empty() {
        reason += &format!(
            ". containerd's config no longer has {}: restore the config file that defines it",
            left.of_others.join(", ")
        );
    }
    reason
}

/// Restarts containerd if it still has the handlers: not for what others have written.
fn unload(
    wanted: &Disablement,
    node: &NodeContainerd,
    main: &MainConfig,
    removal: &Removal,
    say: &mut dyn FnMut(String),
) -> Result<(), EnableError> {
    let subject = &wanted.subject;
    let cri = CriClient::new(&subject.config.containerd_address);
    let known = runtime()?.block_on(loaded::of_cri(&cri)).unwrap_or_default();
    let lost = removal.lost();
    let is_loaded = lost.iter().any(|handler| known.contains(handler))
        || !removal.changes.is_empty()
        // A containerd that does not say which handlers it has may have them.
        || removal.stale.is_none() && node.has_unread_files();
    if !is_loaded {
        let may_need_pause = node.has_unread_files() || node.file_of_running().is_some();
        return if may_need_pause { Ok(()) } else { remove_pause(node, &cri, say) };
    }
    let Some(by) = &wanted.restart else {
        let command = RestartBy::Systemd.command(&node.unit);
        say(format!(
            "restart containerd to load the files: {command} (pods keep running, and the daemon \
             must respond meanwhile)"
        ));
        return Ok(());
    };
    if removal.changes.is_empty() {
        // Otherwise that was so before the changes.
        before_restart::only_own_changes(node, main)?;
    }
    let without = |known: &[String]| !lost.iter().any(|one| known.contains(one));
    let restarted = restart::restart_for(&removal.changes, by, subject, wanted.within, without);
    if let Err(reason) = runtime()?.block_on(restarted) {
        return Err(restart_after_rollback(&removal.changes, reason, by, subject, wanted.within));
    }
    if let Err(reason) = still_unused(wanted, removal) {
        if removal.changes.is_empty() {
            // No file gives the handler back.
            return refuse(format!(
                "{reason}. containerd no longer has the runtime handler: to add it for such pods, \
                 run `pause-sandboxer enable --restart` with the options that it had"
            ));
        }
        return Err(restart_after_rollback(&removal.changes, reason, by, subject, wanted.within));
    }
    say("restarted containerd: it no longer has the runtime handler".to_owned());
    remove_pause(node, &cri, say)
}

/// Removes the image that `enable --offline` has imported, also if a later `enable` has undone the
/// option, unless another file of containerd's config names it.
fn remove_pause(
    node: &NodeContainerd,
    cri: &CriClient,
    say: &mut dyn FnMut(String),
) -> Result<(), EnableError> {
    let is_named = |merged: Table| merged.to_string().contains(oci_image::NAME);
    let runtime = runtime()?;
    // One that is imported by hand is not pinned.
    let is_imported = matches!(runtime.block_on(cri.image(oci_image::NAME)), Ok(Some(true)));
    if !is_imported || node.dump().map_or(true, is_named) {
        return Ok(());
    }
    // The handler is removed: an image that stays is no failure.
    match runtime.block_on(cri.remove_image(oci_image::NAME)) {
        Ok(_) => say(format!("removed image {}", oci_image::NAME)),
        Err(step) => say(format!(
            "image {0} stays: {step}. To remove it, run `crictl rmi {0}`",
            oci_image::NAME
        )),
    }
    Ok(())
}
