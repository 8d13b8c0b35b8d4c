//! A daemon that is down and has its records in another directory than the default.

use std::fs;

use pause_sandboxer::config::Config;

use super::Node;

#[test]
fn the_records_of_another_state_directory_count() {
    // The note of the daemon, which names no line; the settings; the note of another socket.
    for (note, is_set) in
        [(Some("pause-sandboxer.sock.state"), false), (None, true), (Some("x.sock.state"), false)]
    {
        // /var/run is a link of the node, absolute on some.
        for state_dir in ["/run/x", "/var/run/x"] {
            let node = Node::new();
            assert!(node.script("install").status.success());
            let _ = node.asked();
            fs::write(node.path("down"), "").unwrap();
            let record = node.path("host/run/x/sandboxes/abc");
            fs::create_dir_all(&record).unwrap();
            fs::create_dir_all(node.path("host/run/pause-sandboxer/sandboxes")).unwrap();
            if let Some(name) = note {
                let note = node.path("host/run/pause-sandboxer").join(name);
                fs::write(note, state_dir).unwrap();
            }
            let mut config = Config::default();
            if is_set {
                config.state_dir = state_dir.into();
            }
            fs::write(node.path("settings"), config.to_toml()).unwrap();
            for word in ["unneeded", "uninstall"] {
                node.waits(word, "abc (the daemon does not answer)");
            }
            assert!(!node.asked().contains("label"), "{note:?} {state_dir}");
            fs::remove_dir(&record).unwrap();
            node.ends();
        }
    }
}
