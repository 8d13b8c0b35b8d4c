//! The metrics that the alert rules use show the failures that the rules are for.

use std::fs;
use std::time::Duration;

use anyhow::{Result, ensure};
use kit::metrics::value;
use kit::until;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::harness::{Case, alone};
use crate::pods::Shape;
use crate::standalone::Standalone;
use kit::strace::Fault;

/// The limit for a metric to change; the daemon retries after at most seconds at first.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(60);

pub(crate) fn cases() -> Vec<Case> {
    alone![
        a_failed_cleanup_shows_in_the_metrics,
        an_unknown_sandbox_shows_in_the_metrics,
        a_quarantined_record_shows_in_the_metrics,
        a_full_disk_shows_in_the_metrics,
    ]
}

/// Waits until a series has the value.
async fn becomes(daemon: &Standalone, series: &str, wanted: f64) -> Result<()> {
    until(&format!("{series} is {wanted}"), CHANGE_TIMEOUT, async || {
        let value = value(&daemon.metrics(), series).await?;
        ensure!((value - wanted).abs() < 0.5, "it is {value}");
        Ok(())
    })
    .await
}

/// Starts a daemon with metrics and a running pod; returns the pod's id and pid.
async fn daemon_with_a_pod() -> Result<(Standalone, String, u32)> {
    let daemon = Standalone::with_metrics()?;
    daemon.start().await?;
    let id = daemon.id("pod");
    let pid = Shape::plain(&daemon).run(&daemon.controller(), &id).await?;
    Ok((daemon, id, pid))
}

/// Promise: cleanup_is_retried.
async fn a_failed_cleanup_shows_in_the_metrics() -> Result<()> {
    let (daemon, _, pid) = daemon_with_a_pod().await?;
    let fault = Fault::begin(daemon.pid()?, &["umount2:error=EBUSY"]).await?;
    kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL)?;
    becomes(&daemon, "pause_sandboxer_cleanups_pending", 1.0).await?;
    fault.end().await?;
    becomes(&daemon, "pause_sandboxer_cleanups_pending", 0.0).await
}

async fn an_unknown_sandbox_shows_in_the_metrics() -> Result<()> {
    let (daemon, _, _) = daemon_with_a_pod().await?;
    daemon.kill()?;
    daemon.start_with(&["pidfd_open:error=EMFILE"]).await?;
    let unknown = "pause_sandboxer_sandboxes{state=\"unknown\"";
    becomes(&daemon, unknown, 1.0).await?;
    daemon.end_faults().await?;
    becomes(&daemon, unknown, 0.0).await
}

async fn a_quarantined_record_shows_in_the_metrics() -> Result<()> {
    let (daemon, id, _) = daemon_with_a_pod().await?;
    let record = daemon.record(&id).join("record.json");
    let whole = fs::read(&record)?;
    for (text, quarantined) in [(&b"{"[..], 1.0), (&whole, 0.0)] {
        daemon.stop().await?;
        fs::write(&record, text)?;
        daemon.start().await?;
        becomes(&daemon, "pause_sandboxer_records_kept_aside", quarantined).await?;
    }
    Ok(())
}

async fn a_full_disk_shows_in_the_metrics() -> Result<()> {
    let daemon = Standalone::with_metrics()?;
    crate::directories::mount_small(&daemon.path("state"))?;
    daemon.start().await?;
    crate::directories::fill(&daemon.path("state"))?;
    let failed = Shape::plain(&daemon).run(&daemon.controller(), &daemon.id("pod")).await;
    ensure!(failed.is_err(), "{failed:?}");
    let series = "pause_sandboxer_calls_total{method=\"Create\",code=\"RESOURCE_EXHAUSTED\"}";
    becomes(&daemon, series, 1.0).await
}
