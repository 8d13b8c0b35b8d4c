//! The failures that the alert rules are for: each shows in the daemon's metrics.
//!
//! With `RECORD=1` these cases take 35 minutes, and write `tests/packaging/alerts`, where promtool
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
use crate::recorder::{Recorder, is_recording, recorded_values_are_shortened, scrape, value};
use crate::soak;
use crate::standalone::{DAEMON, Standalone};
use crate::strace::Fault;

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = alone![recorded_values_are_shortened, alert_metrics];
    cases.extend(on_node![node_alert_metrics]);
    let limit = Duration::from_secs(if is_recording() { 2400 } else { 120 });
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
    soak::pods(&node, Duration::from_secs(if is_recording() { 600 } else { 3 })).await?;
    recorder.minutes(1).await;
    let started = "pause_sandboxer_calls_total{method=\"Start\",code=\"OK\"}";
    recorder.wait_for_value(started, |value| value > 0.0).await?;
    for none in ["cleanups_pending", "records_kept_aside", "healing_failures_total"] {
        recorder.wait_for_value(&format!("pause_sandboxer_{none}"), |value| value == 0.0).await?;
    }
    recorder.end()?;
    node.stop_sandboxer().await?;
    fs::write(&config, before)?;
    fs::remove_file(&socket)?;
    node.start_sandboxer().await
}

/// Runs the functions side by side; an error names the function.
macro_rules! concurrently {
    ($($failure:ident),* $(,)?) => {
        tokio::try_join!($(async { $failure().await.context(stringify!($failure)) }),*)
    };
}

/// All failures, each with a daemon of its own.
async fn alert_metrics() -> Result<()> {
    concurrently!(
        down,
        restarts,
        full_disk,
        failing_starts,
        slow_starts,
        cleanups,
        unknown,
        quarantined,
        deleted_files,
        missing_files,
        descriptors,
    )?;
    Ok(())
}

/// A daemon whose metrics are recorded.
struct RecordedDaemon {
    daemon: Standalone,
    controller: Controller,
    shape: Shape,
    recorder: Recorder,
}

impl RecordedDaemon {
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
        for number in 0..if is_recording() { minutes * 2 } else { 1 } {
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
    let recorded =
        RecordedDaemon::begin("down", "it is stopped after a minute, and started 4 minutes later")
            .await?;
    recorded.pods(1).await?;
    recorded.daemon.stop().await?;
    recorded.recorder.minutes(4).await;
    ensure!(
        value(&recorded.daemon.metrics(), "process_open_fds").await.is_err(),
        "the stopped daemon serves metrics"
    );
    recorded.daemon.start().await?;
    recorded.recorder.minutes(2).await;
    recorded.recorder.end()
}

async fn restarts() -> Result<()> {
    let recorded =
        RecordedDaemon::begin("restarts", "it is killed and started 5 times, every 45 s").await?;
    recorded.pods(1).await?;
    let (socket, mut last) = (recorded.daemon.metrics(), 0.0);
    for _ in 0..5 {
        recorded.daemon.kill()?;
        recorded.daemon.start().await?;
        recorded
            .recorder
            .wait_for_value("process_start_time_seconds", |value| value > last)
            .await?;
        last = value(&socket, "process_start_time_seconds").await?;
        recorded.recorder.scrapes(3).await;
    }
    recorded.recorder.minutes(2).await;
    recorded.recorder.end()
}

async fn full_disk() -> Result<()> {
    let what = "after a minute the disk of its records is full for 13 minutes";
    let recorded = RecordedDaemon::with_small("full-disk", what, Some("state")).await?;
    recorded.tries(1, true).await?;
    fill(&recorded.daemon.path("state"))?;
    recorded.tries(13, false).await?;
    let failed = "pause_sandboxer_calls_total{method=\"Create\",code=\"RESOURCE_EXHAUSTED\"}";
    recorded.recorder.wait_for_value(failed, |value| value > 0.0).await?;
    fs::remove_dir_all(recorded.daemon.path("state/filler"))?;
    recorded.tries(7, true).await?;
    recorded.recorder.end()
}

async fn failing_starts() -> Result<()> {
    let what = "after a minute execveat of the pause program fails for 13 minutes";
    let recorded = RecordedDaemon::begin("failing-starts", what).await?;
    recorded.tries(1, true).await?;
    let fault = Fault::begin(recorded.daemon.pid()?, &["execveat:error=EACCES"]).await?;
    recorded.tries(13, false).await?;
    let failed = "pause_sandboxer_calls_total{method=\"Start\",code=\"INTERNAL\"}";
    recorded.recorder.wait_for_value(failed, |value| value > 0.0).await?;
    fault.end().await?;
    recorded.tries(7, true).await?;
    recorded.recorder.end()
}

async fn slow_starts() -> Result<()> {
    let what = "after a minute execveat of the pause program takes 1.5 s more, for 17 minutes";
    let recorded = RecordedDaemon::begin("slow-starts", what).await?;
    recorded.tries(1, true).await?;
    let bucket = "pause_sandboxer_call_duration_seconds_bucket{le=\"1.024\",method=\"Start\"}";
    let quick = value(&recorded.daemon.metrics(), bucket).await?;
    let fault = Fault::begin(recorded.daemon.pid()?, &["execveat:delay_enter=1500000"]).await?;
    recorded.tries(17, true).await?;
    recorded.recorder.wait_for_value(bucket, |value| value == quick).await?;
    fault.end().await?;
    recorded.recorder.end()
}

async fn cleanups() -> Result<()> {
    let what = "after a minute 2 pause processes are killed, and umount2 fails for 17 minutes";
    let recorded = RecordedDaemon::begin("cleanups", what).await?;
    let pods = recorded.pods(3).await?;
    let fault = Fault::begin(recorded.daemon.pid()?, &["umount2:error=EBUSY"]).await?;
    for (_, pid) in &pods[..2] {
        kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL)?;
    }
    recorded
        .recorder
        .wait_for_value("pause_sandboxer_cleanups_pending", |value| value == 2.0)
        .await?;
    recorded.recorder.minutes(17).await;
    fault.end().await?;
    recorded
        .recorder
        .wait_for_value("pause_sandboxer_cleanups_pending", |value| value == 0.0)
        .await?;
    recorded.recorder.minutes(2).await;
    recorded.recorder.end()
}

