//! The one handler behind both protocols: decode, call the method, encode.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::{self, Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::sync::watch;

use super::namespace::NamespaceFilter;
use super::response::{Answer, code_of, decode, encode, fits, not_served, panicked};
use super::status::{self, Code, Status};
use super::{convert, inspect};
use crate::controller::SandboxService;
use crate::log_context::{self, TraceId};
use crate::podsandbox::Error;
use crate::protos::controller as c;
use crate::telemetry::{CallInProgress, Telemetry};

/// The service that containerd calls.
const CONTROLLER: &str = "containerd.services.sandbox.v1.Controller";

const CONTROLLER_METHODS: &[&str] =
    &["Create", "Start", "Platform", "Stop", "Wait", "Status", "Shutdown", "Metrics", "Update"];

/// How long calls other than Wait may still take when the daemon stops; less than the server's own
/// time to end. containerd keeps the state of a sandbox unknown until its next start if it gets an
/// error from a Status while it recovers (`internal/cri/server/restart.go`).
const GRACE: Duration = Duration::from_secs(1);

/// A call as its transport decoded it.
#[derive(Debug)]
pub(super) struct Call {
    /// Service and method, with a slash between them.
    pub(super) path: Box<str>,
    /// The caller's deadline.
    pub(super) deadline: Result<Option<Duration>, Status>,
    /// The trace of the call, if the caller sends one.
    pub(super) trace: Option<TraceId>,
    /// containerd's namespace of the call, if the caller sends one.
    pub(super) namespace: Option<Box<str>>,
    /// Maximum size of an answer that the caller accepts, bytes.
    pub(super) max_answer: usize,
    /// Whether the call came over the ttrpc socket, which also serves operator queries.
    pub(super) serves_operators: bool,
}

impl Call {
    /// Service and method; both empty if the path is malformed.
    fn target(&self) -> (&str, &str) {
        self.path.split_once('/').unwrap_or_default()
    }

    fn is_wait(&self) -> bool {
        self.target() == (CONTROLLER, "Wait")
    }

    /// Whether the call is a Wait without a deadline, which may last as long as its pod.
    fn is_unbounded_wait(&self) -> bool {
        self.is_wait() && matches!(self.deadline, Ok(None))
    }

    /// The method's name in metrics: a served method or `other`, so that callers cannot cause
    /// unbounded label values.
    fn metric_name(&self) -> &'static str {
        let (service, method) = self.target();
        let served = match service {
            CONTROLLER => CONTROLLER_METHODS,
            inspect::SERVICE => inspect::METHODS,
            _ => &[],
        };
        served.iter().find(|served| **served == method).copied().unwrap_or("other")
    }
}

/// The state of a call after [`Handler::begin`].
pub(super) enum Dispatched {
    /// The call has its response.
    Answered(Answer),
    /// The call is a Wait, and the pause process has not exited.
    WaitPending(Wait),
}

/// A pending Wait. Each pod has one for its whole life, so it keeps nothing that only the begin of
/// the call needs.
pub(super) struct Wait {
    exit: BoxFuture<'static, Answer>,
    running: CallInProgress,
}

/// The service that answers; `None` until recovery is done.
pub(super) type PendingService<V> = watch::Receiver<Option<Arc<V>>>;

/// Answers calls by their path.
pub(super) struct Handler<V> {
    sandboxes: PendingService<V>,
    stop: watch::Receiver<bool>,
    telemetry: Arc<Telemetry>,
    namespace: Arc<NamespaceFilter>,
}

impl<V> Clone for Handler<V> {
    fn clone(&self) -> Self {
        Self {
            sandboxes: self.sandboxes.clone(),
            stop: self.stop.clone(),
            telemetry: Arc::clone(&self.telemetry),
            namespace: Arc::clone(&self.namespace),
        }
    }
}

impl<V: SandboxService> Handler<V> {
    /// A handler whose calls all end once `stop` is true or its sender is dropped: Waits at once,
    /// the others within a second.
    pub(super) fn new(
        sandboxes: PendingService<V>,
        stop: watch::Receiver<bool>,
        telemetry: Arc<Telemetry>,
    ) -> Self {
        Self { sandboxes, stop, telemetry, namespace: Arc::default() }
    }

    /// Returns when the daemon stops.
    pub(super) async fn stopping(&self) {
        // Without a sender, `stop` can never become true: the daemon has ended.
        let _ = self.stop.clone().wait_for(|stop| *stop).await;
    }

    fn is_stopping(&self) -> bool {
        *self.stop.borrow() || self.stop.has_changed().is_err()
    }

