//! The daemon of a node that was installed before.

use std::fs;
use std::process::Stdio;

use super::{CHECKED, Node};

impl Node {
    /// `step` fails, and with it the check.
    pub(super) fn fails_to_start(&self, step: &str) {
        fs::write(self.path("fails"), step).unwrap();
        self.fails_too("\"/usr/local/bin/pause-sandboxer check\"");
    }

    /// Commands of this pattern fail.
    pub(super) fn fails_too(&self, pattern: &str) {
        let stub = fs::read_to_string(self.path("on-host")).unwrap();
        assert!(stub.contains("case $* in "), "{stub}");
        let stub = stub.replace("case $* in ", &format!("case $* in {pattern}) exit 1 ;; "));
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
    for (is_update, step) in [
        (false, "systemctl start pause-sandboxer.service"),
        (false, "systemctl enable --now pause-sandboxer.socket"),
        (true, "systemctl restart pause-sandboxer.service"),
    ] {
        let node = Node::new();
        assert!(node.script("install").status.success());
        let _ = node.asked();
        if is_update {
            fs::write(node.path("dist/pause-sandboxer"), "newer").unwrap();
        }
        node.fails_to_start(step);
        let output = node.command("install").stderr(Stdio::piped()).output().unwrap();
        assert_eq!(output.status.code(), Some(76), "{output:?}");
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains("the daemon does not start"), "{step}: {said}");
        let asked = node.asked();
        assert!(!asked.contains("enable --restart"), "{step}: {asked}");
    }
}
