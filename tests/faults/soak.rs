//! Random pods, restarts and deaths for a while; then nothing is left, and the daemon is as small
//! as before.

use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use kit::cri::api;
use kit::{ContainerSpec, Dice, Handler, Node, Pod, PodSpec, until};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::harness::{Case, on_node};

/// Seconds, where `SOAK_SECONDS` does not say otherwise.
const SECONDS: u64 = 30;
/// Pods at once, at most.
const MOST: usize = 12;
/// The permitted growth of the daemon, KiB: allocators keep a part of what they had.
const GROWN: u64 = 2048;

pub(crate) fn cases() -> Vec<Case> {
    let cases = on_node![node_soak];
    cases.into_iter().map(|case| case.within(Duration::from_secs(seconds() + 240))).collect()
}

fn seconds() -> u64 {
    std::env::var("SOAK_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(SECONDS)
}

/// Proportional memory that is no file's, in KiB, and open descriptors.
fn weigh(pid: u32) -> Result<(u64, usize)> {
    let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
    let pss =
        rollup.lines().find_map(|line| line.strip_prefix("Pss_Anon:")).context("no Pss_Anon")?;
    let kib = pss.split_whitespace().next().context("no Pss")?.parse()?;
    Ok((kib, fs::read_dir(format!("/proc/{pid}/fd"))?.count()))
}

/// Promise: removal_leaves_nothing.
async fn node_soak(node: Arc<Node>) -> Result<()> {
    let seed = match std::env::var("SOAK_SEED") {
        Ok(text) => text.parse().context("SOAK_SEED")?,
        Err(_) => {
            std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?.as_millis() as u64
        }
    };
    eprintln!("soak: {} s, SOAK_SEED={seed}", seconds());
    soak(&node, seed).await.with_context(|| format!("SOAK_SEED={seed}"))
}

struct Living {
    pod: Pod,
    pid: u32,
    killed: bool,
    containers: u32,
}

async fn soak(node: &Arc<Node>, seed: u64) -> Result<()> {
    let mut dice = Dice(seed | 1);
    let mut living: Vec<Living> = Vec::new();
    // The daemon is measured after a while of the same work, without pods: a daemon that was just
    // started is smaller than one that has worked.
    node.stop_sandboxer().await?;
    node.start_sandboxer().await?;
    churn(node, &mut dice, &mut living, Duration::from_secs(5), false).await?;
    clear(&mut living).await?;
    settled(node).await?;
    let before = weigh(node.sandboxer_pid()?)?;

    // The daemon that is weighed lives through half of the time without a restart.
    let time = Duration::from_secs(seconds());
    churn(node, &mut dice, &mut living, time / 2, true).await?;
    clear(&mut living).await?;
    node.stop_sandboxer().await?;
    node.start_sandboxer().await?;
    churn(node, &mut dice, &mut living, Duration::from_secs(5), false).await?;
    churn(node, &mut dice, &mut living, time / 2, false).await?;
    clear(&mut living).await?;
    settled(node).await?;
    let last = until("the daemon is as it was", Duration::from_secs(30), async || {
        let now = weigh(node.sandboxer_pid()?)?;
        ensure!(
            now.0 <= before.0 + GROWN && now.1 <= before.1,
            "{before:?} KiB and descriptors before, {now:?} now"
        );
        Ok(now)
    })
    .await?;
    eprintln!("soak: {before:?} KiB and descriptors before, {last:?} after");
    Ok(())
}

/// Containers' streams end a little after the last pod, blocking threads after 8 seconds: but
/// for those that the watchdog's looks, two in that time, keep for a node without free process ids.
async fn settled(node: &Node) -> Result<()> {
    until("no pod is listed", Duration::from_secs(20), async || {
        let listed = node.cri().list_pod_sandbox(api::PodSandboxFilter::new()).await?;
        ensure!(listed.is_empty(), "{} are", listed.len());
        Ok(())
    })
    .await?;
    let pid = node.sandboxer_pid()?;
    until("the daemon is idle", Duration::from_secs(90), async || {
        let threads = fs::read_dir(format!("/proc/{pid}/task"))?.count();
        ensure!(threads <= 6, "{threads} threads");
        Ok(())
    })
    .await
}

async fn churn(
    node: &Arc<Node>,
    dice: &mut Dice,
    living: &mut Vec<Living>,
    time: Duration,
    restarts: bool,
) -> Result<()> {
    let (begun, mut done) = (Instant::now(), [0_u32; 7]);
    while begun.elapsed() < time {
        let what = dice.below(100);
        let which = (!living.is_empty()).then(|| dice.below(living.len()));
        match (what, which) {
            (0..35, _) | (_, None) if living.len() < MOST => {
                let spec = PodSpec::new(&format!("soak-{}", dice.below(1 << 30)));
                let spec = if dice.below(3) == 0 { spec } else { spec.host_network() };
                let pod = node.run(Handler::Ours, spec).await?;
                let pid = node.sandboxer().status(pod.id(), false).await?.pid;
                living.push(Living { pod, pid, killed: false, containers: 0 });
                done[0] += 1;
            }
            (35..60, Some(at)) => {
                living.swap_remove(at).pod.remove().await?;
                done[1] += 1;
            }
            (60..75, Some(at)) if !living[at].killed => {
                let one = &mut living[at];
                one.containers += 1;
                let container =
                    one.pod.run(ContainerSpec::sleeping("main").attempt(one.containers)).await?;
                ensure!(
                    container.sh("cat /etc/hosts >/dev/null && echo runs").await? == "runs\n",
                    "it does not run"
                );
                done[2] += 1;
            }
            (75..85, Some(at)) if !living[at].killed => {
                kill(Pid::from_raw(living[at].pid.cast_signed()), Signal::SIGKILL)?;
                living[at].killed = true;
                done[3] += 1;
            }
            (85..88, _) if restarts => {
                node.stop_sandboxer().await?;
                node.start_sandboxer().await?;
                done[4] += 1;
            }
            (88..91, _) if restarts => {
                node.kill_sandboxer()?;
                node.start_sandboxer().await?;
                done[5] += 1;
            }
            (91..93, _) if restarts => {
                if dice.below(2) == 0 {
                    node.kill_containerd()?
                } else {
                    node.stop_containerd().await?
                }
                node.start_containerd().await?;
                done[6] += 1;
            }
            _ => {
                for one in living.iter().filter(|one| !one.killed) {
                    check(one).await?;
                }
            }
        }
    }
    let [run, removed, containers, killed, terminated, shot, restarted] = done;
    eprintln!(
        "soak: {run} pods run, {removed} removed, {containers} containers, {killed} pauses killed, \
         sandboxer ended {terminated} times and \
         killed {shot} times, containerd restarted {restarted} times"
    );
    check_all(living).await
}

/// Each pod is alive and reported as alive, or its death is reported.
async fn check_all(living: &[Living]) -> Result<()> {
    for one in living {
        if one.killed {
            until("its death is reported", Duration::from_secs(20), async || {
                ensure!(
                    !one.pod.is_ready().await?,
                    "{} is ready, and its pause is dead",
                    one.pod.id()
                );
                Ok(())
            })
            .await?;
        } else {
            check(one).await?;
        }
    }
    Ok(())
}

/// Checks that a pod is alive, and reported as alive.
async fn check(one: &Living) -> Result<()> {
    let id = one.pod.id();
    if !one.pod.is_ready().await? {
        bail!("{id} is not ready, and its pause was not killed");
    }
    let pid = one.pod.node().sandboxer().status(id, false).await?.pid;
    ensure!(pid == one.pid, "{id}: pid {pid}, it was {}", one.pid);
    Ok(())
}

async fn clear(living: &mut Vec<Living>) -> Result<()> {
    for one in living.drain(..) {
        one.pod.remove().await?;
    }
    Ok(())
}
