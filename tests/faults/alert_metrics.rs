//! The failures that the alert rules are for: each shows in the daemon's metrics.
//!
//! With `RECORD=1` these cases take 20 minutes, and write `tests/packaging/alerts`, where promtool
//! checks that the alerts fire.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kit::Node;
use kit::controller::Controller;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::directories::{delete, fill, mount_small};
use crate::harness::{Case, alone, on_node};
use crate::limits::limit;
use crate::pods::{Shape, remove};
use crate::recorder::{Recorder, recorded_values_are_shortened, records, scrape, value};
use crate::soak;
use crate::standalone::{DAEMON, Standalone};
use crate::strace::Fault;

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = alone![recorded_values_are_shortened, alert_metrics];
    cases.extend(on_node![node_alert_metrics]);
    let limit = Duration::from_secs(if records() { 2400 } else { 120 });
    cases.into_iter().map(|case| case.within(limit)).collect()
}

/// A normal node: no alert.
async fn node_alert_metrics(node: Arc<Node>) -> Result<()> {
    let config = node.layout().sandboxer_config();
    let (before, socket) = (fs::read_to_string(&config)?, node.layout().top.join("m.sock"));
    let metrics = format!("{before}metrics = \"unix://{}\"\n", socket.display());
    node.stop_sandboxer().await?;
    fs::write(&config, metrics)?;
    node.start_sandboxer().await?;
    let what = "pods of containerd are run, used, killed and removed at random";
    let recorder = Recorder::begin("churn", what, socket.clone());
    recorder.minutes(1).await;
    soak::pods(&node, Duration::from_secs(if records() { 600 } else { 3 })).await?;
    recorder.minutes(1).await;
    ensure!(
        value(&socket, "pause_sandboxer_calls_total{method=\"Start\",code=\"OK\"}").await? > 0.0
    );
    for none in ["cleanups_pending", "records_kept_aside", "healing_failures_total"] {
        recorder.shows(&format!("pause_sandboxer_{none}"), |value| value == 0.0).await?;
    }
    recorder.end()?;
    node.stop_sandboxer().await?;
    fs::write(&config, before)?;
    fs::remove_file(&socket)?;
    node.start_sandboxer().await
}

/// All side by side, each with a daemon of its own.
async fn alert_metrics() -> Result<()> {
    tokio::try_join!(
        down(),
        restarts(),
        full_disk(),
        failing_starts(),
        slow_starts(),
        cleanups(),
        unknown(),
        quarantined(),
        deleted_files(),
        missing_files(),
        descriptors(),
    )?;
    Ok(())
}

/// A daemon whose metrics are recorded.
struct Scene {
    daemon: Standalone,
    controller: Controller,
    shape: Shape,
    recorder: Recorder,
}

impl Scene {
    async fn begin(name: &'static str, what: &'static str) -> Result<Self> {
        Self::with_small(name, what, None).await
    }

    /// The same with a small file system in place of a directory.
    async fn with_small(
        name: &'static str,
        what: &'static str,
        small: Option<&str>,
    ) -> Result<Self> {
        let daemon = Standalone::with_metrics()?;
        if let Some(directory) = small {
            mount_small(&daemon.path(directory))?;
        }
        daemon.start().await.context(name)?;
        let (controller, shape) = (daemon.controller(), Shape::plain(&daemon));
        // Calls are answered before the metrics are served.
        kit::until("its metrics", DAEMON, async || scrape(&daemon.metrics()).await).await?;
        let recorder = Recorder::begin(name, what, daemon.metrics());
        Ok(Self { daemon, controller, shape, recorder })
    }

    /// Runs pods, and waits for a minute.
    async fn pods(&self, count: usize) -> Result<Vec<(String, u32)>> {
        let mut pods = Vec::new();
        for number in 0..count {
            let id = self.daemon.id(&format!("pod-{number}"));
            let pid = self.shape.run(&self.controller, &id).await?;
            pods.push((id, pid));
        }
        self.recorder.minutes(1).await;
        Ok(pods)
    }

