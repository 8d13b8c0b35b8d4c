//! Files that are changed together: all of them, or none.

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt as _, chown};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::diff;
use crate::error::{IoContext as _, StepError, StepErrors, gone};
use crate::replace_file::{lasting_temporary, replace_lasting_file, sync_directory_of};

/// Permissions of a new file: containerd's config has no secrets.
const NEW_FILE: u32 = 0o644;

/// Who is in the group of the file, and any other user, can write it.
const GROUP_WRITABLE: u32 = 0o020;
const WRITABLE: u32 = 0o002;
/// Of a directory: only its owner can rename and remove an entry.
const STICKY: u32 = 0o1000;

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
    /// It cannot be read, or is no regular file.
    pub(super) fn read(path: &Path) -> Result<Option<Self>, StepError> {
        const STEP: &str = "read file";
        let about = match fs::metadata(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            about => about.step_at(STEP, path)?,
        };
        if !about.is_file() {
            let reason = io::Error::other("it is no regular file");
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
}

impl FileChange {
    /// A change of the file at `path` to `after`.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(super) fn new(path: PathBuf, after: Option<Vec<u8>>) -> Result<Self, StepError> {
        Ok(Self { before: FileState::read(&path)?, path, after })
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

/// Fails if a user other than root can change the file at `path`, or put another in its place. It
/// need not exist.
///
/// # Errors
/// The path that others can write, and by what.
pub(super) fn check_trusted(path: &Path) -> Result<(), StepError> {
    const STEP: &str = "trust file";
    for place in path.ancestors() {
        let about = match fs::metadata(place) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            about => about.step_at(STEP, place)?,
        };
        let (mode, user, group) = (about.mode() & 0o7777, about.uid(), about.gid());
        let by_others = mode & WRITABLE != 0 || mode & GROUP_WRITABLE != 0 && group != 0;
        let kept = about.is_dir() && mode & STICKY != 0 && place != path;
        if user != 0 || by_others && !kept {
            let reason = format!(
                "users other than root can write it (owner {user}, group {group}, mode {mode:o}); \
                 examine it, then: chown root:root {0} && chmod go-w {0}",
                place.display()
            );
            let reason = io::Error::new(io::ErrorKind::PermissionDenied, reason);
            return Err(StepError::at(STEP, place, reason));
        }
    }
    Ok(())
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

    #[test]
    fn what_others_can_write_is_not_trusted() {
        if kit::skip_without_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let (directory, file) = (dir.path().join("d"), dir.path().join("d/f"));
        fs::create_dir(&directory).unwrap();
        fs::write(&file, "").unwrap();
        check_trusted(&file).unwrap();
        check_trusted(&directory.join("missing/x")).unwrap();
        let set = |path: &Path, mode| {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        };
        for (path, wrong, right) in
            [(&file, 0o646, 0o664), (&directory, 0o777, 0o1777), (&directory, 0o757, 0o775)]
        {
            set(path, wrong);
            let error = check_trusted(&file).unwrap_err();
            assert_eq!((error.path(), error.io().kind()), (Some(path.as_path()), PERMISSION));
            set(path, right);
            check_trusted(&file).unwrap();
        }
        chown(&file, Some(65534), None).unwrap();
        assert!(check_trusted(&file).unwrap_err().to_string().contains("owner 65534"));
    }

    const PERMISSION: io::ErrorKind = io::ErrorKind::PermissionDenied;
}
