//! The cgroups of a pod: which there are, what is in them, who keeps them, and that they go.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use kit::machine::cgroup_driver::{self, CgroupDriver};
use serde_json::{Value, json};

use crate::Run;
use crate::cluster::{run, until};
use crate::machine::Machine;
use crate::side::{Facts, LIMIT, Side, at, sleeping, with};

pub(crate) const CASES: &[(&str, Run)] = &[("cgroups_of_a_pod", Run::Each(of_a_pod))];

/// Files of a cgroup, of version 1 or 2.
const FILES: [&str; 14] = [
    "memory.limit_in_bytes",
    "cgroup.controllers",
    "cgroup.subtree_control",
    "cgroup.type",
    "cpu.max",
    "cpu.weight",
    "memory.high",
    "memory.low",
    "memory.max",
    "memory.min",
    "memory.oom.group",
    "memory.swap.max",
    "pids.max",
    "io.weight",
];
/// What systemd knows of a scope.
const PROPERTIES: [&str; 9] = [
    "ActiveState",
    "CPUAccounting",
    "CPUWeight",
    "DefaultDependencies",
    "Delegate",
    "MemoryAccounting",
    "MemoryMax",
    "TasksAccounting",
    "TasksMax",
];

/// The cgroup of a pod, below a hierarchy.
pub(crate) fn path(pod: &Value) -> String {
    let uid = at(pod, "metadata.uid");
    let class = at(pod, "status.qosClass").to_lowercase();
    match Machine::cgroup_driver() {
        CgroupDriver::Cgroupfs if class == "guaranteed" => format!("kubepods/pod{uid}"),
        CgroupDriver::Cgroupfs => format!("kubepods/{class}/pod{uid}"),
        CgroupDriver::Systemd => {
            let class = if class == "guaranteed" { String::new() } else { format!("-{class}") };
            let slice = format!("kubepods{class}-pod{}.slice", uid.replace('-', "_"));
            cgroup_driver::path(&slice).trim_start_matches('/').to_owned()
        }
    }
}

/// The hierarchy of memory, in which every pod's cgroup is.
pub(crate) fn hierarchy() -> PathBuf {
    let top = PathBuf::from("/sys/fs/cgroup");
    if top.join("memory").is_dir() { top.join("memory") } else { top }
}

/// The cgroups in a cgroup.
pub(crate) fn children(cgroup: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(cgroup).with_context(|| cgroup.display().to_string())? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            names.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    names.sort();
    Ok(names)
}

/// The facts of one cgroup.
fn observe(facts: &mut Facts, name: &str, cgroup: &Path) -> Result<()> {
    for file in FILES {
        if let Ok(text) = fs::read_to_string(cgroup.join(file)) {
            facts.add(format!("{name}: {file}"), text);
        }
    }
    let mut processes = Vec::new();
    for pid in fs::read_to_string(cgroup.join("cgroup.procs"))?.lines() {
        processes.push(fs::read_to_string(format!("/proc/{pid}/comm"))?.trim().to_owned());
    }
    processes.sort();
    facts.add(format!("{name}: processes"), processes.join(" "));
    let unit = cgroup.file_name().unwrap_or_default().to_string_lossy();
    if Machine::cgroup_driver() == CgroupDriver::Systemd {
        let properties = format!("--property={}", PROPERTIES.join(","));
        facts.add(format!("{name}: unit"), run("systemctl", &["show", &properties, &unit])?);
    }
    Ok(())
}

fn of_a_pod(side: &Side) -> Result<Facts> {
    let mut facts = Facts::default();
    let much = json!({ "cpu": "50m", "memory": "32Mi" });
    let limited = json!({ "resources": { "requests": { "cpu": "20m" }, "limits": much } });
    let containers = [with(sleeping("main"), limited.clone()), with(sleeping("other"), limited)];
    side.run("grouped", json!({ "containers": containers }))?;
    let pod = side.get("pod/grouped")?;
    let cgroup = hierarchy().join(path(&pod));
    observe(&mut facts, "pod", &cgroup)?;
    let mut names = Vec::new();
    let statuses = pod["status"]["containerStatuses"].as_array().context("no containers")?;
    for child in children(&cgroup)? {
        let mut name = "sandbox".to_owned();
        let mut shown = child.clone();
        for status in statuses {
            let id = at(status, "containerID");
            let id = id.rsplit('/').next().unwrap_or_default();
            if child.contains(id) {
                name = at(status, "name");
                shown = child.replace(id, &name);
            }
        }
        if name == "sandbox" {
            let digits = |c: char| c.is_ascii_hexdigit();
            let id = child.split(|c| !digits(c)).max_by_key(|part| part.len()).unwrap_or_default();
            shown = child.replace(id, &name);
        }
        observe(&mut facts, &name, &cgroup.join(&child))?;
        names.push(shown);
    }
    names.sort();
    facts.add("cgroups", names.join(" "));
    side.delete(&["pod/grouped"])?;
    until("the pod's cgroup is gone", LIMIT, || {
        ensure!(!cgroup.exists(), "{} is there", cgroup.display());
        Ok(())
    })?;
    if Machine::cgroup_driver() == CgroupDriver::Systemd {
        let uid = format!("*{}*", at(&pod, "metadata.uid").replace('-', "_"));
        let left = || run("systemctl", &["list-units", "--all", "--plain", "--no-legend", &uid]);
        until("systemd has forgotten the pod", LIMIT, || {
            let left = left()?;
            ensure!(left.trim().is_empty(), "{left}");
            Ok(())
        })?;
    }
    Ok(facts)
}
