//! Processes that are not children of the daemon, referenced by a pidfd so that their pids cannot
//! be confused with reused ones. They are inspected and killed, but not watched or reaped.

use std::ffi::c_int;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::task::{Context, Waker};

use nix::sys::socket::{SockType, UnixAddr, getsockname, getsockopt, sockopt};
use process_identity::{has_ended, is_no_such_process, namespace_error};
use rustix::process::{PidfdGetfdFlags, pidfd_getfd};
use tokio::io::unix::AsyncFd;

use super::Identity;
use super::identity;
use crate::error::{IoContext as _, StepError};
use crate::sys::{self, Errno};

/// A process by its pidfd.
#[derive(Debug)]
pub struct ProcessHandle {
    pid: u32,
    pidfd: OwnedFd,
}

impl ProcessHandle {
    /// The process that has a pid now; `None`: there is none.
    ///
    /// # Errors
    /// No pidfd can be opened for it.
    pub fn open(pid: u32) -> Result<Option<Self>, StepError> {
        match sys::pidfd_open(c_int::try_from(pid).unwrap_or(0)) {
            Ok(pidfd) => Ok(Some(Self { pid, pidfd })),
            // No process, or by now the id of a thread, or no valid pid.
            Err(Errno::SRCH | Errno::INVAL | Errno::NOENT) => Ok(None),
            Err(e) => Err(e).step("open a pidfd of a process"),
        }
    }

    /// Its pid, which is not reused while the process lives.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Kills it. Gone already is success.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn kill(&self) -> Result<(), StepError> {
        sys::kill(self.pidfd.as_fd()).step("kill a process")
    }
}

/// The cookie of a socket, unique until the next boot (`SO_COOKIE`): a socket of
/// another mount namespace may be bound to the same path. `None` where the kernel does not say.
pub fn socket_cookie(socket: BorrowedFd<'_>) -> Option<u64> {
    rustix::net::sockopt::socket_cookie(socket).ok()
}

/// A descriptor of our own for the socket of a process that listens at `address`, as the socket
/// itself tells, and has this cookie, if that is known. `None`: the process has exited, or has no
/// such socket.
///
/// # Errors
/// It cannot be taken; Linux older than 5.6 and some security modules refuse.
pub fn listening_socket(
    identity: &Identity,
    address: &Path,
    cookie: Option<u64>,
) -> Result<Option<OwnedFd>, StepError> {
    let Some(process) = ProcessHandle::open(identity.pid)? else { return Ok(None) };
    match take_listening_socket(&process, identity, address, cookie) {
        // Its files in `/proc` and its descriptors went with it.
        Err(_) if has_ended(&process.pidfd) => Ok(None),
        taken => taken,
    }
}

fn take_listening_socket(
    process: &ProcessHandle,
    identity: &Identity,
    address: &Path,
    cookie: Option<u64>,
) -> Result<Option<OwnedFd>, StepError> {
    // Checked after the pidfd is open: the pid may have been reused before.
    if !identity::matches(identity)? {
        return Ok(None);
    }
    let directory = format!("/proc/{}/fd", identity.pid);
    for entry in fs::read_dir(&directory).step_at("read directory", &directory)?.flatten() {
        let target = fs::read_link(entry.path()).unwrap_or_default();
        let number = entry.file_name().to_str().and_then(|number| number.parse().ok());
        let Some(number) = number.filter(|_| target.to_string_lossy().starts_with("socket:"))
        else {
            continue;
        };
        match pidfd_getfd(&process.pidfd, number, PidfdGetfdFlags::empty()) {
            Ok(socket) if is_own_listener(&socket, address, cookie) => return Ok(Some(socket)),
            // Closed meanwhile.
            Ok(_) | Err(Errno::BADF) => {}
            Err(e) => return Err(e).step("take a socket of a process"),
        }
    }
    Ok(None)
}

