//! The workflows: they call what exists, with no more rights than they need.

use std::path::Path;
use std::process::Command;

use serde_yaml_ng::Value;

use super::file;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// A workflow, and the commands of its steps.
fn workflow(name: &str) -> (Value, String) {
    let text = file(&format!(".github/workflows/{name}"));
    let workflow: Value = serde_yaml_ng::from_str(&text).unwrap();
    let jobs = workflow["jobs"].as_mapping().unwrap();
    let steps = jobs.values().flat_map(|job| job["steps"].as_sequence().unwrap());
    let mut commands = String::new();
    for step in steps {
        // An action of others could read everything of the job, and its tag can be moved.
        assert!(step.get("uses").is_none(), "{name}: {step:?}");
        commands += step["run"].as_str().unwrap();
    }
    (workflow, commands)
}

#[test]
fn ci_runs_the_commands_of_ci_and_may_write_nothing() {
    let (workflow, commands) = workflow("ci.yml");
    assert_eq!(commands.matches(" .ci/run\n").count(), 1, "{commands}");
    assert!(Path::new(ROOT).join(".ci/run").is_file());
    assert!(workflow["permissions"].as_mapping().unwrap().is_empty());
    assert!(workflow["jobs"]["ci"].get("permissions").is_none());
    // `pull_request_target` would give the rights of the repository to a change of a stranger.
    let events = workflow["on"].as_mapping().unwrap();
    let events: Vec<&str> = events.keys().filter_map(Value::as_str).collect();
    assert_eq!(events, ["push", "pull_request"]);
}

#[test]
fn a_tag_of_a_version_makes_a_draft_of_the_files_of_a_release() {
    let (workflow, commands) = workflow("release.yml");
    assert!(commands.contains("\nmake release\n"), "{commands}");
    assert!(file("Makefile").contains("\nrelease: "));
    let draft = "gh release create \"$GITHUB_REF_NAME\" target/dist/* ";
    assert!(commands.contains(draft) && commands.contains(" --draft "), "{commands}");
    assert!(file("Makefile").contains("packaging/release/build target/dist\n"));
    assert!(workflow["permissions"].as_mapping().unwrap().is_empty());
    let rights = workflow["jobs"]["release"]["permissions"].as_mapping().unwrap();
    assert_eq!((rights.len(), rights["contents"].as_str()), (1, Some("write")));
    assert!(file("packaging/release/packages").contains("${MAINTAINER:+"));
}

/// The toolchain that cargo would otherwise fetch.
#[test]
fn workflows_have_the_rust_of_the_repository() {
    let toolchain: toml::Table = toml::from_str(&file("rust-toolchain.toml")).unwrap();
    let image = format!("rust:{}-bookworm", toolchain["toolchain"]["channel"].as_str().unwrap());
    for name in ["ci", "release"] {
        let (workflow, _) = workflow(&format!("{name}.yml"));
        let container = &workflow["jobs"][name]["container"];
        let named = container.as_str().or_else(|| container["image"].as_str());
        assert_eq!(named, Some(&*image), "{name}");
    }
}

/// The page names each file of a release; others link to them.
#[test]
fn the_page_lists_the_files_of_a_release() {
    let mut names = Command::new(Path::new(ROOT).join("packaging/release/names"));
    let output = names.args(["VERSION", "1", "amd64"]).output().unwrap();
    let page = file("docs/install.md");
    let list = String::from_utf8(output.stdout).unwrap();
    let missing: Vec<&str> =
        list.lines().filter(|name| !page.contains(&format!("`{name}`"))).collect();
    assert!(list.lines().count() == 12 && missing.is_empty(), "{missing:?}");
}
