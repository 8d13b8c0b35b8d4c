//! Compares the sources with `ARCHITECTURE.md` (imports, unsafe code) and with the style of
//! `CONTRIBUTING.md` (lengths, columns, words), which holds for scripts too.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// About 500 lines is the rule, this is the limit.
const LINES_MAX: usize = 600;

/// The same for tests, benchmarks and examples.
const TEST_LINES_MAX: usize = 500;

/// Tests, benchmarks and examples whose length is checked.
const TESTS: &[&str] = &["tests", "benches", "examples", "fuzz/src"];

/// Columns of a line of code, and of prose in a document.
const COLUMNS_MAX: usize = 100;

/// Lines of a function.
const FUNCTION_LINES_MAX: usize = 80;

/// Sources whose columns and words are checked.
const STYLED: &[&str] = &[
    "src",
    "crates",
    "runc-shim",
    "tests",
    "benches",
    "fuzz/src",
    "examples",
    "build",
    "build.rs",
];

/// Files that may have banned words: this one, and one with the name of a user.
const UNWORDED: &[&str] = &["tests/architecture.rs", "tests/conformance/images.rs"];

/// The sources of all crates of the workspace but the tests' own.
const CRATES: &[&str] = &["src", "crates", "runc-shim/src"];

/// The only places for unsafe code.
const UNSAFE: &[&str] = &["src/sys/", "src/pause/program/", "runc-shim/src/sys.rs"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The daemon's sources as path below the root and text.
fn sources() -> Vec<(String, String)> {
    files(&["src"], |path| path.ends_with(".rs"))
}

/// The sources of all crates.
fn all_sources() -> Vec<(String, String)> {
    files(CRATES, |path| path.ends_with(".rs"))
}

/// Files of these names and below directories of these names, as path below the root and text.
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

/// The documents. The recorded session has the output of programs.
fn documents() -> Vec<(String, String)> {
    let top = fs::read_dir(root()).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<String> = top.filter_map(|name| name.into_string().ok()).collect();
    names.retain(|name| name.ends_with(".md"));
    names.extend(["docs", "fuzz/README.md", "tests"].map(str::to_owned));
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    files(&names, |path| path.ends_with(".md") && path != "docs/session.md")
}

/// The sources whose columns and words are checked.
fn styled_sources() -> Vec<(String, String)> {
    files(STYLED, |path| path.ends_with(".rs"))
}

/// The top-level module of a source: `src/a.rs`, `src/a/mod.rs` and `src/a/b.rs` are all of `a`.
fn module(path: &str) -> String {
    let (_, inside) = path.split_once("src/").unwrap();
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
    let is_top = path.split_once("src/").is_some_and(|(_, inside)| !inside.contains('/'));
    if is_top || path.ends_with("/mod.rs") {
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
        .split("## Module dependencies")
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
            assert!(rows.contains(&other), "{name} may use {other}, which is not a module");
        }
    }
}

#[test]
fn modules_import_only_what_they_may() {
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
fn the_table_has_no_circle() {
    // Those that may use everything are above all others.
    let mut left =
        table().into_iter().filter_map(|(name, allowed)| Some((name, allowed?))).collect();
    keep_circles(&mut left);
    assert!(left.is_empty(), "these use each other: {:?}", left.keys());
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

#[test]
fn the_picture_has_each_module_above_those_that_it_uses() {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let section = text.split("## The modules").nth(1).expect("the section");
    let picture = section.split("```").nth(1).expect("the picture");
    // The first 24 columns of a line name what is in it.
    let lines = picture.trim().lines().map(|line| line.get(24..).unwrap_or_default());
    let level: BTreeMap<&str, usize> = lines
        .enumerate()
        .flat_map(|(level, line)| line.split_whitespace().map(move |module| (module, level)))
        .collect();
    let table = table();
    let seen: BTreeSet<&str> = level.keys().copied().collect();
    assert_eq!(seen, table.keys().map(String::as_str).collect(), "the picture, the table");
    for (module, allowed) in &table {
        for used in allowed.iter().flatten() {
            assert!(level[module.as_str()] < level[used.as_str()], "{module} is not above {used}");
        }
    }
}

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
        assert_eq!(lifted, None, "{path} lets itself have unsafe code");
    }
}

