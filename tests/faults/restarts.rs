//! Both daemons are restarted under real pods of a real containerd.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixListener;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use kit::cri::api;
use kit::machine::processes;
use kit::{ContainerSpec, Cri, Handler, Node, Pod, PodSpec, grpc, until};
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::task::JoinSet;

use crate::harness::{Case, on_node};
use kit::strace::strace;

/// Hundreds of pods and containers on a small machine.
const LIMIT: Duration = Duration::from_secs(400);

pub(crate) fn cases() -> Vec<Case> {
    let cases = on_node![
        node_sandboxer_restarts_with_many_pods,
        node_containerd_restarts,
        node_hung_sandboxer_is_killed
    ];
    cases.into_iter().map(|case| case.within(LIMIT)).collect()
}

/// A node has about as many pods.
const PODS: u32 = 100;
const CLIENTS: usize = 8;

/// Runs `work` on every pod, some side by side.
async fn on_all<F>(pods: &[Pod], work: impl Fn(Pod) -> F) -> Result<()>
where
    F: Future<Output = Result<()>> + Send + 'static,
{
    let mut under_way = JoinSet::new();
    for pod in pods {
        if under_way.len() == CLIENTS
            && let Some(ended) = under_way.join_next().await
        {
            ended??;
        }
        under_way.spawn(work(pod.clone()));
    }
    while let Some(ended) = under_way.join_next().await {
        ended??;
    }
    Ok(())
}

/// Checks that a container can be created in each of these pods, and runs.
async fn take_containers(pods: &[Pod], attempt: u32) -> Result<()> {
    on_all(pods, move |pod| async move {
        let container = pod.run(ContainerSpec::sleeping("after").attempt(attempt)).await?;
        ensure!(container.sh("echo runs").await? == "runs\n", "the container does not run");
        container.stop().await?;
        container.remove().await
    })
    .await
}

async fn pids(node: &Node, pods: &[Pod]) -> Result<BTreeMap<String, u32>> {
    let controller = node.sandboxer();
    let mut pids = BTreeMap::new();
    for pod in pods {
        pids.insert(pod.id().to_owned(), controller.status(pod.id(), false).await?.pid);
    }
    Ok(pids)
}

async fn ready(node: &Node) -> Result<BTreeSet<String>> {
    let filter = api::PodSandboxFilter {
        state: Some(api::PodSandboxStateValue {
            state: api::PodSandboxState::SANDBOX_READY.into(),
            ..Default::default()
        })
        .into(),
        ..Default::default()
    };
    Ok(node.cri().list_pod_sandbox(filter).await?.into_iter().map(|pod| pod.id).collect())
}

/// The ids of sandboxes whose exit containerd has logged.
fn exits(node: &Node) -> Result<BTreeSet<String>> {
    let log = fs::read(node.layout().containerd_log())?;
    let reported = String::from_utf8_lossy(&log).into_owned();
    let lines =
        reported.lines().filter(|line| line.contains("received sandbox container exit event"));
    let word = |line: &str| {
        line.split(|c: char| !c.is_ascii_hexdigit()).find(|w| w.len() == 64).map(str::to_owned)
    };
    Ok(lines.filter_map(word).collect())
}

/// Several clients run the pods side by side.
async fn run_many(node: &Arc<Node>) -> Result<Vec<Pod>> {
    let how_many = kit::fewer("pods", PODS) as usize;
    let mut clients = JoinSet::new();
    for client in 0..CLIENTS {
        let node = Arc::clone(node);
        clients.spawn(async move {
            let cri = Cri::new(node.layout().containerd_socket());
            let mut pods = Vec::new();
            for number in (client..how_many).step_by(CLIENTS) {
                let home = node.prepare(PodSpec::new(&format!("pod-{number}")).host_network())?;
                let id = cri.run_pod_sandbox(home.config(), Handler::Ours.name()).await?;
                pods.push(Pod::new(&node, Handler::Ours, home, id));
            }
            anyhow::Ok(pods)
        });
    }
    let mut pods: Vec<Pod> = Vec::new();
    while let Some(ended) = clients.join_next().await {
        pods.extend(ended??);
    }
    Ok(pods)
}

