//! The script that changes a node, on the root of one: what it installs, it removes.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use super::file;
use super::kubernetes::DIR;

mod daemon;
mod default_handler;
mod values;

/// The commands of an installation that has nothing to change.
const CHECKED: &str = "systemctl is-active pause-sandboxer.socket\n\
    systemctl enable --now pause-sandboxer.socket\n\
    systemctl enable pause-sandboxer.service\n\
    systemctl start pause-sandboxer.service\n\
    /usr/local/bin/pause-sandboxer enable --restart\n\
    /usr/local/bin/pause-sandboxer check\n\
    /usr/local/bin/pause-sandboxer selftest\n";

/// A pod that needs the sandboxer.
const POD: &str = "pod: default/web (abc)\n";

/// A node's root and what is done on it: commands are written down, `disable --check` prints
/// what `needs` holds, or fails where there is `unknown`; the command that `fails` holds fails.
struct Node(tempfile::TempDir);

impl Node {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let node = Self(dir);
        for path in ["host/etc/containerd", "dist"] {
            fs::create_dir_all(node.path(path)).unwrap();
        }
        for source in ["systemd/pause-sandboxer.service", "systemd/pause-sandboxer.socket"] {
            let name = source.split('/').nth(1).unwrap();
            fs::write(node.path(&format!("dist/{name}")), file(&format!("packaging/{source}")))
                .unwrap();
        }
        for program in ["pause-sandboxer", "pause-sandboxer-runc-shim"] {
            fs::write(node.path(&format!("dist/{program}")), "program").unwrap();
        }
        fs::write(node.path("needs"), "").unwrap();
        fs::write(node.path("fails"), "nothing").unwrap();
        let stub = format!(
            "#!/bin/sh\necho \"$*\" >>{0}/asked\ncase $* in \"$(cat {0}/fails)\") exit 1 ;; \
             *\" disable --check\") [ ! -e {0}/unknown ] || exit 1; cat {0}/needs; \
             ! grep -qE '^(pod|default): ' {0}/needs || exit 75 ;; \
             \"rm -rf --one-file-system \"*) rm -rf {0}/host$4 ;; esac\n",
            node.0.path().display()
        );
        kit::write_program(node.path("on-host"), stub.as_bytes()).unwrap();
        node
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.0.path().join(name)
    }

    fn script(&self, command: &str) -> Output {
        self.command(command).output().unwrap()
    }

    fn command(&self, word: &str) -> Command {
        let mut command =
            Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join(DIR).join("install.sh"));
        command
            .arg(word)
            .env("HOST", self.path("host"))
            .env("DIST", self.path("dist"))
            .env("ON_HOST", self.path("on-host"))
            .stdin(Stdio::null())
            .stderr(Stdio::null());
        command
    }

    /// An uninstallation must wait; it leaves everything in place, and what it says names `why`.
    fn waits(&self, why: &str) {
        let output = self.script("uninstall");
        let said = String::from_utf8(output.stdout).unwrap();
        // rollout.sh tries again after this status.
        assert_eq!(output.status.code(), Some(75), "{said}");
        assert!(said.contains(why), "{said}");
        assert!(self.path("host/usr/local/bin/pause-sandboxer").exists());
        let asked = fs::read_to_string(self.path("asked")).unwrap_or_default();
        assert!(!asked.contains("disable --restart") && !asked.contains("systemctl"), "{asked}");
    }

    fn ends(&self) {
        let output = self.script("uninstall");
        assert!(output.status.success(), "{output:?}");
        assert!(!self.path("host/usr/local/bin/pause-sandboxer").exists());
    }

    /// Returns the commands that were run.
    fn asked(&self) -> String {
        let text = fs::read_to_string(self.path("asked")).unwrap_or_default();
        let _ = fs::remove_file(self.path("asked"));
        text
    }

    /// Returns all files of the node.
    fn files(&self) -> BTreeSet<String> {
        let output = Command::new("find")
            .arg(self.path("host"))
            // The lock is on a tmpfs.
            .args(["-type", "f", "!", "-name", "pause-sandboxer.installer", "-printf", "%P\n"])
            .output()
            .unwrap();
        String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
    }
}

