//! Follows every thread and child of a daemon and kills the daemon at a chosen system call.
//!
//! `strace` can kill at the n-th call of one thread; the daemon's work wanders between threads, so
//! the calls are counted here, over all of them. A call is counted when it is entered, before the
//! kernel does anything for it. A child that is on its way to become a pause or a shim is followed
//! until it is executed; it continues when the daemon is killed at one of its calls, as it would
//! without a tracer.

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Seek, SeekFrom};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use nix::errno::Errno;
use nix::sys::ptrace;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

/// How often is looked for news when there were none.
const PACE: Duration = Duration::from_micros(50);
/// The message of a stop at the entry of a call (`PTRACE_EVENTMSG_SYSCALL_ENTRY`, Linux 5.3).
const ENTRY: libc::c_long = 1;

/// The observed calls.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// The calls that change the system, in their order; the last is the one at which the daemon
    /// was killed.
    pub(crate) calls: Vec<String>,
    /// The daemon was killed.
    pub(crate) killed: bool,
}

/// A daemon under observation.
#[derive(Debug)]
pub(crate) struct Tracer {
    thread: JoinHandle<Result<Seen>>,
    end: Arc<AtomicBool>,
}

impl Tracer {
    /// Follows `daemon` from now on and kills it at its `nth` call (from 1) that changes the
    /// system; 0: never. The daemon must not be waited for as a child until [`Tracer::finish`].
    pub(crate) fn attach(daemon: u32, nth: usize) -> Result<Self> {
        let end = Arc::new(AtomicBool::new(false));
        let (ready, attached) = mpsc::channel();
        let stop = Arc::clone(&end);
        let thread = thread::spawn(move || {
            // The system lets only the thread that attached continue it. When it ends, all is let
            // go.
            let seized = seize_all(daemon);
            let failed = seized.is_err();
            let _ = ready.send(seized);
            if failed { Ok(Seen::default()) } else { follow(daemon, nth, &stop) }
        });
        attached.recv().map_err(|_| anyhow!("the tracer has ended"))??;
        Ok(Self { thread, end })
    }

    /// Whether it has nothing to follow any more: the daemon was killed, or has ended.
    #[allow(dead_code, reason = "not every suite that follows a daemon asks")]
    pub(crate) fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }

    /// Lets the daemon, or what it has left, go.
    pub(crate) fn finish(self) -> Result<Seen> {
        self.end.store(true, Ordering::Release);
        self.thread.join().map_err(|_| anyhow!("the tracer has panicked"))?
    }
}

/// Seizes all threads, those included that begin meanwhile.
fn seize_all(daemon: u32) -> Result<()> {
    use ptrace::Options;
    let options = Options::PTRACE_O_TRACESYSGOOD
        | Options::PTRACE_O_TRACECLONE
        | Options::PTRACE_O_TRACEFORK
        | Options::PTRACE_O_TRACEVFORK
        | Options::PTRACE_O_TRACEEXEC;
    let mut seized = BTreeSet::new();
    loop {
        let before = seized.len();
        for entry in
            fs::read_dir(format!("/proc/{daemon}/task")).context("list the daemon's threads")?
        {
            let Some(tid) = entry?.file_name().to_str().and_then(|name| name.parse::<i32>().ok())
            else {
                continue;
            };
            if seized.contains(&tid) {
                continue;
            }
            match ptrace::seize(Pid::from_raw(tid), options) {
                Ok(()) => ptrace::interrupt(Pid::from_raw(tid)).context("interrupt a thread")?,
                // Ended, or seized already with the thread that made it.
                Err(Errno::ESRCH | Errno::EPERM) => {}
                Err(e) => return Err(e).context("seize a thread"),
            }
            seized.insert(tid);
        }
        if seized.len() == before {
            return Ok(());
        }
    }
}

fn follow(daemon: u32, nth: usize, stop: &AtomicBool) -> Result<Seen> {
    let mut seen = Seen::default();
    let flags = WaitPidFlag::__WALL | WaitPidFlag::__WNOTHREAD | WaitPidFlag::WNOHANG;
    loop {
        let (tid, signal) = match waitpid(None, Some(flags)) {
            Ok(WaitStatus::StillAlive) if stop.load(Ordering::Acquire) => return Ok(seen),
            Ok(WaitStatus::StillAlive) => {
                thread::sleep(PACE);
                continue;
            }
            Ok(WaitStatus::PtraceSyscall(tid)) => {
                let entry = ptrace::getevent(tid) == Ok(ENTRY);
                if let Some(call) = entry.then(|| change(tid)).flatten() {
                    let child = if tgid(tid) == Some(daemon) { "" } else { "child: " };
                    seen.calls.push(format!("{child}{call}"));
                    if seen.calls.len() == nth {
                        kill(Pid::from_raw(daemon.cast_signed()), Signal::SIGKILL)?;
                        seen.killed = true;
                        return Ok(seen);
                    }
                }
                (tid, None)
            }
            Ok(WaitStatus::PtraceEvent(tid, _, libc::PTRACE_EVENT_EXEC)) => {
                match ptrace::detach(tid, None) {
                    Ok(()) | Err(Errno::ESRCH) => continue,
                    Err(e) => return Err(e).context("let an executed child go"),
                }
            }
            Ok(WaitStatus::PtraceEvent(tid, _, _)) => (tid, None),
            Ok(WaitStatus::Stopped(tid, signal)) => (tid, Some(signal)),
            Ok(_) => continue,
            Err(Errno::ECHILD) => return Ok(seen),
            Err(e) => return Err(e).context("wait for the daemon's threads"),
        };
        match ptrace::syscall(tid, signal) {
            // It was killed meanwhile.
            Ok(()) | Err(Errno::ESRCH) => {}
            Err(e) => return Err(e).context("let a thread continue"),
        }
    }
}

