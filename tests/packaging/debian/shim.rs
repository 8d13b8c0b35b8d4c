//! The package of the shim alone.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output};

use toml::Table;

use crate::file;

/// The program of the package.
const PROGRAM: &str = "/usr/bin/containerd-shim-runc-small-v2";

const FORCE: &str = "run/containerd-shim-runc-small-v2.force-remove";

#[test]
fn every_packaged_file_exists() {
    let manifest: Table = toml::from_str(&file("runc-shim/Cargo.toml")).unwrap();
    let deb = &manifest["package"]["metadata"]["deb"];
    let mut places = Vec::new();
    for asset in deb["assets"].as_array().unwrap() {
        let [source, target] = [0, 1].map(|index| asset[index].as_str().unwrap());
        if let Some(generated) = source.strip_prefix("../target/package/") {
            let script = file("packaging/debian/generate");
            assert!(script.contains(&format!("\"$2/{generated}\"\n")), "{generated}");
        } else {
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("runc-shim").join(source);
            assert!(path.is_file(), "{source}");
        }
        places.push(format!("/{target}"));
    }
    assert!(places.iter().any(|place| place == PROGRAM), "{places:?}");
    // Both packages can be installed: no file is in both.
    let main = file("Cargo.toml");
    let main: Table = toml::from_str(&main).unwrap();
    let assets = main["package"]["metadata"]["deb"]["assets"].as_array().unwrap();
    for asset in assets.iter().map(|asset| asset[1].as_str().unwrap()) {
        let is_shared = |place: &&String| place.ends_with(asset) && !asset.ends_with('/');
        assert_eq!(places.iter().find(is_shared), None, "{asset}");
    }
    assert!(!places.iter().any(|place| place.contains("/doc/pause-sandboxer/")), "{places:?}");
    for key in ["maintainer-scripts", "changelog"] {
        assert!(deb[key].as_str().unwrap().starts_with("../"), "{key}");
    }
    let rpm = &manifest["package"]["metadata"]["generate-rpm"];
    assert_eq!(rpm["pre_uninstall_script"].as_str(), Some("packaging/debian/shim-scripts/prerm"));
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
