//! Callers that violate the protocols.

use pause_sandboxer::containerd::framing;
use pause_sandboxer::protos::controller as c;
use protobuf::Message;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::client::{self, CONTROLLER, Client, SANDBOX};
use crate::{Node, SOON, begin_waits, methods, only_id, status, until_waiting};

/// Promise: invalid_request_names_the_field.
#[tokio::test]
async fn malformed_bytes_name_the_message() {
    let node = Node::start();
    for client in node.clients().await {
        for (service, method) in methods().chain([(CONTROLLER, "Update")]) {
            // Field 1 with a length beyond the end; not UTF-8; a tag that ends nowhere.
            for bytes in [&[0x0a, 0xff, 0x01][..], &[0x0a, 0x01, 0xff], &[0xff]] {
                let (code, text) =
                    client.raw(service, method, bytes.to_vec(), None).await.unwrap_err();
                assert_eq!(code, 3, "{method}: {text}");
                assert!(text.starts_with("malformed ") && text.contains("Request: "), "{text}");
            }
        }
        let text = client.raw(CONTROLLER, "Start", vec![0xff], None).await.unwrap_err().1;
        assert!(text.starts_with("malformed ControllerStartRequest: "), "{text}");
    }
}

#[tokio::test]
async fn unknown_paths_are_unimplemented() {
    let node = Node::start();
    for client in node.clients().await {
        for (service, method) in
            [(CONTROLLER, "Ping"), ("containerd.services.sandbox.v1.Store", "Get"), ("", "")]
        {
            let (code, text) = client.raw(service, method, vec![], None).await.unwrap_err();
            assert_eq!(code, 12, "{service}/{method}: {text}");
        }
    }
}

/// Promise: caller_harms_only_itself.
#[tokio::test]
async fn a_panic_is_an_answer_and_the_connection_survives() {
    let node = Node::start();
    for client in node.clients().await {
        let (code, text) =
            client.raw(CONTROLLER, "Status", only_id("panic"), None).await.unwrap_err();
        assert_eq!(
            (code, text.as_str()),
            (13, "internal fault in Status: deliberate, for the test")
        );
        client.call::<c::ControllerStatusResponse>("Status", status("a", false)).await.unwrap();
    }
}

/// Promise: caller_harms_only_itself.
#[tokio::test]
async fn a_too_large_message_is_refused_and_the_connection_survives() {
    let node = Node::start();
    for client in node.clients().await {
        let large =
            c::ControllerStatusRequest { sandbox_id: "x".repeat(17 << 20), ..Default::default() };
        let bytes = large.write_to_bytes().unwrap();
        // ttrpc's own client refuses to send and to read as much as containerd does: see the raw
        // frames below.
        let mut answers = vec!["vast"];
        if matches!(client, Client::Grpc(_)) {
            let (code, text) = client.raw(CONTROLLER, "Status", bytes, None).await.unwrap_err();
            assert_eq!(code, 8, "{text}");
            client.raw(CONTROLLER, "Status", only_id(&"x".repeat(15 << 20)), None).await.unwrap();
            client
                .raw(CONTROLLER, "Status", status("huge", true).write_to_bytes().unwrap(), None)
                .await
                .unwrap();
        } else {
            answers.push("huge");
        }
        for answer in answers {
            let asked = status(answer, true).write_to_bytes().unwrap();
            let (code, text) = client.raw(CONTROLLER, "Status", asked, None).await.unwrap_err();
            assert_eq!(code, 8, "{text}");
        }
        // An id of 1 MiB in an error must not become a header of 1 MiB.
        let ping = only_id(&"x".repeat(1 << 20));
        let (code, text) = client.raw(SANDBOX, "Nothing", ping.clone(), None).await.unwrap_err();
        assert_eq!(code, 12, "{text}");
        client.raw(CONTROLLER, "Status", ping, None).await.unwrap();
        client.call::<c::ControllerStatusResponse>("Status", status("a", false)).await.unwrap();
    }
}

