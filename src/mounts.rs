//! Whether containerd sees what is mounted here.
//!
//! The daemon mounts a pod's shared memory below containerd's state directory, and its shims mount
//! the root file systems of containers. In a mount namespace of its own, which options such as
//! `PrivateTmp=` give to a unit, containerd does not see these mounts. No call fails, but the pods'
//! containers get wrong files.

use std::ffi::OsString;
use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};

use nix::fcntl::{OFlag, open, readlinkat};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, getsockopt, socket};
use nix::sys::{socket::sockopt::PeerCredentials, stat::Mode};
use parking_lot::Mutex;

use crate::error::StepError;

/// The link of a process's mount namespace below its directory in `/proc`.
const NAMESPACE: &str = "ns/mnt";

/// How containerd sees the mounts of another process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum View {
    /// Both are in one mount namespace.
    Same,
    /// Each has a mount namespace of its own, but mounts below containerd's state directory are
    /// propagated to containerd's.
    Propagated,
    /// containerd does not see them.
    Apart {
        /// Process id of containerd.
        pid: i32,
        /// Its mount namespace, as `/proc` names it.
        theirs: String,
        /// The mount namespace of the other process.
        ours: String,
    },
}

impl View {
    /// The problem and its remedy.
    ///
    /// # Errors
    /// The mounts are not seen. `state` is containerd's state directory.
    pub fn admit(&self, state: &Path) -> Result<(), StepError> {
        let Self::Apart { pid, theirs, ours } = self else { return Ok(()) };
        let reason = format!(
            "containerd (process {pid}) is in mount namespace {theirs}, this sandboxer in {ours}: \
             run both in one; a unit must not have PrivateTmp=, ProtectSystem= or other options \
             that give it a mount namespace"
        );
        Err(StepError::at(
            "mount where containerd sees it",
            state,
            io::Error::new(ErrorKind::Unsupported, reason),
        ))
    }
}

/// How the containerd that listens on `address`, and whose state directory is `state`, sees the
/// mounts of process `viewer` (a process id, or `self`).
///
/// # Errors
/// containerd cannot be reached, or `/proc` does not show one of the two.
pub fn view(viewer: &str, address: &Path, state: &Path) -> io::Result<View> {
    Ok(compare(viewer, address, state)?.view)
}

/// The mount namespace of a containerd, compared with the daemon's.
#[derive(Debug)]
struct ContainerdProcess {
    /// Its directory in `/proc`: of this process and no later one of the same id.
    process: OwnedFd,
    /// Its mount namespace.
    namespace: OsString,
    view: View,
}

fn compare(viewer: &str, address: &Path, state: &Path) -> io::Result<ContainerdProcess> {
    let ours = fs::read_link(Path::new("/proc").join(viewer).join(NAMESPACE))?.into_os_string();
    // The socket is not blocking: a containerd that accepts nothing must not delay the caller.
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let stream = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    connect(stream.as_raw_fd(), &UnixAddr::new(address)?)?;
    let pid = getsockopt(&stream, PeerCredentials)?.pid();
    if pid <= 0 {
        return Err(io::Error::other(
            "containerd is in a PID namespace that is not seen from here",
        ));
    }
    let directory = PathBuf::from(format!("/proc/{pid}"));
    let process = open(&directory, OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty())?;
    let namespace = readlinkat(&process, NAMESPACE)?;
    let view = if namespace == ours {
        View::Same
    } else {
        let own = fs::read_to_string(Path::new("/proc").join(viewer).join("mountinfo"))?;
        let state = fs::canonicalize(state).unwrap_or_else(|_| state.to_owned());
        if propagates(&own, &fs::read_to_string(directory.join("mountinfo"))?, &state) {
            View::Propagated
        } else {
            let text = |name: &OsString| name.to_string_lossy().into_owned();
            View::Apart { pid, theirs: text(&namespace), ours: text(&ours) }
        }
    };
    // Its socket is closed when it exits: only then its pid may have been reused.
    if ended(&stream) {
        return Err(ErrorKind::ConnectionReset.into());
    }
    Ok(ContainerdProcess { process, namespace, view })
}

/// Whether the other end of a connection is gone. What it has sent is dropped.
fn ended(stream: &OwnedFd) -> bool {
    let mut buffer = [0; 512];
    loop {
        match nix::unistd::read(stream, &mut buffer) {
            Ok(0) => return true,
            Ok(_) | Err(nix::Error::EINTR) => {}
            Err(e) => return e != nix::Error::EAGAIN,
        }
    }
}

/// Whether a mount below `path` in the first namespace appears in the second; both as
/// proc_pid_mountinfo(5).
fn propagates(from: &str, to: &str, path: &Path) -> bool {
    let tagged = |fields: &[&str], tags: &[&str]| -> Vec<String> {
        fields
            .iter()
            .filter_map(|field| field.split_once(':'))
            .filter(|(tag, _)| tags.contains(tag))
            .map(|(_, group)| group.to_owned())
            .collect()
    };
    // Sent to all members of a peer group, and to who receives from it.
    let sent = tagged(&above(from, path), &["shared"]);
    let received = tagged(&above(to, path), &["shared", "master", "propagate_from"]);
    sent.iter().any(|group| received.contains(group))
}

