//! `pause-sandboxer enable` and `disable`: add this sandboxer to containerd's config and remove it.
//!
//! Each reads the node once, including the config that containerd itself makes of its files,
//! decides what to write, writes it, and compares what containerd makes of it then. A failed change
//! is rolled back. All files are replaced as a whole, in an order in which each state between two
//! of them is valid: the drop-in before its import. A command that is killed is completed by
//! `enable`, or undone by `disable`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use base::config;
use base::error::{IoContext as _, StepError, StepErrors};
use containerd_api::GrpcEndpoint;
use containerd_api::cri::CriClient;
use containerd_api::images::{self, PINNED};

use crate::check::Subject;
pub use crate::check::containerd::Mode;
use crate::check::containerd::{
    NodeContainerd, all, disabled, enabled, find, same_file, shim_only,
};
use crate::oci_image;
use crate::trust::check_trusted;

mod changes;
mod disable;
mod drop_in;
mod lock;
mod main_config;
mod need;
mod node_state;
mod ordering;
mod plan;
mod pods;
mod restart;
mod settings;
mod toml_text;

use changes::{Changes, FileChange};
pub use disable::{Disablement, disable};
use lock::ConfigLock;
use main_config::BACKUP;
pub use need::{Need, need};
use node_state::{NodeState, directory_of};
use plan::HandlerPlan;
use restart::Restart;
pub use restart::RestartBy;
use settings::OwnSettings;

/// The line of a command that changes no file.
const NO_CHANGES: &str = "no file needs a change";

/// Takes each line that a command prints.
pub type Say<'a> = &'a mut dyn FnMut(String);

/// Why a command failed. Nothing has changed, unless the text says so.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct EnableError(String);

impl EnableError {
    /// The error for a failure, `reason`, whose file changes were rolled back with this result.
    fn rolled_back(reason: &str, undone: &Result<(), StepErrors>) -> Self {
        Self(match undone {
            Ok(()) => format!("{reason}; all file changes are rolled back"),
            Err(steps) => format!("{reason}; rolling back the files failed too: {steps}"),
        })
    }

    /// Appends the state of a service after the rollback.
    fn and(self, more: &str) -> Self {
        Self(self.0 + more)
    }
}

impl From<String> for EnableError {
    fn from(reason: String) -> Self {
        Self(reason)
    }
}

impl From<StepError> for EnableError {
    fn from(step: StepError) -> Self {
        Self(step.to_string())
    }
}

fn refuse<T>(reason: impl Into<String>) -> Result<T, EnableError> {
    Err(EnableError(reason.into()))
}

/// Refuses to restart containerd while no daemon answers, for which `reason` says why.
fn refuse_restart<T>(reason: &str) -> Result<T, EnableError> {
    refuse(format!(
        "{reason}; without the daemon no pod of this sandboxer starts, and a containerd that \
         starts without it reports pods that it has as NotReady"
    ))
}

/// How a command changes the node.
#[derive(Clone, Debug)]
pub struct NodeChange {
    /// The node.
    pub subject: Subject,
    /// The sandboxer's config file.
    pub settings: PathBuf,
    /// containerd's socket; `None`: that of the settings, or of the one containerd that runs.
    pub containerd_address: Option<PathBuf>,
    /// Show the changes only.
    pub dry_run: bool,
    /// How to restart containerd; `None`: no restart.
    pub restart: Option<RestartBy>,
    /// Timeout of the restart, until CRI responds.
    pub within: Duration,
}

impl NodeChange {
    /// The restart of containerd, which is that of `unit`.
    fn restart<'a>(&'a self, unit: &'a str) -> Option<Restart<'a>> {
        let by = self.restart.as_ref()?;
        Some(Restart { by, unit, subject: &self.subject, within: self.within })
    }

    /// The change of the containerd that the option, the settings `config`, or else the node itself
    /// names.
    ///
    /// # Errors
    /// The caller is not root, or several containerds run.
    fn located(&self, config: &config::Config) -> Result<Self, EnableError> {
        must_be_root()?;
        let found = match &self.containerd_address {
            Some(address) => Some(address.clone()),
            None => find::address(config, &self.subject)?,
        };
        let mut located = self.clone();
        let address = &mut located.subject.config.containerd_address;
        *address = found.unwrap_or_else(|| address.clone());
        Ok(located)
    }