/// Promise: caller_harms_only_itself.
#[tokio::test]
async fn odd_ttrpc_frames_are_answered() {
    let node = Node::start();
    let mut stream = UnixStream::connect(node.ttrpc_socket()).await.unwrap();
    let mut send = Vec::new();
    let frame = |stream: u32, kind: u8, payload: &[u8]| {
        let mut frame = (payload.len() as u32).to_be_bytes().to_vec();
        frame.extend(stream.to_be_bytes());
        frame.extend([kind, 0]);
        frame.extend(payload);
        frame
    };
    send.extend(frame(1, 1, &vec![0; 17 << 20]));
    send.extend(frame(3, 1, &[0xff]));
    send.extend(frame(4, 1, &[]));
    // Data of a stream that was never opened, and a kind that does not exist: no caller waits for
    // an answer.
    send.extend(frame(5, 3, &[1, 2, 3]));
    send.extend(frame(7, 9, &[]));
    send.extend(frame(9, 1, &[]));
    // As large as containerd sends them.
    let mut large = ttrpc::Request::new();
    (large.service, large.method) = (CONTROLLER.into(), "Stop".into());
    large.payload = only_id(&"x".repeat(15 << 20));
    send.extend(frame(15, 1, &large.write_to_bytes().unwrap()));
    // A deadline that passes, and one that has passed.
    for (stream, timeout_nano) in [(11, 1_000_000), (13, -1)] {
        let mut request = ttrpc::Request::new();
        request.service = CONTROLLER.into();
        request.method = "Wait".into();
        request.payload = only_id("a");
        request.timeout_nano = timeout_nano;
        send.extend(frame(stream, 1, &request.write_to_bytes().unwrap()));
    }
    let (mut reader, mut writer) = stream.split();
    let write = async { writer.write_all(&send).await.unwrap() };
    let read = async {
        let mut answers = Vec::new();
        for _ in 0..7 {
            let header = ttrpc::proto::MessageHeader::read_from(&mut reader).await.unwrap();
            let mut payload = vec![0; header.length as usize];
            reader.read_exact(&mut payload).await.unwrap();
            let response = ttrpc::Response::parse_from_bytes(&payload).unwrap();
            answers.push((header.stream_id, response.status.code.value()));
        }
        answers.sort_unstable();
        answers
    };
    let (_, answers) = timeout(SOON, async { tokio::join!(write, read) }).await.unwrap();
    assert_eq!(answers, [(1, 8), (3, 3), (4, 3), (9, 12), (11, 4), (13, 4), (15, 0)]);
}

/// Promise: caller_harms_only_itself.
#[tokio::test]
async fn odd_grpc_requests_are_answered() {
    let node = Node::start();
    let Client::Grpc(client) = Client::grpc(&node.grpc_socket()).await else { unreachable!() };
    let request = |header: &str, value: &str| {
        let uri = format!("http://localhost/{CONTROLLER}/Status");
        let mut request = http::Request::post(uri).body(()).unwrap();
        request.headers_mut().insert("content-type", "application/grpc+proto".parse().unwrap());
        request
            .headers_mut()
            .insert(http::HeaderName::try_from(header).unwrap(), value.parse().unwrap());
        request
    };
    for (body, code) in [
        (&b""[..], 3),
        (b"\0\0\0\0\x01ab", 3),
        (b"\0\0\0", 3),
        (b"\0\0\0\0\x05abc", 3),
        (b"\0\0\0\0\0\0\0\0\0\0", 3),
        (b"\x01\0\0\0\0", 12),
        (b"\0\xff\xff\xff\xff", 8),
    ] {
        let failure =
            client::grpc(client.clone(), request("x", "y"), body.into()).await.unwrap_err();
        assert_eq!(failure.0, code, "{body:?}: {failure:?}");
    }
    let failure =
        client::grpc(client.clone(), request("grpc-timeout", "soon"), b"\0\0\0\0\0"[..].into())
            .await;
    assert_eq!(failure.unwrap_err().0, 3);
    client::grpc(client.clone(), request("grpc-timeout", "1H"), b"\0\0\0\0\0"[..].into())
        .await
        .unwrap();

    let mut client = client.ready().await.unwrap();
    let (response, _) = client.send_request(request("content-type", "text/html"), true).unwrap();
    assert_eq!(response.await.unwrap().status(), 415);
    let (response, _) = client.send_request(request("x", &"y".repeat(20 << 10)), true).unwrap();
    assert_eq!(response.await.unwrap().status(), 431);
}

