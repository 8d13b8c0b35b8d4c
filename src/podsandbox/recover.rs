//! Adopts what an earlier daemon left: every record becomes a sandbox again, or is quarantined.
//!
//! Nothing here deletes what it does not understand. A record that cannot be read is reported and
//! its id stays taken, so that no caller learns that its pod does not exist.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures::stream::{self, StreamExt as _};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use std::os::unix::fs::DirBuilderExt as _;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout, timeout_at};

use super::actor::Entry;
use super::environment::Environment;
use super::files::SandboxFiles;
use super::jobs::Jobs;
use super::record::{RecordError, RecordStore, Stage};
use super::sandbox::Sandbox;
use super::summary::pod_names;
use super::validate::check_id;
use crate::error::{IoContext as _, StepError, StepErrors};
use crate::id::SandboxId;
use crate::pool::{self, Class};
use crate::process::{Adoption, Identity};

/// Records that are recovered concurrently.
const AT_ONCE: usize = 32;

/// How long the recovery of one record may take.
const RECORD_TIMEOUT: Duration = pool::PERMIT_TIMEOUT;

/// The result of recovering one record.
#[derive(Debug)]
pub enum Recovered {
    /// A sandbox again.
    Sandbox(Sandbox),
    /// It could not be taken over. Nothing of a record that cannot be read was touched.
    Quarantined {
        /// The id: the name of its directory.
        id: SandboxId,
        /// Why, and whether that may be temporary.
        failure: AdoptionFailure,
    },
}

/// Why a record could not be adopted.
#[derive(Debug)]
pub struct AdoptionFailure {
    /// Text for operators.
    pub reason: String,
    /// The record is read again: by this attempt, or the ones after it.
    pub retry: Option<Attempt>,
}

/// How a record that could not be adopted is read again.
#[derive(Debug)]
pub struct Attempt {
    /// There was no record when the daemon started: what else there is belongs to an interrupted
    /// Create or removal, and is removed.
    pub has_no_record: bool,
    /// The first attempt, if it has not ended yet.
    pub running: Option<JoinHandle<Option<Recovered>>>,
}

impl AdoptionFailure {
    fn temporary(reason: String, has_no_record: bool) -> Self {
        Self { reason, retry: Some(Attempt { has_no_record, running: None }) }
    }
}

impl From<RecordError> for AdoptionFailure {
    fn from(e: RecordError) -> Self {
        match e {
            RecordError::Missing(_) | RecordError::Io(_) => Self::temporary(e.to_string(), false),
            RecordError::Malformed { .. } | RecordError::Newer { .. } => {
                Self { reason: e.to_string(), retry: None }
            }
        }
    }
}

/// Takes over all records. `on_gone` frees an id when its sandbox is removed later.
///
/// # Errors
/// When the directory of the records can be neither made nor read, or no thread be started; never
/// because of a single record.
pub async fn recover<F>(
    environment: &Arc<Environment>,
    on_gone: F,
) -> Result<Vec<Recovered>, StepError>
where
    F: Fn(&str) + Clone + Send + Sync + 'static,
{
    let sandboxes = environment.sandboxes();
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(sandboxes)
        .step_at("make directory", sandboxes)?;
    keep_private(sandboxes)?;
    let ids = ids(sandboxes)?;
    // Where no thread can be started no record can be looked at, and a pod that is quarantined
    // stays so: the next start may have one. From here on there is one.
    pool::run(Class::Recovery, || ()).await?;
    kill_orphans(environment).await;
    let all = stream::iter(ids).map(|id| recover_in_time(environment.clone(), id, on_gone.clone()));
    let recovered: Vec<Recovered> =
        all.buffer_unordered(AT_ONCE).filter_map(|r| async { r }).collect().await;
    let left: Vec<String> = recovered.iter().map(|one| one.id().to_owned()).collect();
    let shims = environment.shims.clone();
    let deadline = std::time::Instant::now() + RECORD_TIMEOUT;
    let remove =
        move || shims.remove_strays(&left.iter().map(String::as_str).collect::<Vec<_>>(), deadline);
    log_failed("failed to remove sockets without a record", in_time(remove).await);
    Ok(recovered)
}

/// [`recover_one`], which is given more time than its steps have: a record whose reading hangs is
/// quarantined, and the attempt continues.
async fn recover_in_time(
    environment: Arc<Environment>,
    id: SandboxId,
    on_gone: impl FnOnce(&str) + Send + 'static,
) -> Option<Recovered> {
    let mut running = tokio::spawn(recover_one(environment, id.clone(), false, on_gone));
    let (reason, running) = match timeout(RECORD_TIMEOUT + RECORD_TIMEOUT / 5, &mut running).await {
        Ok(Ok(recovered)) => return recovered,
        // The task has ended, and its handle must not be awaited again.
        Ok(Err(panic)) => (panic.to_string(), None),
        Err(_) => ("reading it does not end".to_owned(), Some(running)),
    };
    let retry = Some(Attempt { has_no_record: false, running });
    Some(quarantine(id, AdoptionFailure { reason, retry }))
}

