//! Compares the sources with the tables of `ARCHITECTURE.md`: which module and which crate uses
//! which, where unsafe code is, and how long a file may be.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The most lines of a file.
const LINES_MAX: usize = 500;

/// The files whose length is checked.
const ALL: &[&str] = &["src", "crates", "runc-shim", "tests", "benches", "examples", "fuzz/src"];

/// The sources of all crates of the workspace except those of the tests.
const CRATES: &[&str] = &["src", "crates", "runc-shim/src"];

/// The only places for unsafe code.
const UNSAFE: &[&str] = &["src/sys/", "src/pause/program/", "runc-shim/src/sys.rs"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Returns the sources of all crates, each with its path below the root and its text.
fn all_sources() -> Vec<(String, String)> {
    files(CRATES, |path| path.ends_with(".rs"))
}

/// Returns the wanted files with these names or below directories with these names, in the same
/// form.
fn files(names: &[&str], wanted: impl Fn(&str) -> bool) -> Vec<(String, String)> {
    let mut left: Vec<PathBuf> = names.iter().map(|name| root().join(name)).collect();
    let mut files = Vec::new();
    while let Some(path) = left.pop() {
        if path.is_dir() {
            left.extend(fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()));
            continue;
        }
        let name = path.strip_prefix(root()).unwrap().to_str().unwrap().to_owned();
        if wanted(&name) {
            files.push((name, fs::read_to_string(&path).unwrap()));
        }
    }
    files.sort();
    files
}

/// Returns the top-level module of a source: `src/a.rs`, `src/a/mod.rs` and `src/a/b.rs` belong to
/// `a`.
fn module(path: &str) -> String {
    let (_, inside) = path.split_once("src/").unwrap();
    inside.split('/').next().unwrap().trim_end_matches(".rs").to_owned()
}

/// Returns the text without comment lines.
fn code(text: &str) -> String {
    text.lines()
        .filter(|line| !line.trim_start().starts_with("//"))
        .fold(String::new(), |code, line| code + line + "\n")
}

/// Returns the first names of all paths that begin with `prefix`, such as `crate::`, also those in
/// braces.
fn named(code: &str, prefix: &str) -> BTreeSet<String> {
    let word = |c: char| c.is_alphanumeric() || c == '_';
    let mut names = BTreeSet::new();
    for (at, _) in code.match_indices(prefix) {
        if code[..at].ends_with(|c| word(c) || c == ':' || c == '$') {
            continue;
        }
        let rest = code[at + prefix.len()..].trim_start();
        let Some(group) = rest.strip_prefix('{') else {
            names.insert(rest.chars().take_while(|c| word(*c)).collect());
            continue;
        };
        // These are the names that stand first between the commas of the outermost braces.
        let (mut depth, mut first) = (0, true);
        let mut chars = group.char_indices().peekable();
        while let Some((at, c)) = chars.next() {
            match c {
                '{' => depth += 1,
                '}' if depth == 0 => break,
                '}' => depth -= 1,
                ',' if depth == 0 => first = true,
                c if word(c) && depth == 0 && first => {
                    names.insert(group[at..].chars().take_while(|c| word(*c)).collect());
                    first = false;
                    while chars.next_if(|(_, c)| word(*c)).is_some() {}
                }
                _ => {}
            }
        }
    }
    names
}

/// Returns those of the crate's modules that a source names.
fn uses(path: &str, text: &str, modules: &BTreeSet<String>) -> BTreeSet<String> {
    let code = code(text);
    let mut names = named(&code, "crate::");
    names.extend(named(&code, "super::super::"));
    let is_top = path.split_once("src/").is_some_and(|(_, inside)| !inside.contains('/'));
    if is_top || path.ends_with("/mod.rs") {
        // `super` of a top-level module is the crate; of the tests in it, the module.
        names.extend(named(&code, "super::"));
    }
    names.retain(|name| modules.contains(name) && *name != module(path));
    names
}

/// A row of a table: a name and the names that it may use; `None` stands for everything.
type Row = (String, Option<BTreeSet<String>>);

/// Reads the table in a section of `ARCHITECTURE.md`.
fn table(section: &str) -> Vec<Row> {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let (_, section) = text.split_once(&format!("\n## {section}\n")).expect("the section");
    let section = section.split("\n## ").next().unwrap();
    let names =
        |cell: &str| cell.split('`').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>();
    let rows = section.lines().filter(|line| line.starts_with("| `"));
    rows.map(|row| {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let (name, allowed) = (names(cells[1]), names(cells[2]));
        assert_eq!(name.len(), 1, "one name per row: {row}");
        let is_empty = allowed.is_empty();
        let allowed = (cells[2] != "everything").then(|| allowed.into_iter().collect());
        assert!(!is_empty || matches!(cells[2], "everything" | "nothing"), "says nothing: {row}");
        (name[0].clone(), allowed)
    })
    .collect()
}

/// Checks that each row uses only rows above it, so there is no circle.
fn is_in_order(table: &[Row]) {
    let mut above = BTreeSet::new();
    for (name, allowed) in table {
        for used in allowed.iter().flatten() {
            assert!(above.contains(used), "{name} may use {used}, which has no row above it");
        }
        above.insert(name);
    }
}

