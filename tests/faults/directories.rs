//! Each directory that the daemon uses is full, or read-only.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, bail, ensure};
use kit::metrics::value;
use kit::{ContainerSpec, Node, PodSpec, grpc, until};
use nix::mount::{MntFlags, MsFlags, mount, umount2};

use crate::harness::{Case, alone, on_node};
use crate::pods::{Shape, is_whole, remove};
use crate::standalone::Standalone;

/// The log line when the files of a pod cannot be restored.
const FAILED: &str = "failed to restore deleted pod files";
/// The limit for the daemon to try again by itself.
const RETRY_TIMEOUT: Duration = Duration::from_secs(60);

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = alone![
        full_directories,
        read_only_directories,
        files_that_cannot_be_restored_are_restored_later,
        a_truncated_file_is_restored,
        a_record_directory_that_is_gone,
    ];
    cases.extend(on_node![node_containerd_restarts_on_a_full_disk]);
    cases
}

/// Starts a daemon with a small file system in place of one of its directories.
async fn with_small(directory: &str) -> Result<Standalone> {
    let standalone = Standalone::with_metrics()?;
    mount_small(&standalone.path(directory))?;
    standalone.start().await?;
    Ok(standalone)
}

fn mount_small(point: &Path) -> Result<()> {
    let size = Some("size=256k,nr_inodes=200,mode=755");
    Ok(mount(Some("small"), point, Some("tmpfs"), MsFlags::empty(), size)?)
}