/// Takes over one record; `None`: nothing is left of it. `again`: it was quarantined, so that a
/// record which is missing now is not one of an interrupted Create. `on_gone` as for [`recover`].
pub async fn recover_one(
    environment: Arc<Environment>,
    id: SandboxId,
    again: bool,
    on_gone: impl FnOnce(&str) + Send + 'static,
) -> Option<Recovered> {
    let deadline = Instant::now() + RECORD_TIMEOUT;
    let (shared, record_id) = (environment.clone(), id.clone());
    let read = move || read_sandbox(&shared, &record_id, again);
    let read = pool::run(Class::Recovery, read).await;
    let read = read.unwrap_or_else(|e| Err(AdoptionFailure::temporary(e.to_string(), false)));
    match read {
        Ok(None) => None,
        Ok(Some(on_disk)) => {
            adopt_sandbox(environment, on_disk, deadline, on_gone).await.map(Recovered::Sandbox)
        }
        Err(failure) => Some(quarantine(id, failure)),
    }
}

fn quarantine(id: SandboxId, failure: AdoptionFailure) -> Recovered {
    log::error!(
        sandbox = id.as_str();
        "quarantined a record that recovery cannot adopt: {}", failure.reason
    );
    Recovered::Quarantined { id, failure }
}

impl Recovered {
    fn id(&self) -> &str {
        match self {
            Self::Sandbox(sandbox) => sandbox.id(),
            Self::Quarantined { id, .. } => id,
        }
    }
}

/// Kills pause processes of ours without a record: of a start that was interrupted before it wrote
/// one, or whose record is gone.
async fn kill_orphans(environment: &Arc<Environment>) {
    let environment = environment.clone();
    let kill = move || {
        let recorded = |id: &str| {
            let id = match check_id(id) {
                Ok(id) => id,
                Err(e) => {
                    log::error!("ignoring pause process with an invalid sandbox id: {e}");
                    return true;
                }
            };
            let store = RecordStore::new(&environment.layout, &id);
            match store.stage() {
                Ok(Stage::Created | Stage::Exited { .. }) => {
                    !matches!(store.read_record(), Ok(_) | Err(RecordError::Missing(_)))
                }
                Ok(Stage::Started { .. }) => {
                    !matches!(store.read_record(), Err(RecordError::Missing(_)))
                }
                Err(_) => true,
            }
        };
        environment.driver.kill_orphans(&recorded)
    };
    log_failed("failed to kill pause processes without a record", in_time(kill).await);
}

/// Runs blocking steps, which end later if they take too long.
async fn in_time(
    steps: impl FnOnce() -> Result<(), StepErrors> + Send + 'static,
) -> Result<(), StepErrors> {
    let late = |_| StepError::new("recover", io::ErrorKind::TimedOut.into());
    match timeout(RECORD_TIMEOUT, pool::run(Class::Recovery, steps)).await.map_err(late).flatten() {
        Ok(done) => done,
        Err(step) => Err(step.into()),
    }
}

fn log_failed(what: &str, result: Result<(), StepErrors>) {
    for step in result.err().unwrap_or_default() {
        log::error!("{what}: {step}");
    }
}

/// Makes the directory of the records a private mount. Otherwise each mount below it would
/// propagate to every other mount namespace, which costs more with every container.
fn keep_private(sandboxes: &Path) -> Result<(), StepError> {
    let private =
        || mount(None::<&str>, sandboxes, None::<&str>, MsFlags::MS_PRIVATE, None::<&str>);
    match private() {
        // It is no mount point yet.
        Err(nix::Error::EINVAL) => {
            mount(Some(sandboxes), sandboxes, None::<&str>, MsFlags::MS_BIND, None::<&str>)
                .step_at("bind directory", sandboxes)?;
            private().step_at("make mount private", sandboxes)
        }
        other => other.step_at("make mount private", sandboxes),
    }
}

/// Takes back what [`recover`] mounted, when no sandbox is left; with sandboxes it stays for the
/// next daemon.
pub fn unmount_if_empty(environment: &Environment) {
    let sandboxes = environment.sandboxes();
    if ids(sandboxes).is_ok_and(|ids| ids.is_empty())
        && let Err(e) = umount2(sandboxes, MntFlags::UMOUNT_NOFOLLOW)
    {
        log::warn!("failed to unmount {}: {e}", sandboxes.display());
    }
}

