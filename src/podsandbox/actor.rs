//! The one task that owns a sandbox: it feeds the machine and carries out its actions.
//!
//! SandboxService come from callers and facts from jobs through one inbox; the end of the pause it waits for
//! itself. The owner never blocks: jobs are tasks of their own, one at a time, and report back.

use std::future::{Future, poll_fn};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::task::Poll;
use std::time::SystemTime;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::Error;
use super::board::{Publisher, Reader, board};
use super::inbox::{Inbox, Sender, inbox};
use super::jobs::{StartFailure, Work};
use super::machine::{Action, Event, Job, Machine, Phase, Verb};
use crate::error::StepError;
use crate::exit;
use crate::log_context::TraceId;
use crate::pool;
use crate::process::{Adoption, Exit, Process, UNKNOWN_EXIT};

/// The answer that a caller waits for.
pub type Reply = oneshot::Sender<Result<(), Error>>;

/// What readers see of a sandbox; they never ask the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Published {
    /// Where it stands.
    pub phase: Phase,
    /// Process id of the pause on the node; 0 where there was none.
    pub pid: u32,
    /// How the pause ended.
    pub exit: Option<Exit>,
    /// Cleanups that have failed in a row and are tried again.
    pub failures: u32,
}

/// What reaches the owner.
#[derive(Debug)]
pub enum Message {
    /// A caller asks for a verb; the trace that the call belongs to.
    Ask(Verb, Option<TraceId>, Reply),
    /// The pause has ended.
    Exited(Exit),
    /// The pod's shim has died with containers in it.
    ShimDied,
    /// A job has ended.
    Done(Outcome),
    /// Somebody wants to know when nothing is under way.
    WhenAtRest(oneshot::Sender<()>),
}

/// How a job ended.
#[derive(Debug)]
pub enum Outcome {
    /// The start job.
    Start(Result<Arc<dyn Process>, StartFailure>),
    /// The adoption.
    Adopt(Adoption),
    /// Cleanup or removal.
    Rest(Result<(), Vec<StepError>>),
}

/// How a sandbox enters its life: newly created, or as recovery found it.
#[derive(Debug)]
pub enum Entry {
    /// Created, never started.
    Created,
    /// Its pause lives.
    Ready(Arc<dyn Process>),
    /// Its pause has ended.
    NotReady {
        /// The pause that was; 0 where there was none.
        pid: u32,
        /// How it ended.
        exit: Exit,
    },
    /// Its start was cut off by the end of the daemon, and recovery could not undo it yet.
    CutOff,
    /// Nobody could tell.
    Unknown {
        /// The recorded pause; 0 where the record does not tell.
        pid: u32,
    },
}

/// Frees the id that it is told.
type OnGone = Box<dyn FnOnce(&str) + Send>;

/// The owner of one sandbox.
pub struct Owner {
    work: Arc<Work>,
    machine: Machine,
    inbox: Inbox<Message>,
    to_self: Sender<Message>,
    published: Publisher<Published>,
    pause: Option<Arc<dyn Process>>,
    /// The end of the pause, as long as it is waited for.
    ending: Option<BoxFuture<'static, Exit>>,
    replies: Vec<(Verb, Reply)>,
    at_rest: Vec<oneshot::Sender<()>>,
    /// The steps that failed last.
    failure: Vec<StepError>,
    /// When the next retry is due, or a sandbox that was never started is given up.
    alarm: Option<Instant>,
    on_gone: Option<OnGone>,
    retired: bool,
    /// Its shim has died with containers in it, and whether there is a pause is not known.
    bereaved: bool,
    /// The job that was begun last.
    job: Option<JoinHandle<()>>,
}

/// How others reach an owner.
#[derive(Clone, Debug)]
pub struct Handle {
    /// Into the inbox.
    pub inbox: Sender<Message>,
    /// What is published.
    pub published: Reader<Published>,
}

