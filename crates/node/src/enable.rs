//! `pause-sandboxer enable` and `disable`: add this sandboxer to containerd's config and remove it.
//!
//! Each reads the config that containerd itself makes of its files, decides what to write, writes
//! it, and compares what containerd makes of it then. A failed change is rolled back. All files are
//! replaced as a whole, in an order in which each state between two of them is valid: the drop-in
//! before its import. A command that is killed is completed by `enable`, or undone by `disable`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::runtime::Runtime;
use toml::Table;

use crate::check::Subject;
use crate::check::containerd::NodeContainerd;
use crate::oci_image;
use base::config;
use base::error::{IoContext as _, StepError, StepErrors};
use containerd_api::GrpcEndpoint;
use containerd_api::cri::CriClient;
use containerd_api::images::{self, PINNED};

mod before_restart;
mod changes;
mod diff;
mod disable;
mod drop_in;
mod loaded;
mod lock;
mod main_config;
mod plan;
mod pods;
mod removal_plan;
mod restart;
mod settings;
mod toml_text;
mod trust;

use before_restart::UnreadFiles;
use changes::{Changes, FileChange};
pub use disable::{Disablement, disable};
use lock::ConfigLock;
use main_config::{BACKUP, MainConfig};
use plan::HandlerPlan;
pub use removal_plan::RemovalPlan;
pub use restart::RestartBy;
use trust::check_trusted;

/// The line of a command that changes no file.
const NO_CHANGES: &str = "no file needs a change";

/// The handler's usual name.
pub const HANDLER: &str = crate::check::containerd::HANDLER;

