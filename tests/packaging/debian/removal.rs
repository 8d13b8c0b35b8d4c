//! The scripts before and after a removal: it is refused while the node needs the sandboxer.

use std::fs;
use std::os::unix::fs::symlink;
use std::process::{Command, Output};

use super::node::Node;
use crate::file;

/// The words of a removal: dpkg's and rpm's.
const REMOVALS: [&str; 2] = ["remove", "0"];

/// A file of the node that forces the removal.
const FORCE: &str = "run/pause-sandboxer.force-remove";

const PRERM: &str = "packaging/debian/scripts/prerm";
const POSTRM: &str = "packaging/debian/scripts/postrm";

/// Runs the script before a removal on a node whose `pause-sandboxer disable --check` does what the
/// shell makes of `answer`.
fn before_removal(node: &Node, answer: &str, word: &str) -> Output {
    let stub = format!("#!/bin/sh\n[ \"$*\" = 'disable --check' ] || exit 9\n{answer}\n");
    node.program("pause-sandboxer", &stub);
    node.run(PRERM, &[word])
}

/// Answers of `disable --check` for which the package stays, and what the script says of each.
const NEEDS: [(&str, &str); 7] = [
    ("echo 'pod: default/web (abc)'; exit 75", "    pod: default/web (abc)\n"),
    ("echo 'default: a'; echo 'pod: b'; exit 75", "    default: a\n    pod: b\n"),
    ("echo 'unread: x'; echo 'config: y'", "    unread: x\n    config: y\n"),
    // No later step removes it from containerd's config.
    ("echo 'config: runtime handler a'", "    config: runtime handler a\n"),
    ("echo 'read records: EIO' >&2; exit 1", "has failed (exit status 1)\n"),
    ("exit 75", "has failed (exit status 75)\n"),
    ("exit 127", "has failed (exit status 127)\n"),
];

/// The program decides what needs the sandboxer, and a program that fails gives no answer.
///
/// Promise: removal_waits_for_pods.
#[test]
fn a_removal_is_refused_while_the_node_needs_the_sandboxer() {
    let node = Node::new();
    for word in REMOVALS {
        for (answer, said) in NEEDS {
            let output = before_removal(&node, answer, word);
            let text = String::from_utf8(output.stdout).unwrap();
            assert_eq!(output.status.code(), Some(1), "{word} {answer}: {text}");
            assert!(text.contains("not removed") && text.contains(said), "{answer}: {text}");
            assert!(text.contains("pause-sandboxer disable --restart\n"), "{text}");
            assert!(text.contains(&format!("touch {}\n", node.at(FORCE).display())), "{text}");
            assert_eq!(node.asked(), "", "{word} {answer}: the daemon runs on");
        }
        let output = before_removal(&node, "exit 0", word);
        assert!(output.status.success() && output.stdout.is_empty(), "{output:?}");
        assert!(node.asked().contains("pause-sandboxer.service"), "the daemon is stopped");
    }
}

#[test]
fn a_forced_removal_says_what_is_lost_and_forces_no_later_one() {
    let node = Node::new();
    let force = node.at(FORCE);
    for word in REMOVALS {
        for (answer, said) in NEEDS {
            node.write(FORCE, "");
            let output = before_removal(&node, answer, word);
            let text = String::from_utf8(output.stdout).unwrap();
            assert!(output.status.success(), "{answer}: {text}");
            assert!(text.contains("removed by force") && text.contains(said), "{answer}: {text}");
            assert!(text.contains("containerd cannot start\n"), "{text}");
            assert!(node.asked().contains("pause-sandboxer.service"), "{word} {answer}");
            assert!(!force.exists(), "{word} {answer}");
        }
    }
    fs::write(&force, "").unwrap();
    let output = before_removal(&node, "exit 0", "remove");
    assert!(output.status.success() && output.stdout.is_empty(), "{output:?}");
    assert!(!force.exists(), "the next package would be removed by force");
}

/// Also one of a node that needs the sandboxer, or cannot say so.
#[test]
fn an_upgrade_is_never_refused() {
    let node = Node::new();
    for word in ["upgrade", "failed-upgrade", "deconfigure", "1"] {
        for (answer, _) in NEEDS {
            let output = before_removal(&node, answer, word);
            assert!(output.status.success() && output.stdout.is_empty(), "{word}: {output:?}");
            assert_eq!(node.asked(), "", "{word}: the daemon runs on");
        }
    }
}