async fn unknown() -> Result<()> {
    let what = "after a minute it is started again, and pidfd_open fails for 8 minutes";
    let recorded = RecordedDaemon::begin("unknown", what).await?;
    recorded.pods(3).await?;
    recorded.daemon.kill()?;
    recorded.daemon.start_with(&["pidfd_open:error=EMFILE"]).await?;
    let unknown = "pause_sandboxer_sandboxes{state=\"unknown\"";
    recorded.recorder.wait_for_value(unknown, |value| value == 3.0).await?;
    recorded.recorder.minutes(8).await;
    recorded.daemon.end_faults().await?;
    recorded.recorder.wait_for_value(unknown, |value| value == 0.0).await?;
    recorded.recorder.minutes(2).await;
    recorded.recorder.end()
}

async fn quarantined() -> Result<()> {
    let what = "after a minute it is started with a damaged record, for 3 minutes";
    let recorded = RecordedDaemon::begin("quarantined", what).await?;
    let pods = recorded.pods(2).await?;
    let record = recorded.daemon.record(&pods[0].0).join("record.json");
    let whole = fs::read(&record)?;
    for (text, quarantined) in [(&b"{"[..], 1.0), (&whole, 0.0)] {
        recorded.daemon.stop().await?;
        fs::write(&record, text)?;
        recorded.daemon.start().await?;
        let series = "pause_sandboxer_records_kept_aside";
        recorded.recorder.wait_for_value(series, |value| value == quarantined).await?;
        recorded.recorder.minutes(3).await;
    }
    recorded.recorder.end()
}

/// Deletes the files of the pod `id`.
fn delete_files(recorded: &RecordedDaemon, id: &str) -> Result<()> {
    delete(&recorded.daemon.files(id), &recorded.daemon.shm(id))
}

/// Asks for the status of the pod `id`, as containerd does after a restart that deletes files.
async fn request_status(recorded: &RecordedDaemon, id: &str) -> Result<()> {
    recorded.controller.status(id, false).await?;
    Ok(())
}

async fn deleted_files() -> Result<()> {
    let what = "after a minute the files of a pod are deleted";
    let recorded = RecordedDaemon::begin("deleted-files", what).await?;
    let pods = recorded.pods(1).await?;
    delete_files(&recorded, &pods[0].0)?;
    request_status(&recorded, &pods[0].0).await?;
    let restored = "pause_sandboxer_healed_files_total";
    recorded.recorder.wait_for_value(restored, |value| value > 0.0).await?;
    recorded.recorder.minutes(2).await;
    recorded.recorder.end()
}

async fn missing_files() -> Result<()> {
    let what = "after a minute the files of a pod are deleted, and the disk is full for 14 minutes";
    let recorded = RecordedDaemon::with_small("missing-files", what, Some("root")).await?;
    let pods = recorded.pods(1).await?;
    delete_files(&recorded, &pods[0].0)?;
    fill(&recorded.daemon.path("root"))?;
    request_status(&recorded, &pods[0].0).await?;
    let failed = "pause_sandboxer_healing_failures_total";
    recorded.recorder.wait_for_value(failed, |value| value > 0.0).await?;
    recorded.recorder.minutes(14).await;
    fs::remove_dir_all(recorded.daemon.path("root/filler"))?;
    let restored = "pause_sandboxer_healed_files_total";
    recorded.recorder.wait_for_value(restored, |value| value > 0.0).await?;
    recorded.recorder.minutes(2).await;
    recorded.recorder.end()
}

async fn descriptors() -> Result<()> {
    let what = "after a minute its limit of descriptors leaves only a few free, for 8 minutes";
    let recorded = RecordedDaemon::begin("descriptors", what).await?;
    recorded.pods(5).await?;
    let (daemon, socket) = (recorded.daemon.pid()?, recorded.daemon.metrics());
    let (open, max) =
        (value(&socket, "process_open_fds").await?, value(&socket, "process_max_fds").await?);
    limit(daemon, &format!("{}", open + 3.0))?;
    recorded.recorder.wait_for_value("process_max_fds", |value| value == open + 3.0).await?;
    recorded.recorder.minutes(8).await;
    limit(daemon, &format!("{max}"))?;
    recorded.recorder.wait_for_value("process_max_fds", |value| value == max).await?;
    recorded.recorder.minutes(2).await;
    recorded.recorder.end()
}
