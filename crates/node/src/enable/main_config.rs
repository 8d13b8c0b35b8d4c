//! containerd's own config file: the directories that it imports, and the import that `enable`
//! adds.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use base::error::{IoContext as _, StepError};
use toml::{Table, Value};

use super::changes::{Changes, FileChange, FileState};
use super::{EnableError, toml_text};
use crate::check::containerd::{Main, is_pattern};

/// The extension of the file as it was before `enable`.
pub(super) const BACKUP: &str = "before-pause-sandboxer";

/// The directory that is imported if none is.
const DIRECTORY: &str = "conf.d";

/// Name of the drop-in.
const DROP_IN: &str = "pause-sandboxer.toml";

/// The first line of a file that there was not before.
const CREATED: &str = "# Written by `pause-sandboxer enable`: there was no file.\n";

/// Lines at the head of a file in which its generator says that it will write it again.
const HEAD: usize = 5;

/// The config file.
#[derive(Debug)]
pub(super) struct MainConfig {
    /// Its path as containerd knows it, and its table.
    main: Main,
    /// Its path without links.
    path: PathBuf,
    /// The file, if it is there, and its text.
    state: Option<FileState>,
    text: Option<String>,
}

impl MainConfig {
    /// Reads the file, which need not exist.
    ///
    /// # Errors
    /// It cannot be read or is not TOML.
    pub(super) fn read(named: &Path) -> Result<Self, EnableError> {
        // A link stays: the file that it leads to is replaced.
        let path = match named.canonicalize() {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => named.to_owned(),
            path => path.step_at("find file", named)?,
        };
        let not_text = |reason: String| {
            EnableError::from(format!("containerd's config {} {reason}", path.display()))
        };
        let state = FileState::read(&path)?;
        let bytes = state.as_ref().map(|state| state.bytes.clone());
        let text = bytes.map(String::from_utf8).transpose();
        let text = text.map_err(|_| not_text("is not UTF-8".to_owned()))?;
        let table = text.as_deref().unwrap_or_default().parse::<Table>();
        let table = table.map_err(|e| not_text(format!("is not TOML: {}", e.message())))?;
        Ok(Self { main: Main { path: named.to_owned(), table }, path, state, text })
    }

    /// Its version; `None`: it has none, or 1.
    pub(super) fn version(&self) -> Option<i64> {
        self.main.version()
    }

    /// The directories of which it imports every file with the ending `.toml`.
    fn imported(&self) -> Vec<PathBuf> {
        let imports = self.main.imports();
        let all = imports.filter(|path| path.file_name() == Some("*.toml".as_ref()));
        let directories = all.filter_map(|path| path.parent().map(Path::to_owned));
        // A pattern of directories does not name one directory.
        directories.filter(|path| !is_pattern(path)).collect()
    }

    /// Where the drop-in is, or has its place.
    pub(super) fn drop_in(&self) -> PathBuf {
        let own = self.main.directory().join(DIRECTORY);
        let imported = self.imported();
        let all = imported.iter().chain([&own]).map(|directory| directory.join(DROP_IN));
        let there = all.filter(|path| path.exists()).collect::<Vec<_>>();
        // The one that counts before one that nothing imports.
        let preferred = |path: &&PathBuf| self.imports(path);
        let found = there.iter().find(preferred).or_else(|| there.first());
        found.cloned().unwrap_or_else(|| {
            let own = imported.iter().find(|directory| **directory == own).unwrap_or(&own);
            let directory = if imported.contains(own) { Some(own) } else { imported.first() };
            directory.unwrap_or(own).join(DROP_IN)
        })
    }

    fn imports(&self, drop_in: &Path) -> bool {
        let directory = drop_in.parent();
        self.imported().iter().any(|imported| Some(imported.as_path()) == directory)
    }

