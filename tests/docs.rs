//! The documents match the program: they explain every error line of the log and every setting,
//! every promise has a test, and every link has a target.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use pause_sandboxer::config::{self, Config};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn file(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// Returns all files below a directory with this ending.
fn files(dir: &str, ending: &str) -> Vec<PathBuf> {
    let (mut dirs, mut found) = (vec![root().join(dir)], Vec::new());
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                dirs.push(path);
            } else if path.extension().is_some_and(|e| e == ending) {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

/// Returns the message of a call of a log macro: the first string behind the fields, which end in a
/// semicolon. `call` is the text behind the opening bracket.
fn message(call: &str) -> String {
    let (mut depth, mut chars, mut first) = (0, call.chars(), None);
    while let Some(c) = chars.next() {
        match c {
            '(' | '{' | '[' => depth += 1,
            ')' | '}' | ']' if depth == 0 => break,
            ')' | '}' | ']' => depth -= 1,
            ';' if depth == 0 => first = None,
            '"' => {
                let mut text = String::new();
                while let Some(c) = chars.next().filter(|c| *c != '"') {
                    text.extend((c == '\\').then(|| chars.next()).flatten().or(Some(c)));
                }
                if depth == 0 && first.is_none() {
                    first = Some(text);
                }
            }
            _ => {}
        }
    }
    first.unwrap_or_default()
}

/// Calls `seen` with the place of each call of these macros in a directory, its message, and the
/// code of the file before the call and as a whole.
fn calls(dir: &str, macros: &[&str], mut seen: impl FnMut(&str, &str, &str, &str)) {
    for path in files(dir, "rs") {
        let text = fs::read_to_string(&path).unwrap();
        let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
        for name in macros {
            for (at, _) in code.match_indices(name) {
                let line_start = code[..at].rfind('\n').map_or(0, |at| at + 1);
                if code[line_start..at].trim_start().starts_with("//") {
                    continue;
                }
                let number = code[..at].matches('\n').count() + 1;
                let place = format!("{}:{number}", path.strip_prefix(root()).unwrap().display());
                seen(&place, &message(&code[at + name.len()..]), &code[..at], code);
            }
        }
    }
}

/// Returns the place of each log line of these levels, and the constant text at its beginning.
fn lines_of_the_log(levels: &[&str]) -> Vec<(String, String)> {
    let mut lines = Vec::new();
    for dir in ["src", "crates"] {
        calls(dir, levels, |place, message, before, code| {
            let all = beginnings(message, before, code);
            lines.extend(all.into_iter().map(|begins| (place.to_owned(), begins)));
        });
    }
    lines
}

/// Returns the texts in the first cells of a table of docs/log.md.
fn rows(heading: &str) -> Vec<String> {
    let page = file("docs/log.md");
    let section = page.split(heading).nth(1).unwrap().split("\n## ").next().unwrap();
    let cells = section.lines().filter(|line| line.starts_with("| `"));
    let cells = cells.map(|line| line.split(" | ").next().unwrap());
    cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).map(str::to_owned).collect()
}

/// Returns the constant beginnings of a message, given the code before it and all code of its file.
/// A message that begins with an argument has `…` and its first words, or, if it has none, the
/// texts that the callers of its function pass.
fn beginnings(message: &str, before: &str, code: &str) -> Vec<String> {
    let words = |text: &str| text.chars().take_while(|c| *c != '{').collect::<String>();
    let Some((_, rest)) = message.strip_prefix('{').and_then(|text| text.split_once('}')) else {
        return vec![words(message)];
    };
    if words(rest).contains(char::is_alphabetic) {
        return vec![format!("…{}", words(rest))];
    }
    let function = before.rsplit_once("fn ").map_or("", |(_, text)| text);
    let call: String = function.chars().take_while(|c| *c != '(').chain(['(']).collect();
    let calls = code.match_indices(&call).filter(|(at, _)| !code[..*at].ends_with("fn "));
    calls.map(|(at, _)| self::message(&code[at + call.len()..]) + &words(rest)).collect()
}

#[test]
fn a_line_that_begins_with_an_argument_is_known_by_its_words_or_its_callers() {
    let known = |message: &str| {
        let before = "fn other() {}\nfn fail(what: &str) { ";
        let code =
            format!("{before}...\n    fail(\"failed to x\", y);\n    fail(\"failed to z\");");
        beginnings(message, before, &code)
    };
    assert_eq!(known("failed to a {b}: {c}"), ["failed to a "]);
    assert_eq!(known("{} is not a directory: {e}"), ["… is not a directory: "]);
    assert_eq!(known("{what}: {step}"), ["failed to x: ", "failed to z: "]);
}

