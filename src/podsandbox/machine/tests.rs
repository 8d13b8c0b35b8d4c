//! The machine against a tiny world: any sequence of RPCs, exits, failures and restarts keeps the
//! invariants.

use proptest::prelude::*;

use super::*;

const EXIT: Exit = Exit { status: 137, at: std::time::SystemTime::UNIX_EPOCH };

/// The actions after an exit.
fn exited() -> [Action; 3] {
    [Action::Publish, Action::Run(Job::Cleanup), Action::ReportExit(EXIT)]
}

/// The next event in the world. An event that is impossible at the moment is skipped.
#[derive(Clone, Copy, Debug)]
enum WorldEvent {
    Ask(Rpc),
    /// The running job ends well, or not.
    JobEnds(bool),
    /// A failed start could not be undone.
    StartLeavesSomething,
    /// The pause process ends by itself.
    PauseDies,
    /// The shim of the pod dies with containers in it.
    ShimDies,
    /// A killed process is dead by now.
    KillLands,
    /// The next kills are refused, or not.
    KillsFail(bool),
    /// The caller of Start gives up, before the answer.
    CallerGivesUp,
    RetryDue,
    /// The daemon is killed and comes back; recovery can tell about the pause process, or not.
    Restart(bool),
}

/// The knowledge of the owner, the driver and the callers.
#[derive(Debug)]
struct World {
    machine: Machine,
    job: Option<Job>,
    /// The pause process lives.
    alive: bool,
    /// A kill is on its way.
    killed: bool,
    kills_fail: bool,
    /// Something of a start is on the system: files, cgroup.
    made: bool,
    /// The cleanup after the exit of the pause process is due.
    dirty: bool,
    waiting: Vec<Rpc>,
    start_caller_gone: bool,
    retry_armed: bool,
    exits_published: u32,
    starts_run: u32,
    retired: bool,
    phase: Phase,
    shutdown_asked: bool,
    /// A start has failed and left something.
    failed_start: bool,
}

impl World {
    fn new() -> Self {
        Self {
            machine: Machine::new(Phase::Created, None),
            job: None,
            alive: false,
            killed: false,
            kills_fail: false,
            made: false,
            dirty: false,
            waiting: Vec::new(),
            start_caller_gone: false,
            retry_armed: false,
            exits_published: 0,
            starts_run: 0,
            retired: false,
            phase: Phase::Created,
            shutdown_asked: false,
            failed_start: false,
        }
    }

    fn apply(&mut self, event: WorldEvent) {
        if self.retired {
            return;
        }
        match event {
            WorldEvent::Ask(rpc) => {
                self.shutdown_asked |= rpc == Rpc::Shutdown;
                self.waiting.push(rpc);
                self.feed(Event::RpcReceived(rpc));
            }
            WorldEvent::JobEnds(well) => match self.job.take() {
                None => {}
                Some(Job::Start) if well => {
                    self.alive = true;
                    self.made = true;
                    self.dirty = true;
                    self.feed(Event::Started);
                }
                Some(Job::Start) => self.feed(Event::StartFailed { clean: true }),
                Some(Job::Adopt) if !well => self.feed(Event::AdoptFailed),
                Some(Job::Adopt) if self.alive => self.feed(Event::AdoptedAlive),
                Some(Job::Adopt) => self.exit(),
                Some(Job::Cleanup | Job::Remove) if !well => self.feed(Event::JobFailed),
                Some(Job::Cleanup) => {
                    self.dirty = false;
                    self.feed(Event::JobDone);
                }
                Some(Job::Remove) => {
                    self.made = false;
                    self.dirty = false;
                    self.feed(Event::JobDone);
                }
            },
            WorldEvent::StartLeavesSomething => {
                if self.job == Some(Job::Start) {
                    self.job = None;
                    self.made = true;
                    self.dirty = true;
                    self.failed_start = true;
                    self.feed(Event::StartFailed { clean: false });
                }
            }
            WorldEvent::PauseDies => self.die(),
            WorldEvent::ShimDies => {
                let ends = self.phase == Phase::Ready && !self.kills_fail;
                self.feed(Event::ShimDied);
                assert!(!ends || self.killed, "the pause process survives its shim");
            }
            WorldEvent::KillLands => {
                if self.killed {
                    self.die();
                }
            }
            WorldEvent::KillsFail(fail) => self.kills_fail = fail,
            WorldEvent::CallerGivesUp => self.start_caller_gone |= self.job == Some(Job::Start),
            WorldEvent::RetryDue => {
                if std::mem::take(&mut self.retry_armed) {
                    self.feed(Event::RetryDue);
                }
            }
            WorldEvent::Restart(can_tell) => self.restart(can_tell),
        }
    }