fn tgid(tid: Pid) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{tid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("Tgid:"))?.trim().parse().ok()
}

/// A call that a thread is about to make.
struct Call {
    tid: Pid,
    number: i64,
    arguments: [u64; 6],
}

impl Call {
    /// From the registers: User-mode Linux has no `/proc/TID/syscall`.
    #[cfg(target_arch = "x86_64")]
    fn of(tid: Pid) -> Option<Self> {
        let registers = ptrace::getregs(tid).ok()?;
        let libc::user_regs_struct { rdi, rsi, rdx, r10, r8, r9, orig_rax, .. } = registers;
        let arguments = [rdi, rsi, rdx, r10, r8, r9];
        Some(Self { tid, number: orig_rax.cast_signed(), arguments })
    }

    /// From `/proc/TID/syscall`: the number, the arguments, stack pointer and program counter.
    #[cfg(not(target_arch = "x86_64"))]
    fn of(tid: Pid) -> Option<Self> {
        let text = fs::read_to_string(format!("/proc/{tid}/syscall")).ok()?;
        let mut words = text.split_whitespace();
        let number = words.next()?.parse().ok()?;
        let mut arguments = [0; 6];
        for (argument, word) in arguments.iter_mut().zip(words) {
            *argument = u64::from_str_radix(word.trim_start_matches("0x"), 16).ok()?;
        }
        Some(Self { tid, number, arguments })
    }

    fn memory(&self, at: u64, length: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        let read = fs::File::open(format!("/proc/{}/mem", self.tid)).and_then(|mut memory| {
            memory.seek(SeekFrom::Start(at))?;
            memory.take(length as u64).read_to_end(&mut bytes)
        });
        // A string may end before the memory that follows it.
        let _ = read;
        bytes
    }

    /// The string that an argument points to.
    fn text(&self, argument: usize) -> String {
        let bytes = self.memory(self.arguments[argument], 256);
        let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
        String::from_utf8_lossy(&bytes[..end]).into_owned()
    }

    /// The target of a descriptor.
    fn file(&self, argument: usize) -> String {
        let link = format!("/proc/{}/fd/{}", self.tid, self.arguments[argument].cast_signed());
        fs::read_link(link).map(|path| path.to_string_lossy().into_owned()).unwrap_or_default()
    }

    /// Flags of clone(2) or clone3(2).
    fn clone_flags(&self) -> u64 {
        if self.number == libc::SYS_clone {
            return self.arguments[0];
        }
        self.memory(self.arguments[0], 8).try_into().map(u64::from_ne_bytes).unwrap_or_default()
    }
}

/// Describes the call that a thread is about to make, if it changes the system: files, mounts,
/// cgroups, namespaces, processes.
fn change(tid: Pid) -> Option<String> {
    let call = Call::of(tid)?;
    let name = |name: &str, argument: usize| Some(format!("{name} {}", call.text(argument)));
    match call.number {
        libc::SYS_mkdirat => name("mkdirat", 1),
        libc::SYS_unlinkat => name("unlinkat", 1),
        libc::SYS_renameat | libc::SYS_renameat2 => name("renameat", 3),
        libc::SYS_mount => name("mount", 1),
        libc::SYS_move_mount => name("move_mount", 3),
        libc::SYS_umount2 => name("umount2", 0),
        libc::SYS_openat if call.arguments[2] & (libc::O_CREAT | libc::O_TRUNC) as u64 != 0 => {
            name("openat", 1)
        }
        libc::SYS_write => {
            let file = call.file(0);
            (file.starts_with('/') && !file.ends_with("/log")).then(|| format!("write {file}"))
        }
        libc::SYS_clone | libc::SYS_clone3
            if call.clone_flags() & libc::CLONE_THREAD as u64 == 0 =>
        {
            Some("clone".to_owned())
        }
        libc::SYS_setns => Some(format!("setns {}", call.file(0))),
        libc::SYS_sethostname => Some("sethostname".to_owned()),
        libc::SYS_setsid => Some("setsid".to_owned()),
        libc::SYS_setresuid => Some("setresuid".to_owned()),
        libc::SYS_execveat => Some("execveat".to_owned()),
        libc::SYS_execve => name("execve", 0),
        libc::SYS_bind => Some("bind".to_owned()),
        libc::SYS_mknodat => name("mknodat", 1),
        libc::SYS_pidfd_send_signal => Some("pidfd_send_signal".to_owned()),
        libc::SYS_waitid => Some("waitid".to_owned()),
        number => older(&call, number),
    }
}

/// Calls that newer architectures do without.
#[cfg(target_arch = "x86_64")]
fn older(call: &Call, number: i64) -> Option<String> {
    let name = |name: &str, argument: usize| Some(format!("{name} {}", call.text(argument)));
    match number {
        libc::SYS_mkdir => name("mkdir", 0),
        libc::SYS_rmdir => name("rmdir", 0),
        libc::SYS_unlink => name("unlink", 0),
        libc::SYS_rename => name("rename", 1),
        libc::SYS_mknod => name("mknod", 0),
        _ => None,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn older(_: &Call, _: i64) -> Option<String> {
    None
}
