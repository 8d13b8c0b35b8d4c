//! The daemon of a node that was installed before.

use std::fs;
use std::process::Stdio;

use super::{CHECKED, Node};
use crate::file;

impl Node {
    /// `step` fails, and with it the check.
    fn fails_to_start(&self, step: &str) {
        fs::write(self.path("fails"), step).unwrap();
        self.answers("\"/usr/local/bin/pause-sandboxer check\") exit 1");
    }

    /// A pattern of commands, and what the shell does for them.
    pub(super) fn answers(&self, case: &str) {
        let stub = fs::read_to_string(self.path("on-host")).unwrap();
        assert!(stub.contains("case $* in "), "{stub}");
        let stub = stub.replace("case $* in ", &format!("case $* in {case} ;; "));
        kit::write_program(self.path("on-host"), stub.as_bytes()).unwrap();
    }
}

/// Units that were disabled leave a node with the label without a daemon after its next reboot.
#[test]
fn a_daemon_that_was_stopped_or_disabled_is_started_and_enabled() {
    let node = Node::new();
    assert!(node.script("install").status.success());
    let _ = node.asked();
    // Files do not show what systemd has loaded.
    assert!(node.script("install").status.success());
    let asked = node.asked();
    assert_eq!(asked, CHECKED);
    assert!(!asked.contains("restart pause-sandboxer"), "{asked}");

    // systemd refuses to start a socket whose service runs.
    fs::write(node.path("fails"), "systemctl is-active pause-sandboxer.socket").unwrap();
    assert!(node.script("install").status.success());
    let asked = node.asked();
    let at = |part: &str| asked.find(part).unwrap_or_else(|| panic!("{part} is not in\n{asked}"));
    let socket = at("enable --now pause-sandboxer.socket");
    assert!(at("stop pause-sandboxer.service") < socket, "{asked}");
    assert!(socket < at("start pause-sandboxer.service"), "{asked}");
}

/// No pod of the class must come to a node without a daemon.
#[test]
fn a_node_whose_daemon_does_not_start_cannot_run_pods() {
    for (is_first, step) in [
        (false, "systemctl start pause-sandboxer.service"),
        (false, "systemctl enable --now pause-sandboxer.socket"),
        (true, "systemctl restart pause-sandboxer.service"),
    ] {
        let node = Node::new();
        if !is_first {
            assert!(node.script("install").status.success());
            let _ = node.asked();
        }
        node.fails_to_start(step);
        let output = node.command("install").stderr(Stdio::piped()).output().unwrap();
        assert_eq!(output.status.code(), Some(76), "{output:?}");
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains("the daemon does not start"), "{step}: {said}");
        let asked = node.asked();
        assert!(!asked.contains("enable --restart"), "{step}: {asked}");
        // `check` is there for the operator.
        assert!(node.path("host/usr/local/bin/pause-sandboxer").exists());
    }
}

