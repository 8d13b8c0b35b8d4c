//! The nine RPCs of `sandbox.Controller`: sandbox id to sandbox. No wire types, no system calls.

mod registry;
mod service;

use std::future::ready;
use std::ops::Bound;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::StepError;
use crate::id::SandboxId;
use crate::podsandbox::recover::{self, Recovered};
use crate::podsandbox::{
    self, CreateRequest, END_TIMEOUT, Environment, Error, Exit, Metric, Phase, Platform, Sandbox,
    SandboxInfo, StartResponse, StatusReport, UNKNOWN_TIMEOUT,
};
use crate::pool::{self, Class};
use crate::protos::inspect;
use crate::telemetry::{Census, Telemetry};
use futures::future::Either;
use registry::{Reserved, SandboxRegistry, Slot};
pub use service::SandboxService;
use tokio::time::Instant;

/// All sandboxes of the daemon.
#[derive(Debug)]
pub struct Controller {
    environment: Arc<Environment>,
    sandboxes: Arc<SandboxRegistry>,
    /// Until then Status waits for a record that is read again.
    unknown_deadline: Instant,
    stopping: AtomicBool,
}

impl Controller {
    /// Adopts what an earlier daemon left. To be done before any call is answered.
    ///
    /// # Errors
    /// When the directory of the records cannot be made or read.
    pub async fn open(environment: Arc<Environment>) -> Result<Arc<Self>, StepError> {
        let sandboxes = Arc::new(SandboxRegistry::default());
        let register = sandboxes.clone();
        let begun = std::time::Instant::now();
        let recovered = recover::recover(&environment, move |id| register.free(id)).await?;
        let quarantined =
            recovered.iter().filter(|one| matches!(one, Recovered::Quarantined { .. })).count();
        environment.telemetry.recovered(
            begun.elapsed(),
            recovered.len() - quarantined,
            quarantined,
        );
        for one in recovered {
            if let Some((id, attempt)) = sandboxes.enter(one) {
                let (register, environment) = (sandboxes.clone(), environment.clone());
                drop(tokio::spawn(register.retry(environment, id, attempt)));
            }
        }
        let unknown_deadline = Instant::now() + UNKNOWN_TIMEOUT;
        Ok(Arc::new(Self {
            environment,
            sandboxes,
            unknown_deadline,
            stopping: AtomicBool::new(false),
        }))
    }

    /// Removes the files of a sandbox that has no record: containerd keeps them while it has a
    /// container with the sandbox's id.
    ///
    /// # Errors
    /// Every step that failed.
    async fn remove_files(&self, id: SandboxId) -> Result<(), Error> {
        {
            let mut slots = self.sandboxes.slots.lock();
            if slots.contains_key(id.as_str()) {
                return Ok(());
            }
            slots.insert(id.clone(), Slot::Reserved);
        }
        let reserved = Reserved { register: self.sandboxes.clone(), id: id.clone() };
        let files = self.environment.files(&id);
        // It runs to its end when the caller gives up.
        let removed = pool::run(Class::End, move || {
            let _reserved = reserved;
            files.remove()
        });
        removed.await.unwrap_or_else(|step| Err(step.into())).map_err(|steps| Error::Failed {
            id: id.to_string(),
            rpc: "shutdown",
            steps,
        })
    }

    /// Counters of what happens to the sandboxes.
    pub fn telemetry(&self) -> &Arc<Telemetry> {
        &self.environment.telemetry
    }

    /// The state of every sandbox. Blocks: reads `/proc`.
    pub fn census(&self) -> Census {
        let live = self.live();
        Census {
            shim_memory: live.iter().filter_map(|sandbox| sandbox.shim_memory()).sum(),
            cleanups_pending: live.iter().filter(|one| one.failed_cleanups() > 0).count(),
            sandboxes: live.iter().map(|sandbox| sandbox.phase().name()).collect(),
            states: Phase::ALL.iter().map(|phase| phase.name()).collect(),
        }
    }

    /// Refuses all calls from now on, and returns when nothing is in progress.
    pub async fn drain(&self) {
        self.stopping.store(true, Ordering::Release);
        let live: Vec<Arc<Sandbox>> = self.live();
        futures::future::join_all(live.iter().map(|sandbox| sandbox.idle())).await;
        podsandbox::removals_done().await;
        recover::unmount_if_empty(&self.environment);
    }

    /// The id is taken, by whatever.
    pub fn has(&self, id: &str) -> bool {
        self.sandboxes.slots.lock().contains_key(id)
    }

    /// All sandboxes, in no order.
    pub fn live(&self) -> Vec<Arc<Sandbox>> {
        let slots = self.sandboxes.slots.lock();
        slots
            .values()
            .filter_map(
                |slot| if let Slot::Live(sandbox) = slot { Some(sandbox.clone()) } else { None },
            )
            .collect()
    }

    fn check(&self, id: &str) -> Result<SandboxId, Error> {
        let checked = podsandbox::check_id(id)?;
        if self.stopping.load(Ordering::Acquire) {
            return Err(Error::Stopping { id: id.to_owned() });
        }
        Ok(checked)
    }