#[test]
fn files_stay_short() {
    let tests = files(TESTS, |path| path.ends_with(".rs"));
    let tests = tests.into_iter().map(|file| (file, TEST_LINES_MAX));
    for ((path, text), most) in all_sources().into_iter().map(|file| (file, LINES_MAX)).chain(tests)
    {
        let lines = text.lines().count();
        assert!(lines <= most, "{path} has {lines} lines, {most} are allowed");
    }
}

/// Lines that are longer than allowed. In a document a table or code may be, if nothing can break
/// it: a cell, a command.
fn long_lines(path: &str, text: &str) -> Vec<String> {
    let is_document = path.ends_with(".md");
    let mut in_code = false;
    let mut long = Vec::new();
    for (number, line) in text.lines().enumerate() {
        in_code ^= is_document && line.starts_with("```");
        let is_code = in_code || line.starts_with("    ");
        let is_free = is_document && (is_code || line.starts_with("| `"));
        if line.chars().count() > COLUMNS_MAX && !is_free {
            long.push(format!("{path}:{}", number + 1));
        }
    }
    long
}

/// Shell scripts, which have no ending, and files of make, cargo and protobuf.
fn scripts() -> Vec<(String, String)> {
    let names = ["Makefile", "tests", "packaging", "protos", "crates", "runc-shim"];
    let top =
        ["Cargo.toml", "clippy.toml", "deny.toml", "fuzz/Cargo.toml", "fuzz/run", "fuzz/rustc"];
    files(&[&names[..], &top].concat(), |path| {
        let name = path.rsplit('/').next().unwrap_or(path);
        match name.rsplit_once('.') {
            None => !name.ends_with("LICENSE"),
            Some((_, ending)) => ["sh", "toml", "proto"].contains(&ending),
        }
    })
}

#[test]
fn lines_have_at_most_100_columns() {
    let scripts = scripts();
    assert!(scripts.len() > 30, "only {} scripts were seen", scripts.len());
    let all = styled_sources().into_iter().chain(documents()).chain(scripts);
    let long: Vec<String> = all.flat_map(|(path, text)| long_lines(&path, &text)).collect();
    assert!(long.is_empty(), "over {COLUMNS_MAX} columns:\n{}", long.join("\n"));
    let line = "x".repeat(COLUMNS_MAX + 1);
    assert_eq!(long_lines("a.rs", &line), ["a.rs:1"]);
    assert_eq!(long_lines("a.md", &format!("```\n{line}\n```\n{line}\n")), ["a.md:4"]);
}

/// The phrases of `list` that a text has between word boundaries, whatever their case.
fn phrases(text: &str, list: &str) -> Vec<String> {
    let (text, is_word) = (text.to_lowercase(), |c: char| c.is_alphanumeric() || c == '_');
    let mut found = Vec::new();
    for phrase in list.lines() {
        for (at, _) in text.match_indices(phrase) {
            let (before, after) = (&text[..at], &text[at + phrase.len()..]);
            if !before.ends_with(is_word) && !after.starts_with(is_word) {
                found.push(format!("{}: {phrase}", before.matches('\n').count() + 1));
            }
        }
    }
    found
}

