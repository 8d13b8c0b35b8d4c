//! The mark of a helper that mounts, and of all that it starts: a variable of the environment. By
//! it the programs of a mount are found that are no children of the helper any more.

use std::os::fd::OwnedFd;
use std::path::Path;

use process_identity::device_and_inode;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::exits;

/// Its value is containerd's namespace and the container's id.
const VARIABLE: &str = "PAUSE_SANDBOXER_MOUNTS_FOR";

/// The mark of a container, as an entry of an environment.
pub fn entry(namespace: &str, id: &str) -> String {
    format!("{VARIABLE}={namespace}/{id}")
}

/// Whether a process has this mark. False for each process in another mount
/// namespace, such as those of containers: they choose their environment, and can make its reader
/// wait. May block: on a process of the node that hangs in the kernel.
pub fn is_on(pid: i32, entry: &str) -> bool {
    let namespace = |process: &str| device_and_inode(Path::new(&format!("/proc/{process}/ns/mnt")));
    let pid = pid.to_string();
    let is_here = namespace(&pid).is_ok_and(|its| namespace("self").is_ok_and(|own| its == own));
    is_here && {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|word| word == entry.as_bytes())
    }
}

/// The pidfds of all processes with this mark, except this process. May block.
pub fn marked(entry: &str) -> Vec<OwnedFd> {
    let own = rustix::process::getpid();
    let pids = exits::pids().filter_map(Pid::from_raw).filter(|pid| *pid != own);
    let marked = pids.filter_map(|pid| {
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).ok()?;
        // With the pidfd open, because the pid may have been reused before.
        is_on(pid.as_raw_nonzero().get(), entry).then_some(pidfd)
    });
    marked.collect()
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};
    use std::time::{Duration, Instant};

    use super::*;

    /// A process with a mark, once its program has the environment.
    fn process(program: &[&str], id: &str) -> Child {
        let mut process = Command::new(program[0]);
        process.args(&program[1..]).env(VARIABLE, format!("test/{id}")).current_dir("/");
        let process = process.spawn().unwrap();
        let read = |name: &str| std::fs::read(format!("/proc/{}/{name}", process.id())).unwrap();
        let value = format!("test/{id}");
        // It has its name before its environment.
        let is_there = || {
            let environment = read("environ");
            let mut parts = environment.windows(value.len());
            read("comm") == b"sleep\n" && parts.any(|part| part == value.as_bytes())
        };
        let end = Instant::now() + Duration::from_secs(30);
        while !is_there() {
            assert!(Instant::now() < end, "the program of the process");
        }
        process
    }

    #[test]
    fn a_process_is_found_by_the_mark_of_its_container() {
        let id = format!("mark-{}", std::process::id());
        let mut process = process(&["sleep", "100"], &id);
        let pid = i32::try_from(process.id()).unwrap();
        let own = entry("test", &id);
        assert!(is_on(pid, &own) && marked(&own).len() == 1);
        for other in [entry("test", "mark"), entry("other", &id)] {
            assert!(!is_on(pid, &other) && marked(&other).is_empty());
        }
        process.kill().unwrap();
        process.wait().unwrap();
        assert!(marked(&own).is_empty());
    }

    #[test]
    fn a_process_of_a_container_has_no_mark() {
        if !rustix::process::geteuid().is_root() {
            kit::skip("needs root for a mount namespace");
            return;
        }
        let id = format!("inside-{}", std::process::id());
        let mut process = process(&["unshare", "--mount", "sleep", "100"], &id);
        let pid = i32::try_from(process.id()).unwrap();
        assert!(!is_on(pid, &entry("test", &id)) && marked(&entry("test", &id)).is_empty());
        process.kill().unwrap();
        process.wait().unwrap();
    }
}
