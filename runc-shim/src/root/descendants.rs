//! The processes that descend from a command of the runtime. They are found before the command is
//! killed: after its exit they are children of this process, as are the orphans of containers.

use std::os::fd::OwnedFd;

use process_identity::has_ended;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::exits::{self, stat};
use crate::sys;

/// Maximum number of searches. Each one finds processes that were started before their parent was
/// stopped.
const MAX_SEARCHES: usize = 16;

/// A process, held by its pidfd.
#[derive(Debug)]
struct Process {
    pid: i32,
    pidfd: OwnedFd,
}

/// Stops a child that was not reaped yet, and all processes that descend from it, so that they
/// start no others. Returns the pidfds of the descendants.
fn stop(child: i32) -> Vec<OwnedFd> {
    // Not reaped yet, so the pid cannot have been reused.
    let _ = sys::kill(child, libc::SIGSTOP);
    let mut found: Vec<Process> = Vec::new();
    for _ in 0..MAX_SEARCHES {
        let before = found.len();
        for (pid, parent) in exits::pids().filter_map(|pid| Some((pid, parent(pid)?))) {
            if found.iter().all(|known| known.pid != pid)
                && let Some(process) = descendant(pid, parent, child, &found)
            {
                let _ = pidfd_send_signal(&process.pidfd, Signal::STOP);
                found.push(process);
            }
        }
        if found.len() == before {
            break;
        }
    }
    found.into_iter().map(|process| process.pidfd).collect()
}

/// The process with this pid, if its parent is `root`, whose pid cannot be reused, or one of
/// `found`.
fn descendant(pid: i32, parent_pid: i32, root: i32, found: &[Process]) -> Option<Process> {
    let holder = found.iter().find(|known| known.pid == parent_pid);
    if parent_pid != root && holder.is_none() {
        return None;
    }
    let pidfd = pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?;
    // Compared with the pidfd open, because the pid may have been reused; so may that of a parent
    // that has exited.
    let is_that = parent(pid) == Some(parent_pid) && !has_ended(&pidfd);
    let has_parent = holder.is_none_or(|holder| !has_ended(&holder.pidfd));
    (is_that && has_parent).then_some(Process { pid, pidfd })
}

/// The parent of a process; `None`: no such process.
fn parent(pid: i32) -> Option<i32> {
    i32::try_from(stat(pid)?.parent).ok()
}

/// Kills a child that was not reaped yet, and the processes that descend from it.
pub fn kill(child: i32) {
    let rest = stop(child);
    // The child is not reaped yet, so its pid cannot have been reused.
    let _ = sys::kill(child, libc::SIGKILL);
    for process in rest {
        // Fails if the process has exited by itself.
        let _ = pidfd_send_signal(&process, Signal::KILL);
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn all_descendants_are_found_and_no_others() {
        let mut other = Command::new("sleep").arg("100").spawn().unwrap();
        let script = "sleep 100 & sh -c 'sleep 100 & wait' & wait";
        let mut child = Command::new("sh").args(["-c", script]).spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let mut found = Vec::new();
        // The shells start their programs meanwhile.
        for _ in 0..500 {
            found = stop(pid);
            if found.len() == 3 {
                break;
            }
            for process in &found {
                let _ = pidfd_send_signal(process, Signal::CONT);
            }
            sys::kill(pid, libc::SIGCONT).unwrap();
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        assert_eq!(found.len(), 3);
        child.kill().unwrap();
        for process in &found {
            pidfd_send_signal(process, Signal::KILL).unwrap();
        }
        child.wait().unwrap();
        assert_eq!(other.try_wait().unwrap(), None);
        other.kill().unwrap();
        other.wait().unwrap();
    }
}
