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

#[path = "kubernetes/known.rs"]
#[allow(dead_code, reason = "the rest is for the cases themselves")]
mod known;

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
const KUBERNETES_TITLE: &str = "## Kubernetes\n";
const KUBERNETES_HEAD: [&str; 7] =
    ["Kubernetes", "containerd", "same", "known differences", "failed", "skipped", "date"];

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

fn kubernetes_row(result: &Value) -> Vec<String> {
    ["kubernetes", "containerd", "same", "explained", "failed", "skipped", "date"]
        .map(|key| text(&result[key]))
        .into()
}

/// What is known of the cases with Kubernetes.
fn known_differences() -> String {
    let mut text =
        "| case | what | built-in | this sandboxer | reason |\n|---|---|---|---|---|\n".to_owned();
    for known in known::DIFFERENCES {
        let cells = [known.fact, known.builtin, known.ours].map(|cell| format!("`{cell}`"));
        text += &format!("| `{}` | {} | {} |\n", known.case, cells.join(" | "), known.why);
    }
    text
}

fn known_skips() -> String {
    let rows = known::CANNOT_RUN.iter().map(|(case, why)| format!("| `{case}` | {why} |\n"));
    "| case | why it is skipped |\n|---|---|\n".to_owned() + &rows.collect::<String>()
}

/// The page with other tables in their sections.
fn with(page: &str, [suites, conformance, kubernetes]: [&Table; 3]) -> String {
    let tables = [
        (SUITE_TITLE, suites.show(&SUITE_HEAD)),
        (CONFORMANCE_TITLE, conformance.show(&CONFORMANCE_HEAD)),
        (KUBERNETES_TITLE, kubernetes.show(&KUBERNETES_HEAD)),
        ("### Known differences\n", known_differences()),
        ("### Skipped\n", known_skips()),
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

fn tables(page: &str) -> [Table; 3] {
    [SUITE_TITLE, CONFORMANCE_TITLE, KUBERNETES_TITLE]
        .map(|title| Table::read(page.split_once(title).map_or("", |(_, rest)| rest)))
}

#[test]
fn the_page_says_what_ran() {
    let path = root().join(PAGE);
    let page = fs::read_to_string(&path).unwrap();
    let [mut suites, mut conformance, mut kubernetes] = tables(&page);
    if std::env::var_os("UPDATE_DOCS").is_some() {
        results("suite-").iter().for_each(|result| suites.add(suite_row(result)));
        results("conformance-").iter().for_each(|result| conformance.add(conformance_row(result)));
        results("kubernetes-").iter().for_each(|result| kubernetes.add(kubernetes_row(result)));
        fs::write(&path, with(&page, [&suites, &conformance, &kubernetes])).unwrap();
        return;
    }
    let generated = with(&page, [&suites, &conformance, &kubernetes]);
    assert_eq!(generated, page, "{PAGE} is not as it is generated");
    for cells in suites.0.values() {
        assert!(SUITES.contains(&cells[1].as_str()), "{cells:?}");
        assert!(cells[2].parse::<u32>().unwrap() > 0 && cells[3] == "0", "{cells:?}");
    }
    for cells in conformance.0.values() {
        assert!(cells[2].parse::<u32>().unwrap() > 0 && cells[3] == "0", "{cells:?}");
    }
    for cells in kubernetes.0.values() {
        assert!(cells[2].parse::<u32>().unwrap() > 0 && cells[4] == "0", "{cells:?}");
    }
    for cells in [&suites, &conformance, &kubernetes].into_iter().flat_map(|table| table.0.values())
    {
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
    let [suites, conformance, kubernetes] = tables(&page);
    let has = |table: &Table, release: &str, what: Option<&str>| {
        table.0.values().any(|c| c[0].starts_with(release) && what.is_none_or(|w| c[1] == w))
    };
    let lts = of_makefile("LTS");
    assert!(has(&suites, &lts, Some("whole")), "the suites on {lts}");
    assert!(has(&conformance, &lts, None), "conformance on {lts}");
    let version = of_makefile("KUBERNETES");
    assert!(has(&kubernetes, &version, Some(&lts)), "Kubernetes {version} on {lts}");
    // `debian` is 2.1.
    for release in of_makefile("RELEASES").replace("debian", "2.1.").split_whitespace() {
        assert!(has(&suites, release, Some("short")), "the short suite on {release}");
        assert!(has(&conformance, release, None), "conformance on {release}");
    }
}
