//! The life of a sandbox as a pure machine: an event goes in, actions come out.
//!
//! ```text
//!            Start            job done              exit                removed
//!  Created ---------> Starting --------> Ready ---------------> NotReady ------> Gone
//!     |                  | failed          ^   adopted: alive       ^
//!     |                  |                 +---------- Unknown -----+ adopted: dead
//!     |                  +--------------------------------------------------------> Gone
//!     +-- Shutdown, or never started --------------------------------------------> Gone
//! ```
//!
//! At most one job (start, cleanup, removal) runs at a time. Whoever owns a machine carries out the
//! actions in order and feeds their outcome back; nothing here waits, reads a clock or touches the
//! system.

/// Where a sandbox stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Recorded, never started.
    Created,
    /// Its start job runs.
    Starting,
    /// The pause lives.
    Ready,
    /// The pause has ended.
    NotReady,
    /// Recovery could not tell whether the pause lives.
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

/// The blocking work that a sandbox may have under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Job {
    /// Makes files and pause.
    Start,
    /// Asks the driver again about a process that recovery could not judge.
    Adopt,
    /// After the exit: cgroup and shared memory.
    Cleanup,
    /// All that is left: the pod's shim, files, record.
    Remove,
}

/// The verbs whose callers wait for the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// Start.
    Start,
    /// Stop.
    Stop,
    /// Shutdown.
    Shutdown,
}

/// What can happen to a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Somebody asks for a verb.
    Asked(Verb),
    /// The start job made a pause.
    Started,
    /// The answer of a successful Start found nobody: the caller takes the sandbox for failed and
    /// will never end it.
    StartUnheard,
    /// The start job failed; `clean` when all that it made is gone again.
    StartFailed {
        /// Nothing is left of the sandbox.
        clean: bool,
    },
    /// The driver found the process alive.
    AdoptedAlive,
    /// The driver could not tell.
    AdoptFailed,
    /// The pause has ended (or the driver found it dead).
    Exited,
    /// SIGKILL could not be sent.
    KillFailed,
    /// The cleanup or removal job is done.
    JobDone,
    /// The cleanup or removal job failed.
    JobFailed,
    /// The time of the next try has come.
    RetryDue,
    /// It was never started and its time is over.
    Abandoned,
}

/// What the owner must do, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Run a job; its outcome comes back as an event.
    Run(Job),
    /// Tell readers the phase and the exit.
    Publish,
    /// Send SIGKILL to the pause.
    Kill,
    /// Watch the pause's exit.
    Watch,
    /// Answer every waiting caller of the verb: success.
    Succeed(Verb),
    /// Answer every waiting caller of the verb: the error of the last step.
    Fail(Verb),
    /// Answer the one that asked last: not in this phase.
    Refuse(Verb),
    /// Send [`Event::RetryDue`] after the back-off's delay for this many failures in a row.
    RetryAfter(u32),
    /// Free the id, and end the owner when the actions behind this one are done.
    Retire,
}

/// The machine of one sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    phase: Phase,
    job: Option<Job>,
    /// The cleanup after the exit is still to be done.
    dirty: bool,
    /// To be ended and removed as soon as that is possible.
    doomed: bool,
    stop_waits: bool,
    shutdown_waits: bool,
    failures: u32,
}

impl Machine {
    /// A sandbox that was created now, or recovered in `phase`. One recovered as
    /// [`Phase::NotReady`] is taken for dirty.
    pub fn new(phase: Phase) -> Self {
        Self {
            phase,
            job: None,
            dirty: matches!(phase, Phase::NotReady),
            doomed: false,
            stop_waits: false,
            shutdown_waits: false,
            failures: 0,
        }
    }

    /// Nothing is known of it any more, not even what was under way: its pause is looked for.
    /// Readers see the old phase until it is found.
    pub fn look_again(&mut self) -> Vec<Action> {
        *self = Self::new(Phase::Unknown);
        let mut out = Vec::new();
        self.run(Job::Adopt, &mut out);
        out
    }

    /// Where the sandbox stands.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Nothing is under way: no job runs and the pause is not being ended.
    pub fn at_rest(&self) -> bool {
        self.job.is_none() && !(self.phase == Phase::Ready && (self.doomed || self.stop_waits))
    }

