//! The sandboxer's own shim: which program it is, and what becomes of its pods without it.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use kit::machine::processes::{self, Proc};
use kit::{ContainerSpec, Pod, until};
use nix::sys::signal::Signal;

use crate::container_record::{has_task, is_recorded, task_of};
use crate::harness::{
    Case, Harness, Kind, SOON, cases, inside, no_shim, none, not_ready, one_shim, removed, signal,
};

pub(crate) fn cases() -> Vec<Case> {
    cases![Kind::Own =>
        an_own_shim_has_nothing_of_the_daemon,
        the_memory_of_a_shim_is_shown_while_there_is_one,
        a_daemon_has_one_version_of_its_shim,
        pods_outlive_the_program_of_their_shim,
        a_container_that_ends_while_containerd_is_down_keeps_its_exit,
        a_pod_keeps_its_task_after_its_last_container,
    ]
}

fn program(shim: &Proc) -> Result<String> {
    let path = fs::read_link(format!("/proc/{}/exe", shim.pid)).context("program")?;
    Ok(path.file_name().unwrap_or_default().to_string_lossy().into_owned())
}

/// The variables from containerd beside its own environment, the one that the harness sets, and
/// that of the script by which the harness starts the shim.
const VARIABLES: [&str; 10] = [
    "PATH",
    "LD_LIBRARY_PATH",
    "TTRPC_ADDRESS",
    "GRPC_ADDRESS",
    "NAMESPACE",
    "MAX_SHIM_VERSION",
    "GOMAXPROCS",
    "OTEL_SERVICE_NAME",
    "KIT_VARIABLE",
    "PWD",
];

/// A socket or pipe by its number; an epoll or an eventfd, whose links all look alike, by what it
/// watches or by its number. The daemon's pidfds name processes that the shim opens itself.
fn descriptors(pid: u32) -> Result<Vec<String>> {
    let mut all = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        let path = entry?.path();
        // It may have closed one meanwhile.
        let Ok(to) = fs::read_link(&path) else { continue };
        let mut what = to.to_string_lossy().into_owned();
        if what.starts_with("anon_inode:") {
            let Some(number) = path.file_name().and_then(|name| name.to_str()) else { continue };
            let about = fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}"));
            let telling = |line: &&str| line.starts_with("tfd:") || line.starts_with("eventfd-id:");
            what.extend(about.unwrap_or_default().lines().filter(telling));
        }
        all.push(what);
    }
    Ok(all)
}

/// Of what the daemon has open, such as its lock, records, the programs of pause and shim, its
/// connections and its runtime's epoll, the shim has the socket of the endpoint alone.
fn has_no_descriptor_of(daemon: &Proc, shim: &Proc, harness: &Harness, pod: &Pod) -> Result<()> {
    let log = harness.record(pod).with_file_name("log");
    let streams = harness.node.layout().state().display().to_string();
    let own = ["/dev/null", "socket:", "anon_inode:", "pipe:"];
    let (of_daemon, of_shim) = (descriptors(daemon.pid)?, descriptors(shim.pid)?);
    for to in &of_shim {
        // Of version 2, by which it notices that a container's memory has run out.
        let known = own.iter().any(|prefix| to.starts_with(prefix))
            || to.ends_with("/memory.events")
            || to.starts_with(&streams)
            || Path::new(to) == log;
        ensure!(known, "it has {to}");
    }
    // One that watches nothing is as any other.
    let telling = |to: &&String| {
        let number = to.starts_with("socket:") || to.starts_with("pipe:");
        number || to.contains("tfd:") || to.contains("eventfd-id:")
    };
    let shared: Vec<_> =
        of_shim.iter().filter(telling).filter(|to| of_daemon.contains(to)).collect();
    ensure!(
        matches!(shared[..], [socket] if *socket == endpoint(harness)?),
        "of the daemon it has {shared:?}, of {of_daemon:?}"
    );
    Ok(())
}

/// The listening socket of the only pod's endpoint.
fn endpoint(harness: &Harness) -> Result<String> {
    let dir = harness.node.layout().sandboxer_state().join("shims").display().to_string();
    let sockets = fs::read_to_string("/proc/net/unix")?;
    // SO_ACCEPTCON (proc(5)).
    let listens = |words: &[&str]| words.get(3) == Some(&"00010000");
    let listening = sockets.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let mut listening = listening
        .filter(|words| listens(words) && words.get(7).is_some_and(|path| path.starts_with(&dir)));
    let words = listening.next().context("no endpoint listens")?;
    Ok(format!("socket:[{}]", words.get(6).context("no number of a socket")?))
}

