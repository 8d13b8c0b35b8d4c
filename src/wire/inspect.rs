//! Operator queries: the service of `protos/inspect.proto`, on the ttrpc socket only.

use super::response::{Answer, decode, encode, not_served};
use crate::controller::SandboxService;
use crate::protos::inspect as i;

/// The service.
pub(super) const SERVICE: &str = "pause_sandboxer.v1.Inspect";
/// Its methods.
pub(super) const METHODS: &[&str] = &["List"];

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
            let after = decode::<i::ListRequest>(bytes)?.after;
            let listed = sandboxes
                .list(&after, PAGE)
                .await
                .map(|(sandboxes, more)| i::ListResponse { sandboxes, more, ..Default::default() });
            encode(method, listed)
        }
        _ => Err(not_served(SERVICE, method)),
    }
}
