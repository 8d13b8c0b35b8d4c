//! containerd's config file with its imports, merged as containerd 2.x merges them
//! (`cmd/containerd/server/config`).

use std::collections::{HashSet, VecDeque};
use std::io;
use std::path::{Component, Path, PathBuf};

use toml::{Table, Value};

/// More files than this are a loop that the path comparison did not see, such as links to links.
const FILES_MAX: usize = 256;

/// The config with its imports.
#[derive(Debug)]
pub(super) struct Loaded {
    /// The merged content.
    pub(super) table: Table,
    /// The files, in the order in which they were merged, each with what is in it.
    pub(super) files: Vec<(PathBuf, Table)>,
}

/// A config file that cannot be taken.
#[derive(Debug)]
pub(super) struct ConfigFault {
    /// The file.
    pub(super) path: PathBuf,
    /// Why.
    pub(super) reason: String,
    /// Whether it just is not there.
    pub(super) missing: bool,
}

/// Reads the file at `path` and what it imports, each file's imports after all that were named
/// before.
///
/// # Errors
/// The first file that cannot be read or is not TOML; containerd does not start with one either.
pub(super) fn load(path: &Path) -> Result<Loaded, ConfigFault> {
    let (mut table, mut files, mut seen) = (Table::new(), Vec::new(), HashSet::new());
    let mut pending = VecDeque::from([path.to_owned()]);
    while let Some(path) = pending.pop_front() {
        if !seen.insert(path.clone()) {
            continue;
        }
        let unreadable =
            |reason: String, missing| ConfigFault { path: path.clone(), reason, missing };
        if files.len() == FILES_MAX {
            return Err(unreadable(format!("more than {FILES_MAX} files are imported"), false));
        }
        let text = std::fs::read_to_string(&path)
            .map_err(|e| unreadable(e.to_string(), e.kind() == io::ErrorKind::NotFound))?;
        let read: Table =
            toml::from_str(&text).map_err(|e| unreadable(e.message().to_owned(), false))?;
        for import in read
            .get("imports")
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
        {
            pending.extend(expand(&absolute(&path, import)));
        }
        merge_files(&mut table, read.clone());
        files.push((path, read));
    }
    Ok(Loaded { table, files })
}

/// `import` as an absolute path; a relative one is meant from the directory of `file`.
fn absolute(file: &Path, import: &str) -> PathBuf {
    file.parent().unwrap_or(Path::new("/")).join(import).components().collect()
}

/// Lets `from` override `to`; of the outermost level, lists are united and entries of
/// `proxy_plugins` replaced as a whole (`mergeConfig`).
fn merge_files(to: &mut Table, from: Table) {
    for (key, value) in from {
        match (key.as_str(), to.get_mut(&key), value) {
            ("proxy_plugins", Some(Value::Table(to)), Value::Table(from)) => to.extend(from),
            (_, Some(Value::Table(to)), Value::Table(from)) => merge(to, from),
            (_, Some(Value::Array(to)), Value::Array(from)) => {
                for value in from {
                    if !to.contains(&value) {
                        to.push(value);
                    }
                }
            }
            (_, _, value) => {
                to.insert(key, value);
            }
        }
    }
}

/// Lets `from` override `to`, table by table.
fn merge(to: &mut Table, from: Table) {
    for (key, value) in from {
        match (to.get_mut(&key), value) {
            (Some(Value::Table(to)), Value::Table(from)) => merge(to, from),
            (_, value) => {
                to.insert(key, value);
            }
        }
    }
}

/// The existing paths that fit a path with `*` in its parts, sorted; a path without `*` stands for
/// itself.
fn expand(pattern: &Path) -> Vec<PathBuf> {
    if !pattern.to_string_lossy().contains('*') {
        return vec![pattern.to_owned()];
    }
    let mut found = vec![PathBuf::new()];
    for part in pattern.components() {
        let text = part.as_os_str().to_string_lossy();
        if matches!(part, Component::Normal(_)) && text.contains('*') {
            found = found.iter().flat_map(|dir| children(dir, &text)).collect();
        } else {
            found.iter_mut().for_each(|path| path.push(part));
        }
    }
    found.retain(|path| path.exists());
    found.sort();
    found
}

fn children(dir: &Path, pattern: &str) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    entries
        .flatten()
        .filter(|entry| fits(&entry.file_name().to_string_lossy(), pattern))
        .map(|entry| entry.path())
        .collect()
}

/// Whether `name` fits a pattern in which `*` stands for any run of characters.
fn fits(name: &str, pattern: &str) -> bool {
    match pattern.split_once('*') {
        None => name == pattern,
        Some((head, tail)) => name.strip_prefix(head).is_some_and(|rest| {
            rest.char_indices()
                .map(|(at, _)| at)
                .chain([rest.len()])
                .any(|at| fits(&rest[at..], tail))
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns() {
        for (name, pattern, fit) in [
            ("a.toml", "*.toml", true),
            ("a.toml.bak", "*.toml", false),
            ("10-a.toml", "10-*.toml", true),
            ("ab", "a*b*", true),
            ("é", "*", true),
            ("a", "b", false),
        ] {
            assert_eq!(fits(name, pattern), fit, "{name} {pattern}");
        }
    }

    #[test]
    fn imports_are_merged_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write(
            "main.toml",
            "version = 3\nroot = \"/a\"\nimports = [\"conf.d/*.toml\", \"main.toml\"]\n\
             [plugins.x]\na = 1\nb = 1\n[proxy_plugins.p]\ntype = \"sandbox\"\n\
             platform = \"linux\"",
        );
        write(
            "conf.d/10.toml",
            "root = \"/b\"\n[plugins.x]\nb = 2\n[proxy_plugins.p]\ntype = \"snapshot\"",
        );
        write("conf.d/20.toml", "root = \"/c\"\n[plugins.y]\nc = 3");
        write("conf.d/30.toml.off", "root = \"/d\"");
        let loaded = load(&dir.path().join("main.toml")).unwrap();
        assert_eq!(loaded.files.len(), 3);
        let expected: Table = toml::from_str(
            "version = 3\nroot = \"/c\"\n[plugins]\n\
            x = { a = 1, b = 2 }\ny = { c = 3 }\n[proxy_plugins]\n\
            p = { type = \"snapshot\" }",
        )
        .unwrap();
        let mut table = loaded.table;
        table.remove("imports");
        assert_eq!(table, expected);
    }

    #[test]
    fn lists_are_united_but_not_those_of_plugins() {
        let dir = tempfile::tempdir().unwrap();
        let (main, other) = (dir.path().join("main.toml"), dir.path().join("other.toml"));
        std::fs::write(
            &main,
            "imports = [\"other.toml\"]\ndisabled_plugins = [\"cri\", \"a\"]\n[plugins.x]\n\
             list = [1]",
        )
        .unwrap();
        std::fs::write(&other, "disabled_plugins = [\"a\", \"b\"]\n[plugins.x]\nlist = [2]")
            .unwrap();
        let table = load(&main).unwrap().table;
        assert_eq!(table["disabled_plugins"], Value::from(vec!["cri", "a", "b"]));
        assert_eq!(table["plugins"]["x"]["list"], Value::from(vec![2]));
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("main.toml");
        assert!(load(&path).unwrap_err().missing);
        std::fs::write(&path, "imports = [\"other.toml\"]").unwrap();
        let e = load(&path).unwrap_err();
        assert!(e.missing && e.path.ends_with("other.toml"), "{e:?}");
        std::fs::write(&path, "version = ").unwrap();
        assert!(!load(&path).unwrap_err().missing);
    }
}
