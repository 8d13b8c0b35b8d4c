//! `docs/compatibility.md` says what ran on which release of containerd, as the runs themselves
//! have written it down. `UPDATE_DOCS=1 cargo test --test compatibility` adds the results in
//! `target/results` to the page; without it the test holds the page to the form in which it does
//! so, and to the releases of the Makefile.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

const PAGE: &str = "docs/compatibility.md";
/// What runs on a release, in the order in which the page has it.
const SUITES: [&str; 2] = ["whole", "short"];

/// A table of the page: its lines by release and what ran, and each line its cells.
#[derive(Debug, Default, PartialEq, Eq)]
struct Table(BTreeMap<(Vec<u32>, String), Vec<String>>);

impl Table {
    fn add(&mut self, cells: Vec<String>) {
        let release = cells[0].split('.').map(|part| part.parse().unwrap()).collect();
        self.0.insert((release, cells[1].clone()), cells);
    }

    fn show(&self, head: &[&str]) -> String {
        let mut text = format!("| {} |\n|{}\n", head.join(" | "), "---|".repeat(head.len()));
        for cells in self.0.values() {
            assert_eq!(cells.len(), head.len(), "{cells:?}");
            text += &format!("| {} |\n", cells.join(" | "));
        }
        text
    }

    fn read(section: &str) -> Self {
        let mut table = Self::default();
        let rows = section.lines().skip_while(|line| !line.starts_with("|---")).skip(1);
        for row in rows.take_while(|line| line.starts_with('|')) {
            let row = row.trim_start_matches("| ").trim_end_matches(" |");
            table.add(row.split(" | ").map(str::to_owned).collect());
        }
        table
    }
}

const SUITE_TITLE: &str = "## Test runs\n";
const SUITE_HEAD: [&str; 5] = ["containerd", "suite", "cases", "failed", "date"];
const CONFORMANCE_TITLE: &str = "## Conformance\n";
const CONFORMANCE_HEAD: [&str; 7] =
    ["containerd", "critest", "both pass", "built-in only", "ours only", "neither", "date"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The results that runs have left, by how their files' names begin.
fn results(begin: &str) -> Vec<Value> {
    let Ok(entries) = fs::read_dir(root().join("target/results")) else { return Vec::new() };
    let named = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_str().unwrap();
        name.starts_with(begin) && name.ends_with(".json")
    };
    let paths = entries.map(|entry| entry.unwrap().path()).filter(named);
    paths.map(|path| serde_json::from_slice(&fs::read(path).unwrap()).unwrap()).collect()
}

fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn suite_row(result: &Value) -> Vec<String> {
    ["containerd", "suite", "passed", "failed", "date"].map(|key| text(&result[key])).into()
}

fn conformance_row(result: &Value) -> Vec<String> {
    let cases = result["cases"].as_array().unwrap();
    let passed = |case: &Value, whose: &str| case[whose][0] == "passed";
    let count = |builtin: bool, ours: bool| {
        let alike =
            |case: &&Value| passed(case, "builtin") == builtin && passed(case, "ours") == ours;
        cases.iter().filter(alike).count().to_string()
    };
    vec![
        text(&result["containerd"]),
        text(&result["critest"]),
        count(true, true),
        count(true, false),
        count(false, true),
        count(false, false),
        text(&result["date"]),
    ]
}

/// The page with other tables in their sections.
fn with(page: &str, suites: &Table, conformance: &Table) -> String {
    let tables = [
        (SUITE_TITLE, suites.show(&SUITE_HEAD)),
        (CONFORMANCE_TITLE, conformance.show(&CONFORMANCE_HEAD)),
    ];
    let mut page = page.to_owned();
    for (title, table) in tables {
        let (before, rest) = page.split_once(title).unwrap_or_else(|| panic!("no {title:?}"));
        let (prose, rest) = rest.split_once("\n| ").expect("a table");
        let after = rest.split_once("\n\n").map_or("", |(_, after)| after);
        page = format!("{before}{title}{prose}\n{table}\n{after}");
    }
    page
}

fn tables(page: &str) -> (Table, Table) {
    let section = |title| page.split_once(title).map_or("", |(_, rest)| rest);
    (Table::read(section(SUITE_TITLE)), Table::read(section(CONFORMANCE_TITLE)))
}

#[test]
fn the_page_says_what_ran() {
    let path = root().join(PAGE);
    let page = fs::read_to_string(&path).unwrap();
    let (mut suites, mut conformance) = tables(&page);
    if std::env::var_os("UPDATE_DOCS").is_some() {
        results("suite-").iter().for_each(|result| suites.add(suite_row(result)));
        results("conformance-").iter().for_each(|result| conformance.add(conformance_row(result)));
        fs::write(&path, with(&page, &suites, &conformance)).unwrap();
        return;
    }
    assert_eq!(with(&page, &suites, &conformance), page, "{PAGE} is not as it is generated");
    for cells in suites.0.values() {
        assert!(SUITES.contains(&cells[1].as_str()), "{cells:?}");
        assert!(cells[2].parse::<u32>().unwrap() > 0 && cells[3] == "0", "{cells:?}");
    }
    for cells in conformance.0.values() {
        assert!(cells[2].parse::<u32>().unwrap() > 0 && cells[3] == "0", "{cells:?}");
    }
    for cells in suites.0.values().chain(conformance.0.values()) {
        let date: Vec<usize> = cells.last().unwrap().split('-').map(str::len).collect();
        assert_eq!(date, [4, 2, 2], "{cells:?}");
    }
}

/// What the Makefile sets a variable to.
fn of_makefile(name: &str) -> String {
    let makefile = fs::read_to_string(root().join("Makefile")).unwrap();
    let set = format!("{name} := ");
    let line = makefile.lines().find_map(|line| line.strip_prefix(&set));
    line.unwrap_or_else(|| panic!("the Makefile sets no {name}")).to_owned()
}

#[test]
fn every_release_of_the_makefile_is_on_the_page() {
    let page = fs::read_to_string(root().join(PAGE)).unwrap();
    let (suites, conformance) = tables(&page);
    let has = |table: &Table, release: &str, what: Option<&str>| {
        table.0.values().any(|c| c[0].starts_with(release) && what.is_none_or(|w| c[1] == w))
    };
    let lts = of_makefile("LTS");
    assert!(has(&suites, &lts, Some("whole")), "the suites on {lts}");
    assert!(has(&conformance, &lts, None), "conformance on {lts}");
    // `debian` is 2.1.
    for release in of_makefile("RELEASES").replace("debian", "2.1.").split_whitespace() {
        assert!(has(&suites, release, Some("short")), "the short suite on {release}");
        assert!(has(&conformance, release, None), "conformance on {release}");
    }
}
