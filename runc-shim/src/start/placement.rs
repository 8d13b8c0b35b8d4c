//! Where the server sits on the node. This process enters before it launches the server, which
//! inherits all of it.

use std::fs;
use std::path::{Component, Path, PathBuf};

use containerd_shim_protos::shim::oci::Options;
use rustix::thread::CoreSchedulingScope;

use crate::error::{Context as _, Error};

/// The directory below which the hierarchies of cgroups are mounted.
const ROOT: &str = "/sys/fs/cgroup";

/// Highest `oom_score_adj` (proc_pid_oom_score_adj(5)).
const HIGHEST: i32 = 1000;

/// The variable that asks for a core scheduling domain of the server and its containers.
const CORE_DOMAIN: &str = "SCHED_CORE";

/// Enters the cgroup that the options name (`ShimCgroup`) and a core scheduling domain, if they are
/// asked for, and sets the OOM score.
///
/// # Errors
/// The failed step.
pub fn enter(options: &Options) -> Result<(), Error> {
    if !options.shim_cgroup.is_empty() {
        for procs in members(Path::new(ROOT), Path::new(&options.shim_cgroup))? {
            fs::write(&procs, "0").context(format_args!("join cgroup {}", procs.display()))?;
        }
    }
    if std::env::var_os(CORE_DOMAIN).is_some_and(|value| !value.is_empty()) {
        let own = rustix::process::getpid();
        rustix::thread::create_core_scheduling_cookie(own, CoreSchedulingScope::ThreadGroup)
            .context("make core scheduling domain")?;
    }
    // The kernel prefers the server to containerd, which is the parent of this process.
    let parent = rustix::process::getppid().map_or(1, |pid| pid.as_raw_nonzero().get());
    let path = format!("/proc/{parent}/oom_score_adj");
    let score = fs::read_to_string(&path).context(format_args!("read {path}"))?;
    let score: i32 =
        score.trim().parse().map_err(|_| Error::unknown(format!("{path}: {score}")))?;
    let path = "/proc/self/oom_score_adj";
    let score = (score + 1).min(HIGHEST).to_string();
    fs::write(path, &score).context(format_args!("write {score} to {path}"))
}

/// `cgroup.procs` of a cgroup: in version 1, in each hierarchy that has it.
fn members(root: &Path, cgroup: &Path) -> Result<Vec<PathBuf>, Error> {
    let below = cgroup.strip_prefix("/").unwrap_or(cgroup);
    if below.components().any(|part| !matches!(part, Component::Normal(_))) {
        return Err(Error::unknown(format!("{} is not a cgroup", cgroup.display())));
    }
    let mut hierarchies = vec![root.to_owned()];
    if !root.join("cgroup.controllers").exists() {
        let entries = fs::read_dir(root).context(format_args!("read {}", root.display()))?;
        // Symbolic links name hierarchies that are listed anyway.
        let dirs = entries.flatten().filter(|it| it.file_type().is_ok_and(|kind| kind.is_dir()));
        hierarchies = dirs.map(|it| it.path()).collect();
    }
    let procs = hierarchies.iter().map(|it| it.join(below).join("cgroup.procs"));
    let found: Vec<PathBuf> = procs.filter(|procs| procs.exists()).collect();
    if found.is_empty() {
        return Err(Error::not_found(format!("no cgroup {}", cgroup.display())));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cgroup_is_found_in_both_versions() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        for dir in ["cpu/shims", "memory/shims", "pids", "shims"] {
            fs::create_dir_all(root.join(dir)).unwrap();
        }
        let procs = |dir: &str| root.join(dir).join("cgroup.procs");
        for dir in ["cpu/shims", "memory/shims", "shims"] {
            fs::write(procs(dir), "").unwrap();
        }
        let mut found = members(root, Path::new("/shims")).unwrap();
        found.sort();
        assert_eq!(found, ["cpu/shims", "memory/shims"].map(procs));
        for wrong in ["/none", "/shims/../..", "../shims"] {
            assert!(members(root, Path::new(wrong)).is_err(), "{wrong}");
        }
        fs::write(root.join("cgroup.controllers"), "").unwrap();
        assert_eq!(members(root, Path::new("shims")).unwrap(), [procs("shims")]);
    }
}
