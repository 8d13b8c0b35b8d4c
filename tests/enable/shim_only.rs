//! `enable --shim-only`: the handler of the built-in controller with this project's shim, on nodes
//! without the daemon, and beside the sandboxer's handler.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use kit::machine::processes;
use kit::{ContainerSpec, Handler, Node, Pod, PodSpec};

use crate::cases::{HANDLER, NodeCase, always, cases};
use crate::etc::Etc;

pub(crate) fn all() -> Vec<(&'static str, NodeCase)> {
    cases![
        a_node_without_a_daemon_has_the_handler_of_the_shim,
        both_handlers_come_and_go_one_by_one,
        a_shim_that_others_can_change_or_that_does_not_run_is_refused,
        a_config_that_containerd_cannot_load_leaves_a_node_without_a_daemon,
    ]
}

/// The handler's usual name.
const SMALL: &str = "runc-small";

/// A node, and the shim of its commands, which are in a directory of root.
async fn with_programs(node: Arc<Node>) -> Result<(Etc, PathBuf)> {
    let etc = Etc::new(node, 3, "").await?;
    let built = Path::new(env!("CARGO_BIN_EXE_pause-sandboxer"));
    fs::create_dir(etc.programs())?;
    for name in ["pause-sandboxer", kit::shim::NAME] {
        fs::copy(built.with_file_name(name), etc.programs().join(name))?;
    }
    let shim = etc.programs().join(kit::shim::NAME);
    Ok((etc, shim))
}

/// A pod of the handler, whose container runs by the shim.
async fn pod_with(etc: &Etc, shim: &Path) -> Result<Pod> {
    let home = etc.node.prepare(PodSpec::new("small"))?;
    let id = etc.node.cri().run_pod_sandbox(home.config(), SMALL).await?;
    let pod = Pod::new(&etc.node, Handler::Builtin, home, id);
    let container = pod.run(ContainerSpec::sleeping("main")).await?;
    ensure!(container.sh("hostname").await? == "small\n", "the container does not run");
    let all = processes::all()?;
    let is_shim = |process: &&processes::Proc| {
        process.command.contains(pod.id())
            && fs::read_link(format!("/proc/{}/exe", process.pid)).is_ok_and(|exe| exe == shim)
    };
    ensure!(
        all.iter().filter(is_shim).count() == 1,
        "no process of {} serves the pod",
        shim.display()
    );
    Ok(pod)
}

/// Promise: enable_is_undone.
/// Promise: removal_waits_for_pods.
async fn a_node_without_a_daemon_has_the_handler_of_the_shim(node: Arc<Node>) -> Result<()> {
    let (etc, shim) = with_programs(node).await?;
    etc.node.stop_sandboxer().await?;
    let (before, merged) = (etc.files(), etc.dump()?);
    let words = ["enable", "--shim-only"];
    let dry = etc.run(&[words[0], words[1], "--dry-run"]).well()?;
    ensure!(
        dry.contains(&format!(".runtimes.{SMALL}]")) && !dry.contains("proxy_plugins"),
        "{dry}"
    );
    ensure!(etc.files() == before, "a dry run has written");
    let said = etc.with_restart(&words, always).await?.well()?;
    ensure!(said.contains("it has loaded runtime handler runc-small"), "{said}");
    let mut made = etc.handler(SMALL)?.context("no handler")?;
    let mut expected = etc.handler("runc")?.context("no handler")?;
    ensure!(made["runtime_path"].as_str() == shim.to_str(), "{made}");
    ensure!(made["sandboxer"].as_str() == Some("podsandbox"), "{made}");
    for handler in [&mut made, &mut expected] {
        let table = handler.as_table_mut().context("no table")?;
        table.retain(|name, _| !["runtime_path", "sandboxer"].contains(&name));
        let options = table["options"].as_table_mut().context("no options")?;
        options.retain(|_, value| !["\"\"", "0", "false"].contains(&value.to_string().as_str()));
    }
    ensure!(made == expected, "the handler has\n{made}\nand runc has\n{expected}");

    let checked = etc.run(&["check", "--strict"]).well()?;
    for part in ["runtime handlers of the shim without the sandboxer: \"runc-small\"", "ok    shim"]
    {
        ensure!(checked.contains(part), "{part}: {checked}");
    }
    ensure!(checked.contains("ok    OCI runtime: ") && !checked.contains("daemon"), "{checked}");
    let tested = etc.run_beside(&["selftest"]).await?.well()?;
    ensure!(tested.contains(&format!("\n{SMALL}: no leftover resources")), "{tested}");
    let (after, pid) = (etc.files(), etc.node.containerd_pid()?);
    let again = etc.with_restart(&words, always).await?.well()?;
    ensure!(again.contains("no file needs a change"), "{again}");
    ensure!((etc.files(), etc.node.containerd_pid()?) == (after, pid), "the second has an effect");

    let pod = pod_with(&etc, &shim).await?;
    etc.run(&["disable"]).refused("1 pod: default/small (")?;
    etc.run(&["disable", "--check"]).refused("pod: default/small (")?;
    // Then CRI lists no pod.
    etc.node.stop_containerd().await?;
    let program = etc.node.parts().program("containerd").display().to_string();
    let config = etc.node.layout().containerd_config().display().to_string();
    let named = ["disable", "--containerd", &program, "--containerd-config", &config];
    etc.run(&named).refused("1 pod: a pod whose shim runs (")?;
    etc.run(&["disable", "--check"]).refused("pod: a pod whose shim runs (")?;
    etc.node.start_containerd().await?;
    let said = etc.run(&["enable", "--shim-only", "--handler", "other"]);
    said.refused("keep the handler with --handler runc-small")?;
    pod.remove().await?;
    etc.with_restart(&["disable"], always).await?.well()?;
    ensure!(etc.files() == before, "left: {:?}", etc.files().keys());
    ensure!(etc.dump()? == merged, "the merged config is another");
    ensure!(etc.run(&["disable", "--check"]).well()?.is_empty(), "something is left");
    Ok(())
}