    fn sandbox(&self, id: &str) -> Result<Arc<Sandbox>, Error> {
        self.check(id)?;
        match self.sandboxes.slots.lock().get(id) {
            Some(Slot::Live(sandbox)) => Ok(sandbox.clone()),
            Some(Slot::Quarantined(why)) => {
                Err(Error::Quarantined { id: id.to_owned(), reason: why.reason.clone() })
            }
            Some(Slot::Reserved) | None => Err(Error::NotFound { id: id.to_owned() }),
        }
    }
}

impl SandboxService for Controller {
    async fn create(&self, request: CreateRequest) -> Result<(), Error> {
        let id = self.check(&request.id)?;
        {
            let mut slots = self.sandboxes.slots.lock();
            if slots.contains_key(id.as_str()) {
                return Err(Error::AlreadyExists { id: id.to_string() });
            }
            slots.insert(id.clone(), Slot::Reserved);
        }
        let environment = self.environment.clone();
        let reserved = Reserved { register: self.sandboxes.clone(), id: id.clone() };
        // A task of its own: the reservation must end however the caller does.
        let job = tokio::spawn(async move {
            let register = reserved.register.clone();
            let (free, id) = (register.clone(), reserved.id.clone());
            let sandbox = Sandbox::create(environment, request, move |id| free.free(id)).await?;
            let sandbox = Arc::new(sandbox);
            register.slots.lock().insert(id, Slot::Live(sandbox.clone()));
            drop(reserved);
            Ok(sandbox)
        });
        let fault = |e: tokio::task::JoinError| {
            Err(Error::Fault { id: id.to_string(), rpc: "create", reason: e.to_string() })
        };
        job.await.unwrap_or_else(fault)?.container_recorded().await;
        Ok(())
    }

    async fn start(&self, id: &str) -> Result<StartResponse, Error> {
        self.sandbox(id)?.start().await
    }

    async fn platform(&self, id: &str) -> Result<Platform, Error> {
        self.sandbox(id)?.prepare().await?;
        Ok(Platform::node())
    }

    async fn stop(&self, id: &str) -> Result<(), Error> {
        self.sandbox(id)?.stop().await
    }

    fn wait(&self, id: &str) -> impl Future<Output = Result<Exit, Error>> + Send + use<> {
        match self.sandbox(id) {
            Ok(sandbox) => Either::Left(sandbox.wait()),
            Err(e) => Either::Right(ready(Err(e))),
        }
    }

    async fn status(&self, id: &str, verbose: bool) -> Result<StatusReport, Error> {
        let readable = async {
            loop {
                let changed = self.sandboxes.changed.notified();
                if !self.sandboxes.is_retried(id) {
                    return;
                }
                changed.await;
            }
        };
        // Boxed: it is rarely awaited.
        if self.sandboxes.is_retried(id) {
            let _ = Box::pin(tokio::time::timeout_at(self.unknown_deadline, readable)).await;
        }
        self.sandbox(id)?.status(verbose).await
    }

    async fn shutdown(&self, id: &str) -> Result<(), Error> {
        if tokio::time::timeout(END_TIMEOUT, self.sandboxes.settled(id)).await.is_err() {
            let (id, seconds) = (id.to_owned(), END_TIMEOUT.as_secs());
            return Err(Error::Timeout { id, rpc: "shutdown", seconds });
        }
        match self.sandbox(id) {
            Err(Error::NotFound { .. }) => self.remove_files(self.check(id)?).await,
            Err(e) => Err(e),
            Ok(sandbox) => sandbox.shutdown().await,
        }
    }

    async fn metrics(&self, id: &str) -> Result<Metric, Error> {
        self.sandbox(id)?.metrics().await
    }

    async fn update(&self, id: &str, info: SandboxInfo, fields: Vec<String>) -> Result<(), Error> {
        self.sandbox(id)?.update(info, fields).await
    }

    async fn list(&self, after: &str, most: usize) -> Result<(Vec<inspect::Sandbox>, bool), Error> {
        let mut slots: Vec<(SandboxId, Slot)> = {
            let slots = self.sandboxes.slots.lock();
            let behind = slots.range::<str, _>((Bound::Excluded(after), Bound::Unbounded));
            let behind = behind
                .filter(|(_, slot)| !matches!(slot, Slot::Reserved))
                .take(most.saturating_add(1));
            behind.map(|(id, slot)| (id.clone(), slot.clone())).collect()
        };
        let more = slots.len() > most;
        slots.truncate(most);
        let lines = move || {
            let line = |(id, slot): &(SandboxId, Slot)| match slot {
                Slot::Live(sandbox) => Some(sandbox.summary()),
                Slot::Quarantined(why) => Some(podsandbox::quarantined(id, &why.reason)),
                Slot::Reserved => None,
            };
            slots.iter().filter_map(line).collect()
        };
        let lines = pool::run(Class::Query, lines).await;
        let failed =
            |e: StepError| Error::Failed { id: String::new(), rpc: "list", steps: e.into() };
        Ok((lines.map_err(failed)?, more))
    }
}
