//! Limits how long a child may take to execute its program. The thread that cloned the child blocks
//! until then, and the child may block forever: its cgroup was frozen, or a file system does not
//! answer.
//!
//! A thread kills a child that exceeds the limit. It starts with the first child and exits after
//! some time without children. It sleeps between its checks, so that a child that is in time causes
//! no system call and wakes no thread.

use std::ffi::{CString, c_int};
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use process_identity::is_no_such_process;

use crate::sys::{self, ClonedChildSlot, Errno};

/// How long a child may take to execute its program.
const EXEC_TIMEOUT: Duration = Duration::from_secs(10);

/// How often overdue children are looked for within that time.
const CHECKS: u32 = 10;

/// After how many checks without a child the thread ends.
const QUIET: u32 = 2 * CHECKS;

/// The deadline of a driver's children.
#[derive(Debug)]
pub(crate) struct Deadline(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    within: Duration,
    /// Root of version 1's freezer hierarchy: a frozen process does not end before it is moved out
    /// of its cgroup.
    freezer: Option<Arc<OwnedFd>>,
    children: Mutex<Children>,
}

#[derive(Debug, Default)]
struct Children {
    under_way: Vec<Arc<Child>>,
    /// A thread looks for overdue ones.
    watched: bool,
}

#[derive(Debug)]
struct Child {
    begun: Instant,
    born: ClonedChildSlot,
    fate: Mutex<ChildState>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ChildState {
    BeforeExec,
    Killed,
    /// It has executed or ended, and may be reaped: its pid may have been reused.
    ExecutedOrExited,
}

/// A child that has executed its program or ended.
pub(crate) struct Cloned {
    pub(crate) pid: c_int,
    pub(crate) pidfd: OwnedFd,
    /// It was killed, because it was overdue.
    pub(crate) late: bool,
}

impl Deadline {
    /// Children may be in cgroups of this freezer hierarchy of version 1, which is named by its
    /// root.
    pub(crate) fn new(freezer: Option<Arc<OwnedFd>>) -> Self {
        Self::within(EXEC_TIMEOUT, freezer)
    }

    fn within(within: Duration, freezer: Option<Arc<OwnedFd>>) -> Self {
        Self(Arc::new(Shared { within, freezer, children: Mutex::default() }))
    }

    /// Calls [`sys::clone_child`], and kills the child when it is overdue.
    ///
    /// # Errors
    /// The system's, of the clone or of the start of a thread.
    pub(crate) fn clone_child<T>(
        &self,
        how: sys::Clone<'_>,
        argument: &T,
        child: extern "C" fn(&T) -> !,
    ) -> io::Result<Cloned> {
        let entry = self.begin()?;
        let cloned =
            sys::clone_child(&sys::Clone { born: Some(&entry.born), ..how }, argument, child);
        let late = self.finish(&entry);
        let (pid, pidfd) = cloned?;
        Ok(Cloned { pid, pidfd, late })
    }

    /// The error of an overdue child.
    pub(crate) fn error(&self) -> io::Error {
        let reason = format!("not done within {} s", self.0.within.as_secs());
        io::Error::new(io::ErrorKind::TimedOut, reason)
    }

    fn begin(&self) -> io::Result<Arc<Child>> {
        let (begun, born) = (Instant::now(), ClonedChildSlot::default());
        let child = Arc::new(Child { begun, born, fate: Mutex::new(ChildState::BeforeExec) });
        let mut children = self.0.children.lock();
        if !children.watched {
            let (shared, every) = (Arc::downgrade(&self.0), self.0.within / CHECKS);
            let thread = thread::Builder::new().name("deadline".to_owned()).stack_size(64 * 1024);
            thread.spawn(move || watch(&shared, every))?;
            children.watched = true;
        }
        children.under_way.push(Arc::clone(&child));
        Ok(child)
    }