/// Why a command failed. Nothing has changed, unless the rollback failed.
#[derive(Debug, thiserror::Error)]
pub enum EnableError {
    /// A step failed.
    #[error(transparent)]
    Step(#[from] StepError),
    /// Steps failed.
    #[error("{0}")]
    Steps(StepErrors),
    /// The node does not meet a requirement, or containerd does not accept the change.
    #[error("{0}")]
    Refused(String),
    /// Files remain changed, because their rollback failed.
    #[error("{reason}; rolling back the files failed too: {steps}{services}")]
    RollbackFailed {
        /// The reason for the rollback.
        reason: String,
        /// The steps of the rollback that failed.
        steps: StepErrors,
        /// The state of the services with the current files, after a separator.
        services: String,
    },
}

impl EnableError {
    /// Appends the state of the services after the rollback.
    fn with_services(self, more: &str) -> Self {
        match self {
            Self::RollbackFailed { reason, steps, services } => {
                Self::RollbackFailed { reason, steps, services: services + more }
            }
            error => Self::Refused(format!("{error}{more}")),
        }
    }
}

impl From<StepErrors> for EnableError {
    fn from(steps: StepErrors) -> Self {
        Self::Steps(steps)
    }
}

/// The state that `enable` establishes. It is complete: options of earlier commands do not count.
#[derive(Clone, Debug)]
pub struct Enablement {
    /// The node.
    pub subject: Subject,
    /// The sandboxer's config file.
    pub settings: PathBuf,
    /// The executable of the image that `offline` imports.
    pub pause_program: &'static [u8],
    /// The runtime handler.
    pub handler: String,
    /// The handler whose settings are copied; `None`: the default handler, or runc.
    pub options_of: Option<String>,
    /// Make it the default handler.
    pub default: bool,
    /// Import the pause image of the binary, and let containerd use it.
    pub offline: bool,
    /// Show the changes only.
    pub dry_run: bool,
    /// How to restart containerd; `None`: no restart.
    pub restart: Option<RestartBy>,
    /// Timeout of the restart, until CRI responds.
    pub within: Duration,
}

fn refuse<T>(reason: impl Into<String>) -> Result<T, EnableError> {
    Err(EnableError::Refused(reason.into()))
}

/// The first steps of both commands: check for root and a containerd, and lock the directory of its
/// config.
fn begin(
    subject: &Subject,
    settings: &Path,
    restart: Option<&RestartBy>,
    dry_run: bool,
) -> Result<(NodeContainerd, MainConfig, Option<ConfigLock>), EnableError> {
    if !nix::unistd::geteuid().is_root() {
        return refuse("must run as root");
    }
    restart.map_or(Ok(()), RestartBy::check).map_err(EnableError::Refused)?;
    let node = NodeContainerd::find(subject);
    let must_restart = restart.is_some() && !dry_run;
    if must_restart && node.pid.is_none() && subject.containerd_config.is_none() {
        return refuse(format!(
            "no containerd listens at {}, so its config file is unknown: start containerd first, \
             or set containerd_address in {}, or use --containerd-config FILE",
            subject.config.containerd_address.display(),
            settings.display()
        ));
    }
    if must_restart {
        is_of_running(&node)?;
    }
    node.supported().map_err(EnableError::Refused)?;
    let home = node.file.parent().unwrap_or(Path::new("/")).to_owned();
    // The lock is only for root where only root makes files.
    check_trusted(&node.file)?;
    // A dry run makes no file.
    let lock = if dry_run { None } else { Some(ConfigLock::take(&home)?) };
    let main = MainConfig::read(&node.file)?;
    check_trusted(&main.drop_in())?;
    Ok((node, main, lock))
}

/// Fails if the running containerd has another config file: its restart would not read the changed
/// one.
fn is_of_running(node: &NodeContainerd) -> Result<(), EnableError> {
    let Some(its_file) = node.file_of_running() else { return Ok(()) };
    refuse(format!(
        "the running containerd uses {}, not {}: omit --containerd-config, or omit --restart if \
         containerd will be started with that file",
        its_file.display(),
        node.file.display()
    ))
}

fn runtime() -> Result<Runtime, StepError> {
    tokio::runtime::Builder::new_current_thread().enable_all().build().step("make a runtime")
}

/// Rolls changes back because of `reason`.
fn roll_back(changes: &Changes, reason: String) -> EnableError {
    rolled_back(reason, changes.undo())
}

/// The error for a failure, `reason`, whose file changes were rolled back with this result.
fn rolled_back(reason: String, rollback: Result<(), StepErrors>) -> EnableError {
    match rollback {
        Ok(()) => EnableError::Refused(format!("{reason}; all file changes are rolled back")),
        Err(steps) => EnableError::RollbackFailed { reason, steps, services: String::new() },
    }
}

/// Rolls changes back because of `reason`, and restarts containerd with the resulting files.
fn restart_after_rollback(
    changes: &Changes,
    reason: String,
    by: &RestartBy,
    subject: &Subject,
    within: Duration,
) -> EnableError {
    let error = roll_back(changes, reason);
    let again = runtime()
        .map_err(|step| step.to_string())
        .and_then(|runtime| runtime.block_on(restart::restart(by, subject, within, |_| true)));
    let with = match &error {
        EnableError::RollbackFailed { .. } => "the current files",
        _ => "the restored files",
    };
    error.with_services(&match again {
        Ok(()) => format!("; containerd serves CRI with {with}"),
        Err(reason) => format!("; but containerd does not serve CRI with {with}: {reason}"),
    })
}

/// Restarts the daemon, which has read changes that are rolled back because of `error`.
fn restart_daemon_after_rollback(error: EnableError, within: Duration) -> EnableError {
    let again = runtime()
        .map_err(|step| step.to_string())
        .and_then(|runtime| runtime.block_on(restart::restart_daemon_again(within)));
    error.with_services(&match again {
        Ok(()) => "; pause-sandboxer is restarted too".to_owned(),
        Err(reason) => {
            format!("; pause-sandboxer may still use the new settings, restart it: {reason}")
        }
    })
}

/// Adds the sandboxer to containerd's config. `say` gets a line for each thing done.
///
/// # Errors
/// Nothing has changed, unless the error says so.
pub fn enable(wanted: &Enablement, say: &mut dyn FnMut(String)) -> Result<(), EnableError> {
    let subject = &wanted.subject;
    let (node, main, _lock) =
        begin(subject, &wanted.settings, wanted.restart.as_ref(), wanted.dry_run)?;
    let path = main.drop_in();
    node.has_imports(&path).map_err(EnableError::Refused)?;
    let before = node.dump().map_err(EnableError::Refused)?;
    let old_state = changes::FileState::read(&path)?;
    let old = old_state.as_ref().map(|old| String::from_utf8_lossy(&old.bytes).into_owned());
    let plan = HandlerPlan::new(wanted, before.clone(), old.as_deref())?;
    let lost = before_restart::lost_handlers(wanted, old.as_deref(), &before)?;
    before_restart::keep_handlers_in_use(wanted, &lost).map_err(EnableError::Refused)?;
    let mut changes = adopt_settings(wanted, &main, &before, &plan.settings)?;
    let adopted = changes.len();
    let is_ours = old.as_deref().is_some_and(drop_in::is_ours);
    if let Some(old) = old_state.filter(|_| !is_ours) {
        changes.add(FileChange::copy(path.with_added_extension(BACKUP), &old)?);
    }
    changes.directory(path.parent().unwrap_or(Path::new("/")));
    let text = plan.drop_in(wanted, &main)?;
    changes.add(FileChange::new(path.clone(), Some(text.into_bytes()))?);
    main.import(&path, plan.new_file_version(), &mut changes)?;
    let undone = old.as_deref().map(|old| drop_in::undone(old, wanted, &plan.base));
    undone.into_iter().flatten().for_each(&mut *say);
    main.managed(&path).into_iter().for_each(&mut *say);
    if wanted.dry_run {
        let diff = changes.diff();
        say(if diff.is_empty() { NO_CHANGES } else { diff.trim_end() }.to_owned());
        return Ok(());
    }
    let unread = UnreadFiles::find(&node, &main, is_ours.then_some(&path))?;
    // containerd does not read the sandboxer's settings.
    let is_loaded =
        changes.len() == adopted && !unread.own && loaded::has(subject, &wanted.handler)?;
    if wanted.restart.is_some() && !is_loaded {
        before_restart::daemon_for_default(wanted)?;
        unread.no_edits(&node)?;
    }
    if wanted.offline {
        import_pause(wanted, say)?;
    }
    changes.apply()?;
    let checked = node.dump().and_then(|after| plan.verify(wanted, &after));
    if let Err(reason) = checked {
        return Err(roll_back(&changes, reason));
    }
    changes.paths().for_each(|path| say(format!("wrote {}", path.display())));
    if changes.is_empty() {
        say(NO_CHANGES.to_owned());
    }
    let has_adopted = adopted > 0 && restart_daemon(wanted, &changes, say)?;
    if let Err(reason) = pods::answering_daemon(&subject.config) {
        say(format!("{reason}; pods of runtime handler {} need the daemon", wanted.handler));
    }
    if is_loaded {
        say(format!("containerd has loaded runtime handler {}", wanted.handler));
        return Ok(());
    }
    load(wanted, &node, &changes, &lost, say).map_err(|error| match error {
        error @ (EnableError::Refused(_) | EnableError::RollbackFailed { .. }) if has_adopted => {
            restart_daemon_after_rollback(error, wanted.within)
        }
        error => error,
    })
}

/// The changes of the sandboxer's own settings.
fn adopt_settings(
    wanted: &Enablement,
    main: &MainConfig,
    merged: &Table,
    handler: &Table,
) -> Result<Changes, EnableError> {
    let mut changes = Changes::default();
    let path = &wanted.settings;
    let state = changes::FileState::read(path)?;
    let text = state.map(|state| String::from_utf8_lossy(&state.bytes).into_owned());
    let old = text.clone().unwrap_or_default();
    let config = &wanted.subject.config;
    let new = settings::adopt(&old, config, merged, handler)
        .map_err(|reason| EnableError::Refused(format!("{} {reason}", path.display())))?;
    if new != old {
        config::Config::parse(path, &new, &[]).map_err(|e| {
            EnableError::Refused(format!(
                "cannot copy a setting of containerd: correct it in containerd's config: {e}"
            ))
        })?;
        check_trusted(path)?;
        changes.directory(path.parent().unwrap_or(Path::new("/")));
        let change = FileChange::new(path.clone(), Some(new.into_bytes()))?;
        // What it adopts may be secret, such as a variable of shims.
        changes.add(main.keep_private(change));
    }
    Ok(changes)
}

fn import_pause(wanted: &Enablement, say: &mut dyn FnMut(String)) -> Result<(), EnableError> {
    let config = &wanted.subject.config;
    let runtime = runtime()?;
    let cri = CriClient::new(&config.containerd_address);
    if matches!(runtime.block_on(cri.image(oci_image::NAME)), Ok(Some(true))) {
        return Ok(());
    }
    let image = oci_image::pause(wanted.pause_program).step("make image")?;
    let endpoint = GrpcEndpoint::new(&config.containerd_address, &config.containerd_namespace);
    runtime.block_on(images::import(&endpoint, &image, &[PINNED]))?;
    say(format!("imported {}", image.name));
    Ok(())
}

/// Lets the daemon read its settings; whether it has been restarted.
fn restart_daemon(
    wanted: &Enablement,
    changes: &Changes,
    say: &mut dyn FnMut(String),
) -> Result<bool, EnableError> {
    let restarted = match wanted.restart {
        Some(_) => runtime()?.block_on(restart::restart_daemon(wanted.within)),
        None => Ok(false),
    };
    let restarted = restarted.map_err(|reason| {
        restart_daemon_after_rollback(roll_back(changes, reason), wanted.within)
    })?;
    let said = if restarted {
        "restarted pause-sandboxer; pods keep running"
    } else {
        "the settings of pause-sandboxer have changed: restart it; pods keep running"
    };
    say(said.to_owned());
    Ok(restarted)
}

/// The error for a restart of containerd that failed because of `reason`.
fn not_loaded(
    wanted: &Enablement,
    node: &NodeContainerd,
    changes: &Changes,
    reason: String,
    by: &RestartBy,
) -> EnableError {
    let earlier = format!(
        "; the handler was added by an earlier command: to remove it, run `pause-sandboxer disable \
         --restart --containerd-config {}`",
        node.file.display()
    );
    if changes.is_empty() {
        // Another restart would be with the same files.
        return EnableError::Refused(format!("{reason}{earlier}"));
    }
    let error = restart_after_rollback(changes, reason, by, &wanted.subject, wanted.within);
    // The files as they were before this command.
    if node.has_unread_files() { error.with_services(&earlier) } else { error }
}

/// Restarts containerd, which has to read the files and loses the handlers `lost`.
fn load(
    wanted: &Enablement,
    node: &NodeContainerd,
    changes: &Changes,
    lost: &[String],
    say: &mut dyn FnMut(String),
) -> Result<(), EnableError> {
    let (subject, handler) = (&wanted.subject, &wanted.handler);
    let Some(by) = &wanted.restart else {
        let command = RestartBy::Systemd.command(&node.unit);
        say(format!(
            "restart containerd to load the files: {command} (pods keep running, and the daemon \
             must respond meanwhile)"
        ));
        return Ok(());
    };
    let stopped = pods::of_stopped_daemon(&subject.config)
        .map_err(|step| roll_back(changes, step.to_string()))?;
    if !stopped.is_empty() {
        let reason = format!(
            "the daemon does not respond and has {}: start it first (see systemctl status \
             pause-sandboxer), because a containerd that starts without it reports these pods as \
             NotReady",
            pods::shown(&stopped)
        );
        return Err(roll_back(changes, reason));
    }
    // A pod may have arrived meanwhile.
    before_restart::keep_handlers_in_use(wanted, lost)
        .map_err(|reason| roll_back(changes, reason))?;
    let has_handler = |handlers: &[String]| handlers.contains(handler);
    let restarted = restart::restart_for(changes, by, subject, wanted.within, has_handler);
    if let Err(reason) = runtime()?.block_on(restarted) {
        return Err(not_loaded(wanted, node, changes, reason, by));
    }
    say(format!("restarted containerd: it has loaded runtime handler {handler}"));
    Ok(())
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
            subject: Subject {
                config: config::Config::default(),
                containerd_config: None,
                containerd_program: None,
            },
            settings: "/nowhere/config.toml".into(),
            pause_program: b"",
            handler: HANDLER.to_owned(),
            options_of: None,
            default: false,
            offline: false,
            dry_run: true,
            restart: None,
            within: Duration::from_secs(1),
        }
    }

    /// A daemon does not start with such settings, and its pods then have none.
    #[test]
    fn settings_that_the_daemon_refuses_are_not_written() {
        let dir = tempfile::tempdir().unwrap();
        let main = MainConfig::read(&dir.path().join("config.toml")).unwrap();
        let wanted = Enablement { settings: dir.path().join("own.toml"), ..enablement() };
        let merged = |env: &str| -> Table {
            format!("[plugins.'io.containerd.shim.v1.manager']\nenv = {env}").parse().unwrap()
        };
        let adopt = |env: &str| adopt_settings(&wanted, &main, &merged(env), &Table::new());
        assert_eq!(adopt("['A=1', 'B=1']").unwrap().len(), 1);
        for env in ["['A=1', 'A=2']", "['NAMESPACE=x']", "['A']"] {
            let error = adopt(env).unwrap_err().to_string();
            assert!(error.contains("shim_env"), "{env}: {error}");
        }
    }

    #[test]
    fn a_failed_rollback_is_reported() {
        let steps = StepErrors::from(StepError::new("write", std::io::Error::other("full")));
        let (reason, services) = ("it fails".to_owned(), String::new());
        let error = EnableError::RollbackFailed { reason, steps, services };
        let error = error.with_services("; a").with_services("; b");
        assert!(matches!(error, EnableError::RollbackFailed { .. }));
        let text = "it fails; rolling back the files failed too: write: full; a; b";
        assert_eq!(error.to_string(), text);
    }
}
