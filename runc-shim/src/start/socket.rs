//! The socket of a group's server. A lock makes `start` and `delete` of one group take turns, so
//! that it has one server, and none removes the socket of another.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use sha2::{Digest as _, Sha256};

use crate::error::{Context as _, Error};
use crate::sys;

/// The file of a bundle with the address of the server that `start` has found or launched.
pub const ADDRESS_FILE: &str = "address";

/// The file in a directory of sockets with the locks of all groups, a byte for each.
const LOCK: &str = "pause-sandboxer-runc-shim.lock";

/// Callers that may wait in the queue of the socket.
const BACKLOG: i32 = 4096;

/// Where the socket of a group of containers is, as with containerd's shim.
pub fn path(directory: &Path, containerd: &str, namespace: &str, group: &str) -> PathBuf {
    let digest = Sha256::digest(format!("{containerd}/{namespace}/{group}"));
    let name: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    directory.join(name)
}

/// Locks the socket at this path until all copies of the returned descriptor are closed. Makes its
/// directory if there is none.
///
/// # Errors
/// The directory or the lock cannot be made or opened.
pub fn lock(socket: &Path) -> Result<OwnedFd, Error> {
    let directory = socket.parent().unwrap_or(socket);
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(directory);
    made.context(format_args!("make {}", directory.display()))?;
    let path = directory.join(LOCK);
    let flags = OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file: File = fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(flags.bits().cast_signed())
        .open(&path)
        .context(format_args!("open {}", path.display()))?;
    // Two groups with the same byte only wait for each other.
    let digest = Sha256::digest(socket.as_os_str().as_encoded_bytes());
    let byte = digest.iter().take(7).fold(0, |sum, byte| (sum << 8) | i64::from(*byte));
    sys::lock_byte(file.as_fd(), byte).context(format_args!("lock {}", path.display()))?;
    Ok(file.into())
}

/// A listening socket at this path; `None`: a server answers there. It must be locked.
///
/// # Errors
/// The failed step.
pub fn claim(path: &Path) -> Result<Option<OwnedFd>, Error> {
    let place = |step: &str| format!("{step} {}", path.display());
    if answers(path)? {
        return Ok(None);
    }
    remove(path)?;
    let address = SocketAddrUnix::new(path).context(place("address of socket"))?;
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .context("make socket")?;
    rustix::net::bind(&socket, &address).context(place("bind socket"))?;
    let ready = rustix::fs::chmod(path, Mode::RUSR | Mode::WUSR)
        .context(place("change mode of"))
        .and_then(|()| rustix::net::listen(&socket, BACKLOG).context(place("listen on")));
    ready.inspect_err(|_| drop(remove(path)))?;
    Ok(Some(socket))
}

/// Removes the socket of a bundle's group, if no server answers there.
///
/// # Errors
/// The failed step.
pub fn remove_dead(bundle: &Path) -> Result<(), Error> {
    let Ok(address) = fs::read_to_string(bundle.join(ADDRESS_FILE)) else { return Ok(()) };
    let path = address.strip_prefix("unix://").map(Path::new).filter(|path| path.is_absolute());
    let Some(path) = path else { return Ok(()) };
    // Mostly the server runs: then `delete` does not wait for the lock.
    if !path.exists() || answers(path)? {
        return Ok(());
    }
    let _lock = lock(path)?;
    if answers(path)? { Ok(()) } else { remove(path) }
}

/// Whether a server listens at this path. Does not wait for it.
fn answers(path: &Path) -> Result<bool, Error> {
    let address = SocketAddrUnix::new(path).context(format_args!("address {}", path.display()))?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .context("make socket")?;
    match rustix::net::connect(&socket, &address) {
        // Its queue is full.
        Ok(()) | Err(Errno::AGAIN) => Ok(true),
        Err(Errno::NOENT | Errno::CONNREFUSED) => Ok(false),
        Err(e) => Err(Error::from(e).context(format_args!("connect to {}", path.display()))),
    }
}

fn remove(path: &Path) -> Result<(), Error> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            Err(Error::from(e).context(format_args!("remove {}", path.display())))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn the_path_is_that_of_containerd_s_shim() {
        // printf /run/containerd/containerd.sock/k8s.io/a | sha256sum
        let path = path(Path::new("/s"), "/run/containerd/containerd.sock", "k8s.io", "a");
        let name = "0b3c2065c4ad3e641dd16f5e2616734bf417fa5579f1c3b8f774f802cfa45e4b";
        assert_eq!(path, Path::new("/s").join(name));
    }

    #[test]
    fn a_dead_socket_is_replaced_and_a_live_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let bundle = dir.path().join("bundle");
        fs::create_dir(&bundle).unwrap();
        let sockets = dir.path().join("s");
        let path = sockets.join("group");
        fs::write(bundle.join(ADDRESS_FILE), format!("unix://{}", path.display())).unwrap();
        remove_dead(&bundle).unwrap();
        drop(lock(&path).unwrap());
        let live = claim(&path).unwrap().unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::metadata(&sockets).unwrap().permissions().mode() & 0o777, 0o700);
        assert!(claim(&path).unwrap().is_none());
        remove_dead(&bundle).unwrap();
        assert!(path.exists());
        drop(live);
        let next = claim(&path).unwrap().unwrap();
        drop(next);
        remove_dead(&bundle).unwrap();
        assert!(!path.exists());
        remove_dead(&dir.path().join("none")).unwrap();
    }
}