    fn die(&mut self) {
        let watched = self.phase == Phase::Ready;
        if std::mem::take(&mut self.alive) && watched {
            self.exit();
        }
    }

    fn exit(&mut self) {
        self.killed = false;
        self.feed(Event::Exited(EXIT));
    }

    /// A new daemon recovers the sandbox from the disk and the kernel.
    fn restart(&mut self, can_tell: bool) {
        // Callers are answered UNAVAILABLE; jobs are interrupted.
        self.waiting.clear();
        self.start_caller_gone = false;
        self.retry_armed = false;
        self.killed = false;
        self.kills_fail = false;
        self.shutdown_asked = false;
        self.failed_start = false;
        let interrupted = self.job.take();
        let phase = match self.phase {
            Phase::Created if interrupted != Some(Job::Start) => Phase::Created,
            Phase::Created | Phase::Starting => {
                // Recovery undoes an interrupted start: there is no sandbox any more.
                self.alive = false;
                self.made = false;
                self.retired = true;
                return;
            }
            _ if self.exits_published > 0 => Phase::NotReady,
            _ if !can_tell => Phase::Unknown,
            _ if self.alive => Phase::Ready,
            _ => {
                self.exits_published += 1;
                Phase::NotReady
            }
        };
        self.phase = phase;
        self.retry_armed = phase == Phase::Unknown;
        self.machine = Machine::new(phase, (phase == Phase::NotReady).then_some(EXIT));
        if phase == Phase::NotReady {
            self.feed(Event::RetryDue);
        }
    }

    fn feed(&mut self, event: Event) {
        let mut events = vec![event];
        while let Some(event) = events.pop() {
            for action in self.machine.on(event) {
                assert!(
                    !self.retired || matches!(action, Action::Succeed(_) | Action::Fail(_)),
                    "{action:?} after the end"
                );
                events.extend(self.act(action));
            }
        }
        assert_eq!(self.phase == Phase::Gone, self.retired, "gone and retired are one");
    }

    fn act(&mut self, action: Action) -> Option<Event> {
        match action {
            Action::Run(job) => {
                assert_eq!(self.job, None, "{job:?} while another job runs");
                match job {
                    Job::Start => {
                        self.starts_run += 1;
                        self.phase = Phase::Starting;
                    }
                    Job::Adopt => assert_eq!(self.phase, Phase::Unknown),
                    Job::Cleanup => assert!(!self.alive, "cleanup of a living pause process"),
                    Job::Remove => assert!(!self.alive, "removal of a living pause process"),
                }
                self.job = Some(job);
            }
            Action::Publish => self.phase = self.machine.phase(),
            Action::ReportExit(exit) => {
                assert_eq!((self.phase, self.machine.exit()), (Phase::NotReady, Some(exit)));
                self.exits_published += 1;
            }
            Action::Kill => {
                assert_eq!(self.machine.phase(), Phase::Ready, "a kill without a pause process");
                if self.kills_fail {
                    return Some(Event::KillFailed);
                }
                self.killed = true;
            }
            Action::Watch => {
                if !self.alive {
                    // It died before it was watched; the pidfd is readable at once.
                    return Some(Event::Exited(EXIT));
                }
            }
            Action::Succeed(rpc) | Action::Fail(rpc) => {
                let before = self.waiting.len();
                self.waiting.retain(|waiting| *waiting != rpc);
                if rpc != Rpc::Start {
                    assert_ne!(self.waiting.len(), before, "an answer without a caller");
                }
                if rpc == Rpc::Stop && matches!(action, Action::Succeed(_)) {
                    let may_live = self.alive || self.job == Some(Job::Start);
                    assert!(!may_live, "stop succeeded with a living pause process");
                }
                if rpc == Rpc::Shutdown && matches!(action, Action::Succeed(_)) {
                    assert!(!self.alive && !self.made, "shutdown succeeded and left something");
                }
                if action == Action::Succeed(Rpc::Start)
                    && std::mem::take(&mut self.start_caller_gone)
                {
                    return Some(Event::StartCallerGone);
                }
            }
            Action::Refuse(rpc) => {
                assert_eq!(self.waiting.pop(), Some(rpc), "refused another than the last")
            }
            Action::RetryAfter(failures) => {
                assert!(failures > 0);
                self.retry_armed = true;
            }
            Action::Retire => {
                assert!(!self.retired, "retired twice");
                assert!(!self.alive && !self.made, "retired and left something");
                self.retired = true;
            }
        }
        None
    }

