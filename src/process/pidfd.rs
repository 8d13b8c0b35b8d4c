//! A live pause process by its pidfd: how it is killed, watched and reaped.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, SystemTime};

use futures::future::BoxFuture;
use parking_lot::Mutex;
use process_identity::{Stat, has_ended, is_no_such_process};
use tokio::io::unix::AsyncFd;

use super::deadline;
use super::identity;
use super::{Adoption, Exit, Identity, Process, UNKNOWN_EXIT};
use crate::error::{IoContext, StepError};
use crate::sys::{self, End, Errno};

/// How often the process is checked when the runtime cannot watch it (out of memory).
const POLL: Duration = Duration::from_millis(500);

/// Delay between two attempts to reap children: the first, and the longest.
const REAP_DELAY: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(250));

/// A pause process of this daemon's or of an earlier daemon's making.
#[derive(Debug)]
pub(crate) struct PidfdProcess {
    pidfd: Arc<OwnedFd>,
    identity: Identity,
    exit: Mutex<Option<Exit>>,
    /// The pidfd, registered with the runtime when first asked for: there may be none before.
    watched: Mutex<Option<Arc<AsyncFd<Arc<OwnedFd>>>>>,
    killed: AtomicBool,
    common: Arc<Reaper>,
}

impl PidfdProcess {
    /// Takes over a process, which is the one that `identity` names.
    pub(crate) fn new(pidfd: OwnedFd, identity: Identity, common: Arc<Reaper>) -> Self {
        Self {
            pidfd: Arc::new(pidfd),
            identity,
            exit: Mutex::new(None),
            watched: Mutex::new(None),
            killed: AtomicBool::new(false),
            common,
        }
    }

    /// The exit, if it has ended; reaps it if it is a child. `None`: it lives.
    pub(crate) fn collect(&self) -> Option<Exit> {
        let mut exit = self.exit.lock();
        if exit.is_none() {
            let status = exit_status(self.pidfd.as_fd(), &self.identity)?;
            *exit = Some(Exit { status, at: SystemTime::now() });
        }
        *exit
    }

    /// Waits until the pidfd is readable, as it is from the end of the process on.
    async fn readable(&self) -> io::Result<()> {
        let watched = {
            let mut watched = self.watched.lock();
            let known = watched
                .take()
                .map_or_else(|| sys::watch(Arc::clone(&self.pidfd)).map(Arc::new), Ok)?;
            Arc::clone(watched.insert(known))
        };
        watched.readable().await.map(drop)
    }
}

impl Process for PidfdProcess {
    fn identity(&self) -> &Identity {
        &self.identity
    }

    fn kill(&self) -> Result<(), StepError> {
        self.killed.store(true, Relaxed);
        sys::kill(self.pidfd.as_fd()).step("kill the process")
    }

    fn may_be_frozen(&self) -> bool {
        self.common.freezer.is_some()
    }

    fn thaw(&self) -> Result<(), StepError> {
        let Some(freezer) = &self.common.freezer else { return Ok(()) };
        let lives = || !has_ended(&self.pidfd);
        deadline::thaw_if_frozen(freezer, self.identity.pid, lives).step("thaw the killed process")
    }

    fn exited(&self) -> BoxFuture<'_, Exit> {
        Box::pin(async move {
            loop {
                if let Some(exit) = self.collect() {
                    return exit;
                }
                if self.readable().await.is_ok()
                    && let Some(exit) = self.collect()
                {
                    return exit;
                }
                Box::pin(tokio::time::sleep(POLL)).await;
            }
        })
    }
}

impl Drop for PidfdProcess {
    fn drop(&mut self) {
        if self.collect().is_none() {
            self.common.reap_later(
                self.identity.pid,
                Arc::clone(&self.pidfd),
                self.killed.load(Relaxed),
            );
        }
    }
}

/// Finds a recorded process of this or an earlier daemon's making again.
pub(crate) fn adopt(identity: &Identity, boot_id: &Arc<str>, common: &Arc<Reaper>) -> Adoption {
    let dead = Adoption::Dead(Exit { status: UNKNOWN_EXIT, at: SystemTime::now() });
    if identity.boot_id != *boot_id {
        return dead;
    }
    let pid = c_int::try_from(identity.pid).unwrap_or(0);
    // Everything is read after the pidfd is open: if it agrees then, the pidfd is the recorded
    // process's.
    let pidfd = match sys::pidfd_open(pid) {
        Ok(pidfd) => pidfd,
        // No process, or by now the id of a thread, or no valid pid.
        Err(Errno::SRCH | Errno::INVAL | Errno::NOENT) => return dead,
        Err(e) => {
            return Adoption::Unknown(StepError::new(
                "open a pidfd of the recorded process",
                e.into(),
            ));
        }
    };
    match identity::matches(identity) {
        Ok(true) => {
            let process = PidfdProcess::new(
                pidfd,
                Identity { boot_id: boot_id.clone(), ..identity.clone() },
                Arc::clone(common),
            );
            process.collect().map_or_else(|| Adoption::Alive(Box::new(process)), Adoption::Dead)
        }
        Ok(false) => dead,
        // It ended in between: the pidfd may tell how it ended, but nothing any more whether it was
        // the recorded one. A living process is hidden (proc(5) hidepid), and may be the recorded
        // one.
        Err(e) if is_no_such_process(e.io()) && has_ended(&pidfd) => dead,
        Err(e) => Adoption::Unknown(e),
    }
}