    /// The first steps of both commands after [`NodeChange::located`]: checks for a containerd,
    /// locks the directory of its config, and reads the node. `must_run`: the config file of a
    /// containerd that does not run must be named, as that of one at another address than the
    /// default.
    async fn begin(&self, must_run: bool) -> Result<(Option<ConfigLock>, NodeState), EnableError> {
        self.restart.as_ref().map_or(Ok(()), RestartBy::check)?;
        let containerd = NodeContainerd::find(&self.subject);
        let must_restart = self.restart.is_some() && !self.dry_run;
        self.check_config_file(&containerd, must_run || must_restart)?;
        containerd.release().await?;
        // The lock is only for root where only root makes files.
        check_trusted(&containerd.file)?;
        // A dry run makes no file.
        let home = directory_of(&containerd.file);
        let lock = if self.dry_run { None } else { Some(ConfigLock::take(home)?) };
        let node = NodeState::read(&self.subject).await?;
        if must_restart {
            node.is_of_running()?;
        }
        Ok((lock, node))
    }

    /// Fails if it is unknown which config file containerd uses, or if the named one does not exist
    /// and is not that file.
    fn check_config_file(&self, found: &NodeContainerd, must_run: bool) -> Result<(), EnableError> {
        let Some(named) = &self.subject.containerd_config else {
            let address = &self.subject.config.containerd_address;
            // One at another address, as that of k3s, has its config file elsewhere too.
            let default = config::Config::default().containerd_address;
            let is_elsewhere = !same_file(address, &default);
            if found.pid.is_some() || !(must_run || is_elsewhere) {
                return Ok(());
            }
            let settings = self.settings.display();
            let mut reason = format!(
                "no containerd listens at {}, so its config file is unknown: start containerd \
                 first, or set containerd_address in {settings}, or use --containerd-address \
                 ADDRESS or --containerd-config FILE. Known addresses: {}",
                address.display(),
                find::known()
            );
            if is_elsewhere {
                let adopted = config::adopted_file(&self.settings);
                reason += &format!(
                    ". If it has been uninstalled, delete {}, or containerd_address in {settings}",
                    adopted.display()
                );
            }
            return refuse(reason);
        };
        let is_used = found.pid.is_some() && found.file_of_running().is_none();
        if is_used || named.exists() {
            return Ok(());
        }
        refuse(format!(
            "--containerd-config: {} does not exist, and no running containerd uses it: correct \
             the path, or create the file",
            named.display()
        ))
    }
}

fn must_be_root() -> Result<(), EnableError> {
    if nix::unistd::geteuid().is_root() { Ok(()) } else { refuse("must run as root") }
}

/// The line for files that containerd has to read, where this command does not restart it.
fn restart_yourself(containerd: &NodeContainerd) -> String {
    format!(
        "restart containerd to load the files: {} (pods keep running; the daemon of pods of this \
         sandboxer must respond meanwhile)",
        RestartBy::Systemd.command(&containerd.unit)
    )
}

/// The state that `enable` establishes. It is complete: options of earlier commands do not count.
#[derive(Clone, Debug)]
pub struct Enablement {
    /// The node, and how it is changed.
    pub change: NodeChange,
    /// The executable of the image that `offline` imports.
    pub pause_program: &'static [u8],
    /// Who makes the pods of the handler.
    pub mode: Mode,
    /// The runtime handler.
    pub handler: String,
    /// The handler whose settings are copied; `None`: the default handler, or runc.
    pub options_of: Option<String>,
    /// Make it the default handler.
    pub default: bool,
    /// Import the pause image of the binary, and let containerd use it.
    pub offline: bool,
}

impl Enablement {
    /// The options that a repetition of the command needs.
    fn options(&self) -> Vec<String> {
        let mut options = Vec::new();
        options.extend((self.mode == Mode::ShimOnly).then(|| enabled::SHIM_ONLY.to_owned()));
        options.extend(self.default.then(|| enabled::DEFAULT.to_owned()));
        options.extend(self.offline.then(|| "--offline".to_owned()));
        options.extend(
            (self.handler != self.mode.handler()).then(|| format!("--handler {}", self.handler)),
        );
        options.extend(self.options_of.iter().map(|base| format!("--options-of {base}")));
        let address = self.change.containerd_address.iter();
        options.extend(address.map(|path| format!("--containerd-address {}", path.display())));
        options
    }
}

/// The changes that `enable` makes, decided from the node's state.
struct EnablePlan {
    handler: HandlerPlan,
    changes: Changes,
    /// The number of changes of files that containerd does not read, which are first.
    own: usize,
    /// Whether the sandboxer's settings change.
    adopted: bool,
    /// Whether the order of the units changes.
    ordered: bool,
    /// The handlers that containerd loses.
    lost: Vec<String>,
    /// Lines that the operator should see before the changes.
    notes: Vec<String>,
}

