//! The life of a sandbox as a pure machine: an event goes in, actions come out.
//!
//! ```text
//!            Start            job done              exit                removed
//!  Created ---------> Starting --------> Ready ---------------> NotReady ------> Gone
//!     |                 | |                ^   adopted: alive     ^  ^
//!     |                 | |                +---------- Unknown ---+  | adopted: dead
//!     |                 | +-- failed, not undone --------------------+
//!     |                 +---- failed, undone ------------------------------------> Gone
//!     +-- Shutdown --------------------------------------------------------------> Gone
//! ```
//!
//! Recovery enters at Created, Ready, NotReady or Unknown; an interrupted start is NotReady. After
//! a panic of the actor every phase becomes Unknown: the pause process is adopted again.
//!
//! At most one job (start, adoption, cleanup, removal) runs at a time. The actor that owns a
//! machine carries out the actions in order and feeds their outcome back; nothing here waits, reads
//! a clock or touches the system. Phase, exit and failures are written here and nowhere else.

use super::{EndReason, Exit};

/// The phase of a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Recorded, never started.
    Created,
    /// Its start job runs.
    Starting,
    /// The pause process lives.
    Ready,
    /// The pause process has ended, or a start failed or was interrupted and is not undone yet.
    NotReady,
    /// It is unknown whether the pause process lives: recovery, or the adoption after a panic of
    /// the actor, could not determine it.
    Unknown,
    /// Nothing is left of it.
    Gone,
}

impl Phase {
    /// Every phase that a sandbox of the list can be in.
    pub const ALL: [Self; 5] =
        [Self::Created, Self::Starting, Self::Ready, Self::NotReady, Self::Unknown];

    /// The phase in messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Created => "created",
            Self::Starting => "starting",
            Self::Ready => "ready",
            Self::NotReady => "not ready",
            Self::Unknown => "unknown",
            Self::Gone => "gone",
        }
    }
}

/// The blocking work of a sandbox, at most one at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Job {
    /// Makes files and pause process.
    Start,
    /// Asks the driver for the process on record, whose state is unknown.
    Adopt,
    /// After the exit: cgroup and shared memory.
    Cleanup,
    /// All that is left: the pod's shim, files, record.
    Remove,
}

/// The RPCs whose callers wait for the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rpc {
    /// Start.
    Start,
    /// Stop.
    Stop,
    /// Shutdown.
    Shutdown,
}

impl Rpc {
    /// The RPC in messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Stop => "stop",
            Self::Shutdown => "shutdown",
        }
    }
}

/// An event in a sandbox's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A caller asks for an RPC.
    RpcReceived(Rpc),
    /// The start job made a pause process.
    Started,
    /// The caller of a successful Start has given up: it considers the sandbox failed and will
    /// never end it.
    StartCallerGone,
    /// The start job failed; `clean` when all that it made is gone again.
    StartFailed {
        /// Nothing is left of the sandbox.
        clean: bool,
    },
    /// The driver found the process alive.
    AdoptedAlive,
    /// The driver could not determine whether the process lives.
    AdoptFailed,
    /// The pause process has exited (or the driver found it dead).
    Exited(Exit),
    /// The pod's shim has died with containers in it: the sandbox ends with it.
    ShimDied,
    /// SIGKILL could not be sent.
    KillFailed,
    /// The cleanup or removal job is done.
    JobDone,
    /// The cleanup or removal job failed.
    JobFailed,
    /// The delay before the next attempt is over.
    RetryDue,
}

/// An action of the actor; it takes them in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Run a job; its outcome comes back as an event.
    Run(Job),
    /// Publish phase, exit and failures.
    Publish,
    /// Log and count the exit, which was just published.
    ReportExit(Exit),
    /// Send SIGKILL to the pause process.
    Kill,
    /// Watch the pause process's exit.
    Watch,
    /// Send success to every waiting caller of the RPC.
    Succeed(Rpc),
    /// Send the error of the last step to every waiting caller of the RPC.
    Fail(Rpc),
    /// Send an error to the last caller: the phase does not allow the RPC.
    Refuse(Rpc),
    /// Send [`Event::RetryDue`] after the back-off's delay for this many failures in a row.
    RetryAfter(u32),
    /// Free the id, and end the actor after the actions that follow this one.
    Retire,
}

/// The machine of one sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    phase: Phase,
    /// How the pause process exited, once that is known.
    exit: Option<Exit>,
    /// Why the pause process is first killed here, if it is.
    cause: Option<EndReason>,
    job: Option<Job>,
    /// The cleanup after the exit is not done yet.
    cleanup_pending: bool,
    /// To be killed and removed as soon as possible.
    removal_requested: bool,
    stop_waits: bool,
    shutdown_waits: bool,
    /// The shim has died, and whether the pause process lives is not known yet.
    shim_died: bool,
    failures: u32,
}

