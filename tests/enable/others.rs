//! Commands on a node with the edits, the handlers and the files of others, and with the options of
//! an earlier command.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use kit::{Handler, Node, PodSpec};

use crate::cases::{EDIT, NodeCase, always, cases};
use crate::earlier::{containerd_is_older, enabled};
use crate::etc::Etc;

pub(crate) fn all() -> Vec<(&'static str, NodeCase)> {
    cases![
        disable_does_not_restart_for_the_edit_of_another,
        disable_does_not_restart_with_an_unread_edit,
        a_refusal_names_what_makes_the_handler_the_default,
        options_that_a_command_undoes_are_named,
        a_change_of_the_settings_alone_restarts_no_containerd,
        an_added_handler_is_not_removed,
        a_missing_config_file_is_refused,
        an_older_containerd_is_refused_with_the_remedy,
        a_file_that_the_running_containerd_does_not_use_is_refused,
        a_managed_file_is_reported,
        a_config_of_version_2_with_an_import_of_version_3,
        a_pod_of_a_removed_handler_of_another_is_named,
        selftest_names_the_option_for_a_network_that_fails,
    ]
}

fn edit(etc: &Etc) -> Result<()> {
    let edited = fs::read_to_string(etc.file())? + EDIT;
    Ok(fs::write(etc.file(), edited)?)
}

async fn disable_does_not_restart_for_the_edit_of_another(node: Arc<Node>) -> Result<()> {
    let etc = Etc::new(node, 3, "").await?;
    containerd_is_older().await;
    edit(&etc)?;
    let (before, pid) = (etc.files(), etc.node.containerd_pid()?);
    let said = etc.with_restart(&["disable"], always).await?.well()?;
    ensure!(said.contains("does not name this sandboxer"), "{said}");
    ensure!(etc.files() == before && etc.node.containerd_pid()? == pid, "{said}");
    Ok(())
}

async fn disable_does_not_restart_with_an_unread_edit(node: Arc<Node>) -> Result<()> {
    let etc = enabled(node).await?;
    containerd_is_older().await;
    edit(&etc)?;
    let (before, pid) = (etc.files(), etc.node.containerd_pid()?);
    let said = etc.with_restart(&["disable"], always).await?;
    let said = said.refused("has changed ")?;
    ensure!(etc.files() == before && etc.node.containerd_pid()? == pid, "{said}");
    // `config dump` does not show an import that does not exist.
    let text = fs::read_to_string(etc.file())?;
    fs::write(etc.file(), text.replacen("imports = [", "imports = [\"a\", ", 1))?;
    let said = etc.with_restart(&["disable"], always).await?;
    said.refused("/a, which does not exist: containerd does not start with it")?;
    fs::write(etc.file(), text)?;
    etc.restart().await?;
    etc.with_restart(&["disable"], always).await?.well()?;
    ensure!(fs::read_to_string(etc.file())?.ends_with(EDIT), "the edit is lost");
    Ok(())
}

async fn a_refusal_names_what_makes_the_handler_the_default(node: Arc<Node>) -> Result<()> {
    let etc = Etc::new(node, 3, "").await?;
    let words = ["enable", "--default", "--offline"];
    etc.with_restart(&words, always).await?.well()?;
    let pod = etc.node.run(Handler::Ours, PodSpec::new("web")).await?;
    let way = "`pause-sandboxer enable --restart --offline`";
    let said = etc.run(&["disable"]).refused("1 pod: default/web (")?;
    ensure!(said.contains(way), "{said}");
    let said = etc.run(&["disable", "--check"]).refused("pod: default/web (")?;
    let default = "default: runc-pause is containerd's default handler, for new pods: run ";
    ensure!(said.contains(&format!("{default}{way}")), "{said}");
    pod.remove().await
}

async fn options_that_a_command_undoes_are_named(node: Arc<Node>) -> Result<()> {
    let etc = Etc::new(node, 3, "").await?;
    let nvidia = "[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.nvidia]\n\
        runtime_type = 'io.containerd.runc.v2'\npod_annotations = ['io.test/*']\n\
        options = { BinaryName = '/opt/nvidia' }\n";
    let text = fs::read_to_string(etc.file())?;
    fs::write(etc.file(), format!("{text}\n{nvidia}"))?;
    let words = ["--default", "--offline", "--handler", "small", "--options-of", "nvidia"];
    etc.run(&[&["enable"], &words[..]].concat()).well()?;
    let binary = || -> Result<_> {
        let handler = etc.handler("small")?.context("no handler")?;
        Ok(handler["options"].get("BinaryName").and_then(|name| name.as_str()).map(str::to_owned))
    };
    ensure!(binary()?.as_deref() == Some("/opt/nvidia"), "{:?}", binary()?);
    // A setting that the handler has and the sandboxer's settings no longer have.
    fs::remove_file(etc.adopted())?;
    let command = format!("pause-sandboxer enable --restart {} adopts it", words.join(" "));
    let said = etc.run(&["check"]).text;
    ensure!(said.contains(&command), "{said}");
    // That command keeps all.
    let said = etc.run(&[&["enable"], &words[..]].concat()).well()?;
    ensure!(!said.contains("this command undoes"), "{said}");
    ensure!(binary()?.as_deref() == Some("/opt/nvidia"), "{said}");
    for words in [&["enable", "--dry-run"][..], &["enable"]] {
        let said = etc.run(words).well()?;
        for undone in ["--default", "--offline", "--handler small", "--options-of nvidia"] {
            let line = format!("this command undoes {undone} of the earlier `enable`");
            ensure!(said.contains(&line), "{line} is missing: {said}");
        }
    }
    let said = etc.run(&["enable"]).well()?;
    ensure!(!said.contains("this command undoes"), "{said}");
    Ok(())
}