    /// Adds the change by which the file imports the directory of `drop_in`, with a copy of the
    /// file beside it. `version` is that of a file that is created.
    ///
    /// # Errors
    /// Another program writes the file, or the copy cannot be read.
    pub(super) fn import(
        &self,
        drop_in: &Path,
        version: i64,
        changes: &mut Changes,
    ) -> Result<(), EnableError> {
        if self.imports(drop_in) {
            return Ok(());
        }
        let pattern = pattern_of(drop_in);
        let (Some(state), Some(text)) = (&self.state, &self.text) else {
            if self.path.is_symlink() {
                return Err(EnableError::from(format!(
                    "containerd's config {} is a link to a file that does not exist: create that \
                     file or remove the link",
                    self.path.display()
                )));
            }
            let created = created(version, &pattern);
            changes.directory(self.main.directory());
            let created = FileChange::new(self.path.clone(), Some(created.into_bytes()))?;
            changes.add(created.read_as(None));
            return Ok(());
        };
        if let Some(line) = text.lines().take(HEAD).find(|line| is_generated(line)) {
            return Err(EnableError::from(format!(
                "containerd's config {} is generated by another program ({:?}): add imports = \
                 [{pattern:?}] there, then run this command again",
                self.path.display(),
                line.trim_start_matches('#').trim()
            )));
        }
        let edited = toml_text::add_import(text, &pattern).map_err(|reason| {
            EnableError::from(format!("containerd's config {} {reason}", self.path.display()))
        })?;
        changes.add(FileChange::copy(self.backup(), state)?);
        let edited = FileChange::new(self.path.clone(), Some(edited.into_bytes()))?;
        changes.add(edited.read_as(Some(state)));
        Ok(())
    }

    /// The warning before [`MainConfig::import`] changes a file that configuration management may
    /// overwrite: then the import is lost, and with the next start of containerd the handler.
    pub(super) fn managed(&self, drop_in: &Path) -> Option<String> {
        let text = self.text.as_deref().filter(|_| !self.imports(drop_in))?;
        let line = text.lines().take(HEAD).find(|line| is_managed(line))?;
        Some(format!(
            "containerd's config {} may be overwritten by another program ({:?}): add imports = \
             [{:?}] there too, or containerd loses the handler at a later restart",
            self.path.display(),
            line.trim_start_matches('#').trim(),
            pattern_of(drop_in)
        ))
    }

    /// Adds the changes that undo [`MainConfig::import`]: the file as it was, if only that import
    /// was added since. Otherwise, or if the directory has other files, the import stays.
    ///
    /// # Errors
    /// A file or the directory cannot be read.
    pub(super) fn undo_import(
        &self,
        drop_in: &Path,
        changes: &mut Changes,
    ) -> Result<(), StepError> {
        let directory = drop_in.parent().unwrap_or(Path::new("/"));
        let (Some(text), false) = (&self.text, has_others(directory, drop_in)?) else {
            return Ok(());
        };
        if self.is_created(drop_in) {
            let removed = FileChange::new(self.path.clone(), None)?;
            changes.add(removed.read_as(self.state.as_ref()));
            return Ok(());
        }
        let backup = self.backup();
        let Some(before) = FileState::read(&backup)? else { return Ok(()) };
        if self.is_import_added_to(&before, drop_in) || before.bytes == text.as_bytes() {
            // With its time: it is no edit that containerd has not read.
            let restored = FileChange::copy(self.path.clone(), &before)?;
            changes.add(restored.read_as(self.state.as_ref()));
            changes.add(FileChange::new(backup, None)?);
        }
        Ok(())
    }

    /// Limits the permissions of a changed file to the readers of this one, which may have secrets.
    pub(super) fn keep_private(&self, change: FileChange) -> FileChange {
        match &self.state {
            Some(state) => change.private_as(state),
            None => change,
        }
    }

    fn backup(&self) -> PathBuf {
        self.path.with_added_extension(BACKUP)
    }

    /// Whether [`MainConfig::import`] has created the file.
    fn is_created(&self, drop_in: &Path) -> bool {
        let text = self.text.as_deref().unwrap_or_default();
        let created_of = |version| created(version, &pattern_of(drop_in));
        text.starts_with(CREATED)
            && self.version().is_some_and(|version| text == created_of(version))
    }

    /// Whether the file is `before` with the import.
    fn is_import_added_to(&self, before: &FileState, drop_in: &Path) -> bool {
        let before = std::str::from_utf8(&before.bytes).ok();
        let edited =
            before.and_then(|before| toml_text::add_import(before, &pattern_of(drop_in)).ok());
        edited.is_some() && edited == self.text
    }

