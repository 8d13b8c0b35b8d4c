//! The package of the shim alone.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output};

use toml::{Table, Value};

use crate::file;

/// The program of the package.
const PROGRAM: &str = "/usr/bin/containerd-shim-runc-small-v2";

const FORCE: &str = "run/containerd-shim-runc-small-v2.force-remove";

/// Both packages can be installed.
#[test]
fn no_file_is_in_both_packages() {
    let [own, main] = ["runc-shim/Cargo.toml", "Cargo.toml"].map(|manifest| {
        let manifest: Table = toml::from_str(&file(manifest)).unwrap();
        let assets = manifest["package"]["metadata"]["deb"]["assets"].as_array().unwrap().clone();
        let place = |asset: &Value| {
            let [source, target] = [0, 1].map(|index| asset[index].as_str().unwrap());
            let name = source.rsplit('/').next().unwrap();
            target.to_owned() + if target.ends_with('/') { name } else { "" }
        };
        assets.iter().map(place).collect::<BTreeSet<String>>()
    });
    assert!(own.contains(PROGRAM.trim_start_matches('/')), "{own:?}");
    assert!(own.is_disjoint(&main), "{own:?} {main:?}");
}

/// The sandboxer's service and manual page are not in this package.
#[test]
fn the_page_names_no_service() {
    let script = file("packaging/debian/generate");
    let edit = script.split("\nsed '").nth(1).unwrap().split("' \\\n").next().unwrap();
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/packaging/debian/pause-sandboxer-runc-shim.8");
    let output = Command::new("sed").args([edit, page]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.starts_with(".TH containerd-shim-runc-small-v2 8\n"), "{text}");
    assert!(text.contains("\nWithout a command ") && text.contains("containerd (8)"), "{text}");
    let sandboxer = text.lines().filter(|line| line.contains("sandboxer")).count();
    assert!(sandboxer == 1 && !text.contains("service"), "only NAME names the project: {text}");
}

/// Runs the script before a removal on a node below `root`.
fn before_removal(root: &Path, word: &str) -> Output {
    let mut script = file("packaging/debian/shim-scripts/prerm");
    for part in ["/run/", "/proc/"] {
        script = script.replace(part, &format!("{}{part}", root.display()));
    }
    Command::new("sh").args(["-c", &script, "prerm", word]).output().unwrap()
}

/// Promise: removal_waits_for_pods.
#[test]
fn a_removal_is_refused_while_a_pod_has_the_shim() {
    // The processes are root's.
    if kit::skip_without_root() {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let process = |pid: u32, executable: &str| {
        let directory = root.path().join(format!("proc/{pid}"));
        fs::create_dir_all(&directory).unwrap();
        symlink(executable, directory.join("exe")).unwrap();
        symlink("/", directory.join("root")).unwrap();
        directory
    };
    fs::create_dir_all(root.path().join("run")).unwrap();
    process(7, "/usr/bin/containerd-shim-runc-v2");
    process(8, &format!("{PROGRAM}-other"));
    // In a container, and of a user who has mounted something there.
    let inside = process(10, PROGRAM);
    fs::remove_file(inside.join("root")).unwrap();
    symlink(root.path(), inside.join("root")).unwrap();
    std::os::unix::fs::chown(process(11, PROGRAM), Some(65534), None).unwrap();
    // A kernel thread has none.
    fs::create_dir_all(root.path().join("proc/9")).unwrap();
    for word in ["remove", "0"] {
        assert!(before_removal(root.path(), word).status.success(), "{word}");
    }
    process(21, PROGRAM);
    // After an upgrade.
    process(22, &format!("{PROGRAM} (deleted)"));
    for word in ["remove", "0"] {
        let output = before_removal(root.path(), word);
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(!output.status.success() && said.contains("(processes 21 22; "), "{word}: {said}");
    }
    for word in ["upgrade", "1", "failed-upgrade"] {
        assert!(before_removal(root.path(), word).status.success(), "{word}");
    }
    fs::write(root.path().join(FORCE), "").unwrap();
    let output = before_removal(root.path(), "remove");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("by force"), "{said}");
    assert!(said.contains("in the pods of processes 21 22, "), "{said}");
    assert!(!root.path().join(FORCE).exists(), "the next removal is forced too");
}
