//! The cost of processes: processor time by cgroup, memory by process.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use kit::machine::cgroup::hierarchies;
use kit::machine::processes;
use nix::time::ClockId;

/// A cgroup that counts the processor time of all that ran in it, children that have ended
/// included.
#[derive(Clone, Debug)]
pub(crate) struct Account(PathBuf);

impl Account {
    /// The one at `path` in the hierarchy that counts; made if it is not there.
    pub(crate) fn at(path: &str) -> Result<Self> {
        let counts = |root: &PathBuf| {
            root.join("cpuacct.usage").exists() || root.join("cgroup.controllers").exists()
        };
        let mut roots: Vec<PathBuf> = hierarchies()?.into_iter().filter(counts).collect();
        // Version 1 where it is mounted, as for the sandboxer.
        roots.sort_by_key(|root| !root.join("cpuacct.usage").exists());
        let root = roots.into_iter().next().context("no cgroup hierarchy counts processor time")?;
        let directory = root.join(path.trim_start_matches('/'));
        fs::create_dir_all(&directory).with_context(|| format!("make {}", directory.display()))?;
        Ok(Self(directory))
    }

    /// Moves a process into it, and so all that it starts from then on.
    pub(crate) fn take(&self, pid: u32) -> Result<()> {
        let procs = self.0.join("cgroup.procs");
        fs::write(&procs, pid.to_string()).with_context(|| format!("write {}", procs.display()))
    }

    /// Processor time so far.
    pub(crate) fn used(&self) -> Result<Duration> {
        let read = |file: &Path| {
            fs::read_to_string(file).with_context(|| format!("read {}", file.display()))
        };
        let usage = self.0.join("cpuacct.usage");
        if usage.exists() {
            return Ok(Duration::from_nanos(read(&usage)?.trim().parse()?));
        }
        let stat = read(&self.0.join("cpu.stat"))?;
        let micros = stat
            .lines()
            .find_map(|line| line.strip_prefix("usage_usec "))
            .context("cpu.stat has no usage")?;
        Ok(Duration::from_micros(micros.trim().parse()?))
    }
}

/// Processor time of a process since its start, without its children.
pub(crate) fn cpu_time(pid: u32) -> Result<Duration> {
    let pid = nix::unistd::Pid::from_raw(i32::try_from(pid)?);
    let clock = ClockId::pid_cpu_clock_id(pid).with_context(|| format!("clock of {pid}"))?;
    Ok(clock.now().with_context(|| format!("processor time of {pid}"))?.into())
}

/// Context switches of all threads of a process (proc_pid_status(5)).
pub(crate) fn switches(pid: u32) -> Result<u64> {
    let threads = format!("/proc/{pid}/task");
    let mut sum = 0;
    for thread in fs::read_dir(&threads).with_context(|| format!("read {threads}"))? {
        let status = thread?.path().join("status");
        let text =
            fs::read_to_string(&status).with_context(|| format!("read {}", status.display()))?;
        for line in text.lines() {
            if let Some((name, value)) = line.split_once(':')
                && name.ends_with("voluntary_ctxt_switches")
            {
                sum += value.trim().parse::<u64>()?;
            }
        }
    }
    Ok(sum)
}

/// Ids of the shims and pauses of a node.
pub(crate) fn of_pods(node: &kit::Node) -> Result<Vec<u32>> {
    let (top, inside) =
        (node.layout().top.to_string_lossy().into_owned(), format!(":{}/", node.layout().cgroup()));
    let all = processes::all()?;
    let shim = |p: &processes::Proc| {
        (p.comm.starts_with("containerd-shim") || p.comm == "runc-shim") && p.command.contains(&top)
    };
    let pause =
        |p: &processes::Proc| p.command.starts_with("/pause") && p.cgroups.contains(&inside);
    Ok(all.iter().filter(|p| shim(p) || pause(p)).map(|p| p.pid).collect())
}