    /// Tries to run a pod every 30 s.
    async fn tries(&self, minutes: usize, succeed: bool) -> Result<()> {
        for number in 0..if records() { minutes * 2 } else { 1 } {
            let id = self.daemon.id(&format!("try-{number}"));
            let done = self.shape.run(&self.controller, &id).await;
            ensure!(done.is_ok() == succeed, "{id}: {done:?}");
            if succeed {
                remove(&self.controller, &id).await?;
            }
            self.recorder.scrapes(2).await;
        }
        Ok(())
    }
}

async fn down() -> Result<()> {
    let scene =
        Scene::begin("down", "it is stopped after a minute, and started 4 minutes later").await?;
    scene.pods(1).await?;
    scene.daemon.stop().await?;
    scene.recorder.minutes(4).await;
    ensure!(value(&scene.daemon.metrics(), "process_open_fds").await.is_err(), "it answers");
    scene.daemon.start().await?;
    scene.recorder.minutes(2).await;
    scene.recorder.end()
}

async fn restarts() -> Result<()> {
    let scene = Scene::begin("restarts", "it is killed and started 5 times, every 45 s").await?;
    scene.pods(1).await?;
    let (socket, mut last) = (scene.daemon.metrics(), 0.0);
    for _ in 0..5 {
        scene.daemon.kill()?;
        scene.daemon.start().await?;
        scene.recorder.shows("process_start_time_seconds", |value| value > last).await?;
        last = value(&socket, "process_start_time_seconds").await?;
        scene.recorder.scrapes(3).await;
    }
    scene.recorder.minutes(2).await;
    scene.recorder.end()
}

async fn full_disk() -> Result<()> {
    let what = "after a minute the disk of its records is full for 13 minutes";
    let scene = Scene::with_small("full-disk", what, Some("state")).await?;
    scene.tries(1, true).await?;
    fill(&scene.daemon.path("state"))?;
    scene.tries(13, false).await?;
    let failed = "pause_sandboxer_calls_total{method=\"Create\",code=\"RESOURCE_EXHAUSTED\"}";
    scene.recorder.shows(failed, |value| value > 0.0).await?;
    fs::remove_dir_all(scene.daemon.path("state/filler"))?;
    scene.tries(7, true).await?;
    scene.recorder.end()
}

async fn failing_starts() -> Result<()> {
    let what = "after a minute the kernel refuses to execute the pause program for 13 minutes";
    let scene = Scene::begin("failing-starts", what).await?;
    scene.tries(1, true).await?;
    let fault = Fault::begin(scene.daemon.pid()?, &["execveat:error=EACCES"]).await?;
    scene.tries(13, false).await?;
    let failed = "pause_sandboxer_calls_total{method=\"Start\",code=\"INTERNAL\"}";
    scene.recorder.shows(failed, |value| value > 0.0).await?;
    fault.end().await?;
    scene.tries(7, true).await?;
    scene.recorder.end()
}

async fn slow_starts() -> Result<()> {
    let what = "after a minute the pause program executes 1.5 s late, for 17 minutes";
    let scene = Scene::begin("slow-starts", what).await?;
    scene.tries(1, true).await?;
    let bucket = "pause_sandboxer_call_duration_seconds_bucket{le=\"1.024\",method=\"Start\"}";
    let quick = value(&scene.daemon.metrics(), bucket).await?;
    let fault = Fault::begin(scene.daemon.pid()?, &["execveat:delay_enter=1500000"]).await?;
    scene.tries(17, true).await?;
    scene.recorder.shows(bucket, |value| value == quick).await?;
    fault.end().await?;
    scene.recorder.end()
}

async fn cleanups() -> Result<()> {
    let what = "after a minute 2 pauses die, and the kernel refuses to unmount for 17 minutes";
    let scene = Scene::begin("cleanups", what).await?;
    let pods = scene.pods(3).await?;
    let fault = Fault::begin(scene.daemon.pid()?, &["umount2:error=EBUSY"]).await?;
    for (_, pid) in &pods[..2] {
        kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL)?;
    }
    scene.recorder.shows("pause_sandboxer_cleanups_pending", |value| value == 2.0).await?;
    scene.recorder.minutes(17).await;
    fault.end().await?;
    scene.recorder.shows("pause_sandboxer_cleanups_pending", |value| value == 0.0).await?;
    scene.recorder.minutes(2).await;
    scene.recorder.end()
}