    fn known(&self) -> Option<Arc<V>> {
        self.sandboxes.borrow().clone()
    }

    /// The service, as soon as recovery is done. Until then only the data that arrived with a call
    /// is read.
    async fn sandboxes(&self) -> Result<Arc<V>, Status> {
        if let Some(known) = self.known() {
            return Ok(known);
        }
        // Without a sender the recovery has failed, and the daemon ends.
        let _ = self.sandboxes.clone().wait_for(Option::is_some).await;
        self.known().ok_or_else(status::stopping)
    }

    /// Answers one call, also if its handler panics, its deadline passes or the daemon stops.
    ///
    /// `request` reads the request's bytes, so that the bounds also apply to a caller that never
    /// sends the rest of them.
    pub(super) fn handle_call<'a>(
        &'a self,
        call: &'a Call,
        request: BoxFuture<'a, Result<Bytes, Status>>,
    ) -> BoxFuture<'a, Answer> {
        Box::pin(log_context::within(call.trace, async move {
            let mut running = self.telemetry.call(call.metric_name());
            let work = async {
                let sandboxes = self.sandboxes().await?;
                let answer = self.dispatch(&sandboxes, call, &request.await?).await;
                fits(call.target().1, answer, call.max_answer)
            };
            let answer = self.bounded(call, work).await;
            running.ended(code_of(&answer));
            answer
        }))
    }

    /// Answers one call as [`Self::handle_call`] does, but returns a Wait that has no deadline as
    /// soon as it is pending, for [`Self::poll`] and [`Self::stopped`].
    pub(super) fn begin<'a>(
        &'a self,
        call: &'a Call,
        request: BoxFuture<'a, Result<Bytes, Status>>,
    ) -> BoxFuture<'a, Dispatched> {
        if !call.is_unbounded_wait() {
            return Box::pin(self.handle_call(call, request).map(Dispatched::Answered));
        }
        Box::pin(log_context::within(call.trace, async move {
            let mut running = self.telemetry.call(call.metric_name());
            let begun = self.bounded(call, async {
                let sandboxes = self.sandboxes().await?;
                let mut exit = exit(&*sandboxes, &request.await?)?;
                Ok((exit.as_mut().now_or_never(), exit))
            });
            let answer = match begun.await {
                Ok((None, exit)) => return Dispatched::WaitPending(Wait { exit, running }),
                Ok((Some(answer), _)) => self.unless_stopping(answer),
                Err(status) => Err(status),
            };
            running.ended(code_of(&answer));
            Dispatched::Answered(answer)
        }))
    }

    /// Polls a pending Wait.
    pub(super) fn poll(&self, wait: &mut Wait, cx: &mut Context<'_>) -> Poll<Answer> {
        let polled = catch_unwind(AssertUnwindSafe(|| wait.exit.poll_unpin(cx)));
        let answer = task::ready!(
            polled
                .unwrap_or_else(|panic| Poll::Ready(Err(panicked(wait.running.method(), &*panic))))
        );
        let answer = self.unless_stopping(answer);
        wait.running.ended(code_of(&answer));
        Poll::Ready(answer)
    }

    /// The answer to a Wait when the daemon stops.
    pub(super) fn stopped(&self, wait: &mut Wait) -> Answer {
        match self.poll(wait, &mut Context::from_waker(Waker::noop())) {
            Poll::Ready(answer) => answer,
            Poll::Pending => {
                wait.running.ended(status::name(Code::UNAVAILABLE));
                Err(status::stopping())
            }
        }
    }

    /// Runs the work of a call within its bounds: the call's namespace and deadline, a panic of the
    /// work, the daemon's stop.
    async fn bounded<T>(
        &self,
        call: &Call,
        work: impl Future<Output = Result<T, Status>>,
    ) -> Result<T, Status> {
        if call.is_wait() && self.is_stopping() {
            return Err(status::stopping());
        }
        if call.target().0 != inspect::SERVICE {
            self.namespace.admits(call.namespace.as_deref(), call.is_wait())?;
        }
        let deadline = call.deadline.clone()?;
        let method = call.target().1;
        let result = tokio::select! {
            biased;
            result = AssertUnwindSafe(work).catch_unwind() => {
                result.unwrap_or_else(|panic| Err(panicked(method, &*panic)))
            }
            () = self.given_up(call) => Err(status::stopping()),
            () = expired(deadline) => {
                let message = format!("{method}: the caller's deadline passed");
                Err(Status::new(Code::DEADLINE_EXCEEDED, message))
            }
        };
        if call.is_wait() { self.unless_stopping(result) } else { result }
    }

    /// Returns when the daemon stops and has no more time for this call.
    async fn given_up(&self, call: &Call) {
        self.stopping().await;
        // Before the recovery is done no call is answered.
        if !call.is_wait() && self.known().is_some() {
            tokio::time::sleep(GRACE).await;
        }
    }

    /// Replaces the failure of a Wait while the daemon stops: it says nothing about the sandbox,
    /// and containerd would take it for the exit.
    fn unless_stopping<T>(&self, result: Result<T, Status>) -> Result<T, Status> {
        match result {
            Err(_) if self.is_stopping() => Err(status::stopping()),
            result => result,
        }
    }

    async fn dispatch(&self, sandboxes: &Arc<V>, call: &Call, message: &[u8]) -> Answer {
        match call.target() {
            (CONTROLLER, "Wait") => exit(&**sandboxes, message)?.await,
            (CONTROLLER, method) => controller(&**sandboxes, method, message).await,
            (inspect::SERVICE, method) if call.serves_operators => {
                inspect::handle_call(&**sandboxes, method, message).await
            }
            (service, method) => Err(not_served(service, method)),
        }
    }
}