/// Uses all space and all inodes.
fn fill(directory: &Path) -> Result<()> {
    fill_space(directory)?;
    for number in 0.. {
        match fs::File::create(directory.join("filler").join(number.to_string())) {
            Ok(_) => {}
            Err(e) if e.kind() == std::io::ErrorKind::StorageFull => break,
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

/// Takes all space: files can be made, and nothing can be written to them.
fn fill_space(directory: &Path) -> Result<()> {
    use std::io::ErrorKind;
    let filler = directory.join("filler");
    fs::create_dir(&filler)?;
    let mut file = fs::File::create(filler.join("space"))?;
    let full = |done: std::io::Result<()>| match done {
        Ok(()) => Ok(false),
        Err(e) if e.kind() == ErrorKind::StorageFull => Ok(true),
        Err(e) => Err(e),
    };
    while !full(file.write_all(&[0; 4096]))? {}
    Ok(())
}

/// Create or Start fails and names the directory and the errno; nothing of the sandbox is left.
async fn refused(standalone: &Standalone, directory: &str, errno: i32) -> Result<()> {
    let (controller, shape, id) =
        (standalone.controller(), Shape::plain(standalone), standalone.id("refused"));
    let error = match shape.create(&controller, &id).await {
        Err(error) => error,
        Ok(()) => match controller.start(&id).await {
            Err(error) => error,
            Ok(_) => bail!("it started with {directory} in that state"),
        },
    };
    for word in
        [&id, &standalone.path(directory).display().to_string(), &format!("os error {errno}")]
    {
        ensure!(error.message.contains(word), "{word:?} is not in: {error}");
    }
    let status = controller.status(&id, false).await;
    ensure!(status.as_ref().is_err_and(|status| status.code == grpc::NOT_FOUND), "{status:?}");
    let left: Vec<String> =
        standalone.left()?.into_iter().filter(|thing| thing.contains(&id)).collect();
    ensure!(left.is_empty(), "left: {left:#?}");
    Ok(())
}

/// Promise: full_node_keeps_its_pods.
async fn full_directories() -> Result<()> {
    for directory in ["state", "root", "run"] {
        let standalone = with_small(directory).await?;
        let (controller, shape) = (standalone.controller(), Shape::plain(&standalone));
        let (living, again) = (standalone.id("living"), standalone.id("again"));
        shape.run(&controller, &living).await?;
        fill(&standalone.path(directory))?;
        refused(&standalone, directory, 28)
            .await
            .with_context(|| format!("{directory} is full"))?;
        if directory == "state" {
            let failed = "calls_total{method=\"Create\",code=\"RESOURCE_EXHAUSTED\"}";
            standalone.metric_is(&format!("pause_sandboxer_{failed}"), 1.0..=1.0).await?;
        }
        is_whole(&standalone, &controller, &living).await?;
        // Whether the exit can be recorded or not: Stop and Shutdown need no space.
        remove(&controller, &living).await.with_context(|| format!("{directory} is full"))?;
        let reported = standalone.logged().contains("failed to record exit");
        ensure!(reported == (directory == "state"), "{directory} is full: {}", standalone.logged());
        fs::remove_dir_all(standalone.path(directory).join("filler"))?;
        shape
            .run(&controller, &again)
            .await
            .with_context(|| format!("{directory} is free again"))?;
        remove(&controller, &again).await?;
        standalone.nothing_left_but(&[standalone.path(directory)]).await?;
    }
    Ok(())
}

/// Promise: full_node_keeps_its_pods.
async fn read_only_directories() -> Result<()> {
    for directory in ["state", "root", "run"] {
        let standalone = with_small(directory).await?;
        let (controller, shape) = (standalone.controller(), Shape::plain(&standalone));
        let (living, dying) = (standalone.id("living"), standalone.id("dying"));
        shape.run(&controller, &living).await?;
        let pid = shape.run(&controller, &dying).await?;
        // The lock of the state directory is open for writing; the records have a mount of their
        // own.
        let point =
            standalone.path(if directory == "state" { "state/sandboxes" } else { directory });
        let remount = |flags| {
            let flags = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | flags;
            mount(None::<&str>, &point, None::<&str>, flags, None::<&str>)
        };
        remount(MsFlags::MS_RDONLY).context("make it read-only")?;
        refused(&standalone, directory, 30)
            .await
            .with_context(|| format!("{directory} is read-only"))?;
        is_whole(&standalone, &controller, &living).await?;
        nix::sys::signal::kill(
            nix::unistd::Pid::from_raw(pid.cast_signed()),
            nix::sys::signal::Signal::SIGKILL,
        )?;
        let exit = tokio::time::timeout(Duration::from_secs(5), controller.wait(&dying))
            .await
            .context("Wait")??;
        ensure!(exit.exit_status == 137, "exit status {}", exit.exit_status);
        let error = controller
            .shutdown(&dying)
            .await
            .err()
            .context("removed from a read-only directory")?;
        ensure!(
            error.message.contains("os error 30"),
            "{directory} is read-only: shutdown: {error}"
        );
        remount(MsFlags::empty()).context("make it writable")?;
        // The back-off finishes what was asked for.
        until("the removal", Duration::from_secs(30), async || {
            let status = controller.status(&dying, false).await;
            ensure!(
                status.as_ref().is_err_and(|status| status.code == grpc::NOT_FOUND),
                "{status:?}"
            );
            Ok(())
        })
        .await?;
        remove(&controller, &living).await?;
        standalone.nothing_left_but(&[standalone.path(directory)]).await?;
    }
    Ok(())
}

/// Deletes the files that a restarted containerd deletes.
pub(crate) fn delete(files: &Path, shm: &Path) -> Result<()> {
    umount2(shm, MntFlags::MNT_DETACH)?;
    fs::remove_dir_all(shm.parent().context("no parent")?)?;
    Ok(fs::remove_dir_all(files)?)
}

/// Status answers as if nothing were wrong; what fails is logged once, counted, and tried again
/// without any call. Once with a disk on which no file can be made, and once with one on which none
/// can be written.
///
/// Promise: pod_files_are_restored.
async fn files_that_cannot_be_restored_are_restored_later() -> Result<()> {
    for (what, fill) in [("full", fill as fn(&Path) -> Result<()>), ("without space", fill_space)] {
        let standalone = Standalone::with_metrics()?;
        mount_small(&standalone.path("root"))?;
        standalone.start().await?;
        let (controller, shape, id) =
            (standalone.controller(), Shape::plain(&standalone), standalone.id("living"));
        let pid = shape.run(&controller, &id).await?;
        let whole: Vec<_> = ["hostname", "hosts", "resolv.conf"]
            .iter()
            .map(|name| fs::read(standalone.files(&id).join(name)).map(|content| (*name, content)))
            .collect::<Result<_, _>>()?;
        delete(&standalone.files(&id), &standalone.shm(&id))?;
        fill(&standalone.path("root"))?;
        // The daemon looks for no file in the first moments of a sandbox.
        until("it looks for the files", RETRY_TIMEOUT, async || {
            controller
                .status(&id, false)
                .await
                .with_context(|| format!("status on a disk that is {what}"))?;
            ensure!(standalone.logged().contains(FAILED), "not logged");
            Ok(())
        })
        .await?;
        let asked = 3;
        for _ in 0..asked {
            let status = controller
                .status(&id, false)
                .await
                .with_context(|| format!("status on a disk that is {what}"))?;
            ensure!(status.state == "SANDBOX_READY" && status.pid == pid, "{what}: {status:?}");
        }
        for (name, _) in &whole {
            ensure!(
                !standalone.files(&id).join(name).exists(),
                "{what}: there is less than all of {name}"
            );
        }
        ensure!(
            standalone.shm(&id).exists(),
            "{what}: the shared memory needs nothing of that disk"
        );
        let times = standalone.logged().matches(FAILED).count();
        ensure!((1..=whole.len()).contains(&times), "{what}: logged {times} times in one episode");
        ensure!(
            value(&standalone.metrics(), "pause_sandboxer_healing_failures_total").await?
                >= f64::from(asked),
            "{what}: not counted"
        );

        fs::remove_dir_all(standalone.path("root/filler"))?;
        until("the files are back", RETRY_TIMEOUT, async || {
            for (name, content) in &whole {
                ensure!(
                    fs::read(standalone.files(&id).join(name))? == *content,
                    "{name} is another"
                );
            }
            Ok(())
        })
        .await?;
        until("that is logged", RETRY_TIMEOUT, async || {
            ensure!(standalone.logged().contains("restored deleted pod files"), "not yet");
            Ok(())
        })
        .await?;
        is_whole(&standalone, &controller, &id).await?;
        ensure!(standalone.logged().matches(FAILED).count() == times, "{what}: logged again");
        ensure!(
            value(&standalone.metrics(), "pause_sandboxer_healed_files_total").await? >= 1.0,
            "{what}: not counted as restored"
        );
        remove(&controller, &id).await?;
        standalone.nothing_left_but(&[standalone.path("root")]).await?;
    }
    Ok(())
}

/// A daemon that wrote in place has left an empty file, which is restored. A file that a container
/// has emptied, through its mount, stays as it is.
///
/// Promise: pod_files_are_restored.
async fn a_truncated_file_is_restored() -> Result<()> {
    let standalone = Standalone::started().await?;
    let (controller, shape, id) =
        (standalone.controller(), Shape::plain(&standalone), standalone.id("cut"));
    shape.run(&controller, &id).await?;
    is_whole(&standalone, &controller, &id).await?;
    let file = |name: &str| standalone.files(&id).join(name);
    let (hosts, other) = (fs::read(file("hosts"))?, fs::metadata(file("hostname"))?.ino());
    ensure!(!hosts.is_empty(), "the node's hosts is empty");
    fs::remove_file(file("hosts"))?;
    fs::File::create(file("hosts"))?;
    until("it is put back", RETRY_TIMEOUT, async || {
        is_whole(&standalone, &controller, &id).await?;
        ensure!(fs::read(file("hosts"))? == hosts, "it is truncated as before");
        Ok(())
    })
    .await?;
    ensure!(fs::metadata(file("hostname"))?.ino() == other, "a file that was whole was replaced");

    let emptied = fs::OpenOptions::new().write(true).truncate(true).open(file("hosts"))?;
    emptied.set_modified(SystemTime::now() + Duration::from_secs(60))?;
    is_whole(&standalone, &controller, &id).await?;
    ensure!(fs::read(file("hosts"))?.is_empty(), "what a container wrote was replaced");
    remove(&controller, &id).await?;
    standalone.nothing_left().await
}

/// containerd deletes the files of the pods as it comes up, and asks for their status; an error
/// then would leave them not ready for good.
async fn node_containerd_restarts_on_a_full_disk(node: Arc<Node>) -> Result<()> {
    // The directory of what CRI keeps: in that of the sandboxes containerd would remove what fills
    // it.
    let disk = node.layout().sandbox_files("").join("..").canonicalize()?;
    mount_small(&disk)?;
    let done = restarted_on_a_full_disk(&node, &disk).await;
    umount2(&disk, MntFlags::MNT_DETACH)?;
    done
}

async fn restarted_on_a_full_disk(node: &Arc<Node>, disk: &Path) -> Result<()> {
    let pod =
        node.run(kit::Handler::Ours, PodSpec::new("full").dns(&["10.0.0.10"], &[], &[])).await?;
    let pause = pod.pause_pid().await?;
    node.stop_containerd().await?;
    // Before containerd does it, so that nothing is free when it asks.
    delete(&node.layout().sandbox_files(pod.id()), &node.layout().sandbox_shm(pod.id()))?;
    fill(disk)?;
    node.start_containerd().await?;
    ensure!(pod.is_ready().await?, "not ready after the restart");
    ensure!(pod.pause_pid().await? == pause, "another pause");
    ensure!(!node.layout().sandbox_files(pod.id()).exists(), "the disk was not full");

    fs::remove_dir_all(disk.join("filler"))?;
    until("the files are back", RETRY_TIMEOUT, async || {
        let text = fs::read_to_string(node.layout().sandbox_files(pod.id()).join("resolv.conf"))?;
        ensure!(text == "nameserver 10.0.0.10\n", "{text:?}");
        Ok(())
    })
    .await?;
    let container = pod.run(ContainerSpec::sleeping("after")).await?;
    ensure!(
        container.sh("cat /etc/resolv.conf").await? == "nameserver 10.0.0.10\n",
        "the container has another"
    );
    pod.remove().await
}

/// The record of a sandbox that runs was removed: the sandbox can be stopped and removed, and its
/// exit is reported.
///
/// Promise: full_node_keeps_its_pods.
async fn a_record_directory_that_is_gone() -> Result<()> {
    let standalone = Standalone::started().await?;
    let (controller, shape, id) =
        (standalone.controller(), Shape::plain(&standalone), standalone.id("bereft"));
    shape.run(&controller, &id).await?;
    nix::mount::umount2(&standalone.record(&id).join("shm"), nix::mount::MntFlags::MNT_DETACH)?;
    fs::remove_dir_all(standalone.record(&id))?;
    controller.stop(&id).await?;
    ensure!(controller.wait(&id).await?.exit_status == 137, "its exit");
    controller.shutdown(&id).await?;
    standalone.nothing_left().await
}
