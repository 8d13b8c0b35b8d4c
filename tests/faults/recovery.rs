//! Recovery from the leftovers of an earlier daemon, on the real kernel.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use kit::controller::{CONFIG_TYPE, any};
use kit::cri::api::DNSConfig;
use kit::machine::processes;
use kit::{grpc, until};
use nix::mount::{MntFlags, umount2};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use protobuf::Message as _;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::harness::{Case, alone};
use crate::pods::{Shape, is_whole, remove, state};
use crate::standalone::{DAEMON, Standalone};

pub(crate) fn cases() -> Vec<Case> {
    alone![
        recovery_finds_running_exited_and_reused_pids,
        an_exit_during_the_restart_is_reported,
        calls_wait_for_the_recovery,
        a_pause_that_is_not_determined_in_time_is_unknown,
        an_unknown_pause_is_determined_later,
        a_record_of_many_megabytes_is_read_again,
        after_a_reboot,
        killed_before_the_child_executes_the_pause,
    ]
}

fn stage(standalone: &Standalone, id: &str) -> Result<(PathBuf, Value)> {
    let path = standalone.record(id).join("stage.json");
    let text = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
    Ok((path, serde_json::from_slice(&text)?))
}

/// Changes the recorded identity of a pause.
fn change(standalone: &Standalone, id: &str, key: &str, value: Value) -> Result<()> {
    let (path, mut stage) = stage(standalone, id)?;
    let field = stage.pointer_mut(&format!("/started/identity/{key}")).context("no such field")?;
    *field = value;
    Ok(fs::write(path, stage.to_string())?)
}

/// containerd sends the config twice, in requests of up to 16 MiB. What would make a record beyond
/// what a daemon reads is refused before anything is made.
///
/// Promise: record_is_never_discarded.
async fn a_record_of_many_megabytes_is_read_again() -> Result<()> {
    let standalone = Standalone::started().await?;
    let (controller, shape) = (standalone.controller(), Shape::plain(&standalone));
    let (large, vast) = (standalone.id("large"), standalone.id("vast"));
    let mut config = shape.config();
    config.annotations.insert("example.org/large".to_owned(), "x".repeat(7 << 20));
    let bytes = config.write_to_bytes()?;
    let mut request = controller.create_request(&large);
    request.options = Some(any(CONFIG_TYPE, bytes.clone())).into();
    request
        .sandbox
        .mut_or_insert_default()
        .extensions
        .insert("metadata".to_owned(), any("metadata", bytes));
    controller.create_raw(&request).await?;
    let pid = controller.start(&large).await?.pid;

    let mut config = shape.config();
    // Six bytes each as JSON.
    let dns = DNSConfig { servers: vec!["\u{1}".repeat(12 << 20)], ..Default::default() };
    config.dns_config = Some(dns).into();
    let error = controller
        .create(&vast, &config, "")
        .await
        .err()
        .context("a record that cannot be read was written")?;
    ensure!(
        error.message.contains("os error 27") && error.message.contains("record.json"),
        "{error}"
    );
    ensure!(!standalone.record(&vast).exists(), "something is left of the refused");

    standalone.kill()?;
    standalone.start().await?;
    ensure!(is_whole(&standalone, &controller, &large).await? == pid, "another pause");
    remove(&controller, &large).await?;
    standalone.nothing_left().await
}

