//! The states of a container, and what changes them.
//!
//! ```text
//! Creating -> Created -> Starting -> Running <-> Pausing, Paused, Resuming
//!     |          |           |          |             |
//! Discarding     +-----------+----------+-------------+--> Exiting -> Stopped
//!     |                                                                  |
//!   (none)                                                 (none) <- Deleting
//! ```
//!
//! An exit that is seen while the runtime starts the container is kept until it is done, so that
//! the start is announced first. `Exiting` is left when no process that was executed in the
//! container is left: its exit is announced last.

use std::fmt;

use crate::exits::Exit;

/// The state of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// The runtime creates it.
    Creating,
    /// It could not be created: what is left of it is removed.
    Discarding,
    /// Its process waits for its start.
    Created {
        /// Its process.
        pid: i32,
    },
    /// It is to be restored from a checkpoint; there is no process.
    Restorable,
    /// The runtime starts it, or restores it.
    Starting {
        /// Its process, if it is not restored.
        pid: Option<i32>,
        /// It has ended meanwhile.
        exit: Option<Exit>,
    },
    /// It runs.
    Running {
        /// Its process.
        pid: i32,
    },
    /// The runtime pauses it.
    Pausing {
        /// Its process.
        pid: i32,
    },
    /// It is paused.
    Paused {
        /// Its process.
        pid: i32,
    },
    /// The runtime resumes it.
    Resuming {
        /// Its process.
        pid: i32,
    },
    /// Its process has ended, and others that were executed in it have not.
    Exiting {
        /// Its process.
        pid: i32,
        /// How it ended.
        exit: Exit,
    },
    /// It has ended.
    Stopped {
        /// Its process.
        pid: i32,
        /// How it ended.
        exit: Exit,
    },
    /// The runtime deletes it.
    Deleting {
        /// Its process; 0: it never had one.
        pid: i32,
        /// How it ended, if it has.
        exit: Option<Exit>,
    },
}

/// What happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The runtime has created it; without a process if it is to be restored.
    Created(Option<i32>),
    /// It cannot be created.
    CreateFailed,
    /// A start is asked for.
    Start,
    /// The runtime has started or restored it as this process.
    Started(i32),
    /// The runtime could not.
    StartFailed,
    /// A pause is asked for.
    Pause,
    /// A resume is asked for.
    Resume,
    /// What was asked for last is done.
    Done,
    /// What was asked for last has failed.
    Failed,
    /// Its process has ended.
    Exited(Exit),
    /// No process that was executed in it is left, and no kill of such is under way.
    Alone,
    /// A deletion is asked for.
    Delete,
}

/// What is to be announced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Notice {
    /// Nothing.
    Nothing,
    /// It runs.
    Started(i32),
    /// It is paused.
    Paused,
    /// It was resumed.
    Resumed,
    /// Its process has ended.
    Exited(i32, Exit),
}

