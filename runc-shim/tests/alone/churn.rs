//! Groups of containers while shims and containerd are killed at random. CHURN_CONTAINERS is the
//! number of containers; CHURN_SEED repeats the choices of a run.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use futures::future::{join, try_join_all};
use kit::{Dice, Node, Snapshot, Thing, until};

use crate::ctr::{ctr, run_container};
use crate::{SOON, kill, run_within, shims};

/// Groups at a time.
const AT_ONCE: usize = 4;
/// How many containers a group has at most.
const LARGEST: usize = 4;
/// How many containers are to run from one kill to the next, at most.
const BETWEEN_KILLS: usize = 6;
/// How long the removal of a container may take, with restarts of containerd in between.
const REMOVAL: Duration = Duration::from_secs(60);

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().unwrap())
}

/// The groups: their names and the ids of their containers.
fn groups(containers: usize, dice: &mut Dice) -> Vec<(String, Vec<String>)> {
    let mut groups = Vec::new();
    let mut made = 0;
    while made < containers {
        let size = (1 + dice.below(LARGEST)).min(containers - made);
        let name = format!("g{}", groups.len());
        let ids = (0..size).map(|number| format!("{name}-{number}")).collect();
        groups.push((name, ids));
        made += size;
    }
    groups
}

/// Runs `ctr` while other groups do.
#[allow(clippy::disallowed_methods, reason = "the pool is the daemon's")]
async fn elsewhere<T: Send + 'static>(
    node: &Arc<Node>,
    call: impl FnOnce(&Node) -> Result<T> + Send + 'static,
) -> Result<T> {
    let node = Arc::clone(node);
    tokio::task::spawn_blocking(move || call(&node)).await?
}

/// Runs a group's containers, of which any may fail, and removes them.
async fn life(node: &Arc<Node>, group: &str, ids: &[String], progress: &Progress) -> Result<()> {
    for id in ids {
        let (label, id) = (format!("io.containerd.runc.v2.group={group}"), id.clone());
        let ran = elsewhere(node, move |node| {
            loop {
                let words = ["-d", "--annotation", &label];
                let output = run_container(node, &id, &words, "exec sleep 1000")?;
                // While containerd does not run, nothing has begun.
                if !String::from_utf8_lossy(&output.stderr).contains("while dialing") {
                    return Ok(output.status.success());
                }
            }
        });
        progress.ran.fetch_add(usize::from(ran.await?), Ordering::Relaxed);
        progress.tried.fetch_add(1, Ordering::Relaxed);
    }
    try_join_all(ids.iter().map(|id| {
        let id = id.clone();
        elsewhere(node, move |node| remove(node, &id))
    }))
    .await?;
    Ok(())
}

fn remove(node: &Node, id: &str) -> Result<()> {
    let end = Instant::now() + kit::patient(REMOVAL);
    loop {
        let task = ctr(node, &["tasks", "rm", "-f", id])?;
        let container = ctr(node, &["containers", "rm", id])?;
        let listed = ctr(node, &["containers", "ls", "-q"])?;
        let is_listed = String::from_utf8_lossy(&listed.stdout).lines().any(|line| line == id);
        if listed.status.success() && !is_listed {
            return Ok(());
        }
        if Instant::now() >= end {
            bail!("{id} is not removed: {task:?}, {container:?}");
        }
    }
}

/// How far the groups are.
#[derive(Default)]
struct Progress {
    /// Containers that were to run, and those that did.
    tried: AtomicUsize,
    ran: AtomicUsize,
    is_over: AtomicBool,
}

