//! The task that owns a sandbox: it feeds the machine and carries out its actions.
//!
//! Calls and the results of jobs arrive in one mailbox; the exit of the pause process it polls
//! itself. The actor never blocks: jobs are tasks of their own, one at a time, and report back.

use std::future::{Future, poll_fn};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, SystemTime};

use futures::channel::mpsc::{UnboundedReceiver, UnboundedSender, unbounded};
use futures::{FutureExt as _, StreamExt as _};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

pub use self::handle::{ActorHandle, Published};
use super::Error;
use super::jobs::{self, Jobs, StartFailure};
use super::machine::{Action, Event, Job, Machine, Phase, Rpc};
use crate::error::{StepError, StepErrors};
use crate::exit::{self, ExitWaiter};
use crate::log_context::TraceId;
use crate::pool;
use crate::process::{Adoption, Exit, Process, UNKNOWN_EXIT};

mod handle;

/// The answer that a caller waits for.
pub type Reply = oneshot::Sender<Result<(), Error>>;

/// A message to the actor.
#[derive(Debug)]
pub enum Message {
    /// A caller asks for an RPC; the trace that the call belongs to.
    Ask(Rpc, Option<TraceId>, Reply),
    /// The pause process has ended.
    Exited(Exit),
    /// The pod's shim has died with containers in it.
    ShimDied,
    /// The killed pause process may still be frozen.
    ThawFailed(StepError),
    /// A job has ended.
    Done(Outcome),
    /// A caller waits until nothing is in progress.
    WhenIdle(oneshot::Sender<()>),
}

/// How a job ended.
#[derive(Debug)]
pub enum Outcome {
    /// The start job.
    Start(Result<Arc<dyn Process>, StartFailure>),
    /// The adoption.
    Adopt(Adoption),
    /// Cleanup or removal.
    Teardown(Result<(), StepErrors>),
}

/// How a sandbox enters its life: newly created, or as recovery found it.
#[derive(Debug)]
pub enum Entry {
    /// Created, never started.
    Created,
    /// Its pause process lives.
    Ready(Arc<dyn Process>),
    /// Its pause process has ended.
    NotReady {
        /// The pause process that was; 0 where there was none.
        pid: u32,
        /// How it ended.
        exit: Exit,
    },
    /// The end of the daemon interrupted its start, and recovery could not undo it yet.
    Interrupted,
    /// Recovery could not determine whether its pause process lives.
    Unknown {
        /// Process id of the recorded pause process.
        pid: u32,
    },
}

/// Called once when the sandbox is removed, to free its id.
type OnGone = Box<dyn FnOnce(&str) + Send>;

/// The owner of one sandbox.
pub struct Actor {
    jobs: Arc<Jobs>,
    machine: Machine,
    mailbox: UnboundedReceiver<Message>,
    to_self: UnboundedSender<Message>,
    published: watch::Sender<Published>,
    pause: Option<Arc<dyn Process>>,
    exit: ExitWaiter,
    replies: Vec<(Rpc, Reply)>,
    idle_waiters: Vec<oneshot::Sender<()>>,
    /// The steps that failed last.
    failed: StepErrors,
    /// When the next retry is due.
    alarm: Option<Instant>,
    on_gone: Option<OnGone>,
    retired: bool,
    /// The task of the job that runs.
    job: Option<JoinHandle<()>>,
    /// When the start job began.
    start_began: Option<Instant>,
}

