//! Garbage collection.

use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kit::{Handler, Node, PodSpec, grpc, until};
use nix::mount::{MsFlags, mount};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::harness::{Case, alone, on_node};
use crate::pods::{Shape, is_whole, remove};
use crate::standalone::Standalone;

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = alone![
        directories_and_mounts_without_a_record,
        pauses_without_a_record,
        pauses_of_other_daemons_stay
    ];
    cases.extend(on_node![node_forgotten_sandboxes_are_collected]);
    cases
}

/// Sandboxes that containerd does not know: one that runs, one that has ended, and one that was
/// never started, though its state was asked for. All go, and one that containerd knows stays
/// though it has ended and no call asks for it.
///
/// Promise: orphans_are_removed.
async fn node_forgotten_sandboxes_are_collected(node: Arc<Node>) -> Result<()> {
    let controller = node.sandboxer();
    let kept = node.run(Handler::Ours, PodSpec::new("kept").host_network()).await?;
    let pause = kept.pause_pid().await?;
    let (home, ids) = (
        node.prepare(PodSpec::new("forgotten").host_network())?,
        ["0a".repeat(32), "0b".repeat(32)],
    );
    let mut pids = Vec::new();
    for id in &ids {
        controller.create(id, home.config(), "").await?;
        pids.push(controller.start(id).await?.pid);
    }
    for pid in [pause, pids[0]] {
        kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL)?;
    }
    until("containerd hears of the end", Duration::from_secs(20), async || {
        ensure!(!kept.is_ready().await?, "it is ready");
        Ok(())
    })
    .await?;
    // No call asks the next daemon for the status of a pod that has ended.
    node.stop_sandboxer().await?;
    node.start_sandboxer().await?;
    let created = "0c".repeat(32);
    controller.create(&created, home.config(), "").await?;
    controller.status(&created, false).await?;
    let record = |id: &str| node.layout().sandboxer_state().join("sandboxes").join(id);
    until("the forgotten are removed", Duration::from_secs(30), async || {
        for id in ids.iter().chain([&created]) {
            ensure!(!record(id).exists(), "{id} is there");
        }
        Ok(())
    })
    .await?;
    ensure!(record(kept.id()).exists(), "a pod that containerd knows was removed");
    home.clear()?;
    kept.remove().await
}

/// Directories of sandboxes in which there is no record: empty, with a stage, with shared memory
/// mounted twice.
///
/// Promise: orphans_are_removed.
async fn directories_and_mounts_without_a_record() -> Result<()> {
    let standalone = Standalone::started().await?;
    let (controller, shape) = (standalone.controller(), Shape::plain(&standalone));
    let (kept, lost) = (standalone.id("kept"), standalone.id("lost"));
    for id in [&kept, &lost] {
        shape.run(&controller, id).await?;
    }
    standalone.kill()?;
    fs::create_dir(standalone.record(&standalone.id("empty")))?;
    let half = standalone.record(&standalone.id("half"));
    fs::create_dir(&half)?;
    fs::write(half.join("stage.json"), "\"created\"")?;
    fs::write(half.join("record.json.new"), "{\"vers")?;
    let strange = standalone.record(&standalone.id("strange"));
    fs::create_dir(&strange)?;
    fs::write(strange.join("foreign"), "")?;
    let removed = standalone.record(&standalone.id("removed"));
    fs::create_dir(&removed)?;
    fs::write(removed.join("foreign"), "")?;
    // All of one is there but the record: pause, cgroup, both mounts, files.
    fs::remove_file(standalone.record(&lost).join("record.json"))?;
    mount(
        Some("more"),
        &standalone.record(&lost).join("shm"),
        Some("tmpfs"),
        MsFlags::empty(),
        None::<&str>,
    )?;
    standalone.start().await?;

    let left = standalone.left()?;
    for id in [&lost, &standalone.id("empty"), &standalone.id("half")] {
        let remains: Vec<&String> =
            left.iter().filter(|thing| thing.contains(id.as_str())).collect();
        ensure!(remains.is_empty(), "left: {remains:#?}");
        let status = controller.status(id, false).await;
        ensure!(status.as_ref().is_err_and(|status| status.code == grpc::NOT_FOUND), "{status:?}");
    }
    is_whole(&standalone, &controller, &kept).await?;
    ensure!(strange.join("foreign").exists(), "what is not understood was deleted");
    ensure!(standalone.logged().contains("a directory without a record"), "and it is not reported");
    // The daemon removes the first, and frees the ids of both.
    fs::remove_file(strange.join("foreign"))?;
    fs::remove_dir_all(&removed)?;
    for name in ["strange", "removed"] {
        let id = standalone.id(name);
        until("the id is free", Duration::from_secs(60), async || {
            let status = controller.status(&id, false).await;
            let is_free = status.as_ref().is_err_and(|status| status.code == grpc::NOT_FOUND);
            ensure!(is_free, "{name}: {status:?}");
            Ok(())
        })
        .await?;
        ensure!(!standalone.record(&id).exists(), "{name}");
    }
    remove(&controller, &kept).await?;
    standalone.nothing_left().await
}