async fn a_change_of_the_settings_alone_restarts_no_containerd(node: Arc<Node>) -> Result<()> {
    let etc = enabled(node).await?;
    fs::remove_file(etc.adopted())?;
    let pid = etc.node.containerd_pid()?;
    let said = etc.with_restart(&["enable"], always).await?.well()?;
    ensure!(said.contains("containerd has loaded runtime handler runc-pause"), "{said}");
    ensure!(etc.node.containerd_pid()? == pid, "containerd is restarted: {said}");
    let line = "\npod_annotations = [\"io.test/*\"]\n";
    let text = fs::read_to_string(etc.adopted())?;
    ensure!(text.contains(line), "it is not adopted: {text}");
    // The operator's file overrides it.
    let settings = etc.node.layout().sandboxer_config();
    let own = fs::read_to_string(&settings)? + "pod_annotations = ['io.other/*']\n";
    fs::write(settings, own)?;
    let before = etc.files();
    let said = etc.run(&["enable"]).refused("sets pod_annotations, but containerd needs")?;
    ensure!(etc.files() == before, "it has written: {said}");
    Ok(())
}

/// Its packaged file, to which an operator has added a handler, and that of `enable`.
async fn an_added_handler_is_not_removed(node: Arc<Node>) -> Result<()> {
    let etc = Etc::new(node, 3, "imports = [\"conf.d/*.toml\"]\n").await?;
    let added = "\n[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.mine]\n\
        runtime_type = 'io.containerd.runc.v2'\n";
    let packaged = Path::new(env!("CARGO_MANIFEST_DIR"));
    let packaged = packaged.join("packaging/containerd/pause-sandboxer.toml");
    let socket = etc.node.layout().sandboxer_socket().display().to_string();
    let packaged = fs::read_to_string(packaged)?;
    let packaged = packaged.replace("/run/pause-sandboxer/pause-sandboxer.sock", &socket);
    fs::create_dir_all(etc.drop_in().parent().context("no directory")?)?;
    fs::write(etc.drop_in(), &packaged)?;
    etc.run(&["enable"]).well()?;
    let written = fs::read_to_string(etc.drop_in())?;
    for text in [packaged, written] {
        fs::write(etc.drop_in(), text + added)?;
        let before = etc.files();
        for command in ["enable", "disable"] {
            etc.run(&[command]).refused("also defines runtime handler mine, which this command")?;
            ensure!(etc.files() == before, "{command} has written");
        }
    }
    Ok(())
}

async fn a_missing_config_file_is_refused(node: Arc<Node>) -> Result<()> {
    let etc = Etc::new(node, 3, "").await?;
    let (before, typo) = (etc.files(), etc.directory().join("confg.toml"));
    for command in ["enable", "disable"] {
        let words = [command, "--containerd-config", &typo.display().to_string()];
        etc.run(&words).refused("confg.toml does not exist, and no running containerd uses it")?;
        ensure!(etc.files() == before && !typo.exists(), "{command} has written");
    }
    Ok(())
}

async fn an_older_containerd_is_refused_with_the_remedy(node: Arc<Node>) -> Result<()> {
    let etc = Etc::new(node, 3, "").await?;
    let program = etc.node.layout().top.join("containerd-1");
    let version =
        b"#!/bin/sh\necho containerd github.com/containerd/containerd 1.7.27 05044ec0a9\n";
    kit::write_program(&program, version)?;
    let before = etc.files();
    let said = etc.run(&["enable", "--containerd", &program.display().to_string()]);
    let said = said.refused(
        "containerd: version 1.7.27 cannot use external sandboxers; upgrade containerd to 2.0 or \
         newer",
    )?;
    ensure!(etc.files() == before, "it has written: {said}");
    Ok(())
}

async fn a_file_that_the_running_containerd_does_not_use_is_refused(node: Arc<Node>) -> Result<()> {
    let etc = Etc::new(node, 3, "").await?;
    let other = etc.directory().join("other.toml");
    fs::copy(etc.file(), &other)?;
    let (before, other) = (etc.files(), other.display().to_string());
    for command in ["enable", "disable"] {
        let words = [command, "--containerd-config", &other];
        let said = etc.with_restart(&words, always).await?;
        let said = said.refused(&format!(", not {other}: omit --containerd-config"))?;
        let its = etc.node.layout().containerd_config();
        ensure!(said.contains(&its.display().to_string()), "{said}");
        ensure!(etc.files() == before, "it has written: {said}");
        // Where nothing is restarted the file may be that of the next start.
        etc.run(&[command, "--dry-run", "--containerd-config", &other]).well()?;
    }
    Ok(())
}

