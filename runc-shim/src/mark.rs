//! The mark of a helper that mounts, and of all that it starts: a variable of the environment. By
//! it the programs of a mount are found that are no children of the helper any more.

use std::os::fd::OwnedFd;
use std::path::Path;

use process_identity::device_and_inode;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// Its value is the container's id.
const VARIABLE: &str = "PAUSE_SANDBOXER_MOUNTS_FOR";

/// The mark, as an entry of an environment.
pub fn entry(id: &str) -> String {
    format!("{VARIABLE}={id}")
}

/// Whether a process has the mark of a container. False for each process in another mount
/// namespace, such as those of containers: they choose their environment, and can make its reader
/// wait.
pub fn is_on(pid: i32, id: &str) -> bool {
    let namespace = |process: &str| device_and_inode(Path::new(&format!("/proc/{process}/ns/mnt")));
    let pid = pid.to_string();
    let is_here = namespace(&pid).is_ok_and(|of| namespace("self").is_ok_and(|own| of == own));
    is_here && {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let entry = entry(id);
        environment.split(|byte| *byte == 0).any(|word| word == entry.as_bytes())
    }
}

/// The pidfds of all processes with the mark of a container, except this process. May block: on a
/// process of the node that hangs in the kernel.
pub fn marked(id: &str) -> Vec<OwnedFd> {
    let own = rustix::process::getpid();
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let pids = pids.filter_map(Pid::from_raw).filter(|pid| *pid != own);
    let marked = pids.filter_map(|pid| {
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).ok()?;
        // With the pidfd open, because the pid may have been reused before.
        is_on(pid.as_raw_nonzero().get(), id).then_some(pidfd)
    });
    marked.collect()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_process_is_found_by_the_mark_of_its_container() {
        let id = format!("mark-{}", std::process::id());
        let mut process = Command::new("sleep");
        let mut process = process.arg("100").env(VARIABLE, &id).current_dir("/").spawn().unwrap();
        let pid = i32::try_from(process.id()).unwrap();
        // The environment is there once the program is executed.
        while !is_on(pid, &id) {
            assert_eq!(process.try_wait().unwrap(), None);
        }
        assert_eq!(marked(&id).len(), 1);
        assert!(!is_on(pid, &id[1..]) && marked("other").is_empty());
        process.kill().unwrap();
        process.wait().unwrap();
        assert!(marked(&id).is_empty());
    }
}