/// Sockets, lock and mark are of no use without the daemon; records are, to the next one.
#[test]
fn a_removal_deletes_the_run_directory_unless_pods_have_records() {
    if kit::skip_without_root() {
        return;
    }
    let node = Node::new();
    let run = node.at("run/pause-sandboxer");
    for (word, record, left) in [
        ("remove", true, true),
        ("upgrade", false, true),
        ("remove", false, false),
        ("purge", false, false),
    ] {
        let sandboxes = run.join("sandboxes");
        let _ = fs::remove_dir_all(&run);
        fs::create_dir_all(if record { sandboxes.join("abc") } else { sandboxes }).unwrap();
        fs::write(run.join("lock"), "1").unwrap();
        node.said(POSTRM, &[word]);
        assert_eq!(run.exists(), left, "{word}");
    }
    // A daemon that was killed leaves the directory of its records mounted.
    fs::create_dir_all(run.join("sandboxes")).unwrap();
    let mounted = format!(
        "mount -t tmpfs x '{}' && sh -c \"$1\" postrm remove",
        run.join("sandboxes").display()
    );
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", &mounted, "sh", &node.script(POSTRM)]);
    let programs = format!("{}:{}", node.at("").display(), std::env::var("PATH").unwrap());
    let output = command.env("PATH", programs).output().unwrap();
    assert!(output.status.success() && !run.exists(), "{output:?}");
}

/// The note of the daemon lets a later daemon refuse another directory.
#[test]
fn a_removal_keeps_the_note_of_another_directory_with_records() {
    let node = Node::new();
    for word in ["remove", "purge", "0"] {
        fs::create_dir_all(node.at("state/sandboxes/abc")).unwrap();
        fs::create_dir_all(node.at("run/pause-sandboxer/sandboxes")).unwrap();
        let note = "run/pause-sandboxer/pause-sandboxer.sock.state";
        // The daemon writes it without a newline.
        node.write(note, node.at("state").to_str().unwrap());
        node.said(POSTRM, &[word]);
        assert!(node.at(note).exists(), "{word}");
        fs::remove_dir(node.at("state/sandboxes/abc")).unwrap();
        node.said(POSTRM, &[word]);
        assert!(!node.at("run/pause-sandboxer").exists(), "{word}");
    }
}

/// `enable` writes settings beside the packaged file, which dpkg deletes.
#[test]
fn a_purge_deletes_the_settings_and_nothing_else() {
    let node = Node::new();
    let etc = node.at("etc");
    let others = ["containerd/config.toml", "containerd/conf.d/pause-sandboxer.toml", "other"];
    let own = ["pause-sandboxer/adopted.toml", "pause-sandboxer/dir/file"];
    for path in others.iter().chain(&own) {
        node.write(&format!("etc/{path}"), "");
    }
    for word in ["remove", "upgrade", "0"] {
        node.said(POSTRM, &[word]);
        assert!(own.iter().all(|path| etc.join(path).exists()), "{word}");
    }
    node.said(POSTRM, &["purge"]);
    assert!(!etc.join("pause-sandboxer").exists());
    // Of a directory that is elsewhere only the link.
    let elsewhere = node.at("elsewhere");
    node.write("elsewhere/config.toml", "");
    symlink(&elsewhere, etc.join("pause-sandboxer")).unwrap();
    node.said(POSTRM, &["purge"]);
    assert!(elsewhere.join("config.toml").exists() && !etc.join("pause-sandboxer").is_symlink());
    assert!(others.iter().all(|path| etc.join(path).exists()));
}

/// The documented command must work with pods of DaemonSets, as there are on every node that
/// has the installer, and with pods that have volumes of the type emptyDir.
#[test]
fn the_documented_drain_works_with_daemonsets_and_volumes() {
    let options = " --ignore-daemonsets --delete-emptydir-data NODE";
    for page in ["docs/install.md", "docs/kubernetes.md", "packaging/debian/scripts/prerm"] {
        let text = file(page);
        let drains: Vec<&str> = text.split("kubectl drain").skip(1).collect();
        assert!(!drains.is_empty(), "{page}");
        assert!(drains.iter().all(|rest| rest.starts_with(options)), "{page}: {drains:?}");
    }
}
