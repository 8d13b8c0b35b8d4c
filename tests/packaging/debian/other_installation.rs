//! The package is removed from a node on which the chart's installer or `make install` has put
//! files of its own: they are what runs.

use std::fs;
use std::os::unix::fs::symlink;

use super::node::Node;
use crate::file;

const PROGRAM: &str = "usr/local/bin/pause-sandboxer";
const UNIT: &str = "etc/systemd/system/pause-sandboxer.service";
const SOCKET: &str = "run/pause-sandboxer/pause-sandboxer.sock";
const DROP_IN: &str = "etc/containerd/conf.d/pause-sandboxer.toml";

/// Makes a node with the files of `make install`.
fn node() -> Node {
    let node = Node::new();
    for path in [PROGRAM, UNIT, SOCKET, DROP_IN] {
        node.write(path, "");
    }
    node.program("pause-sandboxer", "#!/bin/sh\n");
    node
}

/// Runs a script of the package, and returns which commands that change units it has run.
fn run(node: &Node, script: &str, word: &str) -> String {
    node.said(&format!("packaging/debian/scripts/{script}"), &[word]);
    node.asked()
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
        assert_eq!(run(&node, script, word), "", "{script} {word}");
        for path in [PROGRAM, UNIT, SOCKET, DROP_IN] {
            assert!(node.at(path).exists(), "{script} {word}: {path}");
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
        fs::remove_file(node.at(PROGRAM)).unwrap();
        let program = "opt/bin/pause-sandboxer";
        if is_there {
            node.write(program, "");
        }
        let unit = format!("[Service]\nExecStart={} serve\n", node.at(program).display());
        node.write(UNIT, &unit);
        let asked = run(&node, script, word);
        // rpm has no helper.
        let is_silent = is_there || (script, word) == ("postrm", "0");
        assert_eq!(asked.is_empty(), is_silent, "{script} {word}, {is_there}: {asked}");
        let stays = is_there || script == "prerm";
        assert_eq!(node.at(SOCKET).exists(), stays, "{script} {word}, {is_there}");
    }
}

/// A unit that is masked, or one without its program, is no other installation.
#[test]
fn files_without_a_daemon_of_their_own_are_no_installation() {
    let masked = |node: &Node| {
        fs::remove_file(node.at(UNIT)).unwrap();
        symlink("/dev/null", node.at(UNIT)).unwrap();
    };
    let without_program = |node: &Node| fs::remove_file(node.at(PROGRAM)).unwrap();
    let cases: [&dyn Fn(&Node); 2] = [&masked, &without_program];
    for damage in cases {
        for (script, word) in SCRIPTS {
            let node = node();
            damage(&node);
            let asked = run(&node, script, word);
            // rpm has no helper.
            let is_silent = (script, word) == ("postrm", "0");
            assert_eq!(asked.is_empty(), is_silent, "{script} {word}: {asked}");
            assert_eq!(node.at(SOCKET).exists(), script == "prerm", "{script} {word}");
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
