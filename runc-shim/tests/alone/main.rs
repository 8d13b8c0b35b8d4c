//! The shim under a real containerd that starts it: as the shim of the built-in controller's pods,
//! and of `ctr`. No daemon of this project runs. Needs root.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod churn;
mod ctr;
mod docker;
mod engine;
mod nerdctl;
mod pods;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use kit::machine::processes::{self, Proc};
use kit::{ContainerSpec, Handler, Node, Options, PodSpec, until};

/// Time limit for steps that take no time on an idle machine.
const SOON: Duration = Duration::from_secs(20);

/// How long a case may take.
const LIMIT: Duration = Duration::from_secs(180);

/// The program under test.
fn program() -> PathBuf {
    let built = env!("CARGO_BIN_EXE_pause-sandboxer-runc-shim");
    std::env::var_os("SHIM_PROGRAM").map_or(built.into(), PathBuf::from)
}

/// Runs a case on a node of its own, which then must be as it was before.
fn run(case: impl AsyncFnOnce(&Arc<Node>) -> Result<()>) {
    run_within(LIMIT, case);
}

/// The same for a case that may take so long.
fn run_within(limit: Duration, case: impl AsyncFnOnce(&Arc<Node>) -> Result<()>) {
    if kit::skip_without_root() {
        return;
    }
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let options = Options { builtin_shim: Some(program()), ..Options::default() };
        let node = Node::start(options).await.unwrap();
        let checked = async {
            // containerd makes directories of its own with the first pod.
            let first = node.run(Handler::Builtin, PodSpec::new("first")).await?;
            first.run(ContainerSpec::sleeping("a")).await?;
            first.remove().await?;
            let before = node.snapshot()?;
            case(&node).await?;
            node.settles_to(&before).await
        };
        let done = tokio::time::timeout(kit::patient(limit), checked).await.expect("hangs");
        if let Err(e) = done {
            panic!("{e:#}\n{}", node.log_tails(400));
        }
    });
}

/// The shims of this node that serve.
fn shims(node: &Node) -> Result<Vec<Proc>> {
    let address = format!(" -address {} -socket ", node.layout().containerd_socket().display());
    let all = processes::all()?.into_iter();
    Ok(all.filter(|it| it.state != 'Z' && it.command.contains(&address)).collect())
}

/// Waits until no shim serves: containerd waits for the answer to a Shutdown, and not for the exit.
async fn no_shims(node: &Node) -> Result<()> {
    until("no shim", SOON, async || {
        let shims = shims(node)?;
        ensure!(shims.is_empty(), "{shims:?}");
        Ok(())
    })
    .await
}

/// The only shim, which is the program under test.
fn shim(node: &Node) -> Result<Proc> {
    let shims = shims(node)?;
    ensure!(shims.len() == 1, "shims: {shims:?}");
    Ok(shims.into_iter().next().unwrap())
}

fn kill(process: &Proc) -> Result<()> {
    let pid = nix::unistd::Pid::from_raw(process.pid.cast_signed());
    Ok(nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL)?)
}
