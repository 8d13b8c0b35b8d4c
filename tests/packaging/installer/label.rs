//! The label of a node on which a step fails.

use std::fs;

use super::{Node, POD};

/// The last label that was set since the last look.
fn last_label(node: &Node) -> String {
    let asked = node.asked();
    asked.lines().rfind(|line| line.starts_with("label")).unwrap_or_default().to_owned()
}

/// A pod that arrives during the last step: a node without the label would lose it when kubelet
/// restarts.
#[test]
fn a_pod_that_arrives_before_a_step_fails_restores_the_label() {
    let arrives = |node: &Node, script: &str, before: &str, with: &str| {
        let text = fs::read_to_string(node.path(script)).unwrap();
        assert!(text.contains(before), "{text}");
        fs::write(node.path(script), text.replace(before, with)).unwrap();
    };
    let pod = |node: &Node| format!("echo '{}' >{}", POD.trim_end(), node.path("needs").display());
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

/// The container may end after each command, and a command may fail: the next run completes it.
#[test]
fn a_pod_gets_the_label_back_that_an_interrupted_removal_has_removed() {
    // The next run may also be of the installer, whose `check` fails.
    for word in ["unneeded", "uninstall", "install"] {
        let node = Node::new();
        assert!(node.script("install").status.success());
        let curl = fs::read_to_string(node.path("bin/curl")).unwrap();
        let killed = format!("{curl}kill -KILL $PPID\n");
        kit::write_program(node.path("bin/curl"), killed.as_bytes()).unwrap();
        let _ = node.asked();
        let _ = node.script("uninstall");
        assert!(last_label(&node).contains("ready\":null"), "{word}");
        kit::write_program(node.path("bin/curl"), curl.as_bytes()).unwrap();
        fs::write(node.path("needs"), POD).unwrap();
        fs::write(node.path("fails"), "/usr/local/bin/pause-sandboxer check").unwrap();
        assert!(!node.script(word).status.success(), "{word}");
        assert!(last_label(&node).contains("ready\":\"true\""), "{word}");
        // Once.
        assert!(!node.script("unneeded").status.success());
        assert_eq!(last_label(&node), "", "{word}");
    }
}

#[test]
fn a_pod_gets_the_label_back_that_an_interrupted_installation_has_changed() {
    let node = Node::new();
    fs::write(node.path("fails"), "/usr/local/bin/pause-sandboxer check").unwrap();
    let curl = fs::read_to_string(node.path("bin/curl")).unwrap();
    kit::write_program(node.path("bin/curl"), format!("{curl}kill -KILL $PPID\n").as_bytes())
        .unwrap();
    assert!(!node.script("install").status.success());
    assert!(last_label(&node).contains("ready\":\"false\""));
    kit::write_program(node.path("bin/curl"), curl.as_bytes()).unwrap();
    fs::write(node.path("needs"), POD).unwrap();
    assert!(!node.script("install").status.success());
    assert!(last_label(&node).contains("ready\":\"true\""));
    // A label that is false on purpose stays so, for pods that need none.
    fs::write(node.path("needs"), "").unwrap();
    assert!(!node.script("install").status.success());
    assert!(last_label(&node).contains("ready\":\"false\""));
    fs::write(node.path("needs"), POD).unwrap();
    assert!(!node.script("install").status.success());
    assert_eq!(last_label(&node), "");
}

/// The label stays as long as it is unknown whether there are pods.
#[test]
fn pods_that_are_unknown_restore_the_label() {
    let node = Node::new();
    assert!(node.script("install").status.success());
    let _ = node.asked();
    // The program fails from the removal of the label on.
    let stub = fs::read_to_string(node.path("on-host")).unwrap();
    let fails = format!("! grep -q ready.:null {}", node.path("asked").display());
    let stub =
        stub.replace("disable --check\") [", &format!("disable --check\") {fails} || exit 1; ["));
    kit::write_program(node.path("on-host"), stub.as_bytes()).unwrap();
    assert_eq!(node.script("uninstall").status.code(), Some(1));
    assert!(last_label(&node).contains("ready\":\"true\""));
    assert!(node.path("host/usr/local/bin/pause-sandboxer").exists());
}

/// kubelet sets the bare address.
#[test]
fn a_node_of_an_ipv6_cluster_is_labelled() {
    let node = Node::new();
    let mut command = node.command("install");
    command.env("KUBERNETES_SERVICE_HOST", "fd00::1").env("SERVER", "https://[fd00::1]:443");
    assert!(command.status().unwrap().success());
    assert!(node.asked().contains("\"pause-sandboxer/ready\":\"true\""));
}

#[test]
fn the_token_that_labels_the_node_is_in_no_argument() {
    let node = Node::new();
    assert!(node.script("install").status.success());
    assert!(!node.path("leaked").exists());
    let header = fs::read_to_string(node.path("header")).unwrap();
    assert_eq!(header, "Authorization: Bearer secret\n");
}
