//! The node as a command reads it once, before it decides.

use std::path::{Path, PathBuf};

use base::config::Config;
use containerd_api::cri::CriClient;
use toml::Table;

use super::drop_in::{self, DropIn};
use super::main_config::MainConfig;
use super::{EnableError, RestartBy, refuse};
use crate::check::Subject;
use crate::check::containerd::{self as merged_config, Mode, NodeContainerd, same_file};
use crate::trust::check_trusted;

/// containerd, its files, and what it makes of them.
#[derive(Debug)]
pub(super) struct NodeState {
    pub(super) containerd: NodeContainerd,
    pub(super) main: MainConfig,
    /// The drop-ins of [`Mode::ALL`], which need not exist.
    pub(super) drop_ins: [DropIn; 2],
    /// containerd's merged config, or why it makes none.
    pub(super) merged: Result<Table, String>,
    /// The runtime handlers that the running containerd has loaded; `None`: CRI does not say.
    pub(super) loaded: Option<Vec<String>>,
}

impl NodeState {
    /// Reads the node. Only root must be able to change the files.
    ///
    /// # Errors
    /// A file cannot be read, or others can change it.
    pub(super) async fn read(subject: &Subject) -> Result<Self, EnableError> {
        let containerd = NodeContainerd::find(subject);
        check_trusted(&containerd.file)?;
        let main = MainConfig::read(&containerd.file)?;
        let read = |mode| {
            let path = main.drop_in(mode);
            check_trusted(&path)?;
            DropIn::read(mode, path)
        };
        let drop_ins = [read(Mode::Sandboxer)?, read(Mode::ShimOnly)?];
        let merged = containerd.dump().await;
        let cri = CriClient::new(&subject.config.containerd_address);
        let loaded = loaded_handlers(&cri).await.ok();
        Ok(Self { containerd, main, drop_ins, merged, loaded })
    }

    /// The drop-in of a mode.
    pub(super) fn drop_in(&self, mode: Mode) -> &DropIn {
        let [sandboxer, shim_only] = &self.drop_ins;
        match mode {
            Mode::Sandboxer => sandboxer,
            Mode::ShimOnly => shim_only,
        }
    }

    /// The handlers that containerd has loaded, and that its files no longer have; `None` if it
    /// does not say which it has. Files of which containerd makes no config do not show theirs.
    pub(super) fn stale(&self, config: &Config) -> Option<Vec<String>> {
        let mut stale = self.loaded.clone()?;
        let files = self.merged.as_ref().ok().map(|merged| merged_config::all(merged, config).all);
        // The default handler has an entry without a name too.
        stale.retain(|name| {
            !name.is_empty() && files.as_ref().is_some_and(|files| !files.contains_key(name))
        });
        Some(stale)
    }

    /// Fails if the running containerd has another config file: its restart would not read the
    /// changed one.
    ///
    /// # Errors
    /// Both files.
    pub(super) fn is_of_running(&self) -> Result<(), EnableError> {
        let Some(its_file) = self.containerd.file_of_running() else { return Ok(()) };
        refuse(format!(
            "the running containerd uses {}, not {}: omit --containerd-config, or omit --restart \
             if containerd will be started with that file",
            its_file.display(),
            self.containerd.file.display()
        ))
    }

    /// The files of containerd's config that were written after its start: whether commands of
    /// this program have written one, and those that others have written. `own` are the drop-ins
    /// that this command writes or removes.
    ///
    /// # Errors
    /// A file cannot be read.
    pub(super) fn unread(&self, own: &[&DropIn]) -> Result<(bool, Vec<PathBuf>), EnableError> {
        let (mut has_own, mut edited) = (false, Vec::new());
        for file in self.containerd.unread_files() {
            let is_own = if same_file(&file, &self.containerd.file) {
                let edit = self.main.last_edit(&self.drop_in(Mode::Sandboxer).path)?;
                edit.is_none_or(|moment| !self.containerd.is_older_than(moment))
            } else {
                own.iter().any(|drop_in| same_file(&file, &drop_in.path))
            };
            if is_own {
                has_own = true;
            } else {
                edited.push(file);
            }
        }
        Ok((has_own, edited))
    }

    /// Fails if other programs have edited files that containerd has not read: a restart would
    /// apply these edits too, and the rollback of a command would not undo them.
    ///
    /// # Errors
    /// The files.
    pub(super) fn no_edits(&self, edited: &[PathBuf]) -> Result<(), EnableError> {
        if edited.is_empty() {
            return Ok(());
        }
        refuse(format!(
            "another command, program or user has changed {} since containerd started: a restart \
             would apply that change too, and this command could not undo it. Restart containerd \
             first: {}",
            shown(edited, " and "),
            RestartBy::Systemd.command(&self.containerd.unit)
        ))
    }

    /// Fails if a restart by `disable` would apply edits of other programs, or if containerd would
    /// not start with them. `disable` removes the drop-ins `removed` itself.
    ///
    /// # Errors
    /// The files, and what to do first.
    pub(super) fn only_own_changes(&self, removed: &[&DropIn]) -> Result<(), EnableError> {
        self.containerd.has_imports(&drop_in::paths(removed))?;
        self.no_edits(&self.unread(removed)?.1)
    }
}

/// Paths as one text.
pub(super) fn shown(paths: &[PathBuf], separator: &str) -> String {
    let paths: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
    paths.join(separator)
}

/// The runtime handlers of the containerd that runs; empty if it does not name them.
///
/// # Errors
/// CRI does not answer, or its runtime is not ready.
pub(super) async fn loaded_handlers(cri: &CriClient) -> Result<Vec<String>, String> {
    let status = cri.status().await.map_err(|step| step.to_string())?;
    let conditions = &status.status.conditions;
    // The network may be missing for reasons of the cluster.
    match conditions.iter().find(|condition| condition.type_ == "RuntimeReady") {
        Some(ready) if ready.status => Ok(CriClient::handlers_of(status)),
        _ => Err("its runtime is not ready".to_owned()),
    }
}

/// The directory of a file.
pub(super) fn directory_of(path: &Path) -> &Path {
    path.parent().unwrap_or(Path::new("/"))
}
