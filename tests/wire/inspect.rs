//! Operator queries, and the trace and the count of every call.

use pause_sandboxer::containerd::framing;
use pause_sandboxer::protos::inspect::{ListRequest, ListResponse};
use pause_sandboxer::telemetry::Census;
use protobuf::Message;

use super::client::{self, CONTROLLER, Client};
use super::{Node, c, only_id, status};

const INSPECT: &str = "pause_sandboxer.v1.Inspect";
const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

#[tokio::test]
async fn operators_are_answered_on_the_ttrpc_socket_alone() {
    let node = Node::start();
    let [grpc, ttrpc] = node.clients().await;
    let page = ttrpc.raw(INSPECT, "List", Vec::new(), None).await.unwrap();
    let page = ListResponse::parse_from_bytes(&page).unwrap();
    assert_eq!((page.sandboxes.len(), page.more), (1000, true));
    let (first, last) = (&page.sandboxes[0], &page.sandboxes[999]);
    assert_eq!(
        (first.id.as_str(), first.state.as_str(), first.reason.as_str()),
        ("0000", "quarantined", "never was")
    );
    let request = ListRequest { after: last.id.clone(), ..Default::default() };
    let page = ttrpc.raw(INSPECT, "List", request.write_to_bytes().unwrap(), None).await.unwrap();
    let page = ListResponse::parse_from_bytes(&page).unwrap();
    assert_eq!(page.sandboxes[0].id, "1000");
    let request = ListRequest { after: "unknown".into(), ..Default::default() };
    let request = request.write_to_bytes().unwrap();
    assert_eq!(ttrpc.raw(INSPECT, "List", request, None).await.unwrap_err().0, 5);
    assert_eq!(ttrpc.raw(INSPECT, "Destroy", Vec::new(), None).await.unwrap_err().0, 12);
    assert_eq!(ttrpc.raw(INSPECT, "List", vec![0xff], None).await.unwrap_err().0, 3);
    let (code, text) = grpc.raw(INSPECT, "List", Vec::new(), None).await.unwrap_err();
    assert_eq!((code, text), (12, format!("/{INSPECT}/List is unimplemented")));
}

#[tokio::test]
async fn a_call_carries_its_trace() {
    let node = Node::start();
    let [Client::Grpc(grpc), _] = node.clients().await else { unreachable!() };
    for (parent, trace) in [(PARENT, Some(TRACE)), ("00-forged", None)] {
        let message = status("a", true).write_to_bytes().unwrap();
        let metadata = [("traceparent", parent)];
        let request = framing::request(&format!("{CONTROLLER}/Status"), &metadata, None).unwrap();
        let body = framing::frame(&message);
        let answer = client::grpc(grpc.clone(), request, body).await.unwrap();
        let answer = c::ControllerStatusResponse::parse_from_bytes(&answer).unwrap();
        assert_eq!(answer.info.get("trace").map(String::as_str), trace);
    }
}

#[tokio::test]
async fn calls_are_counted_by_method_and_code_and_no_caller_makes_names_up() {
    let node = Node::start();
    let [grpc, ttrpc] = node.clients().await;
    for client in [&grpc, &ttrpc] {
        client.raw(CONTROLLER, "Stop", only_id("a"), None).await.unwrap();
        client.raw(CONTROLLER, "Stop", only_id("step"), None).await.unwrap_err();
        for method in ["Made", "Up"] {
            client.raw(CONTROLLER, method, only_id("a"), None).await.unwrap_err();
            client.raw(method, "Stop", only_id("a"), None).await.unwrap_err();
        }
    }
    let text = node.telemetry.text(&Census::default());
    for line in [
        "pause_sandboxer_calls_total{method=\"Stop\",code=\"OK\"} 2",
        "pause_sandboxer_calls_total{method=\"Stop\",code=\"INTERNAL\"} 2",
        "pause_sandboxer_calls_total{method=\"other\",code=\"UNIMPLEMENTED\"} 8",
        "pause_sandboxer_call_duration_seconds_count{method=\"Stop\"} 4",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
    }
    assert!(!text.contains("Made"), "{text}");
}
