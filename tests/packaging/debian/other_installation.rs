//! The package is removed from a node on which the chart's installer or `make install` has put files
//! of its own: they are what runs.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use crate::file;

const PROGRAM: &str = "usr/local/bin/pause-sandboxer";
const UNIT: &str = "etc/systemd/system/pause-sandboxer.service";
const SOCKET: &str = "run/pause-sandboxer/pause-sandboxer.sock";
const DROP_IN: &str = "etc/containerd/conf.d/pause-sandboxer.toml";

/// Makes a node with the files of `make install`. Commands that change units are written down.
fn node() -> tempfile::TempDir {
    let node = tempfile::tempdir().unwrap();
    let root = node.path();
    fs::create_dir_all(root.join("run/systemd/system")).unwrap();
    for (path, text) in [(PROGRAM, ""), (UNIT, ""), (SOCKET, ""), (DROP_IN, "")] {
        fs::create_dir_all(root.join(path).parent().unwrap()).unwrap();
        fs::write(root.join(path), text).unwrap();
    }
    let stub = format!("#!/bin/sh\necho \"${{0##*/}} $*\" >>{}/asked\n", root.display());
    for name in ["deb-systemd-helper", "deb-systemd-invoke", "systemctl"] {
        kit::write_program(root.join(name), stub.as_bytes()).unwrap();
    }
    kit::write_program(root.join("pause-sandboxer"), b"#!/bin/sh\n").unwrap();
    node
}

/// Runs a script of the package, and returns which commands that change units it has run.
fn run(root: &Path, script: &str, word: &str) -> String {
    let place = |path: &str| format!("{}{path}", root.display());
    let text = ["/run/", "/etc/", "/usr/local/"]
        .into_iter()
        .fold(file(&format!("packaging/debian/scripts/{script}")), |text, part| {
            text.replace(part, &place(part))
        })
        .replace("/usr/bin/deb-systemd-helper", &place("/deb-systemd-helper"));
    let mut command = Command::new("sh");
    command.args(["-c", &text, script, word]).env("PATH", place(":/usr/bin:/bin"));
    let output = command.output().unwrap();
    assert!(output.status.success(), "{script} {word}: {output:?}");
    let asked = fs::read_to_string(root.join("asked")).unwrap_or_default();
    let _ = fs::remove_file(root.join("asked"));
    asked.lines().filter(|line| !line.ends_with("daemon-reload")).collect::<Vec<_>>().join("\n")
}

/// The scripts of a removal, of a purge and of a removal with rpm.
const SCRIPTS: [(&str, &str); 5] = [
    ("prerm", "remove"),
    ("postrm", "remove"),
    ("postrm", "purge"),
    ("prerm", "0"),
    ("postrm", "0"),
];

#[test]
fn a_removal_and_a_purge_change_nothing_of_another_installation() {
    for (script, word) in SCRIPTS {
        let node = node();
        assert_eq!(run(node.path(), script, word), "", "{script} {word}");
        for path in [PROGRAM, UNIT, SOCKET, DROP_IN] {
            assert!(node.path().join(path).exists(), "{script} {word}: {path}");
        }
    }
}

/// The chart can place the programs in another directory, which its unit names.
#[test]
fn the_directory_of_the_other_program_is_that_of_its_unit() {
    for ((script, word), is_there) in
        SCRIPTS.into_iter().flat_map(|script| [(script, true), (script, false)])
    {
        let node = node();
        let root = node.path();
        fs::remove_file(root.join(PROGRAM)).unwrap();
        let program = root.join("opt/bin/pause-sandboxer");
        fs::create_dir_all(program.parent().unwrap()).unwrap();
        if is_there {
            fs::write(&program, "").unwrap();
        }
        let unit = format!("[Service]\nExecStart={} serve\n", program.display());
        fs::write(root.join(UNIT), unit).unwrap();
        let asked = run(root, script, word);
        // rpm has no helper.
        let is_silent = is_there || (script, word) == ("postrm", "0");
        assert_eq!(asked.is_empty(), is_silent, "{script} {word}, {is_there}: {asked}");
        let stays = is_there || script == "prerm";
        assert_eq!(root.join(SOCKET).exists(), stays, "{script} {word}, {is_there}");
    }
}

/// A unit that is masked, or one without its program, is no other installation.
#[test]
fn files_without_a_daemon_of_their_own_are_no_installation() {
    let masked = |root: &Path| {
        fs::remove_file(root.join(UNIT)).unwrap();
        symlink("/dev/null", root.join(UNIT)).unwrap();
    };
    let without_program = |root: &Path| fs::remove_file(root.join(PROGRAM)).unwrap();
    let cases: [&dyn Fn(&Path); 2] = [&masked, &without_program];
    for damage in cases {
        for (script, word) in SCRIPTS {
            let node = node();
            damage(node.path());
            let asked = run(node.path(), script, word);
            // rpm has no helper.
            let is_silent = (script, word) == ("postrm", "0");
            assert_eq!(asked.is_empty(), is_silent, "{script} {word}: {asked}");
            assert_eq!(node.path().join(SOCKET).exists(), script == "prerm", "{script} {word}");
        }
    }
}

/// Each script of a package is a file of its own, so both have the function.
#[test]
fn both_scripts_find_another_installation_in_the_same_way() {
    let [prerm, postrm] = ["prerm", "postrm"].map(|script| {
        let text = file(&format!("packaging/debian/scripts/{script}"));
        let from = text.find("has_other() {").unwrap();
        let length = text[from..].find("\n}\n").unwrap();
        text[from..from + length].to_owned()
    });
    assert_eq!(prerm, postrm);
}
