//! The pause as an OCI image under a real containerd: it is imported, pinned, and run by the
//! built-in controller. Which containerd needs such an image for pods of this sandboxer.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use kit::machine::processes;
use kit::{ContainerSpec, Handler, Node, Options, PodSpec, until};
use libtest_mimic::{Arguments, Failed, Trial};
use pause_sandboxer::config::CONTAINERD_NAMESPACE;
use pause_sandboxer::containerd::{GrpcEndpoint, images};
use pause_sandboxer::oci_image::{self, NAME};
use pause_sandboxer::pause::binary::PROGRAM;

/// Time limit for steps that take no time on an idle machine.
const SOON: Duration = Duration::from_secs(20);

/// A node that has imported the packaged drop-in with the name of our image, as `enable --offline`
/// writes it, and without the address of the sandboxer, which is the node's own.
async fn node() -> Result<Arc<Node>> {
    let drop_in = include_str!("../../packaging/containerd/pause-sandboxer.toml");
    let (head, rest) =
        drop_in.split_once("[proxy_plugins.pause-sandboxer]\n").context("no proxy plugin")?;
    let (_, handler) = rest.split_once("\n[").context("no handler")?;
    let pin = tempfile::NamedTempFile::new()?;
    std::fs::write(
        pin.path(),
        format!(
            "{head}[{handler}[plugins.\"io.containerd.cri.v1.images\".pinned_images]\n\
             sandbox = \"{NAME}\"\n"
        ),
    )?;
    // The kit names a pause image of its own; a file that is imported goes before it, as a drop-in
    // does on a node.
    let import = format!("imports = [\"{}\"]\n", pin.path().display());
    let node = Node::start(Options {
        sandboxer: Some(env!("CARGO_BIN_EXE_pause-sandboxer").into()),
        containerd_config_head: import,
        ..Options::default()
    })
    .await?;
    // Read when containerd was started.
    drop(pin);
    Ok(node)
}

async fn import(node: &Node) -> Result<()> {
    let endpoint = GrpcEndpoint::new(node.layout().containerd_socket(), CONTAINERD_NAMESPACE);
    Ok(images::import(&endpoint, &oci_image::pause(PROGRAM)?, &[]).await?)
}

/// Imported, known to CRI as pinned, and the pause of a pod of the built-in controller.
async fn the_built_in_controller_runs_on_it() -> Result<()> {
    let node = node().await?;
    // containerd says which of the drop-in's keys it does not know: those of later versions, and
    // none that is misspelt.
    let log = std::fs::read_to_string(node.layout().containerd_log())?;
    for line in log.lines().filter(|line| line.contains("Ignoring unknown key")) {
        ensure!(
            line.contains("key=\"containerd runtimes runc-pause disable_pause_image_pull\""),
            "{line}"
        );
    }
    // Without it there is no pod: an image on no registry cannot be pulled.
    ensure!(
        node.run(Handler::Builtin, PodSpec::new("early")).await.is_err(),
        "a pod without its pause image"
    );
    import(&node).await?;
    let listed = until("CRI knows the image", SOON, async || {
        node.cri().image_id(NAME).await?.context("unknown")
    })
    .await?;
    ensure!(!listed.is_empty(), "it has no id");
    let pod = node.run(Handler::Builtin, PodSpec::new("web")).await?;
    let container = pod.run(ContainerSpec::sleeping("main")).await?;
    ensure!(container.sh("hostname").await? == "web\n", "the container does not run");
    let pid = pod.pause_pid().await?;
    let pause =
        processes::all()?.into_iter().find(|process| process.pid == pid).context("no pause")?;
    ensure!(pause.command.trim() == "/pause", "the pause is {:?}", pause.command);
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    ensure!(status.lines().any(|line| line == "Uid:\t65535\t65535\t65535\t65535"), "{status}");
    // As PID 1 it exits on SIGTERM, and the built-in sees that.
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(pid.cast_signed()),
        nix::sys::signal::Signal::SIGTERM,
    )?;
    until("the pod is not ready", SOON, async || {
        ensure!(!pod.is_ready().await?, "it is");
        Ok(())
    })
    .await?;
    pod.remove().await
}

/// Only containerd 2.3 pulls it for an external sandboxer: the table of docs/compatibility.md.
async fn a_pod_of_ours_needs_the_image_in_one_release_only() -> Result<()> {
    let node = node().await?;
    node.start_sandboxer().await?;
    let needs_image = node.parts().version().starts_with("2.3.");
    match node.run(Handler::Ours, PodSpec::new("without")).await {
        Ok(pod) => {
            ensure!(!needs_image, "the pod starts without an image");
            ensure!(node.cri().image_id(NAME).await?.is_none(), "there is an image");
            pod.remove().await?;
        }
        Err(e) if needs_image => ensure!(format!("{e:#}").contains(NAME), "{e:#}"),
        Err(e) => return Err(e),
    }
    import(&node).await?;
    node.run(Handler::Ours, PodSpec::new("with")).await?.remove().await
}

fn trial<F>(name: &str, run: fn() -> F) -> Trial
where
    F: Future<Output = Result<()>> + 'static,
{
    Trial::test(name, move || {
        let runtime = tokio::runtime::Runtime::new().map_err(|e| Failed::from(e.to_string()))?;
        runtime.block_on(run()).map_err(|e| Failed::from(format!("{e:#}")))
    })
}

fn main() -> ExitCode {
    let trials = vec![
        trial("the_built_in_controller_runs_on_it", the_built_in_controller_runs_on_it),
        trial(
            "a_pod_of_ours_needs_the_image_in_one_release_only",
            a_pod_of_ours_needs_the_image_in_one_release_only,
        ),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}