    /// Whether it was killed. Waits for a kill that is in progress, so that the child can be reaped
    /// afterwards.
    fn finish(&self, child: &Arc<Child>) -> bool {
        self.0.children.lock().under_way.retain(|other| !Arc::ptr_eq(other, child));
        std::mem::replace(&mut *child.fate.lock(), ChildState::ExecutedOrExited)
            == ChildState::Killed
    }
}

/// The thread.
fn watch(shared: &Weak<Shared>, every: Duration) {
    let mut quiet = 0;
    loop {
        thread::sleep(every);
        let Some(shared) = shared.upgrade() else { return };
        let late: Vec<Arc<Child>> = {
            let mut children = shared.children.lock();
            quiet = if children.under_way.is_empty() { quiet + 1 } else { 0 };
            if quiet == QUIET {
                children.watched = false;
                return;
            }
            let late =
                children.under_way.iter().filter(|child| child.begun.elapsed() >= shared.within);
            late.map(Arc::clone).collect()
        };
        // Each check thaws again: a cgroup may be frozen between a child's end and its move out of
        // it.
        for child in late {
            shared.kill(&child);
        }
    }
}

impl Shared {
    fn kill(&self, child: &Child) {
        let mut fate = child.fate.lock();
        // The child is reaped later, so the pid is still the child's.
        let Some(pid) = child.born.pid().filter(|_| *fate != ChildState::ExecutedOrExited) else {
            return;
        };
        let killed = child.born.kill();
        if *fate == ChildState::BeforeExec {
            log::warn!(pid = pid; "killing child process: exec timed out");
            *fate = ChildState::Killed;
        }
        let thawed = self.freezer.as_ref().map_or(Ok(()), |root| thaw(root, pid));
        if let Err(e) = killed.and(thawed) {
            log::debug!(pid = pid; "failed to kill or thaw overdue child: {}", io::Error::from(e));
        }
    }
}

/// Moves a process to the root of the freezer hierarchy, which is never frozen.
pub(crate) fn thaw(freezer: &OwnedFd, pid: c_int) -> sys::Result<()> {
    sys::write_file(freezer.as_fd(), c"cgroup.procs", pid.to_string().as_bytes())
}

/// Polls until it is done.
///
/// # Errors
/// The time is over.
pub(crate) fn poll_until(until: Instant, mut done: impl FnMut() -> bool) -> io::Result<()> {
    while !done() {
        if Instant::now() > until {
            return Err(io::ErrorKind::TimedOut.into());
        }
        thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Moves a killed process out of its cgroup if version 1 holds it frozen there: it does not exit
/// before. It keeps its pid as long, so what was read is the process's own if it still `lives`.
pub(crate) fn thaw_if_frozen(
    freezer: &OwnedFd,
    pid: u32,
    lives: impl FnOnce() -> bool,
) -> io::Result<()> {
    let cgroups = match fs::read_to_string(format!("/proc/{pid}/cgroup")) {
        Ok(cgroups) => cgroups,
        Err(e) if is_no_such_process(&e) => return Ok(()),
        // The kill has succeeded: what hinders only the search for a freeze does not undo that.
        Err(e) => {
            log::warn!(pid = pid; "failed to read the cgroup of a killed process: {e}");
            return Ok(());
        }
    };
    let path = cgroups.lines().find_map(|line| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        controllers.split(',').any(|name| name == "freezer").then_some(path)
    });
    let Some(path) = path else { return Ok(()) };
    let state = CString::new(format!("./{path}/freezer.state"))?;
    let mut state = match sys::open(Some(freezer.as_fd()), &state, libc::O_RDONLY, 0) {
        // The root, which is never frozen, or a cgroup that has been removed since.
        Err(Errno::NOENT) => return Ok(()),
        Err(e) => {
            log::warn!(pid = pid; "failed to open the freezer of a killed process: {e}");
            return Ok(());
        }
        Ok(state) => File::from(state),
    };
    let mut frozen = String::new();
    if state.read_to_string(&mut frozen).is_err() {
        // The cgroup has been removed since (ENODEV).
        return Ok(());
    }
    match frozen.trim() {
        "THAWED" => Ok(()),
        // The pid may have been reused.
        _ if !lives() => Ok(()),
        _ => match thaw(freezer, pid.cast_signed()) {
            Err(Errno::SRCH) => Ok(()),
            other => other.map_err(Into::into),
        },
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;
    use std::fs;
    use std::os::fd::BorrowedFd;
    use std::os::unix::ffi::OsStrExt as _;
    use std::path::Path;

    use super::*;

    const SHORT: Duration = Duration::from_millis(100);
    const FREEZER: &str = "/sys/fs/cgroup/freezer";

    struct Joiner<'a> {
        freezer: BorrowedFd<'a>,
        tasks: CString,
    }

    fn how() -> sys::Clone<'static> {
        sys::Clone { flags: sys::CLONE_CLEAR_SIGHAND, cgroup: None, born: None, stack: None }
    }

    fn threads() -> usize {
        let names = fs::read_dir("/proc/self/task").unwrap().flatten();
        let name =
            |entry: fs::DirEntry| fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        names.map(name).filter(|name| name.trim() == "deadline").count()
    }

    extern "C" fn join_and_end(joiner: &Joiner<'_>) -> ! {
        let joined = sys::write_file(joiner.freezer, &joiner.tasks, b"0");
        sys::exit(joined.map_or(1, |()| 0))
    }

    extern "C" fn hang(fifo: &CString) -> ! {
        // The open blocks until there is a writer.
        let _ = sys::open(None, fifo, libc::O_RDONLY, 0);
        sys::exit(0)
    }

    extern "C" fn exit_at_once(_: &()) -> ! {
        sys::exit(7)
    }

    /// The result of `work`. A clone without a deadline does not return, and the test fails.
    fn returned<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
        let (sender, receiver) = std::sync::mpsc::channel();
        drop(thread::spawn(move || sender.send(work())));
        let returned = receiver.recv_timeout(Duration::from_secs(30));
        returned.unwrap_or_else(|e| panic!("the clone has not returned: {e}"))
    }

