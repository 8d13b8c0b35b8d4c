//! The promises of `enable` and `disable`.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;

use anyhow::{Result, ensure};
use kit::{ContainerSpec, Handler, Node, PodSpec};
use nix::fcntl::{Flock, FlockArg};
use nix::mount::{MntFlags, MsFlags, mount, umount2};

use crate::Running;
use crate::etc::{Etc, names};

pub(crate) type NodeCase = fn(Arc<Node>) -> Running;

macro_rules! cases {
    ($($case:ident),* $(,)?) => {
        vec![$((stringify!($case), (|node| Box::pin($case(node))) as NodeCase)),*]
    };
}
pub(crate) use cases;

pub(crate) fn all() -> Vec<(&'static str, NodeCase)> {
    cases![
        a_config_of_version_2,
        a_config_of_version_3,
        a_config_of_version_4,
        a_missing_import_is_refused,
        a_containerd_that_does_not_come_up_gets_its_files_back,
        pods_are_in_the_way_until_they_end,
        a_pod_that_comes_before_the_restart_keeps_its_handler,
        an_interrupted_command_is_completed_or_undone,
        what_others_can_write_and_a_second_command_are_refused,
        a_full_disk_leaves_nothing_half_written,
        selftest_runs_a_pod,
    ]
}

pub(crate) const HANDLER: &str = "runc-pause";

/// containerd comes up with whatever files.
pub(crate) fn always(_: &Etc) -> bool {
    true
}

/// There and back on a config file.
async fn there_and_back(etc: &Etc) -> Result<()> {
    let (before, merged) = (etc.files(), etc.dump()?);
    let dry = etc.run(&["enable", "--dry-run"]).well()?;
    ensure!(dry.contains("+[plugins.") && dry.contains(".runtimes.runc-pause]"), "{dry}");
    ensure!(etc.files() == before, "a dry run has written");

    let said = etc.with_restart(&["enable"], always).await?.well()?;
    ensure!(said.contains("it has loaded runtime handler runc-pause"), "{said}");
    let mut expected = etc.handler("runc")?.unwrap();
    let mut made = etc.handler(HANDLER)?.unwrap();
    for handler in [&mut expected, &mut made] {
        let handler = handler.as_table_mut().unwrap();
        handler.remove("sandboxer");
        handler.remove("disable_pause_image_pull");
        // A setting that is unset there is not written here.
        let options = handler["options"].as_table_mut().unwrap();
        options.retain(|_, value| !["\"\"", "0", "false"].contains(&value.to_string().as_str()));
    }
    ensure!(made == expected, "the handler has\n{made}\nand runc has\n{expected}");
    ensure!(made["pod_annotations"][0].as_str() == Some("io.test/*"), "{made}");
    // The sandboxer has the setting that it shares.
    let settings = fs::read_to_string(etc.adopted())?;
    ensure!(settings.contains("pod_annotations = [\"io.test/*\"]"), "{settings}");
    let checked = etc.run(&["check"]).text;
    ensure!(!checked.contains("FAIL  containerd") && !checked.contains("adopts it"), "{checked}");

    let (after, pid) = (etc.files(), etc.node.containerd_pid()?);
    let again = etc.with_restart(&["enable"], always).await?.well()?;
    ensure!(again.contains("no file needs a change"), "{again}");
    ensure!((etc.files(), etc.node.containerd_pid()?) == (after, pid), "the second has an effect");

    let complete = etc.files();
    let dry = etc.run(&["disable", "--dry-run"]).well()?;
    ensure!(dry.contains("-[plugins.") && dry.contains(".runtimes.runc-pause]"), "{dry}");
    ensure!(dry.contains("/pause-sandboxer.toml\n+++ /dev/null\n"), "{dry}");
    // The packages' scripts read this.
    let needs = etc.run(&["disable", "--check"]).well()?;
    let drop_in = etc.drop_in().display().to_string();
    for fact in [format!("runtime handler {HANDLER}"), format!("file {drop_in}")] {
        ensure!(needs.contains(&format!("config: {fact}\n")), "{fact}: {needs}");
    }
    ensure!(!needs.contains("default: ") && !needs.contains("pod: "), "{needs}");
    ensure!(etc.files() == complete, "a dry run has written");
    etc.with_restart(&["disable"], always).await?.well()?;
    let left = etc.files();
    ensure!(left == before, "left: {:?}", left.keys());
    ensure!(etc.dump()? == merged, "the merged config is another");
    let again = etc.with_restart(&["disable"], always).await?.well()?;
    ensure!(again.contains("does not name this sandboxer"), "{again}");
    let needs = etc.run(&["disable", "--check"]).well()?;
    ensure!(needs.is_empty(), "{needs}");
    Ok(())
}