/// With `--default` no pod starts without a daemon, not even that of a rollback.
/// Promise: failed_update_is_undone.
#[test]
fn an_update_whose_daemon_does_not_start_is_undone() {
    let node = Node::new();
    let program = node.path("host/usr/local/bin/pause-sandboxer");
    let unit = node.path("host/etc/systemd/system/pause-sandboxer.service");
    let settings = node.path("host/etc/pause-sandboxer/config.toml");
    assert_eq!(node.installs(&[("SETTINGS", "x = 1")]).0, Some(0));
    let contents = || [&program, &unit, &settings].map(|path| fs::read_to_string(path).unwrap());
    let (before, files) = (contents(), node.files());
    // The daemon starts with these files alone, or not at all.
    let starts = node.path("starts");
    fs::write(&starts, "").unwrap();
    let fits = format!(
        "[ -e {} ] && grep -q program {} && grep -qx 'x = 1' {} && ! grep -q later {}",
        starts.display(),
        program.display(),
        settings.display(),
        unit.display()
    );
    let restart = "systemctl restart pause-sandboxer.service";
    for command in [restart, "/usr/local/bin/pause-sandboxer check"] {
        node.answers(&format!("\"{command}\") {fits} || exit 1"));
    }
    let kills = node.path("kills");
    node.answers(&format!(
        "\"systemctl daemon-reload\") ! rm {0} || kill -KILL $PPID",
        kills.display()
    ));
    let dist = |name: &str| node.path(&format!("dist/{name}"));
    let later = format!("{}# later\n", file("packaging/systemd/pause-sandboxer.service"));
    fs::write(dist("pause-sandboxer.service"), later).unwrap();
    for (version, text) in [("newer", "x = 1"), ("program", "x = 2"), ("newer", "x = 2")] {
        fs::write(dist("pause-sandboxer"), version).unwrap();
        // The next attempt of an interrupted one restores the same.
        for is_killed in [true, false] {
            let _ = node.asked();
            if is_killed {
                fs::write(&kills, "").unwrap();
            }
            let variables = [("ENABLE_OPTIONS", "--default"), ("SETTINGS", text)];
            let (status, said) = node.installs(&variables);
            if is_killed {
                assert_eq!(status, None, "{said}");
                assert_ne!(contents()[1], before[1], "it is not interrupted");
                continue;
            }
            assert_eq!(status, Some(1), "{said}");
            assert!(said.contains("the earlier ones are restored"), "{said}");
            let asked = node.asked();
            assert_eq!(asked.matches(restart).count(), 2, "{asked}");
            assert!(!asked.contains("sandboxer enable"), "{asked}");
            assert_eq!((contents(), node.files()), (before.clone(), files.clone()));
        }
    }
    fs::remove_file(starts).unwrap();
    let (status, said) = node.installs(&[]);
    assert_eq!(status, Some(76), "{said}");
    assert!(said.contains("their daemon does not start either"), "{said}");
    assert_eq!((contents(), node.files()), (before, files));
}

/// The files that a failed update has placed would otherwise run after the next boot.
#[test]
fn an_update_of_which_systemd_does_not_read_the_units_is_undone() {
    let node = Node::new();
    assert!(node.script("install").status.success());
    fs::write(node.path("dist/pause-sandboxer"), "newer").unwrap();
    fs::write(node.path("fails"), "systemctl daemon-reload").unwrap();
    let _ = node.asked();
    assert_eq!(node.installs(&[("SETTINGS", "x = 1")]).0, Some(1));
    let program = fs::read_to_string(node.path("host/usr/local/bin/pause-sandboxer")).unwrap();
    assert_eq!(program, "program");
    assert!(!node.path("host/etc/pause-sandboxer/config.toml").exists());
    let asked = node.asked();
    assert!(!asked.contains("pause-sandboxer.service"), "{asked}");
}

/// If the shell ended at once, containerd would kill what it has started.
#[test]
fn a_signal_does_not_end_a_command() {
    let node = Node::new();
    let completed = node.path("completed");
    let signal = |command: &str, status: u8| {
        let _ = fs::remove_file(&completed);
        node.answers(&format!(
            "\"{command}\") kill -TERM $PPID; : >{}; exit {status}",
            completed.display()
        ));
    };
    signal("/usr/local/bin/pause-sandboxer enable --restart", 0);
    assert_eq!(node.installs(&[]).0, Some(143));
    let asked = node.asked();
    assert!(completed.exists() && asked.ends_with("enable --restart\n"), "{asked}");
    // A node between two versions has no daemon, without which its next pod may not start.
    let restart = "systemctl restart pause-sandboxer.service";
    fs::write(node.path("dist/pause-sandboxer"), "newer").unwrap();
    signal(restart, 0);
    assert_eq!(node.installs(&[]).0, Some(143));
    assert!(node.asked().ends_with(&format!("{restart}\n")));
    fs::write(node.path("dist/pause-sandboxer"), "newest").unwrap();
    node.fails_to_start("nothing");
    signal(restart, 1);
    assert_eq!(node.installs(&[]).0, Some(76));
    let program = fs::read_to_string(node.path("host/usr/local/bin/pause-sandboxer")).unwrap();
    assert_eq!(program, "newer");
    // A default handler that fails does not stay.
    let node = Node::new();
    fs::write(node.path("needs"), "default: x\n").unwrap();
    node.answers("*\" selftest\") kill -TERM $PPID; exit 1");
    assert_eq!(node.installs(&[("ENABLE_OPTIONS", "--default")]).0, Some(76));
    assert!(node.asked().ends_with("pause-sandboxer enable --restart\n"));
}