/// Ready with the same pid and time of creation; or not ready when pid, start time, namespace or
/// boot are another's, who stays alive.
///
/// Promise: foreign_process_survives.
async fn recovery_finds_running_exited_and_reused_pids() -> Result<()> {
    let standalone = Standalone::started().await?;
    let (controller, shape) = (standalone.controller(), Shape::plain(&standalone));
    let alive = standalone.id("alive");
    let pid = shape.run(&controller, &alive).await?;
    let created_at = controller.status(&alive, false).await?.created_at;
    // A process that has nothing to do with us, as one that got the pid of a pause.
    let mut stranger = std::process::Command::new("sleep").arg("600").spawn()?;
    let others = [
        ("pid", json!(stranger.id())),
        ("start_time", json!(1)),
        ("pid_namespace", json!(1)),
        ("boot_id", json!("another")),
    ];
    let mut pids = Vec::new();
    for (key, _) in &others {
        pids.push(shape.run(&controller, &standalone.id(key)).await?);
    }
    standalone.kill()?;
    for (key, value) in &others {
        change(&standalone, &standalone.id(key), key, value.clone())?;
    }
    standalone.start().await?;

    ensure!(is_whole(&standalone, &controller, &alive).await? == pid, "another pause");
    ensure!(
        controller.status(&alive, false).await?.created_at == created_at,
        "another time of creation"
    );
    for (key, _) in &others {
        let id = standalone.id(key);
        ensure!(
            state(&controller, &id).await? == "SANDBOX_NOTREADY",
            "{key} is another, but it is ready"
        );
        ensure!(controller.wait(&id).await?.exit_status == 255, "its exit is unknown");
        remove(&controller, &id).await?;
    }
    ensure!(stranger.try_wait()?.is_none(), "the stranger was killed");
    stranger.kill()?;
    stranger.wait()?;
    remove(&controller, &alive).await?;
    standalone.nothing_left().await
}

/// A pause that dies while no daemon runs.
///
/// Promise: restart_loses_no_pod.
async fn an_exit_during_the_restart_is_reported() -> Result<()> {
    let standalone = Standalone::started().await?;
    let (controller, shape) = (standalone.controller(), Shape::plain(&standalone));
    for how in ["terminated", "killed"] {
        let id = standalone.id(how);
        let pid = shape.run(&controller, &id).await?;
        if how == "killed" {
            standalone.kill()?
        } else {
            standalone.stop().await?
        }
        kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL)?;
        until("pause exited", Duration::from_secs(5), async || {
            ensure!(!processes::one(pid).is_ok_and(|p| p.state != 'Z'), "it lives");
            Ok(())
        })
        .await?;
        standalone.start().await?;
        let exit = tokio::time::timeout(Duration::from_secs(5), controller.wait(&id))
            .await
            .context("Wait hangs")??;
        ensure!([137, 255].contains(&exit.exit_status), "exit status {}", exit.exit_status);
        ensure!(state(&controller, &id).await? == "SANDBOX_NOTREADY", "not reported");
        remove(&controller, &id).await?;
    }
    standalone.nothing_left().await
}

/// The kernel does not answer about one pause: the daemon comes up all the same, with all other
/// pods.
///
/// Promise: undecided_is_not_dead.
async fn a_pause_that_is_not_determined_in_time_is_unknown() -> Result<()> {
    let standalone = Standalone::started().await?;
    let (controller, shape) = (standalone.controller(), Shape::plain(&standalone));
    let ids: Vec<String> = (0..6).map(|n| standalone.id(&n.to_string())).collect();
    for id in &ids {
        shape.run(&controller, id).await?;
    }
    standalone.kill()?;
    // Of each thread the first look hangs beyond what a record may take; which records these are is
    // left to chance.
    let begun = Instant::now();
    standalone.start_with(&["pidfd_open:delay_enter=13s:when=1"]).await?;
    ensure!(
        begun.elapsed() < kit::patient(Duration::from_secs(25)),
        "up only after {:?}",
        begun.elapsed()
    );
    let undecided = standalone.logged().contains("cannot determine whether the pause process runs");
    ensure!(undecided, "none was unknown");
    // Those are looked for again, and Status waits for it.
    for id in &ids {
        let state = state(&controller, id).await?;
        ensure!(state == "SANDBOX_READY", "{id} is {state}");
    }
    ensure!(standalone.pauses()?.len() == ids.len(), "a pause was ended");
    standalone.end_faults().await?;
    for id in &ids {
        remove(&controller, id).await.with_context(|| format!("end {id}"))?;
    }
    standalone.nothing_left().await
}

