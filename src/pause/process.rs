//! A live pause process by its pidfd: how it is killed, watched and reaped.

use std::ffi::c_int;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Wake;
use std::thread;
use std::time::{Duration, SystemTime};

use tokio::sync::Notify;

use super::identity::{self, Stat};
use super::sys::{self, End, Errno};
use super::watch::{Watch, Watched};
use super::{Adoption, BoxFuture, Exit, Identity, Pause, UNKNOWN_EXIT};
use crate::error::{IoContext, Step};
use crate::text::Text;

/// How often an end is looked for when the runtime cannot watch the process (out of descriptors or memory).
const POLL: Duration = Duration::from_millis(500);

/// A pause process of this daemon's or of an earlier daemon's making.
#[derive(Debug)]
pub(super) struct Process {
    pidfd: Arc<OwnedFd>,
    identity: Identity,
    exit: Mutex<Option<Exit>>,
    /// Made when first asked for, as there may be no runtime before.
    watched: Mutex<Option<Watched>>,
    ended: Arc<Ended>,
    killed: AtomicBool,
    common: Arc<Common>,
}

impl Process {
    /// Takes over a process, which is the one that `identity` names.
    pub(super) fn new(pidfd: OwnedFd, identity: Identity, common: Arc<Common>) -> Self {
        Self {
            pidfd: Arc::new(pidfd),
            identity,
            exit: Mutex::new(None),
            watched: Mutex::new(None),
            ended: Arc::default(),
            killed: AtomicBool::new(false),
            common,
        }
    }

    /// The exit, if it has ended; reaps it if it is a child. `None`: it lives.
    pub(super) fn collect(&self) -> Option<Exit> {
        let mut exit = lock(&self.exit);
        if exit.is_none() {
            let status = end(self.pidfd.as_fd(), &self.identity)?;
            *exit = Some(Exit { status, at: SystemTime::now() });
        }
        *exit
    }

    /// From now on its end wakes those who wait for `ended`.
    fn watch(&self) -> std::io::Result<()> {
        let mut watched = lock(&self.watched);
        if watched.is_none() {
            *watched = Some(self.common.watch.readable(self.pidfd.clone(), Arc::clone(&self.ended).into())?);
        }
        Ok(())
    }
}

/// Wakes those who wait for the end of a process.
#[derive(Debug, Default)]
struct Ended(Notify);

impl Wake for Ended {
    fn wake(self: Arc<Self>) {
        self.0.notify_waiters();
    }
}

impl Pause for Process {
    fn identity(&self) -> &Identity {
        &self.identity
    }

    fn kill(&self) -> Result<(), Step> {
        self.killed.store(true, Relaxed);
        match sys::pidfd_send_signal(self.pidfd.as_fd(), libc::SIGKILL) {
            Ok(()) | Err(Errno(libc::ESRCH)) => Ok(()),
            Err(e) => Err(e).step("kill the process"),
        }
    }

    fn exited(&self) -> BoxFuture<'_, Exit> {
        Box::pin(async move {
            loop {
                let mut ended = pin!(self.ended.0.notified());
                // From here on its end is not missed.
                ended.as_mut().enable();
                let watched = self.watch();
                if let Some(exit) = self.collect() {
                    return exit;
                }
                match watched {
                    Ok(()) => ended.await,
                    Err(_) => Box::pin(tokio::time::sleep(POLL)).await,
                }
            }
        })
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.collect().is_none() {
            self.common.take(Arc::clone(&self.pidfd), self.killed.load(Relaxed));
        }
    }
}

/// Finds a recorded process of this or an earlier daemon's making again.
pub(super) fn adopt(identity: &Identity, boot_id: &Text, common: &Arc<Common>) -> Adoption {
    let dead = Adoption::Dead(Exit { status: UNKNOWN_EXIT, at: SystemTime::now() });
    if identity.boot_id != *boot_id {
        return dead;
    }
    let pid = c_int::try_from(identity.pid).unwrap_or(0);
    // Everything is read after the pidfd is open: if it agrees then, the pidfd is the recorded process's.
    let pidfd = match sys::pidfd_open(pid) {
        Ok(pidfd) => pidfd,
        // Nobody, or by now the number of a thread, or no number that a process can have.
        Err(Errno(libc::ESRCH | libc::EINVAL | libc::ENOENT)) => return dead,
        Err(e) => return Adoption::Unknown(Step::new("open a pidfd of the recorded process", e.into())),
    };
    match identity::matches(identity) {
        Ok(true) => {
            let process =
                Process::new(pidfd, Identity { boot_id: boot_id.clone(), ..identity.clone() }, Arc::clone(common));
            process.collect().map_or_else(|| Adoption::Alive(Box::new(process)), Adoption::Dead)
        }
        Ok(false) => dead,
        // Ended in between: the pidfd may tell how it ended, but nothing any more whether it was the recorded one.
        Err(e) if identity::gone(e.io()) => dead,
        Err(e) => Adoption::Unknown(e),
    }
}

/// Exit status of a process that has ended.
fn end(pidfd: std::os::fd::BorrowedFd<'_>, identity: &Identity) -> Option<u32> {
    match sys::reap(pidfd, false) {
        Ok(None) => return None,
        Ok(Some(end)) => return Some(status(end)),
        // Not a child, or reaped by somebody else.
        Err(_) => {}
    }
    if !sys::ended(pidfd) {
        return None;
    }
    // The pidfd tells after the reap, /proc before; the reap may come between the two questions.
    let end = sys::pidfd_exit(pidfd).or_else(|| zombie(identity)).or_else(|| sys::pidfd_exit(pidfd));
    Some(end.map_or(UNKNOWN_EXIT, status))
}

fn zombie(identity: &Identity) -> Option<End> {
    let stat = Stat::read(identity.pid).ok()?;
    if stat.start_time == identity.start_time { stat.end() } else { None }
}

fn status(end: End) -> u32 {
    match end {
        End::Code(code) => code.unsigned_abs(),
        End::Signal(signal) => 128 + signal.unsigned_abs(),
    }
}

/// What the processes of a driver share.
#[derive(Debug)]
pub(super) struct Common {
    /// Of their pidfds.
    pub(super) watch: Arc<Watch>,
    /// Children that nobody waits for any more: reaped when the driver is next used, so that none stays a zombie.
    orphans: Mutex<Vec<Arc<OwnedFd>>>,
}

impl Common {
    /// Nothing yet.
    ///
    /// # Errors
    /// The failed step.
    pub(super) fn new() -> Result<Arc<Self>, Step> {
        Ok(Arc::new(Self { watch: Watch::new()?, orphans: Mutex::default() }))
    }

    fn take(self: &Arc<Self>, pidfd: Arc<OwnedFd>, killed: bool) {
        lock(&self.orphans).push(Arc::clone(&pidfd));
        if !killed {
            return;
        }
        // It ends at once, but not yet: wait for it where nobody else is kept.
        let common = Arc::clone(self);
        let reaper = thread::Builder::new().name("reaper".to_owned()).stack_size(64 * 1024).spawn(move || {
            sys::wait_ended(pidfd.as_fd());
            common.sweep();
        });
        if let Err(e) = reaper {
            log::warn!("start a thread to reap a pause: {e}; it is reaped later");
        }
    }

    /// Reaps the orphans that have ended.
    pub(super) fn sweep(&self) {
        lock(&self.orphans).retain(|pidfd| matches!(sys::reap(pidfd.as_fd(), false), Ok(None)));
    }
}

/// A panic elsewhere leaves these values whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
