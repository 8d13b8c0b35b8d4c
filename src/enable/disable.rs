//! `pause-sandboxer disable`.

use std::time::Duration;

use toml::Table;

use super::changes::{Changes, FileChange, FileState};
use super::main_config::{BACKUP, MainConfig};
use super::restart::{self, RestartBy};
use super::{
    EnableError, begin, drop_in, plan, pods, refuse, restarted_back, runtime, shown, taken_back,
};
use crate::check::Subject;
use crate::check::containerd as merged_config;
use crate::check::containerd::NodeContainerd;
use crate::containerd::cri::CriClient;
use crate::error::StepError;
use crate::oci_image;

/// Between two looks at the pods.
const INTERVAL: Duration = Duration::from_secs(1);

/// What `disable` is to do.
#[derive(Clone, Debug)]
pub struct Disablement {
    /// The node.
    pub subject: Subject,
    /// Show the changes only.
    pub dry_run: bool,
    /// Wait until no pod needs the handler.
    pub wait: bool,
    /// Restart containerd, by this.
    pub restart: Option<RestartBy>,
    /// How long the restart may take, until CRI answers.
    pub within: Duration,
}

/// The drop-in and what is to happen to it.
struct Removal {
    changes: Changes,
    /// The runtime handlers that it defines.
    handlers: Vec<String>,
    /// Whether it names the pause image of the binary.
    offline: bool,
}

/// Removes what `enable` has added. `say` gets a line for each thing done.
///
/// # Errors
/// Pods need the handler, or another file does; or a step failed. Nothing has changed then, unless
/// the error says so.
pub fn disable(wanted: &Disablement, say: &mut dyn FnMut(String)) -> Result<(), EnableError> {
    let subject = &wanted.subject;
    let (node, main, _lock) = begin(subject, wanted.restart.as_ref(), wanted.dry_run)?;
    // A config that containerd does not load is no obstacle: this may be what corrects it.
    let mut before = node.dump().ok();
    let mut removal = find_removal(&main, before.as_ref(), subject)?;
    if wanted.dry_run {
        say(shown(&removal.changes));
        return Ok(());
    }
    if removal.changes.is_empty() && removal.handlers.is_empty() {
        say("containerd's config does not name this sandboxer".to_owned());
        return unload(wanted, &node, &removal, say);
    }
    loop {
        if wait_for_pods(wanted, &removal.handlers, say)? {
            // It may have been days: what others have written since stays.
            before = node.dump().ok();
            removal = find_removal(&MainConfig::read(&node.file)?, before.as_ref(), subject)?;
        }
        removal.changes.apply()?;
        if let Err(reason) = verify(&node, before.as_ref(), &removal, subject) {
            return Err(taken_back(&removal.changes, reason));
        }
        // One may have come since.
        let left = in_the_way(subject, &removal.handlers)?;
        if left.is_empty() {
            break;
        }
        removal.changes.undo()?;
        if !wanted.wait {
            return refuse(format!(
                "{} started during the removal, so the files are as before: remove them, or use \
                 --wait",
                pods::shown(&left)
            ));
        }
    }
    removal.changes.paths().for_each(|path| say(format!("removed or restored {}", path.display())));
    unload(wanted, &node, &removal, say)
}

fn find_removal(
    main: &MainConfig,
    before: Option<&Table>,
    subject: &Subject,
) -> Result<Removal, EnableError> {
    let path = main.drop_in();
    let mut changes = Changes::default();
    // containerd's own file first: without the import the drop-in has no effect.
    main.no_import(&path, &mut changes)?;
    let text = FileState::read(&path)?;
    let text = text.map(|state| String::from_utf8_lossy(&state.bytes).into_owned());
    let mut handlers = text.as_deref().map(drop_in::handlers_of).unwrap_or_default();
    let offline = text.as_deref().is_some_and(|text| text.contains(oci_image::NAME));
    if let Some(text) = text {
        if !drop_in::is_ours(&text) {
            let backup = path.with_added_extension(BACKUP);
            changes.add(FileChange::new(backup, Some(text.into_bytes()))?);
        }
        changes.add(FileChange::new(path, None)?);
    }
    let merged = before.map(|before| merged_config::ours(before, &subject.config));
    handlers.extend(merged.into_iter().flatten().map(|(name, _)| name));
    handlers.sort();
    handlers.dedup();
    Ok(Removal { changes, handlers, offline })
}