impl Actor {
    /// Starts the actor's task; `on_gone` frees the sandbox's id.
    pub fn spawn(
        jobs: Arc<Jobs>,
        entry: Entry,
        on_gone: impl FnOnce(&str) + Send + 'static,
    ) -> ActorHandle {
        let interrupted = matches!(entry, Entry::Interrupted);
        let (phase, pid, exit, pause) = match entry {
            Entry::Created => (Phase::Created, 0, None, None),
            Entry::Ready(pause) => (Phase::Ready, pause.identity().pid, None, Some(pause)),
            Entry::NotReady { pid, exit } => (Phase::NotReady, pid, Some(exit), None),
            Entry::Interrupted => {
                // No caller knows of this pause process; a caller of Wait must not wait forever.
                let exit = Exit { status: UNKNOWN_EXIT, at: SystemTime::now() };
                (Phase::NotReady, 0, Some(exit), None)
            }
            Entry::Unknown { pid } => (Phase::Unknown, pid, None, None),
        };
        let (to_self, mailbox) = unbounded();
        let (published, seen) = watch::channel(Published { phase, pid, exit, failures: 0 });
        let handle = ActorHandle { mailbox: to_self.clone(), published: seen };
        let mut actor = Self {
            jobs,
            machine: match exit.filter(|_| interrupted) {
                Some(exit) => Machine::interrupted(exit),
                None => Machine::new(phase, exit),
            },
            mailbox,
            to_self,
            published,
            pause,
            exit: ExitWaiter::default(),
            replies: Vec::new(),
            idle_waiters: Vec::new(),
            failed: StepErrors::default(),
            alarm: (phase == Phase::Unknown).then(|| Instant::now() + exit::CLEANUP.delay(1)),
            on_gone: Some(Box::new(on_gone)),
            retired: false,
            job: None,
            start_began: None,
        };
        tokio::spawn(async move {
            match phase {
                Phase::Ready => actor.watch(),
                Phase::NotReady if interrupted => actor.feed(Event::RpcReceived(Rpc::Shutdown)),
                // The cleanup may have been interrupted; all of it may be done twice.
                Phase::NotReady => actor.feed(Event::RetryDue),
                _ => {}
            }
            let mut faults = 0;
            while let Err(panic) = AssertUnwindSafe(actor.run()).catch_unwind().await {
                faults += 1;
                Box::pin(actor.recover_from_panic(&pool::panicked(&*panic), faults)).await;
            }
        });
        handle
    }

    /// After a panic of its own, at whatever point: pending calls fail, and the pause process is
    /// looked for as recovery does. A sandbox whose pause process lives must never look gone.
    async fn recover_from_panic(&mut self, panic: &StepError, panics: u32) {
        log::error!(
            sandbox = self.id();
            "sandbox actor panicked; re-adopting pause process: {panic}"
        );
        if self.retired {
            return self.retire();
        }
        (self.pause, self.alarm) = (None, None);
        self.exit.disarm();
        tokio::time::sleep(exit::CLEANUP.delay(panics)).await;
        // One job at a time; its effects are found again.
        if let Some(job) = self.job.take() {
            let _ = job.await;
        }
        let mut asked = std::mem::take(&mut self.replies);
        let mut shim_died = false;
        while let Some(Some(message)) = self.mailbox.next().now_or_never() {
            match message {
                Message::Ask(rpc, _, reply) => asked.push((rpc, reply)),
                Message::ShimDied => shim_died = true,
                Message::WhenIdle(waiting) => self.idle_waiters.push(waiting),
                Message::Exited(_) | Message::ThawFailed(_) | Message::Done(_) => {}
            }
        }
        for (rpc, reply) in asked {
            let (id, reason) = (self.id().to_owned(), panic.to_string());
            let _ = reply.send(Err(Error::Fault { id, rpc: rpc.name(), reason }));
        }
        for action in self.machine.adopt_again() {
            self.act(action);
        }
        if shim_died {
            self.feed(Event::ShimDied);
        }
    }

    async fn run(&mut self) {
        while !self.retired {
            let message = match self.alarm {
                None => self.next().await,
                // Few sandboxes wait for an alarm, and its future is larger than all the rest.
                Some(at) => match Box::pin(tokio::time::timeout_at(at, self.next())).await {
                    Ok(message) => message,
                    Err(_) => {
                        self.alarm = None;
                        self.feed(Event::RetryDue);
                        continue;
                    }
                },
            };
            self.handle(message);
            if self.machine.is_idle() {
                self.jobs.log_context.follow(None);
                for waiting in self.idle_waiters.drain(..) {
                    let _ = waiting.send(());
                }
            }
        }
    }

    /// The next message, or the exit of the pause process. Nothing is lost when the future is
    /// dropped, and it is small, as every sandbox waits in one.
    fn next(&mut self) -> impl Future<Output = Message> {
        poll_fn(|cx| match self.exit.poll_exit(cx) {
            Poll::Ready(exit) => Poll::Ready(Message::Exited(exit)),
            // It never closes: the actor has a sender itself.
            Poll::Pending => match self.mailbox.poll_next_unpin(cx) {
                Poll::Ready(Some(message)) => Poll::Ready(message),
                Poll::Ready(None) | Poll::Pending => Poll::Pending,
            },
        })
    }