/// A pause whose record directory is gone altogether.
///
/// Promise: orphans_are_removed.
async fn pauses_without_a_record() -> Result<()> {
    let standalone = Standalone::started().await?;
    let (controller, shape) = (standalone.controller(), Shape::plain(&standalone));
    let bare_cgroup = Shape { cgroup_parent: String::new(), ..shape.clone() };
    let (kept, inside, outside) =
        (standalone.id("kept"), standalone.id("inside"), standalone.id("outside"));
    shape.run(&controller, &kept).await?;
    shape.run(&controller, &inside).await?;
    bare_cgroup.run(&controller, &outside).await?;
    standalone.kill()?;
    for id in [&inside, &outside] {
        nix::mount::umount2(&standalone.record(id).join("shm"), nix::mount::MntFlags::MNT_DETACH)?;
        nix::mount::umount2(&standalone.shm(id), nix::mount::MntFlags::MNT_DETACH)?;
        fs::remove_dir_all(standalone.shm(id).parent().context("no parent")?)?;
        fs::remove_dir_all(standalone.files(id))?;
        fs::remove_dir_all(standalone.record(id))?;
    }
    standalone.start().await?;
    let left = standalone.left()?;
    for id in [&inside, &outside] {
        let remains: Vec<&String> =
            left.iter().filter(|thing| thing.contains(id.as_str())).collect();
        ensure!(remains.is_empty(), "left: {remains:#?}");
    }
    is_whole(&standalone, &controller, &kept).await?;
    remove(&controller, &kept).await?;
    standalone.nothing_left().await
}

/// Two daemons of one machine with sandboxes of the same ids, and a process that only looks like a
/// pause.
///
/// Promise: orphans_are_removed.
async fn pauses_of_other_daemons_stay() -> Result<()> {
    let (ours, theirs) = (Standalone::started().await?, Standalone::started().await?);
    let id = ours.id("same");
    let shape = Shape { cgroup_parent: String::new(), ..Shape::plain(&theirs) };
    let pid = shape.run(&theirs.controller(), &id).await?;
    let mut imitation = imitation(&ours.path(""), &id)?;
    // To this daemon the id is one whose start was interrupted.
    shape.create(&ours.controller(), &id).await?;
    ours.kill()?;
    fs::create_dir(ours.record(&id).join("shm"))?;
    ours.start().await?;
    let status = ours.controller().status(&id, false).await;
    ensure!(status.as_ref().is_err_and(|status| status.code == grpc::NOT_FOUND), "{status:?}");
    let status = theirs.controller().status(&id, false).await?;
    ensure!(
        status.state == "SANDBOX_READY" && status.pid == pid,
        "the other daemon's sandbox: {status:?}"
    );
    ensure!(imitation.try_wait()?.is_none(), "the imitation was killed");
    imitation.kill()?;
    imitation.wait()?;
    remove(&theirs.controller(), &id).await?;
    theirs.nothing_left().await?;
    ours.nothing_left().await
}

/// A process with a pause's command line and no mark.
fn imitation(dir: &Path, id: &str) -> Result<std::process::Child> {
    fs::write(dir.join(id), "while :; do sleep 1; done\n")?;
    Ok(Command::new("/bin/sh").arg0("/pause").arg(id).current_dir(dir).spawn()?)
}
