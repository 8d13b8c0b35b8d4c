//! The end of a container whose root file system has new files, on an idle disk and beside a writer
//! that syncs the same disk: StopContainer, in which the shim unmounts, and RemoveContainer. Not a
//! part of the report: its times are those of the disk. `--only unmount` runs it.

use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use kit::{ContainerSpec, Pod, PodSpec};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

use crate::daemon::Daemon;
use crate::pods;
use crate::report::Report;
use crate::samples::{Samples, order};
use crate::setup::{BUILTIN, OURS, Setup};

/// The pods by their names in the report: the target, and the settings of the daemon that launches
/// the shim.
const PODS: [(&str, &str, &str); 3] =
    [(BUILTIN, BUILTIN, ""), (OURS, OURS, ""), ("ours_volatile", OURS, "volatile_rootfs = true")];

/// Containers of each pod.
const ROUNDS: usize = 100;

/// The new files of a container.
const WRITES: &str = "dd if=/dev/zero of=/new bs=1M count=4 2>/dev/null; exec sleep 100000";

/// How long a container lives after its Start, so that it has written.
const LIVES: Duration = Duration::from_millis(100);

pub(crate) async fn measure(setup: &mut Setup, report: &mut Report) -> Result<()> {
    let mut all = Vec::new();
    for (name, target, settings) in PODS {
        restart(setup, settings).await?;
        let target = setup.target(target).clone();
        let (pod, _) = pods::run(setup, &target, PodSpec::new(name).host_network()).await?;
        // Its shim lives as long as the pod.
        pod.run(ContainerSpec::sleeping("first")).await?;
        all.push(pod);
    }
    restart(setup, "").await?;
    for state in ["", "_beside_writer"] {
        let writer = if state.is_empty() { None } else { Some(Writer::start(setup)?) };
        let mut stops = vec![Samples::default(); all.len()];
        let mut removals = stops.clone();
        for round in 0..=ROUNDS {
            for index in order(round, all.len()) {
                let name = format!("c{state}-{round}");
                let (stopped, removed) = end_of_container(setup, &all[index], &name).await?;
                if round > 0 {
                    stops[index].push(stopped);
                    removals[index].push(removed);
                }
            }
        }
        drop(writer);
        for (call, samples) in [("stop_container", &stops), ("remove_container", &removals)] {
            for ((name, ..), samples) in PODS.iter().zip(samples) {
                let key = format!("{call}{state}_{name}_ms");
                report.median(key.clone(), samples.median_ms());
                report.p99(key, samples.p99_us() / 1e3);
            }
        }
    }
    for pod in all {
        pod.stop().await?;
        pod.remove().await?;
    }
    Ok(())
}

/// Restarts this project's daemon with these lines in its config.
async fn restart(setup: &mut Setup, settings: &str) -> Result<()> {
    let new = Daemon::ours(&setup.node, OURS, settings)?;
    let mut old = setup.daemons.insert(OURS, new).context("our daemon")?;
    old.kill()?;
    setup.daemons.get_mut(OURS).context("our daemon")?.start().await?;
    Ok(())
}

/// How long StopContainer and RemoveContainer take for a container that has written.
async fn end_of_container(setup: &Setup, pod: &Pod, name: &str) -> Result<(Duration, Duration)> {
    let cri = setup.node.cri();
    let container = pod.run(ContainerSpec::sh(name, WRITES)).await?;
    tokio::time::sleep(LIVES).await;
    let begun = Instant::now();
    cri.stop_container(container.id(), Duration::ZERO).await?;
    let stopped = begun.elapsed();
    cri.remove_container(container.id()).await?;
    Ok((stopped, begun.elapsed() - stopped))
}

/// Writes 8 MB and syncs them, again and again, on the disk of the containers. Ends when dropped.
struct Writer {
    shell: Child,
    file: PathBuf,
}

impl Writer {
    fn start(setup: &Setup) -> Result<Self> {
        let file = Path::new(&setup.node.layout().root()).join("written");
        let script = "while :; do dd if=/dev/zero of=\"$0\" bs=1M count=8 conv=fsync 2>&-; done";
        let mut command = Command::new("sh");
        command.args(["-c", script]).arg(&file).process_group(0);
        Ok(Self { shell: command.spawn().context("run the writer")?, file })
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let group = i32::try_from(self.shell.id()).expect("a pid");
        let _ = killpg(Pid::from_raw(group), Signal::SIGKILL);
        let _ = self.shell.wait();
        let _ = std::fs::remove_file(&self.file);
    }
}
