//! Which namespaces the containers of a pod share: with each other, with the pause, with the node.

use anyhow::{Context as _, Result, ensure};
use kit::cri::api::NamespaceMode;
use kit::machine::processes;
use kit::{Container, ContainerSpec, Pod, PodSpec};

use crate::harness::{Bench, Case, Difference, cases};

/// Key of the segments; unique, also in the node's namespace.
fn key() -> u32 {
    0x7073_0000 | (std::process::id() & 0xffff)
}

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = cases![both: shared_pid, shared_ipc, host_ipc, root_of_the_pause];
    cases.extend(cases![ours, "it has no such setting": sysctls_of_the_settings]);
    cases
}

async fn two(bench: &Bench, spec: PodSpec) -> Result<(Pod, Container, Container)> {
    let pod = bench.run(spec).await?;
    let one = pod.run(ContainerSpec::new("one", &["sleep", "3601"])).await?;
    let other = pod.run(ContainerSpec::new("other", &["sleep", "3602"])).await?;
    Ok((pod, one, other))
}

/// The namespace of one kind that a container is in.
async fn inside(container: &Container, kind: &str) -> Result<String> {
    Ok(container.sh(&format!("readlink /proc/self/ns/{kind}")).await?.trim().to_owned())
}

async fn shared_pid(bench: Bench) -> Result<()> {
    let (pod, one, other) = two(&bench, PodSpec::new("pids").pid(NamespaceMode::POD)).await?;
    let pause = processes::namespace(&pod.pause_pid().await?.to_string(), "pid")?;
    ensure!(
        pause != processes::namespace("self", "pid")?,
        "the pause is in the node's PID namespace"
    );
    for container in [&one, &other] {
        let namespace = inside(container, "pid").await?;
        ensure!(namespace == pause, "a container is in {namespace}, the pause in {pause}");
        let processes = container.sh("ps -o pid,args").await?;
        for sleeper in ["sleep 3601", "sleep 3602"] {
            ensure!(processes.contains(sleeper), "{sleeper} is not among\n{processes}");
        }
    }
    let first = one.sh("cat /proc/1/comm").await?;
    ensure!(first.trim() == "pause", "process 1 is {first}");
    // An orphan of any container becomes a child of process 1, which must reap it.
    one.sh("(sleep 0.05 &) ; exit 0").await?;
    kit::until("the orphan is reaped", std::time::Duration::from_secs(5), async || {
        let states = other.sh("cat /proc/[0-9]*/stat 2>/dev/null | cut -d ' ' -f 2,3").await?;
        ensure!(!states.contains(" Z") && !states.contains("0.05"), "{states}");
        Ok(())
    })
    .await?;
    // One of the other's processes can be ended from here.
    one.sh("kill -9 $(ps -o pid,args | awk '/sleep 360[2]/ { print $1 }')").await?;
    other.exited(std::time::Duration::from_secs(5)).await?;
    ensure!(pod.is_ready().await?, "the pod is not ready after one of its containers has ended");
    pod.remove().await
}

/// Promise: pods_equal_the_builtins.
async fn shared_ipc(bench: Bench) -> Result<()> {
    let (pod, one, other) = two(&bench, PodSpec::new("ipc")).await?;
    one.sh(&format!("probe shm-make {} 'in the segment'", key())).await?;
    let seen = other.sh(&format!("probe shm-read {}", key())).await?;
    ensure!(seen == "in the segment\n", "the other container reads {seen:?}");
    ensure!(!on_the_node()?, "the node sees the pod's segment");

    one.sh("echo in the file > /dev/shm/file").await?;
    let seen = other.sh("cat /dev/shm/file").await?;
    ensure!(seen == "in the file\n", "the other container reads {seen:?}");
    ensure!(!std::path::Path::new("/dev/shm/file").exists(), "the node sees the pod's file");
    let size = one.sh("df -k /dev/shm | tail -n 1 | awk '{print $2}'").await?;
    ensure!(size == "65536\n", "/dev/shm has {size} KiB");
    let mode = one.sh("stat -c %a /dev/shm").await?;
    ensure!(mode == "1777\n", "/dev/shm has the mode {mode}");
    let kind = one.sh("awk '$2 == \"/dev/shm\" { print $3, $4 }' /proc/mounts").await?;
    for option in ["tmpfs", "nosuid", "nodev", "noexec"] {
        ensure!(kind.contains(option), "/dev/shm is {kind}");
    }
    pod.remove().await
}