    fn handle(&mut self, message: Message) {
        if matches!(message, Message::Done(_)) {
            // The handle of a task that has ended keeps the task's memory, for as long as the pod
            // lives.
            self.job = None;
        }
        match message {
            Message::Ask(rpc, trace, reply) => {
                self.jobs.log_context.follow(trace);
                self.replies.push((rpc, reply));
                self.feed(Event::RpcReceived(rpc));
            }
            Message::Exited(exit) => self.exited(exit),
            Message::ShimDied => self.feed(Event::ShimDied),
            Message::ThawFailed(step) => {
                if self.pause.is_some() {
                    self.fail("failed to kill pause process", step.into());
                    self.feed(Event::KillFailed);
                }
            }
            Message::Done(Outcome::Start(Ok(pause))) => {
                self.pause = Some(pause);
                self.alarm = None;
                self.feed(Event::Started);
            }
            Message::Done(Outcome::Start(Err(failure))) => {
                self.fail("failed to start sandbox", failure.step.into());
                let clean = failure.left.is_empty();
                for step in failure.left {
                    log::warn!(sandbox = self.id(); "failed to undo sandbox start: {step}");
                }
                self.feed(Event::StartFailed { clean });
            }
            Message::Done(Outcome::Adopt(Adoption::Alive(pause))) => {
                self.pause = Some(Arc::from(pause));
                self.feed(Event::AdoptedAlive);
            }
            Message::Done(Outcome::Adopt(Adoption::Dead(exit))) => self.exited(exit),
            Message::Done(Outcome::Adopt(Adoption::Unknown(step))) => {
                self.failed = step.into();
                self.feed(Event::AdoptFailed);
            }
            Message::Done(Outcome::Teardown(Ok(()))) => self.feed(Event::JobDone),
            Message::Done(Outcome::Teardown(Err(steps))) => {
                self.fail("failed to clean up sandbox", steps);
                self.feed(Event::JobFailed);
            }
            Message::WhenIdle(waiting) => self.idle_waiters.push(waiting),
        }
    }

    fn retire(&mut self) {
        self.retired = true;
        if let Some(on_gone) = self.on_gone.take() {
            log::info!(sandbox = self.id(); "sandbox removed");
            on_gone(self.id());
        }
    }

    fn exited(&mut self, exit: Exit) {
        self.pause = None;
        self.feed(Event::Exited(exit));
    }

    fn feed(&mut self, event: Event) {
        let mut events = vec![event];
        while let Some(event) = events.pop() {
            for action in self.machine.on(event) {
                if let Some(event) = self.act(action) {
                    events.push(event);
                }
            }
        }
    }

    fn act(&mut self, action: Action) -> Option<Event> {
        match action {
            Action::Run(job) => self.run_job(job),
            Action::Publish => {
                let pid = self.pause.as_ref().map(|pause| pause.identity().pid);
                let machine = &self.machine;
                self.published.send_modify(|published| {
                    *published = Published {
                        phase: machine.phase(),
                        pid: pid.unwrap_or(published.pid),
                        exit: machine.exit(),
                        failures: machine.failures(),
                    };
                });
            }
            Action::ReportExit(exit) => {
                // Without a cause the cleanup finds the reason, which may block.
                if let Some(cause) = self.machine.cause() {
                    self.jobs.ended(exit, Some(cause));
                }
            }
            Action::Kill => {
                let pause = self.pause.clone()?;
                if let Err(step) = pause.kill() {
                    self.fail("failed to kill pause process", step.into());
                    return Some(Event::KillFailed);
                }
                if pause.may_be_frozen() {
                    let to_self = self.to_self.clone();
                    drop(tokio::spawn(async move {
                        if let Err(step) = jobs::thaw(pause).await {
                            let _ = to_self.unbounded_send(Message::ThawFailed(step));
                        }
                    }));
                }
            }
            Action::Watch => self.watch(),
            Action::Succeed(Rpc::Start) => return self.start_succeeded(),
            Action::Succeed(rpc) => {
                self.reply_all(rpc, || Ok(()));
            }
            Action::Fail(rpc) => {
                let (id, steps) = (self.id().to_owned(), self.failed.clone());
                let error = Error::Failed { id, rpc: rpc.name(), steps };
                self.reply_all(rpc, || Err(error.clone()));
            }
            Action::Refuse(rpc) => {
                if let Some((_, reply)) = self.replies.pop() {
                    let _ = reply.send(Err(Error::State {
                        id: self.id().to_owned(),
                        rpc: rpc.name(),
                        state: self.machine.phase().name(),
                    }));
                }
            }
            Action::RetryAfter(failures) => {
                let delay = exit::CLEANUP.delay(failures);
                if self.machine.phase() == Phase::Unknown {
                    log::warn!(
                        sandbox = self.id(), failures = failures;
                        "cannot determine whether the pause process runs; retrying in {} s: {}",
                        delay.as_secs(), self.failed
                    );
                } else {
                    log::warn!(
                        sandbox = self.id(), failures = failures;
                        "sandbox cleanup failed; retrying in {} s", delay.as_secs()
                    );
                    self.jobs.telemetry().cleanup_failures.inc();
                }
                self.alarm = Some(Instant::now() + delay);
            }
            Action::Retire => self.retire(),
        }
        None
    }

