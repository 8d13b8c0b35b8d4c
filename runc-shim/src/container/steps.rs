//! The beginning and the end of each step in which a container or one of its execs is.
//!
//! A caller sends the time for which it waits (`timeout_nano`), and does not read the result after
//! it. A command of the runtime that hangs would otherwise keep its container busy forever: an OCI
//! hook, a file system or a stopped process may hang without a limit. At the deadline the command
//! is killed, with all processes that descend from it, and the call fails as it does if the command
//! fails. The end of a connection ends only the wait for readers: a restarted containerd finds what
//! the interrupted call has completed, and a command that is killed leaves more to clean up than
//! one that ends.

use std::os::fd::{AsFd as _, BorrowedFd};
use std::time::{Duration, Instant};

use super::Container;
use super::launch::Launch;
use super::step::{Caller, Pending, Step, Wait};
use crate::children::Child;
use crate::container::state::State;
use crate::error::{Code, Error};
use crate::exits::Exit;
use crate::io::logger::Logger;
use crate::log;
use crate::process_key::ProcessKey;
use crate::reactor::Source;
use crate::root::helper::{self, Action};
use crate::runtime::Place;
use crate::runtime::command::Command;
use crate::services::Services;
use crate::ttrpc::response::{self, Answer};
use crate::ttrpc::server::Reply;

/// How long commands may delay the announcement of a container's exit. An exec may have succeeded
/// before the exit: its command has the time to end by itself.
const AFTER_EXIT: Duration = Duration::from_secs(30);

impl Container {
    /// The container as the one that a call is for.
    pub(super) fn caller(&self, reply: Option<Reply>) -> Caller {
        Caller { key: self.key.clone(), reply }
    }

    /// Starts a command of the runtime, whose end is that of `step`.
    pub(super) fn run(
        &mut self,
        services: &mut Services,
        caller: &Caller,
        step: Step,
        arguments: &[&str],
    ) -> Answer {
        self.run_in(services, caller, step, arguments, Place::default())
    }

    /// Starts a command of the runtime with these descriptors.
    pub(super) fn run_in(
        &mut self,
        services: &mut Services,
        caller: &Caller,
        step: Step,
        arguments: &[&str],
        place: Place<'_>,
    ) -> Answer {
        if step.is_limited() {
            check_deadline(caller.reply)?;
        }
        // The working directory identifies the commands of a dead shim to `cleanup::delete`.
        let bundle = self.open_bundle().ok();
        let here = bundle.as_ref().map(|bundle| bundle.as_fd());
        let place = Place { directory: place.directory.or(here), ..place };
        let command = self.runtime.start(arguments, &place)?;
        self.begin(services, caller, step, command)
    }

    /// Starts a helper, whose end is that of `step`.
    pub(super) fn run_helper(
        &mut self,
        services: &mut Services,
        caller: &Caller,
        step: Step,
        action: Action,
        input_file: Option<BorrowedFd<'_>>,
    ) -> Answer {
        let (namespace, id) = (&services.namespace, &self.key.id);
        let command = helper::start(action, namespace, id, &self.bundle, input_file)?;
        self.begin(services, caller, step, command)
    }

    fn begin(
        &mut self,
        services: &mut Services,
        caller: &Caller,
        step: Step,
        command: Command,
    ) -> Answer {
        services.children.add(command.pid, Child::Command(caller.key.clone()));
        self.wait_for(Wait::Command(command), caller, step)
    }

    /// Waits until a logging program that was just started is ready.
    pub(super) fn begin_logger(
        &mut self,
        services: &mut Services,
        caller: &Caller,
        step: Step,
        logger: Logger,
    ) -> Answer {
        let source = Source::Child(response::unsigned(logger.pid));
        services.children.add(logger.pid, Child::Logger(caller.key.clone()));
        services.watch(&logger.ready, source)?;
        self.wait_for(Wait::Logger(logger), caller, step)
    }

    pub(super) fn wait_for(&mut self, wait: Wait, caller: &Caller, step: Step) -> Answer {
        let limit = step.own_limit().map(|time| Instant::now() + time);
        let caller = caller.clone();
        self.pending.push(Pending { wait, step, caller, limit, was_killed: false });
        Ok(None)
    }

