//! Commands where an earlier command, an operator or a stopped service has left the node in
//! another state than theirs.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use kit::{Handler, Node, PodSpec};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::cases::{HANDLER, NodeCase, always, cases};
use crate::etc::Etc;

pub(crate) fn all() -> Vec<(&'static str, NodeCase)> {
    cases![
        a_restart_needs_a_daemon,
        second_disable_fails_while_pods_use_handler,
        a_restart_that_fails_names_the_earlier_command,
        a_file_that_containerd_has_not_read_is_refused,
        a_handler_in_another_file_is_named,
        another_name_replaces_the_handler,
        a_pod_of_the_earlier_name_prevents_the_restart,
        what_disable_has_written_is_no_edit,
        pods_that_cannot_be_listed_restore_the_files,
        a_stopped_containerd_does_not_show_its_config_file,
        pods_are_unknown_until_cri_answers,
        a_signal_during_the_restart_restores_the_files,
        an_image_that_a_later_enable_does_not_name_is_removed,
    ]
}

/// Until a file that is written now is newer than a containerd that was started before: its start
/// is only known to two seconds.
pub(crate) async fn containerd_is_older() {
    tokio::time::sleep(Duration::from_secs(4)).await;
}

/// A node whose containerd has the handler, with a daemon.
pub(crate) async fn enabled(node: Arc<Node>) -> Result<Etc> {
    let etc = Etc::new(node, 3, "").await?;
    etc.with_restart(&["enable"], always).await?.well()?;
    Ok(etc)
}

async fn a_restart_needs_a_daemon(node: Arc<Node>) -> Result<()> {
    let etc = Etc::new(node, 3, "").await?;
    etc.node.stop_sandboxer().await?;
    let (before, pid) = (etc.files(), etc.node.containerd_pid()?);
    for words in [&["enable", "--default"][..], &["enable"]] {
        let said = etc.with_restart(words, always).await?.refused("cannot reach the daemon")?;
        ensure!(said.contains("no pod of this sandboxer starts"), "{said}");
        ensure!(etc.files() == before, "it has written: {said}");
        ensure!(etc.node.containerd_pid()? == pid, "containerd is another");
    }
    // The files are written for a later start of both.
    let said = etc.run(&["enable"]).well()?;
    ensure!(said.contains("cannot reach the daemon"), "{said}");
    etc.restart().await?;
    etc.node.start_sandboxer().await?;
    let said = etc.with_restart(&["enable", "--default"], always).await?.well()?;
    ensure!(!said.contains("cannot reach the daemon"), "{said}");
    Ok(())
}

async fn second_disable_fails_while_pods_use_handler(node: Arc<Node>) -> Result<()> {
    let etc = enabled(node).await?;
    containerd_is_older().await;
    etc.run(&["disable"]).well()?;
    let pid = etc.node.containerd_pid()?;
    let pod = etc.node.run(Handler::Ours, PodSpec::new("late")).await?;
    let said = etc.with_restart(&["disable"], always).await?.refused("1 pod: default/late (")?;
    ensure!(said.contains("they need runtime handler runc-pause"), "{said}");
    ensure!(etc.node.containerd_pid()? == pid, "containerd is restarted: {said}");
    pod.remove().await?;
    let said = etc.with_restart(&["disable"], always).await?.well()?;
    ensure!(said.contains("it no longer has runtime handler runc-pause"), "{said}");
    ensure!(etc.node.containerd_pid()? != pid, "containerd is not restarted: {said}");
    Ok(())
}

async fn a_restart_that_fails_names_the_earlier_command(node: Arc<Node>) -> Result<()> {
    let etc = Etc::new(node, 3, "").await?;
    let before = etc.files();
    containerd_is_older().await;
    etc.run(&["enable"]).well()?;
    let ran = etc.with_restart(&["enable"], |etc| !etc.drop_in().exists()).await?;
    let file = etc.node.layout().containerd_config().display().to_string();
    let said = ran.refused(&format!(
        "the handler was added by an earlier command: to remove it, run `pause-sandboxer disable \
         --handler runc-pause --restart --containerd-config {file}`"
    ))?;
    ensure!(!said.contains("all file changes are rolled back"), "{said}");
    let program = etc.node.parts().program("containerd").display().to_string();
    let words = ["disable", "--handler", HANDLER, "--containerd-config", &file];
    let words = [&words[..], &["--containerd", &program]].concat();
    etc.with_restart(&words, |etc| !etc.drop_in().exists()).await?.well()?;
    ensure!(etc.node.cri().version().await.is_ok(), "containerd does not answer");
    let left = etc.files();
    ensure!(left == before, "left: {:?}", left.keys());
    Ok(())
}

