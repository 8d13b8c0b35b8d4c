//! The documents follow the program: every line of the log and every setting has its place in them,
//! and their links lead somewhere.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

use std::fs;
use std::path::{Path, PathBuf};

use pause_sandboxer::config::{Config, SETTINGS};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn file(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// All files below a directory with this ending.
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

/// The message of a call of a log macro, given what follows its opening bracket: the first string
/// behind the fields, which end in a semicolon.
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

/// What lines of the log of these levels begin with, up to what differs; with where they are.
fn lines_of_the_log(levels: &[&str]) -> Vec<(String, String)> {
    let mut lines = Vec::new();
    for path in files("src", "rs") {
        let text = fs::read_to_string(&path).unwrap();
        let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
        for level in levels {
            for (at, _) in code.match_indices(level) {
                let line_start = code[..at].rfind('\n').map_or(0, |at| at + 1);
                if code[line_start..at].trim_start().starts_with("//") {
                    continue;
                }
                let number = code[..at].matches('\n').count() + 1;
                let place = format!("{}:{number}", path.strip_prefix(root()).unwrap().display());
                let message = message(&code[at + level.len()..]);
                let all = beginnings(&message, &code[..at], code);
                lines.extend(all.into_iter().map(|begins| (place.clone(), begins)));
            }
        }
    }
    lines
}

/// What a message begins with, given the code before it and all code of its file. One that begins
/// with an argument begins with `…` and its first words, or, if it has none, with what the callers
/// of its function name.
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
    let of = |message: &str| {
        let before = "fn other() {}\nfn fail(what: &str) { ";
        let code =
            format!("{before}...\n    fail(\"failed to x\", y);\n    fail(\"failed to z\");");
        beginnings(message, before, &code)
    };
    assert_eq!(of("failed to a {b}: {c}"), ["failed to a "]);
    assert_eq!(of("{} is not a directory: {e}"), ["… is not a directory: "]);
    assert_eq!(of("{what}: {step}"), ["failed to x: ", "failed to z: "]);
}

/// An error asks an operator to act, so the page explains it. Whatever the page explains is logged.
#[test]
fn every_error_line_of_the_log_is_explained() {
    let operate = file("docs/operate.md");
    let section =
        operate.split("## Lines of the log").nth(1).unwrap().split("\n## ").next().unwrap();
    let cells = section
        .lines()
        .filter(|line| line.starts_with("| `"))
        .map(|line| line.split(" | ").next().unwrap());
    let known: Vec<&str> = cells
        .flat_map(|cell| cell.split('`').skip(1).step_by(2))
        .map(|text| text.trim_end_matches('…'))
        .collect();
    let errors = lines_of_the_log(&["log::error!("]);
    assert!(errors.len() > 10, "only {} lines were seen", errors.len());
    let unexplained: Vec<String> = errors
        .iter()
        .filter(|(_, begins)| {
            begins.trim().is_empty() || !known.iter().any(|known| begins.starts_with(known))
        })
        .map(|(place, begins)| format!("{place}: {begins:?}"))
        .collect();
    assert!(unexplained.is_empty(), "not in docs/operate.md:\n{}", unexplained.join("\n"));
    let lines = lines_of_the_log(&["log::info!(", "log::warn!(", "log::error!("]);
    for known in known {
        let there = lines.iter().any(|(_, begins)| begins.starts_with(known));
        assert!(there, "docs/operate.md explains {known:?}, which is nowhere logged");
    }
}