/// Promise: only_files_of_root_count.
async fn an_own_shim_has_nothing_of_the_daemon(harness: Arc<Harness>) -> Result<()> {
    // The daemon has launched a shim for the containerd before this one.
    harness.node.stop_containerd().await?;
    harness.node.start_containerd().await?;
    let pod = harness.pod("alone").await?;
    pod.run(ContainerSpec::sleeping("a")).await?;
    let shim = one_shim(&pod).await?;
    ensure!(program(&shim)? == kit::shim::NAME, "it is {}", program(&shim)?);
    let name = fs::read_to_string(format!("/proc/{}/comm", shim.pid))?;
    ensure!(name == "runc-shim\n", "its name is {name:?}");
    let daemon = processes::one(harness.node.sandboxer_pid()?)?;
    ensure!(shim.cgroups == daemon.cgroups, "{} and {}", shim.cgroups, daemon.cgroups);
    has_no_descriptor_of(&daemon, &shim, &harness, &pod)?;
    let environment = |pid: u32| fs::read_to_string(format!("/proc/{pid}/environ"));
    let containerd = environment(harness.node.containerd_pid()?)?;
    let (given, inherited) = (environment(shim.pid)?, containerd.split('\0'));
    ensure!(given.contains("KIT_OF_CONTAINERD="), "its environment is {given:?}");
    let inherited: Vec<&str> = inherited.collect();
    for variable in given.split('\0') {
        let name = variable.split('=').next().unwrap_or_default();
        let known = VARIABLES.contains(&name) || name == crate::proxy::SCRIPT;
        ensure!(known || inherited.contains(&variable), "its environment has {variable}");
    }
    removed(&pod).await?;
    no_shim(&pod).await
}

/// The exit code, and output that containerd has not read. With containerd's own shim the status is
/// 255 and the output is lost: a containerd that starts deletes a task without processes.
///
/// Promise: exit_is_not_lost.
async fn a_container_that_ends_while_containerd_is_down_keeps_its_exit(
    harness: Arc<Harness>,
) -> Result<()> {
    let pod = harness.pod("interrupted").await?;
    let script = "touch /dev/shm/runs
        while [ -e /dev/shm/runs ]; do sleep 0.1; done
        echo last
        exit 7";
    let ends = pod.run(ContainerSpec::sh("ends", script)).await?;
    let stays = pod.run(ContainerSpec::sleeping("stays")).await?;
    until("it runs", SOON, async || stays.sh("test -e /dev/shm/runs").await.map(drop)).await?;
    // The shell: each `sleep` ends at once.
    let shell = inside(ends.id())?.into_iter().min_by_key(|process| process.start_time);
    let shell = shell.context("no process of the container")?.pid;
    let shared = format!("/proc/{shell}/root/dev/shm/runs");
    harness.node.stop_containerd().await?;
    fs::remove_file(shared)?;
    until("it has ended", SOON, async || none(&inside(ends.id())?)).await?;
    harness.node.start_containerd().await?;
    ensure!(ends.exited(SOON).await? == 7, "its exit code is another");
    until("its last output is in the log", SOON, async || {
        let log = ends.log()?;
        ensure!(log.iter().any(|(_, text)| text == "last"), "{log:?}");
        Ok(())
    })
    .await?;
    removed(&pod).await?;
    no_shim(&pod).await
}

/// cAdvisor finds the pod's network by the task. From 2.4 on containerd ends a shim with its last
/// task: a container that is removed before the sandbox's task was made takes the shim along, and
/// the next one brings both.
///
/// Promise: sandbox_is_a_container.
async fn a_pod_keeps_its_task_after_its_last_container(harness: Arc<Harness>) -> Result<()> {
    /// More than containerd takes to end a shim.
    const STAYS: Duration = Duration::from_secs(1);
    let pod = harness.pod("keeps").await?;
    let pause = pod.pause_pid().await?;
    for attempt in 0..3 {
        let short = pod.run(ContainerSpec::sleeping("short").attempt(attempt)).await?;
        short.stop().await?;
        short.remove().await?;
        ensure!(is_recorded(&harness.node, pod.id())?, "it is not recorded");
    }
    let container = pod.run(ContainerSpec::sleeping("last")).await?;
    has_task(&pod).await?;
    let shim = one_shim(&pod).await?;
    container.stop().await?;
    container.remove().await?;
    let begun = Instant::now();
    while begun.elapsed() < STAYS {
        let task = task_of(&pod)?;
        ensure!(task == Some((pause, "RUNNING".to_owned())), "its task is {task:?}");
        ensure!(one_shim(&pod).await?.pid == shim.pid, "it has another shim");
    }
    ensure!(pod.is_ready().await?, "it is not ready");
    removed(&pod).await?;
    no_shim(&pod).await
}