/// The sandboxer is restarted by SIGTERM, by SIGKILL and into another binary, with a Wait pending
/// on every pod. Each time a pause dies meanwhile.
///
/// Promise: restart_loses_no_pod.
async fn node_sandboxer_restarts_with_many_pods(node: Arc<Node>) -> Result<()> {
    let mut pods = run_many(&node).await?;
    let before = pids(&node, &pods).await?;
    let exits_before = exits(&node)?;
    let newer = node.layout().top.join("newer-sandboxer");
    let mut dead: Vec<Pod> = Vec::new();
    for (round, how) in ["SIGTERM", "SIGKILL", "a newer binary"].into_iter().enumerate() {
        let controller = Arc::new(node.sandboxer());
        let mut waits = JoinSet::new();
        for pod in &pods {
            let (controller, id) = (Arc::clone(&controller), pod.id().to_owned());
            waits.spawn(async move { controller.wait(&id).await });
        }
        // On the same connection, so behind all of them.
        while waits.try_join_next().is_some() {}
        tokio::task::yield_now().await;
        for pod in &pods {
            controller.status(pod.id(), false).await?;
        }
        ensure!(waits.len() == pods.len(), "{how}: a Wait ended before the restart");

        if how == "SIGTERM" {
            node.stop_sandboxer().await?
        } else {
            node.kill_sandboxer()?
        }
        while let Some(ended) = waits.join_next().await {
            match ended? {
                Err(status) if status.code == grpc::UNAVAILABLE => {}
                other => bail!("{how}: a Wait ended in {other:?}"),
            }
        }
        let victim = pods.swap_remove(round * pods.len() / 3);
        kill(Pid::from_raw(before[victim.id()].cast_signed()), Signal::SIGKILL)?;
        if how == "a newer binary" {
            let old = node.sandboxer_command()?;
            fs::copy(old.get_program(), &newer)?;
            let mut command = Command::new(&newer);
            command.args(old.get_args());
            node.start_sandboxer_as(command).await?;
        } else {
            node.start_sandboxer().await?;
        }

        let expected: BTreeSet<String> = pods.iter().map(|pod| pod.id().to_owned()).collect();
        until("the death is reported", Duration::from_secs(20), async || {
            ensure!(!victim.is_ready().await?, "it is ready");
            ensure!(exits(&node)?.contains(victim.id()), "containerd has not heard of it");
            Ok(())
        })
        .await
        .context(how)?;
        dead.push(victim);
        // A third of the pods after each restart, so that each takes a container after one.
        let share = pods.len().div_ceil(3);
        let third = pods.chunks(share).nth(round).unwrap_or_default();
        take_containers(third, u32::try_from(round)?).await.context(how)?;
        ensure!(ready(&node).await? == expected, "{how}: not all are ready");
        let now = pids(&node, &pods).await?;
        ensure!(now.iter().all(|(id, pid)| before[id] == *pid), "{how}: a pause has another pid");
        let reported: BTreeSet<String> = exits(&node)?.difference(&exits_before).cloned().collect();
        let died: BTreeSet<String> = dead.iter().map(|pod| pod.id().to_owned()).collect();
        ensure!(
            reported == died,
            "{how}: containerd has logged exits of {reported:?}, but {died:?} have died"
        );
    }
    pods.extend(dead);
    on_all(&pods, |pod| async move { pod.remove().await }).await?;
    // The next case finds the usual binary.
    node.stop_sandboxer().await?;
    fs::remove_file(newer)?;
    node.start_sandboxer().await
}

