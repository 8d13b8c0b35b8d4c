//! Calls of another containerd namespace.

use crate::{Node, methods, only_id};

/// Promise: other_namespaces_are_refused.
#[tokio::test]
async fn calls_of_another_namespace_are_refused_and_end_no_wait() {
    let node = Node::start();
    for client in node.clients().await {
        for (service, method) in methods() {
            let (code, text) =
                client.in_namespace("moby", (service, method), only_id("ended")).await.unwrap_err();
            // Any other code of a Wait is mistaken for the exit of its sandbox.
            let expected = if method.starts_with("Wait") { 14 } else { 9 };
            assert_eq!(code, expected, "{method}: {text}");
            assert!(text.contains("\"moby\"") && text.contains("\"k8s.io\""), "{text}");
        }
        assert!(node.sandboxes.created.lock().unwrap().is_empty());
        for namespace in ["k8s.io", ""] {
            for (service, method) in methods() {
                client.in_namespace(namespace, (service, method), only_id("ended")).await.unwrap();
            }
            node.sandboxes.created.lock().unwrap().clear();
        }
    }
}
