//! containerd's own config file: where it imports files from, and the one line that `enable` adds.

use std::path::{Path, PathBuf};

use toml::{Table, Value};

use super::changes::{Changes, FileChange, FileState};
use super::{EnableError, toml_text};
use crate::error::{IoContext as _, StepError};

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
    /// Its path, as containerd knows it.
    named: PathBuf,
    /// Its path without links.
    path: PathBuf,
    text: Option<String>,
    table: Table,
}

impl MainConfig {
    /// Reads the file, which need not exist.
    ///
    /// # Errors
    /// It cannot be read or is not TOML.
    pub(super) fn read(named: &Path) -> Result<Self, EnableError> {
        // Of a link the file that it leads to is replaced.
        let path = match named.canonicalize() {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => named.to_owned(),
            path => path.step_at("find file", named)?,
        };
        let not_text = |reason: String| {
            EnableError::Refused(format!("containerd's config {} {reason}", path.display()))
        };
        let text = match FileState::read(&path)? {
            Some(state) => Some(
                String::from_utf8(state.bytes).map_err(|_| not_text("is not UTF-8".to_owned()))?,
            ),
            None => None,
        };
        let table = text.as_deref().unwrap_or_default().parse::<Table>();
        let table = table.map_err(|e| not_text(format!("is not TOML: {}", e.message())))?;
        Ok(Self { named: named.to_owned(), path, text, table })
    }

    /// Its version. containerd reads a file without one, or of version 1, as it is.
    pub(super) fn version(&self) -> Option<i64> {
        self.table.get("version").and_then(Value::as_integer).filter(|version| *version > 1)
    }

    fn home(&self) -> &Path {
        // containerd resolves imports by the path that it was given.
        self.named.parent().unwrap_or(Path::new("/"))
    }

    /// The directories of which it imports every file with the ending `.toml`.
    fn imported(&self) -> Vec<PathBuf> {
        let imports = self.table.get("imports").and_then(Value::as_array).into_iter().flatten();
        let paths = imports.filter_map(Value::as_str).map(|import| self.home().join(import));
        let directories = paths.filter(|path| path.file_name() == Some("*.toml".as_ref()));
        let directories = directories.filter_map(|path| path.parent().map(Path::to_owned));
        // A pattern of directories has no one place for a file.
        directories.filter(|path| !path.as_os_str().as_encoded_bytes().contains(&b'*')).collect()
    }

    /// Where the drop-in is, or has its place.
    pub(super) fn drop_in(&self) -> PathBuf {
        let own = self.home().join(DIRECTORY);
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
    /// file beside it. `newest` is the version of a file that there is not yet.
    ///
    /// # Errors
    /// Another program writes the file, or the copy cannot be read.
    pub(super) fn import(
        &self,
        drop_in: &Path,
        newest: i64,
        changes: &mut Changes,
    ) -> Result<(), EnableError> {
        if self.imports(drop_in) {
            return Ok(());
        }
        let pattern = pattern_of(drop_in);
        let Some(text) = &self.text else {
            let created = created(newest, &pattern);
            changes.directory(self.home());
            changes.add(FileChange::new(self.path.clone(), Some(created.into_bytes()))?);
            return Ok(());
        };
        if let Some(line) = text.lines().take(HEAD).find(|line| is_generated(line)) {
            return Err(EnableError::Refused(format!(
                "containerd's config {} is written by another program ({:?}): let that add imports \
                 = [{pattern:?}], then repeat the command",
                self.path.display(),
                line.trim_start_matches('#').trim()
            )));
        }
        let edited = toml_text::add_import(text, &pattern).map_err(|reason| {
            EnableError::Refused(format!("containerd's config {} {reason}", self.path.display()))
        })?;
        let backup = self.path.with_added_extension(BACKUP);
        changes.add(FileChange::new(backup, Some(text.clone().into_bytes()))?);
        changes.add(FileChange::new(self.path.clone(), Some(edited.into_bytes()))?);
        Ok(())
    }

    /// Adds the changes that undo [`MainConfig::import`]: the file as it was, if only that import
    /// was added since. Otherwise, or if the directory has other files, the import stays.
    ///
    /// # Errors
    /// A file or the directory cannot be read.
    pub(super) fn no_import(&self, drop_in: &Path, changes: &mut Changes) -> Result<(), StepError> {
        let directory = drop_in.parent().unwrap_or(Path::new("/"));
        let backup = self.path.with_added_extension(BACKUP);
        let (Some(text), false) = (&self.text, has_others(directory, drop_in)?) else {
            return Ok(());
        };
        let pattern = pattern_of(drop_in);
        let by_us = text.starts_with(CREATED)
            && self.version().is_some_and(|version| *text == created(version, &pattern));
        if by_us {
            changes.add(FileChange::new(self.path.clone(), None)?);
            return Ok(());
        }
        let Some(before) = FileState::read(&backup)? else { return Ok(()) };
        let edited = String::from_utf8(before.bytes.clone())
            .ok()
            .and_then(|before| toml_text::add_import(&before, &pattern).ok());
        if edited.as_ref() == Some(text) || before.bytes == text.as_bytes() {
            changes.add(FileChange::new(self.path.clone(), Some(before.bytes))?);
            changes.add(FileChange::new(backup, None)?);
        }
        Ok(())
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
        fn no_import(&self, drop_in: &Path) {
            let mut changes = Changes::default();
            self.main().no_import(drop_in, &mut changes).unwrap();
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
        let drop_in = etc.import();
        assert!(etc.text().ends_with(text) && etc.text().starts_with("imports = [\""));
        let backup = etc.at("config.toml.before-pause-sandboxer");
        assert_eq!(fs::read_to_string(&backup).unwrap(), text);
        etc.import();
        assert_eq!(fs::read_to_string(&backup).unwrap(), text, "nothing is done twice");
        // Another's file needs the import.
        fs::write(etc.at("conf.d/other.toml"), "").unwrap();
        etc.no_import(&drop_in);
        assert!(etc.text().starts_with("imports"));
        fs::remove_file(etc.at("conf.d/other.toml")).unwrap();
        etc.no_import(&drop_in);
        assert_eq!(etc.text(), text);
        assert!(!backup.exists());
    }

    #[test]
    fn an_edited_file_keeps_its_edits_and_a_made_one_is_removed() {
        let etc = Etc::with("version = 3\n");
        let drop_in = etc.import();
        let edited = etc.text() + "root = \"/x\"\n";
        fs::write(etc.at("config.toml"), &edited).unwrap();
        etc.no_import(&drop_in);
        assert_eq!(etc.text(), edited);

        fs::remove_file(etc.at("config.toml")).unwrap();
        let drop_in = etc.import();
        assert_eq!(etc.main().version(), Some(3));
        etc.no_import(&drop_in);
        assert!(!etc.at("config.toml").exists());
    }

    #[test]
    fn of_a_link_the_file_is_replaced() {
        let etc = Etc::with("version = 3\n");
        fs::rename(etc.at("config.toml"), etc.at("real.toml")).unwrap();
        std::os::unix::fs::symlink("real.toml", etc.at("config.toml")).unwrap();
        let drop_in = etc.import();
        assert!(fs::symlink_metadata(etc.at("config.toml")).unwrap().is_symlink());
        assert!(fs::read_to_string(etc.at("real.toml")).unwrap().starts_with("imports"));
        etc.no_import(&drop_in);
        assert_eq!(etc.text(), "version = 3\n");
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