/// As a node that goes from one to the other with pods.
///
/// Promise: enable_is_undone.
async fn both_handlers_come_and_go_one_by_one(node: Arc<Node>) -> Result<()> {
    let (etc, shim) = with_programs(node).await?;
    let before = etc.files();
    etc.with_restart(&["enable", "--shim-only"], always).await?.well()?;
    let pod = pod_with(&etc, &shim).await?;
    for handler in [SMALL, "runc"] {
        let refused = etc.run(&["enable", "--handler", handler]);
        refused.refused("is defined elsewhere")?;
    }
    etc.with_restart(&["enable"], always).await?.well()?;
    let checked = etc.run(&["check"]).text;
    for part in ["of this sandboxer: \"runc-pause\"", "without the sandboxer: \"runc-small\""] {
        ensure!(checked.contains(part), "{part}: {checked}");
    }
    for handler in [HANDLER, SMALL] {
        let tested = etc.run_beside(&["selftest", "--handler", handler]).await?.well()?;
        ensure!(tested.contains(&format!("\n{handler}: no leftover resources")), "{tested}");
    }
    etc.run(&["enable", "--shim-only", "--handler", HANDLER]).refused("is defined elsewhere")?;

    // containerd must not start without a daemon that it has a handler of.
    etc.node.stop_sandboxer().await?;
    let late = etc.with_restart(&["enable", "--shim-only", "--default"], always).await?;
    late.refused("starts without it reports pods that it has as NotReady")?;
    etc.node.start_sandboxer().await?;

    let remove = ["disable", "--handler", SMALL];
    etc.with_restart(&remove, always).await?.refused("1 pod: default/small (")?;
    pod.remove().await?;
    // Pods of the other handler are not in the way.
    let ours = etc.node.run(Handler::Ours, PodSpec::new("ours")).await?;
    etc.run(&["disable", "--handler", "typo"]).refused(
        "has no runtime handler \"typo\" of this sandboxer or its shim; it has [\"runc-pause\", \
         \"runc-small\"]",
    )?;
    etc.node.stop_sandboxer().await?;
    let late = etc.with_restart(&remove, always).await?;
    late.refused("starts without it reports pods that it has as NotReady")?;
    etc.node.start_sandboxer().await?;
    let said = etc.with_restart(&remove, always).await?.well()?;
    ensure!(said.contains("it no longer has runtime handler runc-small\n"), "{said}");
    ensure!(etc.handler(SMALL)?.is_none() && etc.handler(HANDLER)?.is_some(), "not only that one");
    etc.run(&["disable"]).refused("1 pod: default/ours (")?;
    ours.remove().await?;
    etc.with_restart(&["enable", "--shim-only"], always).await?.well()?;
    etc.with_restart(&["disable"], always).await?.well()?;
    ensure!(etc.files() == before, "left: {:?}", etc.files().keys());
    Ok(())
}

/// Promise: only_files_of_root_count.
/// Promise: check_names_the_remedy.
async fn a_shim_that_others_can_change_or_that_does_not_run_is_refused(
    node: Arc<Node>,
) -> Result<()> {
    let (etc, shim) = with_programs(node).await?;
    etc.node.stop_sandboxer().await?;
    let before = etc.files();
    let words = ["enable", "--shim-only"];
    let refused = |reason: &str| {
        etc.run(&words).refused(reason)?;
        ensure!(etc.files() == before, "it has written");
        anyhow::Ok(())
    };
    let set = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode));
    for path in [&shim, &etc.programs()] {
        set(path, 0o757)?;
        refused("users other than root can write it")?;
        set(path, 0o755)?;
    }
    let program = fs::read(&shim)?;
    fs::remove_file(&shim)?;
    refused("No such file or directory (os error 2); install the package again: the shim must be")?;
    kit::write_program(&shim, b"#!/bin/sh\necho something else\n")?;
    refused("prints \"something else\"")?;
    fs::remove_file(&shim)?;
    kit::write_program(&shim, &program)?;
    etc.with_restart(&words, always).await?.well()?;
    etc.run(&["check", "--strict"]).well()?;
    set(&shim, 0o757)?;
    let said = etc.run(&["check"]).refused("FAIL  shim: trust file ")?;
    ensure!(said.contains("so no pod of runtime handler \"runc-small\" can start"), "{said}");
    ensure!(said.contains("-> install it again") && said.matches("FAIL").count() == 1, "{said}");
    Ok(())
}

/// Promise: check_names_the_remedy.
async fn a_config_that_containerd_cannot_load_leaves_a_node_without_a_daemon(
    node: Arc<Node>,
) -> Result<()> {
    let (etc, _) = with_programs(node).await?;
    etc.node.stop_sandboxer().await?;
    etc.run(&["enable", "--shim-only"]).well()?;
    fs::write(etc.file(), fs::read_to_string(etc.file())? + "\n[")?;
    let checked = etc.run(&["check"]).refused("FAIL  containerd config: ")?;
    ensure!(checked.matches("FAIL").count() == 1 && !checked.contains("daemon"), "{checked}");
    Ok(())
}
