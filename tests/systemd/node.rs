//! The tests' queries of the node.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// The node's systemd is one: the tests go one by one.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static NODE: Mutex<()> = Mutex::new(());
    NODE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs a program that must succeed; its output.
pub(crate) fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {text}");
    text.trim().to_owned()
}

/// A property of a unit.
pub(crate) fn show(unit: &str, property: &str) -> String {
    run("systemctl", &["show", "--value", "--property", property, unit])
}

/// Whether systemd knows the unit in any state.
pub(crate) fn known(unit: &str) -> bool {
    !run("systemctl", &["list-units", "--all", "--plain", "--no-legend", unit]).is_empty()
}

/// Whether all of the node's cgroups are version 2.
pub(crate) fn unified() -> bool {
    Path::new("/sys/fs/cgroup/cgroup.controllers").exists()
}

/// The directories of a cgroup in all hierarchies.
pub(crate) fn cgroup(path: &str) -> Vec<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    let fields = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let hierarchies = fields.filter(|fields| fields[2].starts_with("cgroup"));
    hierarchies.map(|fields| Path::new(fields[1]).join(path)).filter(|path| path.is_dir()).collect()
}

/// Waits for what will be so soon; the machine may be slow.
pub(crate) fn eventually(what: &str, mut so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !so() {
        assert!(begun.elapsed() < Duration::from_secs(60), "not within a minute: {what}");
        thread::sleep(Duration::from_millis(20));
    }
}
