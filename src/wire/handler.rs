//! The one handler behind both protocols: decode, call the method, encode.

use std::future::{Future, ready};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::{self, Context, Poll, Waker};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use protobuf::MessageField;
use tokio::sync::watch;

use super::namespace::NamespaceFilter;
use super::request_budget::RequestBudget;
use super::response::{Answer, code_of, decode, encode, fits, not_served, panicked};
use super::service::SandboxService;
use super::status::{self, Code, Status};
use super::{convert, inspect};
use crate::log_context::{self, TraceId};
use crate::podsandbox::Error;
use crate::protos::controller as c;
use crate::telemetry::{CallInProgress, Telemetry};

/// The service that containerd calls.
const CONTROLLER: &str = "containerd.services.sandbox.v1.Controller";

const CONTROLLER_METHODS: &[&str] =
    &["Create", "Start", "Platform", "Stop", "Wait", "Status", "Shutdown", "Metrics", "Update"];

/// How long calls other than Wait may still take when the daemon stops; less than the server
/// takes to end. containerd keeps the state of a sandbox unknown until its next start if it gets an
/// error from a Status while it recovers (`internal/cri/server/restart.go`).
const GRACE: Duration = Duration::from_secs(1);

/// A call as its transport understood it.
#[derive(Debug)]
pub(super) struct Call {
    /// Service and method, with a slash between them.
    pub(super) path: Box<str>,
    /// The time that its caller gives it.
    pub(super) deadline: Result<Option<Duration>, Status>,
    /// The trace that it belongs to, if its caller says so.
    pub(super) trace: Option<TraceId>,
    /// containerd's namespace that it is of, if its caller says so.
    pub(super) namespace: Option<Box<str>>,
    /// Maximum size of an answer that the caller accepts, bytes.
    pub(super) max_answer: usize,
    /// It came over the ttrpc socket, which also serves operator queries.
    pub(super) serves_operators: bool,
}

impl Call {
    /// Service and method; both empty where the path is none.
    fn target(&self) -> (&str, &str) {
        self.path.split_once('/').unwrap_or_default()
    }

    fn is_wait(&self) -> bool {
        self.target() == (CONTROLLER, "Wait")
    }

    /// It is a Wait without a deadline, which may last as long as its pod.
    fn is_unbounded_wait(&self) -> bool {
        self.is_wait() && matches!(self.deadline, Ok(None))
    }

    /// The method's name in metrics: one of those that are served, or `other`, so that callers
    /// cannot cause unbounded label values.
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

/// A Wait that is pending: one for every pod, for as long as it lives. What only the beginning of a
/// call needs is not in it.
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
    request_budget: RequestBudget,
}

impl<V> Clone for Handler<V> {
    fn clone(&self) -> Self {
        Self {
            sandboxes: self.sandboxes.clone(),
            stop: self.stop.clone(),
            telemetry: Arc::clone(&self.telemetry),
            namespace: Arc::clone(&self.namespace),
            request_budget: self.request_budget.clone(),
        }
    }
}

impl<V: SandboxService> Handler<V> {
    /// A handler whose calls all end once `stop` says true or its sender is gone: Waits at once,
    /// the others within a second.
    pub(super) fn new(
        sandboxes: PendingService<V>,
        stop: watch::Receiver<bool>,
        telemetry: Arc<Telemetry>,
        namespace: Arc<NamespaceFilter>,
    ) -> Self {
        Self { sandboxes, stop, telemetry, namespace, request_budget: RequestBudget::default() }
    }

    /// A handler for another socket with its own request budget, so that slow requests of one
    /// socket do not delay those of the other.
    pub(super) fn with_own_budget(&self) -> Self {
        Self { request_budget: RequestBudget::default(), ..self.clone() }
    }

    /// The budget for the requests of all connections of a socket.
    pub(super) fn request_budget(&self) -> &RequestBudget {
        &self.request_budget
    }

    /// Ends when the daemon stops.
    pub(super) async fn stopping(&self) {
        // A sender that is gone can never say true: then no caller is left.
        let _ = self.stop.clone().wait_for(|stop| *stop).await;
    }

