//! The sandboxes of a daemon by their ids.

use std::collections::BTreeMap;
use std::future::pending;
use std::ops::ControlFlow;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::exit;
use crate::id::SandboxId;
use crate::podsandbox::recover::{self, AdoptionFailure, Attempt, Recovered};
use crate::podsandbox::{Environment, Phase, Sandbox};

/// The state of an id.
#[derive(Clone, Debug)]
pub(super) enum Slot {
    /// Taken by a Create that is in progress.
    Reserved,
    /// A sandbox.
    Live(Arc<Sandbox>),
    /// A record that recovery could not adopt.
    Quarantined(Arc<Quarantine>),
}

/// Why a record is quarantined.
#[derive(Debug)]
pub(super) struct Quarantine {
    /// Text for operators.
    pub reason: String,
    /// It is read again until it can be adopted.
    is_retried: bool,
}

#[derive(Debug, Default)]
pub(super) struct SandboxRegistry {
    pub slots: Mutex<BTreeMap<SandboxId, Slot>>,
    /// Notified when a record is not read again any more, and when a reservation ends.
    pub changed: Notify,
}

impl SandboxRegistry {
    pub fn free(&self, id: &str) {
        self.slots.lock().remove(id);
    }

    /// Enters what recovery found; returns how a record that could not be read is to be retried.
    pub fn enter(&self, recovered: Recovered) -> Option<(SandboxId, Attempt)> {
        let mut slots = self.slots.lock();
        match recovered {
            // Already removed; the call that frees the id is waiting for the lock or ran first.
            Recovered::Sandbox(sandbox) if sandbox.phase() == Phase::Gone => {
                slots.remove(sandbox.id());
                None
            }
            Recovered::Sandbox(sandbox) => {
                slots.insert(sandbox.shared_id().clone(), Slot::Live(Arc::new(sandbox)));
                None
            }
            Recovered::Quarantined { id, failure: AdoptionFailure { reason, retry } } => {
                let is_retried = retry.is_some();
                let quarantine = Quarantine { reason, is_retried };
                slots.insert(id.clone(), Slot::Quarantined(Arc::new(quarantine)));
                retry.map(|attempt| (id, attempt))
            }
        }
    }

    /// Waits while `id` is taken by a Create, or a removal of files, that is in progress.
    pub async fn settled(&self, id: &str) {
        loop {
            let changed = self.changed.notified();
            if !matches!(self.slots.lock().get(id), Some(Slot::Reserved)) {
                return;
            }
            changed.await;
        }
    }

    /// The record of `id` is read again.
    pub fn is_retried(&self, id: &str) -> bool {
        matches!(self.slots.lock().get(id), Some(Slot::Quarantined(why)) if why.is_retried)
    }

    /// Adopts a record that could not be read, as soon as it can be.
    pub async fn retry(
        self: Arc<Self>,
        environment: Arc<Environment>,
        id: SandboxId,
        Attempt { has_no_record, running }: Attempt,
    ) {
        let running = Mutex::new(running);
        exit::retry(exit::CLEANUP, pending, async |failures| {
            let running = running.lock().take();
            let recovered = match running {
                Some(first) => match first.await {
                    Ok(recovered) => recovered,
                    Err(_) => return ControlFlow::Continue(()),
                },
                None if failures == 0 => return ControlFlow::Continue(()),
                None => {
                    let register = self.clone();
                    let on_gone = move |id: &str| register.free(id);
                    let (environment, again) = (environment.clone(), !has_no_record);
                    recover::recover_one(environment, id.clone(), again, on_gone).await
                }
            };
            self.enter_again(&environment, &id, recovered)
        })
        .await;
        self.changed.notify_waiters();
    }

    /// Enters the result of a retry; continues while the record cannot be read.
    fn enter_again(
        &self,
        environment: &Environment,
        id: &SandboxId,
        recovered: Option<Recovered>,
    ) -> ControlFlow<()> {
        match recovered {
            None => {
                environment.telemetry.quarantine_ended(false);
                self.free(id);
            }
            Some(recovered) => {
                let is_adopted = matches!(recovered, Recovered::Sandbox(_));
                if self.enter(recovered).is_some() {
                    return ControlFlow::Continue(());
                }
                if is_adopted {
                    log::info!(sandbox = id.as_str(); "adopted a record that was quarantined");
                    environment.telemetry.quarantine_ended(true);
                }
            }
        }
        ControlFlow::Break(())
    }
}

/// The id of a Create that is in progress. Frees it when dropped, unless it refers to a sandbox by
/// then.
pub(super) struct Reserved {
    pub register: Arc<SandboxRegistry>,
    pub id: SandboxId,
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let mut slots = self.register.slots.lock();
        if matches!(slots.get(self.id.as_str()), Some(Slot::Reserved)) {
            slots.remove(self.id.as_str());
        }
        self.register.changed.notify_waiters();
    }
}
