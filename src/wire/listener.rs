//! Listening sockets: bound so that only root can reach them, and accepted from without ever giving
//! up.

use std::fs::{self, Permissions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net;
use std::path::Path;
use std::time::Duration;

use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind as bind_address, getsockopt, listen,
    socket, sockopt,
};
use tokio::net::{UnixListener, UnixStream};
use tokio::time::{Instant, sleep_until};

use crate::error::{IoContext, StepError, gone};
use crate::process::killed::is_killed;
use crate::replace_file::temporary;

/// The first pause after a failed accept; it doubles up to [`MAX_DELAY`].
const MIN_DELAY: Duration = Duration::from_millis(10);
/// The longest pause after a failed accept.
const MAX_DELAY: Duration = Duration::from_secs(1);

/// Binds a listening unix socket at `path` with mode 0600, in place of a socket without a listener
/// any more.
///
/// The socket gets its mode and listens before it appears at `path`, and takes the path by rename:
/// a caller finds either the old socket or the new one. Its file stays behind when the listener is
/// gone, for the next one to replace.
///
/// # Errors
/// The failed step; `EADDRINUSE` if it has a listener, `EEXIST` if the existing file is no
/// socket.
pub fn bind(path: &Path) -> Result<net::UnixListener, StepError> {
    refuse_taken(path)?;
    let new = temporary(path);
    gone(fs::remove_file(&new)).step_at("remove", &new)?;
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let fd =
        socket(AddressFamily::Unix, SockType::Stream, flags, None).step_at("make socket", path)?;
    let address = UnixAddr::new(&new).step_at("bind", &new)?;
    bind_address(fd.as_raw_fd(), &address).step_at("bind", &new)?;
    let placed = fs::set_permissions(&new, Permissions::from_mode(0o600))
        .step_at("chmod", &new)
        .and_then(|()| listen(&fd, Backlog::MAXALLOWABLE).step_at("listen", &new))
        .and_then(|()| fs::rename(&new, path).step_at("rename to", path));
    if let Err(step) = placed {
        // Best effort: the next start removes it as well.
        let _ = fs::remove_file(&new);
        return Err(step);
    }
    Ok(net::UnixListener::from(fd))
}

/// Refuses a path with a listener, or which is no socket.
fn refuse_taken(path: &Path) -> Result<(), StepError> {
    let found = match fs::symlink_metadata(path) {
        Ok(found) => found,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(StepError::at("stat", path, e)),
    };
    if !found.file_type().is_socket() {
        return Err(StepError::at("bind", path, io::Error::from_raw_os_error(libc::EEXIST)));
    }
    match net::UnixStream::connect(path) {
        Ok(stream) if is_of_killed(&stream) => Ok(()),
        Ok(_) => Err(StepError::at("bind", path, io::Error::from_raw_os_error(libc::EADDRINUSE))),
        Err(e) if matches!(e.raw_os_error(), Some(libc::ECONNREFUSED | libc::ENOENT)) => Ok(()),
        Err(e) => Err(StepError::at("connect", path, e)),
    }
}

/// Whether the process that listens was killed and hangs in the kernel: it accepts no connection
/// any more. The lock of the state directory keeps two daemons from replacing each other's socket.
fn is_of_killed(stream: &net::UnixStream) -> bool {
    let listener = getsockopt(stream, sockopt::PeerCredentials).map(|peer| peer.pid());
    listener.is_ok_and(|pid| is_killed(&Path::new("/proc").join(pid.to_string())))
}

/// A listener that yields connections of one user.
pub(super) struct Listener {
    listener: UnixListener,
    /// Its path, for messages.
    address: String,
    /// The user who may connect.
    uid: libc::uid_t,
    delay: Duration,
    not_before: Option<Instant>,
}

impl Listener {
    /// Accepts from a bound listener, whichever its blocking mode.
    ///
    /// # Errors
    /// The failed step.
    pub(super) fn new(listener: net::UnixListener, uid: libc::uid_t) -> Result<Self, StepError> {
        listener.set_nonblocking(true).step("make listener non-blocking")?;
        let address = listener.local_addr().step("query address of listener")?;
        let address =
            address.as_pathname().map_or_else(String::new, |path| path.display().to_string());
        let listener = UnixListener::from_std(listener).step("watch listener")?;
        Ok(Self { listener, address, uid, delay: MIN_DELAY, not_before: None })
    }

