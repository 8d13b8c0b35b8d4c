//! Shims that are started by their own `start`, with pods of the native driver.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use kit::machine::processes;
use kit::{ContainerSpec, until};
use nix::sys::signal::Signal;

use crate::handover::a_shim_that_cannot_be_looked_for_is_found_later;
use crate::harness::{
    Case, Harness, Kind, SOON, cases, end_empty, inside, no_shim, none, not_ready, one_shim,
    refused, removed, shims, signal,
};

pub(crate) fn cases() -> Vec<Case> {
    cases![Kind::SelfStarted =>
        a_pod_has_its_shim_from_start_to_shutdown,
        a_container_waits_for_the_shim_that_follows_an_empty_one,
        a_start_that_fails_is_an_error,
        a_process_that_a_shim_takes_itself_for_is_not_killed,
        a_shim_that_dies_with_containers_ends_the_pod_too,
        a_killed_daemon_finds_the_started_shim_again,
        a_shim_that_cannot_be_looked_for_is_found_later,
        an_address_outlives_starts_that_fail,
        an_interrupted_deletion_leaves_nothing,
        a_shim_has_the_variables_that_are_set,
    ]
}

async fn a_pod_has_its_shim_from_start_to_shutdown(harness: Arc<Harness>) -> Result<()> {
    let pod = harness.pod("with").await?;
    let shim = one_shim(&pod).await?;
    let first = pod.run(ContainerSpec::sleeping("a")).await?;
    ensure!(first.sh("echo hello").await?.trim() == "hello", "exec");
    ensure!(one_shim(&pod).await?.pid == shim.pid, "the container has another shim");
    first.stop().await?;
    first.remove().await?;
    end_empty(&pod, &shim).await?;
    until("another shim", SOON, async || {
        let now = shims(&pod)?;
        ensure!(now.len() == 1 && now.iter().all(|now| now.pid != shim.pid), "{now:?}");
        Ok(())
    })
    .await?;
    ensure!(pod.is_ready().await?, "the pod ended with its empty shim");
    pod.run(ContainerSpec::sleeping("b")).await?;
    pod.remove().await?;
    no_shim(&pod).await
}

/// As after each container that ends alone, from containerd 2.4 on: the next one is created while
/// there is no socket. Also the third shim within a second comes at once where it is needed.
async fn a_container_waits_for_the_shim_that_follows_an_empty_one(
    harness: Arc<Harness>,
) -> Result<()> {
    let pod = harness.pod("followed").await?;
    for round in 0..3 {
        let shim = one_shim(&pod).await?;
        end_empty(&pod, &shim).await?;
        let container = pod.run(ContainerSpec::sleeping(&format!("c{round}"))).await?;
        container.stop().await?;
        container.remove().await?;
    }
    ensure!(pod.is_ready().await?, "the pod ended with an empty shim");
    removed(&pod).await?;
    no_shim(&pod).await
}

/// Whatever goes wrong before there is a shim is an error in time that names it, and leaves
/// nothing.
pub(crate) async fn a_start_that_fails_is_an_error(harness: Arc<Harness>) -> Result<()> {
    for (word, limit, reason) in [
        ("exit", 8, "cannot continue"),
        ("end", 8, "invalid address"),
        ("hang", 20, "timed out after 10 s"),
        ("chatter", 20, "wrote more than"),
        ("rubbish", 8, "invalid address"),
        ("elsewhere", 20, "connect to shim"),
    ] {
        harness.order(word)?;
        let before = harness.node.snapshot()?;
        let begun = Instant::now();
        let answer = harness.pod(word).await;
        let took = begun.elapsed();
        harness.order("good")?;
        refused(answer, reason).context(word)?;
        ensure!(took < Duration::from_secs(limit), "{word}: took {took:?}");
        harness.node.settles_to(&before).await.context(word)?;
    }
    harness.pod("good").await.context("after the bad ones")?.remove().await
}

async fn a_process_that_a_shim_takes_itself_for_is_not_killed(harness: Arc<Harness>) -> Result<()> {
    let mut other = std::process::Command::new("sleep").arg("1004").spawn()?;
    // The kernel tells the ages of processes in hundredths of a second: what begins in the same one
    // is no older.
    let begun = processes::one(other.id())?.start_time;
    until("the next tick", SOON, async || {
        let uptime = std::fs::read_to_string("/proc/uptime")?;
        let now: u64 = uptime.split(' ').next().context("no uptime")?.replace('.', "").parse()?;
        ensure!(now > begun, "{now}");
        Ok(())
    })
    .await?;
    harness.order("proxy")?;
    harness.misbehave("Connect", &format!("lie {}", other.id()))?;
    let answer = harness.pod("liar").await;
    harness.order("good")?;
    harness.behave()?;
    let lives = other.try_wait()?.is_none();
    other.kill()?;
    other.wait()?;
    refused(answer, "it is older than the call that is to have started it")?;
    ensure!(lives, "a process of another program was killed");
    Ok(())
}

