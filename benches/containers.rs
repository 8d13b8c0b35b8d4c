//! The cost of a pod with one container: memory of its own processes, wake-ups while it does
//! nothing, and ExecSync.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use kit::machine::processes::{self, pss};
use kit::{Container, ContainerSpec, Pod, PodSpec};

use crate::account::{cpu_time, switches};
use crate::report::Report;
use crate::samples::{Samples, order};
use crate::setup::{BUILTIN, BUILTIN_WITH, OURS, Setup, Target};
use crate::{Plan, pods, streams};

/// Until shims and Go runtimes are idle.
const SETTLES: Duration = Duration::from_millis(500);
/// Execs before the samples, which start threads and fill caches.
const WARM_UP: usize = 5;
/// Execs of one target before those of the next.
const EXECS_PER_ROUND: usize = 5;
/// Output in megabytes, and execs, of a pod before its memory is measured again.
const OUTPUT_BEFORE_MEMORY: usize = 100;
const EXECS_BEFORE_MEMORY: usize = 1000;

/// Some pods of one target, each with a sleeping container.
struct Batch {
    target: Target,
    pods: Vec<(Pod, Container)>,
    /// Shims and pauses of the first pod, and of all pods.
    of_first: Vec<u32>,
    of_all: Vec<u32>,
}

pub(crate) async fn measure(setup: &mut Setup, plan: &Plan, report: &mut Report) -> Result<()> {
    let mut batches = Vec::new();
    let [rust_shim, own_shim] = &BUILTIN_WITH;
    for target in [setup.target(BUILTIN), rust_shim, own_shim, setup.target(OURS)] {
        batches.push(Batch::start(setup, target, plan.containers).await?);
    }
    memory(&batches, report)?;
    at_rest(&batches, plan.quiet, report).await?;
    execs(setup, &batches, plan, report).await?;
    let ours = batches.iter().find(|batch| batch.target.name == OURS).context("our pods")?;
    memory_after_work(ours, report).await?;
    for batch in batches {
        for (pod, _) in batch.pods {
            pod.stop().await?;
            pod.remove().await?;
        }
    }
    let pairs = [
        ("pod_with_container_builtin_over_ours", BUILTIN, OURS, "pod_with_container", "kb"),
        ("exec_ours_over_builtin", OURS, BUILTIN, "exec", "ms"),
        ("cpu_exec_builtin_over_ours", BUILTIN, OURS, "cpu_per_exec", "ms"),
    ];
    for (key, above, below, what, unit) in pairs {
        report.ratio(key, &format!("{what}_{above}_{unit}"), &format!("{what}_{below}_{unit}"));
    }
    report.ratio("pod_with_container_kb", "pod_with_container_ours_kb", "one");
    report.ratio("pod_after_1000_execs_kb", "pod_after_1000_execs_ours_kb", "one");
    let wakeups = |name: &str| format!("idle_wakeups_per_minute_{name}");
    report.ratio("idle_wakeups_builtin_over_ours", &wakeups(BUILTIN), &wakeups(OURS));
    let cpu = |name: &str| format!("idle_cpu_per_minute_{name}_ms");
    report.ratio("idle_cpu_builtin_over_ours", &cpu(BUILTIN), &cpu(OURS));
    Ok(())
}

impl Batch {
    async fn start(setup: &Setup, target: &Target, count: usize) -> Result<Self> {
        let before = pids(&all_of_node(setup)?);
        let (mut pods, mut of_first) = (Vec::new(), Vec::new());
        for number in 0..count {
            let name = format!("with-container-{number}");
            let (pod, _) = pods::run(setup, target, PodSpec::new(&name).host_network()).await?;
            let container = pod.run(ContainerSpec::sleeping("main")).await?;
            pods.push((pod, container));
            if number == 0 {
                of_first = infrastructure(setup, &before, &pods)?;
            }
        }
        tokio::time::sleep(SETTLES).await;
        let of_all = infrastructure(setup, &before, &pods)?;
        ensure!(of_all.len() >= count, "{}: {} processes", target.name, of_all.len());
        Ok(Self { target: target.clone(), pods, of_first, of_all })
    }

    fn kilobytes_per_pod(&self) -> Result<f64> {
        let sum = self.of_all.iter().map(|pid| pss(*pid)).sum::<Result<f64>>()?;
        Ok(sum / self.pods.len() as f64)
    }

    fn first(&self) -> Result<&(Pod, Container)> {
        self.pods.first().context("a pod")
    }
}

/// Processes in the node's cgroups.
fn all_of_node(setup: &Setup) -> Result<Vec<processes::Proc>> {
    let inside = format!(":{}/", setup.node.layout().cgroup());
    let mut all = processes::all()?;
    all.retain(|process| process.cgroups.contains(&inside));
    Ok(all)
}

fn pids(processes: &[processes::Proc]) -> BTreeSet<u32> {
    processes.iter().map(|process| process.pid).collect()
}