impl Owner {
    /// Starts the owner's task. `abandoned` is when a sandbox that was not started until then is
    /// removed; `on_gone` frees the id that it is told.
    pub fn spawn(
        work: Arc<Work>,
        entry: Entry,
        abandoned: Option<Instant>,
        on_gone: impl FnOnce(&str) + Send + 'static,
    ) -> Handle {
        let cut_off = matches!(entry, Entry::CutOff);
        let (phase, pid, exit, pause) = match entry {
            Entry::Created => (Phase::Created, 0, None, None),
            Entry::Ready(pause) => (Phase::Ready, pause.identity().pid, None, Some(pause)),
            Entry::NotReady { pid, exit } => (Phase::NotReady, pid, Some(exit), None),
            Entry::CutOff => {
                // Nobody ever heard of this pause; whoever waits must not wait for ever.
                let exit = Exit { status: UNKNOWN_EXIT, at: SystemTime::now() };
                (Phase::NotReady, 0, Some(exit), None)
            }
            Entry::Unknown { pid } => (Phase::Unknown, pid, None, None),
        };
        let (to_self, inbox) = inbox();
        let (published, seen) = board(Published { phase, pid, exit, failures: 0 });
        let handle = Handle { inbox: to_self.clone(), published: seen };
        let mut owner = Self {
            work,
            machine: Machine::new(phase),
            inbox,
            to_self,
            published,
            pause,
            ending: None,
            replies: Vec::new(),
            at_rest: Vec::new(),
            failure: Vec::new(),
            alarm: abandoned.filter(|_| phase == Phase::Created),
            on_gone: Some(Box::new(on_gone)),
            retired: false,
            bereaved: false,
            job: None,
        };
        tokio::spawn(async move {
            match phase {
                Phase::Ready => owner.watch(),
                Phase::NotReady if cut_off => owner.feed(Event::Asked(Verb::Shutdown)),
                // The cleanup may have been cut off; all of it may be done twice.
                Phase::NotReady => owner.feed(Event::RetryDue),
                _ => {}
            }
            let mut faults = 0;
            while let Err(panic) = AssertUnwindSafe(owner.run()).catch_unwind().await {
                faults += 1;
                Box::pin(owner.begin_again(&pool::panicked(&*panic), faults)).await;
            }
        });
        handle
    }

