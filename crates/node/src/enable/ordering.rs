//! The order in which systemd starts the sandboxer and containerd. The packaged units precede
//! `containerd.service`; another unit of containerd needs a drop-in for each of them.

use std::fs;
use std::path::{Path, PathBuf};

use super::EnableError;
use super::changes::{Changes, FileChange};
use crate::check::systemd::{UNITS, unquoted};
use crate::trust::check_trusted;

/// Directory of systemd's units that an administrator has added.
const DIRECTORY: &str = "/etc/systemd/system";

/// The unit that the packaged units precede.
const PACKAGED: &str = "containerd.service";

/// Name of the drop-in.
const NAME: &str = "before-containerd.conf";

const HEAD: &str =
    "# Written by `pause-sandboxer enable`; `pause-sandboxer disable` removes it.\n[Unit]\n";

fn files() -> impl Iterator<Item = PathBuf> {
    UNITS.iter().map(|unit| Path::new(DIRECTORY).join(format!("{unit}.d")).join(NAME))
}

/// Adds the changes after which the sandboxer is started before `unit`, a word of the shell;
/// whether there are some. `None`: after which there is no such order.
///
/// # Errors
/// A file cannot be read, or others can write it.
pub(super) fn order(unit: Option<&str>, changes: &mut Changes) -> Result<bool, EnableError> {
    let before = changes.len();
    let unit = unit.map(unquoted).filter(|unit| *unit != PACKAGED);
    for file in files() {
        if unit.is_some() {
            check_trusted(&file)?;
            changes.directory(super::directory_of(&file));
        }
        let text = unit.map(|unit| format!("{HEAD}Before={unit}\n").into_bytes());
        changes.add(FileChange::new(file, text)?);
    }
    Ok(changes.len() > before)
}

/// Removes the directories that are empty after the removal of the drop-ins.
pub(super) fn remove_directories() {
    // Another's file keeps its directory.
    files().for_each(|file| drop(fs::remove_dir(super::directory_of(&file))));
}