async fn the_memory_of_a_shim_is_shown_while_there_is_one(harness: Arc<Harness>) -> Result<()> {
    let pod = harness.pod("measured").await?;
    let metric =
        async || kit::metrics::value(&harness.metrics(), "pause_sandboxer_shim_memory_bytes").await;
    until("no shim in the metrics", SOON, async || {
        let of_all = metric().await?;
        ensure!(of_all < 1.0, "{of_all}");
        Ok(())
    })
    .await?;
    pod.run(ContainerSpec::sleeping("a")).await?;
    let shim = one_shim(&pod).await?;
    let status = fs::read_to_string(format!("/proc/{}/status", shim.pid))?;
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let resident = resident.and_then(|kilobytes| kilobytes.split_whitespace().next());
    let resident: u64 = resident.context("no VmRSS")?.parse()?;
    // Of the pods' shims together, so that the fleet's dashboard shows them.
    until("the shim in the metrics", SOON, async || {
        let of_all = metric().await?;
        ensure!((1.0..=(resident << 10) as f64).contains(&of_all), "{of_all} of {resident} kB");
        Ok(())
    })
    .await?;
    removed(&pod).await?;
    no_shim(&pod).await
}

/// An upgrade replaces the file while the daemon runs.
///
/// Promise: only_files_of_root_count.
async fn a_daemon_has_one_version_of_its_shim(harness: Arc<Harness>) -> Result<()> {
    let file = harness.own_shim();
    fs::remove_file(&file)?;
    fs::write(&file, "#!/bin/sh\nexit 9\n")?;
    fs::set_permissions(&file, fs::Permissions::from_mode(0o755))?;
    let pod = harness.pod("before").await?;
    let ran = pod.run(ContainerSpec::sleeping("a")).await;
    fs::remove_file(&file)?;
    symlink(std::env::current_exe()?, &file)?;
    ran?;
    ensure!(program(&one_shim(&pod).await?)? == kit::shim::NAME, "another program");
    removed(&pod).await?;
    no_shim(&pod).await
}

/// A daemon without the program of its shim: it says so, its pods keep their shims and get the
/// runtime's, and what an own shim has left is cleaned up by the runtime's.
async fn pods_outlive_the_program_of_their_shim(harness: Arc<Harness>) -> Result<()> {
    let (served, idle) = (harness.pod("served").await?, harness.pod("idle").await?);
    let container = served.run(ContainerSpec::sleeping("a")).await?;
    let shim = one_shim(&served).await?;
    let file = harness.own_shim();
    fs::remove_file(&file)?;
    harness.restart().await?;
    let without = async {
        let log = fs::read_to_string(harness.node.layout().sandboxer_log())?;
        let warning = format!(
            "own shim is not available; new pods get the runtime's shim: open shim {}: No such \
             file or directory (os error 2)",
            file.display()
        );
        ensure!(log.matches(&warning).count() == 1, "the log does not say once {warning:?}");
        ensure!(one_shim(&served).await?.pid == shim.pid, "another shim");
        ensure!(container.sh("echo hello").await?.trim() == "hello", "exec");
        let new = harness.pod("new").await?;
        for pod in [&new, &idle] {
            pod.run(ContainerSpec::sleeping("b")).await?;
            let program = program(&one_shim(pod).await?)?;
            ensure!(program == "containerd-shim-runc-v2", "it is {program}");
        }
        signal(shim.pid, Signal::SIGKILL)?;
        until("not ready", SOON, async || not_ready(&served).await).await?;
        until("no process of the container", SOON, async || none(&inside(container.id())?)).await?;
        for pod in [&served, &new] {
            removed(pod).await?;
            no_shim(pod).await?;
        }
        anyhow::Ok(())
    };
    let done = without.await;
    symlink(std::env::current_exe()?, &file)?;
    harness.restart().await?;
    done?;
    // Served by the runtime's shim still, as that lives.
    ensure!(program(&one_shim(&idle).await?)? == "containerd-shim-runc-v2", "another program");
    removed(&idle).await?;
    no_shim(&idle).await
}