/// Fails unless containerd's merged config has all other handlers, and none of this sandboxer.
fn verify(
    node: &NodeContainerd,
    before: Option<&Table>,
    removal: &Removal,
    subject: &Subject,
) -> Result<(), String> {
    let after = node.dump()?;
    let left = merged_config::all(&after, &subject.config);
    if removal.handlers.contains(&left.default) && !left.all.contains_key(&left.default) {
        return Err(format!(
            "another file makes {:?} the default handler, without which containerd does not serve \
             CRI: remove default_runtime_name from it",
            left.default
        ));
    }
    if let Some(name) = left.ours.first() {
        return Err(format!(
            "another file of containerd's config names this sandboxer in runtime handler {name:?}: \
             remove it there"
        ));
    }
    let own = removal.handlers.first().map(String::as_str).unwrap_or_default();
    let Some(before) = before.filter(|_| removal.handlers.len() == 1) else { return Ok(()) };
    plan::unchanged(before, &after, own, false, &subject.config)
}

fn in_the_way(subject: &Subject, handlers: &[String]) -> Result<pods::Pods, StepError> {
    let config = &subject.config;
    let mut all = pods::of_daemon(config)?;
    let of_cri = runtime()?.block_on(async {
        let cri = CriClient::new(&config.containerd_address);
        // A containerd that does not run cannot say which; the daemon or its records can.
        match cri.status().await {
            Ok(_) => pods::of_cri(&cri, handlers).await,
            Err(_) => Ok(pods::Pods::new()),
        }
    })?;
    all.extend(of_cri);
    Ok(all)
}

/// Fails if a pod came before the restart, by which containerd has lost the handler that it needs.
fn still_unused(removal: &Removal, subject: &Subject) -> Result<(), String> {
    if removal.changes.is_empty() {
        // No file would give the handler back.
        return Ok(());
    }
    let left = in_the_way(subject, &removal.handlers).map_err(|step| step.to_string())?;
    if left.is_empty() {
        return Ok(());
    }
    Err(format!("{} started before the restart", pods::shown(&left)))
}

/// Returns when no pod needs the handlers; whether it has waited.
fn wait_for_pods(
    wanted: &Disablement,
    handlers: &[String],
    say: &mut dyn FnMut(String),
) -> Result<bool, EnableError> {
    let mut last = pods::Pods::new();
    loop {
        let left = in_the_way(&wanted.subject, handlers)?;
        if left.is_empty() {
            return Ok(!last.is_empty());
        }
        let shown = pods::shown(&left);
        if !wanted.wait {
            return refuse(format!(
                "{shown}: they need the runtime handler {}, and without it they can neither be \
                 stopped nor removed. Remove them, or wait for their end by --wait. If it is the \
                 default handler, `pause-sandboxer enable --restart` makes it no longer so",
                handlers.join(", ")
            ));
        }
        if left != last {
            say(format!("waiting for {shown}"));
        }
        last = left;
        std::thread::sleep(INTERVAL);
    }
}

/// Restarts containerd if it has the handlers still.
fn unload(
    wanted: &Disablement,
    node: &NodeContainerd,
    removal: &Removal,
    say: &mut dyn FnMut(String),
) -> Result<(), EnableError> {
    let subject = &wanted.subject;
    let cri = CriClient::new(&subject.config.containerd_address);
    let known = runtime()?.block_on(restart::handlers(&cri)).unwrap_or_default();
    let is_loaded = removal.handlers.iter().any(|handler| known.contains(handler))
        || !removal.changes.is_empty()
        || node.has_unread_files();
    if !is_loaded {
        return Ok(());
    }
    let Some(by) = &wanted.restart else {
        let command = RestartBy::Systemd.command(&node.unit);
        say(format!(
            "containerd reads the files when it is restarted; pods keep running: {command}"
        ));
        return Ok(());
    };
    let without = |known: &[String]| !removal.handlers.iter().any(|one| known.contains(one));
    let restarted = restart::restart(by, subject, wanted.within, without);
    if let Err(reason) = runtime()?.block_on(restarted) {
        return Err(restarted_back(&removal.changes, reason, by, subject, wanted.within));
    }
    if let Err(reason) = still_unused(removal, subject) {
        return Err(restarted_back(&removal.changes, reason, by, subject, wanted.within));
    }
    say("restarted containerd: it does not have the runtime handler".to_owned());
    if removal.offline {
        runtime()?.block_on(cri.remove_image(oci_image::NAME))?;
        say(format!("removed image {}", oci_image::NAME));
    }
    Ok(())
}
