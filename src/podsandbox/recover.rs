//! Adopts what an earlier daemon left: every record becomes a sandbox again, or is quarantined.
//!
//! Nothing here deletes what it does not understand. A record that cannot be read is reported and
//! its id stays taken, so that no caller learns that its pod does not exist.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use futures::FutureExt as _;
use futures::future::{BoxFuture, join_all};
use futures::stream::{self, StreamExt as _};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use std::os::unix::fs::DirBuilderExt as _;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::actor::{Entry, abandoned_at};
use super::environment::Environment;
use super::files::SandboxFiles;
use super::inspect::pod_names;
use super::jobs::Jobs;
use super::record::{RecordError, RecordStore, Stage};
use super::sandbox::Sandbox;
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
    /// The error may be temporary, so the record is read again.
    pub is_temporary: bool,
    /// There was no record when the daemon started: what else there is belongs to an interrupted
    /// Create or removal, and is removed.
    pub has_no_record: bool,
    /// Ends when the steps that were overdue have ended. Await it before another try.
    pub overdue: Option<JoinHandle<()>>,
}

impl AdoptionFailure {
    fn temporary(reason: String) -> Self {
        Self { reason, is_temporary: true, has_no_record: false, overdue: None }
    }
}

impl From<RecordError> for AdoptionFailure {
    fn from(e: RecordError) -> Self {
        let is_temporary = match e {
            RecordError::Missing(_) | RecordError::Io(_) => true,
            RecordError::Malformed { .. } | RecordError::Newer { .. } => false,
        };
        Self { reason: e.to_string(), is_temporary, has_no_record: false, overdue: None }
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
    let all =
        stream::iter(ids).map(|id| recover_one(environment.clone(), id, false, on_gone.clone()));
    let recovered: Vec<Recovered> =
        all.buffer_unordered(AT_ONCE).filter_map(|r| async { r }).collect().await;
    let left: Vec<String> = recovered.iter().map(|one| one.id().to_owned()).collect();
    let shims = environment.shims.clone();
    let deadline = std::time::Instant::now() + RECORD_TIMEOUT;
    let remove =
        move || shims.remove_strays(&left.iter().map(String::as_str).collect::<Vec<_>>(), deadline);
    match RecordDeadline::new(RECORD_TIMEOUT).run_blocking(remove).await {
        Ok(Ok(())) => {}
        Ok(Err(steps)) => log_failed("failed to remove sockets without a record", &steps.into()),
        Err(reason) => log::error!("failed to remove sockets without a record: {reason}"),
    }
    Ok(recovered)
}

/// Takes over one record; `None`: nothing is left of it. `again`: it was quarantined, so that a
/// record which is missing now is not one of an interrupted Create. `on_gone` as for [`recover`].
pub async fn recover_one(
    environment: Arc<Environment>,
    id: SandboxId,
    again: bool,
    on_gone: impl FnOnce(&str) + Send + 'static,
) -> Option<Recovered> {
    match recover_record(&environment, id.clone(), again).await {
        Ok(None) => None,
        Ok(Some((jobs, entry, abandoned))) => {
            let sandbox = Sandbox::enter(environment, jobs, entry, abandoned, on_gone);
            Some(Recovered::Sandbox(sandbox))
        }
        Err(failure) => {
            log::error!(
                sandbox = id.as_str();
                "quarantined a record that recovery cannot adopt: {}", failure.reason
            );
            Some(Recovered::Quarantined { id, failure })
        }
    }
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
    let mut deadline = RecordDeadline::new(RECORD_TIMEOUT);
    let ended = deadline.run_blocking(move || {
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
    });
    match ended.await {
        Ok(Ok(())) => {}
        Ok(Err(steps)) => {
            log_failed("failed to kill pause processes without a record", &steps.into())
        }
        Err(reason) => log::error!("failed to kill pause processes without a record: {reason}"),
    }
}

fn log_failed(what: &str, steps: &StepErrors) {
    steps.into_iter().for_each(|step| log::error!("{what}: {step}"));
}

fn log_failed_of(id: &str, what: &str, steps: &StepErrors) {
    steps.into_iter().for_each(|step| log::error!(sandbox = id; "{what}: {step}"));
}

/// The deadline of one record for all its recovery steps, and the steps that still ran when it
/// passed.
struct RecordDeadline {
    deadline: Instant,
    overdue: Vec<BoxFuture<'static, ()>>,
}

impl RecordDeadline {
    fn new(within: Duration) -> Self {
        Self { deadline: Instant::now() + within, overdue: Vec::new() }
    }

