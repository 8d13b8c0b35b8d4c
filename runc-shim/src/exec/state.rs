//! The states of an exec, and the events that change them.

use crate::exits::Exit;

/// The state of an exec.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// The exec was added and not started.
    Added,
    /// The exec is being started.
    Starting,
    /// The start has failed.
    Failed {
        /// The exit that calls of Wait report, because there is no exit status.
        exit: Exit,
    },
    /// The process runs.
    Running {
        /// The process.
        pid: i32,
    },
    /// The process has exited.
    Stopped {
        /// The process.
        pid: i32,
        /// Its exit.
        exit: Exit,
    },
}

/// An event that may change the state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// A Start was requested.
    Start,
    /// The runtime has started the process with this pid.
    Started(i32),
    /// The start has failed; calls of Wait report this exit.
    StartFailed(Exit),
    /// The process has exited.
    Exited(Exit),
    /// A Delete was requested.
    Delete,
}

/// The state after an event; `None`: the exec is deleted. `Err`: the reason why the event is not
/// allowed in this state, which does not change.
pub fn step(state: State, event: Event) -> Result<Option<State>, &'static str> {
    use Event as E;
    use State as S;
    match (state, event) {
        (S::Added, E::Start) => Ok(Some(S::Starting)),
        (S::Starting, E::Started(pid)) => Ok(Some(S::Running { pid })),
        (S::Starting, E::StartFailed(exit)) => Ok(Some(S::Failed { exit })),
        (S::Running { pid }, E::Exited(exit)) => Ok(Some(S::Stopped { pid, exit })),
        (S::Added | S::Failed { .. } | S::Stopped { .. }, E::Delete) => Ok(None),
        (S::Starting | S::Running { .. }, E::Delete) => Err("cannot delete a running process"),
        (S::Stopped { .. } | S::Failed { .. }, E::Start) => Err("cannot start a stopped process"),
        (S::Starting | S::Running { .. }, E::Start) => Err("cannot start a running process"),
        _ => Err("not possible in this state"),
    }
}

impl State {
    /// The pid of the process; 0: there is none.
    pub fn pid(&self) -> i32 {
        match *self {
            Self::Added | Self::Starting | Self::Failed { .. } => 0,
            Self::Running { pid } | Self::Stopped { pid, .. } => pid,
        }
    }

    /// The exit of the process, if it has exited or could not be started.
    pub fn exit(&self) -> Option<Exit> {
        match *self {
            Self::Stopped { exit, .. } | Self::Failed { exit } => Some(exit),
            _ => None,
        }
    }

    /// Whether the exec is being started or runs, so that the exit of its container is not
    /// announced yet.
    pub fn is_live(&self) -> bool {
        matches!(self, Self::Starting | Self::Running { .. })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_running_exec_is_not_deleted_and_an_exit_is_kept(
            events in prop::collection::vec(0usize..5, 0..30),
        ) {
            let exit = Exit { status: 3, seconds: 1, nanos: 2 };
            let all = [
                Event::Start, Event::Started(7), Event::StartFailed(exit), Event::Exited(exit),
                Event::Delete,
            ];
            let ends = |event| matches!(event, Event::Exited(_) | Event::StartFailed(_));
            let mut state = State::Added;
            for event in events.into_iter().map(|index| all[index]) {
                match step(state, event) {
                    Ok(Some(next)) => {
                        prop_assert!(state.exit().is_none(), "left {state:?} by {event:?}");
                        prop_assert_eq!(next.exit().is_some(), ends(event));
                        state = next;
                    }
                    Ok(None) => {
                        prop_assert!(!state.is_live() && event == Event::Delete);
                        return Ok(());
                    }
                    Err(reason) => prop_assert!(!reason.is_empty()),
                }
            }
        }
    }
}
