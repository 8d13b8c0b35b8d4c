//! What a shim's `start` says on its standard output.

use pause_sandboxer::shim::fuzzing::Bootstrap;

use super::{Seeds, assert_told};

pub fn run(input: &[u8]) {
    let read = match Bootstrap::parse(input) {
        Ok(read) => read,
        Err(e) => return assert_told(&e.to_string()),
    };
    assert!((2..=3).contains(&read.version), "{read:?}");
    assert!(read.socket().is_absolute(), "{read:?}");
    assert!(read.endpoint().starts_with("ttrpc+unix:///"), "{read:?}");
    // The record has it as JSON, which is also a form in which it is said.
    let json = serde_json::to_vec(&read).expect("it is recorded");
    assert_eq!(serde_json::from_slice::<Bootstrap>(&json).expect("the record is read"), read);
    assert_eq!(Bootstrap::parse(&json).expect("what was accepted is accepted in JSON"), read);
}

pub fn seeds() -> Seeds {
    let address = "unix:///run/containerd/s/0a1b2c";
    let message = {
        let mut bytes = vec![0x08, 3, 0x12, address.len() as u8];
        bytes.extend(address.as_bytes());
        bytes.extend([0x1a, 5]);
        bytes.extend(b"ttrpc");
        bytes
    };
    vec![
        ("address".into(), format!("{address}\n").into()),
        ("path".into(), b"/run/containerd/s/0a1b2c".into()),
        (
            "json".into(),
            format!(r#"{{"version":3,"address":"{address}","protocol":"ttrpc"}}"#).into(),
        ),
        (
            "json-unspoken".into(),
            format!(r#"{{"version":4,"address":"{address}","protocol":"grpc"}}"#).into(),
        ),
        ("message".into(), message),
        ("panic".into(), b"panic: runtime error\n\ngoroutine 1 [running]:\n".into()),
    ]
}
