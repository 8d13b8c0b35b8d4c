//! containerd's namespaces: one containerd may have sandboxes in several, and an id is unique only
//! within one.

use std::sync::atomic::{AtomicBool, Ordering};

use super::status::{Code, Status};
use crate::config::CONTAINERD_NAMESPACE;

/// The key of a call's namespace in the metadata of ttrpc.
pub(super) const TTRPC_KEY: &str = "containerd-namespace-ttrpc";

/// Refuses the calls of other namespaces than CRI's.
#[derive(Debug, Default)]
pub(super) struct NamespaceFilter {
    /// Whether a call of another namespace has been logged.
    warned: AtomicBool,
}

impl NamespaceFilter {
    /// Refuses a call of another namespace. CRI sets the namespace of each of its calls, and
    /// containerd passes on what its callers set. So a call without one, or with an empty one,
    /// comes from another client of this daemon, and is served.
    ///
    /// A Wait is UNAVAILABLE: containerd takes any other end for the exit of the sandbox.
    pub(super) fn admits(&self, asked: Option<&str>, wait: bool) -> Result<(), Status> {
        const OWN: &str = CONTAINERD_NAMESPACE;
        let Some(asked) = asked.filter(|asked| !["", OWN].contains(asked)) else { return Ok(()) };
        // The warning is logged once: containerd repeats the Wait of a sandbox indefinitely.
        if !self.warned.swap(true, Ordering::Relaxed) {
            log::warn!(
                asked = asked, served = OWN;
                "rejected call from another containerd namespace"
            );
        }
        let code = if wait { Code::UNAVAILABLE } else { Code::FAILED_PRECONDITION };
        let text = format!("containerd namespace {asked:?} is not served; CRI's is {OWN:?}");
        Err(Status::new(code, text))
    }
}
