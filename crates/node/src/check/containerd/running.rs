//! The containerd of the node: the one that listens at its socket, or a program to examine instead.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, UnixAddr, connect, getsockopt, socket, sockopt,
};
use nix::unistd::{SysconfVar, geteuid, sysconf};

use process_identity::Stat;

/// The options of containerd that say where it is, and override its config file.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Flags {
    pub(super) config: Option<PathBuf>,
    pub(super) root: Option<PathBuf>,
    pub(super) state: Option<PathBuf>,
    pub(super) address: Option<PathBuf>,
}

/// The process that listens at containerd's socket.
#[derive(Debug)]
pub(super) struct Running {
    /// Its executable: the one that runs, also if the file has been replaced since.
    executable: File,
    /// The executable's path, for messages.
    path: PathBuf,
    /// The name that it was called by, which selects the program of a multi-call executable.
    name: OsString,
    /// Its options.
    pub(super) flags: Flags,
    /// When it was started, to the second, rounded up.
    pub(super) started: SystemTime,
    /// Its process id.
    pub(super) pid: i32,
    /// The service of systemd that it belongs to, as a word of the shell.
    pub(super) unit: Option<String>,
}

impl Running {
    /// The process that listens at `address`. It belongs to root, or to the caller.
    ///
    /// # Errors
    /// Nothing listens there, it is another user's or in a PID namespace that is not visible from
    /// here, or `/proc` does not show it.
    pub(super) fn find(address: &Path) -> io::Result<Self> {
        // The socket is not blocking: a containerd that accepts nothing must not hold up the check.
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let stream = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
        connect(stream.as_raw_fd(), &UnixAddr::new(address)?)?;
        let peer = getsockopt(&stream, sockopt::PeerCredentials)?;
        if peer.pid() <= 0 {
            return Err(io::Error::other("its PID namespace is not visible from here"));
        }
        if !is_trusted(peer.uid()) {
            return Err(io::Error::other(format!("the listener belongs to user {}", peer.uid())));
        }
        let directory = PathBuf::from(format!("/proc/{}", peer.pid()));
        let executable = File::open(directory.join("exe"))?;
        let path = fs::read_link(directory.join("exe"))?;
        let arguments = arguments(&fs::read(directory.join("cmdline"))?);
        let mut flags = flags_of(&arguments);
        if let Some(config) = &mut flags.config {
            *config = fs::read_link(directory.join("cwd"))?.join(&config);
        }
        let unit = unit_of(&fs::read_to_string(directory.join("cgroup")).unwrap_or_default());
        let ticks = Stat::of_process(peer.pid().unsigned_abs())?.start_time;
        let started = moment(ticks)?;
        // Its sockets are closed when it exits: only then its pid may have been reused.
        if has_ended(&stream)? {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        let name = arguments.into_iter().next().unwrap_or_else(|| path.clone().into());
        Ok(Self { executable, path, name, flags, started, pid: peer.pid(), unit })
    }

    fn command(&self) -> Command {
        let mut command = Command::new(format!("/proc/self/fd/{}", self.executable.as_raw_fd()));
        command.arg0(&self.name);
        command
    }
}

/// The service in a process's `/proc/PID/cgroup` (cgroups(7)), as a word of the shell: it becomes
/// part of the command that restarts it. Any process that can make a cgroup can choose its name, so
/// one that systemd does not allow (systemd.unit(5)) counts as none.
fn unit_of(cgroups: &str) -> Option<String> {
    let hierarchies = cgroups.lines().filter_map(|line| line.split_once(':')?.1.split_once(':'));
    let mut paths = hierarchies
        .filter(|(controllers, _)| ["", "name=systemd"].contains(controllers))
        .map(|(_, path)| path);
    let services = paths.find_map(|path| path.split('/').rfind(|part| part.ends_with(".service")));
    let allowed = |c: char| c.is_ascii_alphanumeric() || ":-_.@\\".contains(c);
    let service = services.filter(|name| !name.starts_with('-') && name.chars().all(allowed))?;
    Some(if service.contains('\\') { format!("'{service}'") } else { service.to_owned() })
}

/// Whether the caller may execute the program of this user: root's, or its own.
fn is_trusted(user: u32) -> bool {
    user == 0 || user == geteuid().as_raw()
}

/// Whether the other end of a connection is closed.
fn has_ended(stream: &OwnedFd) -> io::Result<bool> {
    let mut polled = [PollFd::new(stream.as_fd(), PollFlags::empty())];
    poll(&mut polled, PollTimeout::ZERO)?;
    Ok(polled[0].revents().is_some_and(|events| events.contains(PollFlags::POLLHUP)))
}

/// The arguments of a process by its `cmdline`.
fn arguments(cmdline: &[u8]) -> Vec<OsString> {
    let text = cmdline.strip_suffix(b"\0").unwrap_or(cmdline);
    text.split(|byte| *byte == 0).map(|word| OsString::from_vec(word.to_vec())).collect()
}

/// The options among a containerd's arguments; each of them takes a value.
fn flags_of(arguments: &[OsString]) -> Flags {
    let mut flags = Flags::default();
    let mut left = arguments.iter().skip(1);
    while let Some(argument) = left.next() {
        let bytes = argument.as_bytes();
        let Some(name) = bytes.strip_prefix(b"--").or_else(|| bytes.strip_prefix(b"-")) else {
            continue;
        };
        let mut halves = name.splitn(2, |byte| *byte == b'=');
        let slot = match halves.next().unwrap_or_default() {
            b"c" | b"config" => &mut flags.config,
            b"root" => &mut flags.root,
            b"state" => &mut flags.state,
            b"a" | b"address" => &mut flags.address,
            _ => continue,
        };
        let value = halves.next().map(OsStr::from_bytes);
        *slot = value.or_else(|| left.next().map(OsString::as_os_str)).map(PathBuf::from);
    }
    flags
}

/// The moment of a number of clock ticks after boot, rounded up to a second.
fn moment(ticks: u64) -> io::Result<SystemTime> {
    let boot = fs::read_to_string("/proc/stat")?;
    let boot = boot
        .lines()
        .find_map(|line| line.strip_prefix("btime ")?.trim().parse::<u64>().ok())
        .ok_or(io::ErrorKind::InvalidData)?;
    let per_second =
        sysconf(SysconfVar::CLK_TCK)?.and_then(|number| u64::try_from(number).ok()).unwrap_or(100);
    // The kernel rounds both down to whole seconds.
    Ok(UNIX_EPOCH + Duration::from_secs(boot + ticks / per_second.max(1) + 2))
}

/// A containerd that can be executed.
#[derive(Debug)]
pub(super) enum ContainerdProgram {
    /// The one that runs.
    Running(Running),
    /// A file, or a bare name that is searched in `PATH`.
    File(PathBuf),
}

impl ContainerdProgram {
    /// A command of it.
    pub(super) fn command(&self) -> Command {
        match self {
            Self::Running(running) => running.command(),
            Self::File(path) => Command::new(path),
        }
    }

