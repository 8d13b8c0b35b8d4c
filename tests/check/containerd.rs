//! Nodes with a broken containerd, or a broken config of it.

use std::fs;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};
use kit::PAUSE_IMAGE;

use crate::bench::Bench;
use crate::{BrokenNode, broken};

const HANDLER: &str = "containerd.runtimes.runc-pause]";

pub(crate) fn all() -> Vec<BrokenNode> {
    broken! {
        containerd_does_not_run:
            "FAIL  containerd: does not listen on {top}/c.sock: ",
            "systemctl start containerd.service", 1, NoSandbox;
        containerd_is_stopped_by_a_signal:
            "FAIL  containerd: CRI does not respond within 2 s, so no pod can start",
            "see journalctl -u containerd.service; then systemctl restart containerd.service",
            1, NotTried;
        containerd_is_too_old:
            "FAIL  containerd: version 1.7.27 cannot use external sandboxers",
            "upgrade containerd to 2.0 or newer", 1, NotTried;
        the_program_is_not_containerd:
            "FAIL  containerd: /bin/true --version: prints ",
            "install and start containerd, or set the path of its program", 1, NotTried;
        cri_is_disabled:
            "FAIL  containerd config: CRI plugin io.containerd.grpc.v1.cri is disabled, so kubelet \
             can run no pod",
            "remove it from disabled_plugins in {top}/containerd.toml", 1, NoSandbox;
        no_handler_names_the_sandboxer:
            "FAIL  containerd config: no runtime handler has sandboxer = \"pause-sandboxer\"",
            "pause-sandboxer enable --restart; or add:", 1, NotTried;
        the_proxy_plugin_has_another_address:
            "FAIL  containerd config: no sandbox proxy plugin has the address {top}/s.sock, but",
            "set its address to that socket", 1, NoSandbox;
        the_runtime_has_a_sandbox_of_its_own:
            "FAIL  containerd config: no pod of runtime handler \"runc-pause\" can start: ",
            "remove sandboxer = \"pause-sandboxer\" from that handler", 1, NoSandbox;
        containerd_has_not_loaded_the_handler:
            "FAIL  containerd: has not loaded runtime handler \"runc-pause\", \"runc-pause-",
            "systemctl restart containerd.service, while the daemon responds", 1, NoSandbox;
        containerd_has_not_read_an_edit:
            "warn  containerd config: containerd was started before {top}/containerd.toml was",
            "systemctl restart containerd.service, while the daemon responds", 4, Runs;
        the_pause_image_is_missing:
            "FAIL  containerd config: pause image localhost/kit/pause:1 is not on the node",
            "pause-sandboxer enable --restart --offline needs no registry", 1, NoSandbox;
        the_cgroup_driver_is_not_that_of_kubelet:
            "FAIL  kubelet: SystemdCgroup of runtime handler \"runc-pause\" is true",
            "pause-sandboxer enable --restart; or set SystemdCgroup = false", 1, NotTried;
        the_root_differs:
            "FAIL  containerd config: containerd's root is {top}/root, but containerd_root is /",
            "pause-sandboxer enable --restart, or set containerd_root = \"{top}/root\"",
            1, NotTried;
        the_use_of_selinux_differs:
            "warn  containerd config: containerd's enable_selinux is false, but this sandboxer's is",
            "pause-sandboxer enable --restart adopts it", 4, NotTried;
        the_annotations_differ:
            "warn  containerd config: containerd's pod_annotations of runtime handler \"runc-pause\" \
             is [\"io.test/*\"], but this sandboxer's is []",
            "pause-sandboxer enable --restart adopts it", 4, NotTried;
    }
}

async fn containerd_does_not_run(bench: &mut Bench) -> Result<()> {
    bench.node.stop_containerd().await?;
    // Of the unit that would start it.
    let config = bench.node.layout().containerd_config().display().to_string();
    bench.arguments = vec!["--containerd-config".to_owned(), config];
    Ok(())
}

async fn containerd_is_stopped_by_a_signal(bench: &mut Bench) -> Result<()> {
    bench.stop(bench.node.containerd_pid()?).await
}