/// containerd gives its first connection a second; what a recovery takes is no matter then.
///
/// Promise: calls_wait_for_recovery.
async fn calls_wait_for_the_recovery() -> Result<()> {
    /// The recovery of one pod takes this; less than a record may take.
    const SLOW: &str = "pidfd_open:delay_enter=6s:when=1";
    let standalone = Standalone::started().await?;
    let shape = Shape::plain(&standalone);
    let id = standalone.id("slow");
    let pid = shape.run(&standalone.controller(), &id).await?;
    let ready = || standalone.logged().matches(" ready socket=").count();
    let begin = async || {
        standalone.kill()?;
        let before = ready();
        standalone.spawn_with(&[SLOW])?;
        until("HTTP/2 is served", DAEMON, async || speaks_http2(&standalone.path("s.sock")).await)
            .await?;
        ensure!(ready() == before, "the recovery is over before the connection was taken");
        let call = |wait: bool| {
            let (controller, id) = (standalone.controller(), id.clone());
            tokio::spawn(async move {
                if wait {
                    controller.wait(&id).await.map(drop)
                } else {
                    controller.status(&id, false).await.map(drop)
                }
            })
        };
        anyhow::Ok((before, call(false), call(true)))
    };

    let (before, status, wait) = begin().await?;
    status.await?.context("a Status that came during the recovery")?;
    ensure!(ready() == before + 1, "answered before the recovery was over");
    ensure!(standalone.controller().status(&id, false).await?.pid == pid, "another pause");
    ensure!(!wait.is_finished(), "the Wait of a live pod has ended");
    standalone.end_faults().await?;

    let (before, status, wait) = begin().await?;
    standalone.stop().await?;
    for (call, ended) in [("Status", status.await?), ("Wait", wait.await?)] {
        ensure!(
            ended.as_ref().is_err_and(|status| status.code == grpc::UNAVAILABLE),
            "{call}: {ended:?}"
        );
    }
    ensure!(ready() == before, "it was ended after its recovery, not in it");
    standalone.start().await?;
    is_whole(&standalone, &standalone.controller(), &id).await?;
    remove(&standalone.controller(), &id).await?;
    standalone.nothing_left().await
}

/// Whether the other end answers the preface of HTTP/2 by its own: a frame of settings.
async fn speaks_http2(socket: &Path) -> Result<()> {
    let mut stream = tokio::net::UnixStream::connect(socket).await?;
    stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await?;
    let mut head = [0; 9];
    tokio::time::timeout(Duration::from_secs(1), stream.read_exact(&mut head)).await??;
    ensure!(head[3] == 4, "a frame of type {}", head[3]);
    Ok(())
}

/// The kernel refuses to tell, and then tells.
///
/// Promise: undecided_is_not_dead.
async fn an_unknown_pause_is_determined_later() -> Result<()> {
    const UNKNOWN: &str = "pause_sandboxer_sandboxes{state=\"unknown\"";
    let standalone = Standalone::with_metrics()?;
    standalone.start().await?;
    let (controller, shape) = (standalone.controller(), Shape::plain(&standalone));
    let (stopped, removed) = (standalone.id("stopped"), standalone.id("removed"));
    let kept = standalone.id("kept");
    for id in [&stopped, &removed, &kept] {
        shape.run(&controller, id).await?;
    }
    standalone.kill()?;
    standalone.start_with(&["pidfd_open:error=EMFILE"]).await?;
    standalone.metric_is(UNKNOWN, 3.0..=3.0).await?;
    let asked = tokio::spawn({
        let (controller, kept) = (standalone.controller(), kept.clone());
        async move { state(&controller, &kept).await }
    });
    let error = controller.stop(&stopped).await.err().context("stopped what cannot be found")?;
    ensure!(
        error.message.contains("open a pidfd") && error.message.contains("os error 24"),
        "{error}"
    );
    ensure!(controller.shutdown(&removed).await.is_err(), "removed what cannot be found");
    ensure!(standalone.pauses()?.len() == 3, "a pause was ended");
    ensure!(!asked.is_finished(), "Status of an unknown pause was answered");
    standalone.end_faults().await?;
    // The pause of a pod that is to live is looked for again.
    let state = asked.await??;
    ensure!(state == "SANDBOX_READY", "it is {state}");
    controller.stop(&stopped).await?;
    standalone.metric_is(UNKNOWN, 0.0..=0.0).await?;
    ensure!(controller.wait(&stopped).await?.exit_status == 137, "its exit");
    // It was asked for once, and is done by the back-off.
    until("the removal", Duration::from_secs(20), async || {
        let status = controller.status(&removed, false).await;
        ensure!(status.as_ref().is_err_and(|status| status.code == grpc::NOT_FOUND), "{status:?}");
        Ok(())
    })
    .await?;
    controller.shutdown(&stopped).await?;
    is_whole(&standalone, &controller, &kept).await?;
    remove(&controller, &kept).await?;
    standalone.nothing_left().await
}

