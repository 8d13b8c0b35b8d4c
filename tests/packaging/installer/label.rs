//! The label of a node on which a step fails.

use std::fs;

use super::Node;

/// A pod that arrives during the last step: a node without the label would lose it when kubelet
/// restarts.
#[test]
fn a_pod_that_arrives_before_a_step_fails_restores_the_label() {
    let arrives = |node: &Node, script: &str, before: &str, with: &str| {
        let text = fs::read_to_string(node.path(script)).unwrap();
        assert!(text.contains(before), "{text}");
        fs::write(node.path(script), text.replace(before, with)).unwrap();
    };
    let pod =
        |node: &Node| format!("printf 'SANDBOX\nabc web\n' >{}", node.path("alive").display());
    let last_label = |node: &Node| {
        let asked = node.asked();
        asked.lines().rfind(|line| line.starts_with("label")).unwrap_or_default().to_owned()
    };
    let node = Node::new();
    assert!(node.script("install").status.success());
    fs::write(node.path("fails"), "/usr/local/bin/pause-sandboxer disable --restart").unwrap();
    arrives(&node, "on-host", "exit 1 ;;", &format!("{}; exit 1 ;;", pod(&node)));
    assert_eq!(node.script("uninstall").status.code(), Some(1));
    assert!(last_label(&node).contains("ready\":\"true\""));
    assert!(node.path("host/usr/local/bin/pause-sandboxer").exists());

    let node = Node::new();
    fs::write(node.path("fails"), "/usr/local/bin/pause-sandboxer check").unwrap();
    let comes = format!("case $2 in *false*) {} ;; esac\necho \"label", pod(&node));
    arrives(&node, "bin/curl", "echo \"label", &comes);
    assert!(!node.script("install").status.success());
    assert!(last_label(&node).contains("ready\":\"true\""));
}