    #[test]
    fn a_child_in_time_is_not_killed_and_the_thread_ends() {
        // The thread ends after twice the time.
        let deadline = Deadline::within(Duration::from_secs(2), None);
        for _ in 0..3 {
            let cloned = deadline.clone_child(how(), &(), exit_at_once).unwrap();
            assert!(!cloned.late);
            assert_eq!(sys::reap(cloned.pidfd.as_fd(), true), Ok(Some(sys::End::Code(7))));
        }
        assert!(deadline.0.children.lock().watched);
        let begun = Instant::now();
        while deadline.0.children.lock().watched {
            assert!(begun.elapsed() < Duration::from_secs(30));
            thread::sleep(SHORT / CHECKS);
        }
        assert!(deadline.0.children.lock().under_way.is_empty());
    }

    /// A fifo on which a child hangs, in a directory of its own.
    fn fifo() -> (tempfile::TempDir, CString) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("fifo");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRUSR | nix::sys::stat::Mode::S_IWUSR)
            .unwrap();
        let path = CString::new(path.as_os_str().as_bytes()).unwrap();
        (directory, path)
    }

    #[test]
    fn a_child_that_takes_longer_than_a_check_is_not_killed() {
        let (directory, fifo) = fifo();
        let path = directory.path().join("fifo");
        let ends = thread::spawn(move || {
            thread::sleep(EXEC_TIMEOUT * 2 / CHECKS);
            fs::OpenOptions::new().write(true).open(path).unwrap();
        });
        let cloned = returned(move || {
            Deadline::within(EXEC_TIMEOUT, None).clone_child(how(), &fifo, hang).unwrap()
        });
        assert!(!cloned.late);
        assert_eq!(sys::reap(cloned.pidfd.as_fd(), true), Ok(Some(sys::End::Code(0))));
        ends.join().unwrap();
    }

    #[test]
    fn a_child_that_hangs_is_killed() {
        let (_directory, fifo) = fifo();
        let cloned = returned(move || {
            Deadline::within(SHORT, None).clone_child(how(), &fifo, hang).unwrap()
        });
        assert!(cloned.late);
        assert_eq!(
            sys::reap(cloned.pidfd.as_fd(), true),
            Ok(Some(sys::End::Signal(libc::SIGKILL)))
        );
    }

    #[test]
    fn a_child_in_a_cgroup_that_is_frozen_meanwhile_is_killed() {
        if kit::skip_without_root() {
            return;
        }
        if !Path::new(FREEZER).exists() {
            kit::skip("no freezer of version 1 on this machine");
            return;
        }
        let name = format!("pause-sandboxer-frozen-{}", std::process::id());
        let cgroup = Path::new(FREEZER).join(&name);
        fs::create_dir(&cgroup).unwrap();
        fs::write(cgroup.join("freezer.state"), "FROZEN").unwrap();
        let root = Arc::new(OwnedFd::from(fs::File::open(FREEZER).unwrap()));
        let tasks = CString::new(Path::new(&name).join("tasks").as_os_str().as_bytes()).unwrap();
        let cloned = returned(move || {
            let deadline = Deadline::within(SHORT, Some(Arc::clone(&root)));
            let joiner = Joiner { freezer: root.as_fd(), tasks };
            deadline.clone_child(how(), &joiner, join_and_end).unwrap()
        });
        assert!(cloned.late);
        assert_eq!(
            sys::reap(cloned.pidfd.as_fd(), true),
            Ok(Some(sys::End::Signal(libc::SIGKILL)))
        );
        assert_eq!(fs::read_to_string(cgroup.join("cgroup.procs")).unwrap(), "");
        fs::remove_dir(&cgroup).unwrap();
        let begun = Instant::now();
        while threads() > 0 {
            assert!(begun.elapsed() < Duration::from_secs(30));
            thread::sleep(SHORT / CHECKS);
        }
    }
}
