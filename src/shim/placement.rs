//! Where a shim sits on the node: its OOM score and its cgroup.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use process_identity::is_no_such_process;

use super::Runtime;
use crate::cgroup::mounts::Mounted;
use crate::error::{IoContext as _, StepError};

/// Highest `oom_score_adj` (proc_pid_oom_score_adj(5)).
const HIGHEST: i32 = 1000;

/// Makes the kernel prefer the shim to containerd, whose score is `parent`, by one (containerd
/// `pkg/shim.AdjustOOMScore`). If the daemon must not lower its own score so far, the shim's is one
/// above the daemon's.
///
/// # Errors
/// The failed step.
pub fn raise_oom_score(pid: u32, parent: i32) -> Result<(), StepError> {
    const OWN: &str = "/proc/self/oom_score_adj";
    let path = format!("/proc/{pid}/oom_score_adj");
    let write = |parent: i32| ended(fs::write(&path, (parent + 1).min(HIGHEST).to_string()));
    match write(parent) {
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
            let own = fs::read_to_string(OWN).step_at("read", OWN)?;
            write(own.trim().parse().map_err(io::Error::other).step_at("read", OWN)?)
        }
        done => done,
    }
    .step_at("write oom score", &path)
}

/// Moves the shim to the cgroup that runc's options name, if they do (`ShimCgroup`).
///
/// # Errors
/// There is no such cgroup, or it takes no process.
pub fn join_cgroup(pid: u32, runtime: &Runtime) -> Result<(), StepError> {
    let Some(options) = runtime.runc_options()? else { return Ok(()) };
    if options.shim_cgroup.is_empty() {
        return Ok(());
    }
    for procs in
        members(&Mounted::find()?, Path::new(&options.shim_cgroup)).step("find cgroup of shim")?
    {
        ended(fs::write(&procs, pid.to_string())).step_at("join cgroup", procs)?;
    }
    Ok(())
}

/// A shim that has ended meanwhile is seen elsewhere.
fn ended(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(e) if is_no_such_process(&e) => Ok(()),
        other => other,
    }
}

/// `cgroup.procs` of the cgroup in every hierarchy that has it.
fn members(mounted: &Mounted, cgroup: &Path) -> io::Result<Vec<PathBuf>> {
    let below = cgroup.strip_prefix("/").unwrap_or(cgroup);
    if below.components().any(|part| !matches!(part, std::path::Component::Normal(_))) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("{} is not a cgroup", cgroup.display()),
        ));
    }
    let procs = mounted.points().into_iter().map(|root| root.join(below).join("cgroup.procs"));
    let found: Vec<PathBuf> = procs.filter(|procs| procs.exists()).collect();
    if found.is_empty() {
        return Err(io::Error::new(
            io::ErrorKind::NotFound,
            format!("no cgroup {}", cgroup.display()),
        ));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroup::mounts::Hierarchy;

    #[test]
    fn a_cgroup_is_found_in_both_versions() {
        let mount = tempfile::tempdir().unwrap();
        for dir in ["cpu/shims", "memory/shims", "pids"] {
            fs::create_dir_all(mount.path().join(dir)).unwrap();
        }
        for file in ["cpu/shims/cgroup.procs", "memory/shims/cgroup.procs"] {
            fs::write(mount.path().join(file), "").unwrap();
        }
        let hierarchy =
            |name| Hierarchy { point: mount.path().join(name), controllers: Vec::new() };
        let v1 = Mounted::V1(["cpu", "memory", "pids"].map(hierarchy).into());
        let found = members(&v1, Path::new("/shims")).unwrap();
        assert_eq!(
            found,
            ["cpu/shims", "memory/shims"].map(|dir| mount.path().join(dir).join("cgroup.procs"))
        );
        assert!(members(&v1, Path::new("/none")).is_err());
        assert!(members(&v1, Path::new("/shims/../..")).is_err());
        fs::create_dir(mount.path().join("shims")).unwrap();
        fs::write(mount.path().join("shims/cgroup.procs"), "").unwrap();
        let v2 = Mounted::V2(mount.path().to_owned());
        assert_eq!(
            members(&v2, Path::new("shims")).unwrap(),
            [mount.path().join("shims/cgroup.procs")]
        );
    }
}
