//! Facts that containerd's merged config does not show: which imported files are missing, which
//! handlers of the file the merge drops, and whether containerd has read the current files.

use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use toml::{Table, Value};

use super::super::Finding;
use super::{CONFIG, CRI_OF_2, Mode, RUNTIME};

/// The directory that is imported if none is.
const DIRECTORY: &str = "conf.d";

/// The runtime handlers of CRI's settings in the section of `plugin`.
pub(crate) fn runtime_table<'a>(table: &'a Table, plugin: &str) -> Option<&'a Table> {
    let plugin = table.get("plugins")?.get(plugin)?;
    plugin.get("containerd")?.get("runtimes")?.as_table()
}

/// The config file that containerd starts with, without its imports.
#[derive(Debug)]
pub(crate) struct Main {
    pub(crate) path: PathBuf,
    /// Empty if it is not TOML, which containerd reports with the place.
    pub(crate) table: Table,
}

impl Main {
    /// Reads the file.
    ///
    /// # Errors
    /// It is not there or cannot be read.
    pub(super) fn read(path: &Path) -> io::Result<Self> {
        let table = toml::from_str(&std::fs::read_to_string(path)?).unwrap_or_default();
        Ok(Self { path: path.to_owned(), table })
    }

    /// Its version. containerd reads a file without one, or of version 1, as it is.
    pub(crate) fn version(&self) -> Option<i64> {
        self.table.get("version").and_then(Value::as_integer).filter(|version| *version > 1)
    }

    /// The version whose names containerd reads in an imported file that has none. Beside a file of
    /// version 2, containerd up to 2.2 takes the last version that it reads; later releases convert
    /// each file alone, and read the names of version 3 beside any (`LoadConfig` of containerd).
    pub(crate) fn version_of_imports(&self) -> Option<i64> {
        let own = self.version();
        if own != Some(2) {
            return own;
        }
        let files = self.imports().flat_map(|path| imported(&path));
        let versions = files.filter_map(|path| Self::read(&path).ok()?.version());
        versions.last().or(own)
    }

    /// Its imports, as paths whose last part may be a pattern.
    pub(crate) fn imports(&self) -> impl Iterator<Item = PathBuf> {
        let imports = self.table.get("imports").and_then(Value::as_array).into_iter().flatten();
        imports.filter_map(Value::as_str).map(|import| self.directory().join(import))
    }

    /// containerd resolves imports by the path that it was given, not by that of a link's target.
    pub(crate) fn directory(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new("/"))
    }

    /// The directories of which it imports every file with the ending `.toml`.
    fn imported(&self) -> Vec<PathBuf> {
        let all = self.imports().filter(|path| path.file_name() == Some("*.toml".as_ref()));
        let directories = all.filter_map(|path| path.parent().map(Path::to_owned));
        // A pattern of directories does not name one directory.
        directories.filter(|path| !is_pattern(path)).collect()
    }

    /// Whether it imports the directory of `drop_in`.
    pub(crate) fn imports_directory(&self, drop_in: &Path) -> bool {
        self.imported().iter().any(|imported| Some(imported.as_path()) == drop_in.parent())
    }

    /// Where the drop-in of `mode` is, or has its place.
    pub(crate) fn drop_in(&self, mode: Mode) -> PathBuf {
        let name = mode.drop_in();
        let own = self.directory().join(DIRECTORY);
        let imported = self.imported();
        let place = match imported.first() {
            Some(first) if !imported.contains(&own) => first,
            _ => &own,
        };
        // A drop-in that is imported comes before one that nothing imports.
        let mut all = imported.iter().chain([&own]).map(|directory| directory.join(name));
        all.find(|path| path.exists()).unwrap_or_else(|| place.join(name))
    }

    /// Imported files that do not exist: `config dump` ignores them, and containerd does not start.
    /// `written` are about to exist.
    pub(super) fn missing_imports(&self, written: &[&Path]) -> Vec<Finding> {
        let missing = self.imports().filter(|path| !is_pattern(path) && !path.exists());
        let missing = missing.filter(|path| !written.contains(&path.as_path()));
        missing
            .map(|path| {
                let fact = format!(
                    "{} imports {}, which does not exist: containerd does not start with it",
                    self.path.display(),
                    path.display()
                );
                Finding::fail(CONFIG, fact, "remove it from `imports`, or create it")
            })
            .collect()
    }

    /// The runtime handlers of the file that the merged config lacks.
    pub(super) fn lost_handlers(&self, merged: &Table) -> Option<Finding> {
        let there = runtime_table(merged, RUNTIME);
        let mut lost: Vec<String> = [CRI_OF_2, RUNTIME]
            .iter()
            .flat_map(|plugin| runtime_table(&self.table, plugin).into_iter().flatten())
            .map(|(name, _)| name)
            .filter(|name| there.is_none_or(|there| !there.contains_key(*name)))
            .map(|name| format!("{name:?}"))
            .collect();
        lost.dedup();
        if lost.is_empty() {
            return None;
        }
        let (main, lost) = (self.path.display(), lost.join(", "));
        let fact = format!("containerd drops runtime handler {lost} of {main}");
        let advice = if self.version() == Some(2) {
            format!(
                "an imported file defines handlers as of version 3, which hide those of version 2: \
                 cp -p {main} {main}.new && containerd --config {main} config migrate >{main}.new \
                 && mv {main}.new {main}, then add `imports` again"
            )
        } else {
            format!("move it to plugins.\"{RUNTIME}\".containerd.runtimes")
        };
        Some(Finding::fail(CONFIG, fact, advice))
    }

    /// The file and those that it imports, of which a containerd was started before they were
    /// written last. A time in the future is of a wrong clock, and says nothing.
    pub(super) fn newer(&self, started: SystemTime) -> Vec<PathBuf> {
        let now = SystemTime::now();
        let all = [self.path.clone()];
        all.into_iter()
            .chain(self.imports().flat_map(|path| imported(&path)))
            .filter(|path| {
                let written = path.metadata().and_then(|meta| meta.modified());
                written.is_ok_and(|written| started < written && written <= now)
            })
            .collect()
    }

    /// Whether a containerd was started before one of the files was written last. `restart` is the
    /// remedy.
    pub(super) fn written_after(&self, started: SystemTime, restart: &str) -> Option<Finding> {
        let newer = self.newer(started);
        let newer: Vec<String> = newer.iter().map(|path| path.display().to_string()).collect();
        if newer.is_empty() {
            return None;
        }
        let fact = format!(
            "containerd was started before {} was written, and has not read it",
            newer.join(" and ")
        );
        Some(Finding::warn(CONFIG, fact, restart))
    }
}