/// An error asks an operator to act, so the page explains it. The page explains no other line.
///
/// Promise: errors_are_explained.
#[test]
fn every_error_line_of_the_log_is_explained() {
    let rows = rows("## Lines that may require an action");
    let known: Vec<&str> = rows.iter().map(|text| text.trim_end_matches('…')).collect();
    let errors = lines_of_the_log(&["log::error!("]);
    assert!(errors.len() > 10, "only {} lines were seen", errors.len());
    let unexplained: Vec<String> = errors
        .iter()
        .filter(|(_, begins)| {
            begins.trim().is_empty() || !known.iter().any(|known| begins.starts_with(known))
        })
        .map(|(place, begins)| format!("{place}: {begins:?}"))
        .collect();
    assert!(unexplained.is_empty(), "not in docs/log.md:\n{}", unexplained.join("\n"));
    let lines = lines_of_the_log(&["log::info!(", "log::warn!(", "log::error!("]);
    for known in known {
        let there = lines.iter().any(|(_, begins)| begins.starts_with(known));
        assert!(there, "docs/log.md explains {known:?}, which is nowhere logged");
    }
}

/// Tells whether a text of the page can be a line of this message: an argument in braces, and the
/// rest behind `…`, can be any text.
fn is_line_of(text: &str, message: &str) -> bool {
    let (begins, rest) = message.split_once('{').map_or((message, ""), |(begins, rest)| {
        (begins, rest.split_once('}').map_or("", |(_, rest)| rest))
    });
    let Some(text) = text.strip_prefix(begins) else {
        return false;
    };
    match rest {
        "" => message.contains('{') || text.is_empty(),
        rest => (1..=text.len())
            .filter(|at| text.is_char_boundary(*at))
            .any(|at| is_line_of(&text[at..], rest)),
    }
}

/// The daemon passes on the lines of a pod's shim.
///
/// Promise: errors_are_explained.
#[test]
fn every_line_of_the_shim_is_explained() {
    /// The line that only has a step, and the reason of the program's end.
    const ANY_STEP: [&str; 3] = ["container {}: {e}", "container {id}: {e}", "{e}"];
    let rows = rows("## Lines of a pod's shim");
    let (mut lines, mut any) = (Vec::new(), 0);
    let macros = ["log::warn(format_args!(", "log::error(format_args!("];
    calls("runc-shim/src", &macros, |place, message, _, _| {
        let message = message.split_whitespace().collect::<Vec<_>>().join(" ");
        match ANY_STEP.contains(&&*message) {
            true => any += 1,
            false => lines.push((place.to_owned(), message)),
        }
    });
    assert!(lines.len() > 8 && any > 2, "only {lines:?} and {any} were seen");
    for (place, message) in &lines {
        assert!(
            rows.iter().any(|row| is_line_of(row, message)),
            "{place}: {message:?} is not in docs/log.md"
        );
    }
    for row in rows.iter().filter(|row| *row != "container ID: …" && *row != "SIGINT") {
        assert!(
            lines.iter().any(|(_, message)| is_line_of(row, message)),
            "docs/log.md explains {row:?}, which the shim does not log"
        );
    }
}

#[test]
fn a_row_of_the_page_is_a_line_of_its_message_only() {
    assert!(is_line_of(
        "container ID: stuck; killing N now",
        "container {id}: {why}; killing {} now"
    ));
    assert!(!is_line_of("container ID: stuck", "container {id}: {why}; killing {} now"));
    assert!(!is_line_of("failed to x: …", "failed to y: {e}"));
    assert!(!is_line_of("failed to x: …", "failed to x"));
    assert!(is_line_of("failed to x", "failed to x"));
}