#[test]
fn the_uninstaller_removes_everything_installed() {
    let node = Node::new();
    fs::write(node.path("host/etc/containerd/config.toml"), "version = 2\n[plugins]\n").unwrap();
    let before = node.files();
    let output = node.script("install");
    assert!(output.status.success(), "{output:?}");
    let config = fs::read_to_string(node.path("host/etc/containerd/config.toml")).unwrap();
    assert_eq!(config, "version = 2\n[plugins]\n", "`enable` alone edits it");
    for path in [
        "usr/local/bin/pause-sandboxer",
        "usr/local/bin/pause-sandboxer-runc-shim",
        "etc/systemd/system/pause-sandboxer.service",
        "etc/systemd/system/pause-sandboxer.socket",
    ] {
        assert!(node.files().contains(path), "{path}");
    }
    let asked = node.asked();
    for command in [
        "systemctl enable --now pause-sandboxer.socket",
        "pause-sandboxer enable --restart",
        "pause-sandboxer check",
    ] {
        assert!(asked.contains(command), "{asked}");
    }
    // The same again changes nothing, and restarts nothing.
    assert!(node.script("install").status.success());
    assert_eq!(node.asked(), CHECKED);
    // A new version of either program restarts the daemon and leaves containerd alone.
    for program in ["pause-sandboxer", "pause-sandboxer-runc-shim"] {
        fs::write(node.path(&format!("dist/{program}")), "newer").unwrap();
        assert!(node.script("install").status.success());
        let asked = node.asked();
        assert!(
            asked.contains("restart pause-sandboxer.service")
                && !asked.contains("restart containerd"),
            "{program}: {asked}"
        );
    }
    fs::create_dir_all(node.path("host/run/pause-sandboxer/shims")).unwrap();
    fs::write(node.path("host/run/pause-sandboxer/lock"), "1").unwrap();
    // Of an update that was interrupted.
    for path in
        ["usr/local/bin/pause-sandboxer.new", "etc/systemd/system/pause-sandboxer.socket.new"]
    {
        fs::write(node.path(&format!("host/{path}")), "").unwrap();
    }
    let output = node.script("uninstall");
    assert!(output.status.success(), "{output:?}");
    // The node unmounts it: the container that runs the script has copies of the node's mounts.
    assert!(!node.path("host/run/pause-sandboxer").exists());
    let left: Vec<String> = node.files().difference(&before).cloned().collect();
    assert_eq!(left, [""; 0]);
    let asked = node.asked();
    let at = |part: &str| asked.find(part).unwrap_or_else(|| panic!("{part} is not in\n{asked}"));
    assert!(at("pause-sandboxer disable --restart") < at("systemctl disable"), "{asked}");
    assert!(
        asked.contains("systemctl disable --now pause-sandboxer.socket pause-sandboxer.service")
            && asked.contains("rm -rf --one-file-system /run/pause-sandboxer"),
        "{asked:?}"
    );
}

/// The options of the operator are those of `enable`; without leave the script changes nothing.
#[test]
fn containerd_is_changed_by_one_command() {
    for (edit, options, asked) in [
        ("true", "", "enable --restart\n"),
        ("true", "--default --offline", "enable --default --offline --restart\n"),
        ("false", "", "enable --dry-run\n"),
    ] {
        let node = Node::new();
        let mut command = node.command("install");
        command.env("EDIT_CONTAINERD_CONFIG", edit).env("ENABLE_OPTIONS", options);
        assert!(command.status().unwrap().success());
        let all = node.asked();
        assert!(all.contains(&format!("/usr/local/bin/pause-sandboxer {asked}")), "{all}");
        let mut command = node.command("uninstall");
        assert!(command.env("EDIT_CONTAINERD_CONFIG", edit).status().unwrap().success());
        let all = node.asked();
        let how = if edit == "true" { "--restart" } else { "--check" };
        assert!(all.contains(&format!("/usr/local/bin/pause-sandboxer disable {how}\n")), "{all}");
        let restarts = all.matches("pause-sandboxer disable --restart").count();
        assert_eq!(restarts, usize::from(edit == "true"), "{all}");
    }
}

/// Without permission the script changes neither containerd nor a file that containerd needs.
#[test]
fn a_removal_fails_while_an_operator_has_the_handler_in_the_config() {
    let node = Node::new();
    assert!(node.script("install").status.success());
    let before = node.files();
    let uninstall = || {
        let _ = node.asked();
        let mut command = node.command("uninstall");
        command.env("EDIT_CONTAINERD_CONFIG", "false").stderr(Stdio::piped()).output().unwrap()
    };
    for fact in ["config: runtime handler small\n", "unread: x\nconfig: file /etc/x.toml\n"] {
        fs::write(node.path("needs"), fact).unwrap();
        let output = uninstall();
        assert!(!output.status.success(), "{output:?}");
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(said.contains(fact), "{said}");
        let reason = String::from_utf8_lossy(&output.stderr);
        assert!(reason.contains("run `pause-sandboxer disable --restart` on the node"), "{reason}");
        let asked = node.asked();
        assert!(!asked.contains("disable --restart") && !asked.contains("systemctl"), "{asked}");
        assert_eq!(node.files(), before);
    }
    fs::write(node.path("unknown"), "").unwrap();
    assert!(!uninstall().status.success());
    assert!(node.path("host/usr/local/bin/pause-sandboxer").exists());
    fs::remove_file(node.path("unknown")).unwrap();
    fs::write(node.path("needs"), "").unwrap();
    assert!(uninstall().status.success());
    assert!(!node.path("host/usr/local/bin/pause-sandboxer").exists());
}

