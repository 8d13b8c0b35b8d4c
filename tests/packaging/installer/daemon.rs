//! The daemon of a node that was installed before.

use std::fs;
use std::process::Stdio;

use super::{CHECKED, Node};

impl Node {
    /// `step` fails, and with it the check.
    fn fails_to_start(&self, step: &str) {
        fs::write(self.path("fails"), step).unwrap();
        self.answers("\"/usr/local/bin/pause-sandboxer check\") exit 1");
    }

    /// A pattern of commands, and what the shell does for them.
    fn answers(&self, case: &str) {
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

/// With `--default` no pod starts without a daemon, not even that of a rollback.
#[test]
fn an_update_whose_daemon_does_not_start_is_undone() {
    let node = Node::new();
    let settings = node.path("host/etc/pause-sandboxer/config.toml");
    let program = node.path("host/usr/local/bin/pause-sandboxer");
    assert!(node.script("install").status.success());
    let before = node.files();
    // Neither the new program nor the old one starts with the settings.
    let unfit = format!("grep -q newer {} || [ -e {} ]", program.display(), settings.display());
    let restart = "systemctl restart pause-sandboxer.service";
    for command in [restart, "/usr/local/bin/pause-sandboxer check"] {
        node.answers(&format!("\"{command}\") if {unfit}; then exit 1; fi"));
    }
    for (version, variables) in
        [("newer", &[][..]), ("program", &[("SETTINGS", "x = 1")]), ("newer", &[("SETTINGS", "x")])]
    {
        fs::write(node.path("dist/pause-sandboxer"), version).unwrap();
        // The next attempt of an interrupted one restores the same.
        for is_interrupted in [true, false] {
            let _ = node.asked();
            let step = if is_interrupted { "systemctl daemon-reload" } else { "nothing" };
            fs::write(node.path("fails"), step).unwrap();
            let mut command = node.command("install");
            command.env("ENABLE_OPTIONS", "--default").envs(variables.iter().copied());
            let output = command.stderr(Stdio::piped()).output().unwrap();
            assert_eq!(output.status.code(), Some(1), "{output:?}");
            if is_interrupted {
                continue;
            }
            let said = String::from_utf8(output.stderr).unwrap();
            assert!(said.contains("the earlier installation is restored"), "{said}");
            let asked = node.asked();
            assert_eq!(asked.matches(restart).count(), 2, "{asked}");
            assert!(!asked.contains("sandboxer enable"), "{asked}");
            assert_eq!(node.files(), before);
            assert_eq!(fs::read_to_string(&program).unwrap(), "program");
        }
    }
}

/// A shell that SIGTERM ends takes what it has started with it, because containerd kills the
/// processes of the container then.
#[test]
fn a_signal_does_not_interrupt_an_installation() {
    let node = Node::new();
    let ready = node.path("ready");
    node.answers(&format!("*\" enable --restart\") kill -TERM $PPID; : >{}", ready.display()));
    let output = node.script("install");
    assert!(output.status.success() && ready.exists(), "{output:?}");
    assert!(node.asked().ends_with("pause-sandboxer selftest\n"));
}