async fn unknown() -> Result<()> {
    let what = "after a minute it is started without descriptors for its 3 pauses, for 8 minutes";
    let scene = Scene::begin("unknown", what).await?;
    scene.pods(3).await?;
    scene.daemon.kill()?;
    scene.daemon.start_with(&["pidfd_open:error=EMFILE"]).await?;
    let unknown = "pause_sandboxer_sandboxes{state=\"unknown\"";
    scene.recorder.shows(unknown, |value| value == 3.0).await?;
    scene.recorder.minutes(8).await;
    scene.daemon.end_faults().await?;
    scene.recorder.shows(unknown, |value| value == 0.0).await?;
    scene.recorder.minutes(2).await;
    scene.recorder.end()
}

async fn quarantined() -> Result<()> {
    let what = "after a minute it is started with a damaged record, for 3 minutes";
    let scene = Scene::begin("quarantined", what).await?;
    let pods = scene.pods(2).await?;
    let record = scene.daemon.record(&pods[0].0).join("record.json");
    let whole = fs::read(&record)?;
    for (text, quarantined) in [(&b"{"[..], 1.0), (&whole, 0.0)] {
        scene.daemon.stop().await?;
        fs::write(&record, text)?;
        scene.daemon.start().await?;
        let series = "pause_sandboxer_records_kept_aside";
        scene.recorder.shows(series, |value| value == quarantined).await?;
        scene.recorder.minutes(3).await;
    }
    scene.recorder.end()
}

/// Deletes the files of a pod until the metric counts that.
async fn delete_files(scene: &Scene, id: &str, series: &str) -> Result<()> {
    delete(&scene.daemon.files(id), &scene.daemon.shm(id))?;
    if series.contains("failures") {
        fill(&scene.daemon.path("root"))?;
    }
    // containerd asks for the status after the restart that deletes them.
    scene.controller.status(id, false).await?;
    scene.recorder.shows(series, |value| value > 0.0).await
}

async fn deleted_files() -> Result<()> {
    let what = "after a minute the files of a pod are deleted";
    let scene = Scene::begin("deleted-files", what).await?;
    let pods = scene.pods(1).await?;
    delete_files(&scene, &pods[0].0, "pause_sandboxer_healed_files_total").await?;
    scene.recorder.minutes(2).await;
    scene.recorder.end()
}

async fn missing_files() -> Result<()> {
    let what = "after a minute the files of a pod are deleted, and the disk is full for 14 minutes";
    let scene = Scene::with_small("missing-files", what, Some("root")).await?;
    let pods = scene.pods(1).await?;
    delete_files(&scene, &pods[0].0, "pause_sandboxer_healing_failures_total").await?;
    scene.recorder.minutes(14).await;
    fs::remove_dir_all(scene.daemon.path("root/filler"))?;
    scene.recorder.shows("pause_sandboxer_healed_files_total", |value| value > 0.0).await?;
    scene.recorder.minutes(2).await;
    scene.recorder.end()
}

async fn descriptors() -> Result<()> {
    let what = "after a minute its limit of descriptors leaves only a few free, for 8 minutes";
    let scene = Scene::begin("descriptors", what).await?;
    scene.pods(5).await?;
    let (daemon, socket) = (scene.daemon.pid()?, scene.daemon.metrics());
    let (open, max) =
        (value(&socket, "process_open_fds").await?, value(&socket, "process_max_fds").await?);
    limit(daemon, &format!("{}", open + 3.0))?;
    scene.recorder.shows("process_max_fds", |value| value == open + 3.0).await?;
    scene.recorder.minutes(8).await;
    limit(daemon, &format!("{max}"))?;
    scene.recorder.shows("process_max_fds", |value| value == max).await?;
    scene.recorder.minutes(2).await;
    scene.recorder.end()
}
