//! Who keeps the cgroups of pods: kubelet itself, or systemd for it.

use std::process::Command;

use anyhow::{Context, Result, ensure};

/// Names it: `systemd`, or `cgroupfs`, which is what is meant without it.
const VARIABLE: &str = "KIT_CGROUP_DRIVER";

/// The cgroup driver of a node, as kubelet, containerd's runc and the sandboxer have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CgroupDriver {
    /// Directories of the cgroup file systems.
    Cgroupfs,
    /// Slices, and in them scopes, of systemd.
    Systemd,
}

impl CgroupDriver {
    /// The one that the environment names.
    pub fn chosen() -> Self {
        match std::env::var(VARIABLE).as_deref() {
            Ok("systemd") => Self::Systemd,
            Ok("cgroupfs" | "") | Err(_) => Self::Cgroupfs,
            Ok(other) => panic!("{VARIABLE} is {other:?}, neither systemd nor cgroupfs"),
        }
    }
}

/// The slice that a cgroup's path means, if it does.
pub fn slice(path: &str) -> Option<&str> {
    path.rsplit('/').next().filter(|name| name.ends_with(".slice"))
}

/// Where systemd puts a slice: below those whose names its own begins with.
pub fn path(slice: &str) -> String {
    let name = slice.trim_end_matches(".slice");
    let ends = name.match_indices('-').map(|(at, _)| at).chain([name.len()]);
    ends.map(|end| format!("/{}.slice", &name[..end])).collect()
}

/// Makes a slice and those that it is within.
pub(crate) fn start(slice: &str) -> Result<()> {
    systemctl(&["start", slice]).map(drop)
}

/// Ends a unit, a slice with all that is in it. One that systemd does not know is success.
pub(crate) fn stop(unit: &str) -> Result<()> {
    match systemctl(&["stop", unit]) {
        Err(e) if e.to_string().contains("not loaded") => Ok(()),
        done => done.map(drop),
    }
}

/// The units whose names are like one of `patterns`, in any state.
///
/// # Errors
/// systemd does not answer.
pub(crate) fn units(patterns: &[&str]) -> Result<Vec<String>> {
    let mut arguments = vec!["list-units", "--all", "--plain", "--no-legend", "--full"];
    arguments.extend(patterns);
    let listed = systemctl(&arguments)?;
    Ok(listed
        .lines()
        .filter_map(|line| line.split_whitespace().next())
        .map(str::to_owned)
        .collect())
}

/// The scopes of containerd's containers and sandboxes, in any state, but those in a slice of a
/// node other than `name`: several nodes share the machine's systemd.
///
/// # Errors
/// systemd does not answer.
pub(crate) fn scopes(name: &str) -> Result<Vec<String>> {
    let shown = systemctl(&["show", "--property=Id,Slice", "cri-containerd-*.scope"])?;
    let mut scopes = Vec::new();
    for unit in shown.split("\n\n").filter(|unit| !unit.trim().is_empty()) {
        // An empty property is not shown.
        let property =
            |key| unit.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_default();
        let (id, slice) = (property("Id="), property("Slice="));
        if slice.starts_with(name) || !slice.starts_with(crate::teardown::PREFIX) {
            scopes.push(id.to_owned());
        }
    }
    Ok(scopes)
}

fn systemctl(arguments: &[&str]) -> Result<String> {
    let done = Command::new("systemctl").args(arguments).output().context("run systemctl")?;
    let error = String::from_utf8_lossy(&done.stderr);
    ensure!(done.status.success(), "systemctl {}: {}", arguments.join(" "), error.trim());
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}