fn is_pattern(path: &Path) -> bool {
    path.as_os_str().as_encoded_bytes().contains(&b'*')
}

/// The files of an import, for their times: of a pattern those in its directory with its ending.
fn imported(import: &Path) -> Vec<PathBuf> {
    if !is_pattern(import) {
        return vec![import.to_owned()];
    }
    let entries = import.parent().and_then(|directory| directory.read_dir().ok());
    let files = entries.into_iter().flatten().flatten().map(|entry| entry.path());
    let mut files: Vec<_> = files.filter(|file| file.extension() == import.extension()).collect();
    files.sort();
    files
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;

    fn main(text: &str) -> Main {
        Main { path: "/c.toml".into(), table: toml::from_str(text).unwrap() }
    }

    fn merged(handlers: &[&str]) -> Table {
        let section = |name| format!("[plugins.'{RUNTIME}'.containerd.runtimes.{name}]\n");
        toml::from_str(&handlers.iter().map(section).collect::<String>()).unwrap()
    }

    #[test]
    fn handlers_that_the_merge_loses_are_reported() {
        let files = |version: &str, plugin: &str| {
            main(&format!("{version}\n[plugins.'{plugin}'.containerd.runtimes.kata]\n"))
        };
        assert!(files("version = 3", RUNTIME).lost_handlers(&merged(&["kata", "runc"])).is_none());
        assert!(files("version = 2", CRI_OF_2).lost_handlers(&merged(&["kata"])).is_none());
        let hidden = files("version = 2", CRI_OF_2).lost_handlers(&merged(&["runc"])).unwrap();
        assert_eq!(hidden.fact, "containerd drops runtime handler \"kata\" of /c.toml");
        assert!(hidden.advice.contains("config migrate"), "{hidden}");
        for version in ["version = 3", ""] {
            let unread = files(version, CRI_OF_2).lost_handlers(&merged(&["runc"])).unwrap();
            assert!(unread.advice.contains(RUNTIME), "{unread}");
        }
    }

    #[test]
    fn a_file_without_a_version_has_that_of_the_last_file_that_has_one() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        let version = |own: &str| {
            let mut main = main(&format!("{own}\nimports = ['*.toml']"));
            main.path = dir.path().join("c");
            main.version_of_imports()
        };
        write("5.toml", "");
        assert_eq!([version(""), version("version = 2")], [None, Some(2)]);
        write("4.toml", "version = 3");
        assert_eq!([version("version = 2"), version("version = 4")], [Some(3), Some(4)]);
        write("6.toml", "version = 2");
        assert_eq!([version("version = 2"), version("version = 3")], [Some(2), Some(3)]);
    }

    #[test]
    fn a_missing_import_is_reported_unless_it_is_a_pattern() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("there.toml"), "").unwrap();
        let mut main = main("imports = ['there.toml', 'no/*.toml', '/nowhere/x.toml', 'y.toml']");
        main.path = dir.path().join("c.toml");
        let facts: Vec<String> = main.missing_imports(&[]).iter().map(|f| f.fact.clone()).collect();
        assert_eq!(facts.len(), 2, "{facts:?}");
        assert!(facts[0].contains("imports /nowhere/x.toml, which does not exist"), "{facts:?}");
        assert!(facts[1].contains("/y.toml, which does not exist"), "{facts:?}");
    }

    #[test]
    fn files_written_after_the_start_are_reported() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str| dir.path().join(name);
        let set = |name: &str, seconds: u64| {
            let time = UNIX_EPOCH + Duration::from_secs(seconds);
            std::fs::File::create(file(name)).unwrap().set_modified(time).unwrap();
        };
        for name in ["c.toml", "one.toml", "10.toml", "20.toml", "20.toml.bak"] {
            set(name, 1000);
        }
        let directory = dir.path().display();
        let mut main = main(&format!("imports = ['one.toml', '{directory}/*.toml']"));
        main.path = file("c.toml");
        let after = |main: &Main, seconds| {
            main.written_after(UNIX_EPOCH + Duration::from_secs(seconds), "restart it")
        };
        assert!(after(&main, 1000).is_none());
        set("20.toml", 2000);
        set("20.toml.bak", 2000);
        let fact = after(&main, 1000).unwrap().fact;
        let expected = format!("containerd was started before {} was", file("20.toml").display());
        assert!(fact.starts_with(&expected), "{fact}");
        set("one.toml", 2000);
        assert!(after(&main, 1000).unwrap().fact.contains("one.toml"));
        set("c.toml", 2000);
        assert!(after(&main, 1999).unwrap().fact.contains("c.toml"));
        // No restart would change that.
        set("c.toml", 1 << 33);
        assert!(after(&main, 2000).is_none());
    }
}
