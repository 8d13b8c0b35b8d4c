//! What the runtime has made for a container: its first process as the node sees it, and the config
//! that the runtime was given.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use kit::Container;
use kit::machine::{cgroup, processes};

use crate::fact::Facts;

/// The lines of `/proc/PID/status` that are compared.
const STATUS: [&str; 15] = [
    "Umask",
    "Uid",
    "Gid",
    "Groups",
    "SigIgn",
    "SigBlk",
    "CapInh",
    "CapPrm",
    "CapEff",
    "CapBnd",
    "CapAmb",
    "NoNewPrivs",
    "Seccomp",
    "Seccomp_filters",
    "Cpus_allowed_list",
];

/// The limits of a container's cgroup, of both versions.
const LIMITS: [&str; 11] = [
    "cpu.cfs_quota_us",
    "cpu.max",
    "cpu.shares",
    "cpu.weight",
    "cpuset.cpus",
    "devices.list",
    "hugetlb.2MB.limit_in_bytes",
    "memory.limit_in_bytes",
    "memory.max",
    "memory.swappiness",
    "pids.max",
];

/// The container, whose pod has the process `pause`.
pub(crate) async fn first_process(
    container: &Container,
    pause: u32,
    facts: &mut Facts,
) -> Result<()> {
    facts.call(container.id(), "<container>");
    facts.call(format!("/proc/{pause}/"), "/proc/<pause>/");
    let all = processes::all()?;
    let first = all.iter().find(|process| process.cgroups.contains(container.id()));
    let first = first.context("no process of the container")?;
    let proc = PathBuf::from(format!("/proc/{}", first.pid));
    attributes(container, &proc, facts).await?;
    cgroups(&first.cgroups, facts)?;
    mounts(&fs::read_to_string(proc.join("mountinfo"))?, facts);
    devices(&proc.join("root/dev"), facts)?;
    config(container, facts)
}

/// The attributes of the first process and of a command in the container: some are of the process
/// that has started the container's shim.
async fn attributes(container: &Container, proc: &Path, facts: &mut Facts) -> Result<()> {
    for file in ["limits", "status"] {
        let of_first = fs::read_to_string(proc.join(file))?;
        let of_exec = container.sh(&format!("cat /proc/self/{file}")).await?;
        for (whose, text) in [("container", of_first), ("exec", of_exec)] {
            let lines = text.lines().filter_map(|line| match file {
                "limits" => line.split_at_checked(26),
                _ => line.split_once(':').filter(|(name, _)| STATUS.contains(name)),
            });
            for (name, value) in lines {
                let words: Vec<&str> = value.split_whitespace().collect();
                let value =
                    if name == "SigIgn" { without_internal(words[0])? } else { words.join(" ") };
                facts.add(format!("{whose}: {}", name.trim()), value);
            }
        }
    }
    Ok(())
}

/// A mask without the signals 32 and 33. posix_spawn(3) of glibc ignores them, and so does a
/// containerd that a test starts by it.
fn without_internal(mask: &str) -> Result<String> {
    const INTERNAL: u64 = 3 << 31;
    Ok(format!("{:x}", u64::from_str_radix(mask, 16)? & !INTERNAL))
}

/// Its cgroups (cgroups(7)), and the limits in them.
fn cgroups(cgroups: &str, facts: &mut Facts) -> Result<()> {
    let hierarchies = cgroup::hierarchies()?;
    let mut limits = BTreeMap::new();
    for line in cgroups.lines() {
        let [_, controllers, path] = line.splitn(3, ':').collect::<Vec<_>>()[..] else { continue };
        let name = if controllers.is_empty() { "version 2" } else { controllers };
        facts.add(format!("container: cgroup of {name}"), path);
        for (hierarchy, file) in hierarchies.iter().flat_map(|h| LIMITS.map(|file| (h, file))) {
            let path = hierarchy.join(path.trim_start_matches('/')).join(file);
            if let Ok(value) = fs::read_to_string(path) {
                limits.insert(file, value.trim().replace('\n', ", "));
            }
        }
    }
    for (file, value) in limits {
        facts.add(format!("container: {file}"), value);
    }
    Ok(())
}

/// Each of its mounts (proc_pid_mountinfo(5)): type, root, options and propagation. The directories
/// of an overlay have numbers of their own in each container.
fn mounts(mountinfo: &str, facts: &mut Facts) {
    let mut mounts: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for line in mountinfo.lines() {
        let Some((left, right)) = line.split_once(" - ") else { continue };
        let (left, right) = (left.split(' ').collect::<Vec<_>>(), right.split(' '));
        let [_, _, _, root, point, options, ref propagation @ ..] = left[..] else { continue };
        let [kind, _, of_all] = right.collect::<Vec<_>>()[..] else { continue };
        let propagation: Vec<&str> =
            propagation.iter().filter_map(|field| field.split(':').next()).collect();
        let of_all = if kind == "overlay" { "" } else { of_all };
        let about = [kind, root, options, &propagation.join(" "), of_all].join(" ");
        mounts.entry(point).or_default().push(about);
    }
    facts.add("container: mount points", mounts.keys().copied().collect::<Vec<_>>().join(" "));
    for (point, mounted) in mounts {
        facts.add(format!("container: mount on {point}"), mounted.join(" | "));
    }
}

/// What its `/dev` has: type, number, mode and owner.
fn devices(directory: &Path, facts: &mut Facts) -> Result<()> {
    let mut devices = BTreeMap::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let about = entry.path().symlink_metadata()?;
        let kind = match about.file_type() {
            kind if kind.is_char_device() => "character",
            kind if kind.is_block_device() => "block",
            kind if kind.is_symlink() => "link",
            kind if kind.is_dir() => "directory",
            _ => "file",
        };
        let (major, minor) = (rustix::fs::major(about.rdev()), rustix::fs::minor(about.rdev()));
        let (mode, uid, gid) = (about.mode(), about.uid(), about.gid());
        let about = format!("{kind} {major}:{minor} {mode:o} {uid}:{gid}");
        devices.insert(entry.file_name().to_string_lossy().into_owned(), about);
    }
    for (name, about) in devices {
        facts.add(format!("container: /dev/{name}"), about);
    }
    Ok(())
}

/// The config that the runtime was given.
fn config(container: &Container, facts: &mut Facts) -> Result<()> {
    let path = container.bundle().join("config.json");
    let text = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
    facts.add_json("container: config", &serde_json::from_slice(&text)?);
    Ok(())
}