impl Machine {
    /// A sandbox that was created now, or recovered in `phase`, with the exit that is on record.
    /// The cleanup of one recovered as [`Phase::NotReady`] is pending.
    pub fn new(phase: Phase, exit: Option<Exit>) -> Self {
        Self {
            phase,
            exit,
            cause: None,
            job: None,
            cleanup_pending: matches!(phase, Phase::NotReady),
            removal_requested: false,
            stop_waits: false,
            shutdown_waits: false,
            shim_died: false,
            failures: 0,
        }
    }

    /// A sandbox whose start was interrupted: nothing of it is kept, so that its removal alone
    /// cleans up. An exit on record would make it another sandbox to the next daemon.
    pub fn interrupted(exit: Exit) -> Self {
        Self { cleanup_pending: false, ..Self::new(Phase::NotReady, Some(exit)) }
    }

    /// After a panic of the actor: forgets everything but the exit, the death of the shim and the
    /// cause of a kill, and looks for the pause process again. Readers see the old phase until
    /// then.
    pub fn adopt_again(&mut self) -> Vec<Action> {
        let Self { cause, shim_died, .. } = *self;
        *self = Self { cause, shim_died, ..Self::new(Phase::Unknown, self.exit) };
        let mut out = Vec::new();
        self.run(Job::Adopt, &mut out);
        out
    }

    /// The phase.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// How the pause process exited; `None` while it lives, and where there never was one.
    pub fn exit(&self) -> Option<Exit> {
        self.exit
    }

    /// Why the pause process was first killed, if it was.
    pub fn cause(&self) -> Option<EndReason> {
        self.cause
    }

    /// Cleanups that have failed in a row and are retried; searches for the pause process do not
    /// count.
    pub fn failures(&self) -> u32 {
        if self.phase == Phase::Unknown { 0 } else { self.failures }
    }

    /// Whether nothing is in progress: no job runs and the pause process is not being killed.
    pub fn is_idle(&self) -> bool {
        self.job.is_none()
            && !(self.phase == Phase::Ready && (self.removal_requested || self.stop_waits))
    }

    /// Takes an event; returns what must be done.
    pub fn on(&mut self, event: Event) -> Vec<Action> {
        let mut out = Vec::new();
        match event {
            Event::RpcReceived(rpc) => self.on_rpc(rpc, &mut out),
            Event::Started => {
                self.job = None;
                self.set_ready(&mut out);
                out.push(Action::Succeed(Rpc::Start));
                self.kill_if_requested(&mut out);
            }
            Event::StartCallerGone => {
                self.removal_requested = true;
                if self.phase == Phase::Ready {
                    self.kill(EndReason::StartCancelled, &mut out);
                }
            }
            Event::StartFailed { clean } => {
                self.job = None;
                self.removal_requested = true;
                if clean {
                    self.set_gone(&mut out);
                } else {
                    self.phase = Phase::NotReady;
                    self.cleanup_pending = true;
                    out.push(Action::Publish);
                    self.job_failed(&mut out);
                }
                out.push(Action::Fail(Rpc::Start));
            }
            Event::AdoptedAlive => {
                self.job = None;
                self.set_ready(&mut out);
                self.kill_if_requested(&mut out);
            }
            Event::AdoptFailed => {
                self.job = None;
                self.complete_rpc(Rpc::Stop, false, &mut out);
                self.complete_rpc(Rpc::Shutdown, false, &mut out);
                // A pause process that lives must not stay unknown after a fault that passes.
                self.retry(&mut out);
            }
            Event::Exited(exit) => self.exited(exit, &mut out),
            Event::ShimDied => match self.phase {
                Phase::Ready => self.kill(EndReason::ShimDied, &mut out),
                Phase::Unknown => self.shim_died = true,
                // Without a pause process the sandbox has ended already.
                _ => {}
            },
            Event::KillFailed => self.kill_failed(&mut out),
            Event::JobDone => match self.job.take() {
                Some(Job::Cleanup) => {
                    self.cleanup_pending = false;
                    if std::mem::take(&mut self.failures) > 0 {
                        out.push(Action::Publish);
                    }
                    self.complete_rpc(Rpc::Stop, true, &mut out);
                    self.proceed(&mut out);
                }
                Some(Job::Remove) => self.set_gone(&mut out),
                job => self.job = job,
            },
            Event::JobFailed => match self.job.take() {
                Some(Job::Cleanup | Job::Remove) => self.job_failed(&mut out),
                job => self.job = job,
            },
            Event::RetryDue => self.proceed(&mut out),
        }
        out
    }

