//! Files that are changed together: all of them, or none.

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt as _, chown};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use similar::TextDiff;

use super::EnableError;
use base::error::{IoContext as _, StepError, StepErrors, gone};
use base::replace_file::{lasting_temporary, replace_lasting_file, sync_directory_of};

/// Permissions of a new file that copies no other one.
const NEW_FILE: u32 = 0o644;

/// A file as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FileState {
    pub(super) bytes: Vec<u8>,
    mode: u32,
    group: u32,
    pub(super) modified: SystemTime,
}

impl FileState {
    /// Reads a file, if it is there.
    ///
    /// # Errors
    /// It cannot be read, or is not a regular file.
    pub(super) fn read(path: &Path) -> Result<Option<Self>, StepError> {
        const STEP: &str = "read file";
        let about = match fs::metadata(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            about => about.step_at(STEP, path)?,
        };
        if !about.is_file() {
            let reason = io::Error::other("it is not a regular file");
            return Err(StepError::at(STEP, path, reason));
        }
        Ok(Some(Self {
            bytes: fs::read(path).step_at(STEP, path)?,
            mode: about.mode() & 0o7777,
            group: about.gid(),
            modified: about.modified().step_at(STEP, path)?,
        }))
    }

    fn contents(&self) -> (&[u8], u32) {
        (&self.bytes, self.mode)
    }

    fn restore(&self, path: &Path) -> Result<(), StepError> {
        write(path, &self.bytes, self.mode, self.group)?;
        set_modified(path, self.modified)
    }
}

fn write(path: &Path, bytes: &[u8], mode: u32, group: u32) -> Result<(), StepError> {
    replace_lasting_file(path, mode, bytes)?;
    if group == 0 {
        return Ok(());
    }
    chown(path, None, Some(group)).step_at("set group of file", path)
}

/// Sets the time of a file, which is compared with containerd's start.
fn set_modified(path: &Path, time: SystemTime) -> Result<(), StepError> {
    let file = fs::File::options().write(true).open(path);
    file.and_then(|file| file.set_modified(time)).step_at("set time of file", path)
}

/// A file that is written or removed.
#[derive(Debug)]
pub(super) struct FileChange {
    path: PathBuf,
    before: Option<FileState>,
    /// `None`: it is removed.
    after: Option<Vec<u8>>,
    /// Permissions and group of what is written.
    mode: u32,
    group: u32,
    /// Its time, if that is not now.
    modified: Option<SystemTime>,
}

impl FileChange {
    /// A change of the file at `path` to `after`. A link stays; the file that it leads to is
    /// replaced.
    ///
    /// # Errors
    /// The file cannot be read, or a link would be removed: its target is a file of the operator.
    pub(super) fn new(path: PathBuf, after: Option<Vec<u8>>) -> Result<Self, StepError> {
        let before = FileState::read(&path)?;
        let path = match (before.is_some() && path.is_symlink(), &after) {
            (false, _) => path,
            (true, Some(_)) => path.canonicalize().step_at("find file", &path)?,
            (true, None) => {
                let reason = io::Error::other("it is a symbolic link: remove it first");
                return Err(StepError::at("remove file", &path, reason));
            }
        };
        let (mode, group) =
            before.as_ref().map_or((NEW_FILE, 0), |before| (before.mode, before.group));
        Ok(Self { path, before, after, mode, group, modified: None })
    }

    /// A copy of a file, with its time, and as private.
    ///
    /// # Errors
    /// The file at `path` cannot be read.
    pub(super) fn copy(path: PathBuf, original: &FileState) -> Result<Self, StepError> {
        let copy = Self::new(path, Some(original.bytes.clone()))?.private_as(original);
        Ok(Self { modified: Some(original.modified), ..copy })
    }

    /// The change after which only those who can read `of` can read the file: containerd's config
    /// may have passwords of registries.
    pub(super) fn private_as(mut self, other: &FileState) -> Self {
        if self.before.is_none() {
            self.group = other.group;
        }
        let mut allowed = other.mode;
        if self.group != other.group {
            // The members of the file's own group may be other users.
            allowed = allowed & !0o070 | (allowed & 0o007) << 3;
        }
        self.mode &= allowed;
        self
    }

    /// The change of a text that was read as `state`: another program may have written the file
    /// since, before [`FileChange::new`] read it.
    pub(super) fn read_as(mut self, state: Option<&FileState>) -> Self {
        self.before = state.cloned();
        self
    }

    fn changes(&self) -> bool {
        let mode = |state: &FileState| state.mode;
        self.before.as_ref().map(|before| &before.bytes) != self.after.as_ref()
            || self.before.as_ref().is_some_and(|before| mode(before) != self.mode)
    }