    /// Runs a step that changes the state of the sandbox.
    ///
    /// # Errors
    /// The step panicked, did not finish before the deadline, or did not begin before it.
    async fn run<T: Send + 'static>(
        &mut self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, String> {
        let overdue = || format!("timed out after {} s", RECORD_TIMEOUT.as_secs());
        if Instant::now() >= self.deadline {
            return Err(overdue());
        }
        let mut running = tokio::spawn(work);
        match tokio::time::timeout_at(self.deadline, &mut running).await {
            Ok(done) => done.map_err(|panic| panic.to_string()),
            Err(_) => {
                self.overdue.push(running.map(drop).boxed());
                Err(overdue())
            }
        }
    }

    /// As [`RecordDeadline::run`], for a step that changes nothing: nothing waits for it if it is
    /// overdue.
    ///
    /// # Errors
    /// As [`RecordDeadline::run`].
    async fn run_read_only<T: Send + 'static>(
        &mut self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, String> {
        let before = self.overdue.len();
        let answer = self.run(work).await;
        self.overdue.truncate(before);
        answer
    }

    /// As [`RecordDeadline::run`], for a blocking task.
    ///
    /// # Errors
    /// As [`RecordDeadline::run`].
    async fn run_blocking<T: Send + 'static>(
        &mut self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, String> {
        self.run(pool::run(Class::Recovery, work)).await?.map_err(|step| step.to_string())
    }