/// `docs/configure.md` as the table of settings has it.
fn configure() -> String {
    let default = Config::default();
    let mut text = "\
# Configure

Every setting has a default. Settings are keys of `/etc/pause-sandboxer/config.toml`, which is
optional, and options of `pause-sandboxer serve` and of the client commands. Options override the
file. `pause-sandboxer config default` prints a file with all settings, `pause-sandboxer config
show` prints the effective ones. An unknown setting or an invalid value is an error that names file,
line and setting.

A change takes effect after `systemctl restart pause-sandboxer`; pods keep running. `systemctl
reload pause-sandboxer` (SIGHUP) reloads `log_level` only. Change `state_dir` only on a drained
node: the daemon does not start with another one while the old one has records of pods, unless
`socket` also changes. The file `SOCKET.state`, by default
`/run/pause-sandboxer/pause-sandboxer.sock.state`, names the directory that is in use.

Settings that containerd also has must be equal there; `pause-sandboxer check` compares them.

<!-- The rest of this page is generated from the table of settings:
UPDATE_DOCS=1 cargo test --test docs -->
"
    .to_owned();
    for setting in SETTINGS {
        let meaning: Vec<&str> = setting.lines().collect();
        text += &format!(
            "\n## `{}`\n{}\n\n- must be {}\n- default: `{}`\n- option: `{}`\n",
            setting.name,
            meaning.join("\n"),
            setting.kind,
            setting.show(&default),
            setting.flag(),
        );
    }
    text += "
## The environment
`PAUSE_SANDBOXER_LOG` overrides `log_level`: a level, or `LEVEL,TARGET=LEVEL,…`, where a target is a
crate or a module path, such as `h2` or `pause_sandboxer::wire`.
";
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

/// The documents of the repository.
fn pages() -> Vec<PathBuf> {
    let top = fs::read_dir(root()).unwrap().map(|entry| entry.unwrap().path());
    let top = top.filter(|path| path.extension().is_some_and(|ending| ending == "md"));
    let below = ["fuzz/README.md", "runc-shim/README.md", "tests/vm/README.md"];
    let below = below.map(|page| root().join(page));
    top.chain(files("docs", "md")).chain(below).collect()
}

/// The anchors of a document's headings, as GitHub makes them.
fn anchors(text: &str) -> Vec<String> {
    let headings = text.lines().filter(|line| line.starts_with('#'));
    let headings = headings.map(|line| line.trim_start_matches('#').trim().to_lowercase());
    let kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
    headings.map(|text| text.chars().filter(kept).collect::<String>().replace(' ', "-")).collect()
}

#[test]
fn links_lead_somewhere() {
    let (mut seen, mut lost) = ([0, 0], Vec::new());
    for page in pages() {
        let text = fs::read_to_string(&page).unwrap();
        for (at, _) in text.match_indices("](") {
            let link = text[at + 2..].split(')').next().unwrap();
            if link.starts_with("https://") {
                continue;
            }
            let (target, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = match target {
                "" => page.clone(),
                target => page.parent().unwrap().join(target),
            };
            let leads = anchor.is_empty()
                || fs::read_to_string(&target)
                    .is_ok_and(|text| anchors(&text).iter().any(|known| known == anchor));
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

/// Commands in the pages exist.
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

/// The items of a page's lists, with their indented lines.
fn items(page: &str) -> Vec<String> {
    let mut items: Vec<String> = Vec::new();
    let mut inside = false;
    for line in file(page).lines() {
        if line.starts_with("- ") {
            items.push(line.to_owned());
            inside = true;
        } else if inside && line.starts_with("  ") {
            items.last_mut().unwrap().extend(["\n", line]);
        } else {
            inside = false;
        }
    }
    items
}

/// What the items of a page name in backticks behind `Shown by:`, each with the file or directory
/// that precedes it with a colon.
fn shown_by(page: &str) -> Vec<(String, Option<String>)> {
    let mut named = Vec::new();
    for item in items(page) {
        let Some((_, proof)) = item.split_once("Shown by:") else { continue };
        let mut place = None;
        let parts: Vec<&str> = proof.split('`').collect();
        for name in (1..parts.len()).step_by(2) {
            if parts[name - 1].contains(';') {
                place = None;
            }
            named.push((parts[name].to_owned(), place.clone()));
            let is_path = parts[name].contains('/') || parts[name].ends_with(".rs");
            if is_path && parts.get(name + 1).is_some_and(|after| after.starts_with(':')) {
                place = Some(parts[name].to_owned());
            }
        }
    }
    named
}

/// What a page names as the proof of a promise is there: a test, a module of tests, a file, a stage
/// of the node of `tests/vm`, or a command of the Makefile.
#[test]
fn tests_that_are_named_exist() {
    let below = |dir: &str| -> String {
        files(dir, "rs").iter().map(|path| fs::read_to_string(path).unwrap()).collect()
    };
    let everything = ["src", "crates", "tests", "runc-shim"].map(below).concat();
    let (stages, makefile) = (file("tests/vm/stages"), file("Makefile"));
    let exists = |name: &str, place: Option<&str>| {
        let sources = match place.map(|place| (root().join(place), place)) {
            None => everything.clone(),
            Some((path, place)) if path.is_dir() => below(place),
            Some((_, place)) => file(place),
        };
        if let Some(target) = name.strip_prefix("make ") {
            return makefile.contains(&format!("\n{target}:"));
        }
        let is_setting =
            name.contains('=') || name.chars().all(|c| c.is_ascii_uppercase() || c == '_');
        if name.starts_with("cargo ") || name.starts_with("--") || is_setting {
            return true;
        }
        if name.contains('/') || name.ends_with(".rs") {
            return root().join(name).exists();
        }
        let (module, test) =
            name.rsplit_once("::").map_or((None, name), |(module, test)| (Some(module), test));
        let module = module.is_none_or(|module| everything.contains(&format!("mod {module};")));
        let case = test == "…" || sources.contains(&format!("fn {test}("));
        module && case
            || stages
                .split(|c: char| !(c.is_ascii_alphanumeric() || c == '-'))
                .any(|stage| stage == name)
    };
    for page in ["SPECIFICATION.md", "docs/security.md"] {
        let named = shown_by(page);
        assert!(named.len() > 30, "{page}: only {} names were seen", named.len());
        let missing: Vec<_> =
            named.iter().filter(|(name, place)| !exists(name, place.as_deref())).collect();
        assert!(missing.is_empty(), "{page} names what there is not: {missing:?}");
    }
    let nowhere =
        ["no_such_test", "tests/nowhere.rs", "make nothing"].iter().all(|name| !exists(name, None));
    assert!(nowhere && !exists("tests_that_are_named_exist", Some("tests/life/main.rs")));
}

/// Each attack has a defence with its test, or a sentence that says why there is none.
#[test]
fn every_defence_names_its_test() {
    let attacks: Vec<String> =
        items("docs/security.md").into_iter().filter(|item| item.starts_with("- **")).collect();
    for attack in &attacks {
        let shown = attack
            .split_once("Shown by:")
            .is_some_and(|(before, proof)| before.contains("\n  Defence: ") && proof.contains('`'));
        assert!(shown || attack.contains("\n  Not defended: "), "{attack}");
    }
    assert!(attacks.len() > 20, "only {} attacks were seen", attacks.len());
}

/// With a newer toolchain something newer than what is promised would be used unseen.
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
