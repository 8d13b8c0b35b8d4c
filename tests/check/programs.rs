//! Nodes whose shims or OCI runtime are missing or broken.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};

use crate::bench::Bench;
use crate::{BrokenNode, broken};

pub(crate) fn all() -> Vec<BrokenNode> {
    broken! {
        the_runtime_is_missing:
            "FAIL  OCI runtime: runc-missing --version: No such file or directory",
            "install it in a directory of that PATH, or set BinaryName", 1, NoContainer;
        the_runtime_is_broken:
            "FAIL  OCI runtime: {top}/runc-broken --version: exit status: 1",
            "install it in a directory of that PATH, or set BinaryName", 1, NoContainer;
        the_runtime_is_only_in_a_directory_that_containerd_does_not_search:
            "FAIL  OCI runtime: runc-elsewhere --version: No such file or directory",
            "install it in a directory of that PATH, or set BinaryName", 1, NoContainer;
        the_own_shim_is_missing:
            "warn  shim: open shim ", "install it again next to the daemon's program", 4, Runs;
        the_own_shim_is_broken:
            "FAIL  shim: ", "install it again next to the daemon's program", 1, NoContainer;
        the_own_shim_is_of_another_version:
            "warn  shim: ", "install both programs of one version", 4, NotTried;
        the_shim_of_the_runtime_is_missing:
            "FAIL  shim: find the shim of runtime io.containerd.runc.v2",
            "install the complete containerd package", 1, NoContainer;
    }
}

/// Has the handler use another OCI runtime.
async fn with_runtime(bench: &Bench, binary: &str) -> Result<()> {
    let path = bench.node.layout().containerd_config();
    let text = fs::read_to_string(&path)?;
    let options = "runtimes.runc-pause.options]\n";
    let (before, after) = text.split_once(options).context("no options")?;
    fs::write(path, format!("{before}{options}BinaryName = \"{binary}\"\n{after}"))?;
    bench.restart_containerd().await
}

async fn the_runtime_is_missing(bench: &mut Bench) -> Result<()> {
    with_runtime(bench, "runc-missing").await
}

async fn the_runtime_is_broken(bench: &mut Bench) -> Result<()> {
    let program = bench.node.layout().top.join("runc-broken");
    bench.script(&program, "exit 1")?;
    with_runtime(bench, &program.display().to_string()).await
}

/// `check` and its caller find it, and so may the daemon; the shims of containerd do not.
async fn the_runtime_is_only_in_a_directory_that_containerd_does_not_search(
    bench: &mut Bench,
) -> Result<()> {
    let directory = bench.node.layout().top.join("elsewhere");
    fs::create_dir(&directory)?;
    bench.script(&directory.join("runc-elsewhere"), "exec runc \"$@\"")?;
    bench.path.insert(0, directory);
    with_runtime(bench, "runc-elsewhere").await
}

fn own_shim(bench: &Bench) -> PathBuf {
    bench.programs.path().join(kit::shim::NAME)
}

async fn the_own_shim_is_missing(bench: &mut Bench) -> Result<()> {
    fs::remove_file(own_shim(bench))?;
    let daemon = bench.node.sandboxer_command()?;
    bench.node.stop_sandboxer().await?;
    bench.node.start_sandboxer_as(daemon).await
}

async fn the_own_shim_is_broken(bench: &mut Bench) -> Result<()> {
    bench.script(&own_shim(bench), "exit 1")?;
    bench.restart_daemon().await
}

async fn the_own_shim_is_of_another_version(bench: &mut Bench) -> Result<()> {
    bench.script(&own_shim(bench), "echo pause-sandboxer-runc-shim 9.9.9")?;
    bench.restart_daemon().await
}

/// A containerd that has no shim beside it or in its `PATH`.
async fn the_shim_of_the_runtime_is_missing(bench: &mut Bench) -> Result<()> {
    let settings = bench.node.layout().sandboxer_config();
    let text = fs::read_to_string(&settings)?;
    let text: Vec<&str> = text.lines().filter(|line| !line.starts_with("shim = ")).collect();
    fs::write(settings, format!("shim = \"runtime\"\n{}\n", text.join("\n")))?;
    bench.restart_daemon().await?;
    bench.node.stop_containerd().await?;
    let directory = bench.node.layout().top.join("bin");
    fs::create_dir(&directory)?;
    let program = directory.join("containerd");
    fs::copy(bench.node.parts().program("containerd"), &program)?;
    let mut command = Command::new(program);
    command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    bench.start_other_containerd(command).await?;
    kit::until("CRI answers", Duration::from_secs(30), async || {
        bench.node.cri().runtime_conditions().await?;
        Ok(())
    })
    .await
}
