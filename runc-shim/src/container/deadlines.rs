//! Deadlines of calls. A caller sends the time for which it waits (`timeout_nano`), and does not
//! read the result after it. A command of the runtime that hangs would otherwise keep its container
//! busy forever: an OCI hook, a file system or a stopped process may hang without a limit.
//!
//! At the deadline the command is killed, with all processes that descend from it, and the call
//! fails as it does if the command fails. A call that waits for something else is only answered.
//! Commands that delay the announcement of an exit also have a limit of their own. The limit of a
//! command that creates a container passes with a Delete of the container.
//! The end of a connection changes nothing: a restarted containerd finds what the interrupted call
//! has completed, and a command that is killed leaves more to clean up than one that ends.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use rustix::process::{Signal, pidfd_send_signal};

use crate::container::Container;
use crate::error::{Code, Error};
use crate::log;
use crate::root::mark;
use crate::runtime::descendants;
use crate::runtime::job::{Job, Purpose};
use crate::shim::Shim;
use crate::sys;
use crate::ttrpc::request::Request;
use crate::ttrpc::server::Reply;

/// How long commands may delay the announcement of a container's exit. An exec may have succeeded
/// before the exit: its command has the time to end by itself.
const AFTER_EXIT: Duration = Duration::from_secs(30);

impl Shim {
    /// The next deadline of a pending call.
    pub fn call_deadline(&self) -> Option<Instant> {
        let jobs = self.jobs.values().filter_map(Job::deadline);
        let sandbox = self.sandbox.iter().flat_map(|sandbox| &sandbox.waiters);
        let waiting = self.containers.values().flat_map(waiting).chain(sandbox);
        jobs.chain(waiting.filter_map(Reply::deadline)).min()
    }

    /// Limits the commands that delay the announcement of the exit of a container, whose first
    /// process has just exited.
    pub fn limit_after_exit(&mut self, id: &str) {
        let limit = Instant::now() + AFTER_EXIT;
        for job in self.jobs.values_mut() {
            if job.key.id == *id && job.purpose.delays_exit() {
                job.limit = Some(limit);
            }
        }
    }

    /// Kills the commands and answers the calls whose deadline has passed.
    pub fn end_late_calls(&mut self, now: Instant) {
        for job in self.jobs.values_mut() {
            if job.deadline().is_some_and(|at| at <= now) {
                job.was_killed = true;
                let (id, pid) = (&job.key.id, job.command.pid);
                let why = match job.is_cancelled {
                    true => "a Delete cancels the creation",
                    false => "runtime command timed out",
                };
                log::warn(format_args!(
                    "container {id}: {why}; killing process {pid} and its children"
                ));
                end_command(job, &self.namespace);
            }
        }
        let mut late: Vec<Reply> =
            self.containers.values_mut().flat_map(|container| take_late(container, now)).collect();
        late.extend(self.sandbox.iter_mut().flat_map(|sandbox| sandbox.take_late_waiters(now)));
        for reply in late {
            self.respond(reply, Err(passed()));
        }
    }
}

/// Kills a command and the processes that it has started. A `runc init` that a process of the
/// container has stopped, or a hook, does not exit with its parent.
fn end_command(job: &Job, namespace: &str) {
    let pid = job.command.pid;
    match job.purpose {
        // CRIU has stopped the processes of the container, and must resume them itself. Not reaped
        // yet, so the pid cannot have been reused.
        Purpose::Checkpoint(..) => drop(sys::kill(pid, libc::SIGKILL)),
        Purpose::Mount { by_program: true } => {
            end_processes(pid, Some(&mark::entry(namespace, &job.key.id)));
        }
        _ => end_processes(pid, None),
    }
}

/// Kills a child that was not reaped yet, and the processes that descend from it; with a mark, also
/// the children of this process that have it.
pub fn end_processes(child: i32, mark: Option<&str>) {
    let rest = descendants::stop(child, mark);
    // Not reaped yet, so the pid cannot have been reused.
    let _ = sys::kill(child, libc::SIGKILL);
    for process in rest {
        // Fails if the process has exited by itself.
        let _ = pidfd_send_signal(&process, Signal::KILL);
    }
}

/// The calls that wait for a container or its execs: for an exit, or for a pending command.
fn waiting(container: &Container) -> impl Iterator<Item = &Reply> {
    let execs = container.execs.values();
    let processes = execs.clone().map(|exec| &exec.process).chain([&container.process]);
    let queues = execs.map(|exec| &exec.queue).chain(&container.busy);
    let queued = queues.flatten().map(|(reply, _)| reply);
    processes.flat_map(|process| &process.waiters).chain(queued)
}

/// Removes and returns those of [`waiting`] whose deadline has passed.
fn take_late(container: &mut Container, now: Instant) -> Vec<Reply> {
    let mut late = Vec::new();
    let mut queues: Vec<&mut VecDeque<(Reply, Request)>> = container.busy.iter_mut().collect();
    let mut waiters = vec![&mut container.process.waiters];
    for exec in container.execs.values_mut() {
        queues.push(&mut exec.queue);
        waiters.push(&mut exec.process.waiters);
    }
    for waiters in waiters {
        late.extend(waiters.extract_if(.., |waiter| waiter.is_late(now)));
    }
    for queue in queues {
        late.extend(queue.iter().map(|(reply, _)| *reply).filter(|reply| reply.is_late(now)));
        queue.retain(|(reply, _)| !reply.is_late(now));
    }
    late
}

/// Fails if the deadline of a Create has passed: its caller has given up, has removed the bundle,
/// and would not know of the container.
pub fn check(reply: Option<Reply>) -> Result<(), Error> {
    let is_late = reply.is_some_and(|reply| reply.is_late(Instant::now()));
    if is_late { Err(passed()) } else { Ok(()) }
}

/// Fails if the time limit of a command has passed.
pub fn check_limit(limit: Option<Instant>) -> Result<(), Error> {
    if limit.is_some_and(|at| at <= Instant::now()) { Err(passed()) } else { Ok(()) }
}

/// The error of a call whose deadline has passed.
pub fn passed() -> Error {
    Error::new(Code::DEADLINE_EXCEEDED, "the deadline of the call has passed")
}

/// The error of a command that was killed at its timeout, or because its container is deleted.
pub fn ended(e: &Error, is_cancelled: bool) -> Error {
    let why = if is_cancelled { "a Delete cancels the creation" } else { "the command timed out" };
    Error::new(Code::DEADLINE_EXCEEDED, format!("{e}; killed: {why}"))
}
