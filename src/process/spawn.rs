//! Processes of the node beside the pauses, shims, that outlive the daemon: launched with nothing
//! of the daemon's but one socket, and found again by what names them.

use std::ffi::{CStr, CString, OsStr, OsString, c_int};
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::task::Waker;

use super::deadline::{Cloned, Deadline};
use rustix::process::getpid;
use rustix::thread::{CoreSchedulingScope, create_core_scheduling_cookie};

use super::epoll::Watched;
use super::pidfd::{self, PidfdProcess, Reaper};
use super::report::ChildReport;
use super::{Adoption, Identity, Process, held, identity};
use crate::error::{IoContext, StepError};
use crate::sys::{self, Errno};

/// Number of the first descriptor behind the standard ones, where a program expects a socket that
/// it is handed.
const SOCKET: i32 = 3;

/// What is launched.
#[derive(Debug)]
pub struct Launch<'a> {
    /// The program.
    pub program: Program<'a>,
    /// Its arguments, without its name.
    pub arguments: &'a [OsString],
    /// Its environment, `NAME=value`; nothing is added.
    pub environment: &'a [OsString],
    /// It gets a core scheduling domain of its own, which those that it starts inherit.
    pub core_domain: bool,
    /// Its working directory.
    pub directory: &'a Path,
    /// Its descriptor 3.
    pub socket: BorrowedFd<'a>,
    /// Its standard error; `/dev/null` without.
    pub errors: Option<BorrowedFd<'a>>,
}

/// A program to execute.
#[derive(Clone, Copy, Debug)]
pub enum Program<'a> {
    /// The file at the path.
    Path(&'a Path),
    /// An open file, whatever is at its path now. Its number must be above that of the socket.
    Open {
        /// The name that the process gets, and errors have.
        path: &'a Path,
        /// The file.
        file: BorrowedFd<'a>,
    },
}

impl Program<'_> {
    /// Where it is, or was when it was opened.
    pub fn path(&self) -> &Path {
        match self {
            Self::Path(path) | Self::Open { path, .. } => path,
        }
    }
}

/// Launches processes and finds them again.
#[derive(Debug)]
pub struct Launcher {
    boot_id: Arc<str>,
    open_files: Option<u64>,
    common: Arc<Reaper>,
    deadline: Deadline,
}

impl Launcher {
    /// `open_files` is the soft limit that launched processes get, for a daemon that has raised its
    /// own; containers inherit it from their shim. Without, they get the daemon's.
    ///
    /// # Errors
    /// The boot id cannot be read.
    pub fn new(open_files: Option<u64>) -> Result<Self, StepError> {
        Ok(Self {
            boot_id: identity::boot_id()?,
            open_files,
            common: Reaper::new(None)?,
            deadline: Deadline::new(None),
        })
    }

