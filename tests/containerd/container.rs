//! Containers in a living pod: commands in them, their logs, their crashes.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use kit::cri::api;
use kit::{ContainerSpec, PodSpec};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::harness::{Bench, Case, cases};

/// How long the exit of a killed container may take to be reported.
const SOON: Duration = Duration::from_secs(20);

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = cases![both: exec, logs, crash_and_recreate, writable_sysfs];
    cases.extend(cases![ours, "it has no such setting":
        limits_of_the_settings, limits_of_a_pod, volatile_root_file_systems]);
    cases
}

/// Promise: cri_works.
async fn exec(bench: Bench) -> Result<()> {
    let pod = bench.run(PodSpec::new("exec")).await?;
    let container = pod.run(ContainerSpec::sleeping("main")).await?;
    let answer = container.exec(&["sh", "-c", "echo out; echo err >&2; exit 7"]).await?;
    ensure!(answer.stdout == b"out\n", "stdout is {:?}", String::from_utf8_lossy(&answer.stdout));
    ensure!(answer.stderr == b"err\n", "stderr is {:?}", String::from_utf8_lossy(&answer.stderr));
    ensure!(answer.exit_code == 7, "exit code is {}", answer.exit_code);
    let many = container.sh("seq 1 20000").await?;
    ensure!(
        many.lines().count() == 20_000 && many.ends_with("20000\n"),
        "{} bytes of output",
        many.len()
    );
    ensure!(
        container.exec(&["/no/such/program"]).await.is_err(),
        "a program that does not exist ran"
    );
    pod.remove().await
}

/// A network has one sysfs for all its mounts, and the first of them decides whether it can be
/// written: that of an unprivileged container, such as an init container, cannot.
/// Promise: cri_works.
async fn writable_sysfs(bench: Bench) -> Result<()> {
    let privileged = PodSpec::new("writable-sysfs").with(|pod| {
        pod.linux.mut_or_insert_default().security_context.mut_or_insert_default().privileged =
            true;
    });
    let pod = bench.run(privileged).await?;
    let write = "f=/sys/class/net/lo/tx_queue_len; v=$(cat $f) && echo $v >$f && echo written";
    let first = pod.run(ContainerSpec::sleeping("first")).await?;
    ensure!(first.sh(write).await.is_err(), "an unprivileged container wrote to /sys");
    let second = pod.run(ContainerSpec::sleeping("second").privileged()).await?;
    let wrote = second.sh(write).await?;
    ensure!(wrote == "written\n", "a privileged container: {wrote}");
    pod.remove().await
}

/// Promise: cri_works.
async fn logs(bench: Bench) -> Result<()> {
    let pod = bench.run(PodSpec::new("logs")).await?;
    let container =
        pod.run(ContainerSpec::sh("main", "echo to stdout; echo to stderr >&2; exit 3")).await?;
    ensure!(container.exited(SOON).await? == 3, "another exit code");
    let mut lines = container.log()?;
    lines.sort();
    let expected = [("stderr", "to stderr"), ("stdout", "to stdout")]
        .map(|(s, t)| (s.to_owned(), t.to_owned()));
    ensure!(lines == expected, "the log is {lines:?}");
    pod.remove().await
}

/// kubelet's reaction to a container that ends: the next attempt, in the same pod. In between the
/// pod may be without any container.
async fn crash_and_recreate(bench: Bench) -> Result<()> {
    let pod = bench.run(PodSpec::new("crash").pid(api::NamespaceMode::POD)).await?;
    let pause = pod.pause_pid().await?;
    let crashed = pod.run(ContainerSpec::sh("main", "exit 42")).await?;
    ensure!(crashed.exited(SOON).await? == 42, "another exit code");
    let second = pod.run(ContainerSpec::sleeping("main").attempt(1)).await?;
    crashed.remove().await?;
    ensure!(second.sh("echo runs").await? == "runs\n", "the second attempt does not run");

    let pid = pid_of(&second)?;
    kill(Pid::from_raw(pid), Signal::SIGKILL)?;
    ensure!(second.exited(SOON).await? == 137, "another exit code of a killed container");
    second.remove().await?;
    ensure!(pod.is_ready().await?, "not ready without a container");

    let third = pod.run(ContainerSpec::sleeping("main").attempt(2)).await?;
    let first = third.sh("cat /proc/1/comm").await?;
    ensure!(first == "pause\n", "process 1 of the pod is {first}");
    ensure!(pod.pause_pid().await? == pause, "another pause");
    third.stop().await?;
    ensure!(third.exited(SOON).await? == 137, "another exit code of a stopped container");
    third.remove().await?;
    pod.remove().await
}

