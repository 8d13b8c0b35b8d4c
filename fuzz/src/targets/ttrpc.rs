//! A ttrpc connection: frames as they come, each call of which is answered once.

use pause_sandboxer::wire::fuzzing::serve_ttrpc;
use protobuf::Message as _;
use ttrpc::proto::{KeyValue, Request, Response};

use super::connection::speak;
use super::{Seeds, assert_told};

const HEADER: usize = 10;
const REQUEST: u8 = 1;
const RESPONSE: u8 = 2;

/// Stream, type and payload of a frame, and what is behind it: length, stream, type, flags,
/// payload.
fn split(bytes: &[u8]) -> Option<(u32, u8, &[u8], &[u8])> {
    let (header, rest) = bytes.split_at_checked(HEADER)?;
    let number = |at: usize| {
        u32::from_be_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
    };
    let (payload, rest) = rest.split_at_checked(number(0) as usize)?;
    Some((number(4), header[8], payload, rest))
}

pub fn run(input: &[u8]) {
    let (mut asked, mut rest) = (Vec::new(), input);
    while let Some((stream, kind, payload, behind)) = split(rest) {
        rest = behind;
        if kind == REQUEST {
            asked.push((stream, payload));
        }
    }
    let count = asked.len();
    let answers = speak(input.to_vec(), serve_ttrpc, async |answers| {
        let mut all = Vec::new();
        while all.len() < count {
            let header = answers.take(HEADER).await.expect("each call is answered");
            let length = u32::from_be_bytes([header[0], header[1], header[2], header[3]]);
            let payload = answers.take(length as usize).await.expect("an answer is whole");
            let frame = [header, payload].concat();
            let (stream, kind, payload, _) = split(&frame).expect("it is a frame");
            assert_eq!(kind, RESPONSE);
            all.push((stream, Response::parse_from_bytes(payload).expect("it is a response")));
        }
        all
    });
    let (mut answered, mut good): (Vec<u32>, Vec<u32>) = (Vec::new(), Vec::new());
    for (stream, answer) in answers {
        let status = answer.status.as_ref().expect("an answer has a status");
        if status.code() == ttrpc::Code::OK {
            good.push(stream);
        } else {
            assert_told(&status.message);
            assert!(answer.payload.is_empty());
        }
        answered.push(stream);
    }
    // Several may be on one stream, and their answers come in any order.
    let count = |streams: &[u32], stream: u32| streams.iter().filter(|id| **id == stream).count();
    for (stream, _) in &asked {
        let all: Vec<&[u8]> =
            asked.iter().filter(|(id, _)| id == stream).map(|(_, payload)| *payload).collect();
        let sound = all.iter().filter(|payload| !refused(*stream, payload)).count();
        assert_eq!(count(&answered, *stream), all.len(), "calls and answers of stream {stream}");
        assert!(
            count(&good, *stream) <= sound,
            "a call of stream {stream} that is none is answered OK"
        );
    }
}

/// It is answered by an error whatever it asks.
fn refused(stream: u32, payload: &[u8]) -> bool {
    stream.is_multiple_of(2) || Request::parse_from_bytes(payload).is_err()
}

pub fn seeds() -> Seeds {
    let frame = |stream: u32, kind: u8, payload: &[u8]| {
        let mut bytes = (payload.len() as u32).to_be_bytes().to_vec();
        bytes.extend(stream.to_be_bytes());
        bytes.extend([kind, 0]);
        bytes.extend(payload);
        bytes
    };
    let pair = |key: &str, value: &str| KeyValue {
        key: key.into(),
        value: value.into(),
        ..Default::default()
    };
    let request = |service: &str, method: &str, payload: &[u8]| Request {
        service: service.into(),
        method: method.into(),
        payload: payload.into(),
        ..Default::default()
    };
    let call = |stream: u32, request: &Request| {
        frame(stream, REQUEST, &request.write_to_bytes().expect("it is encoded"))
    };
    let controller = "containerd.services.sandbox.v1.Controller";
    let status = request(controller, "Status", b"\x0a\x04abcd\x10\x01");
    let mut whole = request(controller, "Wait", b"\x0a\x04abcd");
    whole.timeout_nano = 5_000_000_000;
    whole.metadata = vec![
        pair("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        pair("containerd-namespace-ttrpc", "k8s.io"),
    ];
    let mut other = status.clone();
    other.metadata = vec![pair("containerd-namespace-ttrpc", "moby")];
    vec![
        ("status".into(), call(1, &status)),
        ("whole".into(), call(3, &whole)),
        ("namespace".into(), call(5, &other)),
        (
            "list".into(),
            call(1, &request("pause_sandboxer.v1.Inspect", "List", b"\x0a\x01a\x10\x01")),
        ),
        ("unknown".into(), call(1, &request(controller, "None", b""))),
        ("fails".into(), call(1, &request(controller, "Start", b"\x0a\x025a"))),
        ("even".into(), call(2, &status)),
        ("malformed".into(), frame(1, REQUEST, b"\x0a\xff")),
        ("stream".into(), [frame(1, 3, b"data"), call(3, &status)].concat()),
        ("many".into(), (0..5).flat_map(|number| call(2 * number + 1, &status)).collect()),
        ("too-long".into(), [&0x7fff_ffff_u32.to_be_bytes()[..], &[0, 0, 0, 1, 1, 0]].concat()),
        ("cut".into(), call(1, &status)[..20].into()),
    ]
}