    fn apply(&self) -> Result<(), StepError> {
        // A process that was killed may have left it.
        let left = lasting_temporary(&self.path);
        gone(fs::remove_file(&left)).step_at("remove file", &left)?;
        let Some(after) = &self.after else { return remove(&self.path) };
        write(&self.path, after, self.mode, self.group)?;
        self.modified.map_or(Ok(()), |time| set_modified(&self.path, time))
    }

    /// Fails if the file is not as it was read: its change was made from that.
    fn is_as_read(&self) -> Result<(), StepError> {
        let now = FileState::read(&self.path)?;
        if now.map(|now| now.bytes) == self.before.as_ref().map(|before| before.bytes.clone()) {
            return Ok(());
        }
        let reason = io::Error::other("another program has changed it since it was read");
        Err(StepError::at("write file", &self.path, reason))
    }

    /// Restores the file, unless it is not what [`FileChange::apply`] has written: it is not
    /// written yet, or another program has written it since.
    fn undo(&self) -> Result<(), StepError> {
        let now = FileState::read(&self.path)?;
        if now.as_ref().map(FileState::contents) == self.before.as_ref().map(FileState::contents) {
            return Ok(());
        }
        if now.as_ref().map(|now| &now.bytes) != self.after.as_ref() {
            let reason = io::Error::other("another program has changed it; not restored");
            return Err(StepError::at("restore file", &self.path, reason));
        }
        match &self.before {
            Some(before) => before.restore(&self.path),
            None => remove(&self.path),
        }
    }
}

fn remove(path: &Path) -> Result<(), StepError> {
    gone(fs::remove_file(path)).step_at("remove file", path)?;
    sync_directory_of(path)
}

/// Changes in the order in which they are made: each state between two of them is valid.
#[derive(Debug, Default)]
pub(super) struct Changes {
    directories: Vec<PathBuf>,
    files: Vec<FileChange>,
}

impl Changes {
    /// A directory that is made if it is missing, before the files.
    pub(super) fn directory(&mut self, path: &Path) {
        if !path.exists() {
            self.directories.push(path.to_owned());
        }
    }

    /// Adds a change, unless it changes nothing.
    pub(super) fn add(&mut self, change: FileChange) {
        if change.changes() {
            self.files.push(change);
        }
    }

    /// The number of files that change.
    pub(super) fn len(&self) -> usize {
        self.files.len()
    }

    /// Whether there is nothing to change.
    pub(super) fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// The paths that change.
    pub(super) fn paths(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(|change| change.path.as_path())
    }

    /// All changes as `diff -u` shows them.
    pub(super) fn diff(&self) -> String {
        let shown = |change: &FileChange| {
            let path = change.path.display().to_string();
            let side = |bytes: Option<&[u8]>| match bytes {
                Some(bytes) => (path.clone(), String::from_utf8_lossy(bytes).into_owned()),
                None => ("/dev/null".to_owned(), String::new()),
            };
            let (old, before) = side(change.before.as_ref().map(|before| before.bytes.as_slice()));
            let (new, after) = side(change.after.as_deref());
            let diff = TextDiff::from_lines(&before, &after);
            diff.unified_diff().header(&old, &new).to_string()
        };
        self.files.iter().map(shown).collect()
    }

    /// Makes all changes, or none.
    ///
    /// # Errors
    /// The step that failed, and those of the rollback.
    pub(super) fn apply(&self) -> Result<(), EnableError> {
        for directory in &self.directories {
            let made = fs::DirBuilder::new().recursive(true).create(directory);
            let made = made.step_at("make directory", directory);
            made.map_err(|step| self.failed(step, 0))?;
        }
        for (index, change) in self.files.iter().enumerate() {
            change.is_as_read().map_err(|step| self.failed(step, index))?;
            // A step that fails may have written the file.
            change.apply().map_err(|step| self.failed(step, index + 1))?;
        }
        Ok(())
    }

    fn failed(&self, step: StepError, written: usize) -> EnableError {
        EnableError::rolled_back(&step.to_string(), &self.undo_first(written))
    }

    /// The error for the failure `reason` after the rollback of all changes.
    pub(super) fn roll_back(&self, reason: &str) -> EnableError {
        EnableError::rolled_back(reason, &self.undo())
    }

    /// Rolls all changes back.
    ///
    /// # Errors
    /// The steps that failed; the others are made.
    pub(super) fn undo(&self) -> Result<(), StepErrors> {
        self.undo_first(self.files.len())
    }

    fn undo_first(&self, count: usize) -> Result<(), StepErrors> {
        let mut steps = StepErrors::default();
        for change in self.files.iter().take(count).rev() {
            steps.check(change.undo());
        }
        for directory in self.directories.iter().rev() {
            // Another may have put a file there.
            let _ = fs::remove_dir(directory);
        }
        steps.into_result()
    }
}

#[cfg(test)]
mod tests;