/// Exit status of a process that has ended.
fn exit_status(pidfd: std::os::fd::BorrowedFd<'_>, identity: &Identity) -> Option<u32> {
    match sys::reap(pidfd, false) {
        Ok(None) => return None,
        Ok(Some(end)) => return Some(status(end)),
        // The process is no child, or is reaped elsewhere.
        Err(_) => {}
    }
    if !has_ended(pidfd) {
        return None;
    }
    // The pidfd tells after the reap, /proc before; the reap may come between the two questions.
    let end =
        sys::pidfd_exit(pidfd).or_else(|| zombie(identity)).or_else(|| sys::pidfd_exit(pidfd));
    Some(end.map_or(UNKNOWN_EXIT, status))
}

fn zombie(identity: &Identity) -> Option<End> {
    let stat = Stat::of_process(identity.pid).ok()?;
    (stat.start_time == identity.start_time && stat.ended())
        .then(|| End::from_status(stat.exit_status))
}

fn status(end: End) -> u32 {
    match end {
        End::Code(code) => code.unsigned_abs(),
        End::Signal(signal) => 128 + signal.unsigned_abs(),
    }
}

/// The state that the processes of a driver share.
#[derive(Debug)]
pub(crate) struct Reaper {
    /// Root of version 1's freezer hierarchy, where their cgroups may be frozen.
    freezer: Option<Arc<OwnedFd>>,
    unreaped: Mutex<UnreapedChildren>,
}

/// Children that no task waits for any more: reaped when the driver is next used, so that none
/// stays a zombie.
#[derive(Debug, Default)]
struct UnreapedChildren {
    /// By their pids, which are not reused before they are reaped.
    children: BTreeMap<u32, UnreapedChild>,
    /// A thread reaps those that are killed.
    has_reaper: bool,
}

#[derive(Debug)]
struct UnreapedChild {
    pidfd: Arc<OwnedFd>,
    killed: bool,
}

impl Reaper {
    /// Creates a reaper without children.
    pub(crate) fn new(freezer: Option<Arc<OwnedFd>>) -> Arc<Self> {
        Arc::new(Self { freezer, unreaped: Mutex::default() })
    }

    fn reap_later(self: &Arc<Self>, pid: u32, pidfd: Arc<OwnedFd>, killed: bool) {
        // A child of another process is reaped by that one: nothing is kept of it.
        if !matches!(sys::reap(pidfd.as_fd(), false), Ok(None)) {
            return;
        }
        let mut unreaped = self.unreaped.lock();
        // One entry per child, however many handles it had.
        let child = unreaped.children.entry(pid).or_insert(UnreapedChild { pidfd, killed });
        child.killed |= killed;
        if !killed || unreaped.has_reaper {
            return;
        }
        // It ends at once, but not yet, or never, if the kernel keeps it: wait for all of them
        // where that holds up nothing else.
        let common = Arc::clone(self);
        let reaper = thread::Builder::new()
            .name("reaper".to_owned())
            .stack_size(64 * 1024)
            .spawn(move || common.reap());
        match reaper {
            Ok(_) => unreaped.has_reaper = true,
            Err(e) => {
                log::warn!("failed to start the reaper thread: {e}; the process is reaped later")
            }
        }
    }

    /// Reaps until no killed child is left.
    fn reap(&self) {
        let mut delay = REAP_DELAY.0;
        loop {
            thread::sleep(delay);
            delay = (delay * 2).min(REAP_DELAY.1);
            let mut unreaped = self.unreaped.lock();
            unreaped.sweep();
            if !unreaped.children.values().any(|child| child.killed) {
                unreaped.has_reaper = false;
                return;
            }
        }
    }

    /// Reaps the children that have ended.
    pub(crate) fn sweep(&self) {
        self.unreaped.lock().sweep();
    }
}