    /// The next connection of the user who may connect. May be dropped and called again at any
    /// time.
    ///
    /// Retries a failed accept, usually because no file descriptor is free, after a delay: the
    /// connection stays in the backlog and the listener stays readable, so that without a delay
    /// this loop would spin.
    pub(super) async fn next(&mut self) -> UnixStream {
        loop {
            if let Some(time) = self.not_before {
                sleep_until(time).await;
                self.not_before = None;
            }
            match self.listener.accept().await {
                Ok((stream, _)) => {
                    self.delay = MIN_DELAY;
                    if self.may_connect(&stream) {
                        return stream;
                    }
                }
                Err(e) => {
                    log::warn!(
                        "failed to accept a connection on {}; retrying in {} ms: {e}",
                        self.address,
                        self.delay.as_millis()
                    );
                    self.not_before = Some(Instant::now() + self.delay);
                    self.delay = (self.delay * 2).min(MAX_DELAY);
                }
            }
        }
    }

    fn may_connect(&self, stream: &UnixStream) -> bool {
        match stream.peer_cred() {
            Ok(peer) if peer.uid() == self.uid => true,
            Ok(peer) => {
                log::warn!(
                    "refused a connection on {} of uid {}, pid {}",
                    self.address,
                    peer.uid(),
                    peer.pid().unwrap_or(0)
                );
                false
            }
            Err(e) => {
                log::warn!("refused a connection on {} without credentials: {e}", self.address);
                false
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::process::{Command, Stdio};

    use kit::machine::freezer::Freezer;

    use super::*;

    fn scratch() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.sock");
        (dir, path)
    }

    #[test]
    fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
        let (_dir, path) = scratch();
        let first = bind(&path).unwrap();
        let refused = bind(&path).unwrap_err();
        assert_eq!(refused.io().raw_os_error(), Some(libc::EADDRINUSE));
        assert!(refused.to_string().contains(path.to_str().unwrap()), "{refused}");
        drop(first);
        fs::write(temporary(&path), "left by a crash").unwrap();
        let _second = bind(&path).unwrap();
        net::UnixStream::connect(&path).unwrap();
    }

    #[test]
    fn the_socket_of_a_killed_daemon_that_hangs_is_replaced() {
        let Some(freezer) = Freezer::new("listener-test").unwrap() else {
            return kit::skip("no freezer of version 1 on this machine");
        };
        let (_dir, path) = scratch();
        let script = "use IO::Socket::UNIX; alarm 60; \
                      my $s = IO::Socket::UNIX->new(Local => $ARGV[0], Listen => 1) or die $!; \
                      print \"listens\\n\"; close STDOUT; sleep 60";
        let mut command = Command::new("perl");
        command.args(["-e", script]).arg(&path).stdout(Stdio::piped());
        let mut daemon = command.spawn().unwrap();
        io::read_to_string(daemon.stdout.take().unwrap()).unwrap();
        let in_use = |path| bind(path).unwrap_err().io().raw_os_error();
        freezer.freeze(daemon.id()).unwrap();
        assert_eq!(in_use(&path), Some(libc::EADDRINUSE), "one that is only frozen lives");
        daemon.kill().unwrap();
        let listener = bind(&path).unwrap();
        net::UnixStream::connect(&path).unwrap();
        listener.accept().unwrap();
        freezer.thaw().unwrap();
        daemon.wait().unwrap();
    }

    #[test]
    fn what_is_no_socket_is_left_alone() {
        let (_dir, path) = scratch();
        fs::write(&path, "precious").unwrap();
        assert_eq!(bind(&path).unwrap_err().io().raw_os_error(), Some(libc::EEXIST));
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
    }

    #[test]
    fn a_path_that_does_not_fit_is_named() {
        let long = PathBuf::from(format!("/tmp/{}", "x".repeat(120)));
        let step = bind(&long).unwrap_err();
        assert!(step.to_string().starts_with(&format!("bind {}", long.display())), "{step}");
    }
}