async fn a_file_that_containerd_has_not_read_is_refused(node: Arc<Node>) -> Result<()> {
    let etc = Etc::new(node, 3, "").await?;
    containerd_is_older().await;
    let edited = fs::read_to_string(etc.file())? + "# of an operator\n";
    fs::write(etc.file(), edited)?;
    let (before, pid) = (etc.files(), etc.node.containerd_pid()?);
    let refused = |ran: crate::etc::Ran| ran.refused("has changed ");
    refused(etc.with_restart(&["enable"], always).await?)?;
    ensure!(etc.files() == before, "{:?}", etc.files().keys());
    // An import that was added since does not hide the edit.
    etc.run(&["enable"]).well()?;
    refused(etc.with_restart(&["enable"], always).await?)?;
    ensure!(etc.node.containerd_pid()? == pid, "containerd is restarted");
    etc.run(&["disable"]).well()?;
    etc.restart().await?;
    containerd_is_older().await;
    // Changes of an earlier command are not edits.
    etc.run(&["enable"]).well()?;
    let said = etc.with_restart(&["enable"], always).await?.well()?;
    ensure!(said.contains("it has loaded runtime handler runc-pause"), "{said}");
    // Where there is nothing to restart for, the edit is not of interest.
    containerd_is_older().await;
    let edited = fs::read_to_string(etc.file())? + "# of an operator\n";
    fs::write(etc.file(), edited)?;
    let pid = etc.node.containerd_pid()?;
    let said = etc.with_restart(&["enable"], always).await?.well()?;
    ensure!(said.contains("containerd has loaded runtime handler runc-pause"), "{said}");
    ensure!(etc.node.containerd_pid()? == pid, "containerd is restarted");
    Ok(())
}

async fn a_pod_of_the_earlier_name_prevents_the_restart(node: Arc<Node>) -> Result<()> {
    let etc = enabled(node).await?;
    etc.run(&["enable", "--handler", "small"]).well()?;
    // containerd has not read that.
    let pod = etc.node.run(Handler::Ours, PodSpec::new("late")).await?;
    let (before, pid) = (etc.files(), etc.node.containerd_pid()?);
    let said = etc.with_restart(&["enable", "--handler", "small"], always).await?;
    let said = said.refused("1 pod: default/late (")?;
    ensure!(
        said.contains("this change removes runtime handler runc-pause, which is used by"),
        "{said}"
    );
    ensure!(etc.files() == before && etc.node.containerd_pid()? == pid, "{said}");
    pod.remove().await?;
    etc.with_restart(&["enable", "--handler", "small"], always).await?.well()?;
    Ok(())
}

async fn what_disable_has_written_is_no_edit(node: Arc<Node>) -> Result<()> {
    let etc = enabled(node).await?;
    containerd_is_older().await;
    etc.run(&["disable"]).well()?;
    let needs = etc.run(&["disable", "--check"]).well()?;
    let unread = format!("runtime handlers that its config no longer defines: [\"{HANDLER}\"]");
    ensure!(needs.contains("unread: ") && needs.contains(&unread), "{needs}");
    let said = etc.run(&["disable", "--dry-run"]).well()?;
    ensure!(
        said.contains("containerd still has runtime handlers loaded")
            && said.contains("runc-pause"),
        "{said}"
    );
    let pod = etc.node.run(Handler::Ours, PodSpec::new("late")).await?;
    // The way back, with the pod.
    etc.with_restart(&["enable"], always).await?.well()?;
    ensure!(pod.is_ready().await?, "the pod is not ready");
    pod.remove().await?;
    Ok(())
}

async fn a_handler_in_another_file_is_named(node: Arc<Node>) -> Result<()> {
    let etc = Etc::new(node, 3, "").await?;
    let text = fs::read_to_string(etc.file())?;
    let handler = "[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.own-pause]\n\
        runtime_type = 'io.containerd.runc.v2'\nsandboxer = 'pause-sandboxer'\n";
    fs::write(etc.file(), format!("{text}\n{handler}"))?;
    etc.run(&["enable"]).well()?;
    let before = etc.files();
    let said =
        etc.run(&["disable"]).refused("in runtime handler \"own-pause\": remove it there")?;
    ensure!(etc.files() == before, "the files are not as before: {said}");
    Ok(())
}

