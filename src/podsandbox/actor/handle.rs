//! An actor as others see it.

use futures::channel::mpsc::UnboundedSender;
use tokio::sync::watch;
use tokio::time::Instant;

use super::Message;
use crate::podsandbox::machine::Phase;
use crate::process::Exit;

/// The state of a sandbox that readers see; they never call the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Published {
    /// Its phase.
    pub phase: Phase,
    /// Process id of the pause process on the node; 0 where there was none.
    pub pid: u32,
    /// How the pause process exited.
    pub exit: Option<Exit>,
    /// Cleanups that have failed in a row and are retried.
    pub failures: u32,
}

/// How others reach an actor.
#[derive(Clone, Debug)]
pub struct ActorHandle {
    pub(super) mailbox: UnboundedSender<Message>,
    pub(super) published: watch::Receiver<Published>,
}

impl ActorHandle {
    /// Sends a message; false when the actor has ended.
    pub fn send(&self, message: Message) -> bool {
        self.mailbox.unbounded_send(message).is_ok()
    }

    /// The published state.
    pub fn published(&self) -> Published {
        *self.published.borrow()
    }

    /// Waits until the sandbox is removed.
    pub async fn gone(&self) {
        let mut published = self.published.clone();
        // It ends with its sandbox, or fails the same way.
        let _ = published.wait_for(|published| published.phase == Phase::Gone).await;
    }

    /// Waits until it is known whether the pause process lives, at most until `deadline`.
    pub async fn known(&self, deadline: Instant) {
        let mut published = self.published.clone();
        let known = published.wait_for(|published| published.phase != Phase::Unknown);
        // Late, or the actor has ended: what is published is the answer.
        let _ = tokio::time::timeout_at(deadline, known).await;
    }

    /// Waits for the exit; `None` when there will be none, as the actor has ended.
    pub fn exit(&self) -> impl Future<Output = Option<Exit>> + Send + use<> {
        let mut published = self.published.clone();
        async move {
            let seen = published.wait_for(|published| published.exit.is_some()).await;
            seen.ok().and_then(|published| published.exit)
        }
    }
}
