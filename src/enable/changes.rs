//! Files that are changed together: all of them, or none.

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt as _, chown, symlink};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::diff;
use crate::error::{IoContext as _, StepError, StepErrors, gone};
use crate::replace_file::{lasting_temporary, replace_lasting_file, sync_directory_of};

/// Permissions of a new file: containerd's config has no secrets.
const NEW_FILE: u32 = 0o644;

/// A file as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FileState {
    pub(super) bytes: Vec<u8>,
    mode: u32,
    group: u32,
    modified: SystemTime,
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
        self.write(path, &self.bytes)?;
        // By the time containerd's files are compared with its start.
        let restored = fs::File::options().write(true).open(path);
        restored.and_then(|file| file.set_modified(self.modified)).step_at("restore file", path)
    }

    fn write(&self, path: &Path, bytes: &[u8]) -> Result<(), StepError> {
        replace_lasting_file(path, self.mode, bytes)?;
        if self.group == 0 {
            return Ok(());
        }
        chown(path, None, Some(self.group)).step_at("set group of file", path)
    }
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
        Ok(Self { path, before, after, link })
    }

    fn changes(&self) -> bool {
        self.before.as_ref().map(|before| &before.bytes) != self.after.as_ref()
    }

    fn apply(&self) -> Result<(), StepError> {
        // Of a process that was killed.
        let left = lasting_temporary(&self.path);
        gone(fs::remove_file(&left)).step_at("remove file", &left)?;
        match (&self.after, &self.before) {
            (Some(after), Some(before)) => before.write(&self.path, after),
            (Some(after), None) => replace_lasting_file(&self.path, NEW_FILE, after),
            (None, _) => remove(&self.path),
        }
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
    /// The step that failed, and those of the way back.
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

    /// Takes all changes back.
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
    fn changes_are_made_and_taken_back_byte_for_byte() {
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
    fn a_change_that_fails_takes_back_those_before_it() {
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