async fn containerd_is_too_old(bench: &mut Bench) -> Result<()> {
    let program = bench.node.layout().top.join("containerd-1");
    bench.script(&program, "echo containerd github.com/containerd/containerd 1.7.27 abc")?;
    bench.arguments = vec!["--containerd".to_owned(), program.display().to_string()];
    Ok(())
}

async fn the_program_is_not_containerd(bench: &mut Bench) -> Result<()> {
    bench.arguments = ["--containerd", "/bin/true"].map(str::to_owned).into();
    Ok(())
}

/// The kit waits for CRI, which this containerd does not have.
async fn cri_is_disabled(bench: &mut Bench) -> Result<()> {
    bench.node.stop_containerd().await?;
    let disabled = "version = 3\ndisabled_plugins = [\"io.containerd.grpc.v1.cri\"]\n";
    bench.edit("version = 3\n", disabled)?;
    let program = bench.node.parts().program("containerd");
    bench.start_other_containerd(Command::new(program)).await
}

async fn no_handler_names_the_sandboxer(bench: &mut Bench) -> Result<()> {
    let (from, to) = ("sandboxer = \"pause-sandboxer\"", "sandboxer = \"podsandbox\"");
    bench.reconfigure(from, to).await
}

async fn the_proxy_plugin_has_another_address(bench: &mut Bench) -> Result<()> {
    bench.reconfigure("/s.sock\"", "/other.sock\"").await
}

async fn the_runtime_has_a_sandbox_of_its_own(bench: &mut Bench) -> Result<()> {
    let (plain, kata) = ("io.containerd.runc.v2", "io.containerd.kata.v2");
    let section = |kind: &str| format!("{HANDLER}\nruntime_type = \"{kind}\"");
    bench.reconfigure(&section(plain), &section(kata)).await
}

async fn containerd_has_not_loaded_the_handler(bench: &mut Bench) -> Result<()> {
    let path = bench.node.layout().containerd_config();
    let text = fs::read_to_string(&path)?;
    bench.reconfigure("runtimes.runc-pause", "runtimes.other").await?;
    tokio::time::sleep(OLDER).await;
    Ok(fs::write(path, text)?)
}

/// The start of a process is known to two seconds.
const OLDER: Duration = Duration::from_secs(4);

async fn containerd_has_not_read_an_edit(bench: &mut Bench) -> Result<()> {
    tokio::time::sleep(OLDER).await;
    bench.edit("version = 3\n", "version = 3\n# An edit.\n")
}

/// Only containerd 2.3 pulls the image for a pod of this sandboxer: docs/compatibility.md.
async fn the_pause_image_is_missing(bench: &mut Bench) -> Result<()> {
    bench.node.cri().remove_image(PAUSE_IMAGE).await.context("remove the image")?;
    if bench.node.parts().version().starts_with("2.3.") {
        return Ok(());
    }
    bench.skips = true;
    let good = bench.check().await?;
    anyhow::ensure!(good.problems.is_empty(), "{}", good.text);
    bench.tries(crate::PodTry::Runs).await
}

async fn the_cgroup_driver_is_not_that_of_kubelet(bench: &mut Bench) -> Result<()> {
    let path = bench.node.layout().containerd_config();
    let text = fs::read_to_string(&path)?;
    let (before, ours) = text.split_once("runtimes.runc-pause.options]").context("no options")?;
    let ours = ours.replacen("SystemdCgroup = false", "SystemdCgroup = true", 1);
    fs::write(path, format!("{before}runtimes.runc-pause.options]{ours}"))?;
    bench.restart_containerd().await
}

async fn the_root_differs(bench: &mut Bench) -> Result<()> {
    let top = bench.node.layout().top.display().to_string();
    bench.set(&format!("containerd_root = \"{top}/root\""), "containerd_root = \"/other\"")
}

async fn the_use_of_selinux_differs(bench: &mut Bench) -> Result<()> {
    bench.set("log_level", "enable_selinux = true\nlog_level")
}

async fn the_annotations_differ(bench: &mut Bench) -> Result<()> {
    let with = format!("{HANDLER}\npod_annotations = [\"io.test/*\"]");
    bench.reconfigure(HANDLER, &with).await
}
