//! Takes over what an earlier daemon left: every record becomes a sandbox again, or is kept aside.
//!
//! Nothing here deletes what it does not understand. A record that cannot be read is reported and
//! its id stays taken, so that no caller is told that its pod does not exist.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::{BoxFuture, join_all};
use futures::stream::{self, StreamExt as _};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use std::os::unix::fs::DirBuilderExt as _;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::actor::{Entry, abandoned_at};
use super::files::SandboxFiles;
use super::jobs::Work;
use super::record::{Record, Stage, Store, Unreadable};
use super::sandbox::{Environment, Sandbox};
use super::validate::check_id;
use crate::error::{IoContext as _, StepError};
use crate::id::SandboxId;
use crate::pool::{self, Class};
use crate::process::Adoption;

/// Records that are looked at side by side.
const AT_ONCE: usize = 32;

/// How long one record may take.
const WITHIN: Duration = Duration::from_secs(10);

/// What became of one record.
#[derive(Debug)]
pub enum Recovered {
    /// A sandbox again.
    Sandbox(Sandbox),
    /// It could not be taken over. Nothing of a record that cannot be read was touched.
    Aside {
        /// The id: the name of its directory.
        id: String,
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
    // Where no thread can be started no record can be looked at, and a pod that is kept aside stays
    // so: the next start may have one. From here on there is one.
    pool::run(Class::Recovery, || ()).await?;
    end_strays(environment).await;
    let all = stream::iter(ids).map(|id| {
        let (environment, on_gone) = (environment.clone(), on_gone.clone());
        async move {
            let (work, entry, abandoned) = match one(&environment, id.clone()).await {
                Ok(Some(found)) => found,
                Ok(None) => return None,
                Err(reason) => {
                    log::error!(sandbox = id.as_str(); "recovery: kept aside: {reason}");
                    return Some(Recovered::Aside { id, reason });
                }
            };
            let sandbox = Sandbox::enter(environment, work, entry, abandoned, on_gone);
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
        Ok(Err(steps)) => steps.iter().for_each(|step| log::error!("recovery: {step}")),
        Err(reason) => log::error!("recovery: search for sockets without a record: {reason}"),
    }
    Ok(recovered)
}

impl Recovered {
    fn id(&self) -> &str {
        match self {
            Self::Sandbox(sandbox) => sandbox.id(),
            Self::Aside { id, .. } => id,
        }
    }
}

/// Ends pauses of ours that no record tells of: of a start that was cut off before it wrote one, or
/// whose record is gone.
async fn end_strays(environment: &Arc<Environment>) {
    let environment = environment.clone();
    let mut patience = Patience::new(WITHIN);
    let ended = patience.piece(move || {
        let recorded = |id: &str| {
            if let Err(e) = check_id(id) {
                log::error!("recovery: a pause without a valid id is left alone: {e}");
                return true;
            }
            let store = Store::new(&environment.layout, &id.into());
            match store.stage() {
                Ok(Stage::Created | Stage::Exited { .. }) => {
                    !matches!(store.read(), Ok(_) | Err(Unreadable::Missing(_)))
                }
                Ok(Stage::Started { .. }) => !matches!(store.read(), Err(Unreadable::Missing(_))),
                Err(_) => true,
            }
        };
        environment.native.end_strays(&recorded)
    });
    match ended.await {
        Ok(Ok(())) => {}
        Ok(Err(steps)) => steps.iter().for_each(|step| log::error!("recovery: {step}")),
        Err(reason) => log::error!("recovery: search for pauses without a record: {reason}"),
    }
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
    async fn ask<T: Send + 'static>(
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
pub fn let_go(environment: &Environment) {
    let sandboxes = environment.sandboxes();
    if ids(sandboxes).is_ok_and(|ids| ids.is_empty())
        && let Err(e) = umount2(sandboxes, MntFlags::UMOUNT_NOFOLLOW)
    {
        log::warn!("unmount {}: {e}", sandboxes.display());
    }
}

fn ids(sandboxes: &Path) -> Result<Vec<String>, StepError> {
    let mut ids = Vec::new();
    for entry in fs::read_dir(sandboxes).step_at("read directory", sandboxes)? {
        let entry = entry.step_at("read directory", sandboxes)?;
        // Not followed: what a link leads to is not ours.
        let directory = entry.file_type().is_ok_and(|kind| kind.is_dir());
        match entry.file_name().into_string() {
            Ok(name) if directory && check_id(&name).is_ok() => ids.push(name),
            _ => log::error!("recovery: {} is no sandbox", entry.path().display()),
        }
    }
    Ok(ids)
}

/// What a record says.
enum Found {
    /// A sandbox, how far it came, and what a Start has left.
    Record(Box<Record>, Stage, Arc<Work>, Begun),
    /// There was no record, and what else there was is removed.
    Nothing,
}

/// What a Start has left of which nothing is recorded.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Begun {
    /// Nothing.
    No,
    /// It was cut off.
    CutOff,
    /// An older daemon did its work ahead of it, and it never came.
    Ahead,
}

/// How a sandbox comes back, and when it is given up if it is never started.
type Return = (Arc<Work>, Entry, Option<Instant>);

/// Looks at one record; `None` when nothing is left of its sandbox.
///
/// # Errors
/// Why it must be kept aside.
async fn one(environment: &Arc<Environment>, id: String) -> Result<Option<Return>, String> {
    let of = (environment.clone(), id.clone());
    let mut patience = Patience::new(WITHIN);
    // If it is late, the id stays taken.
    let (record, stage, work, begun) = match patience.piece(move || look(&of.0, &of.1)).await?? {
        Found::Nothing => return Ok(None),
        Found::Record(record, stage, work, begun) => (record, stage, work, begun),
    };
    let (id, job) = (id.as_str(), work.clone());
    let mut abandoned = None;
    if stage != Stage::Created || begun == Begun::CutOff {
        let of = work.clone();
        if let Err(reason) = patience.act(async move { of.shim.recover().await }).await {
            log::error!(sandbox = id; "recovery: look for its shim: {reason}");
        }
    }
    let entry = match stage {
        Stage::Created if begun == Begun::CutOff => {
            log::warn!(sandbox = id; "recovery: its start was cut off, it is removed");
            match patience.act(async move { job.remove().await }).await {
                Ok(Ok(())) => return Ok(None),
                Ok(Err(steps)) => {
                    steps.iter().for_each(|step| log::error!(sandbox = id; "recovery: {step}"))
                }
                Err(reason) => log::error!(sandbox = id; "recovery: {reason}"),
            }
            Entry::CutOff
        }
        Stage::Created => {
            if begun == Begun::Ahead {
                match patience.act(async move { job.clear().await }).await {
                    Ok(Ok(())) => {}
                    Ok(Err(steps)) => {
                        steps.iter().for_each(|step| log::error!(sandbox = id; "recovery: {step}"))
                    }
                    Err(reason) => log::error!(sandbox = id; "recovery: {reason}"),
                }
            }
            abandoned = Some(abandoned_at(record.created_at, environment.config.abandoned_after));
            Entry::Created
        }
        Stage::Exited { pid, exit } => Entry::NotReady { pid, exit },
        Stage::Started { identity } => {
            let pid = identity.pid;
            match patience.ask(async move { job.find(identity).await }).await {
                Ok(Adoption::Alive(pause)) => Entry::Ready(Arc::from(pause)),
                Ok(Adoption::Dead(exit)) => {
                    log::warn!(sandbox = id, status = exit.status; "recovery: the pause has ended");
                    Entry::NotReady { pid, exit }
                }
                Ok(Adoption::Unknown(step)) => {
                    log::error!(sandbox = id; "recovery: {step}");
                    Entry::Unknown { pid }
                }
                Err(reason) => {
                    log::error!(sandbox = id; "recovery: look for its pause: {reason}");
                    Entry::Unknown { pid }
                }
            }
        }
    };
    work.wait_for(patience.late());
    Ok(Some((work, entry, abandoned)))
}

/// Reads one record.
fn look(environment: &Environment, id: &str) -> Result<Found, String> {
    let id = SandboxId::from(id);
    let store = Store::new(&environment.layout, &id);
    // Its pod lives with it or without.
    if let Err(step) = store.keep_private() {
        log::error!(sandbox = id.as_str(); "recovery: {step}");
    }
    let record = match store.read() {
        Ok(record) => record,
        // A daemon ended between making the directory and writing the record, or between removing
        // the two; or somebody else has removed the record.
        Err(Unreadable::Missing(_)) => {
            let text = |steps: Vec<StepError>| {
                steps.iter().map(StepError::to_string).collect::<Vec<_>>().join("; ")
            };
            let removed = SandboxFiles::new(&environment.layout, &id).remove().map_err(text);
            let removed = removed.and_then(|()| store.remove().map_err(|step| step.to_string()));
            return removed
                .map(|()| Found::Nothing)
                .map_err(|e| format!("a directory without a record: {e}"));
        }
        Err(e) => return Err(e.to_string()),
    };
    let stage = store.stage().map_err(|e| e.to_string())?;
    let work = environment.work(&record, environment.selinux.hold(&record.labels));
    let begun = match (work.places.is_ahead(), work.places.begun()) {
        (true, _) => Begun::Ahead,
        (false, true) => Begun::CutOff,
        (false, false) => Begun::No,
    };
    Ok(Found::Record(Box::new(record), stage, Arc::new(work), begun))
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_record_has_its_time_once_and_what_is_late_is_waited_for() {
        let mut patience = Patience::new(WITHIN);
        assert_eq!(patience.act(async { 1 }).await, Ok(1));
        assert!(patience.ask(tokio::time::sleep(WITHIN / 2)).await.is_ok());
        let (end, ended) = oneshot::channel::<()>();
        let begun = Instant::now();
        assert!(patience.act(ended).await.unwrap_err().starts_with("not done after"));
        assert_eq!(begun.elapsed().as_secs(), WITHIN.as_secs() / 2);
        let (tell, told) = oneshot::channel::<()>();
        assert!(patience.act(async { tell.send(()) }).await.is_err());
        assert!(told.await.is_err(), "a step was begun after the time was over");
        let mut late = patience.late().unwrap();
        assert!(tokio::time::timeout(WITHIN, &mut late).await.is_err(), "it is under way");
        drop(end);
        late.await.unwrap();
        assert!(Patience::new(WITHIN).late().is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn a_late_answer_is_waited_for_by_no_one() {
        let mut patience = Patience::new(WITHIN);
        assert!(patience.ask(std::future::pending::<()>()).await.is_err());
        assert!(patience.late().is_none());
    }
}
