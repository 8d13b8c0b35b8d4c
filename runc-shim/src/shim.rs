//! The shim: the main loop, and the way of each call to its container.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use containerd_shim_protos::api;

use crate::children::Child;
use crate::container::{self, Container};
use crate::error::{Code, Context as _, Error};
use crate::exits::{self, Exit};
use crate::log;
use crate::reactor::Source;
use crate::sandbox::Sandbox;
use crate::services::Services;
use crate::signals::Signals;
use crate::ttrpc::pause_process::PauseProcess;
use crate::ttrpc::request::{self, Method, Request};
use crate::ttrpc::response::{self, Answer};
use crate::ttrpc::server::{Call, Listener, Reply};

/// How long the shutdown waits until containerd has received the last events, and until running
/// commands of the runtime have ended.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum number of exits that are handled before other work.
const MAX_EXITS_AT_ONCE: usize = 256;

/// The shim.
#[derive(Debug)]
pub struct Shim {
    /// The pod's sandbox id; `None`: the sandbox is a container.
    id: Option<String>,
    services: Services,
    /// The containers by their ids.
    containers: BTreeMap<String, Container>,
    /// The pod's sandbox, once the daemon has set its pause process.
    sandbox: Option<Sandbox>,
    /// SIGCHLD, SIGTERM and SIGINT.
    signals: Signals,
    /// There may be unhandled exits although no SIGCHLD is pending.
    more_exits: bool,
    /// Shutdown was requested: the shim exits when all work is done, at the latest at this time.
    shutdown_deadline: Option<Instant>,
}

impl Shim {
    /// A shim that serves on a listening socket and sends events to the socket at `events`.
    ///
    /// # Errors
    /// The kernel refuses a descriptor.
    pub fn new(
        listener: Listener,
        signals: Signals,
        namespace: String,
        id: Option<String>,
        events: Option<String>,
    ) -> Result<Self, Error> {
        let services = Services::new(listener, namespace, events)?;
        services.watch(&signals, Source::Signals).context("watch signals")?;
        let (containers, sandbox) = Default::default();
        let (more_exits, shutdown_deadline) = Default::default();
        Ok(Self { id, services, containers, sandbox, signals, more_exits, shutdown_deadline })
    }

    /// Runs until it is shut down.
    ///
    /// # Errors
    /// epoll or a copier thread has failed.
    pub fn run(mut self) -> Result<(), Error> {
        while !self.may_exit() {
            let until = self.deadline();
            let ready = self.services.reactor.wait(until).context("wait")?;
            for source in ready {
                self.ready(source);
            }
            for key in self.services.copiers.take_ended().context("copy streams")? {
                self.with(&key.id, |it, services| it.output_ended(services, &key));
            }
            self.handle_timeouts();
        }
        Ok(())
    }

    fn may_exit(&self) -> bool {
        let is_idle = self.services.is_idle();
        self.shutdown_deadline.is_some_and(|at| is_idle || at <= Instant::now())
    }

    /// Requests the shutdown: the shim exits when all events, answers and streams are delivered and
    /// no command runs, or after [`SHUTDOWN_TIMEOUT`]. Callers that connect from now on wait for
    /// the next shim.
    fn begin_shutdown(&mut self) {
        self.services.server.stop_accepting(&self.services.reactor);
        self.shutdown_deadline.get_or_insert(Instant::now() + SHUTDOWN_TIMEOUT);
    }

    /// Has a container do something, and then executes the calls that have waited for it.
    fn with(&mut self, id: &str, work: impl FnOnce(&mut Container, &mut Services)) {
        if let Some(container) = self.containers.get_mut(id) {
            work(container, &mut self.services);
        }
        self.tidy(id);
        self.run_released();
    }

    /// Removes a container that is deleted.
    fn tidy(&mut self, id: &str) {
        if self.containers.get(id).is_some_and(Container::is_gone) {
            self.containers.remove(id);
        }
    }

    fn run_released(&mut self) {
        loop {
            let calls = self.services.take_released();
            if calls.is_empty() {
                return;
            }
            for (reply, request) in calls {
                self.dispatch(reply, request);
            }
        }
    }

