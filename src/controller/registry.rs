//! The sandboxes of a daemon by their ids.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use crate::exit;
use crate::id::SandboxId;
use crate::podsandbox::recover::{self, Recovered};
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
    /// Notified when a record is not read again any more.
    pub changed: Notify,
}

impl SandboxRegistry {
    pub fn free(&self, id: &str) {
        self.slots.lock().remove(id);
    }

    /// Enters what recovery found.
    pub fn enter(&self, recovered: Recovered) {
        let mut slots = self.slots.lock();
        match recovered {
            // Its time was over; the call that frees its id waits for the lock or came too early.
            Recovered::Sandbox(sandbox) if sandbox.phase() == Phase::Gone => {
                slots.remove(sandbox.id());
            }
            Recovered::Sandbox(sandbox) => {
                slots.insert(sandbox.shared_id().clone(), Slot::Live(Arc::new(sandbox)));
            }
            Recovered::Quarantined { id, failure } => {
                let (reason, is_retried) = (failure.reason, failure.is_temporary);
                slots.insert(id, Slot::Quarantined(Arc::new(Quarantine { reason, is_retried })));
            }
        }
    }

    /// The record of `id` is read again.
    pub fn is_retried(&self, id: &str) -> bool {
        matches!(self.slots.lock().get(id), Some(Slot::Quarantined(why)) if why.is_retried)
    }

    /// Adopts a record that could not be read, as soon as it can be. `overdue` and `has_no_record`
    /// are of the first try.
    pub async fn retry(
        self: Arc<Self>,
        environment: Arc<Environment>,
        id: SandboxId,
        mut overdue: Option<JoinHandle<()>>,
        has_no_record: bool,
    ) {
        for failures in 1.. {
            if let Some(overdue) = overdue.take() {
                let _ = overdue.await;
            }
            tokio::time::sleep(exit::CLEANUP.delay(failures)).await;
            let register = self.clone();
            let on_gone = move |id: &str| register.free(id);
            let again = !has_no_record;
            match recover::recover_one(environment.clone(), id.clone(), again, on_gone).await {
                None => {
                    environment.telemetry.quarantine_ended(false);
                    self.free(&id);
                }
                Some(mut recovered) => {
                    if let Recovered::Quarantined { failure, .. } = &mut recovered {
                        let is_temporary = failure.is_temporary;
                        overdue = failure.overdue.take();
                        self.enter(recovered);
                        if is_temporary {
                            continue;
                        }
                    } else {
                        log::info!(sandbox = id.as_str(); "adopted a record that was quarantined");
                        environment.telemetry.quarantine_ended(true);
                        self.enter(recovered);
                    }
                }
            }
            return self.changed.notify_waiters();
        }
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
    }
}
