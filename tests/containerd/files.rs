//! hostname, hosts, resolv.conf and shared memory of a pod: when they are deleted, and their size.
//! `tests/parity` compares what they are inside a container.

use anyhow::{Context, Result, ensure};
use kit::{ContainerSpec, Pod, PodSpec};
use nix::mount::{MntFlags, umount2};

use crate::harness::{Bench, Case, Difference, cases};

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = cases![both: deleted_files];
    cases.extend(cases![ours, "its pods have /dev/shm of one size": size_of_shared_memory]);
    cases
}

/// The files and the shared memory of a living pod are deleted, as a restarted containerd does to a
/// pod whose sandboxer it does not know.
///
/// Promise: pod_files_are_restored.
async fn deleted_files(bench: Bench) -> Result<()> {
    let pod = bench.run(PodSpec::new("deleted").dns(&["10.0.0.10"], &[], &[])).await?;
    let old = pod.run(ContainerSpec::sleeping("old")).await?;
    old.sh("echo kept > /dev/shm/file").await?;
    delete(&pod)?;

    ensure!(pod.is_ready().await?, "not ready without its files");
    let new = pod.run(ContainerSpec::sleeping("new")).await?;
    let seen = new
        .sh("for f in /etc/hostname /etc/resolv.conf /dev/shm/file; do cat $f 2>/dev/null || echo \
            none; done; wc -c < /etc/hosts || echo none")
        .await?;
    let hosts = std::fs::metadata("/etc/hosts")?.len();
    bench.differs(
        "hostname, resolv.conf, a file of the shared memory and the size of hosts in a new \
         container",
        &seen.replace(&format!("\n{hosts}\n"), "\nas the node's\n"),
        Difference {
            builtin: "none\nnone\nnone\nnone\n".to_owned(),
            ours: "deleted\nnameserver 10.0.0.10\nkept\nas the node's\n".to_owned(),
            why: "every new container begins with a Status, at which ours puts back what is gone",
        },
    )?;
    pod.remove().await
}

fn delete(pod: &Pod) -> Result<()> {
    let layout = pod.node().layout();
    let (files, shm) = (layout.sandbox_files(pod.id()), layout.sandbox_shm(pod.id()));
    umount2(&shm, MntFlags::MNT_DETACH)?;
    std::fs::remove_dir(&shm)?;
    std::fs::remove_dir_all(files)?;
    Ok(())
}

/// The size is that of the settings, or of a pod's annotation up to a maximum; what is in it counts
/// to the pod.
async fn size_of_shared_memory(bench: Bench) -> Result<()> {
    let sized = |size: &str| {
        let annotation = ("pause-sandboxer/shm-size".to_owned(), size.to_owned());
        PodSpec::new("sized").with(|config| config.annotations.extend([annotation]))
    };
    let refused = bench.run(sized("65Mi")).await.err().context("65Mi by default")?;
    ensure!(format!("{refused:#}").contains("65Mi is more than the node's maximum, 64Mi"));
    bench.restart_with(&["--shm-size=32Mi", "--shm-size-max=256Mi"]).await?;
    let refused = bench.run(sized("257Mi")).await.err().context("257Mi of 256Mi")?;
    for part in ["code 3", "257Mi is more than the node's maximum, 256Mi"] {
        ensure!(format!("{refused:#}").contains(part), "{refused:#}");
    }
    for (spec, shown, fits, above) in [
        (PodSpec::new("sized"), "size=32768k", "32m", "33m"),
        (sized("256Mi"), "size=262144k", "256m", "257m"),
    ] {
        let pod = bench.run(spec).await?;
        let container = pod.run(ContainerSpec::sleeping("main")).await?;
        let mounted = container.sh("grep ' /dev/shm ' /proc/mounts").await?;
        ensure!(mounted.contains(shown), "{mounted}");
        let fill = |size: &str| format!("head -c {size} /dev/zero >/dev/shm/f && echo fits");
        ensure!(container.sh(&format!("{} || echo full", fill(above))).await? == "full\n");
        ensure!(container.sh(&fill(fits)).await? == "fits\n");
        let pod_memory = crate::pause::memory_of_pod(pod.pause_pid().await?)?;
        let least = 1 << if fits == "32m" { 25 } else { 28 };
        ensure!(pod_memory >= least, "the pod has {pod_memory} bytes");
        // The next daemon keeps it.
        bench.restart_with(&[]).await?;
        delete(&pod)?;
        let new = pod.run(ContainerSpec::sleeping("new")).await?;
        let mounted = new.sh("grep ' /dev/shm ' /proc/mounts").await?;
        ensure!(mounted.contains(shown), "restored: {mounted}");
        pod.remove().await?;
        bench.restart_with(&["--shm-size=32Mi", "--shm-size-max=256Mi"]).await?;
    }
    bench.restart_with(&[]).await
}