/// Bad calls of one caller on the connection that all share: the Wait of a pod on it stays pending,
/// and the next call is answered.
///
/// Promise: caller_harms_only_itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousands_of_bad_calls_cost_no_connection() {
    /// Of each kind; h2 takes 1024 by itself.
    const CALLS: usize = 1250;
    /// Sent before the answers are read.
    const AT_ONCE: usize = 250;
    let node = Node::start();
    let stream = UnixStream::connect(node.grpc_socket()).await.unwrap();
    // The caller itself must not give up for the answers that it gets.
    let mut builder = h2::client::Builder::new();
    builder.max_local_error_reset_streams(None).data_frame_budget(1 << 24);
    let (h2, connection) = builder.handshake::<_, bytes::Bytes>(stream).await.unwrap();
    let connection = tokio::spawn(connection);
    let mut waits = begin_waits(&Client::Grpc(h2.clone()), 1);
    until_waiting(&node.sandboxes, 1).await;
    let uri = format!("http://localhost/{CONTROLLER}/Status");
    let request = |kind: &str| {
        let mut request = http::Request::post(&uri).body(()).unwrap();
        let (name, value) = match kind {
            "headers that are too large" => ("x", "y".repeat(20 << 10)),
            "a body that is not as long as it says" => ("content-length", "3".to_owned()),
            "no gRPC" => ("content-type", "text/html".to_owned()),
            _ => ("x", "y".to_owned()),
        };
        request.headers_mut().insert("content-type", "application/grpc".parse().unwrap());
        request
            .headers_mut()
            .insert(http::HeaderName::try_from(name).unwrap(), value.parse().unwrap());
        request
    };
    for kind in [
        "headers that are too large",
        "a body that is not as long as it says",
        "no gRPC",
        "no message",
        "given up at once",
    ] {
        for _ in 0..CALLS / AT_ONCE {
            let mut answers = Vec::new();
            for _ in 0..AT_ONCE {
                let mut client = h2.clone().ready().await.unwrap_or_else(|e| panic!("{kind}: {e}"));
                let (answer, mut body) = client.send_request(request(kind), false).unwrap();
                // It may be answered, and its stream be closed, by now.
                let _ = body.send_data(vec![0xff; 64].into(), kind != "given up at once");
                if kind != "given up at once" {
                    answers.push(answer);
                }
            }
            for answer in answers {
                // An answer, or the end of this one call.
                if let Err(e) = timeout(SOON, answer).await.unwrap() {
                    assert!(e.is_reset(), "{kind}: {e}");
                }
            }
        }
        let client = Client::Grpc(h2.clone());
        let answered =
            client.call::<c::ControllerStatusResponse>("Status", status("a", false)).await;
        assert!(answered.is_ok(), "{kind}: {answered:?}");
        assert!(waits.try_join_next().is_none(), "{kind}: the Wait has ended");
    }
    node.sandboxes.end.notify_waiters();
    assert_eq!(waits.join_next().await.unwrap().unwrap().unwrap().exit_status, 137);
    connection.abort();
}

/// A caller whose request does not arrive whole delays no other call, on its own connection or on
/// others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_do_not_arrive_whole_delay_no_other_call() {
    let node = Node::start();
    let Client::Grpc(h2) = Client::grpc(&node.grpc_socket()).await else { unreachable!() };
    let mut unfinished = Vec::new();
    for _ in 0..6 {
        let mut client = h2.clone().ready().await.unwrap();
        let request = framing::request(&format!("{CONTROLLER}/Status"), &[], None).unwrap();
        let (answer, mut body) = client.send_request(request, false).unwrap();
        let mut begun = vec![0, 1, 0, 0, 0];
        begun.extend([0; 1 << 10]);
        body.send_data(begun.into(), false).unwrap();
        // The same over ttrpc: a request of 16 MiB of which only the first byte arrives.
        let mut stream = UnixStream::connect(node.ttrpc_socket()).await.unwrap();
        stream.write_all(&[1, 0, 0, 0, 0, 0, 0, 1, 1, 0, 7]).await.unwrap();
        unfinished.push((answer, body, stream));
    }
    for client in node.clients().await.into_iter().chain([Client::Grpc(h2)]) {
        let large = status(&"x".repeat(1 << 20), false);
        let call = client.call::<c::ControllerStatusResponse>("Status", large);
        timeout(SOON, call).await.unwrap().unwrap();
    }
    drop(unfinished);
}
