//! The daemon has no descriptors left, or no processes.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kit::grpc;
use kit::machine::cgroup;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::harness::{Case, alone};
use crate::pods::{Shape, is_whole, remove};
use crate::standalone::Standalone;

pub(crate) fn cases() -> Vec<Case> {
    alone![no_descriptors, no_processes, no_processes_for_long]
}

/// Sets the soft limit; the hard one stays, as raising it takes a privilege.
pub(crate) fn limit(pid: u32, limit: &str) -> Result<()> {
    let done = Command::new("prlimit")
        .args(["--pid", &pid.to_string(), &format!("--nofile={limit}:")])
        .output()?;
    ensure!(done.status.success(), "prlimit: {}", String::from_utf8_lossy(&done.stderr));
    Ok(())
}

/// The processor time that a process has used, in hundredths of a second.
fn ticks(pid: u32) -> Result<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let (_, fields) = stat.rsplit_once(')').context("no name")?;
    let times = fields.split_whitespace().skip(11).take(2).map(str::parse::<u64>);
    times.sum::<Result<u64, _>>().context("no times")
}

/// Promise: full_node_keeps_its_pods.
async fn no_descriptors() -> Result<()> {
    let standalone = Standalone::started().await?;
    let (controller, shape) = (standalone.controller(), Shape::plain(&standalone));
    let (other, dying) = (standalone.id("other"), standalone.id("dying"));
    shape.run(&controller, &other).await?;
    let pid = shape.run(&controller, &dying).await?;
    let (daemon, id) = (standalone.pid()?, standalone.id("refused"));
    let hard = fs::read_to_string(format!("/proc/{daemon}/limits"))?;
    let hard =
        hard.lines().find_map(|line| line.strip_prefix("Max open files")).context("no limit")?;
    let hard = hard.split_whitespace().nth(1).context("no hard limit")?.to_owned();
    shape.create(&controller, &id).await?;
    // None is free below.
    limit(daemon, "3")?;
    let error = controller.start(&id).await.err().context("started without a descriptor")?;
    ensure!(error.message.contains("os error 24") && error.message.contains(&id), "{error}");
    // Operations without a new descriptor work: status, exit, Wait.
    ensure!(
        controller.status(&standalone.id("unknown"), false).await.is_err(),
        "status of an unknown id"
    );
    kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL)?;
    ensure!(controller.wait(&dying).await?.exit_status == 137, "its exit");
    // A new caller waits in the queue of the socket, for which the daemon does not spin.
    let (new, unknown, before) =
        (standalone.controller(), standalone.id("unknown"), ticks(daemon)?);
    let asked = tokio::spawn(async move { new.status(&unknown, false).await });
    tokio::time::sleep(Duration::from_secs(1)).await;
    let used = ticks(daemon)? - before;
    ensure!(!asked.is_finished(), "the daemon took a connection without a descriptor");
    ensure!(used < 20, "it used {used} hundredths of a second meanwhile");
    limit(daemon, &hard)?;
    let answer = asked.await?.err().context("status of an unknown id")?;
    ensure!(answer.code == grpc::NOT_FOUND, "{answer}");
    is_whole(&standalone, &controller, &other).await?;
    for id in [&other, &dying, &id] {
        let _ = controller.stop(id).await;
        controller.shutdown(id).await?;
    }
    shape.run(&controller, &id).await.context("with descriptors again")?;
    remove(&controller, &id).await?;
    standalone.nothing_left().await
}

/// The daemon's own pids cgroup is full: no child, and no further thread.
///
/// Promise: full_node_keeps_its_pods.
async fn no_processes() -> Result<()> {
    let standalone = Standalone::started().await?;
    let (controller, shape) = (standalone.controller(), Shape::plain(&standalone));
    let (other, id) = (standalone.id("other"), standalone.id("refused"));
    shape.run(&controller, &other).await?;
    let daemon = standalone.pid()?;
    let pids = pids_controller()?;
    let full = pids.join(standalone.cgroup().trim_start_matches('/')).join("daemon");
    fs::create_dir(&full)?;
    fs::write(full.join("cgroup.procs"), daemon.to_string())?;
    fs::write(full.join("pids.max"), "1")?;
    shape.create(&controller, &id).await?;
    let error = controller.start(&id).await.err().context("started without a process")?;
    for word in [id.as_str(), "clone the pause process", "os error 11"] {
        ensure!(error.message.contains(word), "{word:?} is not in: {error}");
    }
    is_whole(&standalone, &controller, &other).await?;
    controller.stop(&other).await.context("stop needs no process")?;
    fs::write(full.join("pids.max"), "max")?;
    fs::write(pids.join("cgroup.procs"), daemon.to_string())?;
    shape.run(&controller, &id).await.context("with processes again")?;
    remove(&controller, &id).await?;
    controller.shutdown(&other).await?;
    fs::remove_dir(&full)?;
    standalone.nothing_left().await
}

/// Pods have taken all process ids of the node, and the daemon has been idle for so long that its
/// threads would have ended: it feeds its watchdog and answers all the same.
async fn no_processes_for_long() -> Result<()> {
    /// Longer than the runtime keeps idle threads (10 s by itself), and than the daemon goes
    /// without a look at them (4 s).
    const LONG: Duration = Duration::from_secs(17);
    let standalone = Standalone::started().await?;
    let (controller, shape, id) =
        (standalone.controller(), Shape::plain(&standalone), standalone.id("living"));
    shape.run(&controller, &id).await?;
    let (daemon, pids) = (standalone.pid()?, pids_controller()?);
    let full = pids.join(standalone.cgroup().trim_start_matches('/')).join("daemon");
    fs::create_dir(&full)?;
    fs::write(full.join("cgroup.procs"), daemon.to_string())?;
    fs::write(full.join("pids.max"), "1")?;
    tokio::time::sleep(LONG).await;
    is_whole(&standalone, &controller, &id).await?;
    ensure!(!standalone.logged().contains("panic"), "{}", standalone.logged());
    remove(&controller, &id).await.context("removed without a further process")?;
    fs::write(full.join("pids.max"), "max")?;
    fs::write(pids.join("cgroup.procs"), daemon.to_string())?;
    fs::remove_dir(&full)?;
    standalone.nothing_left().await
}

/// Where the pids controller is: a hierarchy of version 1, or the one of version 2.
fn pids_controller() -> Result<PathBuf> {
    let all = cgroup::hierarchies()?;
    let first = all.iter().find(|path| path.ends_with("pids")).or_else(|| all.first());
    first.cloned().context("no cgroup file system")
}