/// Answers a call of `sandbox.Controller` other than Wait.
async fn controller<V: SandboxService>(sandboxes: &V, method: &str, message: &[u8]) -> Answer {
    match method {
        "Create" => {
            let request = decode::<c::ControllerCreateRequest>(message)?;
            let answer = c::ControllerCreateResponse {
                sandbox_id: request.sandbox_id.clone(),
                ..Default::default()
            };
            encode(method, sandboxes.create(convert::create(request)).await.map(|()| answer))
        }
        "Start" => {
            let id = decode::<c::ControllerStartRequest>(message)?.sandbox_id;
            let started = sandboxes.start(&id).await;
            encode(method, started.map(|started| convert::started(id, started)))
        }
        "Platform" => {
            let id = decode::<c::ControllerPlatformRequest>(message)?.sandbox_id;
            encode(method, sandboxes.platform(&id).await.map(convert::platform))
        }
        "Stop" => {
            // timeout_secs is for sandboxes that are asked to end; a pause process is killed.
            let id = decode::<c::ControllerStopRequest>(message)?.sandbox_id;
            let stopped = sandboxes.stop(&id).await;
            encode(method, stopped.map(|()| c::ControllerStopResponse::default()))
        }
        "Status" => {
            let c::ControllerStatusRequest { sandbox_id: id, verbose, .. } = decode(message)?;
            let report = sandboxes.status(&id, verbose).await;
            encode(method, report.map(|report| convert::status(id, report)))
        }
        "Shutdown" => {
            let id = decode::<c::ControllerShutdownRequest>(message)?.sandbox_id;
            let removed = sandboxes.shutdown(&id).await;
            encode(method, removed.map(|()| c::ControllerShutdownResponse::default()))
        }
        "Metrics" => {
            let id = decode::<c::ControllerMetricsRequest>(message)?.sandbox_id;
            let metric = sandboxes.metrics(&id).await;
            encode(method, metric.map(|metric| convert::metric(id, metric)))
        }
        "Update" => {
            let updated = update(sandboxes, decode(message)?).await;
            encode(method, updated.map(|()| c::ControllerUpdateResponse::default()))
        }
        _ => Err(not_served(CONTROLLER, method)),
    }
}

/// Updates a sandbox. A missing `sandbox`, taken as empty, would remove all that the fields name.
async fn update<V: SandboxService>(
    sandboxes: &V,
    request: c::ControllerUpdateRequest,
) -> Result<(), Error> {
    let c::ControllerUpdateRequest { sandbox_id: id, sandbox, fields, .. } = request;
    match sandbox.into_option() {
        Some(sandbox) => sandboxes.update(&id, convert::sandbox_info(sandbox), fields).await,
        None => Err(Error::Invalid { id, field: "sandbox".into(), reason: "missing".into() }),
    }
}

/// The answer to a Wait; the future keeps nothing of the request.
fn exit<V: SandboxService>(
    sandboxes: &V,
    message: &[u8],
) -> Result<BoxFuture<'static, Answer>, Status> {
    let id = decode::<c::ControllerWaitRequest>(message)?.sandbox_id;
    let exit = sandboxes.wait(&id);
    Ok(Box::pin(exit.map(|exit| encode("Wait", exit.map(convert::exit)))))
}

async fn expired(deadline: Option<Duration>) {
    match deadline {
        Some(deadline) => Box::pin(tokio::time::sleep(deadline)).await,
        None => std::future::pending().await,
    }
}
