//! Adopts what an earlier daemon left: every record becomes a sandbox again, or is quarantined.
//!
//! Nothing here deletes what it does not understand. A record that cannot be read is reported and
//! its id stays taken, so that no caller learns that its pod does not exist.

use std::fs;
use std::path::Path;
use std::sync::Arc;
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

/// Records that are looked at side by side.
const AT_ONCE: usize = 32;

/// How long one record may take.
const WITHIN: Duration = pool::TURN;

/// What became of one record.
#[derive(Debug)]
pub enum Recovered {
    /// A sandbox again.
    Sandbox(Sandbox),
    /// It could not be taken over. Nothing of a record that cannot be read was touched.
    Quarantined {
        /// The id: the name of its directory.
        id: SandboxId,
        /// Why.
        reason: String,
    },
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
    let all = stream::iter(ids).map(|id| {
        let (environment, on_gone) = (environment.clone(), on_gone.clone());
        async move {
            let (jobs, entry, abandoned) = match recover_record(&environment, id.clone()).await {
                Ok(Some(found)) => found,
                Ok(None) => return None,
                Err(reason) => {
                    log::error!(
                        sandbox = id.as_str();
                        "quarantined a record that recovery cannot adopt: {reason}"
                    );
                    return Some(Recovered::Quarantined { id, reason });
                }
            };
            let sandbox = Sandbox::enter(environment, jobs, entry, abandoned, on_gone);
            Some(Recovered::Sandbox(sandbox))
        }
    });
    let recovered: Vec<Recovered> =
        all.buffer_unordered(AT_ONCE).filter_map(|r| async { r }).collect().await;
    let left: Vec<String> = recovered.iter().map(|one| one.id().to_owned()).collect();
    let shims = environment.shims.clone();
    let until = std::time::Instant::now() + WITHIN;
    let remove =
        move || shims.remove_strays(&left.iter().map(String::as_str).collect::<Vec<_>>(), until);
    match Patience::new(WITHIN).piece(remove).await {
        Ok(Ok(())) => {}
        Ok(Err(steps)) => log_failed("failed to remove sockets without a record", &steps.into()),
        Err(reason) => log::error!("failed to remove sockets without a record: {reason}"),
    }
    Ok(recovered)
}

impl Recovered {
    fn id(&self) -> &str {
        match self {
            Self::Sandbox(sandbox) => sandbox.id(),
            Self::Quarantined { id, .. } => id,
        }
    }
}