    fn is_stopping(&self) -> bool {
        *self.stop.borrow() || self.stop.has_changed().is_err()
    }

    fn known(&self) -> Option<Arc<V>> {
        self.sandboxes.borrow().clone()
    }

    /// The service, as soon as recovery is done. Nothing of a call is read before, except
    /// for what arrived with it.
    async fn sandboxes(&self) -> Result<Arc<V>, Status> {
        if let Some(known) = self.known() {
            return Ok(known);
        }
        // A sender that is gone has found none, and the daemon ends.
        let _ = self.sandboxes.clone().wait_for(Option::is_some).await;
        self.known().ok_or_else(Status::stopping)
    }

    /// Answers one call whatever happens to it: it panics, its deadline passes, the daemon
    /// stops.
    ///
    /// `request` reads the request's bytes, so that a caller who never sends the rest of them is
    /// bounded as well.
    pub(super) fn handle_call<'a, B: AsRef<[u8]> + Send + 'a>(
        &'a self,
        of: &'a Call,
        request: BoxFuture<'a, Result<B, Status>>,
    ) -> BoxFuture<'a, Answer> {
        Box::pin(log_context::within(of.trace, async move {
            let mut running = self.telemetry.call(of.metric_name());
            let work = async {
                let sandboxes = self.sandboxes().await?;
                fits(
                    of.target().1,
                    self.dispatch(&sandboxes, of, request.await?).await,
                    of.max_answer,
                )
            };
            let answer = self.bounded(of, work).await;
            running.ended(code_of(&answer));
            answer
        }))
    }

    /// Answers one call as [`Self::handle_call`] does, but a Wait that may last is given back as
    /// soon as it is pending, for [`Self::poll`] and [`Self::stopped`].
    pub(super) fn begin<'a, B: AsRef<[u8]> + Send + 'a>(
        &'a self,
        of: &'a Call,
        request: BoxFuture<'a, Result<B, Status>>,
    ) -> BoxFuture<'a, Dispatched> {
        if !of.is_unbounded_wait() {
            return Box::pin(self.handle_call(of, request).map(Dispatched::Answered));
        }
        Box::pin(log_context::within(of.trace, async move {
            let mut running = self.telemetry.call(of.metric_name());
            let begun = self.bounded(of, async {
                let sandboxes = self.sandboxes().await?;
                let mut exit = exit(sandboxes, request.await?.as_ref())?;
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

    /// Looks whether a Wait has its answer.
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
                Err(Status::stopping())
            }
        }
    }

    /// Does what a call asks for, whatever happens to it.
    async fn bounded<T>(
        &self,
        of: &Call,
        work: impl Future<Output = Result<T, Status>>,
    ) -> Result<T, Status> {
        if of.is_wait() && self.is_stopping() {
            return Err(Status::stopping());
        }
        if of.target().0 != inspect::SERVICE {
            self.namespace.admits(of.namespace.as_deref(), of.is_wait())?;
        }
        let deadline = of.deadline.clone()?;
        let method = of.target().1;
        let result = tokio::select! {
            biased;
            result = AssertUnwindSafe(work).catch_unwind() => {
                result.unwrap_or_else(|panic| Err(panicked(method, &*panic)))
            }
            () = self.given_up(of) => Err(Status::stopping()),
            () = expired(deadline) => {
                let message = format!("{method}: the caller's deadline passed");
                Err(Status::new(Code::DEADLINE_EXCEEDED, message))
            }
        };
        if of.is_wait() { self.unless_stopping(result) } else { result }
    }

    /// Ends when the daemon stops and has no more time for this call.
    async fn given_up(&self, of: &Call) {
        self.stopping().await;
        // Before the recovery is done no call is answered.
        if !of.is_wait() && self.known().is_some() {
            tokio::time::sleep(GRACE).await;
        }
    }

    /// What a Wait fails with while the daemon stops says nothing of the sandbox, and would be
    /// mistaken for its exit.
    fn unless_stopping<T>(&self, result: Result<T, Status>) -> Result<T, Status> {
        match result {
            Err(_) if self.is_stopping() => Err(Status::stopping()),
            result => result,
        }
    }

    fn dispatch<'a, B: AsRef<[u8]> + Send + 'a>(
        &'a self,
        sandboxes: &'a Arc<V>,
        of: &'a Call,
        bytes: B,
    ) -> BoxFuture<'a, Answer> {
        let (service, method) = of.target();
        match (service, method) {
            (CONTROLLER, "Wait") => match exit(Arc::clone(sandboxes), bytes.as_ref()) {
                Ok(exit) => exit,
                Err(status) => Box::pin(ready(Err(status))),
            },
            (CONTROLLER, _) => {
                Box::pin(async move { self.controller(sandboxes, method, bytes.as_ref()).await })
            }
            (inspect::SERVICE, _) if of.serves_operators => {
                Box::pin(
                    async move { inspect::handle_call(&**sandboxes, method, bytes.as_ref()).await },
                )
            }
            _ => Box::pin(ready(Err(not_served(service, method)))),
        }
    }

    async fn controller(&self, sandboxes: &V, method: &str, bytes: &[u8]) -> Answer {
        match method {
            "Create" => {
                let request = decode::<c::ControllerCreateRequest>(bytes)?;
                let answer = c::ControllerCreateResponse {
                    sandbox_id: request.sandbox_id.clone(),
                    ..Default::default()
                };
                encode(method, sandboxes.create(convert::create(request)).await.map(|()| answer))
            }
            "Start" => {
                let id = decode::<c::ControllerStartRequest>(bytes)?.sandbox_id;
                encode(
                    method,
                    sandboxes.start(&id).await.map(|started| convert::started(id, started)),
                )
            }
            "Platform" => {
                let id = decode::<c::ControllerPlatformRequest>(bytes)?.sandbox_id;
                encode(
                    method,
                    sandboxes.platform(&id).await.map(|platform| c::ControllerPlatformResponse {
                        platform: MessageField::some(convert::platform(platform)),
                        ..Default::default()
                    }),
                )
            }
            "Stop" => {
                // timeout_secs is for sandboxes that are asked to end; a pause process is killed.
                let id = decode::<c::ControllerStopRequest>(bytes)?.sandbox_id;
                encode(
                    method,
                    sandboxes.stop(&id).await.map(|()| c::ControllerStopResponse::default()),
                )
            }
            "Status" => {
                let c::ControllerStatusRequest { sandbox_id: id, verbose, .. } = decode(bytes)?;
                encode(
                    method,
                    sandboxes.status(&id, verbose).await.map(|report| convert::status(id, report)),
                )
            }
            "Shutdown" => {
                let id = decode::<c::ControllerShutdownRequest>(bytes)?.sandbox_id;
                encode(
                    method,
                    sandboxes
                        .shutdown(&id)
                        .await
                        .map(|()| c::ControllerShutdownResponse::default()),
                )
            }
            "Metrics" => {
                let id = decode::<c::ControllerMetricsRequest>(bytes)?.sandbox_id;
                encode(
                    method,
                    sandboxes.metrics(&id).await.map(|metric| c::ControllerMetricsResponse {
                        metrics: MessageField::some(convert::metric(id, metric)),
                        ..Default::default()
                    }),
                )
            }
            "Update" => {
                let result = update(sandboxes, decode(bytes)?).await;
                encode(method, result.map(|()| c::ControllerUpdateResponse::default()))
            }
            _ => Err(not_served(CONTROLLER, method)),
        }
    }
}

/// Updates a sandbox. A missing one, taken as empty, would wipe what the fields name.
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

/// The answer to a Wait; nothing of its request is kept until then.
fn exit<V: SandboxService>(
    sandboxes: Arc<V>,
    bytes: &[u8],
) -> Result<BoxFuture<'static, Answer>, Status> {
    let exit = sandboxes.wait(decode::<c::ControllerWaitRequest>(bytes)?.sandbox_id);
    Ok(Box::pin(exit.map(|exit| encode("Wait", exit.map(convert::exit)))))
}

async fn expired(deadline: Option<Duration>) {
    match deadline {
        Some(deadline) => Box::pin(tokio::time::sleep(deadline)).await,
        None => std::future::pending().await,
    }
}
