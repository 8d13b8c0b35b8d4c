//! The program: its size, how soon it listens, and what it holds when there is nothing to do.

use std::time::Duration;

use anyhow::Result;
use kit::machine::processes::pss;

use crate::daemon::{BINARY, Daemon};
use crate::report::Report;
use crate::samples::{Samples, median};
use crate::setup::Setup;

pub(crate) async fn measure(setup: &mut Setup, report: &mut Report) -> Result<()> {
    report.median("binary_kb".into(), std::fs::metadata(BINARY)?.len() as f64 / 1024.0);
    let (mut starts, mut rest) = (Samples::default(), Vec::new());
    for number in 0..10 {
        let mut daemon = Daemon::ours(&setup.node, &format!("fresh-{number}"), "")?;
        starts.push(daemon.start().await?.listening);
        tokio::time::sleep(Duration::from_millis(100)).await;
        rest.push(pss(daemon.pid()?)?);
        daemon.kill()?;
    }
    report.median("start_up_to_listening_ms".into(), starts.median_ms());
    report.median("daemon_at_rest_kb".into(), median(rest));
    Ok(())
}
