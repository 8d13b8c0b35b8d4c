//! Containers of nerdctl, which has no daemon: its own program is the containers' logger.

use std::fs;
use std::os::unix::fs::symlink;

use anyhow::{Context as _, Result, ensure};
use kit::machine::processes;
use kit::{Node, TEST_IMAGE, until};

use crate::engine::{self, COUNTS, Engine, commands, counts_on, fetched, shim_dies};
use crate::{SOON, program, run, shim};

/// The name by which containerd finds the shim in its PATH. nerdctl takes no path, and gives its
/// options to a shim only if its name begins like this.
const RUNTIME: &str = "io.containerd.runc.small";

fn nerdctl(node: &Node) -> Result<Engine> {
    let layout = node.layout();
    let top = layout.top.display();
    let program = [
        fetched("nerdctl")?.display().to_string(),
        format!("--address={}", layout.containerd_socket().display()),
        format!("--namespace={}", layout.name),
        format!("--data-root={top}/nerdctl"),
        format!("--cni-path={top}/cni/bin"),
        format!("--cni-netconfpath={top}/nerdctl-cni"),
        "--cgroup-manager=cgroupfs".to_owned(),
        format!("--snapshotter={}", node.snapshotter()?),
    ];
    let cgroup = layout.cgroup();
    let options = ["--runtime", RUNTIME, "--network", "none", "--cgroup-parent", &cgroup];
    Ok(Engine {
        program: program.into(),
        options: options.map(str::to_owned).into(),
        image: TEST_IMAGE,
        shows_dead: false,
    })
}

#[test]
#[ignore = "`make test-shim-alone` builds nerdctl"]
fn nerdctl_runs_and_restores_containers() {
    run(async |node| {
        let link = node.layout().programs().join("containerd-shim-runc-small");
        symlink(program(), &link).with_context(|| link.display().to_string())?;
        let engine = nerdctl(node)?;
        let images = node.layout().top.join("images.tar").display().to_string();
        engine.succeeds(&["load", "--input", &images])?;
        commands(&engine, node).await?;
        shim_dies(&engine, node).await?;
        restored(&engine, node).await?;
        engine.succeeds(&["rmi", "-f", TEST_IMAGE])?;
        for name in ["nerdctl", "nerdctl-cni"] {
            let directory = node.layout().top.join(name);
            fs::remove_dir_all(&directory).with_context(|| directory.display().to_string())?;
        }
        fs::remove_file(link)?;
        engine::forget(node)
    });
}

/// A container through a kill of containerd, and the exit of another while there is none.
async fn restored(engine: &Engine, node: &Node) -> Result<()> {
    engine.run_detached("counts", &[], COUNTS)?;
    counts_on(engine, "counts").await?;
    let before = (shim(node)?.pid, engine.state("counts", "Pid")?);
    let waits = "while test ! -e /e; do sleep 0.05; done; exit 6";
    engine.run_detached("waits", &[], waits)?;
    let pid = engine.state("waits", "Pid")?.parse()?;
    engine.succeeds(&["exec", "-d", "waits", "sh", "-c", "sleep 0.5; touch /e"])?;
    node.kill_containerd()?;
    until("the exit", SOON, async || {
        ensure!(processes::one(pid).is_err(), "it runs");
        Ok(())
    })
    .await?;
    node.start_containerd().await?;
    engine.ends("waits", 6).await?;
    engine.remove("waits")?;
    // containerd does not wait for the end of its shim.
    until("one shim", SOON, async || shim(node).map(drop)).await?;
    ensure!((shim(node)?.pid, engine.state("counts", "Pid")?) == before, "another process");
    engine.exec_answers("counts")?;
    // nerdctl's logger has ended with its connection to containerd: it waits there for the exit.
    engine.succeeds(&["restart", "--time", "1", "counts"])?;
    engine.says("counts", "1", 2).await?;
    engine.remove_last(node, &["counts"]).await
}