async fn a_managed_file_is_reported(node: Arc<Node>) -> Result<()> {
    let etc = Etc::new(node, 3, "# Ansible managed: config.toml.j2\n").await?;
    let said = etc.run(&["enable"]).well()?;
    ensure!(said.contains("\"Ansible managed: config.toml.j2\""), "{said}");
    ensure!(said.contains("conf.d/*.toml"), "the import is missing: {said}");
    let again = etc.run(&["enable"]).well()?;
    ensure!(!again.contains("Ansible"), "{again}");
    Ok(())
}

/// As the toolkit of a GPU writes it. containerd up to 2.2 then drops the settings of version 2.
async fn a_config_of_version_2_with_an_import_of_version_3(node: Arc<Node>) -> Result<()> {
    let etc = Etc::new(node, 2, "imports = [\"conf.d/*.toml\"]\n").await?;
    let file = etc.drop_in().with_file_name("99-nvidia.toml");
    fs::create_dir_all(file.parent().context("no directory")?)?;
    let handler = "version = 3\n\
        [plugins.'io.containerd.cri.v1.runtime']\nrestrict_oom_score_adj = true\n\
        [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.nvidia]\n\
        runtime_type = 'io.containerd.runc.v2'\n";
    fs::write(&file, handler)?;
    let (before, merged) = (etc.files(), etc.dump()?);
    for words in [&["enable"][..], &["enable", "--default", "--offline"]] {
        etc.run(words).well()?;
        let made = etc.handler("runc-pause")?.context("no handler")?;
        ensure!(made["sandboxer"].as_str() == Some("pause-sandboxer"), "{made}");
        ensure!(etc.handler("nvidia")?.is_some(), "the other handler is lost");
        let again = etc.run(words).well()?;
        ensure!(again.contains("no file needs a change"), "{again}");
    }
    etc.run(&["disable"]).well()?;
    ensure!(etc.files() == before && etc.dump()? == merged, "it is not undone");
    Ok(())
}

/// A pod of another's handler, whose file is gone: only that file gives the handler back.
async fn a_pod_of_a_removed_handler_of_another_is_named(node: Arc<Node>) -> Result<()> {
    let etc = Etc::new(node, 3, "imports = [\"conf.d/*.toml\"]\n").await?;
    let file = etc.drop_in().with_file_name("nvidia.toml");
    fs::create_dir_all(file.parent().context("no directory")?)?;
    let handler = "[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.nvidia]\n\
        runtime_type = 'io.containerd.runc.v2'\n";
    fs::write(&file, handler)?;
    etc.restart().await?;
    let home = etc.node.prepare(PodSpec::new("gpu"))?;
    let id = etc.node.cri().run_pod_sandbox(home.config(), "nvidia").await?;
    fs::remove_file(&file)?;
    let pid = etc.node.containerd_pid()?;
    for command in ["enable", "disable"] {
        let said = etc.with_restart(&[command], always).await?;
        let said = said.refused("1 pod: default/gpu (")?;
        ensure!(said.contains("runtime handler nvidia"), "{command}: {said}");
        ensure!(
            said.contains("restore the config file that defines it") && !said.contains("--handler"),
            "{said}"
        );
        ensure!(etc.node.containerd_pid()? == pid, "containerd is restarted: {said}");
    }
    etc.node.cri().stop_pod_sandbox(&id).await?;
    etc.node.cri().remove_pod_sandbox(&id).await?;
    home.clear()
}

/// A network plugin that looks for the object of the pod, as Calico's does.
const NEEDS_POD: &str = r#"#!/bin/sh
case $CNI_COMMAND in
ADD) echo '{"cniVersion":"1.0.0","code":999,"msg":"pods \"selftest\" not found"}'; exit 1 ;;
VERSION) echo '{"cniVersion":"1.0.0","supportedVersions":["1.0.0"]}' ;;
esac
"#;

async fn selftest_names_the_option_for_a_network_that_fails(node: Arc<Node>) -> Result<()> {
    node.start_sandboxer().await?;
    let cni = node.layout().top.join("cni");
    let plugin = cni.join("bin/needs-pod");
    fs::write(&plugin, NEEDS_POD)?;
    fs::set_permissions(&plugin, fs::Permissions::from_mode(0o755))?;
    let network = r#"{"cniVersion":"1.0.0","name":"needs-pod","plugins":[{"type":"needs-pod"}]}"#;
    fs::write(cni.join("conf/10-pods.conflist"), network)?;
    let etc = Etc { node };
    etc.restart().await?;
    let said = etc.run_beside(&["selftest"]).await?.refused("\"selftest\" not found")?;
    ensure!(said.contains("selftest --host-network"), "{said}");
    let said = etc.run_beside(&["selftest", "--host-network"]).await?.well()?;
    ensure!(said.contains("runc-pause: no leftover resources"), "{said}");
    Ok(())
}