/// Checks that root made the socket listen at `address`, and that it has this cookie.
fn is_own_listener(socket: &OwnedFd, address: &Path, cookie: Option<u64>) -> bool {
    let bound = getsockname::<UnixAddr>(socket.as_raw_fd());
    let listened = getsockopt(socket, sockopt::PeerCredentials);
    getsockopt(socket, sockopt::AcceptConn).unwrap_or(false)
        && getsockopt(socket, sockopt::SockType) == Ok(SockType::Stream)
        && bound.is_ok_and(|bound| bound.path() == Some(address))
        && listened.is_ok_and(|by| by.uid() == nix::unistd::geteuid().as_raw())
        && cookie.is_none_or(|cookie| socket_cookie(socket.as_fd()) == Some(cookie))
}

/// A listening socket that the runtime watches, until this is dropped.
#[derive(Debug)]
pub struct Watched {
    _listener: AsyncFd<Arc<OwnedFd>>,
}

/// Wakes `waker` once, when a connection waits at the listening socket. To be called on the
/// runtime.
///
/// # Errors
/// The socket cannot be watched: epoll_ctl(2).
pub fn watch_listener(listener: Arc<OwnedFd>, waker: Waker) -> io::Result<Watched> {
    let listener = sys::watch(listener)?;
    if listener.poll_read_ready(&mut Context::from_waker(&waker)).is_ready() {
        // The caller may hold a lock that the waker needs.
        drop(tokio::spawn(async move { waker.wake() }));
    }
    Ok(Watched { _listener: listener })
}

/// All user ids of the process that has a pid now are the daemon's.
pub(crate) fn is_own_users(pid: u32) -> io::Result<bool> {
    let own = nix::unistd::geteuid().to_string();
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let ids = status.lines().find_map(|line| line.strip_prefix("Uid:")).unwrap_or_default();
    Ok(!ids.trim().is_empty() && ids.split_whitespace().all(|id| id == own))
}

