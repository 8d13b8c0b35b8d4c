//! Preconditions that `enable` and `disable` check before they write files and restart containerd.

use std::path::{Path, PathBuf};
use std::slice;

use toml::Table;

use super::main_config::MainConfig;
use super::{EnableError, Enablement, RestartBy, drop_in, loaded, pods, refuse, runtime};
use crate::check::containerd::{NodeContainerd, same_file};
use base::error::StepError;
use containerd_api::cri::CriClient;

/// The files of containerd's config that were written after its start.
#[derive(Debug, Default)]
pub(super) struct UnreadFiles {
    /// Whether `enable` has written one.
    pub(super) own: bool,
    /// Those that others have written.
    edited: Vec<PathBuf>,
}

impl UnreadFiles {
    /// Finds them. `drop_in` is that of `enable`, if it is there.
    ///
    /// # Errors
    /// A file cannot be read.
    pub(super) fn find(
        node: &NodeContainerd,
        main: &MainConfig,
        drop_in: Option<&Path>,
    ) -> Result<Self, StepError> {
        let mut found = Self::default();
        for file in node.unread_files() {
            let is_own = if same_file(&file, &node.file) {
                let edited = main.last_edit(&main.drop_in())?;
                edited.is_none_or(|moment| !node.is_older_than(moment))
            } else {
                drop_in.is_some_and(|drop_in| same_file(&file, drop_in))
            };
            if is_own {
                found.own = true;
            } else {
                found.edited.push(file);
            }
        }
        Ok(found)
    }

    /// Fails if other programs have edited files that containerd has not read: a restart would
    /// apply these edits too, and the rollback of this command would not undo them.
    ///
    /// # Errors
    /// The files.
    pub(super) fn no_edits(&self, node: &NodeContainerd) -> Result<(), EnableError> {
        if self.edited.is_empty() {
            return Ok(());
        }
        let files: Vec<String> =
            self.edited.iter().map(|file| file.display().to_string()).collect();
        refuse(format!(
            "another program or user has changed {} since containerd started: a restart would \
             apply that change too, and this command could not undo it. Restart containerd first: \
             {}",
            files.join(" and "),
            RestartBy::Systemd.command(&node.unit)
        ))
    }
}

/// The default handler needs a daemon that answers: without it no pod of the node starts.
///
/// # Errors
/// None answers.
pub(super) fn daemon_for_default(wanted: &Enablement) -> Result<(), EnableError> {
    if !wanted.default {
        return Ok(());
    }
    pods::answering_daemon(&wanted.subject.config).or_else(|reason| {
        refuse(format!("{reason}; with --default no pod of this node starts without the daemon"))
    })
}

/// The handlers that the command removes from containerd: those of the old drop-in that the new one
/// does not define, and those that containerd still has loaded from earlier files.
///
/// # Errors
/// A local step failed.
pub(super) fn lost_handlers(
    wanted: &Enablement,
    old: Option<&str>,
    before: &Table,
) -> Result<Vec<String>, StepError> {
    let mut lost = old.map(drop_in::handlers_of).unwrap_or_default();
    if wanted.restart.is_some() {
        lost.extend(loaded::stale(Some(before), &wanted.subject)?.unwrap_or_default());
    }
    lost.retain(|name| *name != wanted.handler);
    Ok(lost)
}

/// Fails if a pod needs one of the handlers that containerd loses.
///
/// # Errors
/// The pods, or why they are unknown.
pub(super) fn keep_handlers_in_use(wanted: &Enablement, lost: &[String]) -> Result<(), String> {
    if lost.is_empty() {
        return Ok(());
    }
    let config = &wanted.subject.config;
    let cri = CriClient::new(&config.containerd_address);
    let runtime = runtime().map_err(|step| step.to_string())?;
    for name in lost {
        let left = runtime.block_on(pods::of_cri(&cri, slice::from_ref(name)));
        let left = left.map_err(|step| step.to_string())?;
        if left.is_empty() {
            continue;
        }
        let ours = pods::of_daemon(config).map_err(|step| step.to_string())?;
        // Only the file that defines a handler restores it.
        let way = if left.keys().all(|id| ours.contains_key(id)) {
            format!("keep the handler with --handler {name}")
        } else {
            "restore the config file that defines it".to_owned()
        };
        return Err(format!(
            "this change removes runtime handler {name}, which is used by {}: remove these pods, \
             or {way}",
            pods::shown(&left)
        ));
    }
    Ok(())
}

/// Fails if a restart by `disable` would apply edits of other programs, or if containerd would not
/// start with them. `disable` removes the drop-in itself.
///
/// # Errors
/// The files, and what to do first.
pub(super) fn only_own_changes(
    node: &NodeContainerd,
    main: &MainConfig,
) -> Result<(), EnableError> {
    let drop_in = main.drop_in();
    node.has_imports(&drop_in).map_err(EnableError::Refused)?;
    UnreadFiles::find(node, main, Some(&drop_in))?.no_edits(node)
}