/// Promise: enable_is_undone.
async fn a_config_of_version_2(node: Arc<Node>) -> Result<()> {
    there_and_back(&Etc::new(node, 2, "").await?).await
}

/// Promise: enable_is_undone.
async fn a_config_of_version_3(node: Arc<Node>) -> Result<()> {
    there_and_back(&Etc::new(node, 3, "").await?).await
}

/// From containerd 2.3 on; an older one does not start with it, so that here is nothing to enable.
///
/// Promise: enable_is_undone.
async fn a_config_of_version_4(node: Arc<Node>) -> Result<()> {
    let old =
        ["2.0.", "2.1.", "2.2."].iter().any(|series| node.parts().version().starts_with(series));
    if !old {
        return there_and_back(&Etc::new(node, 4, "").await?).await;
    }
    let etc = Etc::new(node, 3, "").await?;
    let text = fs::read_to_string(etc.file())?.replace("version = 3", "version = 4");
    fs::write(etc.file(), text)?;
    let before = etc.files();
    etc.run(&["enable"]).refused("config dump` fails")?;
    ensure!(etc.files() == before, "it has written");
    Ok(())
}

/// containerd does not start with it, which `config dump` does not show.
async fn a_missing_import_is_refused(node: Arc<Node>) -> Result<()> {
    let etc = Etc::new(node, 3, "").await?;
    let text = fs::read_to_string(etc.file())?;
    fs::write(etc.file(), format!("imports = ['a']\n{text}"))?;
    let before = etc.files();
    etc.run(&["enable"]).refused("/a, which does not exist: containerd does not start with it")?;
    ensure!(etc.files() == before, "it has written");
    Ok(())
}

/// Promise: enable_is_undone.
async fn a_containerd_that_does_not_come_up_gets_its_files_back(node: Arc<Node>) -> Result<()> {
    let etc = Etc::new(node, 3, "").await?;
    let before = etc.files();
    // It comes up with the old files only.
    let ran = etc.with_restart(&["enable", "--default"], |etc| !etc.drop_in().exists()).await?;
    let said = ran.refused("does not serve CRI within 20 s")?;
    ensure!(said.contains("all file changes are rolled back"), "{said}");
    ensure!(said.contains("serves CRI with the restored files"), "{said}");
    ensure!(etc.files() == before, "{:?}", etc.files().keys());
    ensure!(etc.node.cri().version().await.is_ok(), "containerd does not answer");
    ensure!(names(&etc.node.layout().top).iter().all(|name| name != "conf.d"), "a directory");
    // Neither does a restart that fails itself leave anything.
    let ran = etc.run(&["enable", "--restart", "--restart-command", "exit 7"]);
    ran.refused("`exit 7` fails: exit status: 7; all file changes are rolled back")?;
    ensure!(etc.files() == before, "{:?}", etc.files().keys());
    Ok(())
}

/// A line that an operator adds.
pub(crate) const EDIT: &str = "# of an operator\n";

/// Promise: removal_waits_for_pods.
async fn pods_are_in_the_way_until_they_end(node: Arc<Node>) -> Result<()> {
    let etc = Etc::new(node, 3, "").await?;
    etc.with_restart(&["enable", "--offline"], always).await?.well()?;
    let image = pause_sandboxer::oci_image::NAME;
    ensure!(etc.node.cri().image_id(image).await?.is_some(), "the image is not imported");
    let pod = etc.node.run(Handler::Ours, PodSpec::new("web")).await?;
    let container = pod.run(ContainerSpec::sleeping("main")).await?;
    ensure!(container.sh("hostname").await? == "web\n", "the container does not run");
    let before = etc.files();
    let said = etc.run(&["disable"]).refused("1 pod: default/web (")?;
    ensure!(said.contains("run the command again") && etc.files() == before, "{said}");
    // containerd must not start without a daemon that has pods.
    etc.node.stop_sandboxer().await?;
    etc.run(&["disable", "--check"]).refused("pod: default/web (")?;
    let said = etc.with_restart(&["enable"], always).await?;
    let said = said.refused("reports pods that it has as NotReady")?;
    ensure!(etc.files() == before, "the files are not as before: {said}");
    etc.node.start_sandboxer().await?;
    // The default handler has the image too.
    let plain = etc.node.run(Handler::Builtin, PodSpec::new("plain")).await?;
    plain.remove().await?;

    pod.remove().await?;
    etc.with_restart(&["disable"], always).await?.well()?;
    ensure!(!etc.drop_in().exists(), "the drop-in is left");
    ensure!(etc.node.cri().image_id(image).await?.is_none(), "the image is left");
    Ok(())
}