#[test]
fn an_interrupted_installation_is_completed_by_the_next() {
    let steps = [
        "systemctl daemon-reload",
        "systemctl enable --now pause-sandboxer.socket",
        "systemctl restart pause-sandboxer.service",
        "/usr/local/bin/pause-sandboxer enable --restart",
    ];
    for step in steps {
        let node = Node::new();
        fs::write(node.path("fails"), step).unwrap();
        assert!(!node.script("install").status.success(), "{step}");
        let _ = node.asked();
        fs::write(node.path("fails"), "nothing").unwrap();
        let output = node.script("install");
        assert!(output.status.success(), "{output:?}");
        let asked = node.asked();
        // `enable` is what ends the work of the script, and completes its own.
        let left = if step.ends_with("--restart") { &steps[3..] } else { &steps[..] };
        for step in left {
            assert!(asked.contains(step), "{step} is left out: {asked}");
        }
        assert!(node.script("install").status.success());
        assert_eq!(node.asked(), CHECKED);
    }
}

/// Promise: removal_waits_for_pods.
#[test]
fn an_uninstallation_waits_for_pods() {
    let node = Node::new();
    assert!(node.script("install").status.success());
    let _ = node.asked();
    fs::write(node.path("needs"), POD).unwrap();
    node.waits(POD.trim());
    fs::write(node.path("needs"), "").unwrap();
    node.ends();
    let asked = node.asked();
    let at = |part: &str| asked.find(part).unwrap_or_else(|| panic!("{part} is not in\n{asked}"));
    assert!(at("pause-sandboxer disable --check") < at("systemctl disable"), "{asked}");
}

/// rollout.sh takes the label from a node only after this status.
#[test]
fn a_node_on_which_pods_cannot_run_has_a_status_of_its_own() {
    for step in ["check", "selftest"] {
        let node = Node::new();
        fs::write(node.path("fails"), format!("/usr/local/bin/pause-sandboxer {step}")).unwrap();
        let output = node.command("install").stderr(Stdio::piped()).output().unwrap();
        assert_eq!(output.status.code(), Some(76), "{output:?}");
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains("pods cannot run"), "{said}");
    }
    let node = Node::new();
    fs::write(node.path("fails"), "/usr/local/bin/pause-sandboxer enable --restart").unwrap();
    assert_eq!(node.script("install").status.code(), Some(1));
}

#[test]
fn an_uninstallation_waits_while_the_handler_is_the_default() {
    let node = Node::new();
    assert!(node.script("install").status.success());
    let _ = node.asked();
    let default = "default: runc-pause is containerd's default handler";
    fs::write(node.path("needs"), format!("{default}\n")).unwrap();
    node.waits(default);
    fs::write(node.path("needs"), "config: runtime handler runc-pause\n").unwrap();
    node.ends();
}

/// A daemon or a containerd that does not answer is not one without pods.
#[test]
fn an_uninstallation_fails_while_it_is_unknown_what_needs_the_sandboxer() {
    let node = Node::new();
    assert!(node.script("install").status.success());
    let before = node.files();
    fs::write(node.path("unknown"), "").unwrap();
    assert_eq!(node.script("uninstall").status.code(), Some(1));
    assert_eq!(node.files(), before);
    fs::remove_file(node.path("unknown")).unwrap();
    node.ends();
    // Without the program its records count.
    let record = node.path("host/run/pause-sandboxer/sandboxes/abc");
    fs::create_dir_all(&record).unwrap();
    assert_eq!(node.script("uninstall").status.code(), Some(1));
    assert!(record.exists());
    fs::remove_dir(&record).unwrap();
    assert!(node.script("uninstall").status.success());
}

#[test]
fn a_node_with_the_package_is_left_alone() {
    let node = Node::new();
    fs::create_dir_all(node.path("host/usr/bin")).unwrap();
    fs::write(node.path("host/usr/bin/pause-sandboxer"), "").unwrap();
    let before = node.files();
    for word in ["install", "uninstall"] {
        let output = node.script(word);
        // It is no failure, and the node gets no label.
        assert_eq!(output.status.code(), Some(77), "{output:?}");
        assert!(
            String::from_utf8_lossy(&output.stdout).contains("this node has the package"),
            "{output:?}"
        );
        assert_eq!((node.asked().as_str(), node.files()), ("", before.clone()), "{word}");
    }
}
