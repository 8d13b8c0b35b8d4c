//! System calls of the daemon fail or hang, by injection: the error names step, path and errno,
//! other pods are not slowed, and what could not be done is done once the fault is gone.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use kit::controller::Controller;
use kit::machine::{mounts, processes};
use kit::{ContainerSpec, Handler, Node, Pod, PodSpec, grpc, until};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::harness::{Case, alone, on_node};
use crate::pods::{Shape, is_whole, remove};
use crate::standalone::Standalone;
use kit::strace::Fault;

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = alone![a_start_that_fails, a_cleanup_that_fails, an_unmount_that_hangs];
    cases.extend(on_node![node_shim_that_hangs]);
    cases
}

/// How often each of Status and Start is measured.
const TIMES: usize = 15;
/// The fastest of the others may be this much slower during a fault than under the same tracer
/// without one, or as slow as the median there: a busy machine does not delay all of them.
const RATIO: u32 = 3;
/// The same of the median, with what a busy machine makes: far less than any of the hangs.
const MEDIAN_RATIO: u32 = 10;
const NOISE: Duration = Duration::from_millis(50);

/// The fastest and the median of a call.
#[derive(Debug)]
struct Times {
    fastest: Duration,
    median: Duration,
}

impl Times {
    fn of(mut all: Vec<Duration>) -> Self {
        all.sort();
        Self { fastest: all[0], median: all[all.len() / 2] }
    }
}

/// Status of a living pod and Start of new ones.
async fn times(standalone: &Standalone, other: &str) -> Result<[Times; 2]> {
    let (controller, shape) = (standalone.controller(), Shape::plain(standalone));
    let (mut status, mut start) = (Vec::new(), Vec::new());
    for number in 0..TIMES {
        let begun = Instant::now();
        ensure!(
            controller.status(other, false).await?.state == "SANDBOX_READY",
            "the other pod is not ready"
        );
        status.push(begun.elapsed());
        let id = standalone.id(&format!("measured-{number}"));
        shape.create(&controller, &id).await?;
        let begun = Instant::now();
        controller.start(&id).await?;
        start.push(begun.elapsed());
    }
    Ok([Times::of(status), Times::of(start)])
}

async fn remove_measured(standalone: &Standalone, controller: &Controller) -> Result<()> {
    for number in 0..TIMES {
        remove(controller, &standalone.id(&format!("measured-{number}"))).await?;
    }
    Ok(())
}

fn compare(what: &str, before: [Times; 2], during: [Times; 2]) -> Result<()> {
    for (verb, (before, during)) in
        ["Status", "Start"].into_iter().zip(before.into_iter().zip(during))
    {
        eprintln!("{what}: {verb} of others {before:?} before, {during:?} during");
        ensure!(
            during.fastest < (before.fastest * RATIO).max(before.median)
                && during.median < before.median * MEDIAN_RATIO + NOISE,
            "{what}: {verb} of others took {during:?}, before {before:?}"
        );
    }
    Ok(())
}

/// The message has all of these.
fn names(error: &grpc::Status, words: &[&str]) -> Result<()> {
    for word in words {
        ensure!(error.message.contains(word), "{word:?} is not in: {error}");
    }
    Ok(())
}