impl UnreapedChildren {
    fn sweep(&mut self) {
        self.children.retain(|_, child| matches!(sys::reap(child.pidfd.as_fd(), false), Ok(None)));
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn process(pid: u32, common: &Arc<Reaper>) -> PidfdProcess {
        let pidfd = sys::pidfd_open(c_int::try_from(pid).unwrap()).unwrap();
        let boot = identity::boot_id().unwrap();
        PidfdProcess::new(pidfd, identity::read_identity(pid, &boot).unwrap(), Arc::clone(common))
    }

    /// The path of this process's freezer cgroup of version 1; `None` without that hierarchy.
    fn freezer_cgroup() -> Option<String> {
        let cgroups = std::fs::read_to_string("/proc/self/cgroup").unwrap();
        let path = cgroups.lines().find_map(|line| line.split_once(":freezer:"));
        if path.is_none() {
            kit::skip("no freezer of version 1 on this machine");
        }
        path.map(|(_, path)| path.to_owned())
    }

    /// Kernels before 6.15 do not tell the exit of a process that is no child by its pidfd.
    #[test]
    fn the_exit_of_a_zombie_is_that_of_its_own_start() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let held = process(child.id(), &Reaper::new(None));
        assert!(zombie(&held.identity).is_none(), "it lives");
        held.kill().unwrap();
        let begun = std::time::Instant::now();
        while !has_ended(&held.pidfd) {
            assert!(begun.elapsed() < Duration::from_secs(20), "it does not end");
            thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(zombie(&held.identity).map(status), Some(137));
        let start_time = held.identity.start_time + 1;
        assert!(zombie(&Identity { start_time, ..held.identity.clone() }).is_none());
        child.wait().unwrap();
        assert!(zombie(&held.identity).is_none(), "it is reaped");
    }

    /// There may be no descriptor left to look at the freezer.
    #[tokio::test]
    #[expect(clippy::zombie_processes, reason = "it is reaped by what is tested")]
    async fn a_kill_succeeds_though_the_freezer_cannot_be_read() {
        if freezer_cgroup().is_none() {
            return;
        }
        // Below what is no directory nothing can be opened.
        let freezer = Arc::new(OwnedFd::from(std::fs::File::open("/dev/null").unwrap()));
        let common = Reaper::new(Some(freezer));
        let child = Command::new("sleep").arg("1000").spawn().unwrap();
        let process = process(child.id(), &common);
        process.kill().unwrap();
        process.thaw().unwrap();
        assert_eq!(process.exited().await.status, 137);
    }

    /// A thaw can hang behind the kernel's locks of cgroups.
    #[test]
    fn a_kill_does_not_wait_for_the_freezer_and_a_thaw_does() {
        let Some(cgroup) = freezer_cgroup() else { return };
        let root = tempfile::tempdir().unwrap();
        let own = root.path().join(cgroup.trim_start_matches('/'));
        std::fs::create_dir_all(&own).unwrap();
        // The kernel says the root of one that is ending.
        let state = root.path().join("freezer.state");
        nix::unistd::mkfifo(&state, nix::sys::stat::Mode::S_IRWXU).unwrap();
        if own != root.path().join("") {
            std::os::unix::fs::symlink(&state, own.join("freezer.state")).unwrap();
        }
        let freezer = Arc::new(OwnedFd::from(std::fs::File::open(root.path()).unwrap()));
        let common = Reaper::new(Some(freezer));
        // The child is reaped after its cgroup is read.
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let killed = Arc::new(process(child.id(), &common));
        let (sender, answers) = std::sync::mpsc::channel();
        let process = Arc::clone(&killed);
        let both = thread::spawn(move || {
            sender.send(process.kill()).unwrap();
            sender.send(process.thaw()).unwrap();
        });
        answers.recv_timeout(Duration::from_secs(20)).expect("it waits").unwrap();
        answers.recv_timeout(Duration::from_millis(100)).expect_err("it does not wait");
        // The kernel's answer comes; its cgroup is not frozen.
        std::fs::write(&state, "THAWED\n").unwrap();
        answers.recv_timeout(Duration::from_secs(20)).unwrap().unwrap();
        both.join().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_child_of_another_process_is_not_kept() {
        let common = Reaper::new(None);
        // Its parent ends, so it is no child of this process.
        let out = Command::new("sh")
            .args(["-c", "sleep 1000 >/dev/null 2>&1 & echo $!"])
            .output()
            .unwrap();
        let pid: u32 = String::from_utf8(out.stdout).unwrap().trim().parse().unwrap();
        let held = process(pid, &common);
        drop(process(pid, &common));
        let killed = process(pid, &common);
        killed.killed.store(true, Relaxed);
        drop(killed);
        let unreaped = common.unreaped.lock();
        assert!(unreaped.children.is_empty() && !unreaped.has_reaper);
        drop(unreaped);
        held.kill().unwrap();
    }

    #[test]
    #[expect(clippy::zombie_processes, reason = "it is reaped by what is tested")]
    fn a_child_that_does_not_exit_is_kept_once_and_reaped_later() {
        let common = Reaper::new(None);
        let child = Command::new("sleep").arg("1000").spawn().unwrap();
        // A process may be killed and kept by the kernel.
        for _ in 0..20 {
            let held = process(child.id(), &common);
            held.killed.store(true, Relaxed);
        }
        let unreaped = common.unreaped.lock();
        assert_eq!((unreaped.children.len(), unreaped.has_reaper), (1, true));
        drop(unreaped);
        // One thread looks for all of them, and ends with the last.
        assert_eq!(Arc::strong_count(&common), 2);
        process(child.id(), &common).kill().unwrap();
        while common.unreaped.lock().has_reaper {
            thread::sleep(Duration::from_millis(1));
        }
        assert!(common.unreaped.lock().children.is_empty());
        assert_eq!(sys::pidfd_open(c_int::try_from(child.id()).unwrap()).unwrap_err(), Errno::SRCH);
    }
}
