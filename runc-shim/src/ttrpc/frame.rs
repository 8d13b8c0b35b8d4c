//! Frames of ttrpc: a header of ten bytes (length, stream, type, flags) and the message.

use std::os::fd::OwnedFd;

use containerd_shim_protos::ttrpc::proto::{
    MESSAGE_HEADER_LENGTH, MESSAGE_LENGTH_MAX, MessageHeader,
};
use rustix::io::Errno;

/// How often a connection is read before other work is done.
const MAX_READS: usize = 64;

/// A decoded frame.
#[derive(Debug, PartialEq, Eq)]
pub enum Incoming {
    /// A whole message.
    Message {
        /// The stream id.
        stream: u32,
        /// The type of the frame.
        kind: u8,
        /// The message.
        payload: Vec<u8>,
    },
    /// The header of a message that is longer than [`MESSAGE_LENGTH_MAX`]. The message is skipped.
    TooLong {
        /// The stream id.
        stream: u32,
        /// The length of the message.
        length: usize,
    },
}

/// Splits received bytes into frames. Uses no more memory than the bytes that were received.
#[derive(Debug, Default)]
pub struct Decoder {
    head: [u8; MESSAGE_HEADER_LENGTH],
    /// Count of bytes of the header that were received.
    head_len: usize,
    payload: Vec<u8>,
    /// Count of bytes to skip: the rest of a message that is too long.
    skip: usize,
}

impl Decoder {
    /// Adds received bytes, and returns the frames that they complete.
    pub fn feed(&mut self, mut bytes: &[u8]) -> Vec<Incoming> {
        let mut frames = Vec::new();
        loop {
            let skipped = self.skip.min(bytes.len());
            self.skip -= skipped;
            bytes = bytes.get(skipped..).unwrap_or_default();
            if self.head_len < MESSAGE_HEADER_LENGTH {
                let taken = (MESSAGE_HEADER_LENGTH - self.head_len).min(bytes.len());
                let (part, rest) = bytes.split_at(taken);
                self.head
                    .iter_mut()
                    .skip(self.head_len)
                    .zip(part)
                    .for_each(|(to, from)| *to = *from);
                (self.head_len, bytes) = (self.head_len + taken, rest);
                if self.head_len < MESSAGE_HEADER_LENGTH {
                    return frames;
                }
            }
            let MessageHeader { length, stream_id: stream, type_: kind, .. } = self.head.into();
            let length = length as usize;
            if length > MESSAGE_LENGTH_MAX {
                frames.push(Incoming::TooLong { stream, length });
                (self.skip, self.head_len) = (length, 0);
                continue;
            }
            let missing = length - self.payload.len();
            let (part, rest) = bytes.split_at(missing.min(bytes.len()));
            self.payload.extend_from_slice(part);
            bytes = rest;
            if self.payload.len() < length {
                return frames;
            }
            self.head_len = 0;
            let payload = std::mem::take(&mut self.payload);
            frames.push(Incoming::Message { stream, kind, payload });
        }
    }
}

/// Appends a frame to `out`.
pub fn encode(out: &mut Vec<u8>, stream: u32, kind: u8, payload: &[u8]) {
    let length = u32::try_from(payload.len()).unwrap_or(u32::MAX);
    out.extend(Vec::from(MessageHeader { length, stream_id: stream, type_: kind, flags: 0 }));
    out.extend_from_slice(payload);
}

/// Reads frames from a non-blocking socket, up to [`MAX_READS`] reads.
///
/// # Errors
/// The connection was closed after these frames.
pub fn read(
    socket: &OwnedFd,
    decoder: &mut Decoder,
) -> Result<Vec<Incoming>, (Vec<Incoming>, Errno)> {
    let mut frames = Vec::new();
    let mut buffer = [0; 4096];
    for _ in 0..MAX_READS {
        match rustix::io::read(socket, &mut buffer) {
            Ok(0) => return Err((frames, Errno::CONNRESET)),
            Ok(count) => {
                frames.extend(decoder.feed(buffer.get(..count).unwrap_or_default()));
                if count < buffer.len() {
                    break;
                }
            }
            Err(Errno::AGAIN) => break,
            Err(e) => return Err((frames, e)),
        }
    }
    Ok(frames)
}

/// Writes as much of `out` as a non-blocking socket takes, and removes that.
///
/// # Errors
/// The connection is closed.
pub fn write(socket: &OwnedFd, out: &mut Vec<u8>) -> Result<(), Errno> {
    while !out.is_empty() {
        match rustix::io::write(socket, out) {
            Ok(count) => drop(out.drain(..count)),
            Err(Errno::AGAIN) => return Ok(()),
            Err(e) => return Err(e),
        }
    }
    // An idle connection takes no memory.
    *out = Vec::new();
    Ok(())
}

#[cfg(test)]
mod tests {
    use containerd_shim_protos::ttrpc::proto::MESSAGE_TYPE_REQUEST;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn frames_arrive_whole_however_they_are_cut(
            messages in prop::collection::vec(
                (any::<u32>(), any::<u8>(), prop::collection::vec(any::<u8>(), 0..40)),
                0..6,
            ),
            cuts in prop::collection::vec(1usize..30, 1..40),
        ) {
            let mut bytes = Vec::new();
            for (stream, kind, payload) in &messages {
                encode(&mut bytes, *stream, *kind, payload);
            }
            let mut decoder = Decoder::default();
            let mut found = Vec::new();
            let (mut rest, mut cuts) = (&bytes[..], cuts.iter().cycle());
            while !rest.is_empty() {
                let (part, later) = rest.split_at((*cuts.next().unwrap()).min(rest.len()));
                found.extend(decoder.feed(part));
                rest = later;
            }
            let expected: Vec<Incoming> = messages
                .into_iter()
                .map(|(stream, kind, payload)| Incoming::Message { stream, kind, payload })
                .collect();
            prop_assert_eq!(found, expected);
        }

        #[test]
        fn any_bytes_are_decoded_without_failure_in_bounded_memory(
            bytes in prop::collection::vec(any::<u8>(), 0..300),
        ) {
            let mut decoder = Decoder::default();
            decoder.feed(&bytes);
            prop_assert!(decoder.payload.len() <= bytes.len());
        }
    }

    #[test]
    fn a_message_that_is_too_long_is_skipped() {
        let mut bytes = Vec::new();
        bytes.extend((MESSAGE_LENGTH_MAX as u32 + 1).to_be_bytes());
        bytes.extend([0, 0, 0, 7, MESSAGE_TYPE_REQUEST, 0]);
        let mut decoder = Decoder::default();
        let length = MESSAGE_LENGTH_MAX + 1;
        assert_eq!(decoder.feed(&bytes), [Incoming::TooLong { stream: 7, length }]);
        for _ in 0..MESSAGE_LENGTH_MAX >> 20 {
            assert_eq!(decoder.feed(&vec![1; 1 << 20]), []);
        }
        let mut next = vec![1];
        encode(&mut next, 9, MESSAGE_TYPE_REQUEST, b"x");
        let message =
            Incoming::Message { stream: 9, kind: MESSAGE_TYPE_REQUEST, payload: b"x".to_vec() };
        assert_eq!(decoder.feed(&next), [message]);
    }
}
