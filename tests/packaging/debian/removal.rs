//! The scripts before and after a removal: it is refused while the node needs the sandboxer.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output};

use crate::file;

/// The words of a removal: dpkg's and rpm's.
const REMOVALS: [&str; 2] = ["remove", "0"];

/// A file of the node that forces the removal.
const FORCE: &str = "run/pause-sandboxer.force-remove";

/// Runs the script before a removal on a node below `root`, whose `pause-sandboxer disable --check`
/// does what the shell makes of `answer`. Commands that change units are written to `asked`.
fn before_removal(root: &Path, answer: &str, word: &str) -> Output {
    let at = root.display();
    let stub = format!("#!/bin/sh\n[ \"$*\" = 'disable --check' ] || exit 9\n{answer}\n");
    kit::write_program(root.join("pause-sandboxer"), stub.as_bytes()).unwrap();
    let units = format!("#!/bin/sh\necho \"${{0##*/}} $*\" >>{at}/asked\n");
    for name in ["deb-systemd-invoke", "systemctl"] {
        kit::write_program(root.join(name), units.as_bytes()).unwrap();
    }
    fs::create_dir_all(root.join("run/systemd/system")).unwrap();
    let _ = fs::remove_file(root.join("asked"));
    let script = ["/run/", "/etc/", "/usr/local/"]
        .into_iter()
        .fold(file("packaging/debian/scripts/prerm"), |script, part| {
            script.replace(part, &format!("{at}{part}"))
        });
    let mut command = Command::new("sh");
    command.args(["-c", &script, "prerm", word]).env("PATH", format!("{at}:/usr/bin:/bin"));
    command.output().unwrap()
}

/// What `before_removal` has changed of the units.
fn asked(root: &Path) -> String {
    fs::read_to_string(root.join("asked")).unwrap_or_default()
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
    let root = tempfile::tempdir().unwrap();
    for word in REMOVALS {
        for (answer, said) in NEEDS {
            let output = before_removal(root.path(), answer, word);
            let text = String::from_utf8(output.stdout).unwrap();
            assert_eq!(output.status.code(), Some(1), "{word} {answer}: {text}");
            assert!(text.contains("not removed") && text.contains(said), "{answer}: {text}");
            assert!(text.contains("pause-sandboxer disable --wait --restart\n"), "{text}");
            assert!(text.contains(&format!("touch {}/{FORCE}\n", root.path().display())), "{text}");
            assert_eq!(asked(root.path()), "", "{word} {answer}: the daemon runs on");
        }
        let output = before_removal(root.path(), "exit 0", word);
        assert!(output.status.success() && output.stdout.is_empty(), "{output:?}");
        assert!(asked(root.path()).contains("pause-sandboxer.service"), "the daemon is stopped");
    }
}

#[test]
fn a_forced_removal_says_what_is_lost_and_forces_no_later_one() {
    let root = tempfile::tempdir().unwrap();
    let force = root.path().join(FORCE);
    for word in REMOVALS {
        for (answer, said) in NEEDS {
            fs::create_dir_all(force.parent().unwrap()).unwrap();
            fs::write(&force, "").unwrap();
            let output = before_removal(root.path(), answer, word);
            let text = String::from_utf8(output.stdout).unwrap();
            assert!(output.status.success(), "{answer}: {text}");
            assert!(text.contains("removed by force") && text.contains(said), "{answer}: {text}");
            assert!(text.contains("containerd cannot start\n"), "{text}");
            assert!(asked(root.path()).contains("pause-sandboxer.service"), "{word} {answer}");
            assert!(!force.exists(), "{word} {answer}");
        }
    }
    fs::write(&force, "").unwrap();
    let output = before_removal(root.path(), "exit 0", "remove");
    assert!(output.status.success() && output.stdout.is_empty(), "{output:?}");
    assert!(!force.exists(), "the next package would be removed by force");
}

/// Also one of a node that needs the sandboxer, or cannot say so.
#[test]
fn an_upgrade_is_never_refused() {
    let root = tempfile::tempdir().unwrap();
    for word in ["upgrade", "failed-upgrade", "deconfigure", "1"] {
        for (answer, _) in NEEDS {
            let output = before_removal(root.path(), answer, word);
            assert!(output.status.success() && output.stdout.is_empty(), "{word}: {output:?}");
            assert_eq!(asked(root.path()), "", "{word}: the daemon runs on");
        }
    }
}

/// Sockets, lock and mark are of no use without the daemon; records are, to the next one.
#[test]
fn a_removal_deletes_the_run_directory_unless_pods_have_records() {
    if kit::skip_without_root() {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let run = root.path().join("run/pause-sandboxer");
    let script = file("packaging/debian/scripts/postrm")
        .replace("/run/", &format!("{}/run/", root.path().display()))
        .replace("/usr/bin/deb-systemd-helper", "/nowhere");
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
        let output = Command::new("sh").args(["-c", &script, "postrm", word]).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        assert_eq!(run.exists(), left, "{word}");
    }
    // A daemon that was killed leaves the directory of its records mounted.
    fs::create_dir_all(run.join("sandboxes")).unwrap();
    let mounted = format!(
        "mount -t tmpfs x '{}' && sh -c \"$1\" postrm remove",
        run.join("sandboxes").display()
    );
    let mut command = Command::new("unshare");
    let output = command.args(["--mount", "sh", "-c", &mounted, "sh", &script]).output().unwrap();
    assert!(output.status.success() && !run.exists(), "{output:?}");
}

/// `enable` writes settings beside the packaged file, which dpkg deletes.
#[test]
fn a_purge_deletes_the_settings_and_nothing_else() {
    let root = tempfile::tempdir().unwrap();
    let etc = root.path().join("etc");
    let script = file("packaging/debian/scripts/postrm")
        .replace("/run/", &format!("{}/run/", root.path().display()))
        .replace("/etc/", &format!("{}/etc/", root.path().display()))
        .replace("/usr/bin/deb-systemd-helper", "/nowhere");
    let after = |word: &str| {
        let output = Command::new("sh").args(["-c", &script, "postrm", word]).output().unwrap();
        assert!(output.status.success(), "{output:?}");
    };
    let others = ["containerd/config.toml", "containerd/conf.d/pause-sandboxer.toml", "other"];
    let own = ["pause-sandboxer/adopted.toml", "pause-sandboxer/dir/file"];
    for path in others.iter().chain(&own) {
        fs::create_dir_all(etc.join(path).parent().unwrap()).unwrap();
        fs::write(etc.join(path), "").unwrap();
    }
    for word in ["remove", "upgrade", "0"] {
        after(word);
        assert!(own.iter().all(|path| etc.join(path).exists()), "{word}");
    }
    after("purge");
    assert!(!etc.join("pause-sandboxer").exists());
    // Of a directory that is elsewhere only the link.
    let elsewhere = root.path().join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    fs::write(elsewhere.join("config.toml"), "").unwrap();
    symlink(&elsewhere, etc.join("pause-sandboxer")).unwrap();
    after("purge");
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