/// Compares the modules below a directory with the table in a section of `ARCHITECTURE.md`.
fn modules_are_those_of(section: &str, directory: &str) {
    let table = table(section);
    is_in_order(&table);
    let sources = files(&[directory], |path| path.ends_with(".rs"));
    let modules: BTreeSet<String> =
        sources.iter().map(|(path, _)| module(path)).filter(|m| m != "lib").collect();
    let rows: BTreeSet<String> = table.iter().map(|(name, _)| name.clone()).collect();
    assert_eq!(modules, rows, "{directory} (left) and the table of ARCHITECTURE.md (right)");
    let allowed: BTreeMap<_, _> = table.into_iter().collect();
    let mut faults = Vec::new();
    for (path, text) in sources {
        let Some(Some(allowed)) = allowed.get(&module(&path)) else { continue };
        let used = uses(&path, &text, &modules);
        faults.extend(used.difference(allowed).map(|other| format!("{path} uses {other}")));
    }
    assert!(faults.is_empty(), "not allowed by ARCHITECTURE.md:\n{}", faults.join("\n"));
}

#[test]
fn modules_import_only_what_they_may() {
    modules_are_those_of("Module dependencies", "src");
    modules_are_those_of("Modules of `node`", "crates/node/src");
}

/// A dependency on a crate of the workspace has a path. Those of tests do not count.
#[test]
fn crates_depend_only_on_what_they_may() {
    let manifest = |dir: &str| -> toml::Table {
        let path = root().join(dir).join("Cargo.toml");
        fs::read_to_string(path).unwrap().parse().unwrap()
    };
    let members = manifest(".")["workspace"]["members"].as_array().unwrap().clone();
    let is_path = |value: &toml::Value| value.get("path").is_some();
    let used = members.iter().map(|member| {
        let manifest = manifest(member.as_str().unwrap());
        let dependencies = manifest["dependencies"].as_table().unwrap();
        let used = dependencies.iter().filter(|(_, value)| is_path(value));
        let used = used.map(|(name, _)| name.clone()).collect();
        (manifest["package"]["name"].as_str().unwrap().to_owned(), Some(used))
    });
    let table = table("Crates");
    is_in_order(&table);
    let (used, table): (BTreeMap<_, _>, BTreeMap<_, _>) =
        (used.collect(), table.into_iter().collect());
    assert_eq!(used, table, "Cargo.toml (left) and the table of ARCHITECTURE.md (right)");
}

/// Removes all modules that are in no circle of imports.
fn keep_circles(imports: &mut BTreeMap<String, BTreeSet<String>>) {
    loop {
        let (before, names) = (imports.len(), imports.keys().cloned().collect::<BTreeSet<_>>());
        imports.retain(|_, used| used.iter().any(|other| names.contains(other)));
        if imports.len() == before {
            break;
        }
    }
}

#[test]
fn the_modules_of_the_shim_do_not_import_each_other() {
    let sources = files(&["runc-shim/src"], |path| path.ends_with(".rs"));
    let modules: BTreeSet<String> = sources.iter().map(|(path, _)| module(path)).collect();
    let mut imports: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (path, text) in &sources {
        imports.entry(module(path)).or_default().extend(uses(path, text, &modules));
    }
    keep_circles(&mut imports);
    assert!(imports.is_empty(), "these use each other: {imports:?}");
}

/// Promise: unsafe_code_stays_in_its_places.
#[test]
fn unsafe_code_stays_in_its_places() {
    let word = |c: char| c.is_alphanumeric() || c == '_';
    for (path, text) in all_sources() {
        if UNSAFE.iter().any(|place| path.starts_with(place)) {
            continue;
        }
        let code = code(&text);
        assert!(!code.split(|c| !word(c)).any(|token| token == "unsafe"), "{path} has unsafe code");
        let lifted =
            code.lines().find(|line| line.contains("(unsafe_code") && !line.contains("deny"));
        assert_eq!(lifted, None, "{path} allows itself unsafe code");
    }
}

#[test]
fn files_stay_short() {
    for (path, text) in files(ALL, |path| path.ends_with(".rs")) {
        let lines = text.lines().count();
        assert!(lines <= LINES_MAX, "{path} has {lines} lines, {LINES_MAX} are allowed");
    }
}

#[test]
fn the_scan_sees_every_form_of_import() {
    let modules: BTreeSet<String> = ["a", "b", "c", "d", "e", "own"].map(str::to_owned).into();
    let seen = |path: &str, text: &str| uses(path, text, &modules).into_iter().collect::<String>();
    assert_eq!(seen("src/own.rs", "use crate::a::X;\nlet x = crate::b::f(crate::c::Y);"), "abc");
    assert_eq!(seen("src/own.rs", "use crate::{a, b::{self, d}, c as x};"), "abc");
    assert_eq!(seen("src/own.rs", "use crate::{\n    a::X,\n    b,\n};"), "ab");
    assert_eq!(
        seen("src/own/x.rs", "pub use crate::own::Y;\nuse super::super::d;\nuse super::e;"),
        "d"
    );
    assert_eq!(seen("src/own/mod.rs", "use super::e::Z;"), "e");
    assert_eq!(
        seen("src/own.rs", "//! See [`crate::a`].\n    // crate::b\nuse other_crate::c;"),
        ""
    );
}