/// Returns `docs/configure.md` as generated from the table of settings.
fn configure() -> String {
    let defaults = Config::default().values();
    let mut text = "\
# Configure

Every setting has a default. Settings are keys of `/etc/pause-sandboxer/config.toml`, which is
optional, and options of `pause-sandboxer serve`. Options override the file. The file overrides
`config.adopted.toml` in the same directory, where [`enable`](install.md#what-enable-does) keeps the
settings that must equal containerd's; do not edit that file. With `--config NAME.toml` it is
`NAME.adopted.toml`. The other commands read both files and have `--config` and `--socket`.
`pause-sandboxer config default` prints a file with all settings, `pause-sandboxer config show`
prints the effective ones. An unknown setting or an invalid value is an error that names file, line
and setting.

A change takes effect after `systemctl restart pause-sandboxer`; pods keep running. `systemctl
reload pause-sandboxer` (SIGHUP) reloads `log_level` only. Change `state_dir` only on a drained
node: the daemon does not start with another one while the old one has records of pods, unless
`socket` also changes. The file `SOCKET.state`, by default
`/run/pause-sandboxer/pause-sandboxer.sock.state`, names the directory that is in use.

Settings that containerd also has must be equal there; `pause-sandboxer check` compares them, and
`enable` adopts them. What the daemon decides by itself has no setting: pods' cgroups are systemd
scopes if kubelet names a slice and systemd is the init system, and directories otherwise; calls are
for containerd's namespace `k8s.io`, which CRI uses; the runtime's shim is found as containerd finds
it, in containerd's PATH or beside containerd.

<!-- The rest of this page is generated from the fields of `Config`:
UPDATE_DOCS=1 cargo test --test docs -->
"
    .to_owned();
    for option in Config::options() {
        let name = option.get_id().as_str();
        text += &format!(
            "\n## `{name}`\n{}\n\n- default: `{}`\n- option: `--{}`\n",
            config::meaning(&option),
            defaults[name],
            option.get_long().unwrap(),
        );
    }
    text
}

#[test]
fn the_page_of_settings_is_up_to_date() {
    let path = root().join("docs/configure.md");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(&path, configure()).unwrap();
    }
    assert_eq!(
        file("docs/configure.md"),
        configure(),
        "UPDATE_DOCS=1 cargo test --test docs writes it anew"
    );
}

/// Returns the documents of the repository.
fn pages() -> Vec<PathBuf> {
    let top = fs::read_dir(root()).unwrap().map(|entry| entry.unwrap().path());
    let top = top.filter(|path| path.extension().is_some_and(|ending| ending == "md"));
    let below = ["fuzz/README.md", "runc-shim/README.md", "tests/vm/README.md"];
    let below = below.map(|page| root().join(page));
    top.chain(files("docs", "md")).chain(below).collect()
}

/// Returns the anchors of a document's headings, as GitHub makes them.
fn anchors(text: &str) -> Vec<String> {
    let headings = text.lines().filter(|line| line.starts_with('#'));
    let headings = headings.map(|line| line.trim_start_matches('#').trim().to_lowercase());
    let kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
    headings.map(|text| text.chars().filter(kept).collect::<String>().replace(' ', "-")).collect()
}

/// Returns the links of a page that lead to files here, with the file and the anchor of each.
fn links(page: &Path) -> Vec<(String, PathBuf, String)> {
    let text = fs::read_to_string(page).unwrap();
    let links = text.match_indices("](").map(|(at, _)| text[at + 2..].split(')').next().unwrap());
    let links = links.filter(|link| !link.starts_with("https://"));
    let parts = links.map(|link| {
        let (target, anchor) = link.split_once('#').unwrap_or((link, ""));
        let target = match target {
            "" => page.to_owned(),
            target => page.parent().unwrap().join(target),
        };
        (link.to_owned(), target, anchor.to_owned())
    });
    parts.collect()
}

#[test]
fn links_lead_somewhere() {
    let (mut seen, mut lost) = ([0, 0], Vec::new());
    for page in pages() {
        for (link, target, anchor) in links(&page) {
            let leads = anchor.is_empty()
                || fs::read_to_string(&target).is_ok_and(|text| anchors(&text).contains(&anchor));
            if !target.exists() || !leads {
                lost.push(format!("{}: {link}", page.display()));
            }
            seen[0] += 1;
            seen[1] += usize::from(!anchor.is_empty());
        }
    }
    assert!(lost.is_empty(), "lead nowhere:\n{}", lost.join("\n"));
    assert!(seen[0] > 20 && seen[1] > 2, "only {seen:?} links were seen");
    assert_eq!(anchors("# Who may `import` whom?\ntext\n"), ["who-may-import-whom"]);
}

/// The files of the repository that a path names, whose name may be a star with an ending.
fn matching(path: &str) -> Vec<PathBuf> {
    let path = Path::new(path.trim_start_matches("./"));
    if path.file_stem().unwrap() != "*" {
        return vec![path.to_owned()];
    }
    let directory = path.parent().unwrap();
    let names = fs::read_dir(root().join(directory)).unwrap().map(|e| e.unwrap().file_name());
    let files = names.map(|name| directory.join(name));
    files.filter(|file| file.extension() == path.extension()).collect()
}

/// Each link in the pages among these files leads to one of these files.
fn assert_complete(what: &str, installed: &BTreeSet<PathBuf>) {
    let (mut seen, mut lost) = (0, Vec::new());
    for page in installed.iter().filter(|page| page.extension().is_some_and(|e| e == "md")) {
        for (link, target, _) in links(&root().join(page)) {
            let target = fs::canonicalize(&target).unwrap();
            if !installed.contains(target.strip_prefix(root()).unwrap()) {
                lost.push(format!("{}: {link}", page.display()));
            }
            seen += 1;
        }
    }
    assert!(lost.is_empty(), "{what}: lead nowhere:\n{}", lost.join("\n"));
    assert!(seen > 5, "{what}: only {seen} links were seen");
}