impl EnablePlan {
    fn new(wanted: &Enablement, node: &NodeState) -> Result<Self, EnableError> {
        let (drop_in, is_sandboxers) = (node.drop_in(wanted.mode), wanted.mode == Mode::Sandboxer);
        let (path, old) = (&drop_in.path, drop_in.text.as_deref());
        node.containerd.has_imports(&[path])?;
        drop_in.has_only(&wanted.handler)?;
        let merged = node.merged.clone()?;
        if let Some(finding) = disabled(&merged, &node.containerd) {
            return refuse(format!("containerd: {}: {}", finding.fact, finding.advice));
        }
        let handler = HandlerPlan::new(wanted, merged, old)?;
        let mut changes = Changes::default();
        if is_sandboxers {
            adopt_settings(wanted, node, &handler, &mut changes)?;
        }
        let adopted = !changes.is_empty();
        // Without its process, the unit is unknown.
        let ordered = is_sandboxers
            && node.containerd.pid.is_some()
            && ordering::order(Some(&node.containerd.unit), &mut changes)?;
        let own = changes.len();
        if let Some(other) = drop_in.state.as_ref().filter(|_| !drop_in.is_ours()) {
            changes.add(FileChange::copy(path.with_added_extension(BACKUP), other)?);
        }
        changes.directory(directory_of(path));
        let text = handler.drop_in(wanted, node.main.version_of_drop_in())?;
        changes.add(FileChange::new(path.clone(), Some(text.into_bytes()))?);
        let address = &wanted.change.subject.config.containerd_address;
        let generated = find::generated(address, &node.containerd.file, &node.containerd.unit);
        node.main.import(path, handler.new_file_version(), generated, &mut changes)?;
        let undone = old.map(|old| drop_in::undone(old, &wanted.options()));
        let notes = undone.into_iter().flatten().chain(node.main.managed(path)).collect();
        let mut lost = drop_in.handlers();
        if wanted.change.restart.is_some() {
            lost.extend(node.stale(&wanted.change.subject.config).unwrap_or_default());
        }
        lost.retain(|name| *name != wanted.handler);
        Ok(Self { handler, changes, own, adopted, ordered, lost, notes })
    }
}

/// Adds the sandboxer to containerd's config. `say` gets a line for each thing done.
///
/// # Errors
/// Nothing has changed, unless the error says so.
pub async fn enable(wanted: &Enablement, say: Say<'_>) -> Result<(), EnableError> {
    // What an earlier command has found may have changed since.
    let own = OwnSettings::read(&wanted.change.settings, &wanted.change.subject.config.socket)?;
    let wanted = &Enablement { change: wanted.change.located(&own.config)?, ..wanted.clone() };
    let (change, config) = (&wanted.change, &wanted.change.subject.config);
    let (_lock, node) = change.begin(true).await?;
    let plan = EnablePlan::new(wanted, &node)?;
    let drop_in = node.drop_in(wanted.mode);
    pods::keep_handlers_in_use(config, &plan.lost, &drop_in.handlers()).await?;
    if let Some(shim) = &plan.handler.shim {
        let version = shim_only::version(shim.as_ref()).await;
        version.map_err(|reason| {
            format!(
                "{reason}; install the package again: the shim must be beside this program, and \
                 only root may write it"
            )
        })?;
    }
    plan.notes.iter().cloned().for_each(&mut *say);
    let changes = &plan.changes;
    if change.dry_run {
        let diff = changes.diff();
        say(if diff.is_empty() { NO_CHANGES } else { diff.trim_end() }.to_owned());
        return Ok(());
    }
    let own = Some(drop_in).filter(|drop_in| drop_in.is_ours());
    let (has_unread, edited) = node.unread(own.as_slice())?;
    // containerd does not read the sandboxer's settings.
    let is_loaded = changes.len() == plan.own
        && !has_unread
        && node.loaded.as_ref().is_some_and(|loaded| loaded.contains(&wanted.handler));
    let needs_daemon =
        wanted.mode == Mode::Sandboxer || !all(&plan.handler.before, config).ours.is_empty();
    let answers = if needs_daemon { pods::answering_daemon(config).await } else { Ok(()) };
    let without_daemon = answers.err();
    if let (Some(reason), true) = (&without_daemon, change.restart.is_some()) {
        return refuse_restart(reason);
    }
    if change.restart.is_some() && !is_loaded {
        node.no_edits(&edited)?;
    }
    if wanted.offline {
        import_pause(wanted, say).await?;
    }
    changes.apply()?;
    let checked = node.containerd.dump().await;
    if let Err(reason) = checked.and_then(|after| plan.handler.verify(wanted, &after)) {
        return Err(changes.roll_back(&reason));
    }
    changes.paths().for_each(|path| say(format!("wrote {}", path.display())));
    if changes.is_empty() {
        say(NO_CHANGES.to_owned());
    }
    if plan.ordered {
        restart::reload_units(change.within, say).await;
    }
    let has_adopted = plan.adopted && restart::restart_daemon(change, changes, say).await?;
    if let Some(reason) = without_daemon {
        say(format!("{reason}; pods of this sandboxer need the daemon"));
    }
    if is_loaded {
        say(format!("containerd has loaded runtime handler {}", wanted.handler));
        return Ok(());
    }
    match load(wanted, &node, &plan, say).await {
        Err(error) if has_adopted => {
            Err(restart::daemon_after_rollback(error, change.within).await)
        }
        done => done,
    }
}

