//! The states of a container, and the events that change them.
//!
//! ```text
//! Creating -> Created -> Starting -> Running <-> Pausing, Paused, Resuming
//!     |          |           |          |             |
//! Discarding     +-----------+----------+-------------+--> Exiting -> Stopped
//!     |                                                                  |
//!   (none)                                                 (none) <- Deleting
//! ```
//!
//! An exit that is observed while the runtime starts the container is kept until the start is done,
//! so that the start is announced first. `Exiting` lasts until the execs of the container have
//! exited, so that the exit of the container is announced last.

use crate::exits::Exit;

/// The state of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// The container is being created.
    Creating,
    /// The creation failed, and the leftovers of the container are being removed.
    Discarding,
    /// The first process exists and waits for the start.
    Created {
        /// The first process.
        pid: i32,
    },
    /// The start will restore the container from a checkpoint; there is no process yet.
    Restorable,
    /// The runtime starts or restores the container.
    Starting {
        /// The first process; `None`: the container is being restored.
        pid: Option<i32>,
        /// The exit of the first process, if it has exited meanwhile.
        exit: Option<Exit>,
    },
    /// The container runs.
    Running {
        /// The first process.
        pid: i32,
    },
    /// The runtime pauses the container.
    Pausing {
        /// The first process.
        pid: i32,
    },
    /// The container is paused.
    Paused {
        /// The first process.
        pid: i32,
    },
    /// The runtime resumes the container.
    Resuming {
        /// The first process.
        pid: i32,
    },
    /// The first process has exited; execs or other remaining processes may not have.
    Exiting {
        /// The first process.
        pid: i32,
        /// The exit of the first process.
        exit: Exit,
    },
    /// The exit of the container was announced.
    Stopped {
        /// The first process.
        pid: i32,
        /// The exit of the first process.
        exit: Exit,
    },
    /// The container is being deleted.
    Deleting {
        /// The first process; 0: there never was one.
        pid: i32,
        /// The exit of the first process, if it has exited.
        exit: Option<Exit>,
    },
}

/// An event that may change the state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The creation has succeeded with this process; `None`: the start will restore the container.
    Created(Option<i32>),
    /// The creation has failed.
    CreateFailed,
    /// A Start was requested.
    Start,
    /// The runtime has started or restored the container; its first process has this pid.
    Started(i32),
    /// The start or restore has failed.
    StartFailed,
    /// A Pause was requested.
    Pause,
    /// A Resume was requested.
    Resume,
    /// The pause or resume has succeeded.
    Done,
    /// The pause, resume or deletion has failed.
    Failed,
    /// The first process has exited.
    Exited(Exit),
    /// No exec is being started or runs, and no command kills remaining processes.
    ExecsGone,
    /// A Delete was requested.
    Delete,
}

/// The event that must be sent to containerd.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Notice {
    /// None.
    Nothing,
    /// The container was started; the pid of its first process.
    Started(i32),
    /// The container was paused.
    Paused,
    /// The container was resumed.
    Resumed,
    /// The container has exited; the pid of its first process, and its exit.
    Exited(i32, Exit),
}

/// The state after an event, and the notice to send. `Err`: the reason why the event is not allowed
/// in this state, which does not change.
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
        // The exit is announced next, by `ExecsGone`.
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
        (S::Exiting { pid, exit }, E::ExecsGone) => {
            Ok((S::Stopped { pid, exit }, Notice::Exited(pid, exit)))
        }
        // The runtime kills the process of a created container when it deletes the container.
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
    /// The pid of the first process; 0: there is none.
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

    /// The exit of the first process, once it was announced.
    pub fn exit(&self) -> Option<Exit> {
        match *self {
            Self::Stopped { exit, .. } => Some(exit),
            Self::Deleting { exit, .. } => exit,
            _ => None,
        }
    }

    /// Whether the first process has exited, announced or not.
    pub fn has_exited(&self) -> bool {
        match self {
            Self::Starting { exit, .. } | Self::Deleting { exit, .. } => exit.is_some(),
            Self::Exiting { .. } | Self::Stopped { .. } => true,
            _ => false,
        }
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
            Just(Event::ExecsGone),
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
                // A process exits once, and only if there is one.
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