    /// Lets everything end well: the faults are gone and all that is in progress ends.
    fn run_to_end(&mut self) {
        self.kills_fail = false;
        for _ in 0..20 {
            self.apply(WorldEvent::JobEnds(true));
            self.apply(WorldEvent::KillLands);
            self.apply(WorldEvent::RetryDue);
        }
    }
}

fn event() -> impl Strategy<Value = WorldEvent> {
    prop_oneof![
        4 => prop_oneof![Just(Rpc::Start), Just(Rpc::Stop), Just(Rpc::Shutdown)]
            .prop_map(WorldEvent::Ask),
        4 => any::<bool>().prop_map(WorldEvent::JobEnds),
        2 => Just(WorldEvent::KillLands),
        1 => Just(WorldEvent::StartLeavesSomething),
        1 => Just(WorldEvent::PauseDies),
        1 => Just(WorldEvent::ShimDies),
        1 => any::<bool>().prop_map(WorldEvent::KillsFail),
        1 => Just(WorldEvent::CallerGivesUp),
        2 => Just(WorldEvent::RetryDue),
        1 => any::<bool>().prop_map(WorldEvent::Restart),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]

    /// Promise: exit_is_published_once.
    #[test]
    fn any_sequence_keeps_the_invariants(events in prop::collection::vec(event(), 1..40)) {
        let mut world = World::new();
        for event in events {
            world.apply(event);
            prop_assert!(world.starts_run <= 1, "nothing starts twice");
            prop_assert!(world.exits_published <= 1, "one exit per sandbox");
        }
        world.run_to_end();
        prop_assert!(world.waiting.is_empty(), "a caller still waits: {world:?}");
        prop_assert!(!world.dirty || world.alive, "an ended pod was not cleaned up: {world:?}");
        if world.failed_start {
            prop_assert!(world.retired, "a failed start is removed: {world:?}");
        }
        if world.shutdown_asked {
            prop_assert!(world.retired, "shutdown ends everything: {world:?}");
        }
        // Shutdown ends it from wherever it is.
        world.apply(WorldEvent::Ask(Rpc::Shutdown));
        world.run_to_end();
        prop_assert!(world.retired && !world.alive && !world.made, "{world:?}");
    }
}

#[test]
fn start_stop_and_shutdown_yield_the_expected_actions() {
    let mut machine = Machine::new(Phase::Created, None);
    assert_eq!(machine.on(Event::RpcReceived(Rpc::Start)), [Action::Run(Job::Start)]);
    assert_eq!(
        machine.on(Event::Started),
        [Action::Publish, Action::Watch, Action::Succeed(Rpc::Start)]
    );
    assert_eq!(machine.on(Event::RpcReceived(Rpc::Stop)), [Action::Kill]);
    assert_eq!(machine.on(Event::Exited(EXIT)), exited());
    assert_eq!(machine.on(Event::JobDone), [Action::Succeed(Rpc::Stop)]);
    assert_eq!(machine.on(Event::RpcReceived(Rpc::Stop)), [Action::Succeed(Rpc::Stop)]);
    assert_eq!(machine.on(Event::RpcReceived(Rpc::Shutdown)), [Action::Run(Job::Remove)]);
    let end = [Action::Publish, Action::Retire, Action::Succeed(Rpc::Shutdown)];
    assert_eq!(machine.on(Event::JobDone), end);
}