#[test]
fn prose_has_no_banned_words() {
    let list = fs::read_to_string(root().join("tests/banned-words.txt")).unwrap();
    let packaging = files(&["packaging"], |_| true);
    let all = styled_sources().into_iter().chain(documents()).chain(packaging).chain(scripts());
    let found: Vec<String> = all
        .filter(|(path, _)| !UNWORDED.contains(&path.as_str()))
        .flat_map(|(path, text)| {
            phrases(&text, &list).into_iter().map(move |phrase| format!("{path}:{phrase}"))
        })
        .collect();
    assert!(found.is_empty(), "of tests/banned-words.txt:\n{}", found.join("\n"));
    assert_eq!(phrases("Nobody's\nnobody_x go on.", "nobody\ngo on"), ["1: nobody", "2: go on"]);
}

/// Functions that are longer than allowed, by the indentation that rustfmt gives them.
fn long_functions(path: &str, text: &str) -> Vec<String> {
    let (mut open, mut long): (Option<(usize, String)>, _) = (None, Vec::new());
    for (number, line) in text.lines().enumerate() {
        let indentation = &line[..line.len() - line.trim_start().len()];
        if let Some((first, end)) = open.take_if(|(_, end)| line == end) {
            let lines = number - first + 1;
            if lines > FUNCTION_LINES_MAX {
                long.push(format!("{path}:{}: {lines} lines", first + 1));
            }
            drop(end);
        } else if open.is_none() && is_function(line.trim_start()) && !line.ends_with(['}', ';']) {
            open = Some((number, format!("{indentation}}}")));
        }
    }
    long
}

/// Whether a line begins a function.
fn is_function(line: &str) -> bool {
    let before = line.split_once("fn ").map(|(before, _)| before);
    let words = ["pub", "pub(crate)", "pub(super)", "const", "async", "unsafe", "extern", "\"C\""];
    before.is_some_and(|before| before.split_whitespace().all(|word| words.contains(&word)))
}

#[test]
fn functions_stay_short() {
    let all = all_sources().into_iter();
    let long: Vec<String> = all.flat_map(|(path, text)| long_functions(&path, &text)).collect();
    assert!(long.is_empty(), "over {FUNCTION_LINES_MAX} lines:\n{}", long.join("\n"));
    let body = "    x();\n".repeat(FUNCTION_LINES_MAX);
    assert_eq!(long_functions("a.rs", &format!("pub(crate) async fn f() {{\n{body}}}\n")).len(), 1);
    assert_eq!(long_functions("a.rs", &format!("{body}fn f() {{\n    x();\n}}\n")).len(), 0);
}

/// The types that a source defines outside of its tests, also those inside of functions. An
/// associated type (`type` with an indentation) belongs to its trait.
fn types(text: &str) -> Vec<String> {
    let (program, _) = text.split_once("#[cfg(test)]\nmod tests {").unwrap_or((text, ""));
    let name = |line: &str| {
        let mut words = line.split_whitespace().skip_while(|word| word.starts_with("pub"));
        let word = words.next().filter(|word| *word != "type" || !line.starts_with(' '))?;
        let is_type = ["struct", "enum", "union", "trait", "type"].contains(&word);
        let name = words.next().filter(|_| is_type)?;
        name.split(|c: char| !c.is_alphanumeric()).next().map(str::to_owned)
    };
    program.lines().filter_map(name).collect()
}

/// A stranger who searches for a type's name finds one type. The pause program is a program of its
/// own.
#[test]
fn each_type_of_the_daemon_has_a_name_of_its_own() {
    let mut places: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (path, text) in sources() {
        if !path.ends_with("/tests.rs") && !path.starts_with("src/pause/program/") {
            for name in types(&text) {
                places.entry(name).or_default().push(path.clone());
            }
        }
    }
    places.retain(|_, paths| paths.len() > 1);
    assert!(places.is_empty(), "several types have one name: {places:#?}");
    let text =
        "pub(crate) struct A<T>(T);\nenum B {\n    type C = u8;\ntype D = u8;\n    struct E {";
    assert_eq!(
        types(&format!("{text}\n#[cfg(test)]\nmod tests {{\nstruct F;")),
        ["A", "B", "D", "E"]
    );
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