    /// When the file was last written by anyone but [`MainConfig::import`]; `None`: never.
    ///
    /// # Errors
    /// The copy of the file cannot be read.
    pub(super) fn last_edit(&self, drop_in: &Path) -> Result<Option<SystemTime>, StepError> {
        if self.is_created(drop_in) {
            return Ok(None);
        }
        let before = FileState::read(&self.backup())?;
        let before = before.filter(|before| self.is_import_added_to(before, drop_in));
        Ok(before.as_ref().or(self.state.as_ref()).map(|state| state.modified))
    }
}

fn pattern_of(drop_in: &Path) -> String {
    drop_in.with_file_name("*.toml").display().to_string()
}

fn created(version: i64, pattern: &str) -> String {
    format!("{CREATED}imports = [{}]\nversion = {version}\n", Value::from(pattern))
}

fn is_generated(line: &str) -> bool {
    line.starts_with('#') && line.to_ascii_uppercase().contains("DO NOT EDIT")
}

/// Whether a comment is as configuration management writes it, such as "Ansible managed".
fn is_managed(line: &str) -> bool {
    let line = line.to_ascii_lowercase();
    line.starts_with('#') && ["managed by", "ansible managed"].iter().any(|by| line.contains(by))
}

/// Whether a directory has files that containerd reads, beside the drop-in.
fn has_others(directory: &Path, drop_in: &Path) -> Result<bool, StepError> {
    let entries = match std::fs::read_dir(directory) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(false),
        entries => entries.step_at("read directory", directory)?,
    };
    for entry in entries {
        let path = entry.step_at("read directory", directory)?.path();
        if path.extension().is_some_and(|ending| ending == "toml") && path != drop_in {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    struct Etc(tempfile::TempDir);

    impl Etc {
        fn with(text: &str) -> Self {
            let etc = Self(tempfile::tempdir().unwrap());
            fs::write(etc.at("config.toml"), text).unwrap();
            etc
        }

        fn at(&self, name: &str) -> PathBuf {
            self.0.path().canonicalize().unwrap().join(name)
        }

        fn main(&self) -> MainConfig {
            MainConfig::read(&self.at("config.toml")).unwrap()
        }

        fn text(&self) -> String {
            fs::read_to_string(self.at("config.toml")).unwrap()
        }

        /// `enable`'s part.
        fn import(&self) -> PathBuf {
            let (main, mut changes) = (self.main(), Changes::default());
            let drop_in = main.drop_in();
            main.import(&drop_in, 3, &mut changes).unwrap();
            changes.apply().unwrap();
            fs::create_dir_all(drop_in.parent().unwrap()).unwrap();
            fs::write(&drop_in, "").unwrap();
            drop_in
        }

        /// `disable`'s part.
        fn undo_import(&self, drop_in: &Path) {
            let mut changes = Changes::default();
            self.main().undo_import(drop_in, &mut changes).unwrap();
            changes.apply().unwrap();
        }
    }

    #[test]
    fn the_drop_in_is_in_a_directory_that_is_imported() {
        for (imports, expected) in [
            ("", "conf.d"),
            ("imports = []", "conf.d"),
            ("imports = ['/x/one.toml']", "conf.d"),
            ("imports = ['/x/*.toml', 'conf.d/*.toml']", "conf.d"),
            ("imports = ['drop-ins/*.toml']", "drop-ins"),
            ("imports = ['*/x/*.toml']", "conf.d"),
        ] {
            let etc = Etc::with(imports);
            assert_eq!(etc.main().drop_in(), etc.at(expected).join(DROP_IN), "{imports}");
        }
        let etc = Etc::with("imports = ['a/*.toml', 'b/*.toml']");
        fs::create_dir(etc.at("b")).unwrap();
        fs::write(etc.at("b").join(DROP_IN), "").unwrap();
        assert_eq!(etc.main().drop_in(), etc.at("b").join(DROP_IN));
    }

    #[test]
    fn the_import_comes_and_goes_without_a_trace() {
        let text = "# mine\nversion = 2\n[plugins]\n\t# a tab\n";
        let etc = Etc::with(text);
        // It may have secrets.
        let private = fs::Permissions::from_mode(0o600);
        fs::set_permissions(etc.at("config.toml"), private).unwrap();
        let edited = fs::metadata(etc.at("config.toml")).unwrap().modified().unwrap();
        let drop_in = etc.import();
        assert!(etc.text().ends_with(text) && etc.text().starts_with("imports = [\""));
        let backup = etc.at("config.toml.before-pause-sandboxer");
        assert_eq!(fs::read_to_string(&backup).unwrap(), text);
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&backup), mode(&etc.at("config.toml"))), (0o600, 0o600));
        assert_eq!(etc.main().last_edit(&drop_in).unwrap(), Some(edited), "the import is no edit");
        etc.import();
        assert_eq!(fs::read_to_string(&backup).unwrap(), text, "nothing is done twice");
        // Another's file needs the import.
        fs::write(etc.at("conf.d/other.toml"), "").unwrap();
        etc.undo_import(&drop_in);
        assert!(etc.text().starts_with("imports"));
        fs::remove_file(etc.at("conf.d/other.toml")).unwrap();
        etc.undo_import(&drop_in);
        assert_eq!(etc.text(), text);
        assert!(!backup.exists());
        let restored = fs::metadata(etc.at("config.toml")).unwrap().modified().unwrap();
        assert_eq!(restored, edited, "the removal is no edit");
    }

    #[test]
    fn an_edited_file_keeps_its_edits_and_a_made_one_is_removed() {
        let etc = Etc::with("version = 3\n");
        let drop_in = etc.import();
        let edited = etc.text() + "root = \"/x\"\n";
        fs::write(etc.at("config.toml"), &edited).unwrap();
        etc.undo_import(&drop_in);
        assert_eq!(etc.text(), edited);

        fs::remove_file(etc.at("config.toml")).unwrap();
        let drop_in = etc.import();
        assert_eq!(etc.main().version(), Some(3));
        etc.undo_import(&drop_in);
        assert!(!etc.at("config.toml").exists());
    }

    #[test]
    fn an_edit_after_the_file_was_read_is_not_overwritten() {
        let etc = Etc::with("version = 3\n");
        let main = etc.main();
        fs::write(etc.at("config.toml"), "root = '/x'\n").unwrap();
        let mut changes = Changes::default();
        main.import(&main.drop_in(), 3, &mut changes).unwrap();
        changes.apply().unwrap_err();
        assert_eq!(etc.text(), "root = '/x'\n");
        assert!(!etc.at("config.toml.before-pause-sandboxer").exists());
    }

    #[test]
    fn of_a_link_the_file_is_replaced() {
        let etc = Etc::with("version = 3\n");
        fs::rename(etc.at("config.toml"), etc.at("real.toml")).unwrap();
        std::os::unix::fs::symlink("real.toml", etc.at("config.toml")).unwrap();
        let drop_in = etc.import();
        assert!(fs::symlink_metadata(etc.at("config.toml")).unwrap().is_symlink());
        assert!(fs::read_to_string(etc.at("real.toml")).unwrap().starts_with("imports"));
        etc.undo_import(&drop_in);
        assert_eq!(etc.text(), "version = 3\n");
        fs::remove_file(etc.at("real.toml")).unwrap();
        let main = etc.main();
        let error = main.import(&main.drop_in(), 3, &mut Changes::default()).unwrap_err();
        let error = error.to_string();
        assert!(error.contains("a link to a file that does not exist"), "{error}");
    }

    #[test]
    fn the_comment_of_configuration_management_is_found() {
        for (text, is_found) in [
            ("# ANSIBLE MANAGED BLOCK\n", true),
            ("version = 3\n# This file is Managed by Puppet.\n", true),
            ("managed = 'managed by'\n", false),
            ("imports = [\"conf.d/*.toml\"]\n# Managed by Puppet\n", false),
            (&("\n".repeat(HEAD) + "# Managed by Puppet\n"), false),
        ] {
            let main = Etc::with(text).main();
            assert_eq!(main.managed(&main.drop_in()).is_some(), is_found, "{text}");
        }
    }

    #[test]
    fn a_generated_file_is_refused() {
        let etc = Etc::with("# File generated by k3s. DO NOT EDIT. Use config.toml.tmpl.\n");
        let main = etc.main();
        let error = main.import(&main.drop_in(), 3, &mut Changes::default()).unwrap_err();
        assert!(error.to_string().contains("generated by k3s"), "{error}");
        let text = etc.text() + "imports = [\"conf.d/*.toml\"]\n";
        fs::write(etc.at("config.toml"), text).unwrap();
        let main = etc.main();
        main.import(&main.drop_in(), 3, &mut Changes::default()).unwrap();
    }
}