/// A package installs its pages in the directories of the repository, and all that they link to.
#[test]
fn links_in_packages_lead_somewhere() {
    for (package, manifest) in
        [("pause-sandboxer", ""), ("pause-sandboxer-runc-shim", "runc-shim/")]
    {
        let text = file(&format!("{manifest}Cargo.toml"));
        let table: toml::Table = toml::from_str(&text).unwrap();
        let assets = table["package"]["metadata"]["deb"]["assets"].as_array().unwrap();
        let documents = Path::new("usr/share/doc").join(package);
        let mut installed = BTreeSet::new();
        for asset in assets {
            let [source, target, _] = &asset.as_array().unwrap()[..] else { panic!("{asset}") };
            let (source, target) = (source.as_str().unwrap(), target.as_str().unwrap());
            let Ok(below) = Path::new(target).strip_prefix(&documents) else { continue };
            // Debian's policy gives the change log another name.
            let below = if below == "changelog" { Path::new("") } else { below };
            let source = match source.strip_prefix("../") {
                Some(source) => source.to_owned(),
                None => format!("{manifest}{source}"),
            };
            let sources = matching(&source);
            installed.extend(sources.iter().map(|file| below.join(file.file_name().unwrap())));
        }
        assert_complete(package, &installed);
    }
}

/// An archive of a release has all that its pages link to.
#[test]
fn links_in_archives_lead_somewhere() {
    let text = file("packaging/release/build");
    let list = text.lines().find_map(|line| line.trim().strip_prefix("cp --parents ")).unwrap();
    let files = list.split(' ').filter(|word| *word != "\"$1\"").flat_map(matching);
    assert_complete("the archives", &files.collect());
}

#[test]
fn commands_in_the_pages_exist() {
    let help = std::process::Command::new(env!("CARGO_BIN_EXE_pause-sandboxer"))
        .arg("help")
        .output()
        .unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let mut seen = 0;
    for page in files("docs", "md").into_iter().chain([root().join("README.md")]) {
        let text = fs::read_to_string(&page).unwrap();
        for (at, _) in text.match_indices("pause-sandboxer ") {
            let before = &text[..at];
            if !(before.ends_with('`') || before.ends_with("    ") || before.ends_with("# ")) {
                continue;
            }
            let word: String = text[at + "pause-sandboxer ".len()..]
                .chars()
                .take_while(|c| c.is_ascii_lowercase())
                .collect();
            if word.is_empty() {
                continue;
            }
            assert!(help.contains(&format!("\n  {word} ")), "{}: {word}", page.display());
            seen += 1;
        }
    }
    assert!(seen > 10, "only {seen} commands were seen");
}

/// Returns the names that follow `Promise: ` in a text.
fn promised(text: &str) -> BTreeSet<String> {
    let names = text.split("Promise: ").skip(1).map(|text| {
        let name = text.trim_start_matches('`').chars();
        name.take_while(|c| c.is_ascii_lowercase() || *c == '_').collect::<String>()
    });
    names.filter(|name| !name.is_empty()).collect()
}

/// Each promise of SPECIFICATION.md has a test, and each test and defence names a promise.
#[test]
fn every_promise_has_a_test() {
    let sheet = file("SPECIFICATION.md");
    let rows = sheet.lines().filter_map(|line| line.strip_prefix("- `"));
    let promises: BTreeSet<String> =
        rows.map(|row| row.split('`').next().unwrap().to_owned()).collect();
    assert!(promises.len() > 30, "{promises:?}");
    let sources = ["src", "crates", "runc-shim/src", "runc-shim/tests", "tests", "fuzz/src"];
    let sources = sources.iter().flat_map(|dir| files(dir, "rs"));
    let shown: BTreeSet<String> =
        sources.flat_map(|path| promised(&fs::read_to_string(path).unwrap())).collect();
    assert_eq!(promises, shown, "SPECIFICATION.md (left) and the tests (right)");
    let defended = promised(&file("docs/security.md"));
    assert!(defended.len() > 5 && defended.is_subset(&promises), "{defended:?}");
}

/// With a newer toolchain the program could use features that the promised one lacks.
#[test]
fn the_toolchain_is_the_promised_one() {
    let table = |path: &str| file(path).parse::<toml::Table>().unwrap();
    let (manifest, toolchain) = (table("Cargo.toml"), table("rust-toolchain.toml"));
    let promised = manifest["package"]["rust-version"].as_str().unwrap();
    let channel = toolchain["toolchain"]["channel"].as_str().unwrap();
    assert!(
        channel == promised || channel == format!("{promised}.0"),
        "{channel} is not {promised}"
    );
}
