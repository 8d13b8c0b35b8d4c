//! Operator queries: the service of `protos/inspect.proto`, on the ttrpc socket only.

use protobuf::MessageField;

use super::convert;
use super::response::{Answer, decode, encode, not_served};
use crate::controller::SandboxService;
use crate::podsandbox::{SandboxSummary, Usage};
use crate::protos::inspect as i;

/// The service.
pub(super) const SERVICE: &str = "pause_sandboxer.v1.Inspect";
/// Its methods.
pub(super) const METHODS: &[&str] = &["List", "Inspect"];

/// Maximum number of sandboxes in one answer: some hundred bytes each, far below the maximum size
/// of a message.
const PAGE: usize = 1000;

/// Answers one of [`METHODS`].
pub(super) async fn handle_call<V: SandboxService>(
    sandboxes: &V,
    method: &str,
    bytes: &[u8],
) -> Answer {
    match method {
        "List" => {
            let i::ListRequest { after, usage, .. } = decode(bytes)?;
            encode(
                method,
                sandboxes.list(&after, PAGE, usage).await.map(|(lines, more)| i::ListResponse {
                    sandboxes: lines.into_iter().map(sandbox).collect(),
                    more,
                    ..Default::default()
                }),
            )
        }
        "Inspect" => {
            let id = decode::<i::InspectRequest>(bytes)?.id;
            encode(
                method,
                sandboxes.inspect(&id).await.map(|report| i::InspectResponse {
                    json: report.to_string(),
                    ..Default::default()
                }),
            )
        }
        _ => Err(not_served(SERVICE, method)),
    }
}

fn sandbox(line: SandboxSummary) -> i::Sandbox {
    i::Sandbox {
        id: line.id,
        pod: line.pod.name.into(),
        namespace: line.pod.namespace.into(),
        uid: line.pod.uid.into(),
        state: line.state.to_owned(),
        pid: line.pid,
        created_at: line
            .created_at
            .map(convert::timestamp)
            .map_or_else(MessageField::none, MessageField::some),
        runtime: line.runtime,
        failed_cleanups: line.failed_cleanups,
        reason: line.reason.unwrap_or_default(),
        usage: line.usage.map(usage).map_or_else(MessageField::none, MessageField::some),
        shim_memory: line.shim_memory,
        ..Default::default()
    }
}

fn usage(usage: Usage) -> i::Usage {
    i::Usage {
        memory: usage.memory,
        cpu_usec: usage.cpu_usec,
        tasks: usage.tasks,
        ..Default::default()
    }
}
