//! Frames that the pods' own shim takes: the first byte says how they are cut on their way.

use runc_shim::fuzzing::frames;

use super::Seeds;

const HEADER: usize = 10;

/// However they are cut, they are the same, and hold no more than has come.
pub fn run(input: &[u8]) {
    let Some((cut, bytes)) = input.split_first() else { return };
    let whole = frames(bytes, bytes.len().max(1));
    assert_eq!(whole, frames(bytes, usize::from(*cut) + 1));
    let held: usize = whole.iter().flat_map(|(_, message)| message).map(|(_, m)| m.len()).sum();
    assert!(held + HEADER * whole.len() <= bytes.len());
    for (_, message) in &whole {
        assert!(message.as_ref().is_none_or(|(_, message)| message.len() <= 4 << 20));
    }
}

pub fn seeds() -> Seeds {
    let frame = |stream: u32, kind: u8, payload: &[u8]| {
        let mut bytes = (payload.len() as u32).to_be_bytes().to_vec();
        bytes.extend(stream.to_be_bytes());
        bytes.extend([kind, 0]);
        bytes.extend(payload);
        bytes
    };
    let input = |cut: u8, frames: &[Vec<u8>]| [&[cut][..], &frames.concat()].concat();
    let long = [&(5u32 << 20).to_be_bytes()[..], &[0, 0, 0, 7, 1, 0]].concat();
    vec![
        ("one".into(), input(3, &[frame(1, 1, b"request")])),
        ("two".into(), input(0, &[frame(1, 1, b"a"), frame(3, 1, b"")])),
        ("cut".into(), input(255, &[frame(1, 2, b"response")[..12].to_vec()])),
        ("too-long".into(), input(9, &[long, frame(9, 1, b"behind")])),
    ]
}
