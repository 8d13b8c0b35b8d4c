//! The streams of a container: its output to its log, and the input of an exec, on an idle node and
//! beside processes that take all processors.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use kit::{Container, ContainerSpec, Pod, PodSpec};

use crate::report::Report;
use crate::samples::{median, order};
use crate::setup::{BUILTIN, BUILTIN_WITH, OURS, Setup, Target};
use crate::{Plan, pods};

/// Megabytes that one container writes, or one exec reads.
const MEGABYTES: usize = 128;
/// The container's writing takes this long at most.
const WRITES: Duration = Duration::from_secs(180);

/// A pod of one target with a sleeping container, in which the execs run.
struct Subject {
    target: Target,
    pod: Pod,
    container: Container,
}

pub(crate) async fn measure(setup: &mut Setup, plan: &Plan, report: &mut Report) -> Result<()> {
    let [rust_shim, own_shim] = &BUILTIN_WITH;
    let mut subjects = Vec::new();
    for target in [setup.target(BUILTIN), rust_shim, own_shim, setup.target(OURS)] {
        let (pod, _) = pods::run(setup, target, PodSpec::new("streams").host_network()).await?;
        let container = pod.run(ContainerSpec::sleeping("main")).await?;
        subjects.push(Subject { target: target.clone(), pod, container });
    }
    let states = [
        ("", ["output_ours_over_builtin", "exec_stdin_ours_over_builtin"]),
        ("_loaded", ["output_loaded_ours_over_builtin", "exec_stdin_loaded_ours_over_builtin"]),
    ];
    for (state, [output_key, input_key]) in states {
        let load = if state.is_empty() { None } else { Some(Load::start()?) };
        let mut outputs = vec![Vec::new(); subjects.len()];
        let mut inputs = vec![Vec::new(); subjects.len()];
        for round in 0..plan.streams {
            for index in order(round, subjects.len()) {
                let Subject { pod, .. } = &subjects[index];
                outputs[index].push(output(pod, &format!("out{state}-{round}"), MEGABYTES).await?);
            }
            for index in order(round, subjects.len()) {
                let Subject { container, .. } = &subjects[index];
                inputs[index].push(input(setup, container, &format!("in{state}-{round}"))?);
            }
        }
        drop(load);
        add(report, &subjects, output_key, &format!("output{state}"), &outputs);
        add(report, &subjects, input_key, &format!("exec_stdin{state}"), &inputs);
    }
    for Subject { pod, .. } in subjects {
        pod.stop().await?;
        pod.remove().await?;
    }
    Ok(())
}

/// Adds the megabytes per second of each target, and the median of the ratios of each round: a
/// noisy machine changes both numbers of a round.
fn add(
    report: &mut Report,
    subjects: &[Subject],
    key: &'static str,
    what: &str,
    rates: &[Vec<f64>],
) {
    let find = |name| subjects.iter().zip(rates).find(|(subject, _)| subject.target.name == name);
    if let (Some((_, ours)), Some((_, builtin))) = (find(OURS), find(BUILTIN)) {
        let ratios = ours.iter().zip(builtin).map(|(ours, builtin)| ours / builtin).collect();
        report.add_ratio(key, median(ratios));
    }
    for (subject, rates) in subjects.iter().zip(rates) {
        let key = format!("{what}_{}_mb_per_s", subject.target.name);
        report.median(key, median(rates.clone()));
    }
}

/// Runs a container that writes this many megabytes; megabytes per second from its standard output
/// to its log.
pub(crate) async fn output(pod: &Pod, name: &str, megabytes: usize) -> Result<f64> {
    let script = format!("exec dd if=/dev/zero bs=1M count={megabytes} 2>/dev/null");
    let container = pod.run(ContainerSpec::sh(name, &script)).await?;
    let code = container.exited(WRITES).await?;
    ensure!(code == 0, "the container that writes ended with {code}");
    let status = container.status().await?;
    let seconds = (status.finished_at - status.started_at) as f64 / 1e9;
    let logged = std::fs::metadata(container.log_path())?.len();
    ensure!(logged >= megabytes as u64 * 1024 * 1024, "{logged} bytes of {megabytes} MB logged");
    container.remove().await?;
    // Else the kernel writes the log to the disk while the next container is measured, and delays
    // it when too much is not written.
    std::fs::remove_file(container.log_path())?;
    Ok(megabytes as f64 / seconds)
}

/// Megabytes per second from a file to the standard input of an exec, with its start.
fn input(setup: &Setup, container: &Container, id: &str) -> Result<f64> {
    let mut zeros = Command::new("head")
        .args(["-c", &format!("{MEGABYTES}M"), "/dev/zero"])
        .stdout(Stdio::piped())
        .spawn()
        .context("run head")?;
    let begun = Instant::now();
    let run = Command::new(setup.node.parts().program("ctr"))
        .arg("--address")
        .arg(setup.node.layout().containerd_socket())
        .args(["--namespace", "k8s.io", "tasks", "exec", "--exec-id", id, container.id()])
        .args(["sh", "-c", "wc -c"])
        .stdin(zeros.stdout.take().context("the output of head")?)
        .output()
        .context("run ctr")?;
    let seconds = begun.elapsed().as_secs_f64();
    zeros.wait()?;
    let (read, errors) =
        (String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
    ensure!(read.trim() == (MEGABYTES << 20).to_string(), "the exec read {read:?}: {errors}");
    Ok(MEGABYTES as f64 / seconds)
}

/// Processes that compute until they are dropped.
struct Load(Vec<Child>);

impl Load {
    fn start() -> Result<Self> {
        let processors = std::thread::available_parallelism()?.get();
        let mut load = Self(Vec::new());
        for _ in 0..processors {
            let busy = Command::new("sh").args(["-c", "while :; do :; done"]).spawn();
            load.0.push(busy.context("run sh")?);
        }
        Ok(load)
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
