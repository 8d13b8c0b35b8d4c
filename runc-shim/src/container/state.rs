//! The settled states of a container. A step in progress ([`super::step::Step`]) changes none of
//! them until it has ended.
//!
//! ```text
//! New -> Created, Restorable -> Running <-> Paused
//!  |              |    |           |          |
//! Failed          |    +-----------+----------+--> Exiting -> Stopped
//!  |              |                                              |
//! (none)        (none)                                         (none)
//! ```
//!
//! `Exiting` lasts until a start in progress is announced and the execs of the container have
//! exited, so that the exit of the container is announced last.

use containerd_shim_protos::types::task::Status;

use crate::error::Error;
use crate::exits::Exit;
use crate::ttrpc::request::Method;

/// The state of a container.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// The container is not created yet.
    #[default]
    New,
    /// The creation has failed, and the leftovers of the container are being removed.
    Failed,
    /// The start will restore the container from a checkpoint; there is no process yet.
    Restorable,
    /// The first process exists and waits for the start.
    Created,
    /// The container runs.
    Running,
    /// The container is paused.
    Paused,
    /// The first process has exited, and that is not announced yet.
    Exiting(Exit),
    /// The exit of the container was announced.
    Stopped(Exit),
}

impl State {
    /// Changes the state after a step has succeeded. False: the first process has exited meanwhile,
    /// and the state stays.
    pub fn settle(&mut self, next: Self) -> bool {
        let may_change = !self.has_exited();
        if may_change {
            *self = next;
        }
        may_change
    }

    /// Notes the exit of the first process.
    pub fn note_exit(&mut self, exit: Exit) {
        self.settle(Self::Exiting(exit));
    }

    /// The exit of the first process if it must be announced, which the caller does now.
    pub fn take_exit(&mut self) -> Option<Exit> {
        let Self::Exiting(exit) = *self else { return None };
        *self = Self::Stopped(exit);
        Some(exit)
    }

    /// The exit of the first process, once it was announced.
    pub fn exit(&self) -> Option<Exit> {
        match *self {
            Self::Stopped(exit) => Some(exit),
            _ => None,
        }
    }

    /// Whether the first process has exited, announced or not.
    pub fn has_exited(&self) -> bool {
        matches!(self, Self::Exiting(_) | Self::Stopped(_))
    }

    /// The state in messages.
    pub fn status(&self) -> Status {
        match self {
            Self::New | Self::Failed | Self::Restorable | Self::Created => Status::CREATED,
            Self::Running | Self::Exiting(_) => Status::RUNNING,
            Self::Paused => Status::PAUSED,
            Self::Stopped(_) => Status::STOPPED,
        }
    }

    /// Checks that a call for the container is allowed in this state.
    ///
    /// # Errors
    /// The refusal.
    pub fn check(&self, method: &Method) -> Result<(), Error> {
        use Method as M;
        use State as S;
        let is_allowed = match method {
            M::Start => matches!(self, S::Created | S::Restorable),
            M::Pause => matches!(self, S::Running),
            M::Resume => matches!(self, S::Paused),
            M::Checkpoint(_) => matches!(self, S::Running | S::Paused),
            M::Update(_) => matches!(self, S::Restorable | S::Created | S::Running | S::Paused),
            M::Exec(_) => matches!(self, S::Created | S::Running),
            M::Delete => matches!(self, S::Failed | S::Restorable | S::Created | S::Stopped(_)),
            _ => true,
        };
        if is_allowed {
            return Ok(());
        }
        let status = format!("{:?}", self.status()).to_lowercase();
        Err(Error::state(format!("not possible: the container is {status}")))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A change of a state.
    #[derive(Debug, Clone)]
    enum Event {
        Settle(State),
        Exit,
        Announce,
    }

    fn events() -> impl Strategy<Value = Vec<Event>> {
        use State as S;
        let settled = [S::Failed, S::Restorable, S::Created, S::Running, S::Paused];
        let one = prop_oneof![
            4 => prop::sample::select(settled.to_vec()).prop_map(Event::Settle),
            1 => Just(Event::Exit),
            1 => Just(Event::Announce),
        ];
        prop::collection::vec(one, 0..40)
    }

    proptest! {
        #[test]
        fn an_exit_is_announced_once_and_never_lost(events in events()) {
            let exit = Exit { status: 3, seconds: 1, nanos: 2 };
            let mut state = State::New;
            let (mut exited, mut announced) = (false, 0);
            for event in events {
                match event {
                    Event::Settle(next) => {
                        prop_assert_eq!(state.settle(next), !exited);
                        prop_assert!(exited || state == next);
                    }
                    Event::Exit => {
                        // The second exit would be that of another process.
                        let status = if exited { 4 } else { exit.status };
                        state.note_exit(Exit { status, ..exit });
                        exited = true;
                    }
                    Event::Announce => {
                        if let Some(found) = state.take_exit() {
                            prop_assert_eq!(found, exit);
                            announced += 1;
                        }
                        prop_assert_eq!(announced == 1, exited);
                    }
                }
                prop_assert_eq!(state.has_exited(), exited);
                prop_assert_eq!(state.exit(), (announced == 1).then_some(exit));
            }
            prop_assert!(announced <= 1);
        }
    }

    /// As containerd's shim for runc does, which has neither `Failed` nor `Exiting`.
    #[test]
    fn each_state_allows_its_calls_only() {
        use State as S;
        let exit = Exit { status: 3, seconds: 1, nanos: 2 };
        let methods = [
            ("start", Method::Start),
            ("pause", Method::Pause),
            ("resume", Method::Resume),
            ("checkpoint", Method::Checkpoint(Default::default())),
            ("update", Method::Update(Default::default())),
            ("exec", Method::Exec(Default::default())),
            ("delete", Method::Delete),
            ("kill", Method::Kill(Default::default())),
        ];
        for (state, status, allowed) in [
            (S::Failed, Status::CREATED, "delete kill"),
            (S::Restorable, Status::CREATED, "start update delete kill"),
            (S::Created, Status::CREATED, "start update exec delete kill"),
            (S::Running, Status::RUNNING, "pause checkpoint update exec kill"),
            (S::Paused, Status::PAUSED, "resume checkpoint update kill"),
            (S::Exiting(exit), Status::RUNNING, "kill"),
            (S::Stopped(exit), Status::STOPPED, "delete kill"),
        ] {
            assert_eq!(state.status(), status, "{state:?}");
            let found = methods.iter().filter(|(_, method)| state.check(method).is_ok());
            let found: Vec<&str> = found.map(|(name, _)| *name).collect();
            assert_eq!(found.join(" "), allowed, "{state:?}");
        }
    }
}
