//! A gRPC connection: the frames of HTTP/2 that follow its preface.

use pause_sandboxer::containerd::framing;
use pause_sandboxer::wire::fuzzing::serve_grpc;

use super::Seeds;
use super::connection::speak;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const HEADER: usize = 9;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const PRIORITY: u8 = 2;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const WINDOW_UPDATE: u8 = 8;
const CONTINUATION: u8 = 9;

const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
const ACK: u8 = 1;

/// The payloads of the pings by which this caller finds that all before them has been read. The
/// input may have the same pings; then it hangs up earlier.
const MARKS: [&[u8]; 2] = [b"all read", b"answered"];

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = (payload.len() as u32).to_be_bytes()[1..].to_vec();
    bytes.extend([kind, flags]);
    bytes.extend(stream.to_be_bytes());
    bytes.extend(payload);
    bytes
}

/// Kind, flags, stream and length of the payload.
fn header(bytes: &[u8]) -> (u8, u8, u32, usize) {
    let length = u32::from_be_bytes([0, bytes[0], bytes[1], bytes[2]]);
    (
        bytes[3],
        bytes[4],
        u32::from_be_bytes([bytes[5], bytes[6], bytes[7], bytes[8]]),
        length as usize,
    )
}

pub fn run(input: &[u8]) {
    // Whole frames alone: half a frame would swallow the marks.
    let (mut whole, mut calls) = (0, 0);
    while let Some(head) = input.get(whole..whole + HEADER) {
        let (kind, _, _, length) = header(head);
        if input.len() < whole + HEADER + length {
            break;
        }
        calls += usize::from(kind == HEADERS);
        whole += HEADER + length;
    }
    let mut said = PREFACE.to_vec();
    said.extend(&input[..whole]);
    for mark in MARKS {
        said.extend(frame(PING, 0, 0, mark));
    }
    let answered = speak(said, serve_grpc, async |answers| {
        let (mut answered, mut marks) = (0, 0);
        // Until the server has read all, or has hung up.
        while marks < MARKS.len() {
            let Some(head) = answers.take(HEADER).await else { break };
            let (kind, flags, stream, length) = header(&head);
            assert!(length <= 16 << 10, "a frame of {length} bytes");
            let Some(payload) = answers.take(length).await else { break };
            match kind {
                HEADERS => {
                    assert_eq!(stream % 2, 1, "headers of stream {stream}");
                    // Trailers end a stream that was answered before.
                    answered += usize::from(flags & END_STREAM == 0 || flags & END_HEADERS == 0);
                }
                DATA => assert_eq!(stream % 2, 1, "data of stream {stream}"),
                PING => {
                    marks += usize::from(flags & ACK != 0 && MARKS.contains(&payload.as_slice()))
                }
                _ => {}
            }
        }
        answered
    });
    assert!(answered <= calls, "{calls} calls have {answered} answers");
}

/// A list of header fields, each literal and not to be indexed (RFC 7541).
fn fields(fields: &[(&str, &str)]) -> Vec<u8> {
    let mut block = Vec::new();
    for (name, value) in fields {
        block.push(0);
        for text in [name, value] {
            assert!(text.len() < 127, "a length of one byte");
            block.push(text.len() as u8);
            block.extend(text.bytes());
        }
    }
    block
}

fn asks(path: &str) -> Vec<(&str, &str)> {
    vec![
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "localhost"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ]
}

fn call(stream: u32, head: &[(&str, &str)], message: &[u8]) -> Vec<u8> {
    let head = frame(HEADERS, END_HEADERS, stream, &fields(head));
    [head, frame(DATA, END_STREAM, stream, &framing::frame(message))].concat()
}

pub fn seeds() -> Seeds {
    let begin = || frame(SETTINGS, 0, 0, b"");
    let status = "/containerd.services.sandbox.v1.Controller/Status";
    let id = b"\x0a\x04abcd";
    let with = |more: &[(&'static str, &'static str)]| [asks(status), more.to_vec()].concat();
    let settings = [0, 3, 0, 0, 0, 100, 0, 4, 0, 0, 0, 0, 0, 5, 0, 0, 64, 0];
    let block = fields(&asks(status));
    let (first, second) = block.split_at(20);
    vec![
        ("status".into(), [begin(), call(1, &asks(status), id)].concat()),
        (
            "metadata".into(),
            [
                begin(),
                call(
                    1,
                    &with(&[
                        ("grpc-timeout", "5S"),
                        ("containerd-namespace", "k8s.io"),
                        ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
                    ]),
                    id,
                ),
            ]
            .concat(),
        ),
        (
            "namespace".into(),
            [begin(), call(1, &with(&[("containerd-namespace", "moby")]), id)].concat(),
        ),
        (
            "wait".into(),
            [begin(), call(1, &asks("/containerd.services.sandbox.v1.Controller/Wait"), id)]
                .concat(),
        ),
        (
            "create".into(),
            [
                begin(),
                call(
                    1,
                    &asks("/containerd.services.sandbox.v1.Controller/Create"),
                    b"\x0a\x04abcd\x1a\x00\x22\x02/n",
                ),
            ]
            .concat(),
        ),
        ("unknown".into(), [begin(), call(1, &asks("/x"), b"")].concat()),
        ("fails".into(), [begin(), call(1, &asks(status), b"\x0a\x0214")].concat()),
        ("no-grpc".into(), [begin(), call(1, &asks(status)[..4], id)].concat()),
        (
            "compressed".into(),
            [
                begin(),
                frame(HEADERS, END_HEADERS, 1, &block),
                frame(DATA, END_STREAM, 1, b"\x01\0\0\0\x01x"),
            ]
            .concat(),
        ),
        (
            "in-parts".into(),
            [
                frame(SETTINGS, 0, 0, &settings),
                frame(SETTINGS, ACK, 0, b""),
                frame(HEADERS, 0, 1, first),
                frame(CONTINUATION, END_HEADERS, 1, second),
                frame(DATA, 0, 1, &framing::frame(id)[..3]),
                frame(WINDOW_UPDATE, 0, 1, &[0, 0, 255, 255]),
                frame(DATA, END_STREAM, 1, &framing::frame(id)[3..]),
            ]
            .concat(),
        ),
        (
            "given-up".into(),
            [
                begin(),
                frame(HEADERS, END_HEADERS, 1, &block),
                frame(PRIORITY, 0, 1, &[0, 0, 0, 0, 16]),
                frame(RST_STREAM, 0, 1, &[0, 0, 0, 8]),
                call(3, &asks(status), id),
            ]
            .concat(),
        ),
        (
            "indexed".into(),
            [
                begin(),
                // :method POST, :scheme http, :path with the name of the table, content-type to be
                // indexed
                frame(HEADERS, END_HEADERS, 1, b"\x83\x86\x04\x02/a\x5f\x10application/grpc"),
                frame(HEADERS, END_HEADERS | END_STREAM, 3, b"\x83\x86\x04\x02/b\xbe"),
            ]
            .concat(),
        ),
    ]
}
