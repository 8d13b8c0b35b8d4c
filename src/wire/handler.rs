//! The one handler behind both protocols: decode, call the verb, encode.

use std::any::Any;
use std::future::{Future, ready};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use protobuf::{Message, MessageField};
use tokio::sync::watch;

use super::code::{self, Code, Status};
use super::verbs::Verbs;
use super::{convert, inspect};
use crate::podsandbox::Error;
use crate::protos::{controller as c, shim_sandbox as s};
use crate::telemetry::Telemetry;
use crate::trace::{self, TraceId};

/// The service that containerd calls.
const CONTROLLER: &str = "containerd.services.sandbox.v1.Controller";
/// The same verbs in the form that shims speak.
const SANDBOX: &str = "containerd.runtime.sandbox.v1.Sandbox";

const CONTROLLER_METHODS: &[&str] =
    &["Create", "Start", "Platform", "Stop", "Wait", "Status", "Shutdown", "Metrics", "Update"];
const SANDBOX_METHODS: &[&str] = &[
    "CreateSandbox",
    "StartSandbox",
    "Platform",
    "StopSandbox",
    "WaitSandbox",
    "SandboxStatus",
    "PingSandbox",
    "ShutdownSandbox",
    "SandboxMetrics",
];

/// The largest message that is read, bytes: gRPC's usual limit and the ttrpc protocol's own.
pub(super) const MAX_MESSAGE: usize = 4 << 20;
/// The largest answer, bytes: one that every client reads, ttrpc's wrapping included.
const MAX_ANSWER: usize = MAX_MESSAGE - (64 << 10);

/// A call's answer as bytes.
pub(super) type Answer = Result<Vec<u8>, Status>;

/// A call as its skin understood it. It is there for as long as the call is, and handed on by reference: what is handed on by value is in
/// a future once for each hand.
#[derive(Debug)]
pub(super) struct Call {
    /// Service and method, with a slash between them.
    pub(super) path: Box<str>,
    /// The time that its caller gives it.
    pub(super) deadline: Result<Option<Duration>, Status>,
    /// The trace that it belongs to, if its caller says so.
    pub(super) trace: Option<TraceId>,
    /// It came where operators ask, not only containerd.
    pub(super) operators: bool,
}

impl Call {
    /// Service and method; both empty where the path is none.
    fn target(&self) -> (&str, &str) {
        self.path.split_once('/').unwrap_or_default()
    }

    /// The method's name for counters: one of those that are served, or `other`, so that no caller makes names up.
    fn counted(&self) -> &'static str {
        let (service, method) = self.target();
        let served = match service {
            CONTROLLER => CONTROLLER_METHODS,
            SANDBOX => SANDBOX_METHODS,
            inspect::SERVICE => inspect::METHODS,
            _ => &[],
        };
        served.iter().find(|served| **served == method).copied().unwrap_or("other")
    }
}

/// Answers calls by their path.
pub(super) struct Handler<V> {
    verbs: Arc<V>,
    stop: watch::Receiver<bool>,
    telemetry: Arc<Telemetry>,
}

impl<V> Clone for Handler<V> {
    fn clone(&self) -> Self {
        Self { verbs: Arc::clone(&self.verbs), stop: self.stop.clone(), telemetry: Arc::clone(&self.telemetry) }
    }
}

impl<V: Verbs> Handler<V> {
    /// A handler whose calls all end once `stop` says true or its sender is gone.
    pub(super) fn new(verbs: Arc<V>, stop: watch::Receiver<bool>, telemetry: Arc<Telemetry>) -> Self {
        Self { verbs, stop, telemetry }
    }

    /// Ends when the daemon goes down.
    pub(super) async fn stopping(&self) {
        // A sender that is gone can never say true: then there is nobody left to serve for.
        let _ = self.stop.clone().wait_for(|stop| *stop).await;
    }

    fn is_stopping(&self) -> bool {
        *self.stop.borrow() || self.stop.has_changed().is_err()
    }