    fn ready(&mut self, source: Source) {
        match source {
            Source::Listener => self.services.server.accept(&self.services.reactor),
            Source::Signals => self.signalled(),
            Source::Events => self.services.events.ready(&self.services.reactor),
            Source::Connection(id) => {
                for call in self.services.server.ready(id, &self.services.reactor) {
                    self.call(call);
                }
            }
            // `run` handles ended streams next; the copier threads handle the streams.
            Source::Copier | Source::Stream(_) => {}
            Source::Child(pid) => self.child_ready(pid),
            Source::PauseProcess => {
                if let Some(sandbox) = &mut self.sandbox {
                    sandbox.process_ready(&mut self.services);
                }
            }
        }
    }

    /// Handles a descriptor that belongs to the first process of a container, or to a logging
    /// program, which may have exited and been reaped.
    fn child_ready(&mut self, pid: u32) {
        let Ok(pid) = i32::try_from(pid) else { return };
        let mut all = self.containers.iter();
        let found = all.find(|(_, it)| it.watches_oom_kills(pid) || it.awaits(pid));
        let Some(id) = found.map(|(id, _)| id.clone()) else { return };
        self.with(&id, |it, services| match it.watches_oom_kills(pid) {
            true => it.oom_event(services),
            false => it.logger_ready(services, pid),
        });
    }

    /// Handles pending signals. On SIGTERM and SIGINT the shim shuts down; its containers keep
    /// running.
    fn signalled(&mut self) {
        if let Some(signal) = self.signals.take() {
            let left = self.containers.len();
            log::warn(format_args!("shim exits on {signal}; remaining containers: {left}"));
            self.begin_shutdown();
        }
        self.reap();
    }

    /// Handles at most [`MAX_EXITS_AT_ONCE`] exits, so that a container which causes exits faster
    /// than they are reaped does not block other work.
    fn reap(&mut self) {
        for _ in 0..MAX_EXITS_AT_ONCE {
            let Some((pid, exit)) = exits::next_exited() else {
                self.more_exits = false;
                return;
            };
            self.child_ended(pid, exit);
            exits::reap(pid);
        }
        self.more_exits = true;
    }

    fn child_ended(&mut self, pid: i32, exit: Exit) {
        match self.services.children.ended(pid, exit) {
            None => {}
            Some(Child::Command(key)) => {
                self.with(&key.id, |it, services| it.command_ended(services, pid, exit));
            }
            Some(Child::Process(key)) => {
                if key.exec.is_empty() {
                    self.count_oom_kills();
                }
                self.with(&key.id, |it, services| it.process_exited(services, &key, exit));
            }
            Some(Child::Logger(key)) => {
                self.with(&key.id, |it, services| it.logger_ended(services, &key, pid));
            }
        }
    }

    /// Announces the OOM kills that the containers' own cgroups have counted: they are not those of
    /// a container whose cgroup is gone.
    fn count_oom_kills(&mut self) {
        for container in self.containers.values_mut() {
            container.oom_event(&mut self.services);
        }
    }

    /// When [`Shim::handle_timeouts`] has work to do at the latest.
    fn deadline(&self) -> Option<Instant> {
        if self.more_exits {
            return Some(Instant::now());
        }
        let containers = self.containers.values().filter_map(Container::deadline).min();
        let server = self.services.server.deadline();
        let events = self.services.events.deadline();
        let all = [containers, server, events, self.shutdown_deadline];
        all.into_iter().flatten().min()
    }

    /// Handles all deadlines that have passed.
    fn handle_timeouts(&mut self) {
        let now = Instant::now();
        if self.more_exits {
            self.reap();
        }
        if self.services.server.deadline().is_some_and(|at| at <= now) {
            self.services.server.retry(&self.services.reactor);
        }
        if self.services.events.deadline().is_some_and(|at| at <= now) {
            self.services.events.retry(&self.services.reactor);
        }
        let is_due = |it: &Container| it.deadline().is_some_and(|at| at <= now);
        let due = self.containers.iter().filter(|(_, it)| is_due(it)).map(|(id, _)| id.clone());
        let due: Vec<String> = due.collect();
        for id in due {
            self.with(&id, |it, services| it.handle_timeouts(services, now));
        }
    }

    /// Decodes and executes a call.
    fn call(&mut self, call: Call) {
        let Call { reply, request } = call;
        let decoded = request::decode(&request.service, &request.method, &request.payload);
        drop(request);
        match decoded {
            Ok(request) => self.dispatch(reply, request),
            Err(e) => self.services.respond(reply, Err(e)),
        }
        self.run_released();
    }