/// Promise: failed_start_leaves_nothing.
async fn a_start_that_fails() -> Result<()> {
    let standalone = Standalone::started().await?;
    let (controller, shape) = (standalone.controller(), Shape::plain(&standalone));
    let other = standalone.id("other");
    shape.run(&controller, &other).await?;
    let id = standalone.id("failing");
    let (held, seen) = (
        standalone.record(&id).join("shm").display().to_string(),
        standalone.shm(&id).display().to_string(),
    );
    let cgroup = format!("{}/{id}", standalone.cgroup());
    // It has its command line then.
    is_whole(&standalone, &controller, &other).await?;
    let before = standalone.left()?;
    for (fault, words) in [
        ("clone3:error=EAGAIN", ["clone the pause process", "", "os error 11"]),
        ("mount:error=ENOMEM", ["mount shared memory", held.as_str(), "os error 12"]),
        ("mount:error=ENOMEM:when=2+2", ["bind shared memory", seen.as_str(), "os error 12"]),
        ("mkdirat:error=ENOSPC", ["make cgroup", cgroup.as_str(), "os error 28"]),
        ("setns:error=EPERM", ["join the empty mount namespace", "", "os error 1"]),
        ("execveat:error=EACCES", ["execute the pause program", "", "os error 13"]),
    ] {
        let fault_now = Fault::begin(standalone.pid()?, &[fault]).await?;
        shape.create(&controller, &id).await.with_context(|| format!("{fault}: create"))?;
        let error =
            controller.start(&id).await.err().with_context(|| format!("{fault}: it started"))?;
        names(&error, &words).with_context(|| fault.to_owned())?;
        names(&error, &[&id]).with_context(|| fault.to_owned())?;
        ensure!(
            standalone.left()? == before,
            "{fault}: left {:?}, before {before:?}",
            standalone.left()?
        );
        is_whole(&standalone, &controller, &other).await.with_context(|| fault.to_owned())?;
        fault_now.end().await?;
        shape.run(&controller, &id).await.with_context(|| format!("after {fault}"))?;
        remove(&controller, &id).await?;
    }
    remove(&controller, &other).await?;
    standalone.nothing_left().await
}

/// EBUSY of unmount and of the cgroup's removal: reported to callers and in the metrics, and
/// retried by the back-off without any caller.
///
/// Promise: cleanup_is_retried.
async fn a_cleanup_that_fails() -> Result<()> {
    const PENDING: &str = "pause_sandboxer_cleanups_pending";
    let standalone = Standalone::with_metrics()?;
    standalone.start().await?;
    let (controller, shape) = (standalone.controller(), Shape::plain(&standalone));
    let (other, stopped, killed) =
        (standalone.id("other"), standalone.id("stopped"), standalone.id("killed"));
    shape.run(&controller, &other).await?;
    for (call, word) in [("umount2", "unmount shared memory"), ("unlinkat", "remove cgroup")] {
        // The same tracer, and a fault that never comes.
        let calm =
            Fault::begin(standalone.pid()?, &[&format!("{call}:error=EBUSY:when=60000")]).await?;
        let before = times(&standalone, &other).await?;
        calm.end().await?;
        remove_measured(&standalone, &controller).await?;

        shape.run(&controller, &stopped).await?;
        let pid = shape.run(&controller, &killed).await?;
        let fault = Fault::begin(standalone.pid()?, &[&format!("{call}:error=EBUSY")]).await?;
        let error = controller
            .stop(&stopped)
            .await
            .err()
            .with_context(|| format!("{call}: Stop succeeded"))?;
        names(&error, &[&stopped, word, "os error 16"])?;
        let path = if call == "umount2" {
            standalone.shm(&stopped).display().to_string()
        } else {
            standalone.cgroup()
        };
        names(&error, &[&path])?;
        // The exit is published although the cleanup fails.
        kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL)?;
        let exit = tokio::time::timeout(Duration::from_secs(5), controller.wait(&killed))
            .await
            .context("Wait")??;
        ensure!(exit.exit_status == 137, "exit status {}", exit.exit_status);
        standalone.metric_is(PENDING, 1.0..=2.0).await?;
        let during = times(&standalone, &other).await?;
        compare(call, before, during)?;
        ensure!(controller.shutdown(&stopped).await.is_err(), "{call}: Shutdown succeeded");
        fault.end().await?;

        // No caller asks for the killed one; the other was to be shut down, and is in time.
        until("the cleanup is done", Duration::from_secs(40), async || {
            let left: Vec<String> = standalone.left()?;
            let leftovers = |id: &str, kind: &str| {
                left.iter().filter(|l| l.starts_with(kind) && l.contains(id)).count()
            };
            ensure!(
                leftovers(&killed, "mount") == 0
                    && leftovers(&killed, "cgroup") == 0
                    && leftovers(&stopped, "") == 0,
                "left: {left:#?}"
            );
            Ok(())
        })
        .await?;
        standalone.metric_is(PENDING, 0.0..=0.0).await?;
        let gone = controller.status(&stopped, false).await;
        ensure!(gone.as_ref().is_err_and(|status| status.code == grpc::NOT_FOUND), "{gone:?}");
        remove(&controller, &killed).await?;
        remove_measured(&standalone, &controller).await?;
    }
    remove(&controller, &other).await?;
    standalone.nothing_left().await
}

