//! The pod as an NRI plugin receives it.

use std::time::Duration;

use anyhow::{Context, Result};
use kit::nri::Plugin;
use kit::proto::nri::Event;
use kit::{Node, Pod};
use serde_json::Value;

use crate::fact::{Facts, json};

/// Before 2.3 containerd takes a pod's data from a container of its own, which no external
/// sandboxer has.
const BEFORE: [&str; 3] = ["2.0.", "2.1.", "2.2."];

/// Whether plugins of this containerd get the spec that a sandboxer answers.
///
/// # Errors
/// There is no containerd.
pub(crate) fn tells_the_spec() -> Result<bool> {
    let version = kit::Parts::get()?.version();
    Ok(!BEFORE.iter().any(|old| version.starts_with(old)))
}

/// A plugin of the node; `None`: it would not get the spec.
pub(crate) async fn attach(node: &Node) -> Result<Option<Plugin>> {
    if !tells_the_spec()? {
        return Ok(None);
    }
    let socket = node.layout().nri_socket();
    #[allow(clippy::disallowed_methods, reason = "a test's own thread")]
    let plugin = tokio::task::spawn_blocking(move || Plugin::attach(&socket)).await??;
    Ok(Some(plugin))
}

/// Adds the pod of each of these events.
pub(crate) async fn observe(
    plugin: &Plugin,
    events: &[Event],
    pod: &Pod,
    pid: u32,
    facts: &mut Facts,
) -> Result<()> {
    for event in events {
        let received =
            kit::until("the plugin receives the pod", Duration::from_secs(10), async || {
                plugin.pod(*event, pod.id()).with_context(|| format!("{event:?}"))
            });
        let mut received = json(&received.await?);
        if let Some(fields) = received.as_object_mut() {
            // What the two differ in.
            fields.remove("runtime_handler");
            if fields.get("pid") == Some(&pid.into()) {
                fields.insert("pid".to_owned(), Value::from("the pause's"));
            }
        }
        facts.add_json(&format!("NRI {event:?}"), &received);
    }
    Ok(())
}