async fn a_pod_that_comes_before_the_restart_keeps_its_handler(node: Arc<Node>) -> Result<()> {
    let etc = Etc::new(node, 3, "").await?;
    etc.with_restart(&["enable"], always).await?.well()?;
    let before = etc.files();
    let asked = etc.node.layout().top.join("asked");
    let script = format!("touch {0} && while [ -e {0} ]; do sleep 0.05; done", asked.display());
    let words = ["disable", "--restart", "--timeout", "60", "--restart-command", &script];
    let restarts = async {
        let mut pods = Vec::new();
        for _ in 0..2 {
            let soon = std::time::Duration::from_secs(60);
            kit::until("the restart is asked for", soon, async || {
                ensure!(asked.exists(), "it is not");
                Ok(())
            })
            .await?;
            if pods.is_empty() {
                pods.push(etc.node.run(Handler::Ours, PodSpec::new("late")).await?);
            }
            etc.restart().await?;
            fs::remove_file(&asked)?;
        }
        anyhow::Ok(pods)
    };
    let (ran, pods) = tokio::join!(etc.run_beside(&words), restarts);
    let said = ran?.refused("1 pod: default/late (")?;
    ensure!(
        said.contains(
            "all file changes are rolled back; containerd serves CRI with the restored files"
        ),
        "{said}"
    );
    ensure!(etc.files() == before, "{:?}", etc.files().keys());
    for pod in pods? {
        pod.remove().await?;
    }
    Ok(())
}

/// A command that is killed leaves one of these.
///
/// Promise: enable_is_undone.
async fn an_interrupted_command_is_completed_or_undone(node: Arc<Node>) -> Result<()> {
    let etc = Etc::new(node, 3, "").await?;
    let before = etc.files();
    etc.run(&["enable"]).well()?;
    let complete = etc.files();
    let backup = etc.directory().join("config.toml.before-pause-sandboxer");
    for (with_backup, next) in [(true, "enable"), (false, "enable"), (true, "disable")] {
        // The drop-in is there, its import is not.
        fs::write(etc.file(), &before[&etc.file()])?;
        fs::write(etc.directory().join(".config.toml.pause-sandboxer"), "half")?;
        if !with_backup {
            fs::remove_file(&backup)?;
        }
        etc.run(&[next]).well()?;
        if next == "enable" {
            ensure!(etc.files() == complete, "{:?}", etc.files().keys());
        } else {
            ensure!(fs::read(etc.file())? == before[&etc.file()], "it is edited");
            ensure!(!etc.drop_in().exists() && !backup.exists(), "{:?}", etc.files().keys());
        }
    }
    Ok(())
}

/// Promise: only_files_of_root_count.
async fn what_others_can_write_and_a_second_command_are_refused(node: Arc<Node>) -> Result<()> {
    let etc = Etc::new(node, 3, "").await?;
    let before = etc.files();
    let set = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode));
    for path in [etc.directory(), etc.file()] {
        let mode = path.metadata()?.permissions().mode();
        set(&path, 0o777)?;
        etc.run(&["enable"]).refused("users other than root can write it")?;
        set(&path, mode)?;
    }
    let path = etc.node.layout().top.join(".pause-sandboxer.lock");
    let file = fs::File::create(&path)?;
    let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, e)| e)?;
    etc.run(&["enable"]).refused("another `pause-sandboxer enable` or `disable` is running")?;
    drop(lock);
    ensure!(etc.files() == before, "something has changed");
    // A handler of another sandboxer is left alone.
    etc.run(&["enable", "--handler", "runc"]).refused("is defined elsewhere")?;
    // Two at once: one of them may be refused, and the files are whole.
    let two = [(); 2].map(|()| {
        etc.command(&["enable"]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    });
    let ended = two.map(|mut child| child.wait().unwrap().success());
    ensure!(ended.contains(&true), "both failed");
    ensure!(!path.exists(), "the lock's file is left");
    ensure!(etc.handler(HANDLER)?.is_some(), "no handler");
    Ok(())
}

