//! Records that a daemon cannot read, of other versions, or not now.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kit::grpc;

use crate::harness::{Case, alone};
use crate::pods::{Shape, is_whole, remove};
use crate::standalone::Standalone;

pub(crate) fn cases() -> Vec<Case> {
    alone![a_record_that_could_not_be_read_is_read_again, unreadable_and_newer_records_stay,]
}

/// Promise: record_is_never_discarded.
async fn a_record_that_could_not_be_read_is_read_again() -> Result<()> {
    let standalone = Standalone::started().await?;
    let (controller, shape) = (standalone.controller(), Shape::plain(&standalone));
    let (id, other) = (standalone.id("unread"), standalone.id("other"));
    let pid = shape.run(&controller, &id).await?;
    shape.run(&controller, &other).await?;
    standalone.kill()?;
    // The system refuses to open it: a link that leads to itself.
    let record = standalone.record(&id).join("record.json");
    let saved = record.with_extension("saved");
    fs::rename(&record, &saved)?;
    std::os::unix::fs::symlink("record.json", &record)?;
    standalone.start().await?;
    is_whole(&standalone, &controller, &other).await?;
    let asked = tokio::spawn({
        let (controller, id) = (standalone.controller(), id.clone());
        async move { controller.status(&id, false).await }
    });
    let error = controller.stop(&id).await.err().context("stopped what cannot be read")?;
    ensure!(error.code == grpc::INTERNAL && error.message.contains("os error 40"), "{error}");
    tokio::time::sleep(Duration::from_secs(2)).await;
    ensure!(!asked.is_finished(), "Status of an unread record was answered");
    fs::rename(&saved, &record)?;
    let status = asked.await??;
    ensure!(status.state == "SANDBOX_READY" && status.pid == pid, "{status:?}");
    is_whole(&standalone, &controller, &id).await?;
    for id in [&id, &other] {
        remove(&controller, id).await?;
    }
    standalone.nothing_left().await
}

/// Promise: record_is_never_discarded.
/// Promise: operators_see_every_sandbox.
async fn unreadable_and_newer_records_stay() -> Result<()> {
    const ASIDE: &str = "pause_sandboxer_records_kept_aside";
    let standalone = Standalone::with_metrics()?;
    standalone.start().await?;
    let (controller, shape) = (standalone.controller(), Shape::plain(&standalone));
    let (good, newer, broken) =
        (standalone.id("good"), standalone.id("newer"), standalone.id("broken"));
    for id in [&good, &newer, &broken] {
        shape.run(&controller, id).await?;
    }
    standalone.kill()?;
    let record = standalone.record(&newer).join("record.json");
    let old = fs::read_to_string(&record)?;
    let text = old.replacen("\"version\":1", "\"version\":99", 1);
    fs::write(&record, &text)?;
    fs::write(standalone.record(&broken).join("record.json"), "{")?;
    standalone.start().await?;
    is_whole(&standalone, &controller, &good).await?;
    standalone.metric_is(ASIDE, 2.0..=2.0).await?;
    for id in [&newer, &broken] {
        ensure!(
            standalone
                .logged()
                .contains(&format!("recovery cannot adopt: {}", standalone.record(id).display())),
            "{id} is not reported"
        );
        // Neither gone nor dead: containerd asks again.
        let status =
            controller.status(id, false).await.err().context("status of what cannot be read")?;
        ensure!(status.code != grpc::NOT_FOUND, "{status}");
        let wait = controller.wait(id).await.err().context("Wait")?;
        ensure!(wait.code == grpc::UNAVAILABLE, "Wait: {wait}");
        let taken = shape.create(&controller, id).await.err().context("its id is not taken")?;
        ensure!(taken.code == grpc::ALREADY_EXISTS, "Create: {taken}");
        ensure!(controller.shutdown(id).await.is_err(), "removed what cannot be read");
    }
    ensure!(fs::read_to_string(&record)? == text, "the newer record was changed");
    ensure!(standalone.pauses()?.len() == 3, "a pause was ended");
    // A daemon that can read it takes it over.
    standalone.stop().await?;
    fs::write(&record, &old)?;
    fs::write(standalone.record(&broken).join("record.json"), old.replace(&newer, &broken))?;
    standalone.start().await?;
    standalone.metric_is(ASIDE, 0.0..=0.0).await?;
    for id in [&good, &newer, &broken] {
        is_whole(&standalone, &controller, id).await?;
        remove(&controller, id).await?;
    }
    standalone.nothing_left().await
}