fn ids(sandboxes: &Path) -> Result<Vec<SandboxId>, StepError> {
    let mut ids = Vec::new();
    for entry in fs::read_dir(sandboxes).step_at("read directory", sandboxes)? {
        let entry = entry.step_at("read directory", sandboxes)?;
        // Links are not followed: their targets are not ours.
        // Entries of unknown type may belong to a pod: reading them shows the fault.
        let directory = entry.file_type().map_or(true, |kind| kind.is_dir());
        let name = entry.file_name().into_string().ok().filter(|_| directory);
        match name.and_then(|name| SandboxId::try_from(name).ok()) {
            Some(id) => ids.push(id),
            None => log::error!("not a sandbox directory: {}", entry.path().display()),
        }
    }
    Ok(ids)
}

/// A sandbox as an earlier daemon left it.
struct OnDisk {
    stage: Stage,
    jobs: Arc<Jobs>,
    /// A Start left something.
    begun: bool,
    /// Its shim died with containers in it.
    shim_died: bool,
}

/// Makes a sandbox again of what is on disk, by the deadline: what is not known then, its owner
/// looks for. `None`: its start was interrupted, and it is removed.
async fn adopt_sandbox(
    environment: Arc<Environment>,
    on_disk: OnDisk,
    deadline: Instant,
    on_gone: impl FnOnce(&str) + Send + 'static,
) -> Option<Sandbox> {
    let OnDisk { stage, jobs, begun, shim_died } = on_disk;
    let id = jobs.id().clone();
    let enter = |jobs, entry| Sandbox::enter(environment, jobs, entry, on_gone);
    let entry = match stage {
        Stage::Created if begun => {
            log::warn!(sandbox = id.as_str(); "start was interrupted; removing the sandbox");
            let sandbox = enter(jobs, Entry::Interrupted);
            return timeout_at(deadline, sandbox.gone()).await.is_err().then_some(sandbox);
        }
        Stage::Created => {
            let sandbox = enter(jobs, Entry::Created);
            sandbox.serve_recovered(None, false);
            return Some(sandbox);
        }
        Stage::Exited { pid, exit, .. } => Entry::NotReady { pid, exit },
        // First, as the search for a shim can take all the time.
        Stage::Started { identity } => adopt(&id, deadline, &jobs, identity).await,
    };
    let mut recovery = jobs.shim.recover();
    let late = timeout_at(deadline, &mut recovery).await.is_err();
    if late {
        log::error!(sandbox = id.as_str(); "recovery of the shim did not finish in time");
    }
    let sandbox = enter(jobs, entry);
    sandbox.serve_recovered(late.then_some(recovery), shim_died);
    Some(sandbox)
}

/// Finds the pause process that the record names.
async fn adopt(id: &SandboxId, deadline: Instant, jobs: &Arc<Jobs>, identity: Identity) -> Entry {
    let pid = identity.pid;
    let unknown = match timeout_at(deadline, jobs.adopt_process(identity)).await {
        Ok(Adoption::Alive(pause)) => return Entry::Ready(Arc::from(pause)),
        Ok(Adoption::Dead(exit)) => {
            log::warn!(
                sandbox = id.as_str(), status = exit.status;
                "sandbox stopped before recovery"
            );
            return Entry::NotReady { pid, exit };
        }
        Ok(Adoption::Unknown(step)) => step.to_string(),
        Err(_) => format!("timed out after {} s", RECORD_TIMEOUT.as_secs()),
    };
    log::error!(
        sandbox = id.as_str();
        "cannot determine whether the pause process runs: {unknown}"
    );
    Entry::Unknown { pid }
}

/// Reads one sandbox; `None`: there was no record, and what else there was is removed. Blocks.
fn read_sandbox(
    environment: &Arc<Environment>,
    id: &SandboxId,
    again: bool,
) -> Result<Option<OnDisk>, AdoptionFailure> {
    let store = RecordStore::new(&environment.layout, id);
    let record = match store.read_record() {
        Ok(record) => record,
        // A daemon ended between making the directory and writing the record, or between removing
        // the two; or someone else has removed the record.
        Err(RecordError::Missing(_)) if !again => {
            let removed = SandboxFiles::new(&environment.layout, id)
                .remove()
                .map_err(|steps| steps.to_string());
            let removed = removed.and_then(|()| store.remove().map_err(|step| step.to_string()));
            return removed.map(|()| None).map_err(|e| {
                AdoptionFailure::temporary(format!("a directory without a record: {e}"), true)
            });
        }
        Err(e) => return Err(e.into()),
    };
    let stage = store.stage()?;
    // A record whose config cannot be decoded has no names; Status reports why.
    let pod = record.decode_config().as_ref().map(pod_names).unwrap_or_default();
    let level = environment.selinux.hold(&record.labels);
    let jobs = Arc::new(Jobs::new(environment, &record, pod, level));
    if let Stage::Exited { reason: Some(reason), .. } = stage {
        let _ = jobs.end.set(reason);
    }
    let (begun, shim_died) = (jobs.files.begun(), jobs.shim.death().is_some());
    Ok(Some(OnDisk { stage, jobs, begun, shim_died }))
}