async fn another_name_replaces_the_handler(node: Arc<Node>) -> Result<()> {
    let etc = enabled(node).await?;
    let pod = etc.node.run(Handler::Ours, PodSpec::new("web")).await?;
    let before = etc.files();
    etc.run(&["enable", "--handler", "small"])
        .refused("this change removes runtime handler runc-pause")?;
    ensure!(etc.files() == before, "{:?}", etc.files().keys());
    pod.remove().await?;
    let ran = etc.with_restart(&["enable", "--handler", "small"], always).await?;
    let said = ran.well()?;
    ensure!(said.contains("it has loaded runtime handler small"), "{said}");
    ensure!(etc.handler("small")?.is_some(), "no handler: {said}");
    ensure!(etc.handler(HANDLER)?.is_none(), "the handler is left: {said}");
    // Without the old name containerd would not serve CRI.
    let default = "[plugins.'io.containerd.cri.v1.runtime'.containerd]\n\
        default_runtime_name = 'small'\n";
    fs::write(etc.drop_in().with_file_name("default.toml"), default)?;
    let before = etc.files();
    let said = etc.run(&["enable"]).refused("makes \"small\" the default handler")?;
    ensure!(etc.files() == before, "the files are not as before: {said}");
    Ok(())
}

async fn pods_that_cannot_be_listed_restore_the_files(node: Arc<Node>) -> Result<()> {
    let etc = Etc::new(node, 3, "").await?;
    etc.node.stop_sandboxer().await?;
    fs::remove_dir_all(etc.node.layout().sandboxer_state())?;
    etc.run(&["enable"]).well()?;
    let before = etc.files();
    // A file is in the place of the records once the drop-in is removed.
    let script = format!(
        "#!/bin/sh\ncase \"$*\" in *'config dump')\n[ -e {0} ] || {{ mkdir -p {1} && touch \
         {1}/sandboxes; }};;\nesac\nexec {2} \"$@\"\n",
        etc.drop_in().display(),
        etc.node.layout().sandboxer_state().display(),
        etc.node.parts().program("containerd").display()
    );
    let program = etc.node.layout().top.join("containerd-wrapper");
    fs::write(&program, script)?;
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
    let ran = etc.run(&["disable", "--containerd", &program.display().to_string()]);
    let said = ran.refused("read records of sandboxes")?;
    ensure!(
        said.contains("Not a directory") && said.contains("all file changes are rolled back"),
        "{said}"
    );
    ensure!(etc.files() == before, "left: {:?}", etc.files().keys());
    Ok(())
}

async fn pods_are_unknown_until_cri_answers(node: Arc<Node>) -> Result<()> {
    let etc = enabled(node).await?;
    let before = etc.files();
    let pid = Pid::from_raw(etc.node.containerd_pid()?.cast_signed());
    kit::machine::processes::stop(etc.node.containerd_pid()?).await?;
    let ran = etc.run_beside(&["disable"]).await;
    let checked = etc.run_beside(&["disable", "--check"]).await;
    kill(pid, Signal::SIGCONT)?;
    checked?.refused("CRI does not list the pods that may need the handler")?;
    let said = ran?.refused("CRI does not list the pods that need the handler")?;
    ensure!(etc.files() == before, "the files are not as before: {said}");
    // A containerd that does not run has no pods.
    etc.node.stop_containerd().await?;
    let program = etc.node.parts().program("containerd").display().to_string();
    let file = etc.node.layout().containerd_config().display().to_string();
    let words = ["disable", "--containerd", &program, "--containerd-config", &file];
    etc.run_beside(&words).await?.well()?;
    ensure!(!etc.drop_in().exists(), "the drop-in is left");
    etc.node.start_containerd().await?;
    // Without CRI there are none.
    etc.run(&["enable"]).well()?;
    let text = fs::read_to_string(etc.file())?;
    fs::write(etc.file(), format!("disabled_plugins = ['io.containerd.grpc.v1.cri']\n{text}"))?;
    let started = tokio::time::timeout(Duration::from_secs(5), etc.restart()).await;
    ensure!(started.is_err(), "CRI is not disabled: {started:?}");
    let said = etc.run(&["disable"]).well()?;
    ensure!(!etc.drop_in().exists(), "{said}");
    Ok(())
}