/// A namespace: its name in `/proc/PID/ns`, and the namespace itself, which lasts as long as the
/// file is open, so that no other gets its inode.
pub type NamespaceHandle = (&'static str, File);

/// These namespaces of the process that `identity` names; none if it has ended.
///
/// # Errors
/// They cannot be opened.
pub fn namespaces(
    identity: &Identity,
    kinds: &[&'static str],
) -> Result<Vec<NamespaceHandle>, StepError> {
    let mut opened = Vec::new();
    for kind in kinds {
        let path = format!("/proc/{}/ns/{kind}", identity.pid);
        match File::open(&path).map_err(|e| namespace_error(identity.pid, e)) {
            Ok(file) => opened.push((*kind, file)),
            Err(e) if is_no_such_process(&e) => return Ok(Vec::new()),
            Err(e) => return Err(StepError::at("open namespace", path, e)),
        }
    }
    // Afterwards: the recorded process is older than the record, so a process that matches now
    // matched before too.
    match identity::matches(identity) {
        Ok(true) => Ok(opened),
        Ok(false) => Ok(Vec::new()),
        Err(e) if is_no_such_process(e.io()) => Ok(Vec::new()),
        Err(e) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_second_kill_does_not_hit_a_reused_pid() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let process = ProcessHandle::open(child.id()).unwrap().unwrap();
        assert_eq!(process.pid(), child.id());
        process.kill().unwrap();
        assert!(!child.wait().unwrap().success());
        // The pid may have been reused; the pidfd still refers to the first process.
        process.kill().unwrap();
        assert!(ProcessHandle::open(u32::MAX).unwrap().is_none());
        assert!(ProcessHandle::open(0).unwrap().is_none());
    }

    /// A process may also hold a socket of another mount namespace: the path alone does not
    /// tell the two.
    ///
    /// Promise: foreign_process_survives.
    #[test]
    fn a_socket_is_taken_by_its_path_kind_and_cookie() {
        use std::os::unix::net::{UnixDatagram, UnixListener};
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let bind = || {
            let _ = fs::remove_file(&path);
            let listener = UnixListener::bind(&path).unwrap();
            let cookie = socket_cookie(listener.as_fd());
            (listener, cookie)
        };
        let datagrams = UnixDatagram::bind(&path).unwrap();
        let own = identity::read_identity(std::process::id(), &identity::boot_id().unwrap());
        let own = own.unwrap();
        let take = |cookie| {
            let taken = listening_socket(&own, &path, cookie).unwrap();
            taken.map(|socket| socket_cookie(socket.as_fd()))
        };
        assert_eq!(take(None), None, "it does not listen");
        let ((first, one), (second, other)) = (bind(), bind());
        assert!(one.is_some() && one != other, "{one:?} and {other:?}");
        assert_eq!((take(one), take(other)), (Some(one), Some(other)));
        // A launch may be interrupted before the cookie is recorded.
        assert!(take(None).is_some());
        drop(second);
        assert_eq!(take(other), None, "another socket has the path");
        // The pid was reused.
        let stranger = Identity { start_time: own.start_time + 1, ..own.clone() };
        assert!(listening_socket(&stranger, &path, one).unwrap().is_none());
        drop((first, datagrams));
    }

    #[test]
    fn a_process_that_ends_while_its_sockets_are_looked_at_has_none() {
        let boot = identity::boot_id().unwrap();
        for _ in 0..300 {
            // A socket of the test's would be looked at, too.
            let mut command = Command::new("true");
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            let mut child = command.spawn().unwrap();
            let process = identity::read_identity(child.id(), &boot).unwrap();
            let looks = std::thread::spawn(move || {
                while Path::new(&format!("/proc/{}", process.pid)).exists() {
                    listening_socket(&process, Path::new("/none"), None).unwrap();
                }
            });
            child.wait().unwrap();
            looks.join().unwrap();
        }
    }

    #[derive(Default)]
    struct Bell(tokio::sync::Notify);

    impl std::task::Wake for Bell {
        fn wake(self: Arc<Self>) {
            self.0.notify_one();
        }
    }

    #[tokio::test]
    async fn a_watch_wakes_for_earlier_and_later_connections() {
        use std::os::unix::net::{UnixListener, UnixStream};
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let listener: Arc<OwnedFd> = Arc::new(UnixListener::bind(&path).unwrap().into());
        let bell = Arc::new(Bell::default());
        let earlier = UnixStream::connect(&path).unwrap();
        // The same socket again as soon as its watch is dropped.
        for _ in 0..2 {
            let _watched = watch_listener(Arc::clone(&listener), Arc::clone(&bell).into()).unwrap();
            bell.0.notified().await;
        }
        let taken = UnixListener::from(listener.try_clone().unwrap());
        taken.accept().unwrap();
        let _watched = watch_listener(listener, Arc::clone(&bell).into()).unwrap();
        let waits = std::time::Duration::from_millis(50);
        assert!(tokio::time::timeout(waits, bell.0.notified()).await.is_err(), "none waits");
        let _later = UnixStream::connect(&path).unwrap();
        bell.0.notified().await;
        drop(earlier);
    }

    #[test]
    fn only_the_recorded_process_shows_its_namespaces() {
        let boot = identity::boot_id().unwrap();
        let own = identity::read_identity(std::process::id(), &boot).unwrap();
        let found = namespaces(&own, &["net", "ipc"]).unwrap();
        let inode = |file: &File| file.metadata().unwrap().ino();
        let expected = ["net", "ipc"]
            .map(|kind| std::fs::metadata(format!("/proc/self/ns/{kind}")).unwrap().ino());
        assert_eq!(found.iter().map(|(_, file)| inode(file)).collect::<Vec<_>>(), expected);
        // The pid was reused.
        let other = Identity { start_time: own.start_time + 1, ..own };
        assert!(namespaces(&other, &["net"]).unwrap().is_empty());
        assert!(namespaces(&Identity { pid: u32::MAX, ..other }, &["net"]).unwrap().is_empty());
    }
}