/// The state directory is empty and nothing lives.
///
/// Promise: removal_leaves_nothing.
async fn after_a_reboot() -> Result<()> {
    let standalone = Standalone::started().await?;
    let (controller, shape) = (standalone.controller(), Shape::plain(&standalone));
    let id = standalone.id("before");
    let pid = shape.run(&controller, &id).await?;
    standalone.kill()?;
    // A reboot removes processes, mounts, and all below /run. containerd's root stays.
    kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL)?;
    for point in [
        standalone.shm(&id),
        standalone.record(&id).join("shm"),
        standalone.path("state/sandboxes"),
    ] {
        umount2(&point, MntFlags::MNT_DETACH)?;
    }
    fs::remove_dir_all(standalone.path("state"))?;
    fs::remove_dir_all(standalone.path("run"))?;
    // A killed process keeps its cgroups until it has ended, and a pause has the least share of the
    // processors.
    until("its cgroups", Duration::from_secs(10), async || {
        kit::machine::cgroup::remove(&format!("{}/{id}", standalone.cgroup()))
    })
    .await?;
    standalone.start().await?;
    for code in
        [controller.status(&id, false).await.map(drop), controller.wait(&id).await.map(drop)]
    {
        ensure!(code.as_ref().is_err_and(|status| status.code == grpc::NOT_FOUND), "{code:?}");
    }
    controller.shutdown(&id).await?;
    standalone.nothing_left().await?;
    shape.run(&controller, &id).await.context("run it again")?;
    remove(&controller, &id).await?;
    standalone.nothing_left().await
}

/// The daemon is killed while the child that is to be a pause is held up before its exec: it has
/// neither name nor cgroup.
async fn killed_before_the_child_executes_the_pause() -> Result<()> {
    let standalone = Standalone::new("")?;
    standalone.start_with(&["execveat:delay_enter=2s"]).await?;
    let shape = Shape { cgroup_parent: String::new(), ..Shape::plain(&standalone) };
    let (controller, id) = (standalone.controller(), standalone.id("late"));
    shape.create(&controller, &id).await?;
    let daemon = standalone.pid()?;
    let starting = tokio::spawn({
        let (controller, id) = (standalone.controller(), id.clone());
        async move { controller.start(&id).await }
    });
    let child = until("the child", Duration::from_secs(5), async || {
        let children = processes::all()?.into_iter().filter(|p| p.parent == daemon);
        children.map(|p| p.pid).next().context("none yet")
    })
    .await?;
    standalone.kill()?;
    ensure!(starting.await?.is_err(), "started without a daemon");
    standalone.start().await?;
    ensure!(!processes::one(child).is_ok_and(|p| p.state != 'Z'), "the child lives on");
    ensure!(
        standalone.logged().contains("killing pause process without a record"),
        "it was not found:\n{}",
        standalone.logged()
    );
    // An interrupted start is undone.
    let status = controller.status(&id, false).await;
    ensure!(status.as_ref().is_err_and(|status| status.code == grpc::NOT_FOUND), "{status:?}");
    shape.run(&controller, &id).await?;
    is_whole(&standalone, &controller, &id).await?;
    remove(&controller, &id).await?;
    standalone.nothing_left().await
}