    /// Its path, for messages.
    pub(super) fn path(&self) -> &Path {
        match self {
            Self::Running(running) => &running.path,
            Self::File(path) => path,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use nix::sys::socket::{Shutdown, shutdown};

    use super::*;

    #[test]
    fn flags_are_read_in_every_form() {
        let flags = |line: &str| flags_of(&line.split(' ').map(OsString::from).collect::<Vec<_>>());
        assert_eq!(flags("containerd"), Flags::default());
        assert_eq!(flags("containerd --log-level debug -config=/c").config, Some("/c".into()));
        assert_eq!(flags("containerd -c /c").config, Some("/c".into()));
        let all = flags("containerd --config /c --root=/r -a /s/a.sock --state /s");
        assert_eq!(
            (all.config, all.root, all.state, all.address),
            (Some("/c".into()), Some("/r".into()), Some("/s".into()), Some("/s/a.sock".into()))
        );
        assert_eq!(flags("containerd --config"), Flags::default(), "a value is missing");
        assert_eq!(arguments(b"containerd\0-c\0/x y\0"), ["containerd", "-c", "/x y"]);
    }

    #[test]
    fn the_unit_of_a_process_is_its_service() {
        let unit = |text: &str| unit_of(text);
        assert_eq!(unit("0::/system.slice/k3s.service\n").as_deref(), Some("k3s.service"));
        let first = "4:memory:/x.service\n1:name=systemd:/system.slice/a:b.service/x\n0::/\n";
        assert_eq!(unit(first).as_deref(), Some("a:b.service"));
        assert_eq!(unit("0::/user.slice/session-1.scope\n"), None);
        // systemd escapes what its names cannot have, and the shell takes a backslash away.
        let escaped = unit("0::/system.slice/a\\x2db.service\n");
        assert_eq!(escaped.as_deref(), Some("'a\\x2db.service'"));
        for hostile in ["x;reboot;.service", "-x.service", "$(x).service", "a'b.service"] {
            assert_eq!(unit(&format!("0::/system.slice/{hostile}\n")), None, "{hostile}");
        }
        assert_eq!(unit(""), None);
    }

    /// Promise: only_files_of_root_count.
    #[test]
    fn the_listener_is_the_program_that_runs() {
        let dir = tempfile::tempdir().unwrap();
        let address = dir.path().join("s");
        let listener = UnixListener::bind(&address).unwrap();
        let running = Running::find(&address).unwrap();
        assert_eq!(running.path, std::env::current_exe().unwrap());
        let age = SystemTime::now().duration_since(running.started).unwrap_or_default();
        assert!(age < Duration::from_secs(24 * 3600), "{age:?}");
        let output = running.command().arg("--list").output().unwrap();
        assert!(String::from_utf8_lossy(&output.stdout).contains("the_listener_is_the_program"));
        // Closing it is not enough: the child of another test may have it until it executes.
        shutdown(listener.as_raw_fd(), Shutdown::Both).unwrap();
        assert_eq!(Running::find(&address).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
    }

    /// Promise: only_files_of_root_count.
    #[test]
    fn the_program_of_another_user_is_not_executed() {
        let own = geteuid().as_raw();
        assert!(is_trusted(0) && is_trusted(own) && !is_trusted(own + 1));
    }

    #[test]
    fn a_peer_that_has_ended_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let address = dir.path().join("s");
        let listener = UnixListener::bind(&address).unwrap();
        let stream = OwnedFd::from(std::os::unix::net::UnixStream::connect(&address).unwrap());
        assert!(!has_ended(&stream).unwrap());
        let (peer, _) = listener.accept().unwrap();
        peer.shutdown(std::net::Shutdown::Both).unwrap();
        assert!(has_ended(&stream).unwrap());
    }
}