async fn a_full_disk_leaves_nothing_half_written(node: Arc<Node>) -> Result<()> {
    let etc = Etc::new(node, 3, "").await?;
    // The drop-in fits elsewhere; the config file's directory has no room for a second one.
    let text = fs::read(etc.file())?;
    let none: Option<&str> = None;
    let size = format!("mode=755,size={}", (text.len() / 4096 + 1) * 4096);
    let tmpfs = Some(size.as_str());
    mount(none, &etc.directory(), Some("tmpfs"), MsFlags::empty(), tmpfs)?;
    let done = (|| {
        fs::write(etc.file(), &text)?;
        let before = etc.files();
        etc.run(&["enable"]).refused("No space left on device")?;
        ensure!(etc.files() == before, "{:?}", etc.files().keys());
        anyhow::Ok(())
    })();
    umount2(&etc.directory(), MntFlags::MNT_DETACH)?;
    done
}

/// The pod runs, and nothing of it is left, also where a step fails or the test is interrupted.
///
/// Promise: selftest_leaves_nothing.
async fn selftest_runs_a_pod(node: Arc<Node>) -> Result<()> {
    node.start_sandboxer().await?;
    let etc = Etc { node: node.clone() };
    // The node's first pod makes directories that stay.
    etc.run_beside(&["selftest"]).await?.well()?;
    let before = node.snapshot()?;
    let said = etc.run_beside(&["selftest"]).await?.well()?;
    for part in ["STEP", "run the sandbox", "run a command in it", "remove the sandbox"] {
        ensure!(said.contains(part), "{part} is missing in {said}");
    }
    ensure!(said.contains("runc-pause: no leftover resources"), "{said}");
    node.settles_to(&before).await?;

    let restart = ["selftest", "--restart-sandboxer", "--restart-command", "exit 9"];
    etc.run_beside(&restart).await?.refused(
        "runtime handler runc-pause, step restart the sandboxer: `exit 9` fails: exit status: 9",
    )?;
    node.settles_to(&before).await?;

    // A new daemon adopts the pod.
    let asked = node.layout().top.join("asked");
    let script = format!("touch {0} && while [ -e {0} ]; do sleep 0.05; done", asked.display());
    let words = ["selftest", "--restart-sandboxer", "--restart-command", &script];
    let restarts = async {
        let soon = std::time::Duration::from_secs(30);
        kit::until("the restart is asked for", soon, async || {
            ensure!(asked.exists(), "it is not");
            Ok(())
        })
        .await?;
        node.stop_sandboxer().await?;
        node.start_sandboxer().await?;
        anyhow::Ok(fs::remove_file(&asked)?)
    };
    let (said, restarted) = tokio::join!(etc.run_beside(&words), restarts);
    restarted?;
    let said = said?.well()?;
    ensure!(said.contains("run a command again"), "{said}");
    node.settles_to(&before).await?;

    // In the midst of it.
    let hold = ["selftest", "--restart-sandboxer", "--restart-command", "sleep 60"];
    let child = etc.command(&hold).stderr(Stdio::piped()).spawn()?;
    kit::until("the pod runs", std::time::Duration::from_secs(30), async || {
        let pods = node.cri().list_pod_sandbox(Default::default()).await?;
        ensure!(!pods.is_empty(), "it does not");
        Ok(())
    })
    .await?;
    let pid = nix::unistd::Pid::from_raw(child.id().cast_signed());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM)?;
    #[allow(clippy::disallowed_methods, reason = "a test's own thread")]
    let output = tokio::task::spawn_blocking(move || child.wait_with_output()).await??;
    let said = String::from_utf8(output.stderr)?;
    ensure!(!output.status.success() && said.contains("stopped by SIGTERM"), "{said}");
    node.settles_to(&before).await
}