async fn host_ipc(bench: Bench) -> Result<()> {
    let (pod, one, other) = two(&bench, PodSpec::new("host-ipc").ipc(NamespaceMode::NODE)).await?;
    let node = processes::namespace("self", "ipc")?;
    let namespace = inside(&one, "ipc").await?;
    ensure!(namespace == node, "the container is in {namespace}, the node's is {node}");
    one.sh(&format!("probe shm-make {} 'of the node'", key())).await?;
    let seen = on_the_node()?;
    let removed = other.sh(&format!("probe shm-remove {}", key())).await;
    ensure!(seen, "the node does not see the segment");
    removed?;
    let file = format!("/dev/shm/{}", bench.node.layout().name);
    std::fs::write(&file, "of the node\n")?;
    let seen = one.sh(&format!("cat {file}")).await;
    std::fs::remove_file(&file)?;
    ensure!(seen? == "of the node\n", "the container does not see the node's /dev/shm");
    pod.remove().await
}

/// A container that shares the pod's PID namespace finds behind `/proc/1` nothing of the
/// node.
///
/// Promise: pause_is_confined.
async fn root_of_the_pause(bench: Bench) -> Result<()> {
    let pod = bench.run(PodSpec::new("jail").pid(NamespaceMode::POD)).await?;
    let plain = pod.run(ContainerSpec::sleeping("plain")).await?;
    let tracer = pod.run(ContainerSpec::sleeping("tracer").capability("SYS_PTRACE")).await?;
    let marker = bench.node.layout().top.join("marker");
    std::fs::write(&marker, "the node")?;
    for (who, container) in [("without CAP_SYS_PTRACE", &plain), ("with CAP_SYS_PTRACE", &tracer)] {
        for way in ["root", "cwd", "root/proc/1/root", "cwd/..", "root/../.."] {
            let seen =
                container.exec(&["cat", &format!("/proc/1/{way}{}", marker.display())]).await?;
            ensure!(seen.exit_code != 0, "{who}: /proc/1/{way} leads to the node's files");
        }
        let descriptors = container.exec(&["sh", "-c", "ls -l /proc/1/fd/ 2>/dev/null"]).await?;
        let descriptors = String::from_utf8_lossy(&descriptors.stdout).into_owned();
        ensure!(
            !descriptors.contains(&bench.node.layout().name),
            "{who}: descriptors of the pause:\n{descriptors}"
        );
    }
    std::fs::remove_file(&marker)?;

    let listed = async |container: &Container| -> Result<String> {
        let answer = container.exec(&["ls", "-A", "/proc/1/root/"]).await?;
        let (out, err) =
            (String::from_utf8_lossy(&answer.stdout), String::from_utf8_lossy(&answer.stderr));
        Ok(if answer.exit_code == 0 {
            out.split_whitespace().collect::<Vec<_>>().join(" ")
        } else {
            err.rsplit(": ").next().unwrap_or_default().trim().to_owned()
        })
    };
    let seen = listed(&plain).await?;
    ensure!(seen == "Permission denied", "ls /proc/1/root without CAP_SYS_PTRACE: {seen}");
    let seen = listed(&tracer).await?;
    bench.differs(
        "ls /proc/1/root with CAP_SYS_PTRACE",
        &seen,
        Difference {
            builtin: "dev etc pause proc sys".to_owned(),
            ours: String::new(),
            why: "the root of the built-in's pause is its image; ours is an empty directory",
        },
    )?;
    pod.remove().await
}

/// Whether the node has a segment with our key.
fn on_the_node() -> Result<bool> {
    let key = key().to_string();
    Ok(std::fs::read_to_string("/proc/sysvipc/shm")?
        .lines()
        .any(|l| l.split_whitespace().next() == Some(&key)))
}

/// Pods get them if they own the namespace and do not set them themselves.
async fn sysctls_of_the_settings(bench: Bench) -> Result<()> {
    const READ: &str = "cat /proc/sys/net/ipv4/tcp_keepalive_time /proc/sys/kernel/msgmax";
    let node = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_keepalive_time")?;
    bench
        .restart_with(&[
            "--sysctls=net.ipv4.tcp_keepalive_time=601",
            "--sysctls=kernel.msgmax=7777",
        ])
        .await?;
    for (spec, expected) in [
        (PodSpec::new("default"), "601\n7777\n".to_owned()),
        (
            PodSpec::new("own").sysctl("net.ipv4.tcp_keepalive_time", "602"),
            "602\n7777\n".to_owned(),
        ),
        (PodSpec::new("node").host_network(), format!("{node}7777\n")),
    ] {
        let pod = bench.run(spec).await?;
        let seen = pod.run(ContainerSpec::sleeping("main")).await?.sh(READ).await?;
        ensure!(seen == expected, "{seen:?}, not {expected:?}");
        pod.remove().await?;
    }
    // The error of a value that the kernel refuses names it.
    bench.restart_with(&["--sysctls=kernel.msgmax=-1"]).await?;
    let refused = bench.run(PodSpec::new("refused")).await.err().context("-1 was set")?;
    ensure!(format!("{refused:#}").contains("/proc/sys/kernel/msgmax"), "{refused:#}");
    bench.restart_with(&[]).await
}
