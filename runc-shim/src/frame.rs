//! Frames of ttrpc: a header of ten bytes (length, stream, type, flags) and the message.

/// Longest message that is read, as in containerd's ttrpc; bytes.
pub const LONGEST: usize = 4 << 20;

/// Length of a header.
pub const HEADER: usize = 10;

/// Type of a frame that holds a request.
pub const REQUEST: u8 = 1;
/// Type of a frame that holds a response.
pub const RESPONSE: u8 = 2;

/// What has arrived.
#[derive(Debug, PartialEq, Eq)]
pub enum Incoming {
    /// A whole message.
    Message {
        /// The stream.
        stream: u32,
        /// Its type.
        kind: u8,
        /// The message.
        payload: Vec<u8>,
    },
    /// The head of a message that is longer than [`LONGEST`]. It is skipped.
    TooLong {
        /// The stream.
        stream: u32,
        /// Its length.
        length: usize,
    },
}

/// Cuts what arrives into frames. Takes no more memory than has arrived.
#[derive(Debug, Default)]
pub struct Decoder {
    head: [u8; HEADER],
    /// Bytes of the head that are there.
    known: usize,
    payload: Vec<u8>,
    /// Bytes of a message that is too long which have not arrived.
    skip: usize,
}

impl Decoder {
    /// Takes bytes; returns what is whole with them.
    pub fn feed(&mut self, mut bytes: &[u8]) -> Vec<Incoming> {
        let mut frames = Vec::new();
        loop {
            let skipped = self.skip.min(bytes.len());
            self.skip -= skipped;
            bytes = bytes.get(skipped..).unwrap_or_default();
            if self.known < HEADER {
                let taken = (HEADER - self.known).min(bytes.len());
                let (part, rest) = bytes.split_at(taken);
                self.head.iter_mut().skip(self.known).zip(part).for_each(|(to, from)| *to = *from);
                (self.known, bytes) = (self.known + taken, rest);
                if self.known < HEADER {
                    return frames;
                }
            }
            let [a, b, c, d, e, f, g, h, kind, _] = self.head;
            let length = u32::from_be_bytes([a, b, c, d]) as usize;
            let stream = u32::from_be_bytes([e, f, g, h]);
            if length > LONGEST {
                frames.push(Incoming::TooLong { stream, length });
                (self.skip, self.known) = (length, 0);
                continue;
            }
            let missing = length - self.payload.len();
            let (part, rest) = bytes.split_at(missing.min(bytes.len()));
            self.payload.extend_from_slice(part);
            bytes = rest;
            if self.payload.len() < length {
                return frames;
            }
            self.known = 0;
            let payload = std::mem::take(&mut self.payload);
            frames.push(Incoming::Message { stream, kind, payload });
        }
    }
}

/// Appends a frame to `out`.
pub fn encode(out: &mut Vec<u8>, stream: u32, kind: u8, payload: &[u8]) {
    out.extend(u32::try_from(payload.len()).unwrap_or(u32::MAX).to_be_bytes());
    out.extend(stream.to_be_bytes());
    out.extend([kind, 0]);
    out.extend_from_slice(payload);
}

#[cfg(test)]
mod tests {
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
        bytes.extend((LONGEST as u32 + 1).to_be_bytes());
        bytes.extend([0, 0, 0, 7, REQUEST, 0]);
        let mut decoder = Decoder::default();
        let length = LONGEST + 1;
        assert_eq!(decoder.feed(&bytes), [Incoming::TooLong { stream: 7, length }]);
        for _ in 0..LONGEST >> 20 {
            assert_eq!(decoder.feed(&vec![1; 1 << 20]), []);
        }
        let mut next = vec![1];
        encode(&mut next, 9, REQUEST, b"x");
        let message = Incoming::Message { stream: 9, kind: REQUEST, payload: b"x".to_vec() };
        assert_eq!(decoder.feed(&next), [message]);
    }
}
