//! The end of pending Waits.

use pause_sandboxer::protos::controller as c;
use pause_sandboxer::telemetry::Census;
use tokio::time::timeout;

use crate::client::{CONTROLLER, Client};
use crate::{Node, SOON, begin_waits, only_id, status, until_waiting};

#[track_caller]
fn counted(node: &Node, lines: &[&str]) {
    let text = node.telemetry.text(&Census::default());
    for line in lines {
        assert!(text.lines().any(|found| found == *line), "{line} is not in\n{text}");
    }
}

#[tokio::test]
async fn a_call_that_fails_while_pending_is_answered() {
    let node = Node::start();
    for client in node.clients().await {
        for (sandbox, failure) in [
            ("then-panic", (13, "internal fault in Wait: deliberate, for the test")),
            ("then-unknown", (5, "sandbox unknown: not found")),
        ] {
            let waiting = client.clone();
            let waiting = tokio::spawn(async move {
                waiting.raw(CONTROLLER, "Wait", only_id(sandbox), None).await
            });
            until_waiting(&node.sandboxes, 1).await;
            node.sandboxes.end.notify_waiters();
            let (code, text) = timeout(SOON, waiting).await.unwrap().unwrap().unwrap_err();
            assert_eq!((code, text.as_str()), failure);
        }
        client.call::<c::ControllerStatusResponse>("Status", status("a", false)).await.unwrap();
    }
    counted(
        &node,
        &[
            "pause_sandboxer_calls_in_flight{method=\"Wait\"} 0",
            "pause_sandboxer_calls_total{method=\"Wait\",code=\"INTERNAL\"} 2",
            "pause_sandboxer_calls_total{method=\"Wait\",code=\"NOT_FOUND\"} 2",
        ],
    );
}

#[tokio::test]
async fn cancelled_and_stopped_calls_are_counted() {
    let node = Node::start();
    let client = Client::grpc(&node.grpc_socket()).await;
    let mut given_up = begin_waits(&client, 3);
    until_waiting(&node.sandboxes, 3).await;
    counted(&node, &["pause_sandboxer_calls_in_flight{method=\"Wait\"} 3"]);
    given_up.abort_all();
    until_waiting(&node.sandboxes, 0).await;
    let mut stopped = begin_waits(&client, 2);
    until_waiting(&node.sandboxes, 2).await;
    node.stop.send_replace(true);
    while let Some(ended) = stopped.join_next().await {
        assert_eq!(ended.unwrap().unwrap_err(), (14, "the sandboxer is stopping".into()));
    }
    counted(
        &node,
        &[
            "pause_sandboxer_calls_in_flight{method=\"Wait\"} 0",
            "pause_sandboxer_calls_total{method=\"Wait\",code=\"CANCELLED\"} 3",
            "pause_sandboxer_calls_total{method=\"Wait\",code=\"UNAVAILABLE\"} 2",
        ],
    );
}

/// The sandbox and the daemon end together: an exit is returned, and a failure is not, because it
/// says nothing about the sandbox.
#[tokio::test]
async fn exits_during_a_stop_are_answered_and_failures_are_not() {
    for (sandbox, failure) in
        [("a", None), ("then-unknown", Some((14, "the sandboxer is stopping".to_owned())))]
    {
        for protocol in 0..2 {
            let node = Node::start();
            let client = node.clients().await[protocol].clone();
            let waiting = tokio::spawn(async move {
                client.raw(CONTROLLER, "Wait", only_id(sandbox), None).await.err()
            });
            until_waiting(&node.sandboxes, 1).await;
            // Nothing else runs between the two: the runtime has one thread.
            node.sandboxes.end.notify_waiters();
            node.stop.send_replace(true);
            assert_eq!(timeout(SOON, waiting).await.unwrap().unwrap(), failure);
        }
    }
}