/// Kills a shim or containerd, again and again after some containers, until the groups are done.
/// Returns how many of each.
async fn kills(node: &Node, dice: &mut Dice, progress: &Progress) -> Result<(usize, usize)> {
    let (mut killed_shims, mut killed_containerds, mut next) = (0, 0, 1);
    while !progress.is_over.load(Ordering::Relaxed) {
        if progress.tried.load(Ordering::Relaxed) < next {
            tokio::time::sleep(Duration::from_millis(5)).await;
            continue;
        }
        next += 1 + dice.below(BETWEEN_KILLS);
        // A short run kills each.
        if killed_containerds == 0 || dice.below(8) == 0 {
            node.kill_containerd()?;
            node.start_containerd().await?;
            killed_containerds += 1;
        } else {
            let shims = shims(node)?;
            if !shims.is_empty() {
                // It may have ended meanwhile.
                killed_shims += usize::from(kill(&shims[dice.below(shims.len())]).is_ok());
            }
        }
    }
    Ok((killed_shims, killed_containerds))
}

/// Promise: shim_works_alone.
#[test]
fn random_kills_leave_nothing() {
    let containers = usize::try_from(number("CHURN_CONTAINERS").unwrap_or(40)).unwrap();
    let clock = std::time::UNIX_EPOCH.elapsed().unwrap().as_secs();
    let seed = number("CHURN_SEED").unwrap_or(clock);
    println!("CHURN_CONTAINERS={containers} CHURN_SEED={seed}");
    // Much more than it takes.
    let limit = Duration::from_secs(120 + 2 * u64::try_from(containers).unwrap());
    run_within(limit, async |node| {
        let mut dice = Dice(seed.max(1));
        let groups = groups(containers, &mut dice);
        let (progress, next) = <(Progress, AtomicUsize)>::default();
        let lane = async |_| -> Result<()> {
            while let Some((name, ids)) = groups.get(next.fetch_add(1, Ordering::Relaxed)) {
                life(node, name, ids, &progress).await.with_context(|| name.clone())?;
            }
            Ok(())
        };
        let lives = async {
            let done = try_join_all((0..AT_ONCE).map(lane)).await;
            progress.is_over.store(true, Ordering::Relaxed);
            done
        };
        let (lived, killed) = join(lives, kills(node, &mut dice, &progress)).await;
        lived?;
        let (shims_killed, containerds_killed) = killed?;
        let ran = progress.ran.into_inner();
        println!("{ran} ran, {shims_killed} shims and {containerds_killed} containerds killed");
        nothing_is_left(node, &groups).await?;
        ensure!(ran * 4 > containers, "{ran} of {containers} containers ran");
        ensure!(shims_killed > 0 && containerds_killed > 0, "nothing was killed");
        Ok(())
    });
}

async fn nothing_is_left(node: &Node, groups: &[(String, Vec<String>)]) -> Result<()> {
    until("nothing is left", SOON, async || {
        let sockets = groups.iter().map(|(group, _)| node.layout().shim_socket(group));
        let left: Vec<_> = sockets.filter(|socket| socket.exists()).collect();
        let shims = shims(node)?;
        ensure!(left.is_empty() && shims.is_empty(), "{left:?}, {shims:?}");
        Ok(())
    })
    .await?;
    // containerd renames a bundle before it removes it, and forgets one if it is killed in between.
    let bundles = node.layout().state().join("io.containerd.runtime.v2.task/k8s.io");
    until("no renamed bundle", SOON, async || {
        for entry in fs::read_dir(&bundles)? {
            let entry = entry?;
            if entry.file_name().as_encoded_bytes().starts_with(b".") {
                fs::remove_dir_all(entry.path())?;
            }
        }
        Ok(())
    })
    .await?;
    // A snapshot or lease of a `ctr run` that was interrupted is not the shim's.
    let left = node.left_since(&Snapshot::default(), Duration::ZERO).await?;
    let records: Vec<_> = left.into_iter().filter(|it| matches!(it, Thing::Record(..))).collect();
    let of_tasks = records.iter().filter(|it| matches!(it, Thing::Record(_, "task" | "container")));
    ensure!(of_tasks.count() == 0, "{records:?}");
    node.remove_left(&records).await
}