/// Adds the change of the sandboxer's settings that must equal containerd's.
fn adopt_settings(
    wanted: &Enablement,
    node: &NodeState,
    handler: &HandlerPlan,
    changes: &mut Changes,
) -> Result<(), EnableError> {
    let (change, config) = (&wanted.change, &wanted.change.subject.config);
    let path = config::adopted_file(&change.settings);
    // The options of a containerd that does not run are unknown: what its process has shown stays.
    if node.containerd.pid.is_none() && path.exists() {
        return Ok(());
    }
    let own = OwnSettings::read(&change.settings, &config.socket)?;
    let text = own.adopted(&config.containerd_address, &handler.before, &handler.settings)?;
    if text.is_some() {
        check_trusted(&path)?;
        changes.directory(directory_of(&path));
    }
    let adopted = FileChange::new(path, text.map(String::into_bytes))?;
    // An adopted value may be secret, such as a variable of shims.
    changes.add(node.main.keep_private(adopted));
    Ok(())
}

async fn import_pause(wanted: &Enablement, say: Say<'_>) -> Result<(), EnableError> {
    let config = &wanted.change.subject.config;
    let cri = CriClient::new(&config.containerd_address);
    if matches!(cri.image(oci_image::NAME).await, Ok(Some(true))) {
        return Ok(());
    }
    let image = oci_image::pause(wanted.pause_program).step("make image")?;
    let endpoint = GrpcEndpoint::new(&config.containerd_address, config::CONTAINERD_NAMESPACE);
    images::import(&endpoint, &image, &[PINNED]).await?;
    say(format!("imported {}", image.name));
    Ok(())
}

/// Restarts containerd, which has to read the files.
async fn load(
    wanted: &Enablement,
    node: &NodeState,
    plan: &EnablePlan,
    say: Say<'_>,
) -> Result<(), EnableError> {
    let (changes, config) = (&plan.changes, &wanted.change.subject.config);
    let Some(restart) = wanted.change.restart(&node.containerd.unit) else {
        say(restart_yourself(&node.containerd));
        return Ok(());
    };
    // A pod may have arrived meanwhile.
    let own = node.drop_in(wanted.mode).handlers();
    let used = pods::keep_handlers_in_use(config, &plan.lost, &own).await;
    used.map_err(|reason| changes.roll_back(&reason.0))?;
    let handler = &wanted.handler;
    let Err(reason) = restart.load(changes, |loaded| loaded.contains(handler)).await else {
        say(format!("restarted containerd: it has loaded runtime handler {handler}"));
        return Ok(());
    };
    let earlier = format!(
        "; the handler was added by an earlier command: to remove it, run `pause-sandboxer disable \
         --handler {handler} --restart --containerd-config {}`",
        node.containerd.file.display()
    );
    if changes.is_empty() {
        // Another restart would be with the same files.
        return refuse(reason + &earlier);
    }
    let error = restart.after_rollback(changes, &reason).await;
    // The files as they were before this command.
    Err(if node.containerd.has_unread_files() { error.and(&earlier) } else { error })
}

/// The config file of the sandboxer: the one of the command line, or the default.
pub fn settings_file(named: Option<&Path>) -> PathBuf {
    named.unwrap_or(Path::new(config::DEFAULT_FILE)).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `enable` without options.
    pub(super) fn enablement() -> Enablement {
        Enablement {
            change: NodeChange {
                subject: Subject {
                    config: config::Config::default(),
                    containerd_config: None,
                    containerd_program: None,
                },
                settings: "/nowhere/config.toml".into(),
                containerd_address: None,
                dry_run: true,
                restart: None,
                within: Duration::from_secs(1),
            },
            pause_program: b"",
            mode: Mode::Sandboxer,
            handler: Mode::Sandboxer.handler().to_owned(),
            options_of: None,
            default: false,
            offline: false,
        }
    }

    #[test]
    fn a_failed_rollback_is_reported() {
        let undone = Err(StepErrors::from(StepError::new("write", std::io::Error::other("full"))));
        let error = EnableError::rolled_back("it fails", &undone).and("; a").and("; b");
        let text = "it fails; rolling back the files failed too: write: full; a; b";
        assert_eq!(error.to_string(), text);
    }
}