/// Processes that came since `before` for these pods, without those of their containers, whose
/// cgroup has the container's id.
fn infrastructure(
    setup: &Setup,
    before: &BTreeSet<u32>,
    pods: &[(Pod, Container)],
) -> Result<Vec<u32>> {
    let mut all = all_of_node(setup)?;
    all.retain(|process| {
        !before.contains(&process.pid)
            && !pods.iter().any(|(_, container)| process.cgroups.contains(container.id()))
    });
    Ok(all.into_iter().map(|process| process.pid).collect())
}

fn memory(batches: &[Batch], report: &mut Report) -> Result<()> {
    for batch in batches {
        let key = format!("pod_with_container_{}_kb", batch.target.name);
        report.median(key, batch.kilobytes_per_pod()?);
    }
    Ok(())
}

/// Context switches and processor time of shims and pauses while all pods are idle.
async fn at_rest(batches: &[Batch], quiet: Duration, report: &mut Report) -> Result<()> {
    let sum = |batch: &Batch, of: fn(u32) -> Result<u64>| {
        batch.of_all.iter().map(|pid| of(*pid)).sum::<Result<u64>>()
    };
    let both = |batch: &Batch| Ok((sum(batch, switches)?, sum(batch, run_time)?));
    let before = batches.iter().map(both).collect::<Result<Vec<_>>>()?;
    tokio::time::sleep(quiet).await;
    for (batch, before) in batches.iter().zip(before) {
        let after = both(batch)?;
        let pod_minutes = batch.pods.len() as f64 * quiet.as_secs_f64() / 60.0;
        let name = batch.target.name;
        let switches = after.0.saturating_sub(before.0) as f64;
        report.median(format!("idle_wakeups_per_minute_{name}"), switches / pod_minutes);
        let milliseconds = after.1.saturating_sub(before.1) as f64 / 1e6;
        report.median(format!("idle_cpu_per_minute_{name}_ms"), milliseconds / pod_minutes);
    }
    Ok(())
}

/// Nanoseconds that the threads of a process have run, by `/proc/PID/task/TID/schedstat`.
fn run_time(pid: u32) -> Result<u64> {
    let mut sum = 0;
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let text = std::fs::read_to_string(task?.path().join("schedstat"))?;
        sum += text.split(' ').next().context("schedstat")?.parse::<u64>()?;
    }
    Ok(sum)
}

/// ExecSync of a program that exits at once: its time, and the processor time of containerd, the
/// sandboxer and the pod's shim. runc is not in it: its processes have ended by then.
async fn execs(setup: &Setup, batches: &[Batch], plan: &Plan, report: &mut Report) -> Result<()> {
    let mut times = vec![Samples::default(); batches.len()];
    let mut cpu = vec![(Duration::ZERO, Duration::ZERO); batches.len()];
    let containerd = setup.node.containerd_pid()?;
    let rounds = plan.pods / 2;
    for round in 0..rounds {
        for index in order(round, batches.len()) {
            let batch = &batches[index];
            let (_, container) = batch.first()?;
            let mut who = batch.of_first.clone();
            if let Some(daemon) = setup.daemons.get(batch.target.name) {
                who.push(daemon.pid()?);
            }
            let used = || -> Result<(Duration, Duration)> {
                let others = who.iter().map(|pid| cpu_time(*pid)).sum::<Result<Duration>>()?;
                Ok((others, cpu_time(containerd)?))
            };
            for _ in 0..if round == 0 { WARM_UP } else { 1 } {
                container.exec(&["true"]).await?;
            }
            let before = used()?;
            for _ in 0..EXECS_PER_ROUND {
                let begun = Instant::now();
                container.exec(&["true"]).await?;
                times[index].push(begun.elapsed());
            }
            let after = used()?;
            cpu[index].0 += after.0.saturating_sub(before.0);
            cpu[index].1 += after.1.saturating_sub(before.1);
        }
    }
    for (index, batch) in batches.iter().enumerate() {
        let name = batch.target.name;
        report.median(format!("exec_{name}_ms"), times[index].median_ms());
        let each = |all: Duration| all.as_secs_f64() * 1e3 / (rounds * EXECS_PER_ROUND) as f64;
        let (others, containerd) = cpu[index];
        report.median(format!("cpu_per_exec_{name}_ms"), each(others + containerd));
        report.median(format!("cpu_per_exec_{name}_in_containerd_ms"), each(containerd));
    }
    Ok(())
}

/// Memory of one pod after many execs and much output.
async fn memory_after_work(batch: &Batch, report: &mut Report) -> Result<()> {
    let (pod, container) = batch.first()?;
    streams::output(pod, "before-memory", OUTPUT_BEFORE_MEMORY).await?;
    for _ in 0..EXECS_BEFORE_MEMORY {
        container.exec(&["true"]).await?;
    }
    tokio::time::sleep(SETTLES).await;
    let kilobytes = batch.of_first.iter().map(|pid| pss(*pid)).sum::<Result<f64>>()?;
    report.median(format!("pod_after_1000_execs_{}_kb", batch.target.name), kilobytes);
    Ok(())
}