    /// Takes an event; returns what must be done.
    pub fn on(&mut self, event: Event) -> Vec<Action> {
        let mut out = Vec::new();
        match event {
            Event::Asked(Verb::Start) => {
                if self.phase == Phase::Created && self.job.is_none() && !self.doomed {
                    self.phase = Phase::Starting;
                    self.run(Job::Start, &mut out);
                } else {
                    out.push(Action::Refuse(Verb::Start));
                }
            }
            Event::Asked(Verb::Stop) => {
                self.stop_waits = true;
                match self.phase {
                    Phase::Created | Phase::Gone => self.settle(Verb::Stop, true, &mut out),
                    Phase::Starting => {}
                    Phase::Ready => out.push(Action::Kill),
                    Phase::NotReady | Phase::Unknown => self.proceed(&mut out),
                }
            }
            Event::Asked(Verb::Shutdown) => {
                self.shutdown_waits = true;
                self.doomed = true;
                match self.phase {
                    Phase::Gone => self.settle(Verb::Shutdown, true, &mut out),
                    Phase::Starting => {}
                    Phase::Ready => out.push(Action::Kill),
                    Phase::Created | Phase::NotReady | Phase::Unknown => self.proceed(&mut out),
                }
            }
            Event::Started => {
                self.job = None;
                self.alive(&mut out);
                out.push(Action::Succeed(Verb::Start));
                self.end_if_wanted(&mut out);
            }
            Event::StartUnheard => {
                self.doomed = true;
                self.end_if_wanted(&mut out);
            }
            Event::StartFailed { clean } => {
                self.job = None;
                self.doomed = true;
                if clean {
                    self.gone(&mut out);
                } else {
                    self.phase = Phase::NotReady;
                    self.dirty = true;
                    out.push(Action::Publish);
                    self.failed(&mut out);
                }
                out.push(Action::Fail(Verb::Start));
            }
            Event::AdoptedAlive => {
                self.job = None;
                self.alive(&mut out);
                self.end_if_wanted(&mut out);
            }
            Event::AdoptFailed => {
                self.job = None;
                self.not_ended(&mut out);
            }
            Event::Exited => {
                // A second report of the same end changes nothing.
                if matches!(self.phase, Phase::Ready | Phase::Unknown) {
                    if self.job == Some(Job::Adopt) {
                        self.job = None;
                    }
                    self.phase = Phase::NotReady;
                    self.dirty = true;
                    out.push(Action::Publish);
                    self.proceed(&mut out);
                }
            }
            Event::KillFailed => self.not_ended(&mut out),
            Event::JobDone => match self.job.take() {
                Some(Job::Cleanup) => {
                    self.dirty = false;
                    self.failures = 0;
                    self.settle(Verb::Stop, true, &mut out);
                    self.proceed(&mut out);
                }
                Some(Job::Remove) => self.gone(&mut out),
                job => self.job = job,
            },
            Event::JobFailed => match self.job.take() {
                Some(Job::Cleanup | Job::Remove) => self.failed(&mut out),
                job => self.job = job,
            },
            Event::RetryDue => self.proceed(&mut out),
            Event::Abandoned => {
                if self.phase == Phase::Created {
                    self.doomed = true;
                    self.proceed(&mut out);
                }
            }
        }
        out
    }

    fn alive(&mut self, out: &mut Vec<Action>) {
        self.phase = Phase::Ready;
        out.extend([Action::Publish, Action::Watch]);
    }

    fn end_if_wanted(&self, out: &mut Vec<Action>) {
        if self.phase == Phase::Ready && (self.doomed || self.stop_waits) {
            out.push(Action::Kill);
        }
    }

    /// Starts the next job that is due, unless one runs.
    fn proceed(&mut self, out: &mut Vec<Action>) {
        if self.job.is_some() {
            return;
        }
        match self.phase {
            Phase::Ready => self.end_if_wanted(out),
            Phase::Unknown if self.doomed || self.stop_waits => self.run(Job::Adopt, out),
            Phase::NotReady if self.dirty => self.run(Job::Cleanup, out),
            Phase::NotReady if !self.doomed => self.settle(Verb::Stop, true, out),
            Phase::NotReady | Phase::Created if self.doomed => self.run(Job::Remove, out),
            _ => {}
        }
    }

    fn run(&mut self, job: Job, out: &mut Vec<Action>) {
        self.job = Some(job);
        out.push(Action::Run(job));
    }

    /// The pause could not be ended, or nobody knows whether it lives.
    fn not_ended(&mut self, out: &mut Vec<Action>) {
        self.settle(Verb::Stop, false, out);
        self.settle(Verb::Shutdown, false, out);
        if self.doomed {
            self.failures = self.failures.saturating_add(1);
            out.push(Action::RetryAfter(self.failures));
        }
    }

    fn failed(&mut self, out: &mut Vec<Action>) {
        self.failures = self.failures.saturating_add(1);
        // A removal that failed is no concern of Stop.
        self.settle(Verb::Stop, !self.dirty, out);
        self.settle(Verb::Shutdown, false, out);
        out.push(Action::RetryAfter(self.failures));
    }

    fn gone(&mut self, out: &mut Vec<Action>) {
        self.phase = Phase::Gone;
        self.dirty = false;
        // The id is free before anybody hears of the end.
        out.extend([Action::Publish, Action::Retire]);
        self.settle(Verb::Stop, true, out);
        self.settle(Verb::Shutdown, true, out);
    }

    fn settle(&mut self, verb: Verb, success: bool, out: &mut Vec<Action>) {
        let waits = match verb {
            Verb::Start => return,
            Verb::Stop => &mut self.stop_waits,
            Verb::Shutdown => &mut self.shutdown_waits,
        };
        if std::mem::take(waits) {
            out.push(if success { Action::Succeed(verb) } else { Action::Fail(verb) });
        }
    }
}

#[cfg(test)]
mod tests;
