//! `--default` among the options of `enable`.

use std::fs;
use std::process::Stdio;

use super::Node;

/// A default handler that fails is worse than a missing one, because every pod uses it.
#[test]
fn a_node_whose_check_fails_does_not_have_the_handler_as_its_default() {
    const DEFAULT: &str = "default: runc-pause is containerd's default handler\n";
    let enable = |options: &str| format!("/usr/local/bin/pause-sandboxer enable {options}\n");
    let (with, without) = (enable("--default --offline --restart"), enable("--offline --restart"));
    let check = "/usr/local/bin/pause-sandboxer check\n";
    for (is_default, fails, wanted) in [
        (false, "nothing", [&without, check, &with, check].concat()),
        (false, check.trim(), [&without, check].concat()),
        (true, "nothing", [&with, check].concat()),
        (true, check.trim(), [&with, check, &without].concat()),
    ] {
        let node = Node::new();
        if is_default {
            fs::write(node.path("needs"), DEFAULT).unwrap();
        }
        fs::write(node.path("fails"), fails).unwrap();
        let mut command = node.command("install");
        command.env("ENABLE_OPTIONS", "--default --offline").stderr(Stdio::piped());
        let output = command.output().unwrap();
        assert_eq!(output.status.success(), fails == "nothing", "{output:?}");
        let asked = node.asked();
        let is_command = |line: &&str| {
            line.contains("sandboxer enable -") && !line.ends_with(" --dry-run")
                || line.ends_with(" check")
        };
        let commands: String =
            asked.lines().filter(is_command).map(|line| format!("{line}\n")).collect();
        assert_eq!(commands, wanted, "{asked}");
        let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        if fails != "nothing" {
            let state =
                if is_default { "--default is undone" } else { "is not the node's default" };
            assert!(said.contains(state), "{said}");
            assert_eq!(output.status.code(), Some(76), "{said}");
        }
    }
    // Where it is unknown whether the handler is the default, the default is not taken away.
    let node = Node::new();
    fs::write(node.path("unknown"), "").unwrap();
    let mut command = node.command("install");
    assert!(command.env("ENABLE_OPTIONS", "--default --offline").status().unwrap().success());
    let asked = node.asked();
    assert!(asked.contains(&with) && !asked.contains(&without), "{asked}");
    // The status is the same if it is not undone.
    let node = Node::new();
    fs::write(node.path("needs"), DEFAULT).unwrap();
    fs::write(node.path("fails"), check.trim()).unwrap();
    node.answers(&format!("\"{}\") exit 1", without.trim()));
    let mut command = node.command("install");
    let output = command
        .env("ENABLE_OPTIONS", "--default --offline")
        .stderr(Stdio::piped())
        .output()
        .unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("--default is not undone"), "{said}");
    assert_eq!(output.status.code(), Some(76), "{said}");
    // An operator makes the changes.
    let node = Node::new();
    let mut command = node.command("install");
    command.env("ENABLE_OPTIONS", "--default").env("EDIT_CONTAINERD_CONFIG", "false");
    assert!(command.status().unwrap().success());
    let asked = node.asked();
    assert!(!asked.contains("--restart"), "{asked}");
    assert!(asked.contains(&enable("--default --dry-run")), "{asked}");
}
