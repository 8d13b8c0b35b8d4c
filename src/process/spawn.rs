//! Processes of the node other than pause processes, shims, that outlive the daemon: launched with
//! nothing of the daemon's but one socket, and found again by what names them.

use std::ffi::{CStr, CString, OsString, c_int};
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::deadline::{Cloned, Deadline};
use process_identity::{device_and_inode, has_ended, is_no_such_process, works_in};
use rustix::process::getpid;
use rustix::thread::{CoreSchedulingScope, create_core_scheduling_cookie};

use super::inheritance::Inheritance;
use super::pidfd::{self, PidfdProcess, Reaper};
use super::report::ChildReport;
use super::{Adoption, Identity, Process, handle, identity};
use crate::error::{IoContext, StepError};
use crate::sys::{self, Errno};

/// Number of the first descriptor behind the standard ones, where a program expects a socket that
/// it is handed.
const SOCKET: i32 = 3;

/// How long [`Launcher::find_process`] waits for processes in the middle of execve(2), which have
/// no arguments.
const EXEC_TIMEOUT: Duration = Duration::from_secs(2);

/// Delay between two of its searches.
const EXEC_RETRY_DELAY: Duration = Duration::from_millis(5);

/// A process to launch.
#[derive(Debug)]
pub struct Launch<'a> {
    /// The program.
    pub program: Program<'a>,
    /// Its arguments, without its name.
    pub arguments: &'a [OsString],
    /// Its environment, `NAME=value`; nothing is added.
    pub environment: &'a [OsString],
    /// Its limits and umask.
    pub inheritance: &'a Inheritance,
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
    common: Arc<Reaper>,
    deadline: Deadline,
}

impl Launcher {
    /// A launcher without processes.
    ///
    /// # Errors
    /// The boot id cannot be read.
    pub fn new() -> Result<Self, StepError> {
        Ok(Self {
            boot_id: identity::boot_id()?,
            common: Reaper::new(None),
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
            limits: launch.inheritance.limits.by_resource(),
            umask: launch.inheritance.umask,
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
            Err(e) if is_no_such_process(e.io()) => match c_int::try_from(pid).map(sys::pidfd_open)
            {
                // Hidden from the daemon (proc(5) hidepid), but there. One whose first thread has
                // ended has a directory still.
                Ok(Ok(pidfd))
                    if !has_ended(&pidfd) && !Path::new(&format!("/proc/{pid}")).exists() =>
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
        let place = match device_and_inode(directory) {
            // No process works in a missing directory.
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other.step_at("stat", directory)?,
        };
        // Any process that may enter the directory can have these arguments.
        let is_own = |pid| handle::is_own_users(pid).unwrap_or(false);
        let seen = |pid| {
            let is_candidate = works_in(pid, directory, place) && is_own(pid);
            is_candidate.then(|| arguments_of(pid, expected.len()))
        };
        let until = Instant::now() + EXEC_TIMEOUT;
        loop {
            let mut executes = false;
            for pid in pids()? {
                match seen(pid) {
                    Some(seen) if seen.as_deref() == Some(&*expected) => {}
                    other => {
                        executes |= other == Some(None);
                        continue;
                    }
                }
                // Checked again after the pidfd is open: the pid may have been reused before.
                let found = self.open(pid)?;
                if found.is_some() && seen(pid).flatten().as_deref() == Some(&*expected) {
                    return Ok(found);
                }
            }
            if !executes || Instant::now() > until {
                return Ok(None);
            }
            std::thread::sleep(EXEC_RETRY_DELAY);
        }
    }
}

/// The arguments of a process behind its name, as far as they matter for a comparison with some
/// that are `longest` bytes long. `None`: it has no name either, as in the middle of execve(2).
/// Reads the process's memory, so it is for one that is known already.
fn arguments_of(pid: u32, longest: usize) -> Option<Vec<u8>> {
    const LONGEST_NAME: u64 = libc::PATH_MAX as u64;
    let mut line = Vec::new();
    let read = File::open(format!("/proc/{pid}/cmdline"))
        .and_then(|file| file.take(LONGEST_NAME + longest as u64 + 1).read_to_end(&mut line));
    if read.is_ok() && line.is_empty() {
        return None;
    }
    let name = line.iter().position(|byte| *byte == 0).map_or(line.len(), |end| end + 1);
    Some(line.split_off(name))
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
    "set resource limits",
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
    limits: sys::Limits,
    umask: u32,
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
    // The descriptors that are handed over have one of these numbers only in a daemon that was
    // started without them.
    sys::duplicate_to(work.null, 0)?;
    sys::duplicate_to(work.null, 1)?;
    sys::duplicate_to(work.errors, 2)?;
    sys::duplicate_to(work.socket, SOCKET)?;
    // They are not closed before: until the exec the daemon's lock of its directory is held here
    // too, so that the next daemon finds an executed process or none.
    sys::close_at_execute(4, work.file)?;
    work.report.enter(2);
    rustix::process::chdir(work.directory)?;
    work.report.enter(3);
    sys::inherit(&work.limits, work.umask)?;
    work.report.enter(4);
    if work.core_domain {
        create_core_scheduling_cookie(getpid(), CoreSchedulingScope::ThreadGroup)?;
    }
    work.report.enter(5);
    sys::default_signals()
}

#[cfg(test)]
mod tests;