    /// Answers one call whatever happens to it: it panics, its deadline passes, the daemon goes down.
    ///
    /// `request` reads the request's bytes, so that a caller who never sends the rest of them is bounded as well.
    pub(super) fn answer<'a, B: AsRef<[u8]> + Send + 'a>(
        &'a self,
        of: &'a Call,
        request: BoxFuture<'a, Result<B, Status>>,
    ) -> BoxFuture<'a, Answer> {
        Box::pin(trace::within(of.trace, async move {
            let running = self.telemetry.call(of.counted());
            let answer = self.bounded(of, request).await;
            running.ended(answer.as_ref().err().map_or("OK", |status| code::name(status.code)));
            answer
        }))
    }

    #[expect(clippy::manual_async_fn, reason = "the arguments of an async fn are in its future twice")]
    fn bounded<'a, B: AsRef<[u8]> + Send + 'a>(
        &'a self,
        of: &'a Call,
        request: BoxFuture<'a, Result<B, Status>>,
    ) -> impl Future<Output = Answer> + Send + 'a {
        async move {
            if self.is_stopping() {
                return Err(Status::stopping());
            }
            let deadline = of.deadline.clone()?;
            let method = of.target().1;
            let call = async move { self.dispatch(of, request.await?).await };
            let call = Box::pin(AssertUnwindSafe(call).catch_unwind());
            let answer = tokio::select! {
                biased;
                answer = call => answer.unwrap_or_else(|panic| {
                    let reason = panic_text(panic.as_ref());
                    log::error!(call = method; "the handler of {method} panicked: {reason}");
                    Err(Status::new(Code::INTERNAL, format!("internal fault in {method}: {reason}")))
                }),
                () = self.stopping() => Err(Status::stopping()),
                () = expired(deadline) => {
                    Err(Status::new(Code::DEADLINE_EXCEEDED, format!("{method}: the caller's deadline passed")))
                }
            };
            match answer {
                // What fails while all goes down says nothing of the sandbox; in a Wait it would be taken for its exit.
                Err(_) if self.is_stopping() => Err(Status::stopping()),
                Ok(bytes) if bytes.len() > MAX_ANSWER => Err(Status::new(
                    Code::RESOURCE_EXHAUSTED,
                    format!("the answer to {method} has {} bytes, at most {MAX_ANSWER} fit", bytes.len()),
                )),
                answer => answer,
            }
        }
    }

    /// A Wait is pending for as long as its pod lives, so it keeps no request and has a future of its own: that of all other verbs is as
    /// large as the largest of them needs it.
    fn dispatch<'a, B: AsRef<[u8]> + Send + 'a>(&'a self, of: &'a Call, bytes: B) -> BoxFuture<'a, Answer> {
        let (service, method) = of.target();
        match (service, method) {
            (CONTROLLER, "Wait") => match decode::<c::ControllerWaitRequest>(bytes.as_ref()) {
                Ok(request) => {
                    let exit = self.verbs.wait(request.sandbox_id);
                    Box::pin(exit.map(|exit| encode("Wait", exit.map(convert::exit))))
                }
                Err(status) => Box::pin(ready(Err(status))),
            },
            (SANDBOX, "WaitSandbox") => match decode::<s::WaitSandboxRequest>(bytes.as_ref()) {
                Ok(request) => {
                    let exit = self.verbs.wait(request.sandbox_id);
                    Box::pin(exit.map(|exit| encode("WaitSandbox", exit.map(convert::sandbox_exit))))
                }
                Err(status) => Box::pin(ready(Err(status))),
            },
            (CONTROLLER, _) => Box::pin(async move { self.controller(method, bytes.as_ref()).await }),
            (SANDBOX, _) => Box::pin(async move { self.sandbox(method, bytes.as_ref()).await }),
            (inspect::SERVICE, _) if of.operators => {
                Box::pin(async move { inspect::answer(&*self.verbs, method, bytes.as_ref()).await })
            }
            _ => Box::pin(ready(Err(not_served(service, method)))),
        }
    }

    async fn controller(&self, method: &str, bytes: &[u8]) -> Answer {
        let verbs = &*self.verbs;
        match method {
            "Create" => {
                let request = decode::<c::ControllerCreateRequest>(bytes)?;
                let answer =
                    c::ControllerCreateResponse { sandbox_id: request.sandbox_id.clone(), ..Default::default() };
                encode(method, verbs.create(convert::create(request)).await.map(|()| answer))
            }
            "Start" => {
                let id = decode::<c::ControllerStartRequest>(bytes)?.sandbox_id;
                encode(method, verbs.start(&id).await.map(|started| convert::started(id, started)))
            }
            "Platform" => {
                let id = decode::<c::ControllerPlatformRequest>(bytes)?.sandbox_id;
                encode(
                    method,
                    verbs.platform(&id).await.map(|platform| c::ControllerPlatformResponse {
                        platform: MessageField::some(convert::platform(platform)),
                        ..Default::default()
                    }),
                )
            }
            "Stop" => {
                // timeout_secs is for sandboxes that are asked to end; a pause is killed.
                let id = decode::<c::ControllerStopRequest>(bytes)?.sandbox_id;
                encode(method, verbs.stop(&id).await.map(|()| c::ControllerStopResponse::default()))
            }
            "Status" => {
                let c::ControllerStatusRequest { sandbox_id: id, verbose, .. } = decode(bytes)?;
                encode(method, verbs.status(&id, verbose).await.map(|report| convert::status(id, report)))
            }
            "Shutdown" => {
                let id = decode::<c::ControllerShutdownRequest>(bytes)?.sandbox_id;
                encode(method, verbs.shutdown(&id).await.map(|()| c::ControllerShutdownResponse::default()))
            }
            "Metrics" => {
                let id = decode::<c::ControllerMetricsRequest>(bytes)?.sandbox_id;
                encode(
                    method,
                    verbs.metrics(&id).await.map(|metric| c::ControllerMetricsResponse {
                        metrics: MessageField::some(convert::metric(id, metric)),
                        ..Default::default()
                    }),
                )
            }
            "Update" => {
                let c::ControllerUpdateRequest { sandbox_id: id, sandbox, fields, .. } = decode(bytes)?;
                // Taken as an empty sandbox it would wipe what the fields name.
                let result = match sandbox.into_option() {
                    Some(sandbox) => verbs.update(&id, convert::sandbox_info(sandbox), fields).await,
                    None => Err(Error::Invalid { id, field: "sandbox".into(), reason: "missing".into() }),
                };
                encode(method, result.map(|()| c::ControllerUpdateResponse::default()))
            }
            _ => Err(not_served(CONTROLLER, method)),
        }
    }

    async fn sandbox(&self, method: &str, bytes: &[u8]) -> Answer {
        let verbs = &*self.verbs;
        match method {
            "CreateSandbox" => {
                let request = convert::create_sandbox(decode(bytes)?);
                encode(method, verbs.create(request).await.map(|()| s::CreateSandboxResponse::default()))
            }
            "StartSandbox" => {
                let id = decode::<s::StartSandboxRequest>(bytes)?.sandbox_id;
                encode(method, verbs.start(&id).await.map(convert::sandbox_started))
            }
            "Platform" => {
                let id = decode::<s::PlatformRequest>(bytes)?.sandbox_id;
                encode(
                    method,
                    verbs.platform(&id).await.map(|platform| s::PlatformResponse {
                        platform: MessageField::some(convert::platform(platform)),
                        ..Default::default()
                    }),
                )
            }
            "StopSandbox" => {
                let id = decode::<s::StopSandboxRequest>(bytes)?.sandbox_id;
                encode(method, verbs.stop(&id).await.map(|()| s::StopSandboxResponse::default()))
            }
            "SandboxStatus" => {
                let s::SandboxStatusRequest { sandbox_id: id, verbose, .. } = decode(bytes)?;
                encode(method, verbs.status(&id, verbose).await.map(|report| convert::sandbox_status(id, report)))
            }
            "PingSandbox" => {
                let id = decode::<s::PingRequest>(bytes)?.sandbox_id;
                // Asks whether the sandbox is alive: one that has ended must not answer yes.
                let alive = verbs.status(&id, false).await.and_then(|report| match report.exited_at {
                    None => Ok(s::PingResponse::default()),
                    Some(_) => Err(Error::State { id, verb: "ping", state: "not ready" }),
                });
                encode(method, alive)
            }
            "ShutdownSandbox" => {
                let id = decode::<s::ShutdownSandboxRequest>(bytes)?.sandbox_id;
                encode(method, verbs.shutdown(&id).await.map(|()| s::ShutdownSandboxResponse::default()))
            }
            "SandboxMetrics" => {
                let id = decode::<s::SandboxMetricsRequest>(bytes)?.sandbox_id;
                encode(
                    method,
                    verbs.metrics(&id).await.map(|metric| s::SandboxMetricsResponse {
                        metrics: MessageField::some(convert::metric(id, metric)),
                        ..Default::default()
                    }),
                )
            }
            _ => Err(not_served(SANDBOX, method)),
        }
    }
}

