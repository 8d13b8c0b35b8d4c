//! The daemon stops: what pending and new calls see, and how long it takes.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use pause_sandboxer::protos::controller as c;
use protobuf::Message;
use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::client::CONTROLLER;
use crate::{Node, SOON, begin_waits, status, until_waiting};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_ends_every_wait_with_unavailable() {
    let node = Node::start();
    let clients = node.clients().await;
    let mut waits: Vec<_> = clients.iter().map(|client| begin_waits(client, 500)).collect();
    until_waiting(&node.sandboxes, 1000).await;
    // Connections that will not end by themselves: one that never speaks, one in the middle of a
    // frame.
    let silent = UnixStream::connect(node.grpc_socket()).await.unwrap();
    let mut half = UnixStream::connect(node.ttrpc_socket()).await.unwrap();
    half.write_all(&[0, 0, 0]).await.unwrap();
    let sandboxes = Arc::clone(&node.sandboxes);
    let took = node.drain().await;
    assert!(took < Duration::from_secs(4), "{took:?}");
    for ended in &mut waits {
        while let Some(ended) = ended.join_next().await {
            let failure = ended.unwrap().unwrap_err();
            assert_eq!(failure, (14, "the sandboxer is stopping".into()));
        }
    }
    assert_eq!(sandboxes.waiting.load(Ordering::SeqCst), 0);
    drop((silent, half));
}

/// containerd takes any error of a Status, except NOT_FOUND, for an unknown state.
#[tokio::test]
async fn calls_in_progress_at_a_stop_are_answered_unless_they_hang() {
    let node = Node::start();
    let mut calls = Vec::new();
    for client in node.clients().await {
        for sandbox in ["slow", "hanging"] {
            let client = client.clone();
            calls.push(tokio::spawn(async move {
                let answer: Result<c::ControllerStatusResponse, _> =
                    client.call("Status", status(sandbox, false)).await;
                (sandbox, answer)
            }));
        }
    }
    until_waiting(&node.sandboxes, calls.len()).await;
    let took = node.drain().await;
    assert!(took < Duration::from_secs(4), "{took:?}");
    for call in calls {
        match call.await.unwrap() {
            ("slow", answer) => assert_eq!(answer.unwrap().state, "SANDBOX_READY"),
            (_, answer) => assert_eq!(answer.unwrap_err().0, 14),
        }
    }
}

/// A caller who asks for much and reads nothing must not hold the daemon.
///
/// Promise: caller_harms_only_itself.
#[tokio::test]
async fn a_caller_who_does_not_read_is_disconnected() {
    let node = Node::start();
    let mut stream = UnixStream::connect(node.ttrpc_socket()).await.unwrap();
    let mut request = ttrpc::Request::new();
    request.service = CONTROLLER.into();
    request.method = "Nothing".repeat(400);
    let payload = request.write_to_bytes().unwrap();
    let mut frame = (payload.len() as u32).to_be_bytes().to_vec();
    frame.extend([0, 0, 0, 1, 1, 0]);
    frame.extend(payload);
    // Until the server has no more room for answers, and so for calls.
    let stuck = async {
        loop {
            stream.write_all(&frame).await.unwrap();
        }
    };
    assert!(timeout(Duration::from_millis(500), stuck).await.is_err());
    let took = node.drain().await;
    assert!(took < Duration::from_secs(4), "{took:?}");
}

#[tokio::test]
async fn a_server_without_a_stop_sender_ends() {
    let Node { dir: _dir, stop, running, .. } = Node::start();
    drop(stop);
    timeout(SOON, running).await.unwrap().unwrap().unwrap();
}