/// containerd alone, both at once, the sandboxer slow to take over its pods, and late: behind a
/// socket that a service manager holds.
///
/// containerd waits about a second for the first answer of a socket. What it could not ask about by
/// then is Unknown to it: the pod is listed as not ready although its own status is ready and its
/// containers run, but it starts no further one until containerd is restarted once more.
///
/// Promise: restart_loses_no_pod.
async fn node_containerd_restarts(node: Arc<Node>) -> Result<()> {
    for how in ["alone", "killed alone", "both", "slow", "late", "too late"] {
        let pods = [
            node.run(Handler::Ours, PodSpec::new("network").dns(&["10.0.0.10"], &[], &[])).await?,
            node.run(
                Handler::Ours,
                PodSpec::new("host").host_network().dns(&["10.0.0.10"], &[], &[]),
            )
            .await?,
        ];
        let mut before = Vec::new();
        for pod in &pods {
            let old = pod.run(ContainerSpec::sleeping("old")).await?;
            old.sh("echo kept > /dev/shm/file").await?;
            let files = old.sh("cat /etc/hosts /etc/resolv.conf /etc/hostname").await?;
            before.push((old, files, pod.pause_pid().await?, pod.status().await?.created_at));
        }
        restart(&node, how).await.context(how)?;
        if how == "too late" {
            ensure!(ready(&node).await?.is_empty(), "too late: listed as ready");
            for (pod, (old, _, pause, _)) in pods.iter().zip(&before) {
                ensure!(
                    pod.is_ready().await? && pod.pause_pid().await? == *pause,
                    "too late: not ready"
                );
                ensure!(old.sh("cat /dev/shm/file").await? == "kept\n", "too late: its container");
            }
            restart(&node, "alone").await.context("once more")?;
        }
        for (pod, (old, files, pause, created_at)) in pods.iter().zip(before) {
            let name = &pod.config().metadata.name;
            until("ready", Duration::from_secs(10), async || {
                ensure!(pod.is_ready().await?, "{how}: {name} is not ready");
                Ok(())
            })
            .await?;
            ensure!(pod.pause_pid().await? == pause, "{how}: {name} has another pause");
            ensure!(
                pod.status().await?.created_at == created_at,
                "{how}: {name} has another time of creation"
            );
            let new = pod
                .run(ContainerSpec::sleeping("new"))
                .await
                .with_context(|| format!("{how}: {name}"))?;
            for container in [&old, &new] {
                ensure!(
                    container.sh("cat /dev/shm/file").await? == "kept\n",
                    "{how}: {name}: shared memory"
                );
                let now = container.sh("cat /etc/hosts /etc/resolv.conf /etc/hostname").await?;
                ensure!(now == files, "{how}: {name}: files are\n{now}not\n{files}");
            }
            new.sh("echo more > /dev/shm/file").await?;
            ensure!(
                old.sh("cat /dev/shm/file").await? == "more\n",
                "{how}: {name}: not the same shared memory"
            );
        }
        for pod in pods {
            pod.remove().await?;
        }
        if how == "slow" {
            // The daemon is not traced any more, because the shims that it launches would be too.
            node.kill_sandboxer()?;
            node.start_sandboxer().await?;
        }
    }
    Ok(())
}

/// How often containerd has logged that it has recovered its pods and serves.
fn boots(node: &Node) -> Result<usize> {
    let log = fs::read(node.layout().containerd_log())?;
    Ok(String::from_utf8_lossy(&log).matches("containerd successfully booted").count())
}

async fn restart(node: &Arc<Node>, how: &str) -> Result<()> {
    match how {
        "alone" => {
            node.stop_containerd().await?;
            node.start_containerd().await
        }
        "killed alone" => {
            node.kill_containerd()?;
            node.start_containerd().await
        }
        "both" | "slow" => {
            node.kill_containerd()?;
            node.kill_sandboxer()?;
            // The order of their units: the sandboxer is there first.
            let plain = node.sandboxer_command()?;
            let command = if how == "slow" {
                let mut traced = strace(&["pidfd_open:delay_enter=4s:when=1"]);
                traced.arg("-D").arg(plain.get_program()).args(plain.get_args());
                traced
            } else {
                plain
            };
            let starting = Arc::clone(node);
            let sandboxer = tokio::spawn(async move { starting.start_sandboxer_as(command).await });
            until("the sandboxer's socket", Duration::from_secs(10), async || {
                Ok(tokio::net::UnixStream::connect(node.layout().sandboxer_socket())
                    .await
                    .map(drop)?)
            })
            .await?;
            node.start_containerd().await?;
            sandboxer.await?
        }
        _ => {
            node.stop_containerd().await?;
            node.stop_sandboxer().await?;
            let listener = hold_socket(node)?;
            let command = command_with_socket(node, &listener)?;
            let boots_before = boots(node)?;
            let starting = Arc::clone(node);
            let containerd = tokio::spawn(async move { starting.start_containerd().await });
            if how == "late" {
                // It waits a second for the answer to its first call, which it has not made yet on
                // a slow machine.
                tokio::time::sleep(Duration::from_millis(300)).await;
            } else {
                // It has given up on the sandboxer by then, however slow the machine is.
                until("containerd has booted", LIMIT, async || {
                    ensure!(containerd.is_finished() || boots(node)? > boots_before, "it has not");
                    Ok(())
                })
                .await?;
            }
            node.start_sandboxer_as(command).await?;
            containerd.await??;
            drop(listener);
            Ok(())
        }
    }
}