    /// Executes a request and answers it, unless it is answered later.
    fn dispatch(&mut self, reply: Reply, request: Request) {
        // Nothing is done for a caller that has gone, also after a wait for something else.
        let answer = match reply.is_late(Instant::now()) {
            true => Err(Error::deadline_passed()),
            false => self.act(reply, request),
        };
        self.services.respond(reply, answer);
    }

    fn act(&mut self, reply: Reply, request: Request) -> Answer {
        let key = &request.key;
        let is_create = matches!(request.method, Method::Create(_));
        let is_of_sandbox = key.exec.is_empty() && self.id.as_ref() == Some(&key.id);
        match request.method {
            Method::SetPause(pause) => self.set_pause(pause),
            Method::Shutdown => self.shutdown(),
            Method::Connect => self.connect(&key.id),
            // The sandbox is not a container that the runtime could create.
            method if is_of_sandbox && (self.sandbox.is_some() || is_create) => {
                let unset = || Error::state("pause process not set");
                let sandbox = self.sandbox.as_mut().ok_or_else(unset)?;
                sandbox.call(&mut self.services, reply, method)
            }
            Method::Create(request) => self.create(reply, *request),
            method => {
                let id = key.id.clone();
                let container = self.containers.get_mut(&id).ok_or_else(container::missing)?;
                let request = Request { key: request.key, method };
                let answer = container.call(&mut self.services, reply, request);
                self.tidy(&id);
                answer
            }
        }
    }

    fn create(&mut self, reply: Reply, request: api::CreateTaskRequest) -> Answer {
        if self.shutdown_deadline.is_some() {
            return Err(Error::new(Code::UNAVAILABLE, "the shim is shutting down"));
        }
        self.remove_failed();
        if let Some(there) = self.containers.get(&request.id) {
            let what = if there.has_failed() { "is being removed" } else { "exists" };
            let message = format!("container {} {what}", request.id);
            return Err(Error::new(Code::ALREADY_EXISTS, message));
        }
        let id = request.id.clone();
        let mut container = Container::new(&request, &self.services.namespace)?;
        // Where there is a daemon.
        if self.id.is_some() {
            container.note_creation();
        }
        let answer = container.create(&mut self.services, reply, request.rootfs);
        if !container.is_gone() {
            self.containers.insert(id, container);
        }
        answer
    }

    /// Tries again to remove what failed creations have left.
    fn remove_failed(&mut self) {
        let failed = self.containers.iter().filter(|(_, it)| it.has_failed());
        let failed: Vec<String> = failed.map(|(id, _)| id.clone()).collect();
        for id in failed {
            self.with(&id, Container::remove_again);
        }
    }

    /// Sets the pause process of the sandbox. Succeeds if it is already set to the same process.
    fn set_pause(&mut self, pause: PauseProcess) -> Answer {
        if self.id.as_ref() != Some(&pause.id) {
            let reason = format!("{:?} is not the sandbox of this shim", pause.id);
            return Err(Error::new(Code::INVALID_ARGUMENT, reason));
        }
        if let Some(known) = &self.sandbox
            && known.keeps(&pause)?
        {
            return response::empty();
        }
        if self.containers.contains_key(&pause.id) {
            return Err(Error::new(Code::ALREADY_EXISTS, "a container has the sandbox's id"));
        }
        self.sandbox = Some(Sandbox::open(pause, &self.services.reactor)?);
        response::empty()
    }

    fn shutdown(&mut self) -> Answer {
        if self.containers.is_empty() && !self.sandbox.as_ref().is_some_and(Sandbox::runs) {
            self.begin_shutdown();
        }
        response::empty()
    }

    fn connect(&self, id: &str) -> Answer {
        let mut response = api::ConnectResponse::new();
        response.shim_pid = std::process::id();
        let container = self.containers.get(id).filter(|it| it.is_created());
        let sandbox = self.sandbox.as_ref().and_then(|sandbox| sandbox.task_pid(id));
        let pid = container.map(Container::pid).or(sandbox);
        response.task_pid = pid.unwrap_or_default();
        response::now(&response)
    }
}
