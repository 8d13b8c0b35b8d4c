use std::os::unix::fs::{chown, symlink};

use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

use super::*;

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
    let layout =
        Arc::new(Layout { root: "/".into(), volatile: "/".into(), records: dir.path().to_owned() });
    let store = RecordStore::new(&layout, &"id".try_into().unwrap());
    fs::create_dir(store.dir()).unwrap();
    let record = Record::of_plan(Plan::new("id".try_into().unwrap()));
    let mut json = serde_json::to_value(record).unwrap();
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
    let layout =
        Arc::new(Layout { root: "/".into(), volatile: "/".into(), records: dir.path().to_owned() });
    let store = RecordStore::new(&layout, &"id".try_into().unwrap());
    fs::create_dir(store.dir()).unwrap();
    let error = store.replace(RECORD, &"x".repeat(64 << 20)).unwrap_err().to_string();
    assert!(error.contains("os error 27") && error.contains(RECORD), "{error}");
    assert_eq!(fs::read_dir(store.dir()).unwrap().count(), 0, "something is left of it");
}

#[test]
fn a_first_record_that_cannot_be_written_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let layout =
        Arc::new(Layout { root: "/".into(), volatile: "/".into(), records: dir.path().to_owned() });
    let store = RecordStore::new(&layout, &"id".try_into().unwrap());
    let mut record = Record::of_plan(Plan::new("id".try_into().unwrap()));
    record.info.labels.insert("long".to_owned(), "x".repeat(64 << 20));
    let error = store.create(&record).unwrap_err().to_string();
    assert!(error.contains("os error 27"), "{error}");
    assert!(!store.dir().exists(), "its directory is left");
}