    fn take_pending(&mut self, is_wanted: impl Fn(&Pending) -> bool) -> Option<Pending> {
        let at = self.pending.iter().position(is_wanted)?;
        let pending = self.pending.remove(at);
        if self.pending.is_empty() {
            // A container without steps takes no memory for them.
            self.pending = Vec::new();
        }
        Some(pending)
    }

    /// Handles the exit of a command or helper: continues with the next step.
    pub fn command_ended(&mut self, services: &mut Services, pid: i32, exit: Exit) {
        let Some(pending) = self.take_pending(|it| it.has_pid(pid)) else { return };
        let Pending { wait, step, caller, limit, was_killed } = pending;
        let Wait::Command(command) = wait else { return };
        let mut done = match exit.status {
            0 => Ok(()),
            status => {
                let what = step.failure(&caller.key, self.state);
                let e = command.failure(what, status, Some(&self.bundle));
                Err(if was_killed { killed(&e) } else { e })
            }
        };
        if let Step::Launch(_) = &step
            && caller.key == self.key
            && self.state == State::New
        {
            // A command may also succeed at the moment at which it is killed.
            done =
                done.and_then(|()| check_deadline(caller.reply)).and_then(|()| check_limit(limit));
        }
        // A signal may also be one of another program, such as the kernel's OOM killer.
        let was_interrupted = was_killed || exit.is_by_signal();
        if matches!(step, Step::Launch(Launch::Creating(..))) && caller.key == self.key {
            self.may_have_left_cgroup |= was_interrupted;
        }
        let may_be_frozen = was_interrupted && step.may_freeze();
        let answer = self.next(services, &caller, step, done, was_interrupted);
        if may_be_frozen {
            self.thaw_running();
        }
        self.end_call(services, &caller, answer);
    }

    /// Continues after a step has ended.
    fn next(
        &mut self,
        services: &mut Services,
        caller: &Caller,
        step: Step,
        done: Result<(), Error>,
        was_interrupted: bool,
    ) -> Answer {
        match step {
            Step::Launch(step) => self.launch_next(services, caller, step, done),
            Step::Start => self.start_ended(services, done, was_interrupted),
            Step::Remove(part, first) => self.remove_next(services, caller, part, first, done),
            Step::Kill(signal) => self.kill_ended(signal, done),
            Step::KillRemaining => {
                self.remaining_killed(services, done);
                Ok(None)
            }
            Step::Pause => self.pause_ended(services, done),
            Step::Resume => self.resume_ended(services, done, was_interrupted),
            Step::Update => done.and_then(|()| response::empty()),
            Step::Checkpoint { path, work } => self.checkpoint_ended(services, &path, work, done),
        }
    }

    /// Answers the caller of a step that has ended, and has the calls executed that waited for it.
    fn end_call(&mut self, services: &mut Services, caller: &Caller, answer: Answer) {
        if let Some(reply) = caller.reply {
            services.respond(reply, answer);
        }
        self.release(services, &caller.key);
    }

    /// Whether a step waits for this command or logging program.
    pub fn awaits(&self, pid: i32) -> bool {
        self.pending.iter().any(|pending| pending.has_pid(pid))
    }

    /// Continues when a logging program has reported that it is ready, or has failed.
    pub fn logger_ready(&mut self, services: &mut Services, pid: i32) {
        let Some(pending) = self.pending.iter().find(|pending| pending.has_pid(pid)) else {
            return;
        };
        if let Wait::Logger(logger) = &pending.wait
            && let Some(ready) = logger.is_ready()
        {
            self.logger_done(services, pid, ready);
        }
    }

    fn logger_done(&mut self, services: &mut Services, pid: i32, ready: Result<(), Error>) {
        let Some(Pending { step, caller, limit, .. }) = self.take_pending(|it| it.has_pid(pid))
        else {
            return;
        };
        let Step::Launch(step) = step else { return };
        // It may be ready at the moment at which a Delete cancels the creation.
        let ready = ready.and_then(|()| check_limit(limit));
        // A logging program that has exited was reaped: its pid may have been reused.
        let is_logger = matches!(services.children.find(pid), Some(Child::Logger(..)));
        if ready.is_err() && is_logger {
            services.children.end_logger(pid);
        }
        if let Ok(process) = self.process(&caller.key) {
            process.logger = is_logger.then_some(pid);
        }
        let answer = self.launch_next(services, &caller, step, ready);
        self.end_call(services, &caller, answer);
    }