pub(crate) async fn a_shim_that_dies_with_containers_ends_the_pod_too(
    harness: Arc<Harness>,
) -> Result<()> {
    let pod = harness.pod("bereaved").await?;
    let container = pod.run(ContainerSpec::sh("a", "sleep 1000 & sleep 1000")).await?;
    let shim = one_shim(&pod).await?;
    signal(shim.pid, Signal::SIGKILL)?;
    until("not ready", SOON, async || not_ready(&pod).await).await?;
    until("no process of the container", SOON, async || none(&inside(container.id())?)).await?;
    let status = harness.node.sandboxer().status(pod.id(), true).await?;
    let reason = status.info.get("reason").context("no reason in the verbose status")?;
    ensure!(reason.contains("shim"), "reason: {reason}");
    removed(&pod).await?;
    no_shim(&pod).await
}

async fn a_killed_daemon_finds_the_started_shim_again(harness: Arc<Harness>) -> Result<()> {
    let pod = harness.pod("found").await?;
    let container = pod.run(ContainerSpec::sleeping("a")).await?;
    let shim = one_shim(&pod).await?;
    harness.restart().await?;
    ensure!(one_shim(&pod).await?.pid == shim.pid, "another shim");
    ensure!(container.sh("echo hello").await?.trim() == "hello", "exec");
    pod.run(ContainerSpec::sleeping("b")).await?;
    pod.remove().await?;
    no_shim(&pod).await
}

/// containerd takes a lost connection for the end of the container, and the shim's runtime is
/// killed with the call.
pub(crate) async fn an_interrupted_deletion_leaves_nothing(harness: Arc<Harness>) -> Result<()> {
    harness.order("proxy")?;
    let pod = harness.pod("cut").await?;
    let container = pod.run(ContainerSpec::sleeping("a")).await?;
    harness.misbehave("Delete", "cut 1")?;
    // Well or not.
    drop(container.stop().await);
    harness.used_up().await?;
    removed(&pod).await?;
    no_shim(&pod).await
}

/// containerd takes the address over from Status when it is started, also while there is no shim.
async fn an_address_outlives_starts_that_fail(harness: Arc<Harness>) -> Result<()> {
    let pod = harness.pod("addressed").await?;
    let sandboxer = harness.node.sandboxer();
    let address = sandboxer.status(pod.id(), false).await?.address;
    ensure!(!address.is_empty(), "no address");
    let log = harness.node.layout().sandboxer_log();
    harness.order("exit")?;
    signal(one_shim(&pod).await?.pid, Signal::SIGTERM)?;
    let failed = || -> Result<usize> {
        let text = std::fs::read_to_string(&log)?;
        let of_the_pod = text.lines().filter(|line| line.contains(pod.id()));
        Ok(of_the_pod.filter(|line| line.contains("failed to start shim")).count())
    };
    until("a start that failed", SOON, async || {
        ensure!(failed()? > 0, "none");
        Ok(())
    })
    .await?;
    // Others fail as well, and are not worth a line.
    tokio::time::sleep(Duration::from_secs(4)).await;
    ensure!(failed()? == 1, "{} lines of starts that failed", failed()?);
    let status = sandboxer.status(pod.id(), false).await?;
    ensure!(
        (status.address.as_str(), status.state.as_str()) == (address.as_str(), "SANDBOX_READY"),
        "{status:?}"
    );
    // A call that has not made the socket yet is no shim.
    harness.order("slow")?;
    one_shim(&pod).await?;
    pod.run(ContainerSpec::sleeping("a")).await?;
    removed(&pod).await?;
    no_shim(&pod).await
}

/// Its server, and the command that cleans up after it.
pub(crate) async fn a_shim_has_the_variables_that_are_set(harness: Arc<Harness>) -> Result<()> {
    let pod = harness.pod("variables").await?;
    pod.run(ContainerSpec::sleeping("a")).await?;
    let shim = one_shim(&pod).await?;
    let environment = std::fs::read_to_string(format!("/proc/{}/environ", shim.pid))?;
    let set = environment.split('\0').filter(|variable| *variable == "KIT_VARIABLE=set").count();
    ensure!(set == 1, "{environment:?}");
    signal(shim.pid, Signal::SIGKILL)?;
    until("a call that cleans up", SOON, async || {
        ensure!(harness.deleted()? == "set\n");
        Ok(())
    })
    .await?;
    removed(&pod).await?;
    no_shim(&pod).await
}