/// The state after an event and what is to be announced; `Err`: why the state forbids it, and the
/// state stays.
pub fn step(state: State, event: Event) -> Result<(State, Notice), &'static str> {
    use Event as E;
    use State as S;
    let quiet = |state| Ok((state, Notice::Nothing));
    match (state, event) {
        (S::Creating, E::Created(Some(pid))) => quiet(S::Created { pid }),
        (S::Creating, E::Created(None)) => quiet(S::Restorable),
        (S::Creating, E::CreateFailed) => quiet(S::Discarding),
        (S::Created { pid }, E::Start) => quiet(S::Starting { pid: Some(pid), exit: None }),
        (S::Restorable, E::Start) => quiet(S::Starting { pid: None, exit: None }),
        (S::Starting { exit: None, .. }, E::Started(pid)) => {
            Ok((S::Running { pid }, Notice::Started(pid)))
        }
        // The exit is announced next, by `Alone`.
        (S::Starting { exit: Some(exit), .. }, E::Started(pid)) => {
            Ok((S::Exiting { pid, exit }, Notice::Started(pid)))
        }
        (S::Starting { pid: None, .. }, E::StartFailed) => quiet(S::Restorable),
        (S::Starting { pid: Some(pid), exit: None }, E::StartFailed) => quiet(S::Created { pid }),
        (S::Starting { pid: Some(pid), exit: Some(exit) }, E::StartFailed) => {
            quiet(S::Exiting { pid, exit })
        }
        (S::Starting { pid, exit: None }, E::Exited(exit)) => {
            quiet(S::Starting { pid, exit: Some(exit) })
        }
        (S::Running { pid }, E::Pause) => quiet(S::Pausing { pid }),
        (S::Pausing { pid }, E::Done) => Ok((S::Paused { pid }, Notice::Paused)),
        (S::Pausing { pid }, E::Failed) => quiet(S::Running { pid }),
        (S::Paused { pid }, E::Resume) => quiet(S::Resuming { pid }),
        (S::Resuming { pid }, E::Done) => Ok((S::Running { pid }, Notice::Resumed)),
        (S::Resuming { pid }, E::Failed) => quiet(S::Paused { pid }),
        (
            S::Created { pid }
            | S::Running { pid }
            | S::Pausing { pid }
            | S::Paused { pid }
            | S::Resuming { pid },
            E::Exited(exit),
        ) => quiet(S::Exiting { pid, exit }),
        (S::Exiting { pid, exit }, E::Alone) => {
            Ok((S::Stopped { pid, exit }, Notice::Exited(pid, exit)))
        }
        // The runtime kills what was not started when it deletes it.
        (S::Created { pid }, E::Delete) => quiet(S::Deleting { pid, exit: None }),
        (S::Restorable, E::Delete) => quiet(S::Deleting { pid: 0, exit: None }),
        (S::Stopped { pid, exit }, E::Delete) => quiet(S::Deleting { pid, exit: Some(exit) }),
        (S::Deleting { pid, exit: None }, E::Exited(exit)) => {
            Ok((S::Deleting { pid, exit: Some(exit) }, Notice::Exited(pid, exit)))
        }
        (S::Deleting { pid: 0, exit: None }, E::Failed) => quiet(S::Restorable),
        (S::Deleting { pid, exit: None }, E::Failed) => quiet(S::Created { pid }),
        (S::Deleting { pid, exit: Some(exit) }, E::Failed) => quiet(S::Stopped { pid, exit }),
        (_, event) => Err(refusal(state, event)),
    }
}

fn refusal(state: State, event: Event) -> &'static str {
    use State as S;
    match (event, state) {
        (Event::Start, S::Paused { .. }) => "cannot start a paused process",
        (Event::Start, S::Stopped { .. } | S::Exiting { .. }) => "cannot start a stopped process",
        (Event::Start, _) => "cannot start a running process",
        (Event::Pause, S::Created { .. } | S::Restorable) => "cannot pause task in created state",
        (Event::Pause, S::Stopped { .. } | S::Exiting { .. }) => "cannot pause a stopped container",
        (Event::Pause, _) => "cannot pause a paused container",
        (Event::Resume, S::Created { .. } | S::Restorable) => "cannot resume task in created state",
        (Event::Resume, S::Stopped { .. } | S::Exiting { .. }) => {
            "cannot resume a stopped container"
        }
        (Event::Resume, _) => "cannot resume a running process",
        (Event::Delete, S::Paused { .. }) => "cannot delete a paused process",
        (Event::Delete, _) => "cannot delete a running process",
        _ => "not possible in this state",
    }
}

impl State {
    /// Its process, 0 without.
    pub fn pid(&self) -> i32 {
        match *self {
            Self::Creating | Self::Discarding | Self::Restorable => 0,
            Self::Starting { pid, .. } => pid.unwrap_or(0),
            Self::Created { pid }
            | Self::Running { pid }
            | Self::Pausing { pid }
            | Self::Paused { pid }
            | Self::Resuming { pid }
            | Self::Exiting { pid, .. }
            | Self::Stopped { pid, .. }
            | Self::Deleting { pid, .. } => pid,
        }
    }

