//! Takes over what an earlier daemon left: every record becomes a sandbox again, or is kept aside.
//!
//! Nothing here deletes what it does not understand. A record that cannot be read is reported and its id stays
//! taken, so that no caller is told that its pod does not exist.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures::stream::{self, StreamExt as _};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use std::os::unix::fs::DirBuilderExt as _;

use super::owner::{Entry, abandoned_at};
use super::record::{Stage, Store, Unreadable};
use super::sandbox::{Environment, Sandbox};
use crate::error::{IoContext as _, Step};
use crate::pause::Adoption;

/// Records that are looked at side by side.
const AT_ONCE: usize = 32;

/// How long one record may take.
const WITHIN: Duration = Duration::from_secs(10);

/// What became of one record.
#[derive(Debug)]
pub enum Recovered {
    /// A sandbox again.
    Sandbox(Sandbox),
    /// It could not be taken over; nothing of it was touched.
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
/// When the directory of the records can be neither made nor read; never because of a single record.
pub async fn recover<F>(environment: &Arc<Environment>, on_gone: F) -> Result<Vec<Recovered>, Step>
where
    F: Fn(&str) + Clone + Send + Sync + 'static,
{
    let sandboxes = environment.sandboxes();
    fs::DirBuilder::new().recursive(true).mode(0o700).create(&sandboxes).step_at("make directory", &sandboxes)?;
    keep_private(&sandboxes)?;
    let ids = ids(&sandboxes)?;
    let all = stream::iter(ids).map(|id| {
        let (environment, on_gone) = (environment.clone(), on_gone.clone());
        async move {
            let name = id.clone();
            let looked = tokio::task::spawn_blocking(move || one(&environment, &name, on_gone));
            match tokio::time::timeout(WITHIN, looked).await {
                Ok(Ok(recovered)) => recovered,
                Ok(Err(panic)) => Some(Recovered::Aside { id, reason: panic.to_string() }),
                Err(_) => Some(Recovered::Aside { id, reason: format!("not done after {} s", WITHIN.as_secs()) }),
            }
        }
    });
    let recovered: Vec<Recovered> = all.buffer_unordered(AT_ONCE).filter_map(|r| async { r }).collect().await;
    for one in &recovered {
        if let Recovered::Aside { id, reason } = one {
            log::error!(sandbox = id.as_str(); "recovery: kept aside: {reason}");
        }
    }
    Ok(recovered)
}

/// Makes the directory of the records a mount of its own that gives nothing to other mount namespaces: a mount below
/// would be repeated in each of them, which costs the more the more containers there are.
fn keep_private(sandboxes: &Path) -> Result<(), Step> {
    let private = || mount(None::<&str>, sandboxes, None::<&str>, MsFlags::MS_PRIVATE, None::<&str>);
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

/// Takes back what [`recover`] mounted, when no sandbox is left; with sandboxes it stays for the next daemon.
pub fn let_go(environment: &Environment) {
    let sandboxes = environment.sandboxes();
    if ids(&sandboxes).is_ok_and(|ids| ids.is_empty())
        && let Err(e) = umount2(&sandboxes, MntFlags::UMOUNT_NOFOLLOW)
    {
        log::warn!("unmount {}: {e}", sandboxes.display());
    }
}

fn ids(sandboxes: &Path) -> Result<Vec<String>, Step> {
    let mut ids = Vec::new();
    for entry in fs::read_dir(sandboxes).step_at("read directory", sandboxes)? {
        let entry = entry.step_at("read directory", sandboxes)?;
        match entry.file_name().into_string() {
            Ok(name) => ids.push(name),
            Err(name) => log::error!("recovery: {} is no sandbox", sandboxes.join(name).display()),
        }
    }
    Ok(ids)
}

/// Looks at one record; `None` when nothing was left of its sandbox.
fn one<F>(environment: &Arc<Environment>, id: &str, on_gone: F) -> Option<Recovered>
where
    F: Fn(&str) + Send + 'static,
{
    let aside = |reason: String| Some(Recovered::Aside { id: id.to_owned(), reason });
    let store = Store::new(&environment.sandboxes(), id);
    let record = match store.read() {
        Ok(record) => record,
        // A daemon ended between making the directory and writing the record, or between removing the two.
        Err(Unreadable::Missing(_)) => {
            return match store.remove() {
                Ok(()) => None,
                Err(step) => aside(format!("a directory without a record: {step}")),
            };
        }
        Err(e) => return aside(e.to_string()),
    };
    let stage = match store.stage() {
        Ok(stage) => stage,
        Err(e) => return aside(e.to_string()),
    };
    let work = environment.work(&record);
    let mut abandoned = None;
    if stage != Stage::Created {
        work.shim.recover();
    }
    let entry = match stage {
        Stage::Created if work.places.begun() => {
            log::warn!(sandbox = id; "recovery: its start was cut off, it is removed");
            return match work.remove() {
                Ok(()) => None,
                Err(steps) => aside(steps.iter().map(Step::to_string).collect::<Vec<_>>().join("; ")),
            };
        }
        Stage::Created => {
            abandoned = Some(abandoned_at(record.created_at, environment.config.abandoned_after));
            Entry::Created
        }
        Stage::Exited { pid, exit } => Entry::NotReady { pid, exit },
        Stage::Started { identity } => match work.driver.adopt(&work.plan, &identity) {
            Adoption::Alive(pause) => Entry::Ready(Arc::from(pause)),
            Adoption::Dead(exit) => {
                log::warn!(sandbox = id, status = exit.status; "recovery: the pause has ended");
                Entry::NotReady { pid: identity.pid, exit }
            }
            Adoption::Unknown(step) => {
                log::error!(sandbox = id; "recovery: {step}");
                Entry::Unknown { pid: identity.pid }
            }
        },
    };
    let name = id.to_owned();
    Some(Recovered::Sandbox(Sandbox::enter(environment.clone(), work, entry, abandoned, move || on_gone(&name))))
}