async fn a_signal_during_the_restart_restores_the_files(node: Arc<Node>) -> Result<()> {
    let etc = Etc::new(node, 3, "").await?;
    let before = etc.files();
    let [asked, log] = ["asked", "log"].map(|name| etc.node.layout().top.join(name));
    let script = format!(
        "touch {0} && echo >>{1} && while [ -e {0} ]; do sleep 0.05; done",
        asked.display(),
        log.display()
    );
    let mut command =
        etc.command(&["enable", "--restart", "--timeout", "60", "--restart-command", &script]);
    let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
    let pid = Pid::from_raw(child.id().cast_signed());
    let restarts = async |count| {
        kit::until("the restart is asked for", Duration::from_secs(30), async || {
            let lines = fs::read_to_string(&log).unwrap_or_default().lines().count();
            ensure!(lines == count, "{lines} times");
            Ok(())
        })
        .await
    };
    restarts(1).await?;
    ensure!(etc.drop_in().exists(), "the files are not written");
    etc.node.stop_containerd().await?;
    kill(pid, Signal::SIGTERM)?;
    restarts(2).await?;
    ensure!(etc.files() == before, "{:?}", etc.files().keys());
    // A terminal that is lost sends two.
    kill(pid, Signal::SIGTERM)?;
    etc.node.start_containerd().await?;
    fs::remove_file(&asked)?;
    #[allow(clippy::disallowed_methods, reason = "a test's own thread")]
    let output = tokio::task::spawn_blocking(move || child.wait_with_output()).await??;
    let said = String::from_utf8(output.stderr)?;
    ensure!(
        !output.status.success()
            && said.contains(
                "stopped by SIGTERM; all file changes are rolled back; containerd serves CRI with \
                 the restored files"
            ),
        "{said}"
    );
    ensure!(etc.files() == before, "{:?}", etc.files().keys());
    Ok(())
}

async fn an_image_that_a_later_enable_does_not_name_is_removed(node: Arc<Node>) -> Result<()> {
    let image = pause_sandboxer::oci_image::NAME;
    let etc = Etc::new(node, 3, "imports = [\"conf.d/*.toml\"]\n").await?;
    let is_there = async || anyhow::Ok(etc.node.cri().image_id(image).await?.is_some());
    etc.with_restart(&["enable", "--offline"], always).await?.well()?;
    etc.with_restart(&["enable"], always).await?.well()?;
    ensure!(is_there().await?, "enable has removed the image");
    // The operator has named it too.
    let file = etc.drop_in().with_file_name("image.toml");
    let named = "[plugins.'io.containerd.cri.v1.images'.pinned_images]\nsandbox = ";
    fs::write(&file, format!("{named}'{image}'\n"))?;
    etc.restart().await?;
    let said = etc.with_restart(&["disable"], always).await?.well()?;
    ensure!(is_there().await?, "an image that is named is removed: {said}");
    fs::remove_file(&file)?;
    etc.restart().await?;
    let said = etc.with_restart(&["disable"], always).await?.well()?;
    ensure!(said.contains(&format!("removed image {image}")), "{said}");
    ensure!(!is_there().await?, "the image is left: {said}");
    Ok(())
}

/// The default path may not be the file that it is started with.
async fn a_stopped_containerd_does_not_show_its_config_file(node: Arc<Node>) -> Result<()> {
    let etc = Etc::new(node, 3, "").await?;
    etc.with_restart(&["enable"], always).await?.well()?;
    etc.node.stop_containerd().await?;
    let program = etc.node.parts().program("containerd").display().to_string();
    let words = ["disable", "--restart", "--restart-command", "exit 7", "--containerd", &program];
    let said =
        etc.run(&words).refused("ADDRESS or --containerd-config FILE. Known addresses: /run/")?;
    let settings = etc.node.layout().sandboxer_config();
    let way = format!("or set containerd_address in {}", settings.display());
    ensure!(said.contains(&way), "{said}");
    // Without `--restart` too: its address is not the default one, and neither is its file.
    for words in [&["disable"][..], &["disable", "--check"]] {
        let said = etc.run(words).refused("so its config file is unknown")?;
        ensure!(etc.drop_in().exists(), "it is removed: {said}");
    }
    Ok(())
}