    /// Kills the commands whose time is over, fails the starts whose logging programs are not ready
    /// in time, and continues those that have readers or no longer wait for them.
    pub(super) fn end_late_steps(&mut self, services: &mut Services, now: Instant) {
        let (mut late, mut ready) = (Vec::new(), Vec::new());
        for pending in self.pending.iter_mut().filter(|pending| pending.is_late(now)) {
            match &mut pending.wait {
                Wait::Command(command) => {
                    let pid = command.pid;
                    pending.kill(pid);
                }
                Wait::Logger(logger) => late.push(logger.pid),
                Wait::Readers(readers) => {
                    // A caller that is gone, such as a containerd that was killed, opens nothing.
                    let is_gone = pending.caller.reply.is_some_and(|reply| {
                        reply.is_late(now) || !services.server.is_connected(reply)
                    });
                    if pending.limit.is_some() || is_gone || readers.check(now) {
                        ready.push(pending.caller.key.clone());
                    }
                }
            }
        }
        for key in ready {
            self.readers_done(services, &key);
        }
        for pid in late {
            let e = Error::new(Code::DEADLINE_EXCEEDED, "logging binary is not ready in time");
            self.logger_done(services, pid, Err(e));
        }
    }

    /// Continues the creation of a process that no longer waits for readers, if it is not
    /// cancelled.
    fn readers_done(&mut self, services: &mut Services, key: &ProcessKey) {
        let awaits = |it: &Pending| matches!(it.wait, Wait::Readers(_)) && it.caller.key == *key;
        let Some(Pending { wait, step, caller, limit, .. }) = self.take_pending(awaits) else {
            return;
        };
        let (Wait::Readers(readers), Step::Launch(step)) = (wait, step) else { return };
        let has_none = !readers.are_there();
        // Until the streams have the FIFOs open, `readers` has.
        let answer = self.launch_next(services, &caller, step, check_limit(limit));
        if has_none && answer.is_ok() {
            let id = &key.id;
            log::warn(format_args!("container {id}: created a process whose output has no reader"));
        }
        self.end_call(services, &caller, answer);
    }

    /// Cancels the creation for a Delete, which is queued: containerd deletes a container whose
    /// Create it has given up, and would not know of one that is created after that. The time of
    /// the step is over, and no other begins.
    pub(super) fn cancel_creation(&mut self) {
        for pending in self.pending.iter_mut().filter(|pending| pending.caller.key == self.key) {
            pending.limit = Some(Instant::now());
        }
    }

    /// Limits the commands that delay the announcement of the exit, after the first process has
    /// exited: the start of the container, in which crun and newer runc wait for the `poststart`
    /// hooks, the start of an exec, and the kill of the remaining processes.
    pub(super) fn limit_after_exit(&mut self) {
        let limit = Instant::now() + AFTER_EXIT;
        for pending in &mut self.pending {
            let is_exec = pending.caller.key != self.key
                && matches!(pending.step, Step::Launch(Launch::Creating(..)));
            if is_exec || matches!(pending.step, Step::Start | Step::KillRemaining) {
                pending.limit = Some(limit);
            }
            if let Wait::Readers(readers) = &mut pending.wait {
                // The start of the exec fails then.
                readers.give_up();
            }
        }
    }

    /// Fails the calls whose steps end with the container.
    pub(super) fn forget_steps(&mut self, services: &mut Services) {
        for pending in std::mem::take(&mut self.pending) {
            if let Some(reply) = pending.caller.reply {
                services.respond(reply, Err(super::missing()));
            }
        }
    }
}

/// Fails if the deadline of a call has passed. The caller of a Create has given up then, has
/// removed the bundle, and would not know of the container.
pub(super) fn check_deadline(reply: Option<Reply>) -> Result<(), Error> {
    check_limit(reply.and_then(|reply| reply.deadline()))
}

/// Fails if this time has passed.
fn check_limit(limit: Option<Instant>) -> Result<(), Error> {
    match limit.is_some_and(|at| at <= Instant::now()) {
        true => Err(Error::deadline_passed()),
        false => Ok(()),
    }
}

/// The error of a command that was killed at its deadline, or because its container is deleted.
fn killed(e: &Error) -> Error {
    Error::new(Code::DEADLINE_EXCEEDED, format!("{e}; killed: the command timed out"))
}