/// Holds the sandboxer's socket as a service manager does.
fn hold_socket(node: &Node) -> Result<UnixListener> {
    let path = node.layout().sandboxer_socket();
    let _ = fs::remove_file(&path);
    let listener = UnixListener::bind(&path)?;
    fcntl(&listener, FcntlArg::F_SETFD(FdFlag::empty()))?;
    Ok(listener)
}

/// The sandboxer's command, which gets the socket as descriptor 3.
fn command_with_socket(node: &Node, listener: &UnixListener) -> Result<Command> {
    let plain = node.sandboxer_command()?;
    let mut command = Command::new("/bin/bash");
    let script = format!("LISTEN_PID=$$ LISTEN_FDS=1 exec \"$@\" 3<&{}", listener.as_raw_fd());
    command.args(["-c", &script, "bash"]).arg(plain.get_program()).args(plain.get_args());
    Ok(command)
}

/// The daemon hangs and is killed, as by the watchdog of a service manager. No pod is harmed, and
/// no caller waits longer than the daemon hangs.
///
/// Promise: restart_loses_no_pod.
async fn node_hung_sandboxer_is_killed(node: Arc<Node>) -> Result<()> {
    /// How long it hangs.
    const HANGS: Duration = Duration::from_secs(3);
    /// Between its end and the next one: `RestartSec=` of the packaged unit.
    const RESTART: Duration = Duration::from_millis(500);
    for socket_is_held in [false, true] {
        node.stop_sandboxer().await?;
        let listener = socket_is_held.then(|| hold_socket(&node)).transpose()?;
        let command = || match &listener {
            Some(listener) => command_with_socket(&node, listener),
            None => node.sandboxer_command(),
        };
        node.start_sandboxer_as(command()?).await?;
        let pod = node.run(Handler::Ours, PodSpec::new("hung").host_network()).await?;
        let stays = pod.run(ContainerSpec::sleeping("stays")).await?;
        let ends = pod.run(ContainerSpec::sleeping("ends")).await?;
        let pause = pod.pause_pid().await?;
        let all = processes::all()?;
        let process = all.iter().find(|process| process.cgroups.contains(ends.id()));
        let process = process.context("no process of the container")?.pid;
        processes::stop(node.sandboxer_pid()?).await?;

        let (cri, id) = (node.clone(), pod.id().to_owned());
        let pending = tokio::spawn(async move { cri.cri().pod_sandbox_status(&id, false).await });
        kill(Pid::from_raw(process.cast_signed()), Signal::SIGKILL)?;
        tokio::time::sleep(HANGS).await;
        ensure!(!pending.is_finished(), "Status was answered by a daemon that hangs");
        node.kill_sandboxer()?;
        let answer = pending.await?.map(drop);
        ensure!(unavailable(&answer), "the pending call: {answer:?}");
        if !socket_is_held {
            let refused = node.cri().pod_sandbox_status(pod.id(), false).await.map(drop);
            ensure!(unavailable(&refused), "without a socket: {refused:?}");
        }
        let (starts, again) = (node.clone(), command()?);
        let starting = tokio::spawn(async move {
            tokio::time::sleep(RESTART).await;
            starts.start_sandboxer_as(again).await
        });
        if socket_is_held {
            // It waits for the next daemon.
            pod.is_ready().await?;
        }
        starting.await??;
        ensure!(pod.is_ready().await? && pod.pause_pid().await? == pause, "its pod is another");
        stays.sh("true").await?;
        ensure!(ends.exited(LIMIT).await? == 137, "the exit is another");
        pod.remove().await?;
    }
    node.stop_sandboxer().await?;
    node.start_sandboxer().await
}

fn unavailable(answer: &Result<(), grpc::Status>) -> bool {
    answer.as_ref().is_err_and(|status| status.code == grpc::UNAVAILABLE)
}
