//! `make demo`: a pod with two containers on a real containerd, from its start to its end, and what
//! pods cost in memory and time.
//!
//! usage: demo PAUSE-SANDBOXER-BINARY

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use kit::cri::api::NamespaceMode;
use kit::machine::processes::{self, Proc};
use kit::{ContainerSpec, Handler, Node, Options, PodSpec, until};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Pods of each kind that are run to be timed.
const ROUNDS: usize = 11;

/// Pods of each handler whose memory is compared.
const PODS: usize = 20;

/// The names of pause processes and shims, as the kernel cuts them.
const OVERHEAD: [&str; 3] = ["pause", "containerd-shim", "runc-shim"];

#[tokio::main]
async fn main() -> Result<()> {
    let sandboxer = std::env::args_os().nth(1).context("usage: demo PAUSE-SANDBOXER-BINARY")?;
    title("A node: a real containerd with root, state and sockets of its own, and this sandboxer");
    let node =
        Node::start(Options { sandboxer: Some(sandboxer.into()), ..Options::default() }).await?;
    node.start_sandboxer().await?;
    let version = node.cri().version().await?;
    say(&format!(
        "{} {} in {}",
        version.runtime_name,
        version.runtime_version,
        node.layout().top.display()
    ));
    // containerd and CNI make some directories with the first pod and keep them.
    let first = node.run(Handler::Ours, PodSpec::new("first")).await?;
    first.run(ContainerSpec::sleeping("main")).await?;
    first.remove().await?;
    let clean = node.snapshot()?;
    let before = processes::all()?;
    show_processes("its processes", &of_node(&before, &node));

    title("A pod with two containers, run through CRI");
    let pod = node
        .run(Handler::Ours, PodSpec::new("demo").hostname("demo-pod").pid(NamespaceMode::POD))
        .await?;
    show_processes("new with the idle pod: its pause, and no shim", &new_since(&before, &node)?);
    let web = pod.run(ContainerSpec::sleeping("web")).await?;
    let log = pod.run(ContainerSpec::sleeping("log")).await?;
    say(&format!("sandbox {} at {}", &pod.id()[..12], pod.ip().await?));
    say(&format!(
        "hostname in web: {}, in log: {}",
        web.sh("hostname").await?.trim(),
        log.sh("hostname").await?.trim()
    ));
    web.sh("echo written by web > /dev/shm/word").await?;
    say(&format!("/dev/shm/word as log reads it: {}", log.sh("cat /dev/shm/word").await?.trim()));
    say("processes as log sees them, in the pod's one PID namespace:");
    for line in log.sh("ps -o pid,user,args").await?.lines() {
        say(&format!("    {line}"));
    }
    show_processes("new on the node with both containers", &new_since(&before, &node)?);

    title("The pause is killed");
    let pid = pod.pause_pid().await?;
    say(&format!("pid {pid}; ready: {}", pod.is_ready().await?));
    kill(Pid::from_raw(i32::try_from(pid)?), Signal::SIGKILL)?;
    until("the pod is not ready", Duration::from_secs(10), async || {
        let ready = pod.is_ready().await?;
        ensure!(!ready, "it still is");
        Ok(())
    })
    .await?;
    say(&format!("ready: {}", pod.is_ready().await?));
    for container in [&web, &log] {
        container.exited(Duration::from_secs(10)).await?;
    }
    say("both containers ended with it, the init of their PID namespace");

    title("Everything is removed");
    pod.remove().await?;
    node.settles_to(&clean).await.context("something is left of the pod")?;
    say("no process, shim, mount, network namespace, cgroup, socket or directory of the pod is \
         left");

    compare_memory(&node).await?;
    compare_times(&node).await
}

async fn compare_memory(node: &Arc<Node>) -> Result<()> {
    title("What the pods' own processes need");
    say(&format!(
        "shims and pause processes of {PODS} pods with one container each, without the containers:"
    ));
    say(&format!("    {:<14} {:>9} {:>15} {:>7}", "", "built-in", "pause-sandboxer", "ratio"));
    let [builtin, ours] =
        [memory(node, Handler::Builtin).await?, memory(node, Handler::Ours).await?];
    for (name, pods) in [("one pod", 1.0), ("110 pods", 110.0)] {
        let [builtin, ours] = [builtin, ours].map(|kilobytes| kilobytes * pods / 1e3);
        say(&format!("    {name:<14} {builtin:>6.1} MB {ours:>12.1} MB {:>6.1}x", builtin / ours));
    }
    let daemon = processes::pss(node.sandboxer_pid()?)? / 1e3;
    say(&format!(
        "110 is kubelet's limit, calculated; the daemon needs {daemon:.1} MB for all pods"
    ));
    Ok(())
}

