use std::os::unix::fs::{chown, symlink};

use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

use super::*;

/// The place of the record of sandbox `id`.
fn store(records: &Path) -> RecordStore {
    let layout = Layout { root: "/".into(), volatile: "/".into(), records: records.to_owned() };
    RecordStore::new(&Arc::new(layout), &"id".try_into().unwrap())
}

fn record() -> Record {
    Record::of_plan(Plan::new("id".try_into().unwrap()))
}

/// Promise: only_files_of_root_count.
#[test]
fn only_a_regular_file_of_roots_is_read() {
    if kit::skip_without_root() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    fs::write(path("good"), "0123456789").unwrap();
    assert_eq!(read_limited(&path("good"), 10).unwrap(), b"0123456789");
    assert!(read_limited(&path("good"), 9).unwrap_err().to_string().contains("os error 27"));
    assert!(matches!(read_limited(&path("none"), 10), Err(RecordError::Missing(_))));
    symlink("good", path("link")).unwrap();
    assert!(read_limited(&path("link"), 10).unwrap_err().to_string().contains("os error 40"));
    mkfifo(&path("fifo"), Mode::S_IRUSR).unwrap();
    symlink("/dev", path("dev")).unwrap();
    for odd in [path("fifo"), path("dev/zero"), directory.path().to_owned()] {
        let e = read_limited(&odd, 10).unwrap_err().to_string();
        assert!(e.contains("it is not a regular file"), "{e}");
    }
    chown(path("good"), Some(65534), None).unwrap();
    assert!(
        read_limited(&path("good"), 10)
            .unwrap_err()
            .to_string()
            .contains("it belongs to user 65534")
    );
}

#[test]
fn a_record_with_a_bad_id_is_malformed() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    fs::create_dir(store.dir()).unwrap();
    let mut json = serde_json::to_value(record()).unwrap();
    for (place, id) in [("/id", "../id"), ("/plan/id", "a b"), ("/id", "other")] {
        let good = std::mem::replace(json.pointer_mut(place).unwrap(), id.into());
        fs::write(store.dir().join(RECORD), json.to_string()).unwrap();
        let e = store.read_record().unwrap_err();
        assert!(matches!(e, RecordError::Malformed { .. }), "{e}");
        assert!(e.to_string().contains(&format!("{id:?}")), "{e}");
        *json.pointer_mut(place).unwrap() = good;
    }
    fs::write(store.dir().join(RECORD), json.to_string()).unwrap();
    assert!(store.read_record().is_ok());
}

#[test]
fn an_update_changes_what_it_names() {
    let payload =
        |value: &str| Any { type_url: "t".to_owned(), value: value.into(), ..Default::default() };
    let given = SandboxInfo {
        labels: [("a".to_owned(), "2".to_owned())].into(),
        extensions: [("new".to_owned(), payload("2")), ("old".to_owned(), payload("2"))].into(),
        ..Default::default()
    };
    let before = SandboxInfo {
        labels: [("a".to_owned(), "1".to_owned()), ("b".to_owned(), "1".to_owned())].into(),
        extensions: ["metadata", "old"].map(|key| (key.to_owned(), payload("1"))).into(),
        ..Default::default()
    };
    let after = |field: &str| {
        let mut info = before.clone();
        info.update(&given, field);
        let extensions = info
            .extensions
            .iter()
            .map(|(key, blob)| format!("{key}={}", blob.value.escape_ascii()));
        let labels = info.labels.iter().map(|(key, value)| format!("{key}={value}"));
        (extensions.collect::<Vec<_>>().join(" "), labels.collect::<Vec<_>>().join(" "))
    };
    for (field, extensions, labels) in [
        ("extensions.new", "metadata=1 new=2 old=1", "a=1 b=1"),
        ("extensions.old", "metadata=1 old=2", "a=1 b=1"),
        ("extensions.metadata", "old=1", "a=1 b=1"),
        ("extensions", "new=2 old=2", "a=1 b=1"),
        ("labels.a", "metadata=1 old=1", "a=2 b=1"),
        ("labels", "metadata=1 old=1", "a=2"),
        ("runtime", "metadata=1 old=1", "a=1 b=1"),
    ] {
        assert_eq!(after(field), (extensions.to_owned(), labels.to_owned()), "{field}");
    }
}

#[test]
fn a_record_that_could_not_be_read_again_is_not_written() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    fs::create_dir(store.dir()).unwrap();
    // With the quotes of JSON.
    let mut text = "x".repeat((64 << 20) - 1);
    let error = store.replace(RECORD, &text).unwrap_err().to_string();
    assert!(error.contains("os error 27") && error.contains(RECORD), "{error}");
    assert_eq!(fs::read_dir(store.dir()).unwrap().count(), 0, "something is left of it");
    text.pop();
    store.replace(RECORD, &text).unwrap();
    assert_eq!(fs::metadata(store.dir().join(RECORD)).unwrap().len(), 64 << 20);
}

#[test]
fn a_record_takes_the_place_of_no_other() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    // Left by a daemon that has ended before it wrote the record.
    fs::create_dir(store.dir()).unwrap();
    store.create(&record()).unwrap();
    let other = Record { own_shim: true, ..record() };
    let error = store.create(&other).unwrap_err().to_string();
    assert!(error.starts_with("make record directory"), "{error}");
    assert_eq!(store.read_record().unwrap(), record());
    store.change(|record| record.own_shim = true).unwrap();
    assert_eq!(store.read_record().unwrap(), other);
}

#[test]
fn the_stage_is_that_which_was_written_last_until_the_removal() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    store.create(&record()).unwrap();
    assert_eq!(store.stage().unwrap(), Stage::Created);
    let exit = Exit { status: 137, at: SystemTime::UNIX_EPOCH };
    let exited = Stage::Exited { pid: 7, exit, reason: Some(EndReason::Stopped) };
    store.set_stage(&exited).unwrap();
    assert_eq!(store.stage().unwrap(), exited);
    store.remove().unwrap();
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    store.remove().unwrap();
}

#[test]
fn a_record_of_a_newer_version_is_not_read() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    store.create(&Record { version: VERSION + 1, ..record() }).unwrap();
    let error = store.read_record().unwrap_err();
    assert!(matches!(error, RecordError::Newer { version: 2, .. }), "{error}");
}

#[test]
fn a_first_record_that_cannot_be_written_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    let mut record = record();
    record.info.labels.insert("long".to_owned(), "x".repeat(64 << 20));
    let error = store.create(&record).unwrap_err().to_string();
    assert!(error.contains("os error 27"), "{error}");
    assert!(!store.dir().exists(), "its directory is left");
}