    fn on_rpc(&mut self, rpc: Rpc, out: &mut Vec<Action>) {
        match rpc {
            Rpc::Start
                if self.phase == Phase::Created
                    && self.job.is_none()
                    && !self.removal_requested =>
            {
                self.phase = Phase::Starting;
                self.run(Job::Start, out);
            }
            Rpc::Start => out.push(Action::Refuse(Rpc::Start)),
            Rpc::Stop => {
                self.stop_waits = true;
                match self.phase {
                    Phase::Created | Phase::Gone => self.complete_rpc(Rpc::Stop, true, out),
                    Phase::Starting => {}
                    Phase::Ready => self.kill(EndReason::Stopped, out),
                    Phase::NotReady | Phase::Unknown => self.proceed(out),
                }
            }
            Rpc::Shutdown => {
                self.shutdown_waits = true;
                self.removal_requested = true;
                match self.phase {
                    Phase::Gone => self.complete_rpc(Rpc::Shutdown, true, out),
                    Phase::Starting => {}
                    Phase::Ready => self.kill(EndReason::Removed, out),
                    Phase::Created | Phase::NotReady | Phase::Unknown => self.proceed(out),
                }
            }
        }
    }

    /// A second report of the same exit changes nothing.
    fn exited(&mut self, exit: Exit, out: &mut Vec<Action>) {
        if !matches!(self.phase, Phase::Ready | Phase::Unknown) {
            return;
        }
        if self.job == Some(Job::Adopt) {
            self.job = None;
        }
        let first = self.exit.is_none();
        self.exit.get_or_insert(exit);
        self.phase = Phase::NotReady;
        self.cleanup_pending = true;
        self.failures = 0;
        self.shim_died = false;
        out.push(Action::Publish);
        self.proceed(out);
        // After the start of the cleanup, which a caller may wait for.
        if first {
            out.push(Action::ReportExit(exit));
        }
    }

    fn set_ready(&mut self, out: &mut Vec<Action>) {
        self.phase = Phase::Ready;
        self.failures = 0;
        out.extend([Action::Publish, Action::Watch]);
    }

    fn kill_if_requested(&mut self, out: &mut Vec<Action>) {
        let shim_died = std::mem::take(&mut self.shim_died);
        if self.phase != Phase::Ready {
            return;
        }
        if shim_died {
            self.kill(EndReason::ShimDied, out);
        } else if self.stop_waits {
            self.kill(EndReason::Stopped, out);
        } else if self.removal_requested {
            self.kill(EndReason::Removed, out);
        }
    }

    fn kill(&mut self, cause: EndReason, out: &mut Vec<Action>) {
        self.cause.get_or_insert(cause);
        out.push(Action::Kill);
    }

    /// Starts the next job that is due, unless one runs.
    fn proceed(&mut self, out: &mut Vec<Action>) {
        if self.job.is_some() {
            return;
        }
        match self.phase {
            Phase::Ready => self.kill_if_requested(out),
            Phase::Unknown => self.run(Job::Adopt, out),
            Phase::NotReady if self.cleanup_pending => self.run(Job::Cleanup, out),
            Phase::NotReady if !self.removal_requested => self.complete_rpc(Rpc::Stop, true, out),
            Phase::NotReady | Phase::Created if self.removal_requested => {
                self.run(Job::Remove, out)
            }
            _ => {}
        }
    }

    fn run(&mut self, job: Job, out: &mut Vec<Action>) {
        self.job = Some(job);
        out.push(Action::Run(job));
    }

    /// The pause process could not be ended.
    fn kill_failed(&mut self, out: &mut Vec<Action>) {
        self.complete_rpc(Rpc::Stop, false, out);
        self.complete_rpc(Rpc::Shutdown, false, out);
        if self.removal_requested {
            self.retry(out);
        }
    }

    fn retry(&mut self, out: &mut Vec<Action>) {
        self.failures = self.failures.saturating_add(1);
        out.extend([Action::Publish, Action::RetryAfter(self.failures)]);
    }

    fn job_failed(&mut self, out: &mut Vec<Action>) {
        // A removal that failed is no concern of Stop.
        self.complete_rpc(Rpc::Stop, !self.cleanup_pending, out);
        self.complete_rpc(Rpc::Shutdown, false, out);
        self.retry(out);
    }

    fn set_gone(&mut self, out: &mut Vec<Action>) {
        self.phase = Phase::Gone;
        self.cleanup_pending = false;
        // The id is free before a caller learns of the end.
        out.extend([Action::Publish, Action::Retire]);
        self.complete_rpc(Rpc::Stop, true, out);
        self.complete_rpc(Rpc::Shutdown, true, out);
    }

    fn complete_rpc(&mut self, rpc: Rpc, success: bool, out: &mut Vec<Action>) {
        let waits = match rpc {
            Rpc::Start => return,
            Rpc::Stop => &mut self.stop_waits,
            Rpc::Shutdown => &mut self.shutdown_waits,
        };
        if std::mem::take(waits) {
            out.push(if success { Action::Succeed(rpc) } else { Action::Fail(rpc) });
        }
    }
}

#[cfg(test)]
mod tests;