async fn expired(deadline: Option<Duration>) {
    match deadline {
        Some(deadline) => Box::pin(tokio::time::sleep(deadline)).await,
        None => std::future::pending().await,
    }
}

pub(super) fn not_served(service: &str, method: &str) -> Status {
    Status::new(Code::UNIMPLEMENTED, format!("/{service}/{method} is not served here"))
}

pub(super) fn decode<M: Message>(bytes: &[u8]) -> Result<M, Status> {
    M::parse_from_bytes(bytes).map_err(|e| Status::new(Code::INVALID_ARGUMENT, format!("malformed {}: {e}", M::NAME)))
}

/// Turns a verb's result into bytes, and logs why it failed.
pub(super) fn encode<M: Message>(method: &str, result: Result<M, Error>) -> Answer {
    match result {
        Ok(message) => message
            .write_to_bytes()
            .map_err(|e| Status::new(Code::INTERNAL, format!("encode the answer to {method}: {e}"))),
        Err(error) => {
            let status = Status::from(&error);
            // A caller's mistake is the caller's to report; what this node could not do is ours. Metrics are asked for every second, of pods
            // without any too.
            let level = match status.code {
                _ if method == "Metrics" => log::Level::Debug,
                Code::INTERNAL | Code::RESOURCE_EXHAUSTED | Code::DEADLINE_EXCEEDED => log::Level::Warn,
                _ => log::Level::Debug,
            };
            log::log!(level, sandbox = code::sandbox(&error), call = method; "{method} failed: {error}");
            Err(status)
        }
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}
