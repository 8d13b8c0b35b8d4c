//! Files that are changed together: all of them, or none.

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt as _, chown, symlink};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::diff;
use crate::error::{IoContext as _, StepError, StepErrors, gone};
use crate::replace_file::{lasting_temporary, replace_lasting_file, sync_directory_of};

/// Permissions of a new file that has nothing of another one.
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

/// By the time containerd's files are compared with its start.
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
    /// What the link holds that is removed in place of the file that it leads to.
    link: Option<PathBuf>,
    /// Permissions and group of what is written.
    mode: u32,
    group: u32,
    /// Its time, if that is not now.
    modified: Option<SystemTime>,
}

impl FileChange {
    /// A change of the file at `path` to `after`. Of a link the file that it leads to is replaced,
    /// or else the link is removed.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(super) fn new(path: PathBuf, after: Option<Vec<u8>>) -> Result<Self, StepError> {
        let before = FileState::read(&path)?;
        let is_link = before.is_some() && path.is_symlink();
        let (path, link) = match (is_link, &after) {
            (false, _) => (path, None),
            (true, Some(_)) => (path.canonicalize().step_at("find file", &path)?, None),
            (true, None) => {
                let link = fs::read_link(&path).step_at("read link", &path)?;
                (path, Some(link))
            }
        };
        let (mode, group) =
            before.as_ref().map_or((NEW_FILE, 0), |before| (before.mode, before.group));
        Ok(Self { path, before, after, link, mode, group, modified: None })
    }

    /// A copy of a file, with its time, and as private.
    ///
    /// # Errors
    /// The file at `path` cannot be read.
    pub(super) fn copy(path: PathBuf, of: &FileState) -> Result<Self, StepError> {
        let copy = Self::new(path, Some(of.bytes.clone()))?.private_as(of);
        Ok(Self { modified: Some(of.modified), ..copy })
    }

    /// The change after which only those who can read `of` can read the file: containerd's config
    /// may have passwords of registries.
    pub(super) fn private_as(mut self, of: &FileState) -> Self {
        if self.before.is_none() {
            self.group = of.group;
        }
        let mut allowed = of.mode;
        if self.group != of.group {
            // There its members are others.
            allowed = allowed & !0o070 | (allowed & 0o007) << 3;
        }
        self.mode &= allowed;
        self
    }

    fn changes(&self) -> bool {
        let mode = |state: &FileState| state.mode;
        self.before.as_ref().map(|before| &before.bytes) != self.after.as_ref()
            || self.before.as_ref().is_some_and(|before| mode(before) != self.mode)
    }

    fn apply(&self) -> Result<(), StepError> {
        // Of a process that was killed.
        let left = lasting_temporary(&self.path);
        gone(fs::remove_file(&left)).step_at("remove file", &left)?;
        let Some(after) = &self.after else { return remove(&self.path) };
        write(&self.path, after, self.mode, self.group)?;
        self.modified.map_or(Ok(()), |time| set_modified(&self.path, time))
    }

    fn undo(&self) -> Result<(), StepError> {
        match (&self.before, &self.link) {
            (_, Some(link)) => {
                remove(&self.path)?;
                symlink(link, &self.path).step_at("make link", &self.path)?;
                sync_directory_of(&self.path)
            }
            (Some(before), None) => before.restore(&self.path),
            (None, None) => remove(&self.path),
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

    /// One more change, unless it changes nothing.
    pub(super) fn add(&mut self, change: FileChange) {
        if change.changes() {
            self.files.push(change);
        }
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
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let of = |change: &FileChange| {
            let before = change.before.as_ref().map(|before| text(&before.bytes));
            let after = change.after.as_deref().map(text);
            let path = change.path.display().to_string();
            diff::unified(&path, before.as_deref(), after.as_deref())
        };
        self.files.iter().map(of).collect()
    }

    /// Makes all changes, or none.
    ///
    /// # Errors
    /// The step that failed, and those of the rollback.
    pub(super) fn apply(&self) -> Result<(), StepErrors> {
        for directory in &self.directories {
            let made = fs::DirBuilder::new().recursive(true).create(directory);
            made.step_at("make directory", directory)?;
        }
        for (index, change) in self.files.iter().enumerate() {
            if let Err(step) = change.apply() {
                let mut steps = StepErrors::from(step);
                steps.check_all(self.undo_first(index + 1));
                return Err(steps);
            }
        }
        Ok(())
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
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn names(directory: &Path) -> Vec<String> {
        let entries = fs::read_dir(directory).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn changes_are_made_and_rolled_back_byte_for_byte() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("main"), b"a\r\n\xff").unwrap();
        fs::set_permissions(at("main"), fs::Permissions::from_mode(0o640)).unwrap();
        fs::write(at("old"), "old").unwrap();
        fs::write(at(".main.pause-sandboxer"), "of a killed process").unwrap();
        fs::write(at("main.new"), "of the operator").unwrap();
        let before = FileState::read(&at("main")).unwrap();
        let mut changes = Changes::default();
        changes.directory(&at("conf.d"));
        for (name, after) in
            [("conf.d/x.toml", Some("x")), ("main", Some("new")), ("old", None), ("none", None)]
        {
            let after = after.map(|text| text.as_bytes().to_vec());
            changes.add(FileChange::new(at(name), after).unwrap());
        }
        assert_eq!(changes.files.len(), 3);
        changes.apply().unwrap();
        assert_eq!(names(dir.path()), ["conf.d", "main", "main.new"]);
        assert_eq!(fs::read(at("main")).unwrap(), b"new");
        assert_eq!(fs::metadata(at("main")).unwrap().mode() & 0o777, 0o640);
        changes.undo().unwrap();
        assert_eq!(names(dir.path()), ["main", "main.new", "old"]);
        assert_eq!(FileState::read(&at("main")).unwrap(), before);
    }

    #[test]
    fn a_copy_can_be_read_by_none_but_those_who_can_read_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("main"), "secret").unwrap();
        // Of the file, of the copy that is there, of the copy that is made.
        for (mode, there, expected) in [
            (0o600, None, 0o600),
            (0o640, None, 0o640),
            (0o666, None, 0o644),
            (0o600, Some(0o644), 0o600),
            (0o644, Some(0o600), 0o600),
        ] {
            let set = |name: &str, mode| {
                fs::set_permissions(at(name), fs::Permissions::from_mode(mode)).unwrap();
            };
            set("main", mode);
            let _ = fs::remove_file(at("copy"));
            if let Some(there) = there {
                // What is the same text is changed too.
                fs::write(at("copy"), "secret").unwrap();
                set("copy", there);
            }
            let main = FileState::read(&at("main")).unwrap().unwrap();
            let mut changes = Changes::default();
            changes.add(FileChange::copy(at("copy"), &main).unwrap());
            changes.apply().unwrap();
            let copy = FileState::read(&at("copy")).unwrap().unwrap();
            assert_eq!(copy.mode, expected, "of {mode:o} and {there:?}");
            if there.is_none() {
                assert_eq!((copy.bytes, copy.modified), (main.bytes, main.modified));
            }
            changes.undo().unwrap();
            assert_eq!(at("copy").exists(), there.is_some());
        }
        let of = |group, mode| FileState {
            bytes: Vec::new(),
            mode,
            group,
            modified: SystemTime::UNIX_EPOCH,
        };
        let mut change = FileChange::new(at("new"), Some(Vec::new())).unwrap();
        (change.before, change.mode, change.group) = (Some(of(7, 0o640)), 0o640, 7);
        assert_eq!(change.private_as(&of(8, 0o640)).mode, 0o600, "of another group");
    }

    #[test]
    fn a_link_stays_or_is_removed_itself() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("real"), "old").unwrap();
        symlink("real", at("link")).unwrap();
        let read = |name| fs::read_to_string(at(name)).unwrap();
        for (after, during, left) in
            [(Some("new"), "new", ["link", "real"].as_slice()), (None, "old", &["real"])]
        {
            let mut changes = Changes::default();
            let after = after.map(|text| text.as_bytes().to_vec());
            changes.add(FileChange::new(at("link"), after).unwrap());
            changes.apply().unwrap();
            assert_eq!(
                (read("real").as_str(), names(dir.path())),
                (during, left.iter().map(|n| n.to_string()).collect())
            );
            changes.undo().unwrap();
            assert_eq!((read("link").as_str(), names(dir.path()).len()), ("old", 2));
            assert_eq!(fs::read_link(at("link")).unwrap(), Path::new("real"));
        }
    }

    /// The second change cannot be made: a directory is in its way.
    #[test]
    fn a_change_that_fails_rolls_back_those_before_it() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("first"), "1").unwrap();
        let mut changes = Changes::default();
        changes.add(FileChange::new(at("first"), Some(b"2".to_vec())).unwrap());
        changes.add(FileChange::new(at("second"), Some(b"2".to_vec())).unwrap());
        fs::create_dir(at(".second.pause-sandboxer")).unwrap();
        let error = changes.apply().unwrap_err().to_string();
        assert!(error.contains(".second.pause-sandboxer"), "{error}");
        assert_eq!(fs::read(at("first")).unwrap(), b"1");
        assert_eq!(names(dir.path()), [".second.pause-sandboxer", "first"]);
    }
}
