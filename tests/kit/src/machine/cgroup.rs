//! Cgroups of the machine, in all of its hierarchies.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::{cgroup_driver, mounts};

/// Where runc puts a container without a cgroup parent: containerd's namespace.
pub const WITHOUT_PARENT: &str = "/k8s.io";

/// The mount points of all cgroup hierarchies, of both versions.
///
/// # Errors
/// The mounts cannot be read.
pub fn hierarchies() -> Result<Vec<PathBuf>> {
    let mut found: Vec<PathBuf> = mounts::of("self")?
        .into_iter()
        .filter(|mount| mount.kind == "cgroup" || mount.kind == "cgroup2")
        .map(|mount| mount.point)
        .collect();
    found.sort();
    found.dedup();
    Ok(found)
}

/// Makes a cgroup, and its parents, in every hierarchy, as kubelet does for a pod before it asks
/// for its sandbox. `path` begins with a slash. One whose name ends in `.slice` is a slice, which
/// systemd is asked for.
///
/// # Errors
/// Names the directory that could not be made.
pub fn make(path: &str) -> Result<()> {
    if let Some(slice) = cgroup_driver::slice(path) {
        return cgroup_driver::start(slice);
    }
    for hierarchy in hierarchies()? {
        let mut directory = hierarchy;
        for part in path.split('/').filter(|part| !part.is_empty()) {
            let parent = directory.clone();
            hand_down(&parent)?;
            directory.push(part);
            match fs::create_dir(&directory) {
                Err(e) if e.kind() == ErrorKind::AlreadyExists => continue,
                made => made.with_context(|| format!("make cgroup {}", directory.display()))?,
            }
            // In version 1 a new cpuset is empty, and no process may enter it.
            for file in ["cpuset.cpus", "cpuset.mems"] {
                if directory.join("cgroup.clone_children").exists() && parent.join(file).exists() {
                    let value = fs::read(parent.join(file))
                        .with_context(|| format!("read {file} of {}", parent.display()))?;
                    fs::write(directory.join(file), value)
                        .with_context(|| format!("write {file} of {}", directory.display()))?;
                }
            }
        }
    }
    Ok(())
}

/// Lets the children of a cgroup of version 2 have every controller that it has itself, but for
/// those that are taken by version 1.
fn hand_down(cgroup: &Path) -> Result<()> {
    let Ok(controllers) = fs::read_to_string(cgroup.join("cgroup.controllers")) else {
        return Ok(());
    };
    let all: Vec<String> = controllers.split_whitespace().map(|name| format!("+{name}")).collect();
    if all.is_empty() {
        return Ok(());
    }
    fs::write(cgroup.join("cgroup.subtree_control"), all.join(" "))
        .with_context(|| format!("hand down the controllers of {}", cgroup.display()))
}

/// Whether the machine's cgroups are version 2 alone: the root of a hierarchy of version 2, and no
/// other, has this file.
///
/// # Errors
/// It cannot be looked for.
pub fn unified() -> Result<bool> {
    Path::new("/sys/fs/cgroup/cgroup.controllers")
        .try_exists()
        .context("look for cgroup.controllers")
}

/// Removes a cgroup from every hierarchy. Gone already is success; one that still has children or
/// processes is not.
///
/// # Errors
/// Names the directories that could not be removed.
pub fn remove(path: &str) -> Result<()> {
    if let Some(slice) = cgroup_driver::slice(path) {
        let within: Vec<PathBuf> =
            below(path)?.into_iter().filter(|found| !found.ends_with(slice)).collect();
        anyhow::ensure!(within.is_empty(), "remove {slice}: it has {within:?} still");
        return cgroup_driver::stop(slice);
    }
    let mut failed = Vec::new();
    for hierarchy in hierarchies()? {
        let directory = hierarchy.join(path.trim_start_matches('/'));
        match fs::remove_dir(&directory) {
            Ok(()) => {}
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            Err(e) => failed.push(format!("{}: {e}", directory.display())),
        }
    }
    anyhow::ensure!(failed.is_empty(), "remove cgroup {}", failed.join("; "));
    Ok(())
}

/// All cgroups below `path`, `path` itself first, as directories of every hierarchy.
///
/// # Errors
/// The hierarchies cannot be read.
pub fn below(path: &str) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for hierarchy in hierarchies()? {
        walk(&hierarchy.join(path.trim_start_matches('/')), &mut found);
    }
    Ok(found)
}

/// Skips cgroups that are removed meanwhile.
fn walk(directory: &Path, found: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    found.push(directory.to_owned());
    for entry in entries.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            walk(&entry.path(), found);
        }
    }
}