    /// A task that finishes when all overdue steps have; `None`: there are none.
    fn take_overdue(&mut self) -> Option<JoinHandle<()>> {
        let overdue = std::mem::take(&mut self.overdue);
        (!overdue.is_empty()).then(|| tokio::spawn(join_all(overdue).map(drop)))
    }
}

/// Makes the directory of the records a private mount. Otherwise each mount below it would
/// propagate to every other mount namespace, which costs more with every container.
fn keep_private(sandboxes: &Path) -> Result<(), StepError> {
    let private =
        || mount(None::<&str>, sandboxes, None::<&str>, MsFlags::MS_PRIVATE, None::<&str>);
    match private() {
        // Not a mount yet.
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
        // Not followed: what a link leads to is not ours.
        // One of which the type cannot be read may be a pod's: reading it tells what is wrong.
        let directory = entry.file_type().map_or(true, |kind| kind.is_dir());
        let name = entry.file_name().into_string().ok().filter(|_| directory);
        match name.and_then(|name| SandboxId::try_from(name).ok()) {
            Some(id) => ids.push(id),
            None => log::error!("not a sandbox directory: {}", entry.path().display()),
        }
    }
    Ok(ids)
}

/// The state of a sandbox on disk.
enum OnDisk {
    /// A sandbox: when it was created, its stage, and whether a Start left something.
    Record(SystemTime, Stage, Arc<Jobs>, bool),
    /// There was no record, and what else there was is removed.
    Nothing,
}

/// How a sandbox comes back, and when it is given up if it is never started.
type Returned = (Arc<Jobs>, Entry, Option<Instant>);

/// Adopts one sandbox; `None` when nothing is left of it.
///
/// # Errors
/// Why it must be quarantined.
async fn recover_record(
    environment: &Arc<Environment>,
    id: SandboxId,
    again: bool,
) -> Result<Option<Returned>, AdoptionFailure> {
    let of = (environment.clone(), id.clone());
    let mut deadline = RecordDeadline::new(RECORD_TIMEOUT);
    // If it is overdue, the id stays taken.
    let has_no_record = Arc::new(AtomicBool::new(false));
    let found = has_no_record.clone();
    let read = move || read_sandbox(&of.0, &of.1, again, &found);
    let on_disk = match deadline.run_blocking(read).await {
        Ok(read) => read,
        Err(reason) => Err(AdoptionFailure {
            overdue: deadline.take_overdue(),
            ..AdoptionFailure::temporary(reason)
        }),
    };
    let has_no_record = has_no_record.load(Ordering::Relaxed);
    let on_disk = on_disk.map_err(|failure| AdoptionFailure { has_no_record, ..failure })?;
    let OnDisk::Record(created_at, stage, jobs, begun) = on_disk else { return Ok(None) };
    let id = id.as_str();
    let mut adopted = None;
    if stage != Stage::Created || begun {
        jobs.shim.expect_recovery();
        // The search for a shim can take all of the record's time.
        if let Stage::Started { identity } = &stage {
            adopted = Some(adopt(id, &mut deadline, &jobs, identity.clone()).await);
        }
        let of = jobs.clone();
        if let Err(reason) = deadline.run(async move { of.shim.recover().await }).await {
            log::error!(sandbox = id; "recovery of the shim did not finish: {reason}");
        }
    }
    let mut abandoned = None;
    let entry = match stage {
        Stage::Created if begun => {
            log::warn!(sandbox = id; "start was interrupted; removing the sandbox");
            let job = jobs.clone();
            if undo(id, &mut deadline, async move { job.remove().await }).await {
                log::info!(sandbox = id; "sandbox removed");
                return Ok(None);
            }
            Entry::Interrupted
        }
        Stage::Created => {
            abandoned = Some(abandoned_at(created_at, environment.config.abandoned_after));
            Entry::Created
        }
        Stage::Exited { pid, exit } => Entry::NotReady { pid, exit },
        Stage::Started { identity } => match adopted {
            Some(entry) => entry,
            None => adopt(id, &mut deadline, &jobs, identity).await,
        },
    };
    jobs.set_overdue_recovery(deadline.take_overdue());
    Ok(Some((jobs, entry, abandoned)))
}

/// Removes what a Start left; true if all of it is gone.
async fn undo(
    id: &str,
    deadline: &mut RecordDeadline,
    job: impl Future<Output = Result<(), StepErrors>> + Send + 'static,
) -> bool {
    match deadline.run(job).await {
        Ok(Ok(())) => return true,
        Ok(Err(steps)) => log_failed_of(id, "failed to undo an interrupted start", &steps),
        Err(reason) => {
            log::error!(sandbox = id; "failed to undo an interrupted start: {reason}");
        }
    }
    false
}

/// Finds the pause process that the record names.
async fn adopt(
    id: &str,
    deadline: &mut RecordDeadline,
    jobs: &Arc<Jobs>,
    identity: Identity,
) -> Entry {
    let (pid, job) = (identity.pid, jobs.clone());
    let unknown =
        match deadline.run_read_only(async move { job.adopt_process(identity).await }).await {
            Ok(Adoption::Alive(pause)) => return Entry::Ready(Arc::from(pause)),
            Ok(Adoption::Dead(exit)) => {
                log::warn!(sandbox = id, status = exit.status; "sandbox stopped before recovery");
                return Entry::NotReady { pid, exit };
            }
            Ok(Adoption::Unknown(step)) => step.to_string(),
            Err(reason) => reason,
        };
    log::error!(sandbox = id; "cannot determine whether the pause process runs: {unknown}");
    Entry::Unknown { pid }
}

/// Reads one sandbox.
fn read_sandbox(
    environment: &Arc<Environment>,
    id: &SandboxId,
    again: bool,
    has_no_record: &AtomicBool,
) -> Result<OnDisk, AdoptionFailure> {
    let store = RecordStore::new(&environment.layout, id);
    let record = match store.read_record() {
        Ok(record) => record,
        // A daemon ended between making the directory and writing the record, or between removing
        // the two; or someone else has removed the record.
        Err(RecordError::Missing(_)) if !again => {
            has_no_record.store(true, Ordering::Relaxed);
            let removed = SandboxFiles::new(&environment.layout, id)
                .remove()
                .map_err(|steps| steps.to_string());
            let removed = removed.and_then(|()| store.remove().map_err(|step| step.to_string()));
            return removed.map(|()| OnDisk::Nothing).map_err(|e| {
                AdoptionFailure::temporary(format!("a directory without a record: {e}"))
            });
        }
        Err(e) => return Err(e.into()),
    };
    let stage = store.stage()?;
    // A record whose config cannot be decoded has no names; Status reports why.
    let pod = record.decode_config().as_ref().map(pod_names).unwrap_or_default();
    let level = environment.selinux.hold(&record.labels);
    let jobs = Jobs::new(environment, &record, pod, level);
    let begun = jobs.files.begun();
    Ok(OnDisk::Record(record.created_at, stage, Arc::new(jobs), begun))
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_record_has_one_deadline_and_overdue_steps_are_awaited() {
        let mut deadline = RecordDeadline::new(RECORD_TIMEOUT);
        assert_eq!(deadline.run(async { 1 }).await, Ok(1));
        assert!(deadline.run_read_only(tokio::time::sleep(RECORD_TIMEOUT / 2)).await.is_ok());
        let (end, ended) = oneshot::channel::<()>();
        let begun = Instant::now();
        assert!(deadline.run(ended).await.unwrap_err().starts_with("timed out after"));
        assert_eq!(begun.elapsed().as_secs(), RECORD_TIMEOUT.as_secs() / 2);
        let (tell, dropped) = oneshot::channel::<()>();
        assert!(deadline.run(async { tell.send(()) }).await.is_err());
        assert!(dropped.await.is_err(), "a step was begun after the deadline");
        let mut overdue = deadline.take_overdue().unwrap();
        assert!(tokio::time::timeout(RECORD_TIMEOUT, &mut overdue).await.is_err(), "it still runs");
        drop(end);
        overdue.await.unwrap();
        assert!(RecordDeadline::new(RECORD_TIMEOUT).take_overdue().is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn overdue_steps_that_only_read_are_not_awaited() {
        let mut deadline = RecordDeadline::new(RECORD_TIMEOUT);
        assert!(deadline.run_read_only(std::future::pending::<()>()).await.is_err());
        assert!(deadline.take_overdue().is_none());
    }
}