/// The shim's death is known before recovery has found the pause process.
#[test]
fn a_pause_that_is_adopted_ends_with_its_dead_shim() {
    let mut machine = Machine::new(Phase::Ready, None);
    assert_eq!(machine.adopt_again(), [Action::Run(Job::Adopt)]);
    assert_eq!(machine.on(Event::ShimDied), []);
    assert_eq!(machine.on(Event::AdoptedAlive), [Action::Publish, Action::Watch, Action::Kill]);
    assert_eq!(machine.on(Event::Exited(EXIT)), exited());
    assert_eq!(machine.on(Event::ShimDied), []);
    // Also if the actor panics between the two.
    let mut machine = Machine::new(Phase::Unknown, None);
    machine.on(Event::ShimDied);
    machine.adopt_again();
    assert_eq!(machine.on(Event::AdoptedAlive), [Action::Publish, Action::Watch, Action::Kill]);
}

#[test]
fn an_unknown_pause_is_looked_for_until_it_is_found() {
    let mut machine = Machine::new(Phase::Unknown, None);
    assert_eq!(machine.on(Event::RetryDue), [Action::Run(Job::Adopt)]);
    assert_eq!(machine.on(Event::AdoptFailed), [Action::Publish, Action::RetryAfter(1)]);
    assert_eq!(machine.failures(), 0, "no cleanup has failed");
    assert_eq!(machine.on(Event::RetryDue), [Action::Run(Job::Adopt)]);
    assert_eq!(machine.on(Event::AdoptedAlive), [Action::Publish, Action::Watch]);
    assert_eq!(machine.failures(), 0);
}

/// The exit that callers have seen stays, whatever the driver says after a fault of the actor.
#[test]
fn the_first_exit_stays() {
    let mut machine = Machine::new(Phase::Ready, None);
    machine.on(Event::Exited(EXIT));
    machine.adopt_again();
    let other = Exit { status: 255, ..EXIT };
    let again = [Action::Publish, Action::Run(Job::Cleanup)];
    assert_eq!(machine.on(Event::Exited(other)), again);
    assert_eq!(machine.exit(), Some(EXIT));
}

#[test]
fn a_start_whose_caller_gave_up_is_undone() {
    let mut machine = Machine::new(Phase::Created, None);
    machine.on(Event::RpcReceived(Rpc::Start));
    machine.on(Event::Started);
    assert_eq!(machine.on(Event::StartCallerGone), [Action::Kill]);
    assert_eq!(machine.on(Event::Exited(EXIT)), exited());
    assert_eq!(machine.on(Event::JobDone), [Action::Run(Job::Remove)]);
    assert_eq!(machine.on(Event::JobDone), [Action::Publish, Action::Retire]);
}

#[test]
fn a_second_start_is_refused_in_every_phase() {
    for phase in [Phase::Ready, Phase::NotReady, Phase::Unknown, Phase::Gone] {
        assert_eq!(
            Machine::new(phase, None).on(Event::RpcReceived(Rpc::Start)),
            [Action::Refuse(Rpc::Start)],
            "{phase:?}"
        );
    }
}