    /// Launches a process in a session of its own: no other descriptor, standard input and output
    /// on `/dev/null`, signals as after boot. It has been executed when this returns; a kill of the
    /// daemon leaves either no process or an executed one. Blocks; the cost grows with the daemon's
    /// descriptors, not with its memory.
    ///
    /// # Errors
    /// The failed step; nothing is left of the process then.
    pub fn launch(&self, launch: &Launch<'_>) -> Result<Arc<dyn Process>, StepError> {
        self.common.sweep();
        let null = OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/null")
            .step_at("open", "/dev/null")?;
        let program = string(launch.program.path().as_os_str().to_owned())?;
        let mut arguments = vec![program.clone()];
        for argument in launch.arguments {
            arguments.push(string(argument.clone())?);
        }
        let environment =
            launch.environment.iter().cloned().map(string).collect::<Result<Vec<_>, _>>()?;
        let directory = string(launch.directory.as_os_str().to_owned())?;
        let work = SpawnWork {
            report: ChildReport::default(),
            program: &program,
            file: match launch.program {
                Program::Path(_) => None,
                Program::Open { file, .. } => Some(file),
            },
            arguments: sys::pointers(&arguments),
            environment: sys::pointers(&environment),
            directory: &directory,
            socket: launch.socket,
            null: null.as_fd(),
            errors: launch.errors.unwrap_or(null.as_fd()),
            open_files: self.open_files,
            core_domain: launch.core_domain,
        };
        let how =
            sys::Clone { flags: sys::CLONE_CLEAR_SIGHAND, cgroup: None, born: None, stack: None };
        let Cloned { pid, pidfd, late } =
            self.deadline.clone_child(how, &work, child).step("clone process")?;
        let errno = work.report.errno();
        if errno.is_some() || late {
            // It has ended itself, or is killed.
            sys::reap(pidfd.as_fd(), true).step("reap process")?;
            let (what, path) = match STEPS.get(work.report.step()) {
                Some(&EXECUTE) | None => (EXECUTE, launch.program.path()),
                Some(what) => (*what, launch.directory),
            };
            let e = errno.map_or_else(|| self.deadline.error(), io::Error::from);
            return Err(StepError::at(what, path, e));
        }
        match identity::read_identity(pid.unsigned_abs(), &self.boot_id) {
            Ok(identity) => {
                Ok(Arc::new(PidfdProcess::new(pidfd, identity, Arc::clone(&self.common))))
            }
            Err(e) => {
                let _ = sys::kill(pidfd.as_fd());
                sys::reap(pidfd.as_fd(), true).step("reap process")?;
                Err(e)
            }
        }
    }

    /// Finds a recorded process again.
    pub fn adopt(&self, identity: &Identity) -> Adoption {
        self.common.sweep();
        pidfd::adopt(identity, &self.boot_id, &self.common)
    }

    /// The process that has a pid now; `None`: no process.
    ///
    /// # Errors
    /// Its files in `/proc` cannot be read.
    pub fn open(&self, pid: u32) -> Result<Option<Arc<dyn Process>>, StepError> {
        match identity::read_identity(pid, &self.boot_id) {
            Ok(identity) => match self.adopt(&identity) {
                Adoption::Alive(process) => Ok(Some(Arc::from(process))),
                Adoption::Dead(_) => Ok(None),
                Adoption::Unknown(e) => Err(e),
            },
            Err(e) if identity::gone(e.io()) => match c_int::try_from(pid).map(sys::pidfd_open) {
                // Hidden from the daemon (proc(5) hidepid), but there. One whose first thread has
                // ended has a directory still.
                Ok(Ok(pidfd))
                    if !sys::ended(pidfd.as_fd())
                        && !Path::new(&format!("/proc/{pid}")).exists() =>
                {
                    Err(e)
                }
                _ => Ok(None),
            },
            Err(e) => Err(e),
        }
    }