    /// After a panic of its own, whatever it was in the middle of: calls that wait fail with the
    /// fault, and the pause is looked for as recovery does. A sandbox whose pause lives must never
    /// look gone.
    async fn begin_again(&mut self, fault: &StepError, faults: u32) {
        log::error!(sandbox = self.id(); "a fault of its owner; its pause is looked for again: {fault}");
        if self.retired {
            return self.retire();
        }
        (self.pause, self.ending, self.alarm) = (None, None, None);
        tokio::time::sleep(exit::CLEANUP.delay(faults)).await;
        // One job at a time; what it has done is found again.
        if let Some(job) = self.job.take() {
            let _ = job.await;
        }
        let mut asked = std::mem::take(&mut self.replies);
        while let Some(message) =
            poll_fn(|cx| Poll::Ready(self.inbox.poll_recv(cx))).map(ready).await
        {
            match message {
                Message::Ask(verb, _, reply) => asked.push((verb, reply)),
                Message::ShimDied => self.bereaved = true,
                Message::WhenAtRest(waiting) => self.at_rest.push(waiting),
                Message::Exited(_) | Message::Done(_) => {}
            }
        }
        for (verb, reply) in asked {
            let (id, reason) = (self.id().to_owned(), fault.to_string());
            let _ = reply.send(Err(Error::Fault { id, verb: name(verb), reason }));
        }
        for action in self.machine.look_again() {
            self.act(action);
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
                        let created = self.machine.phase() == Phase::Created;
                        self.feed(if created { Event::Abandoned } else { Event::RetryDue });
                        continue;
                    }
                },
            };
            self.take(message);
            if self.machine.at_rest() {
                self.work.subject.follow(None);
                for waiting in self.at_rest.drain(..) {
                    let _ = waiting.send(());
                }
            }
        }
    }

    /// The next message, or the end of the pause. Nothing is lost when the future is dropped, and
    /// there is hardly anything in it, as it is what every sandbox waits in.
    fn next(&mut self) -> impl Future<Output = Message> {
        poll_fn(|cx| {
            if let Some(Poll::Ready(exit)) =
                self.ending.as_mut().map(|ending| ending.poll_unpin(cx))
            {
                self.ending = None;
                return Poll::Ready(Message::Exited(exit));
            }
            self.inbox.poll_recv(cx)
        })
    }

    fn take(&mut self, message: Message) {
        if matches!(message, Message::Done(_)) {
            // The handle of a task that has ended keeps the task's memory, for as long as the pod
            // lives.
            self.job = None;
        }
        match message {
            Message::Ask(verb, trace, reply) => {
                self.work.subject.follow(trace);
                self.replies.push((verb, reply));
                self.feed(Event::Asked(verb));
            }
            Message::Exited(exit) => self.exited(exit),
            // The pause's end is the sandbox's, as with any other; without a pause it has ended
            // already.
            Message::ShimDied => {
                // It is not known yet whether there is a pause.
                self.bereaved = self.machine.phase() == Phase::Unknown;
                self.end_with_shim();
            }
            Message::Done(Outcome::Start(Ok(pause))) => {
                self.pause = Some(pause);
                self.alarm = None;
                self.feed(Event::Started);
            }
            Message::Done(Outcome::Start(Err(failure))) => {
                self.failure = vec![failure.step];
                self.log_failure("start");
                let clean = failure.left.is_empty();
                for step in failure.left {
                    log::warn!(sandbox = self.id(); "start: undo: {step}");
                }
                self.feed(Event::StartFailed { clean });
            }
            Message::Done(Outcome::Adopt(Adoption::Alive(pause))) => {
                self.pause = Some(Arc::from(pause));
                self.feed(Event::AdoptedAlive);
                if std::mem::take(&mut self.bereaved) {
                    self.end_with_shim();
                }
            }
            Message::Done(Outcome::Adopt(Adoption::Dead(exit))) => self.exited(exit),
            Message::Done(Outcome::Adopt(Adoption::Unknown(step))) => {
                self.failure = vec![step];
                self.act(Action::Publish);
                self.feed(Event::AdoptFailed);
            }
            Message::Done(Outcome::Rest(Ok(()))) => {
                self.published.change(|published| published.failures = 0);
                self.feed(Event::JobDone);
            }
            Message::Done(Outcome::Rest(Err(steps))) => {
                self.failure = steps;
                self.log_failure("cleanup");
                self.feed(Event::JobFailed);
            }
            Message::WhenAtRest(waiting) => self.at_rest.push(waiting),
        }
    }

    fn end_with_shim(&self) {
        if let Some(Err(step)) = self.pause.as_ref().map(|pause| pause.kill()) {
            log::error!(sandbox = self.id(); "end it with its shim: {step}");
        }
    }

    fn retire(&mut self) {
        self.retired = true;
        if let Some(on_gone) = self.on_gone.take() {
            on_gone(self.id());
        }
    }

    fn exited(&mut self, exit: Exit) {
        let seen = self.published.get().exit.is_none();
        if seen {
            // Both at once: nobody is to see an exit and a sandbox that is ready.
            self.published.change(|published| {
                published.exit = Some(exit);
                published.phase = Phase::NotReady;
            });
        }
        self.pause = None;
        self.feed(Event::Exited);
        // Behind the beginning of the cleanup, which somebody may wait for.
        if seen {
            log::info!(sandbox = self.id(), status = exit.status; "the pause has ended");
            self.work.telemetry.pause_exits.inc();
        }
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
                let phase = self.machine.phase();
                self.published.change(|published| {
                    published.phase = phase;
                    published.pid = pid.unwrap_or(published.pid);
                });
            }
            Action::Kill => {
                if let Some(Err(step)) = self.pause.as_ref().map(|pause| pause.kill()) {
                    self.failure = vec![step];
                    self.log_failure("kill");
                    return Some(Event::KillFailed);
                }
            }
            Action::Watch => self.watch(),
            Action::Succeed(verb) => {
                let heard = self.answer(verb, |_| Ok(()));
                if verb == Verb::Start && !heard {
                    log::warn!(sandbox = self.id(); "start: the caller has given up, the sandbox is removed");
                    return Some(Event::StartUnheard);
                }
            }
            Action::Fail(verb) => {
                let error = self.error(verb);
                self.answer(verb, |_| Err(error.clone()));
            }
            Action::Refuse(verb) => {
                if let Some((_, reply)) = self.replies.pop() {
                    let _ = reply.send(Err(Error::State {
                        id: self.id().to_owned(),
                        verb: name(verb),
                        state: self.machine.phase().name(),
                    }));
                }
            }
            Action::RetryAfter(failures) => {
                let delay = exit::CLEANUP.delay(failures);
                log::warn!(sandbox = self.id(), failures = failures; "cleanup is tried again in {} s", delay.as_secs());
                self.work.telemetry.cleanup_failures.inc();
                self.published.change(|published| published.failures = failures);
                self.alarm = Some(Instant::now() + delay);
            }
            Action::Retire => self.retire(),
        }
        None
    }

    fn watch(&mut self) {
        self.ending = self.pause.clone().map(exit::end_of);
    }

    /// Runs a job, a task of its own. A panic in it is a failed job, not the end of the sandbox.
    fn run_job(&mut self, job: Job) {
        let (work, to_self) = (self.work.clone(), self.to_self.clone());
        let Published { pid, exit, .. } = self.published.get();
        self.job = Some(tokio::spawn(async move {
            work.begin().await;
            let outcome = match job {
                Job::Start => {
                    let failed =
                        |step: StepError| Err(StartFailure { left: vec![step.clone()], step });
                    Outcome::Start(guard(work.start()).await.unwrap_or_else(failed))
                }
                Job::Adopt => {
                    Outcome::Adopt(guard(work.adopt()).await.unwrap_or_else(Adoption::Unknown))
                }
                Job::Cleanup => Outcome::Rest(
                    guard(work.cleanup(pid, exit)).await.unwrap_or_else(|s| Err(vec![s])),
                ),
                Job::Remove => {
                    Outcome::Rest(guard(work.remove()).await.unwrap_or_else(|s| Err(vec![s])))
                }
            };
            let _ = to_self.send(Message::Done(outcome));
        }));
    }

    /// Answers all who wait for `verb`; true when one of them heard it.
    fn answer(&mut self, verb: Verb, result: impl Fn(Verb) -> Result<(), Error>) -> bool {
        let mut heard = false;
        let mut rest = Vec::with_capacity(self.replies.len());
        for (asked, reply) in self.replies.drain(..) {
            if asked == verb {
                heard |= reply.send(result(verb)).is_ok();
            } else {
                rest.push((asked, reply));
            }
        }
        self.replies = rest;
        heard
    }

    fn error(&self, verb: Verb) -> Error {
        let (id, verb) = (self.id().to_owned(), name(verb));
        match self.failure.as_slice() {
            [step] => Error::Step { id, verb, step: step.clone() },
            steps => Error::Steps { id, verb, steps: steps.to_vec() },
        }
    }

    fn log_failure(&self, what: &str) {
        for step in &self.failure {
            log::error!(sandbox = self.id(); "{what}: {step}");
        }
    }

    fn id(&self) -> &str {
        &self.work.site.id
    }
}

fn ready<T>(poll: Poll<T>) -> Option<T> {
    match poll {
        Poll::Ready(value) => Some(value),
        Poll::Pending => None,
    }
}

/// The name of the RPC in messages.
pub fn name(verb: Verb) -> &'static str {
    match verb {
        Verb::Start => "start",
        Verb::Stop => "stop",
        Verb::Shutdown => "shutdown",
    }
}

async fn guard<T>(job: impl Future<Output = T>) -> Result<T, StepError> {
    AssertUnwindSafe(job).catch_unwind().await.map_err(|panic| pool::panicked(&*panic))
}

/// When a sandbox that was created at `created_at` and never started is given up.
pub fn abandoned_at(created_at: SystemTime, after: std::time::Duration) -> Instant {
    let age = created_at.elapsed().unwrap_or_default();
    Instant::now() + after.saturating_sub(age)
}