#[test]
fn the_cause_is_that_of_the_first_kill_also_after_a_panic() {
    use EndReason::{Removed, ShimDied, StartCancelled, Stopped};
    let ask = Event::RpcReceived;
    for (event, cause) in [
        (ask(Rpc::Stop), Stopped),
        (ask(Rpc::Shutdown), Removed),
        (Event::ShimDied, ShimDied),
        (Event::StartCallerGone, StartCancelled),
    ] {
        let mut machine = Machine::new(Phase::Ready, None);
        assert_eq!((machine.cause(), machine.on(event)), (None, vec![Action::Kill]));
        machine.on(ask(Rpc::Stop));
        machine.adopt_again();
        machine.on(Event::AdoptedAlive);
        machine.on(ask(Rpc::Shutdown));
        assert_eq!(machine.cause(), Some(cause));
        // What is asked for while the state is unknown.
        let mut machine = Machine::new(Phase::Unknown, None);
        machine.on(event);
        assert_eq!(machine.cause(), None);
        machine.on(Event::AdoptedAlive);
        let found = if cause == StartCancelled { Removed } else { cause };
        assert_eq!(machine.cause(), Some(found));
    }
    // It ended by itself.
    let mut machine = Machine::new(Phase::Ready, None);
    machine.on(Event::Exited(EXIT));
    machine.on(ask(Rpc::Stop));
    assert_eq!(machine.cause(), None);
}

#[test]
fn cleanups_that_fail_are_counted_until_one_succeeds() {
    let mut machine = Machine::new(Phase::Ready, None);
    machine.on(Event::RpcReceived(Rpc::Stop));
    machine.on(Event::Exited(EXIT));
    let failed = [Action::Fail(Rpc::Stop), Action::Publish, Action::RetryAfter(1)];
    assert_eq!(machine.on(Event::JobFailed), failed);
    assert_eq!(machine.on(Event::RetryDue), [Action::Run(Job::Cleanup)]);
    assert_eq!(machine.on(Event::JobFailed), [Action::Publish, Action::RetryAfter(2)]);
    assert_eq!(machine.failures(), 2);
    machine.on(Event::RetryDue);
    assert_eq!(
        machine.on(Event::JobDone),
        [Action::Publish],
        "readers see the end of the failures"
    );
    assert_eq!(machine.failures(), 0);
}

#[test]
fn an_interrupted_start_has_no_cleanup_and_its_removal_is_no_concern_of_stop() {
    let (mut machine, remove) = (Machine::interrupted(EXIT), [Action::Run(Job::Remove)]);
    assert_eq!(machine.on(Event::RpcReceived(Rpc::Shutdown)), remove);
    assert_eq!(machine.on(Event::RpcReceived(Rpc::Stop)), []);
    let [stopped, kept] = [Action::Succeed(Rpc::Stop), Action::Fail(Rpc::Shutdown)];
    let failed = [stopped, kept, Action::Publish, Action::RetryAfter(1)];
    assert_eq!(machine.on(Event::JobFailed), failed);
    assert_eq!(machine.on(Event::RetryDue), remove);
}

#[test]
fn a_retry_removes_no_sandbox_that_is_to_stay() {
    assert_eq!(Machine::new(Phase::Created, None).on(Event::RetryDue), []);
}

#[test]
fn a_sandbox_is_idle_unless_a_job_runs_or_its_pause_process_is_being_killed() {
    for rpc in [Rpc::Stop, Rpc::Shutdown] {
        let mut machine = Machine::new(Phase::Ready, None);
        assert!(machine.is_idle());
        machine.on(Event::RpcReceived(rpc));
        assert!(!machine.is_idle(), "the kill for {rpc:?}");
        machine.on(Event::Exited(EXIT));
        assert!(!machine.is_idle(), "the cleanup");
        machine.on(Event::JobDone);
        assert_eq!(machine.is_idle(), rpc == Rpc::Stop, "the removal");
    }
}

#[test]
fn phases_and_rpcs_have_the_names_that_commands_and_metrics_read() {
    let rpcs = [Rpc::Start, Rpc::Stop, Rpc::Shutdown].map(Rpc::name);
    assert_eq!(rpcs, ["start", "stop", "shutdown"]);
    let names = ["created", "starting", "ready", "not ready", "unknown"];
    assert_eq!(Phase::ALL.map(Phase::name), names);
}
