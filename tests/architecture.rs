//! Holds the sources to `ARCHITECTURE.md`: who may import whom, where unsafe code may be, how long
//! a file may be.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// About 500 lines is the rule, this is the limit; two files await their split.
const LINES_MAX: usize = 700;

/// The only places for unsafe code.
const UNSAFE: &[&str] = &["src/sys/", "src/pause/program/"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// All sources as path below the root and text.
fn sources() -> Vec<(String, String)> {
    let (mut dirs, mut sources) = (vec![root().join("src")], Vec::new());
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(dir).unwrap() {
            let path: PathBuf = entry.unwrap().path();
            if path.is_dir() {
                dirs.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                let text = fs::read_to_string(&path).unwrap();
                sources
                    .push((path.strip_prefix(root()).unwrap().to_str().unwrap().to_owned(), text));
            }
        }
    }
    sources.sort();
    sources
}

/// The top-level module of a source: `src/a.rs`, `src/a/mod.rs` and `src/a/b.rs` are all of `a`.
fn module(path: &str) -> String {
    let inside = path.strip_prefix("src/").unwrap();
    inside.split('/').next().unwrap().trim_end_matches(".rs").to_owned()
}

/// The text without comment lines.
fn code(text: &str) -> String {
    text.lines()
        .filter(|line| !line.trim_start().starts_with("//"))
        .fold(String::new(), |code, line| code + line + "\n")
}

/// The first names of all paths that begin with `prefix`, such as `crate::`, also those in braces.
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
        // The names that stand first between the commas of the outermost braces.
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

/// The modules of the crate that a source names. `of` are all there are.
fn uses(path: &str, text: &str, of: &BTreeSet<String>) -> BTreeSet<String> {
    let code = code(text);
    let mut names = named(&code, "crate::");
    names.extend(named(&code, "super::super::"));
    if matches!(path.matches('/').count(), 1) || path.ends_with("/mod.rs") {
        // `super` of a top-level module is the crate; of the tests in it, the module.
        names.extend(named(&code, "super::"));
    }
    names.retain(|name| of.contains(name) && *name != module(path));
    names
}

/// The table of `ARCHITECTURE.md`: module to what it may use; `None`: everything.
fn table() -> BTreeMap<String, Option<BTreeSet<String>>> {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let section = text
        .split("## Who may import whom")
        .nth(1)
        .expect("the section")
        .split("\n## ")
        .next()
        .unwrap();
    let ticked =
        |cell: &str| cell.split('`').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>();
    let rows = section.lines().filter(|line| line.starts_with("| `"));
    rows.map(|row| {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let (name, allowed) = (ticked(cells[1]), ticked(cells[2]));
        assert_eq!(name.len(), 1, "one module per row: {row}");
        let allowed = match cells[2] {
            "everything" => None,
            "nothing" => Some(BTreeSet::new()),
            _ => Some(allowed.into_iter().collect()),
        };
        assert!(
            allowed.as_ref().is_none_or(|set| !set.is_empty() || cells[2] == "nothing"),
            "says nothing: {row}"
        );
        (name[0].clone(), allowed)
    })
    .collect()
}

#[test]
fn every_module_has_its_row() {
    let modules: BTreeSet<String> =
        sources().iter().map(|(path, _)| module(path)).filter(|m| m != "lib").collect();
    let rows: BTreeSet<String> = table().into_keys().collect();
    assert_eq!(modules, rows, "src/ (left) and the table of ARCHITECTURE.md (right)");
    for (name, allowed) in table() {
        for other in allowed.into_iter().flatten() {
            assert!(rows.contains(&other), "{name} may use {other}, which is no module");
        }
    }
}

#[test]
fn nobody_imports_what_it_may_not() {
    let table = table();
    let modules = table.keys().cloned().collect();
    let mut faults = Vec::new();
    for (path, text) in sources() {
        let Some(Some(allowed)) = table.get(&module(&path)) else { continue };
        faults.extend(
            uses(&path, &text, &modules)
                .difference(allowed)
                .map(|other| format!("{path} uses {other}")),
        );
    }
    assert!(faults.is_empty(), "not allowed by ARCHITECTURE.md:\n{}", faults.join("\n"));
}

#[test]
fn the_table_has_no_circle() {
    let mut left = table();
    loop {
        let (before, names) = (left.len(), left.keys().cloned().collect::<BTreeSet<_>>());
        left.retain(|_, allowed| {
            allowed.as_ref().is_some_and(|set| set.iter().any(|other| names.contains(other)))
        });
        if left.len() == before {
            break;
        }
    }
    assert!(left.is_empty(), "these use each other: {:?}", left.keys());
}

#[test]
fn unsafe_code_stays_in_its_two_places() {
    let word = |c: char| c.is_alphanumeric() || c == '_';
    for (path, text) in sources() {
        if UNSAFE.iter().any(|place| path.starts_with(place)) {
            continue;
        }
        let code = code(&text);
        assert!(!code.split(|c| !word(c)).any(|token| token == "unsafe"), "{path} has unsafe code");
        let lifted =
            code.lines().find(|line| line.contains("(unsafe_code") && !line.contains("deny"));
        assert_eq!(lifted, None, "{path} lets itself have unsafe code");
    }
}

#[test]
fn files_stay_short() {
    for (path, text) in sources() {
        let lines = text.lines().count();
        assert!(lines <= LINES_MAX, "{path} has {lines} lines, {LINES_MAX} are allowed");
    }
}

#[test]
fn the_scan_sees_every_form_of_import() {
    let of: BTreeSet<String> = ["a", "b", "c", "d", "e", "own"].map(str::to_owned).into();
    let seen = |path: &str, text: &str| uses(path, text, &of).into_iter().collect::<String>();
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
