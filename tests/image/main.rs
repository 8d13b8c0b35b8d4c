//! The pause as an OCI image under a real containerd: what `pause-sandboxer image` writes is
//! imported, pinned, and run by the built-in controller.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use kit::machine::processes;
use kit::{ContainerSpec, Handler, Node, Options, PodSpec, until};
use libtest_mimic::{Arguments, Failed, Trial};
use pause_sandboxer::oci_image::NAME;

/// What happens at once on an idle machine may take a while on a busy one.
const SOON: Duration = Duration::from_secs(20);

/// A node that has imported the packaged drop-in, with the comment signs taken from the lines about
/// our image.
async fn node() -> Result<Arc<Node>> {
    let drop_in = include_str!("../../packaging/containerd/pause-sandboxer.toml");
    let (head, pinned) = drop_in
        .split_once("#[plugins.\"io.containerd.cri.v1.images\".pinned_images]\n#")
        .context("no such lines")?;
    ensure!(pinned == format!("sandbox = \"{NAME}\"\n"), "the drop-in names {pinned}");
    let pin = tempfile::NamedTempFile::new()?;
    std::fs::write(
        pin.path(),
        format!("{head}[plugins.\"io.containerd.cri.v1.images\".pinned_images]\n{pinned}"),
    )?;
    // The kit names a pause image of its own; a file that is imported goes before it, as a drop-in
    // does on a node.
    let import = format!("imports = [\"{}\"]\n", pin.path().display());
    let node =
        Node::start(Options { containerd_config_head: import, ..Options::default() }).await?;
    // Read when containerd was started.
    drop(pin);
    Ok(node)
}

fn import(node: &Node) -> Result<()> {
    let mut image = Command::new(env!("CARGO_BIN_EXE_pause-sandboxer"))
        .arg("image")
        .stdout(Stdio::piped())
        .spawn()
        .context("run the program")?;
    let imported = Command::new(node.parts().program("ctr"))
        .arg("--address")
        .arg(node.layout().containerd_socket())
        .args(["-n", "k8s.io", "images", "import", "-"])
        .stdin(image.stdout.take().context("its output")?)
        .output()
        .context("run ctr")?;
    ensure!(image.wait()?.success(), "the program failed");
    ensure!(imported.status.success(), "import: {}", String::from_utf8_lossy(&imported.stderr));
    Ok(())
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
    import(&node)?;
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

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let run = || {
        let runtime = tokio::runtime::Runtime::new().map_err(|e| Failed::from(e.to_string()))?;
        runtime
            .block_on(the_built_in_controller_runs_on_it())
            .map_err(|e| Failed::from(format!("{e:#}")))
    };
    libtest_mimic::run(&arguments, vec![Trial::test("the_built_in_controller_runs_on_it", run)])
        .exit_code()
}
