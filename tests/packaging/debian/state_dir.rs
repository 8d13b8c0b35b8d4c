//! Records in another directory than the default.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::file;

/// The root in which `postrm` runs.
fn after_removal(root: &Path, word: &str) {
    let place = |path: &str| format!("{}{path}", root.display());
    let script = file("packaging/debian/scripts/postrm")
        .replace("/run/", &place("/run/"))
        .replace("/etc/", &place("/etc/"))
        .replace("/usr/bin/deb-systemd-helper", "/nowhere");
    let output = Command::new("sh").args(["-c", &script, "postrm", word]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

/// The note of the daemon lets a later daemon refuse another directory.
#[test]
fn a_removal_keeps_the_note_of_a_directory_with_records() {
    let root = tempfile::tempdir().unwrap();
    let run = root.path().join("run/pause-sandboxer");
    let records = root.path().join("state/sandboxes");
    for word in ["remove", "purge", "0"] {
        fs::create_dir_all(records.join("abc")).unwrap();
        fs::create_dir_all(run.join("sandboxes")).unwrap();
        let note = run.join("pause-sandboxer.sock.state");
        // The daemon writes it without a newline.
        fs::write(&note, root.path().join("state").to_str().unwrap()).unwrap();
        after_removal(root.path(), word);
        assert!(note.exists(), "{word}");
        fs::remove_dir(records.join("abc")).unwrap();
        after_removal(root.path(), word);
        assert!(!run.exists(), "{word}");
    }
}
