//! `selftest` on a node without a registry.

use std::pin::Pin;
use std::time::Duration;

use anyhow::{Result, ensure};
use kit::PAUSE_IMAGE;
use kit::cri::api;

use crate::bench::Bench;

type Case = fn(Bench) -> Pin<Box<dyn Future<Output = Result<()>>>>;

pub(crate) fn all() -> Vec<(&'static str, Case)> {
    vec![
        ("selftest_needs_no_pause_image", |bench| Box::pin(needs_no_pause_image(bench))),
        ("selftest_keeps_a_pause_image", |bench| Box::pin(keeps_a_pause_image(bench))),
        ("selftest_removes_a_pod_that_failed", |bench| Box::pin(removes_a_failed_pod(bench))),
        ("selftest_without_a_daemon_fails_at_once", |bench| Box::pin(needs_a_daemon(bench))),
    ]
}

/// Images, sandboxes and pods of the test that are left.
async fn left(bench: &Bench) -> Result<String> {
    let (list, _, _) = bench.run(&["list"]).await?;
    let pods = bench.node.cri().list_pod_sandbox(api::PodSandboxFilter::new()).await?;
    let ctr = |words: &[&str]| -> Result<String> {
        let mut command = std::process::Command::new(bench.node.parts().program("ctr"));
        command.arg("--address").arg(bench.node.layout().containerd_socket());
        let output = command.args(["-n", "k8s.io"]).args(words).output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Ok(String::from_utf8(output.stdout)?)
    };
    let mut all = format!("{}{}", ctr(&["images", "ls", "-q"])?, ctr(&["containers", "ls", "-q"])?);
    all += &ctr(&["leases", "ls", "-q"])?;
    all += &ctr(&["sandboxes", "ls"])?;
    all.extend(list.lines().skip(1));
    all.extend(pods.into_iter().map(|pod| pod.id));
    Ok(all)
}

/// containerd removes the lease of a pod a little later than the pod.
async fn nothing_new(bench: &Bench, before: &str) -> Result<()> {
    kit::until("nothing is left", Duration::from_secs(5), async || {
        let after = left(bench).await?;
        ensure!(after == before, "before:\n{before}\nafter:\n{after}");
        Ok(())
    })
    .await
}

/// Promise: selftest_leaves_nothing.
async fn needs_no_pause_image(bench: Bench) -> Result<()> {
    bench.node.cri().remove_image(PAUSE_IMAGE).await?;
    let before = left(&bench).await?;
    let is_needed = bench.node.parts().version().starts_with("2.3.");
    let (text, status, _) = bench.run(&["selftest"]).await?;
    ensure!(status == 0 && text.contains("runc-pause: no leftover resources"), "{text}");
    let line = "pause image localhost/kit/pause:1 is not on the node: the test imports one";
    ensure!(text.contains(line) == is_needed, "{text}");
    nothing_new(&bench, &before).await?;
    nothing_new(&bench, &before).await?;
    Ok(())
}

async fn keeps_a_pause_image(bench: Bench) -> Result<()> {
    let before = left(&bench).await?;
    let (text, status, _) = bench.run(&["selftest"]).await?;
    ensure!(status == 0 && !text.contains("pause image"), "{text}");
    ensure!(before.contains(PAUSE_IMAGE), "{before}");
    nothing_new(&bench, &before).await?;
    Ok(())
}

/// The files name another pause image than the running containerd needs, so the test imports that
/// one, and the pull of the other one fails between Create and Start.
///
/// Promise: selftest_leaves_nothing.
async fn removes_a_failed_pod(bench: Bench) -> Result<()> {
    if !bench.node.parts().version().starts_with("2.3.") {
        return Ok(());
    }
    bench.node.cri().remove_image(PAUSE_IMAGE).await?;
    let before = left(&bench).await?;
    bench.edit(PAUSE_IMAGE, "localhost/kit/other:1")?;
    let (text, status, _) = bench.run(&["selftest"]).await?;
    ensure!(status == 1 && text.contains(PAUSE_IMAGE), "{text}");
    ensure!(text.contains("failed in step run the sandbox"), "{text}");
    nothing_new(&bench, &before).await?;
    Ok(())
}

async fn needs_a_daemon(bench: Bench) -> Result<()> {
    bench.node.stop_sandboxer().await?;
    let (text, status, took) = bench.run(&["selftest"]).await?;
    ensure!(status == 1 && text.contains("cannot reach the daemon at "), "{text}");
    ensure!(took < kit::patient(Duration::from_secs(5)), "{took:?}");
    Ok(())
}