    /// How it ended, once that is announced.
    pub fn exit(&self) -> Option<Exit> {
        match *self {
            Self::Stopped { exit, .. } => Some(exit),
            Self::Deleting { exit, .. } => exit,
            _ => None,
        }
    }

    /// Whether its process has ended, announced or not.
    pub fn has_exited(&self) -> bool {
        match self {
            Self::Starting { exit, .. } | Self::Deleting { exit, .. } => exit.is_some(),
            Self::Exiting { .. } | Self::Stopped { .. } => true,
            _ => false,
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Creating => "being created",
            Self::Discarding => "being removed",
            Self::Created { .. } => "created",
            Self::Restorable => "to be restored",
            Self::Starting { .. } => "being started",
            Self::Running { .. } => "running",
            Self::Pausing { .. } => "being paused",
            Self::Paused { .. } => "paused",
            Self::Resuming { .. } => "being resumed",
            Self::Exiting { .. } => "exiting",
            Self::Stopped { .. } => "stopped",
            Self::Deleting { .. } => "being deleted",
        })
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Created(_) => "end of its creation",
            Self::CreateFailed => "failed creation",
            Self::Start => "start",
            Self::Started(_) => "end of its start",
            Self::StartFailed => "failed start",
            Self::Pause => "pause",
            Self::Resume => "resume",
            Self::Done => "end of a command",
            Self::Failed => "failed command",
            Self::Exited(_) => "exit",
            Self::Alone => "end of its last process",
            Self::Delete => "deletion",
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn events() -> impl Strategy<Value = Vec<Event>> {
        let exit = Exit { status: 3, seconds: 1, nanos: 2 };
        let one = prop_oneof![
            prop::option::of(Just(7)).prop_map(Event::Created),
            Just(Event::CreateFailed),
            Just(Event::Start),
            Just(Event::Started(7)),
            Just(Event::StartFailed),
            Just(Event::Pause),
            Just(Event::Resume),
            Just(Event::Done),
            Just(Event::Failed),
            Just(Event::Exited(exit)),
            Just(Event::Alone),
            Just(Event::Delete),
        ];
        prop::collection::vec(one, 0..40)
    }

    proptest! {
        #[test]
        fn an_exit_is_announced_once_last_and_never_lost(events in events()) {
            let mut state = State::Creating;
            let (mut ended, mut announced, mut started) = (false, 0, 0);
            for event in events {
                // A process ends once, and only when there is one.
                if matches!(event, Event::Exited(_)) && (state.pid() == 0 || ended) {
                    continue;
                }
                let Ok((next, notice)) = step(state, event) else {
                    prop_assert!(!matches!(event, Event::Exited(_)), "lost in {state:?}");
                    continue;
                };
                ended |= matches!(event, Event::Exited(_));
                match notice {
                    Notice::Started(_) => started += 1,
                    Notice::Exited(pid, _) => {
                        prop_assert_eq!(pid, 7);
                        announced += 1;
                    }
                    _ => {}
                }
                prop_assert!(announced == 0 || !matches!(notice, Notice::Started(_)));
                prop_assert_eq!(next.exit().is_some(), announced == 1);
                prop_assert_eq!(next.has_exited(), ended);
                state = next;
            }
            prop_assert!(announced <= 1 && started <= 1);
        }

        #[test]
        fn a_container_that_runs_is_not_deleted(events in events()) {
            let mut state = State::Creating;
            for event in events {
                if let Ok((next, _)) = step(state, event) {
                    if event == Event::Delete {
                        let idle = matches!(state, State::Created { .. } | State::Restorable);
                        prop_assert!(idle || state.exit().is_some(), "{state:?}");
                    }
                    state = next;
                }
            }
        }
    }
}