/// The optional fields of the mount that `path` is on: that of the longest mount point, and of
/// those at one place the last.
fn above<'a>(mountinfo: &'a str, path: &Path) -> Vec<&'a str> {
    let (mut deepest, mut fields) = (0, Vec::new());
    for line in mountinfo.lines() {
        let parts: Vec<&str> = line.split(' ').collect();
        let (Some(point), Some(dash)) = (parts.get(4), parts.iter().position(|part| *part == "-"))
        else {
            continue;
        };
        let point = point.replace("\\040", " ");
        let depth = Path::new(&point).components().count();
        if depth >= deepest && path.starts_with(&point) {
            deepest = depth;
            fields = parts.get(6..dash).unwrap_or_default().to_vec();
        }
    }
    fields
}

/// Refuses pods where containerd would not see their mounts.
#[derive(Debug)]
pub struct Mounts {
    address: PathBuf,
    state: PathBuf,
    found: Mutex<Option<ContainerdProcess>>,
}

impl Mounts {
    /// The mounts as the containerd at `address` with the state directory `state` sees them.
    pub fn new(address: PathBuf, state: PathBuf) -> Self {
        Self { address, state, found: Mutex::default() }
    }

    /// Looks again only when containerd is another process than the last time, or in another
    /// namespace. Where containerd cannot be asked, nothing is refused.
    ///
    /// # Errors
    /// containerd does not see what is mounted here.
    pub fn admit(&self) -> Result<(), StepError> {
        let mut found = self.found.lock();
        let known = found.as_ref().filter(|known| {
            readlinkat(&known.process, NAMESPACE).is_ok_and(|name| name == known.namespace)
        });
        if let Some(known) = known {
            return known.view.admit(&self.state);
        }
        match compare("self", &self.address, &self.state) {
            Ok(new) => {
                let admitted = new.view.admit(&self.state);
                match &admitted {
                    Err(step) => log::error!("refusing pods: {step}"),
                    Ok(()) if new.view == View::Propagated => log::warn!(
                        "containerd is in another mount namespace, to which mounts below {} are \
                         propagated",
                        self.state.display()
                    ),
                    Ok(()) => {}
                }
                *found = Some(new);
                admitted
            }
            Err(e) => {
                *found = None;
                let step =
                    StepError::at("compare mount namespaces with containerd's", &self.address, e);
                log::debug!("failed to find containerd's mount namespace: {step}");
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    const NODE: &str = "\
22 1 8:1 / / rw shared:1 - ext4 /dev/sda rw
25 22 0:20 / /run rw,nosuid shared:5 master:9 - tmpfs tmpfs rw
26 22 0:21 / /runner rw shared:6 - tmpfs tmpfs rw
27 25 0:22 / /run/a\\040b rw shared:7 - tmpfs tmpfs rw
";

    #[test]
    fn mounts_reach_peers_and_those_that_receive_from_them() {
        let path = Path::new("/run/containerd");
        for (other, reached) in [
            (NODE.to_owned(), true),
            (NODE.replace("shared:5 master:9", "master:5"), true),
            (NODE.replace("shared:5 master:9", "shared:8 master:5"), true),
            (NODE.replace("shared:5 master:9", "master:4 propagate_from:5"), true),
            (NODE.replace("shared:5 master:9", "shared:8"), false),
            (NODE.replace("shared:5 master:9 ", ""), false),
            // On top of it lies another.
            (format!("{NODE}40 25 0:40 / /run rw - tmpfs tmpfs rw\n"), false),
            (String::new(), false),
        ] {
            assert_eq!(propagates(NODE, &other, path), reached, "{other}");
        }
        // With PrivateTmp= mounts of the node are visible in the unit, and not the
        // reverse.
        let unit = NODE.replace("shared:5 master:9", "shared:15 master:5");
        assert!(propagates(NODE, &unit, path) && !propagates(&unit, NODE, path));
    }

    #[test]
    fn the_mount_of_a_path_is_the_deepest_and_last() {
        assert_eq!(above(NODE, Path::new("/run/containerd")), ["shared:5", "master:9"]);
        assert_eq!(above(NODE, Path::new("/run/a b/c")), ["shared:7"]);
        assert_eq!(above(NODE, Path::new("/running")), ["shared:1"]);
    }

    #[test]
    fn a_containerd_in_the_same_namespace_is_admitted_and_one_that_is_not_there_too() {
        let dir = tempfile::tempdir().unwrap();
        let address = dir.path().join("c.sock");
        let mounts = Mounts::new(address.clone(), dir.path().to_owned());
        assert!(view("self", &address, dir.path()).is_err());
        mounts.admit().unwrap();
        let _listener = UnixListener::bind(&address).unwrap();
        assert_eq!(view("self", &address, dir.path()).unwrap(), View::Same);
        mounts.admit().unwrap();
        assert!(mounts.found.lock().is_some());
        mounts.admit().unwrap();
    }

    #[test]
    fn a_refusal_names_both_and_the_options() {
        let view = View::Apart { pid: 7, theirs: "mnt:[1]".to_owned(), ours: "mnt:[2]".to_owned() };
        let text = view.admit(Path::new("/run/containerd")).unwrap_err().to_string();
        for part in ["/run/containerd", "process 7", "mnt:[1]", "mnt:[2]", "PrivateTmp="] {
            assert!(text.contains(part), "{text}");
        }
    }
}
