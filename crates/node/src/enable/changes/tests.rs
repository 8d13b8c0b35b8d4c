use std::os::unix::fs::{PermissionsExt as _, symlink};

use super::*;

fn error_of(changes: &Changes) -> String {
    changes.apply().unwrap_err().to_string()
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn changes_are_made_and_rolled_back_byte_for_byte() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::write(at("main"), b"a\r\n\xff").unwrap();
    fs::set_permissions(at("main"), fs::Permissions::from_mode(0o640)).unwrap();
    fs::write(at("old"), "old").unwrap();
    fs::write(at(".main.pause-sandboxer"), "of a killed process").unwrap();
    fs::write(at("main.new"), "of the operator").unwrap();
    let before = FileState::read(&at("main")).unwrap();
    let mut changes = Changes::default();
    changes.directory(&at("conf.d"));
    for (name, after) in
        [("conf.d/x.toml", Some("x")), ("main", Some("new")), ("old", None), ("none", None)]
    {
        let after = after.map(|text| text.as_bytes().to_vec());
        changes.add(FileChange::new(at(name), after).unwrap());
    }
    assert_eq!(changes.files.len(), 3);
    changes.apply().unwrap();
    assert_eq!(names(dir.path()), ["conf.d", "main", "main.new"]);
    assert_eq!(fs::read(at("main")).unwrap(), b"new");
    assert_eq!(fs::metadata(at("main")).unwrap().mode() & 0o777, 0o640);
    changes.undo().unwrap();
    assert_eq!(names(dir.path()), ["main", "main.new", "old"]);
    assert_eq!(FileState::read(&at("main")).unwrap(), before);
}

#[test]
fn a_copy_can_be_read_by_none_but_those_who_can_read_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::write(at("main"), "secret").unwrap();
    // Modes of the file, of an existing copy, and of the resulting copy.
    for (mode, there, expected) in [
        (0o600, None, 0o600),
        (0o640, None, 0o640),
        (0o666, None, 0o644),
        (0o600, Some(0o644), 0o600),
        (0o644, Some(0o600), 0o600),
    ] {
        let set = |name: &str, mode| {
            fs::set_permissions(at(name), fs::Permissions::from_mode(mode)).unwrap();
        };
        set("main", mode);
        let _ = fs::remove_file(at("copy"));
        if let Some(there) = there {
            // A copy with the same text gets the narrower mode too.
            fs::write(at("copy"), "secret").unwrap();
            set("copy", there);
        }
        let main = FileState::read(&at("main")).unwrap().unwrap();
        let mut changes = Changes::default();
        changes.add(FileChange::copy(at("copy"), &main).unwrap());
        changes.apply().unwrap();
        let copy = FileState::read(&at("copy")).unwrap().unwrap();
        assert_eq!(copy.mode, expected, "of {mode:o} and {there:?}");
        if there.is_none() {
            assert_eq!((copy.bytes, copy.modified), (main.bytes, main.modified));
        }
        changes.undo().unwrap();
        assert_eq!(at("copy").exists(), there.is_some());
    }
    let file = |group, mode| FileState {
        bytes: Vec::new(),
        mode,
        group,
        modified: SystemTime::UNIX_EPOCH,
    };
    let mut change = FileChange::new(at("new"), Some(Vec::new())).unwrap();
    (change.before, change.mode, change.group) = (Some(file(7, 0o640)), 0o640, 7);
    assert_eq!(change.private_as(&file(8, 0o640)).mode, 0o600, "of another group");
}

#[test]
fn a_link_stays() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::write(at("real"), "old").unwrap();
    symlink("real", at("link")).unwrap();
    let mut changes = Changes::default();
    changes.add(FileChange::new(at("link"), Some(b"new".to_vec())).unwrap());
    changes.apply().unwrap();
    assert_eq!(fs::read(at("real")).unwrap(), b"new");
    changes.undo().unwrap();
    assert_eq!(fs::read(at("real")).unwrap(), b"old");
    let error = FileChange::new(at("link"), None).unwrap_err().to_string();
    assert!(error.contains("it is a symbolic link: remove it first"), "{error}");
    assert_eq!(fs::read_link(at("link")).unwrap(), Path::new("real"));
    assert_eq!(names(dir.path()), ["link", "real"]);
}

/// The second change cannot be made: a directory is in its way.
#[test]
fn a_change_that_fails_rolls_back_those_before_it() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::write(at("first"), "1").unwrap();
    let mut changes = Changes::default();
    changes.add(FileChange::new(at("first"), Some(b"2".to_vec())).unwrap());
    changes.add(FileChange::new(at("second"), Some(b"2".to_vec())).unwrap());
    fs::create_dir(at(".second.pause-sandboxer")).unwrap();
    let error = error_of(&changes);
    assert!(error.contains(".second.pause-sandboxer"), "{error}");
    assert_eq!(fs::read(at("first")).unwrap(), b"1");
    assert_eq!(names(dir.path()), [".second.pause-sandboxer", "first"]);
}

/// One change of each kind: a file that is edited, made and removed.
fn of_each_kind(at: &impl Fn(&str) -> PathBuf) -> Changes {
    fs::write(at("edited"), "old").unwrap();
    fs::write(at("removed"), "old").unwrap();
    let mut changes = Changes::default();
    for (name, after) in [("edited", Some("new")), ("made", Some("new")), ("removed", None)] {
        let after = after.map(|text| text.as_bytes().to_vec());
        changes.add(FileChange::new(at(name), after).unwrap());
    }
    changes
}

#[test]
fn a_rollback_keeps_what_another_program_has_written_since() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    for name in ["edited", "made", "removed"] {
        let changes = of_each_kind(&at);
        changes.apply().unwrap();
        fs::write(at(name), "another's").unwrap();
        let error = changes.undo().unwrap_err().to_string();
        let path = at(name).display().to_string();
        assert!(error.contains(&path) && error.contains("has changed it"), "{error}");
        assert_eq!(fs::read(at(name)).unwrap(), b"another's");
        for (other, text) in [("edited", "old"), ("removed", "old")] {
            if other != name {
                assert_eq!(fs::read_to_string(at(other)).unwrap(), text, "{name}");
            }
        }
        assert_eq!(at("made").exists(), name == "made");
        let _ = fs::remove_file(at("made"));
    }
}

#[test]
fn what_has_changed_since_it_was_read_is_not_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    for name in ["edited", "made", "removed"] {
        let changes = of_each_kind(&at);
        let path = at(name);
        fs::write(&path, "another's").unwrap();
        let error = error_of(&changes);
        assert!(error.contains(&at(name).display().to_string()), "{error}");
        assert!(error.ends_with("; all file changes are rolled back"), "{error}");
        assert_eq!(fs::read(&path).unwrap(), b"another's");
        let edited = fs::read(at("edited")).unwrap();
        assert!(edited == b"old" || name == "edited", "{name}: {edited:?}");
        let _ = fs::remove_file(at("made"));
    }
}

#[test]
fn a_file_that_was_not_written_is_not_rolled_back() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::write(at("first"), "1").unwrap();
    fs::create_dir(at(".first.pause-sandboxer")).unwrap();
    let mut changes = Changes::default();
    changes.add(FileChange::new(at("first"), Some(b"2".to_vec())).unwrap());
    let error = error_of(&changes);
    assert_eq!(error.matches(".first.pause-sandboxer").count(), 1, "{error}");
    assert!(error.ends_with("; all file changes are rolled back"), "{error}");
}