    /// Finds the process that works in `directory` and was launched with these arguments, whatever
    /// became of its record.
    ///
    /// # Errors
    /// `/proc` cannot be read, or the directory cannot be looked at.
    pub fn find_process(
        &self,
        directory: &Path,
        arguments: &[OsString],
    ) -> Result<Option<Arc<dyn Process>>, StepError> {
        let mut expected: Vec<u8> = Vec::new();
        for argument in arguments {
            expected.extend(argument.as_bytes());
            expected.push(0);
        }
        let about = match std::fs::metadata(directory) {
            // In what is not there nothing works.
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other.step_at("stat", directory)?,
        };
        let (name, place) = (directory.file_name(), (about.dev(), about.ino()));
        // Any process that may enter the directory can have these arguments.
        let is_own = |pid| held::is_own_users(pid).unwrap_or(false);
        let wanted =
            |pid| works_in(pid, name, place) && has_arguments(pid, &expected) && is_own(pid);
        for pid in pids()?.into_iter().filter(|pid| wanted(*pid)) {
            // Looked at again when the process is held: it may be another by now.
            if let Some(found) = self.open(pid)?.filter(|_| wanted(pid)) {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// Wakes `waker` if a connection waits at a listening socket, and for each new connection,
    /// until the answer is dropped. To be called on the runtime.
    ///
    /// # Errors
    /// The socket cannot be watched.
    pub fn watch_listener(&self, listener: Arc<OwnedFd>, waker: Waker) -> io::Result<Watched> {
        self.common.watch.readable(listener, waker)
    }
}

/// Gives the program of a command the soft limit of open files that the daemon was started with,
/// where it has raised its own: containers inherit it from whatever starts them.
pub fn limit_open_files(command: &mut Command, soft: Option<u64>) {
    if let Some(soft) = soft {
        sys::limit_open_files_of(command, soft);
    }
}

/// Whether the process works in the directory that has this name and this device and inode: its
/// path may lead through links. A process that has ended meanwhile does not.
fn works_in(pid: u32, name: Option<&OsStr>, place: (u64, u64)) -> bool {
    let link = format!("/proc/{pid}/cwd");
    // The name first: that asks no file system of another user.
    std::fs::read_link(&link).is_ok_and(|cwd| cwd.file_name() == name)
        && CString::new(link).is_ok_and(|link| identity::device_and_inode(&link) == Ok(place))
}

/// Whether the process has these arguments behind its name. Reads the process's memory, so it is
/// for one that is known already.
fn has_arguments(pid: u32, expected: &[u8]) -> bool {
    const LONGEST_NAME: u64 = libc::PATH_MAX as u64;
    let mut line = Vec::new();
    let read = File::open(format!("/proc/{pid}/cmdline")).and_then(|file| {
        file.take(LONGEST_NAME + expected.len() as u64 + 1).read_to_end(&mut line)
    });
    let name = line.iter().position(|byte| *byte == 0).map_or(line.len(), |end| end + 1);
    read.is_ok() && line.get(name..) == Some(expected)
}

/// All processes of the node, as far as this one sees them.
///
/// # Errors
/// `/proc` cannot be read.
pub fn pids() -> Result<Vec<u32>, StepError> {
    let entries = std::fs::read_dir("/proc").step_at("read directory", "/proc")?;
    Ok(entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect())
}

fn string(text: OsString) -> Result<CString, StepError> {
    CString::new(text.into_vec()).step("prepare process")
}

/// The steps of the child.
const STEPS: [&str; 6] = [
    "prepare process",
    "hand over the socket",
    "enter working directory",
    "limit open files",
    "make core scheduling domain",
    EXECUTE,
];
const EXECUTE: &str = "execute";

/// All that the child works on; prepared by the parent, whose memory it shares (see
/// [`sys::clone_child`]).
struct SpawnWork<'a> {
    report: ChildReport,
    program: &'a CStr,
    /// The program, if it is open.
    file: Option<BorrowedFd<'a>>,
    arguments: sys::Pointers<'a>,
    environment: sys::Pointers<'a>,
    directory: &'a CStr,
    socket: BorrowedFd<'a>,
    null: BorrowedFd<'a>,
    errors: BorrowedFd<'a>,
    open_files: Option<u64>,
    core_domain: bool,
}

extern "C" fn child(work: &SpawnWork<'_>) -> ! {
    work.report.exit(become_program(work).and_then(|()| {
        let (arguments, environment) = (&work.arguments, &work.environment);
        Err(match work.file {
            Some(file) => sys::execute_open(file, arguments, environment),
            None => sys::execute_path(work.program, arguments, environment),
        })
    }))
}

fn become_program(work: &SpawnWork<'_>) -> Result<(), Errno> {
    rustix::process::setsid().map(drop)?;
    work.report.enter(1);
    // What is handed over has one of these numbers only in a daemon that was started without them.
    sys::duplicate_to(work.null, 0)?;
    sys::duplicate_to(work.null, 1)?;
    sys::duplicate_to(work.errors, 2)?;
    sys::duplicate_to(work.socket, SOCKET)?;
    // Not closed before: until the exec the daemon's lock of its directory is held here too, so
    // that the next daemon finds an executed process or none.
    sys::close_at_execute(4, work.file)?;
    work.report.enter(2);
    rustix::process::chdir(work.directory)?;
    work.report.enter(3);
    if let Some(soft) = work.open_files {
        sys::limit_open_files(soft)?;
    }
    work.report.enter(4);
    if work.core_domain {
        create_core_scheduling_cookie(getpid(), CoreSchedulingScope::ThreadGroup)?;
    }
    work.report.enter(5);
    sys::default_signals()
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    fn arguments(script: &str) -> Vec<OsString> {
        ["-c", script].map(OsString::from).to_vec()
    }

    fn launch(
        launcher: &Launcher,
        directory: &Path,
        program: &str,
        arguments: &[OsString],
    ) -> Result<Arc<dyn Process>, StepError> {
        let socket = UnixListener::bind(directory.join("s")).unwrap();
        launcher.launch(&Launch {
            program: Program::Path(Path::new(program)),
            arguments,
            environment: &["A=b".into()],
            core_domain: false,
            directory,
            socket: socket.as_fd(),
            errors: None,
        })
    }

    #[tokio::test]
    async fn has_its_socket_and_nothing_else_of_the_daemon() {
        let directory = tempfile::tempdir().unwrap();
        let launcher = Launcher::new(Some(77)).unwrap();
        // The shell blocks signals of its own while it starts a program, so its status is read
        // before and by itself.
        let script = "exec >out; while read -r line; do echo \"$line\"; done </proc/$$/status; \
                      ls -l /proc/$$/fd; cat /proc/$$/limits /proc/$$/environ; exit 3";
        let process = launch(&launcher, directory.path(), "/bin/sh", &arguments(script)).unwrap();
        assert_eq!(process.exited().await.status, 3);
        let out = String::from_utf8_lossy(&std::fs::read(directory.path().join("out")).unwrap())
            .into_owned();
        let links: Vec<&str> = out.lines().filter_map(|line| line.split(" -> ").nth(1)).collect();
        // The shell itself keeps a copy of what it redirects at 10 or above, if at all.
        assert!(links.iter().filter(|to| to.starts_with("socket:")).count() == 1, "{out}");
        assert!(
            links.iter().all(|to| ["/dev/null", "socket:"].iter().any(|p| to.starts_with(p))
                || to.ends_with("/out")),
            "{out}"
        );
        assert!(out.contains("SigBlk:\t0000000000000000") && out.contains("A=b"), "{out}");
        let ignored = out.lines().find_map(|line| line.strip_prefix("SigIgn:\t")).unwrap();
        let ignored = u64::from_str_radix(ignored, 16).unwrap();
        assert_eq!(ignored & (1 << (libc::SIGPIPE - 1)), 0, "{ignored:x}");
        let limit = out.lines().find(|line| line.starts_with("Max open files")).unwrap();
        assert_eq!(limit.split_whitespace().nth(3), Some("77"), "{limit}");
    }

    #[tokio::test]
    async fn has_nothing_else_of_the_daemon_where_the_kernel_cannot_close_at_the_exec() {
        for errno in [libc::EINVAL, libc::ENOSYS] {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().to_owned();
            // As every descriptor of a parent that does not mark its own.
            let inherited = std::fs::File::open("/etc/passwd").unwrap();
            nix::fcntl::fcntl(&inherited, nix::fcntl::F_SETFD(nix::fcntl::FdFlag::empty()))
                .unwrap();
            // The filter is the thread's and its children's.
            let launched = std::thread::spawn(move || {
                sys::filter::without_close_at_execute(errno);
                let script = "ls -l /proc/$$/fd >out; exit 3";
                launch(&Launcher::new(None).unwrap(), &path, "/bin/sh", &arguments(script))
            });
            let process = launched.join().unwrap().unwrap();
            assert_eq!(process.exited().await.status, 3);
            let out = std::fs::read_to_string(directory.path().join("out")).unwrap();
            assert!(out.contains("socket:") && !out.contains("passwd"), "{out}");
        }
    }

    #[test]
    fn a_command_has_the_limit_of_open_files_that_it_is_given() {
        let limit = |soft| {
            let mut command = Command::new("/bin/sh");
            limit_open_files(command.args(["-c", "ulimit -Sn; ulimit -Hn"]), soft);
            String::from_utf8(command.output().unwrap().stdout).unwrap()
        };
        let own = limit(None);
        let hard = own.lines().nth(1).unwrap();
        assert_eq!(limit(Some(77)), format!("77\n{hard}\n"));
        if hard != "unlimited" {
            assert_eq!(limit(Some(u64::MAX)), format!("{hard}\n{hard}\n"));
        }
    }

    #[tokio::test]
    async fn is_found_again_without_a_record_and_with_one() {
        let directory = tempfile::tempdir().unwrap();
        let launcher = Launcher::new(None).unwrap();
        // Others on this machine may sleep as long.
        let seconds: &[OsString] = &[format!("1000.{}", std::process::id()).into()];
        let process = launch(&launcher, directory.path(), "/bin/sleep", seconds).unwrap();
        let found = loop {
            // An executed program has its arguments an instant later.
            match launcher.find_process(directory.path(), seconds).unwrap() {
                Some(found) => break found,
                None => tokio::task::yield_now().await,
            }
        };
        assert_eq!(found.identity(), process.identity());
        assert!(launcher.find_process(directory.path(), &["100".into()]).unwrap().is_none());
        assert!(launcher.find_process(Path::new("/"), seconds).unwrap().is_none());
        assert!(matches!(launcher.adopt(process.identity()), Adoption::Alive(_)));
        found.kill().unwrap();
        assert_eq!(process.exited().await.status, 137);
        assert!(matches!(launcher.adopt(process.identity()), Adoption::Dead(_)));
        assert!(launcher.find_process(directory.path(), seconds).unwrap().is_none());
    }

    /// Looks from a mount namespace of its own, where `/proc` shows nothing.
    fn hidden<T: Send + 'static>(look: impl FnOnce() -> T + Send + 'static) -> T {
        use nix::mount::{MsFlags, mount};

        let thread = std::thread::spawn(move || {
            sys::unshare(libc::CLONE_NEWNS).unwrap();
            let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
            mount(None::<&str>, "/", None::<&str>, private, None::<&str>).unwrap();
            mount(Some("none"), "/proc", Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
            look()
        });
        thread.join().unwrap()
    }

    #[tokio::test]
    async fn one_that_is_hidden_is_not_taken_for_dead() {
        if kit::skip_without_root() {
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let launcher = Arc::new(Launcher::new(None).unwrap());
        let process = launch(&launcher, directory.path(), "/bin/sleep", &["1000".into()]).unwrap();
        let look = || {
            let (launcher, identity) = (Arc::clone(&launcher), process.identity().clone());
            hidden(move || (launcher.adopt(&identity), launcher.open(identity.pid)))
        };
        let (adopted, opened) = look();
        assert!(matches!(adopted, Adoption::Unknown(_)), "{adopted:?}");
        assert!(opened.unwrap_err().to_string().contains("/stat"));
        process.kill().unwrap();
        process.exited().await;
        let (adopted, opened) = look();
        assert!(matches!(adopted, Adoption::Dead(_)), "{adopted:?}");
        assert!(opened.unwrap().is_none());
    }

    #[tokio::test]
    async fn is_found_behind_a_link() {
        let directory = tempfile::tempdir().unwrap();
        let (real, link) = (directory.path().join("real"), directory.path().join("link"));
        std::fs::create_dir_all(real.join("same")).unwrap();
        std::fs::create_dir_all(directory.path().join("other/same")).unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        let launcher = Launcher::new(None).unwrap();
        let process =
            launch(&launcher, &link.join("same"), "/bin/sleep", &["1001".into()]).unwrap();
        let find = |at: &Path| launcher.find_process(&at.join("same"), &["1001".into()]).unwrap();
        while find(&real).is_none() {
            tokio::task::yield_now().await;
        }
        assert_eq!(find(&link).unwrap().identity(), process.identity());
        assert!(find(&directory.path().join("other")).is_none(), "the name is not all");
        assert!(find(&directory.path().join("none")).is_none());
        process.kill().unwrap();
        process.exited().await;
    }

    fn core_cookie(pid: u32) -> u64 {
        let pid = rustix::process::Pid::from_raw(pid.cast_signed()).unwrap();
        rustix::thread::core_scheduling_cookie(pid, CoreSchedulingScope::Thread).unwrap()
    }

    /// Or none is launched, where the kernel has no such domains.
    #[tokio::test]
    async fn has_a_core_scheduling_domain_if_asked() {
        let directory = tempfile::tempdir().unwrap();
        let socket = UnixListener::bind(directory.path().join("s")).unwrap();
        let launched = Launcher::new(None).unwrap().launch(&Launch {
            program: Program::Path(Path::new("/bin/sleep")),
            arguments: &["1000".into()],
            environment: &[],
            core_domain: true,
            directory: directory.path(),
            socket: socket.as_fd(),
            errors: None,
        });
        // What the kernel says to another process.
        let script = "import ctypes; c = ctypes.CDLL(None, use_errno=True); \
                      print(0 if c.prctl(62, 1, 0, 1, 0) == 0 else ctypes.get_errno())";
        let said = Command::new("python3").args(["-c", script]).output().unwrap();
        let errno: i32 = String::from_utf8(said.stdout).unwrap().trim().parse().unwrap();
        match launched {
            Ok(process) => {
                let cookie = core_cookie(process.identity().pid);
                process.kill().unwrap();
                assert_eq!(errno, 0);
                assert!(cookie != 0 && cookie != core_cookie(std::process::id()), "{cookie}");
            }
            Err(step) => {
                let error = io::Error::from_raw_os_error(errno);
                let expected =
                    format!("make core scheduling domain {}: {error}", directory.path().display());
                assert_eq!(step.to_string(), expected);
            }
        }
    }

    /// On each kernel: a filter answers the one call that makes a domain for the child, and no
    /// other.
    #[tokio::test]
    async fn asks_for_a_core_scheduling_domain_for_itself() {
        let launched = |errno, core_domain| {
            let launch = move || {
                let directory = tempfile::tempdir().unwrap();
                let socket = UnixListener::bind(directory.path().join("s")).unwrap();
                sys::filter::with_core_domains(std::process::id(), errno);
                Launcher::new(None).unwrap().launch(&Launch {
                    program: Program::Path(Path::new("/bin/true")),
                    arguments: &[],
                    environment: &[],
                    core_domain,
                    directory: directory.path(),
                    socket: socket.as_fd(),
                    errors: None,
                })
            };
            // The filter is the thread's and its children's.
            std::thread::spawn(launch).join().unwrap()
        };
        assert_eq!(launched(0, true).unwrap().exited().await.status, 0);
        let refused = launched(libc::EDOM, true).unwrap_err().to_string();
        let reason = io::Error::from_raw_os_error(libc::EDOM).to_string();
        assert!(refused.starts_with("make core scheduling domain"), "{refused}");
        assert!(refused.ends_with(&reason), "{refused}");
        assert_eq!(launched(libc::EDOM, false).unwrap().exited().await.status, 0);
    }

    #[tokio::test]
    async fn a_program_that_is_not_there_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let launcher = Launcher::new(None).unwrap();
        let error =
            launch(&launcher, directory.path(), "/no/such/shim", &[]).unwrap_err().to_string();
        assert_eq!(error, "execute /no/such/shim: No such file or directory (os error 2)");
    }
}