    fn watch(&mut self) {
        if let Some(pause) = self.pause.clone() {
            self.exit.arm(pause);
        }
    }

    /// Runs a job, a task of its own. A panic in it is a failed job, not the end of the sandbox.
    fn run_job(&mut self, job: Job) {
        let (jobs, to_self) = (self.jobs.clone(), self.to_self.clone());
        let (Published { pid, exit, .. }, cause) = (*self.published.borrow(), self.machine.cause());
        if job == Job::Start {
            self.start_began = Some(Instant::now());
        }
        self.job = Some(tokio::spawn(async move {
            let outcome = match job {
                Job::Start => {
                    let failed = |panic: StepError| {
                        Err(StartFailure { left: panic.clone().into(), step: panic })
                    };
                    Outcome::Start(guard(jobs.start()).await.unwrap_or_else(failed))
                }
                Job::Adopt => {
                    Outcome::Adopt(guard(jobs.adopt()).await.unwrap_or_else(Adoption::Unknown))
                }
                Job::Cleanup => {
                    let done = guard(jobs.cleanup(pid, exit, cause)).await;
                    // CRI calls no Stop for a pod whose pause process has ended by itself.
                    jobs.dismiss_shim();
                    Outcome::Teardown(done.unwrap_or_else(|panic| Err(panic.into())))
                }
                Job::Remove => Outcome::Teardown(
                    guard(jobs.remove()).await.unwrap_or_else(|panic| Err(panic.into())),
                ),
            };
            let _ = to_self.unbounded_send(Message::Done(outcome));
        }));
    }

    /// Answers all who wait for `rpc`; true when one of them heard it.
    fn reply_all(&mut self, rpc: Rpc, result: impl Fn() -> Result<(), Error>) -> bool {
        let answered = self.replies.extract_if(.., |(asked, _)| *asked == rpc);
        answered.fold(false, |heard, (_, reply)| reply.send(result()).is_ok() || heard)
    }

    /// Logs steps that failed, and keeps them for the callers who wait for them.
    fn fail(&mut self, what: &str, steps: StepErrors) {
        for step in &steps {
            log::error!(sandbox = self.id(); "{what}: {step}");
        }
        self.failed = steps;
    }

    /// Answers the caller of Start, then logs the start: it is not to wait for the log.
    fn start_succeeded(&mut self) -> Option<Event> {
        let heard = self.reply_all(Rpc::Start, || Ok(()));
        let took = self.start_began.take().map_or(Duration::ZERO, |began| began.elapsed());
        log::info!(
            sandbox = self.id(),
            pid = self.published.borrow().pid,
            duration_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
            "sandbox started"
        );
        if heard {
            return None;
        }
        log::warn!(sandbox = self.id(); "Start cancelled by caller; removing sandbox");
        Some(Event::StartCallerGone)
    }

    fn id(&self) -> &str {
        self.jobs.id()
    }
}

async fn guard<T>(job: impl Future<Output = T>) -> Result<T, StepError> {
    AssertUnwindSafe(job).catch_unwind().await.map_err(|panic| pool::panicked(&*panic))
}