async fn compare_times(node: &Arc<Node>) -> Result<()> {
    title("What RunPodSandbox takes");
    say(&format!(
        "median of {ROUNDS} pods each, built-in and this sandboxer in turn, in milliseconds:"
    ));
    say(&format!("    {:<14} {:>9} {:>15} {:>7}", "", "built-in", "pause-sandboxer", "ratio"));
    let host = timed(node, || PodSpec::new("host").host_network()).await?;
    row("host network", host);
    let bridged = timed(node, || PodSpec::new("bridge")).await?;
    row("bridge (CNI)", bridged);
    say("most of the bridged pod's time is CNI's, which is the same for both");
    say("\nthe demo is compiled without optimisation; the release build, that of `make bench`,");
    say("needs less memory and time");
    Ok(())
}

/// Memory of the shim and the pause process of a pod with one container, kilobytes.
async fn memory(node: &Arc<Node>, handler: Handler) -> Result<f64> {
    let (before, mut pods) = (processes::all()?, Vec::new());
    for number in 0..PODS {
        let pod = node.run(handler, PodSpec::new(&format!("memory-{number}"))).await?;
        pod.run(ContainerSpec::sleeping("main")).await?;
        pods.push(pod);
    }
    let mut overhead = new_since(&before, node)?;
    overhead.retain(|process| OVERHEAD.contains(&&*process.comm));
    ensure!(overhead.len() == 2 * PODS, "not a shim and a pause process each: {overhead:?}");
    let sum = overhead.iter().map(|process| processes::pss(process.pid)).sum::<Result<f64>>()?;
    for pod in pods {
        pod.remove().await?;
    }
    Ok(sum / PODS as f64)
}

/// Median times of RunPodSandbox by the built-in controller and by this sandboxer.
async fn timed(node: &Arc<Node>, spec: impl Fn() -> PodSpec) -> Result<[Duration; 2]> {
    let mut times = [Vec::new(), Vec::new()];
    for round in 0..=ROUNDS {
        for (times, handler) in times.iter_mut().zip(Handler::ALL) {
            let home = node.prepare(spec())?;
            let begun = Instant::now();
            let id = node.cri().run_pod_sandbox(home.config(), handler.name()).await?;
            let taken = begun.elapsed();
            kit::Pod::new(node, handler, home, id).remove().await?;
            // The first of each warms up.
            if round > 0 {
                times.push(taken);
            }
        }
    }
    Ok(times.map(|mut times| {
        times.sort_unstable();
        times.get(times.len() / 2).copied().unwrap_or_default()
    }))
}

fn row(name: &str, [builtin, ours]: [Duration; 2]) {
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    say(&format!(
        "    {name:<14} {:>9.1} {:>15.1} {:>6.1}x",
        ms(builtin),
        ms(ours),
        ms(builtin) / ms(ours)
    ));
}

/// The node's processes that were not there before.
fn new_since(before: &[Proc], node: &Node) -> Result<Vec<Proc>> {
    let is_new = |process: &Proc| {
        !before.iter().any(|p| (p.pid, p.start_time) == (process.pid, process.start_time))
    };
    Ok(of_node(&processes::all()?, node).into_iter().filter(is_new).collect())
}

/// containerd, the sandboxer, shims, and what runs in the pods' cgroups.
fn of_node(all: &[Proc], node: &Node) -> Vec<Proc> {
    let top = node.layout().top.display().to_string();
    let cgroup = node.layout().cgroup();
    all.iter()
        .filter(|p| p.command.contains(&top) || p.cgroups.contains(&cgroup))
        .cloned()
        .collect()
}

fn show_processes(what: &str, processes: &[Proc]) {
    say(&format!("{what}:"));
    say(&format!("    {:>7} {:>7} {}", "PID", "PPID", "COMMAND"));
    for process in processes {
        let command: String = process.command.chars().take(100).collect();
        say(&format!("    {:>7} {:>7} {command}", process.pid, process.parent));
    }
}

fn title(text: &str) {
    println!("\n== {text}");
}

fn say(text: &str) {
    println!("{text}");
}
