//! Fields that the logger adds to a line: the pod of a sandbox, and the trace of the call.
//!
//! Every [`LogContext`] that lives is known here by its id, so that a line which names a sandbox
//! names its pod as well, whichever module writes it. A call has its trace in the task that answers
//! it; what the call sets off in other tasks is found by the sandbox.

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::num::NonZeroU128;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::id::SandboxId;

/// The key, in the metadata of gRPC and ttrpc, of the trace that a call belongs to (W3C Trace
/// Context).
pub const TRACEPARENT: &str = "traceparent";

/// The id of a trace; never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceId(NonZeroU128);

impl TraceId {
    /// Reads a `traceparent`: version, trace id, parent id and flags, and what a later version
    /// adds. `None`: the value is no `traceparent`.
    pub fn of_traceparent(value: &str) -> Option<Self> {
        let mut parts = value.split('-');
        let mut hex = |length| {
            let digits = |part: &&str| {
                part.len() == length
                    && part.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'))
            };
            parts.next().filter(digits)
        };
        let (version, trace, parent, _flags) = (hex(2)?, hex(32)?, hex(16)?, hex(2)?);
        if version == "ff"
            || version == "00" && parts.next().is_some()
            || parent.bytes().all(|digit| digit == b'0')
        {
            return None;
        }
        u128::from_str_radix(trace, 16).ok().and_then(NonZeroU128::new).map(Self)
    }
}

impl fmt::Display for TraceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

tokio::task_local! {
    /// The trace of the call that this task answers.
    static CALL: Option<TraceId>;
}

/// Answers a call that belongs to `trace`.
pub fn within<F: Future>(trace: Option<TraceId>, call: F) -> impl Future<Output = F::Output> {
    CALL.scope(trace, call)
}

/// The trace of the call that this task answers.
pub fn current() -> Option<TraceId> {
    CALL.try_with(|trace| *trace).ok().flatten()
}

/// The names of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodNames {
    /// Name of the pod.
    pub name: Box<str>,
    /// Kubernetes' namespace of the pod.
    pub namespace: Box<str>,
    /// Kubernetes' uid of the pod.
    pub uid: Box<str>,
}

#[derive(Debug)]
struct Known {
    pod: PodNames,
    trace: Mutex<Option<TraceId>>,
}

static KNOWN: Mutex<BTreeMap<SandboxId, Arc<Known>>> = Mutex::new(BTreeMap::new());

/// A sandbox that lines of the log may be about; it is forgotten when this is dropped.
#[derive(Debug)]
pub struct LogContext {
    id: SandboxId,
    known: Arc<Known>,
}

impl LogContext {
    /// Makes it known that the sandbox of this id is the pod's.
    pub fn new(id: SandboxId, pod: PodNames) -> Self {
        let known = Arc::new(Known { pod, trace: Mutex::new(None) });
        KNOWN.lock().insert(id.clone(), Arc::clone(&known));
        Self { id, known }
    }

    /// The pod.
    pub fn pod(&self) -> &PodNames {
        &self.known.pod
    }

    /// All further work for the sandbox belongs to `trace`, in any task.
    pub fn follow(&self, trace: Option<TraceId>) {
        *self.known.trace.lock() = trace;
    }
}

impl Drop for LogContext {
    fn drop(&mut self) {
        let mut known = KNOWN.lock();
        // Another sandbox may have the id by now.
        if known.get(self.id.as_str()).is_some_and(|labels| Arc::ptr_eq(labels, &self.known)) {
            known.remove(self.id.as_str());
        }
    }
}

/// The pod of a sandbox, and the trace that is followed for it.
pub fn of_sandbox(sandbox: &str) -> Option<(PodNames, Option<TraceId>)> {
    let known = KNOWN.lock().get(sandbox).cloned()?;
    let trace = *known.trace.lock();
    Some((known.pod.clone(), trace))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn traceparents() {
        let id = TraceId::of_traceparent(PARENT).unwrap();
        assert_eq!(id.to_string(), "4bf92f3577b34da6a3ce929d0e0e4736");
        assert_eq!(
            TraceId::of_traceparent(&PARENT.replace("00-4", "cc-4")),
            Some(id),
            "a later version"
        );
        assert_eq!(
            TraceId::of_traceparent(&format!("{}-more", PARENT.replace("00-4", "cc-4"))),
            Some(id)
        );
        for bad in [
            "",
            "4bf92f3577b34da6a3ce929d0e0e4736",
            &PARENT.replace("00-4", "ff-4"),
            &PARENT.to_uppercase(),
            &PARENT.replace('-', " "),
            &PARENT[..PARENT.len() - 1],
            &format!("{PARENT}-more"),
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00-4bf92f3577b34da6a3ce929d0e0e47é-00f067aa0ba902b7-01",
        ] {
            assert_eq!(TraceId::of_traceparent(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn a_subject_is_known_as_long_as_it_lives() {
        let pod = |name: &str| PodNames { name: name.into(), ..PodNames::default() };
        let first = LogContext::new("trace-test".try_into().unwrap(), pod("first"));
        first.follow(TraceId::of_traceparent(PARENT));
        assert_eq!(of_sandbox("trace-test"), Some((pod("first"), TraceId::of_traceparent(PARENT))));
        let second = LogContext::new("trace-test".try_into().unwrap(), pod("second"));
        drop(first);
        assert_eq!(of_sandbox("trace-test"), Some((pod("second"), None)));
        drop(second);
        assert_eq!(of_sandbox("trace-test"), None);
    }

    #[tokio::test]
    async fn a_call_has_its_trace_in_its_own_task() {
        let trace = TraceId::of_traceparent(PARENT);
        assert_eq!(current(), None);
        assert_eq!(within(trace, async { current() }).await, trace);
        assert_eq!(within(trace, tokio::spawn(async { current() })).await.unwrap(), None);
    }
}