/// The node's id of the container's process.
fn pid_of(container: &kit::Container) -> Result<i32> {
    // In the pod's own PID namespace; the node's id is found by the cgroup, which containerd names
    // after the container.
    let found =
        kit::machine::processes::all()?.into_iter().find(|p| p.cgroups.contains(container.id()));
    let process = found
        .ok_or_else(|| anyhow::anyhow!("no process in a cgroup of container {}", container.id()))?;
    Ok(i32::try_from(process.pid)?)
}

/// A setting or annotation, the name of its limit in `/proc/PID/limits`, and its soft and hard
/// value.
type Set = (&'static str, &'static str, &'static str);

/// The lines of `/proc/PID/limits`, of which some are replaced by `set`.
fn limits_with(limits: &str, set: &[Set]) -> Vec<String> {
    let split = limits.lines().skip(1).filter_map(|line| line.split_at_checked(26));
    let line = |(name, values): (&str, &str)| {
        let set = set.iter().find(|(_, of, _)| name.starts_with(of)).map(|(_, _, limit)| *limit);
        let own = values.split_whitespace().take(2).collect::<Vec<_>>().join(" ");
        format!("{name}{}", set.unwrap_or(&own))
    };
    split.map(line).collect()
}

/// The limits of the first process of a container in the pod, and of an exec.
async fn limits_in(pod: &kit::Pod) -> Result<[String; 2]> {
    let container = pod.run(ContainerSpec::sleeping("main")).await?;
    let first = container.sh("cat /proc/1/limits").await?;
    Ok([first, container.sh("cat /proc/self/limits").await?])
}

/// The first process and an exec have the limits of the settings, and otherwise those of
/// containerd's children.
async fn limits_of_the_settings(bench: Bench) -> Result<()> {
    const SET: [Set; 3] = [
        ("--container-limits=nofile=4095", "Max open files", "4095 4095"),
        ("--container-limits=core=0:77", "Max core file size", "0 77"),
        ("--container-limits=memlock=65536", "Max locked memory", "65536 65536"),
    ];
    let mut seen = Vec::new();
    for options in [Vec::new(), SET.map(|(option, _, _)| option).to_vec()] {
        bench.restart_with(&options).await?;
        let pod = bench.run(PodSpec::new("limits")).await?;
        seen.extend(limits_in(&pod).await?);
        pod.remove().await?;
    }
    let [before, before_exec, after, after_exec] = &seen[..] else { anyhow::bail!("{seen:?}") };
    for (process, before, after) in [("first", before, after), ("exec", before_exec, after_exec)] {
        let (expected, found) = (limits_with(before, &SET), limits_with(after, &[]));
        ensure!(found == expected, "{process}: {found:?}, not {expected:?}");
    }
    bench.restart_with(&[]).await
}

/// A pod chooses limits up to the maximum of the settings. They win over the limits of all pods,
/// and a shim that another daemon launches has them, too.
async fn limits_of_a_pod(bench: Bench) -> Result<()> {
    const SET: [Set; 4] = [
        ("--container-limits=memlock=65536", "Max locked memory", "65536 65536"),
        ("--container-limits=core=0:77", "Max core file size", "5 50"),
        ("--container-limits-max=core=50", "Max core file size", "5 50"),
        ("--container-limits-max=nofile=4095", "Max open files", "4095 4095"),
    ];
    let choosing = |limits: &str| {
        let annotation = ("pause-sandboxer/limits".to_owned(), limits.to_owned());
        PodSpec::new("limits").with(|config| config.annotations.extend([annotation]))
    };
    let refused = bench.run(choosing("nofile=2048")).await.err().context("without a maximum")?;
    ensure!(format!("{refused:#}").contains("container_limits_max has no nofile"), "{refused:#}");
    let pod = bench.run(PodSpec::new("plain")).await?;
    let plain = limits_in(&pod).await?;
    pod.remove().await?;

    bench.restart_with(&SET.map(|(option, _, _)| option)).await?;
    let refused = bench.run(choosing("nofile=4095,core=5:51")).await.err().context("51 of 50")?;
    let both = "core=5:51 is more than the node's maximum, core=50:50";
    for part in ["code 3", "pause-sandboxer/limits", both] {
        ensure!(format!("{refused:#}").contains(part), "{refused:#}");
    }
    let pod = bench.run(choosing("nofile=4095,core=5:50")).await?;
    bench.restart_with(&[SET[0].0, SET[1].0]).await?;
    for (plain, chosen) in plain.iter().zip(&limits_in(&pod).await?) {
        let (expected, found) = (limits_with(plain, &SET), limits_with(chosen, &[]));
        ensure!(found == expected, "{found:?}, not {expected:?}");
    }
    pod.remove().await?;
    bench.restart_with(&[]).await
}

/// The setting mounts root file systems as volatile. The kernel refuses to mount the directories of
/// one again: a container that is started anew has new ones, and containerd reads those of a
/// running container without its work directory.
async fn volatile_root_file_systems(bench: Bench) -> Result<()> {
    // The mount of other snapshotters has no such option.
    if bench.node.snapshotter()? != "overlayfs" {
        return Ok(());
    }
    let root = "grep ' / overlay ' /proc/mounts";
    let pod = bench.run(PodSpec::new("plain")).await?;
    let plain = pod.run(ContainerSpec::sleeping("main")).await?.sh(root).await?;
    ensure!(plain.contains("upperdir=") && !plain.contains("volatile"), "{plain}");
    pod.remove().await?;

    bench.restart_with(&["--volatile-rootfs"]).await?;
    if kit::shim::setting() != "own" {
        let pod = bench.run(PodSpec::new("other-shim")).await?;
        let mounted = pod.run(ContainerSpec::sleeping("main")).await?.sh(root).await?;
        ensure!(!mounted.contains("volatile"), "{mounted}");
        pod.remove().await?;
        return bench.restart_with(&[]).await;
    }
    let pod = bench.run(PodSpec::new("volatile")).await?;
    let first = pod.run(ContainerSpec::sleeping("main")).await?;
    let mounted = first.sh(&format!("echo written >/file && sync && {root}")).await?;
    ensure!(mounted.contains("volatile"), "{mounted}");
    let difference = Command::new(bench.node.parts().program("ctr"))
        .arg("--address")
        .arg(bench.node.layout().containerd_socket())
        .args(["--namespace", "k8s.io", "snapshots", "diff", "--media-type"])
        .args(["application/vnd.oci.image.layer.v1.tar", first.id()])
        .output()
        .context("run ctr")?;
    let errors = String::from_utf8_lossy(&difference.stderr);
    ensure!(difference.status.success(), "ctr snapshots diff: {errors}");
    let has_file = difference.stdout.windows(8).any(|bytes| bytes == b"written\n");
    ensure!(has_file, "the file is not in {} bytes", difference.stdout.len());

    kill(Pid::from_raw(pid_of(&first)?), Signal::SIGKILL)?;
    ensure!(first.exited(SOON).await? == 137, "another exit code of a killed container");
    let second = pod.run(ContainerSpec::sleeping("main").attempt(1)).await?;
    let mounted = second.sh(&format!("! test -e /file && {root}")).await?;
    ensure!(mounted.contains("volatile"), "{mounted}");
    pod.remove().await?;
    bench.restart_with(&[]).await
}