/// Promise: cleanup_is_retried.
async fn an_unmount_that_hangs() -> Result<()> {
    let standalone = Standalone::started().await?;
    let (controller, shape) = (standalone.controller(), Shape::plain(&standalone));
    let (other, hanging) = (standalone.id("other"), standalone.id("hanging"));
    shape.run(&controller, &other).await?;
    let pid = shape.run(&controller, &hanging).await?;
    let calm = Fault::begin(standalone.pid()?, &["umount2:delay_enter=12s:when=60000"]).await?;
    let before = times(&standalone, &other).await?;
    calm.end().await?;
    remove_measured(&standalone, &controller).await?;

    let fault = Fault::begin(standalone.pid()?, &["umount2:delay_enter=12s:when=1"]).await?;
    kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL)?;
    let exit = tokio::time::timeout(Duration::from_secs(5), controller.wait(&hanging))
        .await
        .context("Wait")??;
    ensure!(exit.exit_status == 137, "exit status {}", exit.exit_status);
    let status = controller.status(&hanging, false).await?;
    ensure!(status.state == "SANDBOX_NOTREADY", "it is {}", status.state);
    let during = times(&standalone, &other).await?;
    compare("unmount of 12 s", before, during)?;
    let shm = standalone.shm(&hanging);
    let is_mounted = mounts::of("self")?.iter().any(|mount| mount.point == shm);
    ensure!(is_mounted, "it was unmounted: nothing was hanging");
    let stopped =
        until("stop", Duration::from_secs(60), async || Ok(controller.stop(&hanging).await?)).await;
    stopped.context("Stop while the unmount hangs")?;
    fault.end().await?;
    remove(&controller, &hanging).await?;
    remove_measured(&standalone, &controller).await?;
    remove(&controller, &other).await?;
    standalone.nothing_left().await
}

/// Times as [`times`] has them, of pods under containerd, until something has ended.
async fn times_on(
    node: &Arc<Node>,
    other: &Pod,
    has_ended: impl Fn() -> bool,
) -> Result<[Times; 2]> {
    let (controller, mut status, mut start) = (node.sandboxer(), Vec::new(), Vec::new());
    for number in 0..TIMES {
        if has_ended() {
            break;
        }
        let begun = Instant::now();
        ensure!(
            controller.status(other.id(), false).await?.state == "SANDBOX_READY",
            "the other pod is not ready"
        );
        status.push(begun.elapsed());
        let begun = Instant::now();
        let pod = node
            .run(Handler::Ours, PodSpec::new(&format!("measured-{number}")).host_network())
            .await?;
        start.push(begun.elapsed());
        pod.remove().await?;
    }
    ensure!(!start.is_empty(), "nothing was hanging");
    Ok([Times::of(status), Times::of(start)])
}

/// The shim of a pod whose container is gone hangs.
///
/// Promise: hung_step_delays_no_other_pod.
async fn node_shim_that_hangs(node: Arc<Node>) -> Result<()> {
    let other = node.run(Handler::Ours, PodSpec::new("other").host_network()).await?;
    let hanging = node.run(Handler::Ours, PodSpec::new("hanging").host_network()).await?;
    let container = hanging.run(ContainerSpec::sleeping("main")).await?;
    let before = times_on(&node, &other, || false).await?;
    container.stop().await?;
    container.remove().await?;
    let of_pod =
        |p: &processes::Proc| p.command.contains("-shim") && p.command.contains(hanging.id());
    let shim = processes::all()?.into_iter().find(of_pod).context("the pod has no shim")?;
    processes::stop(shim.pid).await?;
    let removing = tokio::spawn({
        let hanging = hanging.clone();
        async move { hanging.remove().await }
    });
    let during = times_on(&node, &other, || removing.is_finished()).await?;
    compare("a shim that hangs", before, during)?;
    removing.await?.context("remove a pod whose shim hangs")?;
    ensure!(
        !processes::one(shim.pid).is_ok_and(|p| p.start_time == shim.start_time && p.state != 'Z'),
        "the shim is left"
    );
    other.remove().await
}