/// Ends pauses of ours that no record tells of: of a start that was cut off before it wrote one, or
/// whose record is gone.
async fn kill_orphans(environment: &Arc<Environment>) {
    let environment = environment.clone();
    let mut patience = Patience::new(WITHIN);
    let ended = patience.piece(move || {
        let recorded = |id: &str| {
            let id = match check_id(id) {
                Ok(id) => id,
                Err(e) => {
                    log::error!("leaving a pause without a valid id alone: {e}");
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
        environment.drivers.kill_orphans(&recorded)
    });
    match ended.await {
        Ok(Ok(())) => {}
        Ok(Err(steps)) => log_failed("failed to end pauses without a record", &steps.into()),
        Err(reason) => log::error!("failed to end pauses without a record: {reason}"),
    }
}

fn log_failed(what: &str, steps: &StepErrors) {
    steps.into_iter().for_each(|step| log::error!("{what}: {step}"));
}

fn log_failed_of(id: &str, what: &str, steps: &StepErrors) {
    steps.into_iter().for_each(|step| log::error!(sandbox = id; "{what}: {step}"));
}

/// The time that one record has, all its steps together, and what was still under way when it was
/// over.
struct Patience {
    until: Instant,
    late: Vec<BoxFuture<'static, ()>>,
}

impl Patience {
    fn new(within: Duration) -> Self {
        Self { until: Instant::now() + within, late: Vec::new() }
    }

    /// Does some work that changes what the sandbox has.
    ///
    /// # Errors
    /// It has panicked, is not done in time, or was not even begun in time.
    async fn act<T: Send + 'static>(
        &mut self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, String> {
        let late = || format!("not done after {} s", WITHIN.as_secs());
        if Instant::now() >= self.until {
            return Err(late());
        }
        let mut running = tokio::spawn(work);
        match tokio::time::timeout_at(self.until, &mut running).await {
            Ok(done) => done.map_err(|panic| panic.to_string()),
            Err(_) => {
                self.late.push(running.map(drop).boxed());
                Err(late())
            }
        }
    }

    /// The same of work that changes nothing: if it is late, its answer is of no use any more.
    ///
    /// # Errors
    /// As above.
    async fn within<T: Send + 'static>(
        &mut self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, String> {
        let before = self.late.len();
        let answer = self.act(work).await;
        self.late.truncate(before);
        answer
    }

    /// The same as [`Patience::act`], of what blocks.
    ///
    /// # Errors
    /// As above.
    async fn piece<T: Send + 'static>(
        &mut self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, String> {
        self.act(pool::run(Class::Recovery, work)).await?.map_err(|step| step.to_string())
    }

    /// Ends with what is still under way; `None` where nothing is.
    fn late(self) -> Option<JoinHandle<()>> {
        let late = (!self.late.is_empty()).then(|| join_all(self.late))?;
        Some(tokio::spawn(late.map(drop)))
    }
}

/// Makes the directory of the records a mount of its own that gives nothing to other mount
/// namespaces: a mount below would be repeated in each of them, which costs the more the more
/// containers there are.
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
        let directory = entry.file_type().is_ok_and(|kind| kind.is_dir());
        let name = entry.file_name().into_string().ok().filter(|_| directory);
        match name.and_then(|name| SandboxId::try_from(name).ok()) {
            Some(id) => ids.push(id),
            None => log::error!("{} is not the directory of a sandbox", entry.path().display()),
        }
    }
    Ok(ids)
}

/// What was read of a sandbox.
enum OnDisk {
    /// A sandbox: when it was created, how far it came, and what a Start has left.
    Record(SystemTime, Stage, Arc<Jobs>, StartRemains),
    /// There was no record, and what else there was is removed.
    Nothing,
}

/// What a Start has left of which nothing is recorded.
#[derive(Clone, Copy, PartialEq, Eq)]
enum StartRemains {
    /// Nothing.
    No,
    /// It was cut off.
    CutOff,
    /// An older daemon did its work ahead of it, and it never came.
    Ahead,
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
) -> Result<Option<Returned>, String> {
    let of = (environment.clone(), id.clone());
    let mut patience = Patience::new(WITHIN);
    // If it is late, the id stays taken.
    let on_disk = patience.piece(move || read_sandbox(&of.0, &of.1)).await??;
    let OnDisk::Record(created_at, stage, jobs, begun) = on_disk else { return Ok(None) };
    let id = id.as_str();
    if stage != Stage::Created || begun == StartRemains::CutOff {
        let of = jobs.clone();
        if let Err(reason) = patience.act(async move { of.shim.recover().await }).await {
            log::error!(sandbox = id; "failed to find the shim again: {reason}");
        }
    }
    let mut abandoned = None;
    let entry = match stage {
        Stage::Created if begun == StartRemains::CutOff => {
            log::warn!(sandbox = id; "start was interrupted; removing the sandbox");
            let job = jobs.clone();
            if undo(id, &mut patience, async move { job.remove().await }).await {
                return Ok(None);
            }
            Entry::CutOff
        }
        Stage::Created => {
            if begun == StartRemains::Ahead {
                let job = jobs.clone();
                undo(id, &mut patience, async move { job.clear().await }).await;
            }
            abandoned = Some(abandoned_at(created_at, environment.config.abandoned_after));
            Entry::Created
        }
        Stage::Exited { pid, exit } => Entry::NotReady { pid, exit },
        Stage::Started { identity } => adopt(id, &mut patience, &jobs, identity).await,
    };
    jobs.wait_for(patience.late());
    Ok(Some((jobs, entry, abandoned)))
}

/// Undoes what a Start has left; true when all of it is gone.
async fn undo(
    id: &str,
    patience: &mut Patience,
    job: impl Future<Output = Result<(), StepErrors>> + Send + 'static,
) -> bool {
    match patience.act(job).await {
        Ok(Ok(())) => return true,
        Ok(Err(steps)) => log_failed_of(id, "failed to undo an interrupted start", &steps),
        Err(reason) => {
            log::error!(sandbox = id; "failed to undo an interrupted start: {reason}");
        }
    }
    false
}

/// Finds the pause that the record names.
async fn adopt(id: &str, patience: &mut Patience, jobs: &Arc<Jobs>, identity: Identity) -> Entry {
    let (pid, job) = (identity.pid, jobs.clone());
    let unknown = match patience.within(async move { job.adopt_process(identity).await }).await {
        Ok(Adoption::Alive(pause)) => return Entry::Ready(Arc::from(pause)),
        Ok(Adoption::Dead(exit)) => {
            log::warn!(sandbox = id, status = exit.status; "pause exited before recovery");
            return Entry::NotReady { pid, exit };
        }
        Ok(Adoption::Unknown(step)) => step.to_string(),
        Err(reason) => reason,
    };
    log::error!(sandbox = id; "cannot determine whether the pause lives: {unknown}");
    Entry::Unknown { pid }
}

/// Reads one sandbox.
fn read_sandbox(environment: &Arc<Environment>, id: &SandboxId) -> Result<OnDisk, String> {
    let store = RecordStore::new(&environment.layout, id);
    // Its pod lives with it or without.
    if let Err(step) = store.keep_private() {
        log::error!(sandbox = id.as_str(); "failed to make the record private: {step}");
    }
    let record = match store.read_record() {
        Ok(record) => record,
        // A daemon ended between making the directory and writing the record, or between removing
        // the two; or someone else has removed the record.
        Err(RecordError::Missing(_)) => {
            let removed = SandboxFiles::new(&environment.layout, id)
                .remove()
                .map_err(|steps| steps.to_string());
            let removed = removed.and_then(|()| store.remove().map_err(|step| step.to_string()));
            return removed
                .map(|()| OnDisk::Nothing)
                .map_err(|e| format!("a directory without a record: {e}"));
        }
        Err(e) => return Err(e.to_string()),
    };
    let stage = store.stage().map_err(|e| e.to_string())?;
    // A record whose config cannot be decoded has no names; Status reports why.
    let pod = record.decode_config().as_ref().map(pod_names).unwrap_or_default();
    let level = environment.selinux.hold(&record.labels);
    let jobs = Jobs::new(environment, &record, pod, level);
    let begun = match (jobs.files.is_ahead(), jobs.files.begun()) {
        (true, _) => StartRemains::Ahead,
        (false, true) => StartRemains::CutOff,
        (false, false) => StartRemains::No,
    };
    Ok(OnDisk::Record(record.created_at, stage, Arc::new(jobs), begun))
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_record_has_one_time_limit_and_late_steps_are_awaited() {
        let mut patience = Patience::new(WITHIN);
        assert_eq!(patience.act(async { 1 }).await, Ok(1));
        assert!(patience.within(tokio::time::sleep(WITHIN / 2)).await.is_ok());
        let (end, ended) = oneshot::channel::<()>();
        let begun = Instant::now();
        assert!(patience.act(ended).await.unwrap_err().starts_with("not done after"));
        assert_eq!(begun.elapsed().as_secs(), WITHIN.as_secs() / 2);
        let (tell, dropped) = oneshot::channel::<()>();
        assert!(patience.act(async { tell.send(()) }).await.is_err());
        assert!(dropped.await.is_err(), "a step was begun after the time was over");
        let mut late = patience.late().unwrap();
        assert!(tokio::time::timeout(WITHIN, &mut late).await.is_err(), "it is under way");
        drop(end);
        late.await.unwrap();
        assert!(Patience::new(WITHIN).late().is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn only_late_acts_are_awaited() {
        let mut patience = Patience::new(WITHIN);
        assert!(patience.within(std::future::pending::<()>()).await.is_err());
        assert!(patience.late().is_none());
    }
}
